"""`upweight docs`: the documentation in the terminal, which a wheel holds too."""

import pydoc
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from upweight.errors import UserError, did_you_mean

PACKAGE = Path(__file__).parents[1]
# In a wheel the pages lie in the package (pyproject.toml puts them there), in a checkout beside `src`.
PLACES = (PACKAGE / "documentation", PACKAGE.parents[1] / "docs")
FIRST = "troubleshooting"  # in a search, which is most often for a remedy
LONGEST = 400  # characters of a line that a search prints
LAST = ("api", "config", "design", "differences", "peers", "results")  # long lists, and what few look for


def docs(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[page]", help="Name of a page, or words to search for; default: list the pages."),
    ] = None,
    search: Annotated[str | None, typer.Option("--search", help="Print the lines that hold these words.")] = None,
) -> None:
    """Print a page of the documentation, list the pages, or search them."""
    pages = _pages()
    page = _spelt(" ".join(words), pages) if words else None
    if search is not None and page is not None and _name(page) not in pages:  # the second word of what is searched for
        search, page = f"{search} {page}", None
    if search is not None:
        lines = _lines_with(pages if page is None else {page: _page(page, pages)}, search)
        if not lines:
            where = "no page holds" if page is None else f"the page '{_name(page)}' does not hold"
            remedy = (
                "list the pages: upweight docs" if page is None else f"all pages: upweight docs --search '{search}'"
            )
            raise UserError(f"{where} '{search}'. Search for less, or {remedy}")
        print("\n".join(lines))
    elif page is None:
        for name, file in pages.items():
            print(f"upweight docs {name:<18}{_title(file)}")
    elif _is_phrase(page, pages) and (lines := _lines_with(pages, page)):
        print(f"no page is called '{page}'; these lines hold it:", *lines, sep="\n")
    else:
        text = _page(page, pages).read_text(encoding="utf-8")
        if sys.stdout.isatty():
            pydoc.pager(in_width(text, shutil.get_terminal_size().columns))
        else:
            print(text, end="")


def in_width(text: str, width: int) -> str:
    """Return a page whose long lines are broken between words, but for its code."""
    lines: list[str] = []
    is_code = False
    for line in text.splitlines():
        is_code ^= line.startswith("```")
        if is_code or len(line) <= width:
            lines.append(line)
        else:
            indent = "  " if line.startswith(("|", "-")) else ""
            lines += textwrap.wrap(
                line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
            )
    return "\n".join(lines) + "\n"


def _pages() -> dict[str, Path]:
    """Return the pages by name."""
    folder = next((place for place in PLACES if (place / "index.md").is_file()), None)
    if folder is None:
        raise UserError(f"the pages are not where they are installed ({PLACES[0]}). Install the package again.")
    return {file.relative_to(folder).with_suffix("").as_posix(): file for file in sorted(folder.rglob("*.md"))}


def _name(page: str) -> str:
    return page.removeprefix("docs/").removesuffix(".md")  # as other pages and messages may write it


def _spelt(page: str, pages: Iterable[str]) -> str:
    """Return the page that is meant where only the case differs or one page alone begins so."""
    name = _name(page).lower()
    name = next((one for one in pages if one.replace("_", "-") == name.replace(" ", "-")), name)
    begin = [one for one in pages if one.lower().startswith(name)]
    return next((one for one in pages if one.lower() == name), begin[0] if len(begin) == 1 and len(name) > 3 else page)


def _is_phrase(page: str, pages: Iterable[str]) -> bool:
    """Return whether words are to be searched for: several that are no page, or one that is no slip for one."""
    return _name(page) not in pages and (" " in page.strip() or not did_you_mean(_name(page), pages))


def _page(name: str, pages: dict[str, Path]) -> Path:
    if _name(name) not in pages:
        there = f"There are: {', '.join(pages)}. `upweight docs --search WORDS` searches them all"
        raise UserError(f"there is no page '{name}'.{did_you_mean(_name(name), pages)} {there}.")
    return pages[_name(name)]


def _title(file: Path) -> str:
    with file.open(encoding="utf-8") as lines:
        return next((line.strip("# \n") for line in lines if line.startswith("# ")), "")


def _around(line: str, words: Sequence[re.Pattern[str]]) -> str:
    """Return a line, or of a long one the part around the first word that it holds."""
    first = min((match.start() for word in words if (match := word.search(line.lower()))), default=0)
    start = 0 if len(line) <= LONGEST else max(0, first - LONGEST // 2)
    part = line[start : start + LONGEST]
    return f"{'... ' if start else ''}{part}{' ...' if start + LONGEST < len(line) else ''}"


def _lines_with(pages: dict[str, Path], text: str) -> list[str]:
    """Return the lines that hold all words of a text, or the most where none holds all, after page and heading."""
    words = [re.compile(r"(?<![a-z])" + re.escape(word)) for word in text.lower().split()]
    lines: list[tuple[str, int, str]] = []  # page, how many of the words it holds, what is printed
    for name in sorted(pages, key=lambda name: (name != FIRST, name in LAST)):
        heading = ""
        for line in pages[name].read_text(encoding="utf-8").splitlines():
            heading = line.strip("# ") if line.startswith("#") else heading
            held = sum(word.search(line.lower()) is not None for word in words)
            lines.append((name, held, f"{name} ({heading}): {_around(line.strip(), words)}"))
    # Symptoms have many names: of the first page the nearest lines are of use, though other pages have every word.
    nearest = max((held for name, held, _ in lines if name == FIRST), default=0)
    most = max((held for _, held, _ in lines), default=0)
    return [line for name, held, line in lines if held and held == (nearest if name == FIRST else most)]
