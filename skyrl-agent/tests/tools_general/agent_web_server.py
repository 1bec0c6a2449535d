"""A small web server whose answers are a function, for tests of what asks one."""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from skyrl_agent.tools.base import ToolContext


@dataclass
class Asked:
    """A request."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any = None


Answer = Any
"""(status, body) or (status, body, headers), where a body is text, bytes or JSON; "hang", "drop" or "trickle"."""


@dataclass
class WebServer:
    url: str
    asked: list[Asked] = field(default_factory=list)
    stopping: threading.Event = field(default_factory=threading.Event)


@contextlib.contextmanager
def web_server(answer: Callable[[Asked], Answer]) -> Iterator[WebServer]:
    """Serve on the loopback interface, at a free port."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            self.answer(None)

        def do_POST(self) -> None:
            self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        do_DELETE, do_PUT = do_GET, do_POST

        def answer(self, body: Any) -> None:
            request = Asked(self.command, self.path, {k.lower(): v for k, v in self.headers.items()}, body)
            running.asked.append(request)
            match answer(request):
                case "hang":
                    running.stopping.wait(20)
                    self.close_connection = True
                case "drop":
                    self.close_connection = True
                case "trickle":
                    self.send_response(200)
                    self.send_header("Content-Length", "1000")
                    self.end_headers()
                    while not running.stopping.wait(0.05):
                        self.wfile.write(b" ")
                case status, content, *headers:
                    self.reply(status, content, headers[0] if headers else {})

        def reply(self, status: int, content: Any, headers: dict[str, str]) -> None:
            kind = "application/json" if isinstance(content, dict | list) else "text/html; charset=utf-8"
            text = json.dumps(content) if isinstance(content, dict | list) else content
            data = text if isinstance(text, bytes) else text.encode()
            self.send_response(status)
            for name, value in {"Content-Type": kind, "Content-Length": str(len(data)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

        def handle_error(self, request: Any, client_address: Any) -> None:
            pass  # a client that has gone is what some of these stories are about

    with Server(("127.0.0.1", 0), Handler) as server:
        running = WebServer(f"http://127.0.0.1:{server.server_address[1]}")
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield running
        finally:
            running.stopping.set()
            server.shutdown()
            thread.join(5)


def unused_url() -> str:
    with web_server(lambda asked: (200, "")) as server:
        return server.url


def context_of(**fields: Any) -> ToolContext:
    return ToolContext(**{"trajectory_id": "t1", "row": {}, **fields})


def completion(text: str) -> dict[str, Any]:
    """Make a response of OpenAI's `POST /chat/completions`."""
    return {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}], "usage": {}}
