"""Can every page of the documentation be found and read, and do its links lead somewhere?"""

import re
import subprocess
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
INDEX = ROOT / "docs" / "index.md"
MAX_COLUMNS = 100


def _pages() -> list[Path]:
    git = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
    listed = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [path for path in (ROOT / name for name in listed.splitlines()) if path.is_file()]


PAGES = _pages()
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
ENGINE = ROOT / "mics_strategy" / "engine" / "README.md"


def without_blocks(text: str, languages: str = r"\w*") -> str:
    """The text without its fenced blocks of some languages."""
    block = re.compile(r"^```(\w*)\n.*?^```$", flags=re.DOTALL | re.MULTILINE)
    return block.sub(lambda found: "" if re.fullmatch(languages, found[1]) else found[0], text)


def links(page: Path) -> Iterator[Path]:
    """The files that a page links to."""
    for target in re.findall(r"\]\(([^)\s]+)\)", without_blocks(page.read_text())):
        if "://" not in target and not target.startswith("#"):
            yield (page.parent / target.partition("#")[0]).resolve()


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_link_leads_somewhere(page: Path) -> None:
    assert [str(target) for target in links(page) if not target.exists()] == []


def test_every_page_is_reached_from_the_index() -> None:
    reached, due = set(), [INDEX]
    while due:
        page = due.pop()
        if page not in reached and page.suffix == ".md":
            reached.add(page)
            due += links(page)
    assert {page for page in PAGES if (ROOT / "docs") in page.parents} - reached == set()
    assert INDEX in set(links(ROOT / "README.md"))


@pytest.mark.parametrize("page", [page for page in PAGES if page != ENGINE])
def test_lines_are_short(page: Path) -> None:
    """Output of programs, in blocks without a language or of text, is as the program prints it."""
    lines = without_blocks(page.read_text(), "|text").splitlines()
    long = [line for line in lines if len(line) > MAX_COLUMNS]
    assert [line for line in long if not re.fullmatch(r"\s*(?:[-*] )?\S+", line)] == []  # one word may be long


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_headings_are_in_order(page: Path) -> None:
    levels = [len(marks) for marks in re.findall(r"^(#+) ", without_blocks(page.read_text()), flags=re.MULTILINE)]
    assert levels[0] == 1
    assert all(later - earlier <= 1 for earlier, later in pairwise(levels))
