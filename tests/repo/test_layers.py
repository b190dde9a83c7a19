"""Each package imports only from the packages to its right in the one line that orders them."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2] / "src" / "upweight"
LINE = (
    "cli > doctor > train > rollout > environments > rewards > inference > data > sampler > engine > models > serve > "
    "runs > config > methods > types"
)
ORDER = LINE.split(" > ")
BOTTOM = {"types", "settings", "errors", "log", "files", "processes", "event_loop", "user_modules"}


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
        stray = imported_packages(path) - may_import(package) - {"__version__"}
        assert not stray, f"{path} may not import {sorted(stray)}"


def test_the_order_is_the_one_in_the_design():
    design = (ROOT.parents[1] / "docs" / "design.md").read_text()
    assert LINE in design
