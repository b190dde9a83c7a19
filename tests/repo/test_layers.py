"""Each package imports only from the packages to its right in the one line that orders them."""

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[2] / "src" / "upweight"
LINE = (
    "cli > doctor > train > rollout > environments > rewards > export > inference > data > sampler > engine > models > "
    "serve > runs > config > callbacks > row_rules > methods > types"
)
ORDER = LINE.split(" > ")
BOTTOM = {
    "types",
    "settings",
    "errors",
    "log",
    "files",
    "image_files",
    "processes",
    "event_loop",
    "user_modules",
    "watchdog",
    "heartbeat",
    "lazy_imports",
    "version",
}
MOST_FILES = 16  # beside __init__.py; more want rooms


def package_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported_packages(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the layer"
            names |= {node.module or ""} if node.module != "upweight" else {f"upweight.{a.name}" for a in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return {name.split(".")[1] for name in names if name.startswith("upweight.")}


def may_import(package: str) -> set[str]:
    if package in BOTTOM:
        return BOTTOM
    return set(ORDER[ORDER.index(package) :]) | BOTTOM


def test_every_package_imports_only_to_its_right():
    for path in ROOT.rglob("*.py"):
        package = package_of(path)
        if package in ("__init__", "__main__"):
            continue
        assert package in ORDER or package in BOTTOM, f"{path}: '{package}' is not in the layer order"
        stray = imported_packages(path) - may_import(package)
        assert not stray, f"{path} may not import {sorted(stray)}"


def test_the_order_is_the_one_in_the_design():
    design = (ROOT.parents[1] / "docs" / "design.md").read_text()
    assert LINE in design


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")


def imported_modules(path: Path, known: set[str]) -> set[str]:
    """The modules of ours that a file imports, at its top or inside functions, for types too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name if name in known else str(node.module) for name in inside}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names & known


def test_modules_import_each_other_without_a_circle():
    paths = {module_of(path): path for path in ROOT.rglob("*.py")}
    graph = {name: imported_modules(path, set(paths)) for name, path in paths.items()}
    TopologicalSorter(graph).prepare()  # a CycleError names the circle


def test_a_folder_holds_what_one_sentence_says():
    for folder in {path.parent for path in ROOT.rglob("*.py")} - {ROOT}:
        sentence = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
        assert re.fullmatch(r"(?:(?!\. ).)+\.", sentence), f"{folder}: {sentence!r} is not one sentence"
        files = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
        assert len(files) <= MOST_FILES + (folder == ROOT / "train"), f"{folder} has {len(files)} files"
