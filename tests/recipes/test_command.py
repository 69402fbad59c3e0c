"""The command that prepares a recipe's text: its options, its words, its refusals."""

import re
import shlex
from pathlib import Path

import pytest

from mics_strategy import cli
from recipes.data.command import main
from recipes.data.progress import BarProgress, PlainProgress
from tests.recipes.hub_layout import write_wikipedia

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "llama" / "debug.yaml"


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    write_wikipedia(tmp_path / "wiki", num_shards=2, rows=12)
    return [
        *("--data.source=wikipedia", f"--data.path={tmp_path / 'wiki'}", f"--data.cache_dir={tmp_path / 'cache'}"),
        *("--data.validation_share=0.3", "--workers=1", "--for=cpu"),
    ]


def test_the_command_reports_what_it_stored(options: list[str], capsys: pytest.CaptureFixture[str]):
    main([str(RECIPE), *options])
    output = capsys.readouterr().out
    assert "tokenizing 2 of 2 parts: 2/2" in output
    assert re.search(r"22 documents, .* 2 empty ones left out", output)
    assert re.search(r"[\d,]+ tokens to train, [\d,]+ held out", output)
    assert "complete and verified: " in output
    main([f"--config={RECIPE}", *options])
    again = capsys.readouterr().out
    assert "verifying: 2/2" in again
    assert "tokenizing" not in again


def test_mics_data_prepare_is_the_same_command(options: list[str], capsys: pytest.CaptureFixture[str]):
    assert cli.main(["data", "prepare", str(RECIPE), *options]) == 0
    assert "complete and verified: " in capsys.readouterr().out


def test_the_command_of_the_guide_runs(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    guide = (RECIPE.parents[2] / "docs" / "data.md").read_text()
    (block,) = re.findall(r"```bash\n(mics data prepare .*?)```", guide, flags=re.DOTALL)
    program, *arguments = shlex.split(block.replace("\\\n", " "))
    paths = {"/fsx/wiki": str(tmp_path / "wiki"), "/fsx/tokens": str(tmp_path / "cache"), "=64": "=1"}
    for path, replacement in paths.items():
        arguments = [argument.replace(path, replacement) for argument in arguments]
    monkeypatch.chdir(RECIPE.parents[2])
    assert (program, cli.main([*arguments, "--data.validation_share=0.3"])) == ("mics", 0)
    assert "complete and verified: " in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["show"], ["--help"]], ids=["nothing", "other", "help"])
def test_mics_data_says_how_it_is_used(arguments: list[str], capsys: pytest.CaptureFixture[str]):
    assert cli.main(["data", *arguments]) == (0 if arguments == ["--help"] else 2)
    assert "usage: mics data prepare RECIPE" in capsys.readouterr().err


def test_a_recipe_that_reads_another_store_on_gpus_says_so(options: list[str], capsys: pytest.CaptureFixture[str]):
    demo = str(RECIPE.with_name("demo.yaml"))
    main([demo, *options])
    output = capsys.readouterr().out
    (other,) = re.findall(r"On cuda this recipe reads another store \((.*)\): prepare it with `--for=cuda`", output)
    main([demo, *options, "--for=cuda"])
    assert f"complete and verified: {other}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--workers=0"], r"`--workers=0` starts no process"),
        (["--data.path=nowhere"], r"mics data prepare: `data.path=nowhere` is not a folder.*hf download"),
        (["--data.validation_share=1e-9"], r"mics data prepare: `data.validation_share=1e-09`.*none for validation"),
    ],
    ids=["workers", "path", "share"],
)
def test_what_cannot_be_prepared_ends_with_one_line(more: list[str], message: str, options: list[str]):
    with pytest.raises(SystemExit) as ended:
        main([str(RECIPE), *options, *more])
    assert re.search(message, str(ended.value))


def test_a_preparation_on_ranks_is_refused(options: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(SystemExit, match=r"started on 4 ranks.*without torchrun"):
        main([str(RECIPE), *options])


def test_several_paths_are_a_list_in_yaml(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for name in ("a", "b"):
        (tmp_path / f"{name}.md").write_text(f"{name} lamps and rivers.\n\n" * 400)
    file = tmp_path / "own.yaml"
    file.write_text(f"data: {{source: text, path: [{tmp_path / 'a.md'}, {tmp_path / 'b.md'}]}}\n")
    main([str(RECIPE), f"--config={file}", f"--data.cache_dir={tmp_path / 'cache'}", "--workers=1", "--for=cpu"])
    assert f"2 files of {tmp_path / 'a.md'}, {tmp_path / 'b.md'}" in capsys.readouterr().out


def test_images_need_no_preparation(capsys: pytest.CaptureFixture[str]):
    main(["wide_resnet-3b", "--for=cpu"])
    assert "nothing to prepare" in capsys.readouterr().out


def test_plain_progress_prints_few_lines(capsys: pytest.CaptureFixture[str]):
    progress = PlainProgress()
    progress.begin("tokenizing", 500)
    for _ in range(500):
        progress.advance(1000)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in lines] == [
        "tokenizing: 500 to do",
        "tokenizing: 1/500",
        "tokenizing: 500/500",
    ]


def test_a_bar_counts_to_the_end(capsys: pytest.CaptureFixture[str]):
    with BarProgress() as progress:
        progress.begin("tokenizing", 3)
        for _ in range(3):
            progress.advance(1000)
    assert "3/3" in capsys.readouterr().err
