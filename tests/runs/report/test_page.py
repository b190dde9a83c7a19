"""The page itself: whole, safe, and of the right runs."""

import base64
import hashlib
import json
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest

from made_reports import as_lines, completion, write_run
from upweight.errors import UserError
from upweight.runs.report.page import PageReader, page, write_report


class Outline(HTMLParser):
    """Elements, their attributes and what scripts hold."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.scripts, self.inside = [], [], None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self.inside = tag
        if tag in ("script", "style"):
            self.scripts.append((tag, dict(attrs), ""))

    def handle_data(self, data):
        if self.inside in ("script", "style"):
            tag, attrs, text = self.scripts[-1]
            self.scripts[-1] = (tag, attrs, text + data)

    def handle_endtag(self, tag):
        self.inside = None


def data_of(text):
    (found,) = [body for _, attrs, body in Outline(text).scripts if attrs.get("id") == "data"]
    return json.loads(found)


def test_the_page_loads_nothing_and_runs_only_its_own_scripts(tmp_path):
    outline = Outline(write_report([write_run(tmp_path / "run")]).read_text())
    assert not [attrs for _, attrs in outline.elements if {"src", "srcset"} & set(attrs)]
    assert all(attrs["href"].startswith(("#", "data:")) for _, attrs in outline.elements if "href" in attrs)
    (policy,) = [attrs["content"] for _, attrs in outline.elements if attrs.get("http-equiv")]
    assert policy.startswith("default-src 'none'; ")
    assert "connect-src 'none'" in policy
    assert "unsafe" not in policy
    code = [(tag, text) for tag, attrs, text in outline.scripts if attrs.get("type") != "application/json"]
    assert len(code) == 9
    for tag, text in code:
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in re.search(rf"{tag}-src ([^;]*)", policy)[1]


def test_nothing_that_a_model_writes_breaks_out(tmp_path):
    nasty = "</script><script>alert(1)</script><!--TITLE--><img src=x onerror=alert(1)>\u2028\ud800"
    run = write_run(tmp_path / "run")
    (run / "completions" / "step_00001.jsonl").write_text(as_lines([completion(1, completion=nasty, note=nasty)]))
    text = write_report([run]).read_text()
    assert len(Outline(text).scripts) == 10
    assert not [tag for tag, _ in Outline(text).elements if tag == "img"]
    (first,) = [part for part in data_of(text)["runs"][0]["completions"] if (part["set"], part["step"]) == ("", 1)]
    assert first["rows"][0]["completion"][0]["content"] == nasty.replace("\ud800", "?")


def test_a_name_of_a_folder_is_text(tmp_path):
    folder = write_run(tmp_path / "<b>&run")
    text = write_report([folder]).read_text()
    assert "<title>&lt;b&gt;&amp;run · Upweight</title>" in text
    assert data_of(text)["title"] == "<b>&run"


def test_assets_set_no_markup_from_data():
    text = page({"title": "", "runs": []})
    own = [body for _, attrs, body in Outline(text).scripts if not attrs][2:]
    assert own
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", "".join(own))


def test_one_run_several_runs_and_stages(tmp_path):
    one, other = (write_run(tmp_path / name) for name in ("one", "other"))
    assert write_report([one]) == one / "report.html"
    assert write_report([one, other]) == one / "comparison.html"
    data = data_of((one / "comparison.html").read_text())
    assert (data["kind"], [run["name"] for run in data["runs"]]) == ("comparison", ["one", "other"])
    staged = tmp_path / "staged"
    for name in ("stage-1-a", "stage-2-b"):
        write_run(staged / name)
    data = PageReader([staged]).read()
    assert (data["kind"], data["title"], len(data["runs"])) == ("stages", "staged", 2)


def test_names_of_folders_that_say_nothing_get_help(tmp_path):
    runs = [write_run(tmp_path / name / "out") for name in ("a", "b")]
    assert [run["name"] for run in PageReader(runs).read()["runs"]] == ["a/out", "b/out"]
    assert PageReader(runs[:1]).read()["title"] == "a/out"


def test_empty_and_missing_folders_have_no_page_to_write(tmp_path):
    assert PageReader([tmp_path]).read()["runs"][0]["state"] == "empty"  # as `watch` shows a run that has not begun
    with pytest.raises(UserError, match="neither a config nor the folder of a run"):
        write_report([tmp_path])
    with pytest.raises(UserError, match="no such run"):
        write_report([tmp_path / "absent"])
    assert not list(tmp_path.iterdir())


def test_reading_a_run_needs_no_torch():
    imports = "import sys, upweight.runs.report.live, upweight.cli.report"
    code = f"{imports}; print({{'torch', 'transformers'}} & set(sys.modules))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == "set()"
