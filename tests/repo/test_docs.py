"""What the documents say exists: keys, commands, files."""

import re
from pathlib import Path

import pytest
from typer.main import get_command

from upweight.cli.app import app
from upweight.config import load_config
from upweight.config.schema import markdown

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "AGENTS.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_key_reference_is_current():
    assert (ROOT / "docs" / "config.md").read_text() == markdown(), "run `make docs`"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_commands_in_the_docs_exist(page):
    commands = vars(get_command(app))["commands"]
    shown = re.findall(r"^(?:\$ )?upweight ([a-z][a-z-]+)", page.read_text(), flags=re.MULTILINE)
    assert not set(shown) - set(commands)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_make_targets_in_the_docs_exist(page):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert not set(re.findall(r"`make ([a-z-]+)`", page.read_text())) - targets


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.name)
def test_every_example_validates(example):
    load_config(example)


def test_agents_page_stays_short():
    assert (ROOT / "AGENTS.md").read_text().count("\n") <= 80
