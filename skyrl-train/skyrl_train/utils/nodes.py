"""Nodes of a run: their names."""

import socket

import ray


def node_name() -> str:
    """Return this machine's name and its address as Ray knows it, for people."""
    return f"{socket.gethostname()} ({ray.util.get_node_ip_address()})"
