"""Can every page of the documentation be found and read, and do its links lead somewhere?"""

import ast
import functools
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
INDEX = ROOT / "docs" / "index.md"
MAX_COLUMNS = 100
CODE = ("mics_strategy", "tests", "benchmarks", "recipes", "docs")


PAGES = [*ROOT.glob("*.md"), *(page for folder in CODE for page in sorted((ROOT / folder).rglob("*.md")))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


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


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub and the site make of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", without_blocks(page.read_text()), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_anchor_is_a_heading(page: Path) -> None:
    targets = re.findall(r"\]\(([^)\s#:]*)#([^)\s]+)\)", without_blocks(page.read_text()))
    files = [((page.parent / path).resolve() if path else page, anchor) for path, anchor in targets]
    assert [(file.name, anchor) for file, anchor in files if anchor not in anchors(file)] == []


def test_every_page_is_reached_from_the_index() -> None:
    reached, due = set(), [INDEX]
    while due:
        page = due.pop()
        if page not in reached and page.suffix == ".md":
            reached.add(page)
            due += links(page)
    assert {page for page in PAGES if (ROOT / "docs") in page.parents} - reached == set()
    assert INDEX in set(links(ROOT / "README.md"))


@pytest.mark.parametrize("package", ["", "lightning", "accelerate", "planner"])
def test_every_public_name_is_in_the_reference(package: str) -> None:
    module = ast.parse((ROOT / "mics_strategy" / package / "__init__.py").read_text())
    assigned = {
        target.id: node.value for node in module.body if isinstance(node, ast.Assign) for target in node.targets
    }
    documented = re.findall(r"^\.\. auto\w+:: (\w+)$", (ROOT / "docs" / "api.rst").read_text(), flags=re.MULTILINE)
    assert {*ast.literal_eval(assigned["__all__"])} - {*documented} == set()


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
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


DECISIONS = [page for page in PAGES if page.parent.name == "design" and page.name != "odd-models.md"]


@pytest.mark.parametrize("page", DECISIONS, ids=lambda page: page.stem)
def test_a_design_page_begins_with_the_decision_and_names_its_price(page: Path) -> None:
    headings = re.findall(r"^## (.+)$", without_blocks(page.read_text()), flags=re.MULTILINE)
    assert headings[0] == "Decision"
    assert {*headings} & {"Price", "Limits", "What it cannot show", "What remains"}
    assert len(headings) >= 3


FOREIGN_FILES = {"train.py", "finetune.py", "nlp_example.py", "_no_trainer.py", "zero_to_fp32.py", "ds_to_universal.py"}


@functools.cache
def code() -> dict[Path, str]:
    """The Python files of the repository, and torch's FSDP, which the pages compare with."""
    files = [path for folder in CODE for path in (ROOT / folder).rglob("*.py")]
    fsdp = Path(torch.__file__).parent / "distributed" / "fsdp"
    return {path: path.read_text() for path in (*files, *fsdp.rglob("*.py"))}


@functools.cache
def names() -> set[str]:
    """Every name in the code."""
    return {name for text in code().values() for name in re.findall(r"[A-Za-z_]\w*", text)}


@functools.cache
def attributes() -> dict[str, set[str]]:
    """The attributes of each class of the package that inherits from no class."""
    trees = [ast.parse(text) for path, text in code().items() if ROOT / "mics_strategy" in path.parents]
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and not node.bases]
    return {cls.name: {name for node in ast.walk(cls) for name in _names_defined(node)} for cls in classes}


def _names_defined(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef):
        yield node.name
    elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
        yield node.id if isinstance(node, ast.Name) else node.attr


def stale_names(text: str) -> list[str]:
    """The files, classes and attributes that `quoted` words name, and the code has not."""
    stale = []
    for word in re.findall(r"`([^`]+)`", without_blocks(text)):
        paths = {*re.findall(r"[\w/]+\.py\b", word)} - FOREIGN_FILES
        stale += [name for name in paths if not any(str(path).endswith(f"/{name}") for path in code())]
        stale += [name for name in re.findall(r"\b[A-Z][a-z]+[A-Z]\w*", word) if name not in names()]
        for name, attribute in re.findall(r"\b([A-Za-z]\w*)\.([a-z]\w*)", word):
            if attribute not in attributes().get(name, names() | {"py", "md", "yaml"}):
                stale.append(f"{name}.{attribute}")
    return stale


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "lightning-behaviours.md"])
def test_names_in_the_text_are_in_the_code(page: Path) -> None:
    """The page of Lightning's behaviours names files of Lightning's own tests."""
    assert stale_names(page.read_text()) == []


def test_a_stale_name_is_found() -> None:
    text = f"`Flat{'Form'}`, `Work.keep`, `engine/sharding.py`, `Work.keep_alive` and `engine/step.py`"
    assert stale_names(text) == ["Flat" + "Form", "Work.keep", "engine/sharding.py"]
