"""Serves the page of a running training on this machine; the page polls for new data."""

import contextlib
import json
import sys
import threading
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from upweight.errors import UserError
from upweight.runs.files import COMPLETIONS, CONFIG, HEALTH, METRICS, RECORD, read_json
from upweight.runs.report.page import PageReader, page
from upweight.runs.report.run import folders_of, run_status

HERE = "127.0.0.1"
PORT = 8799  # default, if it is free
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class PageServer(ThreadingHTTPServer):
    """Answers with the page of some runs and its data, on 127.0.0.1; `serve_forever` starts it."""

    daemon_threads = True

    def __init__(self, folders: Sequence[Path], port: int) -> None:
        super().__init__((HERE, port), Handler)
        self.folders, self.reader = folders, PageReader(folders)
        self.reading, self.mark = threading.Lock(), 0
        self.seen: tuple[Any, ...] = ()
        self.data: dict[str, Any] = {}

    def newest(self) -> dict[str, Any]:
        """Return the data of the page; it is read again, with a new mark, when a file of the runs has changed."""
        with self.reading:
            seen = tuple(_folder_state(part) for folder in self.folders for part in folders_of(folder))
            if seen != self.seen:
                self.mark += 1
                self.data = {**self.reader.read(live=True), "mark": str(self.mark)}
                self.seen = seen
            return self.data

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a browser that closes the connection during an answer."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    """Serves two paths, only for local host names, as a protection against DNS rebinding."""

    server_version, sys_version = "upweight", ""

    def do_GET(self) -> None:
        server = self.server
        assert isinstance(server, PageServer)
        url, host = urlsplit(self.path), self.headers.get("Host", "")
        if (host.rpartition(":")[0] or host) not in (HERE, "localhost"):  # any port: a tunnel may begin at another
            self._send_answer(HTTPStatus.MISDIRECTED_REQUEST, "text/plain", f"This server answers to {HERE} only.\n")
        elif url.path == "/":
            self._send_answer(HTTPStatus.OK, "text/html", page(server.newest()))
        elif url.path == "/data.json":
            data = server.newest()
            if parse_qs(url.query).get("since") == [data["mark"]]:
                self._send_answer(HTTPStatus.NO_CONTENT, "application/json", "")
            else:
                self._send_answer(HTTPStatus.OK, "application/json", json.dumps(data, allow_nan=False))
        else:
            self._send_answer(HTTPStatus.NOT_FOUND, "text/plain", "There is nothing here.\n")

    def _send_answer(self, status: HTTPStatus, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log requests."""


def open_page_server(folders: Sequence[Path], port: int | None) -> PageServer:
    """Create a server at this port, or at a free one if `port` is None."""
    try:
        return PageServer(folders, PORT if port is None else port)
    except OSError as error:
        if port is not None:
            raise UserError(f"--port {port}: {error.strerror}. Name another, or leave it out.") from error
        return PageServer(folders, 0)


def _folder_state(folder: Path) -> tuple[Any, ...]:
    """Return values that change with the files of a run's folder and with the state of its process."""
    state: list[Any] = [folder, run_status(read_json(folder / RECORD), there=folder.is_dir(), logged=False)["state"]]
    for name in (METRICS, CONFIG, HEALTH, RECORD, COMPLETIONS):
        with contextlib.suppress(OSError):
            file = (folder / name).stat()
            state.append((name, file.st_mtime_ns, file.st_size))
    return tuple(state)
