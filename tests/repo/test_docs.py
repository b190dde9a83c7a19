"""What the documents say exists: keys, commands, files."""

import re
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from upweight.cli.app import app
from upweight.config import load_config
from upweight.config.config import blocks, general_keys, method_keys
from upweight.config.peers import OTHER_NAMES, REASONS, RENAMED, SATISFIED
from upweight.config.sections.data import DatasetSpec, UserFormat
from upweight.config.sections.rollout import GymDataset

ROOT = Path(__file__).parents[2]
INNER = {*DatasetSpec.model_fields, *UserFormat.model_fields, *GymDataset.model_fields}
PAGES = [
    *(ROOT / name for name in ("README.md", "AGENTS.md", "examples/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_commands_in_the_docs_exist(page):
    commands = vars(get_command(app))["commands"]
    named = re.findall(r"^(?:\$ )?upweight ([a-z][a-z-]+)", page.read_text(), flags=re.MULTILINE)
    assert not set(named) - set(commands)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_options_in_the_docs_exist(page):
    commands = vars(get_command(app))["commands"]
    text = page.read_text().replace("\\\n", " ")
    for name, rest in re.findall(r"upweight ([a-z][a-z-]+)([^\n`|&#;]*)", text):
        if name in commands:
            options = {name for one in commands[name].params for name in (*one.opts, *one.secondary_opts)}
            used = re.findall(r"(?<=\s)--[a-z][a-z-]*", rest.partition(" -- ")[0])
            assert set(used) <= options | {"--help"}, name


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_measurements_in_the_docs_exist(page):
    named = re.findall(r"python -m bench\.(\w+)", page.read_text())
    assert not [name for name in named if not (ROOT / "bench" / f"{name}.py").exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_make_targets_in_the_docs_exist(page):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert not set(re.findall(r"`make ([a-z-]+)`", page.read_text())) - targets


@pytest.mark.parametrize("example", sorted((ROOT / "examples").rglob("*.yaml")), ids=lambda path: str(path)[-40:])
def test_every_example_validates(example):
    load_config(example)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
    inside = [link for link in links if "://" not in link]
    assert not [link for link in inside if not (page.parent / link).exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_a_list_begins_after_an_empty_line(page):  # the site shows it as a part of the text above it otherwise
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert not re.findall(r"^(?![-\d#| ]|$).*\n(?:-|\d+\.) .*", prose, flags=re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_keys_in_the_docs_exist(page):
    known = {*general_keys(), *method_keys(), *SATISFIED, *REASONS, *RENAMED, *OTHER_NAMES}
    starts = tuple(f"{block}." for block in blocks())
    named = re.findall(r"`([a-z_]+\.[a-z_]+)(?::[^`]*)?`", page.read_text())
    assert not {key for key in named if key.startswith(starts)} - known


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_tables_of_keys_name_keys(page):
    known = {*general_keys(), *method_keys(), *SATISFIED, *REASONS, *RENAMED, *OTHER_NAMES}
    for table in re.findall(r"^\| keys? \|.*\n\|[-|]+\n((?:\|.*\n)+)", page.read_text(), flags=re.MULTILINE):
        cells = re.findall(r"^\| (`.*?) \|", table, flags=re.MULTILINE)
        named = {name for cell in cells for name in re.findall(r"`([a-z_.0-9]+)(?::[^`]*)?`", cell)}
        assert not named - known - INNER - set(blocks())


def shown(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)


@pytest.fixture
def without_mine():
    """Forget the module `mine`, which every page has anew."""
    yield
    sys.modules.pop("mine", None)


@pytest.mark.usefixtures("without_mine")
@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_configs_in_the_docs_are_right(page, tmp_path):
    """Each is a config, or a part of one; code that it names as `mine` is the page's, the first of a name."""
    code = [block for block in shown(page, "python") if re.search("^(def|class) ", block, flags=re.MULTILINE)]
    (tmp_path / "mine.py").write_text("\n".join(reversed(code)))
    for number, text in enumerate(shown(page, "yaml")):
        file = tmp_path / f"config_{number}.yaml"
        file.write_text(text)
        load_config(file, fragment=True)


def test_every_example_is_listed():
    listed = (ROOT / "examples" / "README.md").read_text()
    assert not [path.name for path in (ROOT / "examples").rglob("*.yaml") if path.name not in listed]


def test_every_page_has_a_place_on_the_site():
    nav = (ROOT / "mkdocs.yml").read_text()
    assert not [page.name for page in (ROOT / "docs").glob("*.md") if f" {page.name}\n" not in nav]


def test_agents_page_stays_short():
    assert (ROOT / "AGENTS.md").read_text().count("\n") <= 80
