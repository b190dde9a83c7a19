"""The documentation as a site, opened from the disk in a real browser, where there is one."""

import os
import subprocess
import time
from pathlib import Path

import pytest

from made_browser import BROWSER, browser_page

ROOT = Path(__file__).parents[2]
MKDOCS = Path(os.environ.get("UPWEIGHT_MKDOCS", ROOT / ".cache" / "docs-env" / "bin" / "mkdocs"))
WIDTHS = (1280, 390)
SOME = ("index", "grpo", "config")

pytestmark = [
    pytest.mark.skipif(BROWSER is None, reason="there is no Chromium here"),
    pytest.mark.skipif(not MKDOCS.exists(), reason="mkdocs is not installed: make docs"),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of a site that is built from the pages as they are."""
    folder = tmp_path_factory.mktemp("site")
    command = [MKDOCS, "build", "--strict", "--quiet", "--site-dir", folder]
    known = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=known, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    with browser_page(tmp_path_factory.mktemp("profile")) as page:
        yield page


def names():
    docs = ROOT / "docs"
    return [page.relative_to(docs).with_suffix("").as_posix() for page in sorted(docs.rglob("*.md"))]


def require_good(tab, site, name):
    """A page has its title, logs nothing, loads nothing from elsewhere and is no wider than its screen."""
    for width in WIDTHS:
        tab.problems.clear()
        tab.open((site / f"{name}.html").as_uri(), width)
        assert tab.problems == []
        assert tab.value("document.querySelectorAll('h1').length") == 1
        assert tab.value("document.documentElement.scrollWidth") <= width
        loaded = tab.value("performance.getEntriesByType('resource').map(one => one.name).join(' ')")
        assert "http" not in loaded


@pytest.mark.parametrize("name", SOME)
def test_some_pages_open(tab, site, name):
    require_good(tab, site, name)


@pytest.mark.site
@pytest.mark.parametrize("name", [name for name in names() if name not in SOME])
def test_every_page_opens(tab, site, name):
    require_good(tab, site, name)


def test_code_is_highlighted(tab, site):
    tab.open((site / "grpo.html").as_uri(), 1280)
    assert tab.value("document.querySelectorAll('.highlight code span[class]').length") > 20


@pytest.mark.parametrize("name", ["choosing", "memory"])
def test_a_column_of_texts_is_not_squeezed_for_the_last_one(tab, site, name):
    tab.open((site / f"{name}.html").as_uri(), 1280)
    widths = "[...document.querySelectorAll('article td')].map(cell => getComputedStyle(cell).minWidth)"
    assert len(set(tab.value(widths))) == 1


def test_search_works_from_the_disk(tab, site):
    tab.problems.clear()
    tab.open((site / "index.html").as_uri(), 1280)
    tab.value(
        "document.querySelector('[data-md-toggle=search]').click();"
        "const box = document.querySelector('.md-search__input');"
        "box.value = 'num_generations'; box.dispatchEvent(new Event('keyup', {bubbles: true})); box.value"
    )
    until, results = time.monotonic() + 20, ""
    while "grpo.html" not in results and time.monotonic() < until:
        time.sleep(0.2)
        results = tab.value("[...document.querySelectorAll('.md-search-result__link')].map(a => a.href).join(' ')")
    assert "grpo.html" in results
    assert tab.problems == []
