"""Endpoints of the protocol: each reads a request, calls the service and writes the response."""
