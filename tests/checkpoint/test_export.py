"""Do exported files hold what was saved, as others read them, without the whole model in memory?"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from mics_strategy import CheckpointError
from mics_strategy.checkpoint import atomic
from mics_strategy.checkpoint import export as consolidate
from mics_strategy.checkpoint.export import INDEX, Export, export_safetensors
from tests.checkpoint.test_sharded import run_of, save_after
from tests.engine.training import assert_identical
from tests.ranks import RankPool


def saved(ranks: RankPool, path: Path) -> dict[str, Tensor]:
    """What the model in a checkpoint was."""
    found: dict[str, Tensor] = ranks(4, save_after, run_of("mics"), 2, path, False)[0]
    return {name: value for name, value in found.items() if ":" not in name}


def test_one_file(ranks: RankPool, tmp_path: Path) -> None:
    expected = saved(ranks, tmp_path / "step-2")
    progress: list[tuple[int, int]] = []
    [file] = export_safetensors(
        tmp_path / "step-2", Export(folder=tmp_path / "hf"), lambda done, total: progress.append((done, total))
    )
    assert [entry.name for entry in (tmp_path / "hf").iterdir()] == ["model.safetensors"]
    found = load_file(file)
    assert_identical(dict(sorted(found.items())), expected)
    assert progress[-1][0] == progress[-1][1] == sum(value.numel() * value.itemsize for value in expected.values())
    assert len(progress) == len(expected)


def test_several_files_and_another_dtype(ranks: RankPool, tmp_path: Path) -> None:
    expected = saved(ranks, tmp_path / "step-2")
    export = Export(folder=tmp_path / "hf", file_bytes=3000, dtype=torch.bfloat16)
    files = export_safetensors(tmp_path / "step-2", export)
    assert len(files) > 2
    index = json.loads((tmp_path / "hf" / INDEX).read_text())["weight_map"]
    assert set(index) == set(expected)
    for name, value in expected.items():
        found = load_file(tmp_path / "hf" / index[name])[name]
        assert torch.equal(found, value.to(torch.bfloat16) if value.is_floating_point() else value)


def test_never_more_than_one_tensor(ranks: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is read when the one before it has been written."""
    expected = saved(ranks, tmp_path / "step-2")
    seen: list[int] = []
    whole = consolidate._read_full

    def noted(*args):  # type: ignore[no-untyped-def]
        tensor = whole(*args)
        seen.append(tensor.numel())
        return tensor

    monkeypatch.setattr(consolidate, "_read_full", noted)
    export_safetensors(tmp_path / "step-2", Export(folder=tmp_path / "hf"), lambda done, total: seen.append(-1))
    assert seen[1::2] == [-1] * len(expected)
    assert sorted(seen[::2]) == sorted(value.numel() for value in expected.values())


def test_what_cannot_be_exported_is_said(ranks: RankPool, tmp_path: Path) -> None:
    saved(ranks, tmp_path / "step-2")
    with pytest.raises(CheckpointError, match="begins with `other`"):
        export_safetensors(tmp_path / "step-2", Export(folder=tmp_path / "hf", prefix="other"))
    with pytest.raises(CheckpointError, match="is not empty"):
        export_safetensors(tmp_path / "step-2", Export(folder=tmp_path / "step-2"))
    (tmp_path / "step-2" / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"__0_0.distcp` cannot be read"):
        export_safetensors(tmp_path / "step-2", Export(folder=tmp_path / "hf"))
    assert atomic.is_checkpoint(tmp_path / "step-2")
