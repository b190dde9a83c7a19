"""`upweight docs`: the documentation in the terminal, which a wheel holds too."""

import pydoc
import sys
from pathlib import Path
from typing import Annotated

import typer

from upweight.errors import UserError, did_you_mean

PACKAGE = Path(__file__).parents[1]
# In a wheel the pages lie in the package (pyproject.toml puts them there), in a checkout beside `src`.
PLACES = (PACKAGE / "documentation", PACKAGE.parents[1] / "docs")


def docs(
    page: Annotated[str | None, typer.Argument(help="Name of a page; default: list the pages.")] = None,
    search: Annotated[str | None, typer.Option("--search", help="Print the lines that hold this text.")] = None,
) -> None:
    """Print a page of the documentation, list the pages, or search them."""
    pages = _pages()
    if search is not None:
        _print_lines(pages if page is None else {page: _page(page, pages)}, search)
    elif page is None:
        for name, file in pages.items():
            print(f"upweight docs {name:<18}{_title(file)}")
    else:
        text = _page(page, pages).read_text(encoding="utf-8")
        if sys.stdout.isatty():
            pydoc.pager(text)
        else:
            print(text, end="")


def _pages() -> dict[str, Path]:
    """Return the pages by name."""
    folder = next((place for place in PLACES if (place / "index.md").is_file()), None)
    if folder is None:
        raise UserError(f"the pages are not where they are installed ({PLACES[0]}). Install the package again.")
    return {file.relative_to(folder).with_suffix("").as_posix(): file for file in sorted(folder.rglob("*.md"))}


def _page(name: str, pages: dict[str, Path]) -> Path:
    known = name.removeprefix("docs/").removesuffix(".md")  # as other pages and messages may write it
    if known not in pages:
        raise UserError(f"there is no page '{name}'.{did_you_mean(known, pages)} There are: {', '.join(pages)}.")
    return pages[known]


def _title(file: Path) -> str:
    with file.open(encoding="utf-8") as lines:
        return next((line.strip("# \n") for line in lines if line.startswith("# ")), "")


def _print_lines(pages: dict[str, Path], words: str) -> None:
    """Print each line with the words, after the page and the heading that it stands under."""
    is_in_a_page = False
    for name, file in pages.items():
        heading = ""
        for line in file.read_text(encoding="utf-8").splitlines():
            heading = line.strip("# ") if line.startswith("#") else heading
            if words.lower() in line.lower():
                is_in_a_page = True
                print(f"{name} ({heading}): {line.strip()}")
    if not is_in_a_page:
        raise UserError(f"no page holds '{words}'. Search for less, or list the pages: upweight docs")
