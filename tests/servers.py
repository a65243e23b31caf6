"""Servers of this machine alone, on free ports, that behave as bad as real ones; a test ends those it began."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

HOST = "127.0.0.1"


@contextlib.contextmanager
def silent() -> Iterator[int]:
    """The port of a server that lets everybody connect and never says a word."""
    with socket.create_server((HOST, 0), backlog=16) as server:
        yield server.getsockname()[1]


@contextlib.contextmanager
def deaf() -> Iterator[int]:
    """A port of UDP to which nobody sends."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as held:
        held.bind((HOST, 0))
        port = held.getsockname()[1]
    yield port


class Stalling:
    """A TCP server that sends ``first`` to who connects, then ``rest`` once ``go`` is set, and hangs up."""

    def __init__(self, first: bytes, rest: bytes = b"") -> None:
        self.go = threading.Event()
        self.sent = threading.Event()
        """``first`` is on its way."""
        self._parts = (first, rest)
        self._server = socket.create_server((HOST, 0))
        self.port: int = self._server.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, name="server")

    def __enter__(self) -> Stalling:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.go.set()
        with contextlib.suppress(OSError), socket.create_connection((HOST, self.port), 1):
            pass  # nobody may ever have come
        self._thread.join()
        self._server.close()

    def _serve(self) -> None:
        connection, _ = self._server.accept()
        with connection, contextlib.suppress(OSError):
            connection.sendall(self._parts[0])
            self.sent.set()
            self.go.wait(60)
            connection.sendall(self._parts[1])


@contextlib.contextmanager
def http(handler: type[BaseHTTPRequestHandler] | partial[BaseHTTPRequestHandler]) -> Iterator[int]:
    """The port of a server whose requests ``handler`` answers."""
    server = ThreadingHTTPServer((HOST, 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=partial(server.serve_forever, 0.02), name="server")
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextlib.contextmanager
def files(folder: Path) -> Iterator[int]:
    """The port of a server of the files in ``folder``."""

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *words: object) -> None:
            pass

    with http(partial(Handler, directory=str(folder))) as port:
        yield port


@contextlib.contextmanager
def refusing(status: int) -> Iterator[int]:
    """The port of a server that answers every request with ``status`` and no more."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *words: object) -> None:
            pass

    with http(Handler) as port:
        yield port
