"""Does loading weights cost a rank no more memory than its rows of them?"""

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from mics_strategy import Sharded, load_weights, save_checkpoint, shard
from mics_strategy.checkpoint import weight_formats
from tests.ranks import RankContext, RankPool

WIDTH, LAYERS = 2048, 4
MODEL_BYTES = LAYERS * WIDTH * WIDTH * 4  # 67 MB
KINDS = ("safetensors", "torch", "sharded")


def status_bytes(name: str) -> int:
    """Resident memory of this process now (VmRSS), or the most since it was last asked to count anew (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def peak_growth(action: Callable[[], Any]) -> float:
    """The most memory that was resident during it, beyond what was before, by the model's."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = status_bytes("VmRSS")
    action()
    return (status_bytes("VmHWM") - before) / MODEL_BYTES


def load_whole(path: Path, sharded: Sharded) -> None:
    sharded.load_full_state_dict(torch.load(path, weights_only=True)["state_dict"])


def sharded_model() -> Sharded:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    return shard(model, "zero3", units=[nn.Linear])


def values(layer: int) -> torch.Tensor:
    return torch.arange(WIDTH * WIDTH, dtype=torch.float32).view(WIDTH, WIDTH).add_(layer)


def measure(ctx: RankContext, folder: Path) -> tuple[dict[str, float], float]:
    """In every way, and in the plain one."""
    sharded = sharded_model()
    load_weights(folder / "x.torch", sharded)
    save_checkpoint(folder / "x.sharded", sharded)
    found = {}
    for kind in KINDS:
        for parameter in sharded.internals.parameters:
            parameter.local.zero_()
        found[kind] = peak_growth(lambda kind=kind: load_weights(folder / f"x.{kind}", sharded))
        for layer, parameter in enumerate(sharded.internals.parameters):
            assert torch.equal(parameter.local, parameter.mics_slice.narrow(values(layer), parameter.mics_index))
    with mock.patch.object(weight_formats, "MAPPED_BYTES", 0):
        found["anew"] = peak_growth(lambda: load_weights(folder / "x.safetensors", sharded))
    return found, peak_growth(lambda: load_whole(folder / "x.torch", sharded))


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is asked of /proc")
def test_a_rank_never_holds_the_model(ranks: RankPool, tmp_path: Path) -> None:
    """Four ranks hold a quarter of the model each, and map or read as much of the files.

    A quarter of one of four tensors, where the file is opened anew for each.
    """
    state = {f"{layer}.weight": values(layer) for layer in range(LAYERS)}
    save_file(state, tmp_path / "x.safetensors")
    torch.save({"state_dict": state}, tmp_path / "x.torch")
    for found, plain in ranks(4, measure, tmp_path):
        assert found["anew"] < 0.16, found
        assert max(found.values()) < 0.5, found
        assert plain > 0.9, plain
