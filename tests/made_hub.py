"""A hub that takes commits over HTTP as the real one does."""

import base64
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Hub(BaseHTTPRequestHandler):
    """Repositories that are made, and the files that commits put into them."""

    made: list[dict]
    files: dict[str, dict[str, bytes]]  # by branch
    tokens: set

    def do_GET(self):
        self.answer({"name": "me", "type": "user"} if self.path.endswith("whoami-v2") else {"siblings": []})

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.tokens.add(self.headers["Authorization"])
        address = f"http://127.0.0.1:{self.server.server_port}/me/model"
        if self.path == "/api/repos/create":
            self.made.append(json.loads(body))
            self.answer({"url": address, "name": "me/model"})
        elif "/preupload/" in self.path:
            paths = [file["path"] for file in json.loads(body)["files"]]
            self.answer({"files": [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in paths]})
        elif "/commit/" in self.path:
            branch = self.files.setdefault(self.path.rpartition("/")[2], {})
            lines = [json.loads(line) for line in body.splitlines()]
            branch |= {
                line["value"]["path"]: base64.b64decode(line["value"]["content"])
                for line in lines
                if line["key"] == "file"
            }
            self.answer({"commitUrl": f"{address}/commit/1", "commitOid": "1" * 40, "success": True})
        else:
            self.answer({})

    def answer(self, content):
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@contextmanager
def opened_hub():
    """A hub at a free port; what it was sent is in its `RequestHandlerClass`."""
    handler = type("OneHub", (Hub,), {"made": [], "files": {}, "tokens": set()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
