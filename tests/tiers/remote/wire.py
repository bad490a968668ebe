"""A wire to an HTTP server that fails on request: it stands between a client and the real server.

It also answers ranges with 206, which `rclone serve s3` does not.
"""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PATIENCE_S, ENDLESS_BYTES = 20.0, 1 << 40


class Wire(ThreadingHTTPServer):
    """`plan` holds the faults of the next requests by method, the first one first.

    Faults: "drop" (the connection ends), "truncate" (half of the body), "corrupt" (one bit of it),
    "unavailable" (503) or another status, "duplicate" (the server gets the request twice), "slow"
    (50 ms), "hang" (until `release`), "endless" (the body goes on), "continued" (a listing says
    that it does).
    """

    daemon_threads = True

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.server_host = f"127.0.0.1:{port}"
        self.plan: dict[str, list[str]] = {}
        self.requests: list[tuple[str, str]] = []  # method, range
        self.gate, self.page = threading.Event(), b""

    def release(self) -> None:
        self.gate.set()

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that gave up are nothing to talk about."""


class Handler(BaseHTTPRequestHandler):
    server: Wire

    def handle_any(self) -> None:
        plan, method = self.server.plan.get(self.command), self.command
        self.server.requests.append((method, self.headers.get("Range", "")))
        fault = plan.pop(0) if plan else ""
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.close_connection = True
        if fault == "hang":
            assert self.server.gate.wait(PATIENCE_S)
        if fault == "slow":
            time.sleep(0.05)
        if fault == "unavailable" or fault.isdigit():
            self.send_response_only(int(fault) if fault.isdigit() else 503)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        status, headers, answer = self.forward(body)
        if fault == "duplicate":
            status, headers, answer = self.forward(body)
        if fault == "drop":
            return
        if fault == "endless":
            headers["Content-Length"] = str(ENDLESS_BYTES)
            answer += bytes(1 << 22)  # more than anybody asked for
        if fault == "continued":
            more = b"<NextContinuationToken>x</NextContinuationToken><IsTruncated>true<"
            self.server.page = self.server.page or answer.replace(b"<IsTruncated>false<", more)
            status, headers["Content-Length"] = 200, str(len(answer := self.server.page))
        self.send_response_only(206 if "Content-Range" in headers else status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if fault == "truncate":
            answer = answer[: len(answer) // 2]
        if fault == "corrupt":
            spoiled = bytearray(answer)
            spoiled[len(spoiled) // 2] ^= 4
            answer = bytes(spoiled)
        self.wfile.write(answer)

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = handle_any

    def forward(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        upstream = http.client.HTTPConnection(self.server.server_host, timeout=PATIENCE_S)
        try:
            upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                upstream.putheader(name, value)
            upstream.endheaders(body)
            response = upstream.getresponse()
            answer = response.read()
        finally:
            upstream.close()
        kept = ("content-range", "content-type", "etag", "last-modified", "content-length")
        headers = {n: v for n, v in response.getheaders() if n.lower() in kept}
        if self.command != "HEAD":
            headers["Content-Length"] = str(len(answer))
        return response.status, headers | {"Connection": "close"}, answer

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""


@contextmanager
def wire_to(port: int) -> Iterator[Wire]:
    """A wire to a server on the loopback, taken down at the end."""
    wire = Wire(port)
    thread = threading.Thread(target=wire.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield wire
    finally:
        wire.release()
        wire.shutdown()
        wire.server_close()
        thread.join(PATIENCE_S)
