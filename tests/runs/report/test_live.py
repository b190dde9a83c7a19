"""The live page: two addresses, this machine only."""

import http.client
import json
import threading

import pytest

from made_reports import as_lines, metrics, write_run
from upweight.errors import UserError
from upweight.runs.report.live import open_page_server


@pytest.fixture
def watched(tmp_path):
    """A server of a run that is not there yet, and a function that asks it."""
    folder = tmp_path / "run"
    server = open_page_server([folder], 0)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()

    def ask(path, host=None, method="GET"):
        connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
        connection.request(method, path, headers={"Host": host or f"127.0.0.1:{server.server_port}"})
        answer = connection.getresponse()
        found = (answer.status, dict(answer.headers), answer.read().decode())
        connection.close()
        return found

    yield folder, ask, server
    server.shutdown()
    server.server_close()
    thread.join(10)


def test_a_run_is_followed_from_before_its_beginning(watched):
    folder, ask, _ = watched
    status, headers, text = ask("/")
    assert status == 200
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    assert "connect-src &#x27;self&#x27;" in text
    first = json.loads(ask("/data.json")[2])
    assert (first["live"], first["runs"][0]["state"]) == (True, "missing")
    assert ask(f"/data.json?since={first['mark']}")[0] == 204
    write_run(folder)
    status, _, text = ask(f"/data.json?since={first['mark']}")
    second = json.loads(text)
    assert status == 200
    assert second["runs"][0]["step"] == 10
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(as_lines([metrics(11)]) + '{"step": 12, "los')
    third = json.loads(ask(f"/data.json?since={second['mark']}")[2])
    assert third["runs"][0]["step"] == 11


def test_only_the_page_and_its_data_are_served(watched):
    folder, ask, _ = watched
    write_run(folder)
    for path in ("/config.yaml", "/../run/config.yaml", "/..%2f..%2fetc/passwd", "//etc/passwd", "/data.json/x"):
        status, headers, text = ask(path)
        assert (status, text) == (404, "There is nothing here.\n")
        assert headers["X-Content-Type-Options"] == "nosniff"
    assert ask("/", method="POST")[0] == 501


def test_other_names_are_turned_away(watched):
    _, ask, server = watched
    for host in ("evil.example", f"evil.example:{server.server_port}", "127.0.0.1.evil.example:80", "[::1", ":80"):
        assert ask("/data.json", host=host)[0] == 421
    for host in (f"localhost:{server.server_port}", "localhost:8888", "127.0.0.1:1", "127.0.0.1"):  # through a tunnel
        assert ask("/", host=host)[0] == 200
    assert server.server_address[0] == "127.0.0.1"


def test_a_port_that_is_taken(watched, tmp_path):
    _, _, server = watched
    with pytest.raises(UserError, match=f"--port {server.server_port}: "):
        open_page_server([tmp_path], server.server_port)
