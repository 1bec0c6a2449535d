"""Endpoints, one file per group."""
