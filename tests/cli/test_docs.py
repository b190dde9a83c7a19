"""The documentation in the terminal."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from upweight.cli import docs
from upweight.cli.app import app
from upweight.errors import UserError

ROOT = Path(__file__).parents[2]


def printed(*arguments):
    done = CliRunner().invoke(app, ["docs", *arguments], catch_exceptions=False)
    assert done.exit_code == 0
    return done.stdout


def test_pages_are_listed_printed_and_searched():
    folder = ROOT / "docs"
    pages = {file.relative_to(folder).with_suffix("").as_posix() for file in folder.rglob("*.md")}
    assert {line.split()[2] for line in printed().splitlines()} == pages
    assert printed("grpo") == printed("docs/grpo.md") == (ROOT / "docs" / "grpo.md").read_text()
    assert all("num_generations" in line for line in printed("--search", "num_generations").splitlines())
    assert printed("grpo", "--search", "num_generations").startswith("grpo (")


def test_a_page_that_is_not_there():
    with pytest.raises(UserError, match=r"no page 'gropo'. Did you mean 'grpo'"):
        docs.docs(["gropo"])
    with pytest.raises(UserError, match="no page holds 'xyzzy'"):
        docs.docs(search="xyzzy")
    with pytest.raises(UserError, match=r"the page 'memory' does not hold 'xyzzy'\..*upweight docs --search 'xyzzy'"):
        docs.docs(["memory"], search="xyzzy")


def test_a_word_that_is_no_page_is_searched_for():
    lines = printed("truncated").splitlines()
    assert lines[0] == "no page is called 'truncated'; these lines hold it:"
    assert lines[1].startswith("troubleshooting (")
    assert "trl.max_completion_length" in lines[1]
    with pytest.raises(UserError, match=r"no page 'xyzzy'.*`upweight docs --search WORDS` searches them all"):
        docs.docs(["xyzzy"])


def test_several_words_that_are_near_a_page_are_searched_for():
    said = printed("out", "of", "memory")
    assert said.startswith("no page is called 'out of memory'; these lines hold it:\ntroubleshooting (")
    assert printed("getting", "started") == printed("getting-started")


def test_a_page_is_found_in_any_case_and_by_its_beginning():
    assert printed("GRPO") == printed("grpo")
    assert printed("trouble").startswith("# Troubleshooting")
    assert printed("disk", "full") == printed("disk full")
    assert max(map(len, printed("NaN").splitlines())) <= docs.LONGEST + 100


def test_words_are_searched_in_any_order_and_remedies_come_first():
    assert "answers are cut (*truncated*)" in printed("--search", "cut off").splitlines()[0]
    pages = [line.split(" (")[0] for line in printed("--search", "rate learning").splitlines()]
    assert pages[0] == "troubleshooting"
    assert pages.index("sft") < pages.index("api") < pages.index("peers")


def test_the_pages_of_a_wheel_come_first(tmp_path, monkeypatch):
    (tmp_path / "index.md").write_text("# Mine\n")
    monkeypatch.setattr(docs, "PLACES", (tmp_path, *docs.PLACES))
    assert printed() == "upweight docs index             Mine\n"


def test_messages_name_pages_as_a_command_that_everyone_has():
    named = re.compile(r"docs/[\w-]+\.md")
    files = [file for file in (ROOT / "src" / "upweight").rglob("*.py") if file.name != "docs.py"]
    texts = {str(file): named.findall(file.read_text()) for file in files if "`docs/" not in file.read_text()}
    assert not {file: pages for file, pages in texts.items() if pages}
    for file in files:
        for page in re.findall(r"upweight docs ([\w/-]+)", file.read_text()):
            assert (ROOT / "docs" / f"{page}.md").is_file(), (file, page)


def test_several_words_need_no_quotes_to_be_searched_for():
    assert printed("--search", "learning", "rate") == printed("--search", "learning rate")


def test_a_page_fits_its_window_but_for_code():
    code = "```bash\nupweight docs --search something\n```"
    page = f"# Title\n\nWords that go on for a while.\n\n{code}\n| a | b | c d e f |\n"
    assert docs.in_width(page, 16).splitlines() == [
        "# Title",
        "",
        "Words that go on",
        "for a while.",
        "",
        "```bash",
        "upweight docs --search something",
        "```",
        "| a | b | c d e",
        "  f |",
    ]
