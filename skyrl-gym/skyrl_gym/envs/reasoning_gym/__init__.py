"""Procedural reasoning tasks: the generators of the reasoning-gym package."""
