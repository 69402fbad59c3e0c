"""Does the command measure what it says?"""

import json
import re
from pathlib import Path

import pytest

from benchmarks.compare import main, parser
from benchmarks.entries import parse_ours
from benchmarks.report import Cluster, make_report, table
from benchmarks.workload import Workload
from tests.benchmarks.needs import needs_testbed

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGE = (ROOT / "docs" / "benchmarks.md").read_text().partition("\n## On one GPU\n")[0]
LAB_BOOK = (ROOT / "docs" / "lab-book.md").read_text().partition("\n## Codecs, and the loss\n")[0]
SMALL = "--width 128 --layers 3 --vocabulary 512 --sequence 32 --micro-batch 1 --accumulation 2 --rounds 1 --steps 5"


@needs_testbed
@pytest.mark.slow
def test_engines_agree_and_ours_sends_what_it_plans(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engines = "--peers ddp --ours mics"  # `test_engines` trains with every peer
    arguments = f"--nodes 2 --ranks-per-node 2 --rate-mbit 400 --warm-up 1 {SMALL} {engines}"
    assert main([*arguments.split(), "--output", str(tmp_path)]) == 0
    (report,) = json.loads((tmp_path / "compare.json").read_text())["reports"]
    rows = {row["label"]: row for row in report["rows"]}
    assert list(rows) == ["compute", "ddp", "mics"]
    mics = rows["mics"]
    assert mics["losses"] == pytest.approx(rows["ddp"]["losses"], rel=1e-4)
    assert mics["losses"][-1] < mics["losses"][0]
    assert mics["planned_bytes"] <= mics["sent_bytes"] <= 1.06 * mics["planned_bytes"]
    assert rows["compute"]["sent_bytes"] < 0.01 * mics["sent_bytes"]
    assert 0 < mics["training_bytes"] < mics["peak_bytes"]
    assert re.search(r"4 ranks compute and pack on \d+ cores that they share", capsys.readouterr().out)


def test_too_few_steps_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--rounds", "1", "--steps", "2"]) == 2
    assert "too few for a median" in capsys.readouterr().err


def test_a_part_of_a_round_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--ours", "mics:outer_every=4", "--steps", "6", "--warm-up", "4"]) == 2
    assert "Use multiples of 4 for both" in capsys.readouterr().err


def test_an_unknown_peer_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--peers", "horovod"]) == 2
    assert "`horovod` is not known" in capsys.readouterr().err


def test_a_peer_without_an_interpreter_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--deepspeed-python", "/nowhere/python"]) == 2
    assert "`/nowhere/python` is no interpreter" in capsys.readouterr().err


def test_every_command_of_the_pages_is_one() -> None:
    in_blocks = re.findall(r"^python -m benchmarks.compare(.*)$", PAGE, flags=re.MULTILINE)
    in_text = re.findall(r"`python -m benchmarks.compare([^`]*)`", PAGE + LAB_BOOK + README)
    assert min(len(in_blocks), len(in_text)) >= 2
    for command in in_blocks + in_text:
        parse_ours(parser().parse_args(command.split()).ours or "")


def test_every_option_the_pages_name_exists() -> None:
    options = set(re.findall(r"`(--[a-z-]+)", PAGE + LAB_BOOK))
    assert options <= set(re.findall(r"--[a-z-]+", parser().format_help()))
    assert "--loss-tolerance" in options


def test_the_page_explains_every_column() -> None:
    report = make_report([], Workload(), Cluster(nodes=2, ranks_per_node=2, rate_mbit=200), loss_tolerance=1e-4)
    columns = re.split(r"\s{2,}", table(report).splitlines()[0])
    explained = re.findall(r"^\| ([\w/ -]+?) \|", PAGE.partition("What the columns say")[2], flags=re.MULTILINE)
    assert explained == ["column", *columns[1:]]
