"""Are the outputs on the planner's page those of the commands beside them?"""

import os
import re
import shlex
from pathlib import Path

import pytest

from mics_strategy.cli import main
from mics_strategy.planner.cluster import FILE_FIELDS, Cluster
from mics_strategy.planner.model_sources import ModelSource

PAGE = (Path(__file__).parents[2] / "docs" / "planner.md").read_text()
SHOWN = re.findall(r"```bash\n(mics .*?)\n```\n\n```text\n(.*?)\n```", PAGE, flags=re.DOTALL)


def cases() -> list[object]:
    """Commands with their outputs; the one that plans four times is slow."""
    return [
        pytest.param(command, output, marks=[pytest.mark.slow] if "--what-if" in command else [], id=command.split()[1])
        for command, output in SHOWN
    ]


def test_both_commands_are_shown() -> None:
    assert [command.split()[1] for command, _ in SHOWN] == ["plan", "simulate"]


@pytest.mark.parametrize(("command", "output"), cases())
def test_the_output_is_that_of_the_command(
    command: str, output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(command.replace("\\\n", " "))[1:]) == 0
    assert capsys.readouterr().out.strip() == output
    for name in re.findall(r"--(?:trace|picture) (\S+)", command):
        assert os.path.getsize(name) > 0


def test_the_estimate_of_the_page_of_the_configuration_is_that_of_its_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()
    pattern = r"```bash\nmics (estimate llama.*?)\n```\n\nalso counts activations: (\S+) GB, of which (\S+) GB"
    ((command, total, activations),) = re.findall(pattern, page, flags=re.DOTALL)
    assert main(shlex.split(command.replace("\\\n", " "))) == 0
    rows = re.findall(r"^  (\S.*?) +(\d+\.\d+) GB", capsys.readouterr().out, flags=re.MULTILINE)
    assert dict(rows)["total per rank"] == total
    counted = sum(float(gigabytes) for purpose, gigabytes in rows if "activations" in purpose)
    assert counted == pytest.approx(float(activations), abs=2e-3)  # of rows that are rounded


def test_the_file_of_a_cluster_is_one(tmp_path: Path) -> None:
    slow, mine = re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)
    (tmp_path / "slow.yaml").write_text(slow)
    assert Cluster.load(tmp_path / "slow.yaml").slowest_node_factor == 1.1
    (tmp_path / "mine.yaml").write_text(mine)
    assert Cluster.load(tmp_path / "mine.yaml").world_size == 8


def test_every_field_of_a_cluster_is_on_the_page() -> None:
    (table,) = re.findall(r"(\| field \|.*?)\n\n(.*?)\n\n`nodes_per", PAGE, flags=re.DOTALL)
    for name in FILE_FIELDS:
        assert f"`{name}`" in "".join(table), name


def test_the_factory_is_traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    (text,) = [block for block in re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL) if "def factory" in block]
    (tmp_path / "planner_page_model.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    described = ModelSource(text="planner_page_model:factory", seq_len=64, dtype=torch.bfloat16).describe()
    assert described.tokens_per_sample == 64
    assert sum(unit.is_layer for unit in described.units) == 12


def test_the_choice_of_the_page_is_usable() -> None:
    (text,) = [block for block in re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL) if "plan(workload" in block]
    names: dict[str, object] = {}
    exec(compile(text, "planner.md", "exec"), names)
    assert names["config"] == names["choice"].config  # type: ignore[attr-defined]
