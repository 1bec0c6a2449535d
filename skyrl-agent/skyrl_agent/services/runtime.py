"""HTTP server of runtimes for agents on other machines.

python -m skyrl_agent.services.runtime [--host 0.0.0.0] [--port 8190]

Clients can run any program in its runtimes, so a public address requires a token.
"""

import argparse
import ipaddress
import os
import socket
import sys
from dataclasses import fields
from typing import get_args

from skyrl_agent.runtimes.base import RuntimeKind
from skyrl_agent.services.hosting import HostSettings

TOKEN_VARIABLE = "SKYRL_AGENT_RUNTIME_TOKEN"
IDLE_CONNECTION_SECONDS = 30
"""Longer than clients keep theirs, so that it is they who close it."""
STOP_SECONDS = 5


def listen(host: str, port: int) -> socket.socket:
    """Open the listening socket. Raises OSError. Without IPPROTO_TCP each reply on a reused connection takes 40 ms
    longer.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError:
        listener.close()
        raise
    return listener


def is_loopback(host: str) -> bool:
    """Return whether a host name refers to this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def main(arguments: list[str] | None = None) -> int:
    """Run the command line."""
    defaults = {field.name: field.default for field in fields(HostSettings)}
    parser = argparse.ArgumentParser(prog="skyrl_agent.services.runtime", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8190, help="0: any free one; the address is printed")
    kinds = [kind for kind in get_args(RuntimeKind) if kind != "remote"]
    parser.add_argument("--kind", choices=kinds, default=defaults["kind"])
    for name in ("max_runtimes", "max_body_bytes", "max_output_bytes"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=defaults[name], metavar="N")
    parser.add_argument(
        "--token-env", default=TOKEN_VARIABLE, help=f"environment variable with the token ({TOKEN_VARIABLE})"
    )
    options = vars(parser.parse_args(arguments))
    host, port, token = options.pop("host"), options.pop("port"), os.environ.get(options.pop("token_env"))
    if not token and not is_loopback(host):
        parser.error(
            f"--host {host} accepts connections from other machines, so a token is required: set {TOKEN_VARIABLE}"
        )
    return serve(HostSettings(**options), host, port, token or None)


def serve(settings: HostSettings, host: str, port: int, token: str | None) -> int:
    """Serve until SIGTERM or SIGINT, then close all runtimes."""
    import uvicorn

    from skyrl_agent.services.runtime_app import create_app

    try:
        listener = listen(host, port)
    except OSError as error:
        print(f"error: cannot listen on {host}:{port}: {error}", file=sys.stderr)
        return 1
    with listener:
        config = uvicorn.Config(
            create_app(settings, token),
            loop="asyncio",
            access_log=False,
            log_level="warning",
            timeout_keep_alive=IDLE_CONNECTION_SECONDS,
            timeout_graceful_shutdown=STOP_SECONDS,
        )
        listener.listen(config.backlog)
        name = f"[{host}]" if ":" in host else host
        print(f"runtimes at http://{name}:{listener.getsockname()[1]}", flush=True)
        uvicorn.Server(config).run(sockets=[listener])
    return 0


if __name__ == "__main__":
    sys.exit(main())
