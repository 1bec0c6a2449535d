"""Name and address of this machine for other processes of the run."""

import socket

_address = "127.0.0.1"


def set_node_address(address: str) -> None:
    """Record the address under which other machines reach this one (known in a cluster; loopback otherwise)."""
    global _address
    _address = address


def get_node_address() -> str:
    """Return this machine's address for its peers."""
    return _address


def get_node_name() -> str:
    """Return this machine's name and address, for messages."""
    return f"{socket.gethostname()} ({_address})"
