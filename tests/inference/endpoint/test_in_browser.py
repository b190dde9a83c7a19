"""The chat page in a real browser, where there is one: a question is answered by both models, on two widths."""

import threading
import time

import pytest

from made_adapters import write_run
from made_browser import BROWSER, browser_page
from upweight.cli.export.serve import _load
from upweight.cli.inputs import find_trained
from upweight.inference.endpoint.server import open_endpoint

pytestmark = pytest.mark.skipif(BROWSER is None, reason="there is no Chromium here")
ASK = """
document.getElementById("tokens").value = 6;
document.getElementById("temperature").value = 0;
document.getElementById("text").value = "<b>hello</b>";
document.getElementById("ask").requestSubmit();
"""
ANSWERS = "[...document.querySelectorAll('.turn:not(.user)')].map((one) => one.textContent)"


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    models = _load(find_trained(str(write_run(tmp_path_factory.mktemp("serve") / "my run")), []), True)
    with open_endpoint(models, {"temperature": 0.7, "max_tokens": 5}, 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()


@pytest.mark.parametrize("width", [1280, 390])
def test_both_models_answer_and_nothing_is_logged(address, width, tmp_path):
    with browser_page(tmp_path / "profile") as page:
        page.open(address, width)
        assert page.value("document.getElementById('title').textContent") == "my-run beside base"
        page.value(ASK)
        until = time.monotonic() + 60
        while page.value("asking") or len(page.value(ANSWERS)) < 2:
            assert time.monotonic() < until, page.value("document.body.innerText")
            time.sleep(0.2)
        answers = page.value(ANSWERS)
        assert len(answers) == 2
        assert answers[0] != answers[1]
        assert page.value("document.querySelectorAll('.turn.error').length") == 0
        assert page.value("document.querySelectorAll('.turn.user b').length") == 0, "a question stays text"
        assert page.value("document.documentElement.scrollWidth") <= width
        assert page.value("document.documentElement.scrollHeight") <= 900, "the form stays in sight"
        tops = page.value("columns.map((column) => column.section.getBoundingClientRect().top)")
        assert (tops[0] == tops[1]) == (width > 700), "side by side, or one below the other where it is narrow"
        page.value("document.getElementById('reset').click()")
        assert page.value(ANSWERS) == []
        assert page.problems == []
