"""A server that misbehaves as servers do."""

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class ScriptedServer(ThreadingHTTPServer):
    """Server that answers each request with the next reply of a script, and further ones with the last.

    An entry is (status, body) or (status, body, headers), or "drop" (closes the connection), "hang" (2 s without a
    word), "trickle" (a byte each 0.1 s).
    """

    daemon_threads = True
    request_queue_size = 512

    def __init__(self, *script) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.script = list(script)
        self.requests: list[dict] = []
        self.stopping = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/retrieve"

    def handle_error(self, request, client_address) -> None:
        """A client that has gone is what some of these stories are about."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: ScriptedServer

    def do_POST(self) -> None:
        self.server.requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        script = self.server.script
        match script.pop(0) if len(script) > 1 else script[0]:
            case "drop":
                self.close_connection = True
            case "hang":
                self.server.stopping.wait(2)
                self.close_connection = True
            case "trickle":
                self.send_response(200)
                self.send_header("Content-Length", "100")
                self.end_headers()
                for _ in range(100):
                    if self.server.stopping.wait(0.1):
                        return
                    self.wfile.write(b" ")
            case status, body, *headers:
                text = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                for name, value in headers[0].items() if headers else ():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(text)

    def log_message(self, format: str, *args) -> None:
        pass


@contextlib.contextmanager
def serving(*script) -> Iterator[ScriptedServer]:
    with ScriptedServer(*script) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.stopping.set()
            server.shutdown()
            thread.join(5)


def unused_url() -> str:
    with ScriptedServer((200, {})) as server:
        return server.url
