"""A small web server on this machine that stands in for PyPI and for Hugging Face."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Request:
    method: str
    path: str
    headers: dict[str, str]


@dataclass
class Answer:
    """`stall_after` bytes of the body, nothing more is sent until the site closes."""

    body: bytes = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    stall_after: int | None = None


@dataclass
class Site:
    url: str
    requests: list[Request]
    stalled: threading.Event
    """Set once an answer has stalled."""


@contextmanager
def serve(answer: Callable[[Request], Answer]) -> Iterator[Site]:
    """Range requests are honoured."""
    closing = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            request = Request(
                self.command, self.path, {k.lower(): v for k, v in self.headers.items()}
            )
            site.requests.append(request)
            reply = answer(request)
            body = reply.body
            if (wanted := request.headers.get("range")) and reply.status == 200:
                start = int(wanted.removeprefix("bytes=").split("-")[0])
                reply.status = 206
                reply.headers["Content-Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
                body = body[start:]
            self.send_response(reply.status)
            for name, value in ({"Content-Length": str(len(body))} | reply.headers).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "HEAD":
                return
            if reply.stall_after is not None:
                self.wfile.write(body[: reply.stall_after])
                self.wfile.flush()
                site.stalled.set()
                closing.wait()
            else:
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    site = Site(f"http://127.0.0.1:{server.server_port}", [], threading.Event())
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield site
    finally:
        closing.set()
        server.shutdown()
        server.server_close()
