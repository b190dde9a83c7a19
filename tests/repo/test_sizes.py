"""Files stay under 400 lines, functions under 60, and nothing hides behind a vague name."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src").rglob("*.py"))


def test_files_are_short():
    long = {str(path): lines for path in SOURCES if (lines := path.read_text().count("\n")) > 400}
    assert not long


def test_functions_are_short():
    long = [
        f"{path}:{node.lineno} {node.name}"
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (node.end_lineno or 0) - node.lineno >= 60
    ]
    assert not long


def test_names_say_something():
    vague = {"utils", "util", "helpers", "common", "misc", "manager"}
    assert not [path for path in SOURCES if vague & set(path.with_suffix("").parts)]


def test_nothing_reads_outside_the_project():
    outside = "../" + "shared"
    files = [path for folder in ("src", "tests", "bench", "docs", "examples") for path in (ROOT / folder).rglob("*.*")]
    assert not [path for path in files if path.suffix in {".py", ".md", ".yaml"} and outside in path.read_text()]
