"""A release sets its version everywhere, and a wheel that lacks something is refused."""

import shutil
import zipfile
from pathlib import Path

import pytest
from release.release import problems_of, set_version, wheel_problems

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tree(tmp_path):
    for name in ("pyproject.toml", "CHANGELOG.md", "src/upweight/version.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def test_the_version_is_set_in_every_place(tree):
    assert problems_of(tree, "9.0.0") == []
    set_version(tree, "9.0.0", "2030-01-02")
    assert 'version = "9.0.0"' in (tree / "pyproject.toml").read_text()
    assert '__version__ = "9.0.0"' in (tree / "src" / "upweight" / "version.py").read_text()
    changelog = (tree / "CHANGELOG.md").read_text()
    assert "## 9.0.0 (2030-01-02)\n" in changelog
    assert "## Unreleased" not in changelog
    assert "Unreleased" in problems_of(tree, "9.0.1")[0], "nothing new to release"


def test_other_versions_are_refused(tree):
    assert "three numbers" in problems_of(tree, "next")[0]
    assert "not newer" in problems_of(tree, "0.0.1")[0]
    (tree / "src" / "upweight" / "version.py").write_text('__version__ = "0.0.5"\n')
    assert "versions differ" in problems_of(tree, "9.0.0")[0]


def test_a_wheel_without_a_page_is_refused(tmp_path):
    wheel = tmp_path / "upweight-9.0.0-py3-none-any.whl"
    package = ROOT / "src"
    files = [path for path in (package / "upweight").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    for left_out in ([], ["chat.js"]):
        with zipfile.ZipFile(wheel, "w") as made:
            made.writestr("upweight-9.0.0.dist-info/METADATA", "Name: upweight\nVersion: 9.0.0\n")
            made.writestr(
                "upweight-9.0.0.dist-info/entry_points.txt", "[console_scripts]\nupweight = upweight.cli.app:main\n"
            )
            for path in files:
                if path.name not in left_out:
                    made.write(path, str(path.relative_to(package)))
        problems = wheel_problems(wheel, "9.0.0")
        assert [problem.endswith("chat.js") for problem in problems] == [True] * len(left_out)
