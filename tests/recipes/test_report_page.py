"""The page of a run: the numbers of its files, in one file, and clear refusals."""

import json
import re
from importlib.metadata import version
from pathlib import Path

import pytest

from recipes import report_page
from recipes.metrics_files import read_rows
from recipes.report_page import main, number, write_page
from tests.recipes.short_runs import run_debug_recipe

QUIET = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
CONFIG = "name: two<b>\ntrainer:\n  max_steps: 2\n"
ROWS = [{"step": 1, "loss": 6.25, "lr": 0.001}, {"step": 2, "loss": 5.5, "lr": 0.002, "tokens_per_s": 1234.5}]
TRAFFIC = {"axis": "intra_node", "collective": "all_gather", "count": 3, "planned_bytes": 24, "sent_bytes": 48}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of a run; its page has no plots, which take most of the time."""
    monkeypatch.setattr(report_page, "_plots", lambda runs: [])
    (tmp_path / "config.yaml").write_text(CONFIG)
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return tmp_path


@QUIET
@pytest.mark.parametrize("framework", ["lightning", pytest.param("accelerate", marks=pytest.mark.slow)])
def test_the_page_of_a_run_has_the_numbers_of_its_log(framework: str, cache_dir: Path, tmp_path: Path):
    options = ("--trainer.max_steps=2", "--trainer.log_every_steps=1", "--sample.num_tokens=3")
    output = run_debug_recipe(tmp_path, cache_dir, *options, framework=framework, draws=True)
    page = (tmp_path / "report.html").read_text()
    assert f"The report is {tmp_path / 'report.html'}" in output
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert len(rows) == 4
    for row in rows:
        assert all(f"<td>{number(name, value)}</td>" in page for name, value in row.items())
    assert page.count("<svg") >= 4
    assert page.count("<svg") == len(re.findall(r'<svg role="img" aria-label="[^"]+ by optimizer step" ', page))
    drawn = "".join(re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL))
    assert ("tokens/s" in drawn, "samples/s" in drawn) == (True, False)  # one curve on two scales
    assert "global_size: 8" in page
    assert not re.search(r"(src|href)=\"(?!#)", re.sub(r"<svg .*?>", "", page))  # refers to no other file
    assert "has taken" not in page
    for fact in ("last start", "duration, from the last start", "ranks", "host", "versions", "text by the model"):
        assert page.count(f"<td>{fact}</td>") == 1
    assert f"torch {version('torch')}" in page


def test_the_page_shows_traffic_and_memory_and_escapes_text(folder: Path):
    (folder / "engine.json").write_text(json.dumps({"traffic": [TRAFFIC], "memory_bytes": {"gradients": 4096}}))
    page = write_page(folder).read_text()
    assert "<h1>two&lt;b&gt;</h1>" in page
    assert re.search(r"all_gather</td><td>3</td>\s*<td>24</td><td>48</td>\s*<td><b class=\"different\">DIFFERENT", page)
    assert "<td>gradients</td><td>4,096 B</td>" in page
    assert "6.25 -&gt; 5.5" in page


def test_a_page_says_when_where_and_with_what_a_run_was_made(folder: Path):
    facts = {"begun": "2026-11-27T08:00:00+01:00", "ended": "2026-11-27T10:03:04+01:00", "git commit": "0123abc-dirty"}
    (folder / "environment.json").write_text(json.dumps({**facts, "versions": "torch <2>"}))
    page = write_page(folder).read_text()
    for name, text in (
        ("last start", "2026-11-27 08:00 +0100"),
        ("duration, from the last start", "2 h 03 min 04 s"),
        ("git commit", "0123abc-dirty"),
        ("versions", "torch &lt;2&gt;"),
    ):
        assert f"<tr><td>{name}</td><td>{text}</td></tr>" in page


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("loss", 0.0024942691088673465, "0.002494"),
        ("lr", 3e-05, "3e-05"),
        ("tokens_per_s", 1234567.8, "1,235,000"),
        ("step", 38000, "38,000"),
        ("peak_host_bytes", 1234567890, "1.235"),
        ("loss", float("nan"), "nan"),
        ("perplexity", float("inf"), "inf"),
    ],
)
def test_a_number_has_four_significant_digits(name: str, value: float, text: str):
    assert number(name, value) == text


def test_a_page_fits_a_phone_and_follows_the_colours_of_its_reader(folder: Path):
    (folder / "engine.json").write_text(json.dumps({"traffic": [TRAFFIC], "memory_bytes": {"gradients": 4096}}))
    page = write_page(folder).read_text()
    assert '<meta name="viewport" content="width=device-width' in page
    assert "prefers-color-scheme: dark" in page
    facts, *tables = [page[: found.start()] for found in re.finditer("<table", page)]
    assert not facts.endswith('<div class="wide">')  # its lines are broken
    assert [text.endswith('<div class="wide">') for text in tables] == [True, True, True]


def test_two_runs_stand_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    for name, loss in (("one", 6.25), ("other<b>", 4.75)):
        Path(name).mkdir()
        Path(name, "config.yaml").write_text(f"{CONFIG}  devices: {len(name)}\n")
        Path(name, "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": loss, "lr": 0.001}) + "\n")
    Path("one", "engine.json").write_text(json.dumps({"traffic": [TRAFFIC]}))
    main(["one", "other<b>"])
    assert capsys.readouterr().out == "one/comparison.html\n"
    page = Path("one", "comparison.html").read_text()
    assert "<td>6.25 -&gt; 6.25</td><td>4.75 -&gt; 4.75</td>" in page
    assert "<td>intra_node all_gather, B in a step</td><td>48</td><td>-</td>" in page
    assert "-  devices: 3\n+  devices: 8</pre>" in page
    losses, rates = re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)  # in nats; of learning
    assert [losses.count(">one<"), losses.count(">other&lt;b&gt;<"), rates.count(">one<")] == [1, 1, 1]
    assert not Path("one", "report.html").exists()


def test_a_run_that_goes_on_has_a_page(folder: Path, capsys: pytest.CaptureFixture[str]):
    (folder / "config.yaml").write_text(CONFIG.replace("2", "90"))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')
    main([str(folder)])
    assert capsys.readouterr().out == f"{folder / 'report.html'}\n"
    assert "The run has taken 2 of 90 steps." in (folder / "report.html").read_text()


def test_a_long_log_is_listed_in_part(folder: Path):
    rows = [{"step": step, "loss": 7.0 - step / 1000} for step in range(1, 1001)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = write_page(folder).read_text()
    assert "200 of 1000 rows" in page
    cells = re.sub(r"\s*(</?t[dr]>)\s*", r"\1", page)
    assert ("<td>1</td><td>6.999</td>" in cells, "<td>1,000</td><td>6</td>" in cells) == (True, True)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("metrics.jsonl", None, r"metrics.jsonl does not exist. Name the output folder"),
        ("metrics.jsonl", "", r"metrics.jsonl has no complete row"),
        ("metrics.jsonl", '{"step": 1, "los', r"metrics.jsonl has no complete row"),
        ("metrics.jsonl", '{"iteration": 1}\n', r"Line 1 of .*metrics.jsonl.*`step`"),
        ("config.yaml", None, r"config.yaml does not exist"),
        ("config.yaml", "", r"cannot be read \(TypeError"),
        ("config.yaml", "name: old\n", r"cannot be read \(KeyError: 'trainer'\).*Restore"),
        ("engine.json", "{", r"cannot be read \(JSONDecodeError.*delete engine.json"),
        ("engine.json", "[]", r"cannot be read \(AttributeError.*delete engine.json"),
    ],
)
def test_files_of_another_kind_are_refused(name: str, text: str | None, message: str, folder: Path):
    (folder / name).unlink(missing_ok=True)
    if text is not None:
        (folder / name).write_text(text)
    with pytest.raises(SystemExit, match=f"mics report: .*{message}"):
        main([str(folder)])
    assert not (folder / "report.html").exists()


@pytest.mark.parametrize("arguments", [[], ["a", "b", "c"], ["--help"]])
def test_the_command_says_how_it_is_used(arguments: list[str]):
    with pytest.raises(SystemExit, match=r"usage: .*RUN_FOLDER"):
        main(arguments)


def test_without_matplotlib_the_page_has_no_plots(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(report_page.importlib.util, "find_spec", lambda name: None)
    page = write_page(folder).read_text()
    assert "<svg" not in page
    assert "pip install matplotlib" in page
    assert "<td>1,234</td>" in page
