"""`make release VERSION=x.y.z`: sets the version and the changelog's heading, builds, and looks into the wheel."""

import datetime
import re
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
VERSIONED = {
    "pyproject.toml": r'^version = "(.+)"$',
    "src/upweight/version.py": r'^__version__ = "(.+)"$',
}
UNRELEASED = "## Unreleased\n"


def main(version: str) -> None:
    """Prepare a release, or say why it cannot be."""
    problems = [*problems_of(ROOT, version), *uncommitted(ROOT)]
    if problems:
        sys.exit("\n".join(problems))
    set_version(ROOT, version, datetime.datetime.now(datetime.UTC).date().isoformat())
    dist = ROOT / "dist"
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-d", str(dist)], cwd=ROOT, check=True)
    wheel = dist / f"upweight-{version}-py3-none-any.whl"
    if problems := wheel_problems(wheel, version):
        sys.exit("\n".join(problems))
    print(f"{wheel} is whole. To publish it:")
    tag = f'git tag -a v{version} -m "Release {version}"'  # annotated: --follow-tags pushes no others
    print(f'  git commit -am "Release {version}" && {tag} && git push --follow-tags')
    print(f"  python -m pip install twine && python -m twine upload dist/upweight-{version}*")


def problems_of(root: Path, version: str) -> list[str]:
    """Return why the version cannot follow that of the sources."""
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        return [f"VERSION={version}: expected three numbers, as in 0.2.0"]
    known = {name: _version_in(root / name, pattern) for name, pattern in VERSIONED.items()}
    problems = []
    if len(set(known.values())) > 1:
        problems.append(f"versions differ: {known}")
    if any(_numbers(version) <= _numbers(now) for now in known.values()):
        problems.append(f"VERSION={version}: is not newer than {', '.join(sorted(set(known.values())))}")
    section = (root / "CHANGELOG.md").read_text(encoding="utf-8").partition(UNRELEASED)[2].partition("\n## ")[0]
    if not section.strip():
        problems.append("CHANGELOG.md: the section 'Unreleased' is missing or empty")
    return problems


def uncommitted(root: Path) -> list[str]:
    """Return a problem where the working tree has changes."""
    changed = subprocess.run(["git", "status", "--porcelain"], cwd=root, capture_output=True, text=True, check=True)
    return [f"commit these first:\n{changed.stdout}"] if changed.stdout.strip() else []


def set_version(root: Path, version: str, day: str) -> None:
    """Write the version into the sources, and under the changelog's heading what was unreleased."""
    for name, pattern in VERSIONED.items():
        file = root / name
        old = file.read_text(encoding="utf-8")
        new = re.sub(pattern, lambda found: found[0].replace(found[1], version), old, count=1, flags=re.MULTILINE)
        file.write_text(new, encoding="utf-8")
    changelog = root / "CHANGELOG.md"
    text = changelog.read_text(encoding="utf-8")
    changelog.write_text(text.replace(UNRELEASED, f"## {version} ({day})\n", 1), encoding="utf-8")


def wheel_problems(wheel: Path, version: str) -> list[str]:
    """Return what is wrong with a wheel: its version, its command, or a file of the sources that it lacks."""
    with zipfile.ZipFile(wheel) as opened:
        inside = set(opened.namelist())
        info = f"upweight-{version}.dist-info"
        metadata = opened.read(f"{info}/METADATA").decode()
        commands = opened.read(f"{info}/entry_points.txt").decode()
    problems = [] if f"\nVersion: {version}\n" in metadata else [f"{wheel.name}: its metadata has another version"]
    problems += [] if "upweight.cli.app:main" in commands else [f"{wheel.name}: has no command"]
    package = ROOT / "src"
    files = [path for path in (package / "upweight").rglob("*") if path.is_file()]  # templates and rows too
    names = {str(path.relative_to(package)) for path in files if "__pycache__" not in path.parts}
    problems += [f"{wheel.name}: lacks {name}" for name in sorted(names - inside)]
    return problems


def _version_in(file: Path, pattern: str) -> str:
    match = re.search(pattern, file.read_text(encoding="utf-8"), re.MULTILINE)
    return match[1] if match else "0.0.0"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
