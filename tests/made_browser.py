"""A real browser for tests, driven over its debugging protocol: what a page logs, how wide and how tall it is."""

import contextlib
import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
QUIET = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
         "--disable-sync", "--no-first-run", "--disable-dev-shm-usage")  # fmt: skip
PROBLEMS = ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled")


class Page:
    """One tab."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket, self.sent, self.problems = socket, 0, []

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self.sent += 1
        self.socket.send(json.dumps({"id": self.sent, "method": method, "params": params}))
        while True:
            answer = json.loads(self.socket.recv(timeout=60))
            if answer.get("method") in PROBLEMS:
                self.problems.append(answer["params"])
            if answer.get("id") == self.sent:
                return answer.get("result", answer)

    def value(self, expression: str) -> Any:
        """What a line of JavaScript gives."""
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def open(self, address: str, width: int) -> None:
        mobile = width < 600
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=mobile)
        self.call("Page.navigate", url=address)
        until = time.monotonic() + 60
        while self.value("document.readyState") != "complete" or self.value("location.href") == "about:blank":
            assert time.monotonic() < until, f"{address} does not load"
            time.sleep(0.2)
        time.sleep(0.5)  # what is drawn after that


@contextlib.contextmanager
def browser_page(profile: Path) -> Iterator[Page]:
    """A tab of a browser that ends with the test."""
    assert BROWSER is not None
    command = [BROWSER, *QUIET, f"--user-data-dir={profile}", "--remote-debugging-port=0", "about:blank"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        line = next(line for line in process.stderr if "DevTools listening on" in line)
        port = line.rsplit(":", 1)[1].split("/")[0]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json", timeout=60) as answer:
            tab = next(tab for tab in json.load(answer) if tab["type"] == "page")
        with connect(tab["webSocketDebuggerUrl"], max_size=None) as socket:
            page = Page(socket)
            for domain in ("Runtime", "Log", "Page"):
                page.call(f"{domain}.enable")
            yield page
    finally:
        process.terminate()
        process.wait(30)
