"""A judge that needs no model: a loopback server that speaks as a judge does and compares numbers.

For dry runs of `llm_as_a_judge` and for tests:

    with LocalJudge() as judge:
        env = skyrl_gym.make("llm_as_a_judge", env_config={"base_url": judge.base_url}, extras=row)
"""

import json
import re
import sys
import threading
from decimal import Decimal, InvalidOperation
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from skyrl_gym.graders.math import extract_number

MAX_REQUEST_BYTES = 1 << 22

_FENCED = re.compile(r"<student-([0-9a-f]{16})>\n(.*)\n</student-\1>", re.DOTALL)
_REFERENCE = "The reference answer:\n"

HttpReply = tuple[int, dict[str, str], bytes]
"""Status, headers and body of a reply."""


class LocalJudge:
    """Judge server for tests: serves `POST {base_url}/chat/completions` on a free port of 127.0.0.1 between `start` and
    `close`.

    Scores 1 if the last number of the student's text equals the last number of the reference. It reads the default
    prompt. A subclass may say something else in `verdict`, or send anything at all in `answer`.
    """

    def __init__(self) -> None:
        self.num_requests = 0
        self._lock = threading.Lock()
        self._server: _Server | None = None

    @property
    def base_url(self) -> str:
        assert self._server is not None, "LocalJudge has not started"
        return f"http://127.0.0.1:{self._server.server_port}/v1"

    def start(self) -> None:
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.judge = self
        threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, name="local-judge", daemon=True
        ).start()

    def close(self) -> None:
        """May be called more than once."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def answer(self, request: dict[str, Any]) -> HttpReply:
        """Return the whole reply to a chat completion request. Called from many threads."""
        with self._lock:
            self.num_requests += 1
            number = self.num_requests
        text = self.verdict(request["messages"][-1]["content"])
        completion = {
            "id": f"judgement-{number}",
            "object": "chat.completion",
            "model": request.get("model", ""),
            "choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}],
        }
        return 200, {"Content-Type": "application/json"}, json.dumps(completion).encode()

    def verdict(self, prompt: str) -> str:
        """Compute the judge's reply to a prompt."""
        student = _FENCED.search(prompt)
        if student is None or _REFERENCE not in prompt[: student.start()]:
            return "There is nothing to grade."
        reference = prompt[: student.start()].rpartition(_REFERENCE)[2]
        found, expected = _extract_last_number(student[2]), _extract_last_number(reference)
        is_right = expected is not None and found == expected
        return f"The reference is {expected}, the student says {found}.\n### Final Score: {int(is_right)}"


def _extract_last_number(text: str) -> Decimal | None:
    try:
        return Decimal((extract_number(text, strict=False) or "").rstrip("."))
    except InvalidOperation:
        return None


class _Server(ThreadingHTTPServer):
    judge: LocalJudge
    # Requests under way do not keep the process from ending.
    daemon_threads = True
    # A batch of graders connects at once; the default of 5 would refuse some of them.
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A disconnected client is not an error."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    # HTTP/1.1 keeps connections open between requests.
    protocol_version = "HTTP/1.1"
    # Seconds a connection may be silent: its thread ends then.
    timeout = 30
    server: _Server

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        # The length is checked before the body is read into memory.
        if not self.path.endswith("/chat/completions") or length > MAX_REQUEST_BYTES:
            self.send_error(404 if length <= MAX_REQUEST_BYTES else 413)
            return
        try:
            request = json.loads(self.rfile.read(length))
            status, headers, body = self.server.judge.answer(request)
        except (ValueError, LookupError, TypeError):
            self.send_error(400)
            return
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: standard error belongs to the program around it."""
