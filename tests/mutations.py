"""Does the suite notice when the engine is broken?

    python -m tests.mutations                    # break it in every way, and write docs/mutations.md
    python -m tests.mutations --check            # only see that every break still finds its line
    python -m tests.mutations --only 3,7 --tiers fast

Every break of `tests/mutation_table.py` is made in a copy of the committed tree. The tests that are likeliest to see it
run first in the fast tier; where none fails, the same ones in both tiers, and with `--whole` the fast tier as a whole.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.mutation_table import MUTATIONS, Mutation

ROOT = Path(__file__).parents[1]
PACKAGE = "mics_strategy"
PAGE = ROOT / "docs" / "mutations.md"
TIERS = {"fast": ["-m", "not slow"], "all": []}
LIMIT_S = 900.0
SURVIVED = "survived"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the tests said of one mutation.

    Attributes:
        number: Number of the mutation, from 1.
        noticed_by: First test that failed, by tier; `SURVIVED` where none did.
    """

    number: int
    noticed_by: dict[str, str]


def file_of(mutation: Mutation, root: Path) -> Path:
    """The file of the package that holds the old text.

    Raises:
        LookupError: The text occurs in no file, or more than once.
    """
    counts = {path: path.read_text().count(mutation.old) for path in sorted((root / PACKAGE).rglob("*.py"))}
    places = [path for path, count in counts.items() for _ in range(count)]
    if len(places) != 1:
        raise LookupError(f"`{mutation.old}` ({mutation.claim}) occurs {len(places)} times in {PACKAGE}, not once")
    return places[0]


def problems(root: Path = ROOT) -> list[str]:
    """What keeps mutations from being made: old texts that are not there once, tests that do not exist."""
    found = []
    for mutation in MUTATIONS:
        try:
            file_of(mutation, root)
        except LookupError as error:
            found.append(str(error))
        missing = [path for path in mutation.tests if not (root / path).exists()]
        found += [f"{path} ({mutation.claim}) does not exist" for path in missing]
    return found


@contextmanager
def scratch_copy() -> Iterator[Path]:
    """The committed tree in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        tree = Path(folder, "tree")
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--detach", "--quiet", str(tree)], check=True)
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


@contextmanager
def mutated(mutation: Mutation, tree: Path) -> Iterator[None]:
    """The tree with the mutation in it."""
    file = file_of(mutation, tree)
    text = file.read_text()
    file.write_text(text.replace(mutation.old, mutation.new))
    try:
        yield
    finally:
        file.write_text(text)


def first_failure(tree: Path, options: Sequence[str]) -> str:
    """The first test that fails in a tree, or `SURVIVED`."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "--durations=0", "-p", "no:cacheprovider"]
    env = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    try:
        run = subprocess.run([*command, *options], cwd=tree, env=env, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return f"no end within {LIMIT_S:.0f} s"
    if run.returncode == 0 or run.returncode == 5:  # all passed, or none selected
        return SURVIVED
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", run.stdout, flags=re.MULTILINE)
    return failed[1] if failed else f"pytest ended with {run.returncode}"


def judge(number: int, mutation: Mutation, tree: Path, tiers: Sequence[str], *, whole: bool) -> Verdict:
    """Run the tests of a mutation; tiers after the one that noticed it would notice it too."""
    noticed_by: dict[str, str] = {}
    with mutated(mutation, tree):
        for tier in tiers:
            noticed_by[tier] = next((test for test in noticed_by.values() if test != SURVIVED), SURVIVED)
            if noticed_by[tier] == SURVIVED:
                noticed_by[tier] = first_failure(tree, [*TIERS[tier], *mutation.tests])
        if whole and set(noticed_by.values()) == {SURVIVED}:
            noticed_by[tiers[-1]] = first_failure(tree, [*TIERS["fast"], "tests"])
    return Verdict(number, noticed_by)


def page_of(verdicts: Sequence[Verdict], tiers: Sequence[str]) -> str:
    """The table of results as Markdown, at most 100 columns wide."""
    counts = [sum(v.noticed_by[tier] != SURVIVED for v in verdicts) for tier in tiers]
    names = {"fast": "the fast tier", "all": "both tiers"}
    told = ", ".join(f"{names[tier]} {count}" for tier, count in zip(tiers, counts, strict=True))
    lines = [
        "# What the tests notice",
        "",
        "The engine is broken on purpose, in one place at a time, and the tests that should see it",
        f"run. Of {len(verdicts)} breaks they notice: {told}. The breaks are listed in",
        "[`tests/mutation_table.py`](../tests/mutation_table.py); this page is written by",
        "",
        "```",
        "python -m tests.mutations",
        "```",
        "",
        "For each break: the claim that it breaks, and the test that failed first.",
        "",
    ]
    for verdict in verdicts:
        mutation = MUTATIONS[verdict.number - 1]
        lines.append(f"{verdict.number}. **{mutation.area}**: {mutation.claim}.")
        lines += [f"   {tier}: `{_short(verdict.noticed_by[tier])}`" for tier in _told(verdict, tiers)]
    return "\n".join(lines) + "\n"


def _told(verdict: Verdict, tiers: Sequence[str]) -> list[str]:
    """Tiers that say more than the one before them."""
    return [t for i, t in enumerate(tiers) if i == 0 or verdict.noticed_by[t] != verdict.noticed_by[tiers[i - 1]]]


def _short(test: str) -> str:
    """A test without its parameters, its folder and file on what is left of 100 columns."""
    name = test.split("[")[0].removeprefix("tests/")
    return name if len(name) <= 85 else f"{name.partition('::')[0]}::{name.partition('::')[2][:40]}..."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="only see that every old text occurs once")
    parser.add_argument("--only", default="", help="numbers of mutations, with commas")
    parser.add_argument("--tiers", default="fast,all", help="tiers to run, with commas: fast, all")
    parser.add_argument("--whole", action="store_true", help="let survivors run through the whole fast tier")
    parser.add_argument("--results", type=Path, help="file of verdicts, one a line; those in it are not run again")
    options = parser.parse_args(arguments)
    if options.check:
        print("\n".join(problems()) or f"All {len(MUTATIONS)} mutations can be made.")
        return 1 if problems() else 0
    numbers = [int(n) for n in options.only.split(",") if n] or list(range(1, len(MUTATIONS) + 1))
    tiers = options.tiers.split(",")
    verdicts = _earlier(options.results)
    with scratch_copy() as tree:
        for number in numbers:
            if number not in verdicts:
                verdicts[number] = judge(number, MUTATIONS[number - 1], tree, tiers, whole=options.whole)
                _keep(options.results, verdicts[number])
            print(f"{number:3} {MUTATIONS[number - 1].claim}: {verdicts[number].noticed_by}", flush=True)
    if not options.only:
        PAGE.write_text(page_of([verdicts[number] for number in numbers], tiers))
    return 0


def _earlier(results: Path | None) -> dict[int, Verdict]:
    lines = results.read_text().splitlines() if results is not None and results.exists() else []
    return {number: Verdict(number, noticed_by) for number, noticed_by in map(json.loads, lines)}


def _keep(results: Path | None, verdict: Verdict) -> None:
    if results is not None:
        with results.open("a") as file:
            file.write(json.dumps([verdict.number, verdict.noticed_by]) + "\n")


if __name__ == "__main__":
    sys.exit(main())
