"""A small OpenAI-compatible server whose model is a function."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class ChatServer:
    """Serves `answer(messages) -> text` at `base_url`, on the loopback interface.

    `answer` may return (status, body) instead, or (status, body, headers), to misbehave.
    """

    def __init__(self, answer, port=0, api_key=None):
        self.answer = answer
        self.api_key = api_key
        self.requests = []
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def do_GET(self):
                self.reply(200, {"data": []})

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with outer._lock:
                    outer.requests.append(body)
                said = outer.answer(body["messages"])
                if isinstance(said, tuple):
                    self.reply(*said)
                else:
                    self.reply(200, completion(said))

            def reply(self, status, body, headers=None):
                if outer.api_key and self.headers.get("Authorization") != f"Bearer {outer.api_key}":
                    status, body = 401, {"error": "no such key"}
                content = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                for name, value in {**(headers or {}), "Content-Length": str(len(content))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

            def handle_error(self, request, client_address):
                pass  # clients of these tests leave in the middle of things

        self._server = Server(("127.0.0.1", port), Handler)
        self.port = self._server.server_address[1]
        self.base_url = f"http://127.0.0.1:{self.port}/v1"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._thread.join(5)
        self._server.server_close()


def completion(text, finish_reason="stop", **choice):
    message = {"role": "assistant", "content": text}
    return {
        "choices": [{"message": message, "finish_reason": finish_reason, **choice}],
        "usage": {"prompt_tokens": 10, "completion_tokens": 3},
    }
