"""Name and address of this machine for other processes of the run."""

import socket

_address = "127.0.0.1"


def set_node_address(address: str) -> None:
    """Record the address under which other machines reach this one (a cluster knows it; alone it is loopback)."""
    global _address
    _address = address


def node_address() -> str:
    """Return this machine's address as its peers see it."""
    return _address


def node_name() -> str:
    """Return this machine's name and address, for people."""
    return f"{socket.gethostname()} ({_address})"
