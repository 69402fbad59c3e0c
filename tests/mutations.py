"""Does the suite notice when the engine is broken?

    python -m tests.mutations                    # break it in every way, and write docs/mutations.md
    python -m tests.mutations --check            # only see that every break still finds its line
    python -m tests.mutations --only 3,7 --results verdicts.jsonl

Every break of `tests/mutation_table.py` is made in a copy of the committed tree. The tests that are likeliest to see it
run in the fast tier; where none fails, the same ones in both tiers.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
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
        noticed_by: First test that failed, by tier; `SURVIVED` where none did. Ends with the tier that noticed.
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


def judge(number: int, mutation: Mutation, tree: Path) -> Verdict:
    """Run the tests of a mutation in the fast tier, and in both where it survives that."""
    noticed_by: dict[str, str] = {}
    with mutated(mutation, tree):
        for tier, options in TIERS.items():
            noticed_by[tier] = first_failure(tree, [*options, *mutation.tests])
            if noticed_by[tier] != SURVIVED:
                break
    return Verdict(number, noticed_by)


def page_of(verdicts: Sequence[Verdict]) -> str:
    """The table of results as Markdown, at most 100 columns wide."""
    fast = sum(verdict.noticed_by["fast"] != SURVIVED for verdict in verdicts)
    both = sum(set(verdict.noticed_by.values()) != {SURVIVED} for verdict in verdicts)
    lines = [
        "# What the tests notice",
        "",
        "The engine is broken on purpose, in one place at a time, and the tests that are likeliest to",
        f"see it run. Of {len(verdicts)} breaks the fast tier (`make test`) notices {fast}, both tiers together",
        f"(`make test-all`) notice {both}. The breaks stand in",
        "[`tests/mutation_table.py`](../tests/mutation_table.py). This page is written by",
        "",
        "```",
        "python -m tests.mutations",
        "```",
        "",
        "Each entry names the claim that the break makes untrue, and the test that failed first. What",
        "survives the fast tier is tried again with both, if the entry names `all`.",
        "",
    ]
    for verdict in verdicts:
        mutation = MUTATIONS[verdict.number - 1]
        lines.append(f"- {verdict.number}, **{mutation.area}**: {mutation.claim}.")
        lines += [f"  {tier}: `{_short(test)}`" for tier, test in verdict.noticed_by.items()]
    return "\n".join(lines) + "\n"


def _short(test: str) -> str:
    """A test without its parameters, its folder and file on what is left of 100 columns."""
    name = test.split("[")[0].removeprefix("tests/")
    return name if len(name) <= 85 else f"{name.partition('::')[0]}::{name.partition('::')[2][:40]}..."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="only see that every old text occurs once")
    parser.add_argument("--page", action="store_true", help="only write the page from --results")
    parser.add_argument("--only", default="", help="numbers of mutations, with commas")
    parser.add_argument("--results", type=Path, help="file of verdicts, one a line; those in it are not run again")
    options = parser.parse_args(arguments)
    if options.check:
        print("\n".join(problems()) or f"All {len(MUTATIONS)} mutations can be made.")
        return 1 if problems() else 0
    numbers = [int(n) for n in options.only.split(",") if n] or list(range(1, len(MUTATIONS) + 1))
    verdicts = _earlier(options.results)
    with nullcontext(ROOT) if options.page else scratch_copy() as tree:
        for number in () if options.page else numbers:
            if number not in verdicts:
                verdicts[number] = judge(number, MUTATIONS[number - 1], tree)
                _keep(options.results, verdicts[number])
            print(f"{number:3} {MUTATIONS[number - 1].claim}: {verdicts[number].noticed_by}", flush=True)
    if len(verdicts) == len(MUTATIONS):
        PAGE.write_text(page_of([verdicts[number] for number in sorted(verdicts)]))
    else:
        print(f"{PAGE.name} stays as it is: {len(verdicts)} of {len(MUTATIONS)} have a verdict.")
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
