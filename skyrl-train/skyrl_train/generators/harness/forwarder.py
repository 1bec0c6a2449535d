"""Program inside a sandbox without network: forwards 127.0.0.1:PORT to a Unix socket while it runs a command.

    python -I -S -c SOURCE SOCKET PORT COMMAND ...

Exits with the command's exit status; with `UNREACHABLE` if the socket does not respond, or `NOT_STARTED` if the command
does not exist. Its source is passed to the sandbox's Python, so it imports only the standard library.
"""

import contextlib
import socket
import subprocess
import sys
import threading

UNREACHABLE, NOT_STARTED = 97, 127


def main(path: str, port: str, *command: str) -> int:
    """Forward while the command runs. Return the exit status."""
    try:
        _open_connection(path).close()
    except OSError as error:
        print(f"the endpoint's socket cannot be reached: {error}", file=sys.stderr)
        return UNREACHABLE
    server = socket.create_server(("127.0.0.1", int(port)), backlog=128)
    threading.Thread(target=_accept, args=(server, path), daemon=True).start()
    try:
        status = subprocess.run(command, check=False).returncode
    except OSError as error:
        print(error, file=sys.stderr)
        return NOT_STARTED
    return status if status >= 0 else 128 - status


def _open_connection(path: str) -> socket.socket:
    far = socket.socket(socket.AF_UNIX)
    far.connect(path)
    return far


def _accept(server: socket.socket, path: str) -> None:
    while True:
        near, _ = server.accept()
        near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            far = _open_connection(path)
        except OSError:  # the endpoint is closing: the client sees a closed connection
            near.close()
            continue
        for source, target in ((near, far), (far, near)):
            threading.Thread(target=_pump, args=(source, target), daemon=True).start()


def _pump(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
