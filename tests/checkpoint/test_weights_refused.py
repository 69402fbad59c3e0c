"""Are weights that cannot be loaded, or must not be, refused on every rank with the reason, before anything changes?"""

import errno
import os
import re
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from mics_strategy import CheckpointError, load_weights
from mics_strategy.checkpoint import weight_formats
from tests import models
from tests.checkpoint.test_interop import save_from_fsdp2
from tests.checkpoint.test_sharded import run_of
from tests.checkpoint.test_weights import FORMATS, INDEX, State, safe, saved_at, state_of, with_prefix, write_index
from tests.engine.training import Run, assert_identical, start
from tests.ranks import RankContext, RankPool, raises_on_every_rank


class Runs:
    """Unpickled, it would make a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.file,)


def truncated(path: Path) -> Path:
    os.truncate(path, path.stat().st_size * 2 // 3)
    return path


def without(path: Path, name: str) -> Path:
    (path / name).unlink()
    return path


def cut_part(path: Path, name: str) -> Path:
    truncated(path / name)
    return path


def changed(state: State, name: str, change: Callable[[Tensor], Tensor]) -> State:
    return state | {name: change(state[name])}


def left_by_zero(path: Path) -> Path:
    (path / "global_step1").mkdir()
    (path / "global_step1" / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt").touch()
    return path


def outside(path: Path) -> Path:
    write_index(path, "model.safetensors", {"../x.safetensors": ["embedding.weight"]})
    return path


def latest_elsewhere(path: Path) -> Path:
    (path / "latest_universal").write_text("../elsewhere\n")
    return path


def in_old_format(state: State, path: Path) -> Path:
    torch.save(state, path, _use_new_zipfile_serialization=False)
    return path


def less(state: State, name: str) -> State:
    return {each: value for each, value in state.items() if each != name}


PART, BIN = "model-00002-of-00003.safetensors", "pytorch_model-00002-of-00003.bin"
HEAD = "head.weight"
BAD: dict[str, tuple[Callable[[State, Path], Path], str]] = {
    "nothing": (lambda s, p: p / "x", "does not exist. Pass a local file"),
    "an empty folder": (lambda s, p: p, "no weights of a supported format: it has nothing"),
    "code": (lambda s, p: saved_at(s | {"x": Runs(p / "ran")}, p / "x.pt"), "not plain data, and loading them may run"),
    "a truncated torch file": (lambda s, p: truncated(saved_at(s, p / "x.pt")), "x.pt` is not a complete torch file"),
    "an old torch file": (lambda s, p: in_old_format(s, p / "x.pt"), "in a format older than torch 1.6"),
    "a truncated file": (lambda s, p: truncated(safe(s, p / "x.safetensors")), "x.safetensors` cannot be read"),
    "a part missing": (lambda s, p: without(FORMATS["safetensors parts"](s, p), PART), f"{PART}` is missing, but"),
    "a part truncated": (lambda s, p: cut_part(FORMATS["safetensors parts"](s, p), PART), f"{PART}` cannot be read"),
    "a torch part missing": (lambda s, p: without(FORMATS["torch parts"](s, p), BIN), f"{BIN}` is missing, but"),
    "a part elsewhere": (lambda s, p: outside(p), "which is outside its folder"),
    "a universal checkpoint elsewhere": (
        lambda s, p: latest_elsewhere(p),
        "'../elsewhere', which is outside its folder",
    ),
    "no index": (lambda s, p: Path((p / INDEX).write_text("{") and p), f"{INDEX}` cannot be read"),
    "DeepSpeed's parts": (lambda s, p: left_by_zero(p), "`zero_to_fp32.py` that DeepSpeed has written"),
    "a tensor missing": (lambda s, p: saved_at(less(s, HEAD), p / "x.pt"), f"`{HEAD}`: only in the model"),
    "a tensor more": (lambda s, p: saved_at(s | {"more": s[HEAD]}, p / "x.pt"), "`more`: only in the files"),
    "another shape": (lambda s, p: saved_at(changed(s, HEAD, lambda t: t[1:]), p / "x.pt"), f"{HEAD}` has shape"),
    "a quantized tensor": (
        lambda s, p: saved_at(changed(s, HEAD, Tensor.char), p / "x.pt"),
        "which is the dtype of quantized weights",
    ),
    "a sparse tensor": (
        lambda s, p: saved_at(changed(s, HEAD, Tensor.to_sparse), p / "x.pt"),
        "is not a plain tensor but a",
    ),
    "other names": (
        lambda s, p: saved_at({"x": s[HEAD]}, p / "x.pt"),
        "No name in .* matches the model: the files have `x`",
    ),
    "a list": (lambda s, p: saved_at([s[HEAD]], p / "x.pt"), "holds a list instead of a state dict"),
    "two models": (
        lambda s, p: saved_at(with_prefix(s, "a.") | with_prefix(s, "b."), p / "x.pt"),
        "with the prefixes `a.` and `b.`. Choose one",
    ),
}


def refusals(ctx: RankContext, run: Run, paths: dict[str, Path]) -> dict[str, str]:
    """What each path's error says, and that nothing has changed."""
    training, found = start(ctx, run), {}
    before = training.parameters()
    for kind, path in paths.items():
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Sparse invariant checks|Validating sparse tensor")  # torch 2.11; 2.14
            with pytest.raises(CheckpointError) as raised:
                load_weights(path, training.sharded)
        found[kind] = str(raised.value)
        assert_identical(training.parameters(), before)
    return found


def test_what_does_not_fit_is_refused_on_every_rank_before_anything_changes(ranks: RankPool, tmp_path: Path) -> None:
    state, paths = state_of(models.transformer), {}
    for kind, (make, _) in BAD.items():
        (tmp_path / kind).mkdir()
        paths[kind] = make(state, tmp_path / kind)
    for found in ranks(2, refusals, run_of("mics", ranks_per_node=1), paths):
        for kind, (_, words) in BAD.items():
            assert re.search(words, found[kind]), found[kind]
    assert not (tmp_path / "code" / "ran").exists()


def one_rank_lacks_it(ctx: RankContext, run: Run, path: Path, lost: str) -> None:
    """Rank 1's disk does not have the file, or loses it while it is read."""
    training = start(ctx, run)
    error = OSError(errno.EIO, os.strerror(errno.EIO))
    with mock.patch.object(weight_formats, lost, side_effect=error) if ctx.rank == 1 else nullcontext():
        load_weights(path, training.sharded)


@pytest.mark.parametrize("lost", ["_open_torch", "_copy"])
def test_what_one_rank_cannot_read_is_told_on_all(ranks: RankPool, tmp_path: Path, lost: str) -> None:
    path = saved_at(state_of(models.transformer), tmp_path / "x.pt")
    raises_on_every_rank(
        lambda: ranks(2, one_rank_lacks_it, run_of("mics", ranks_per_node=1), path, lost),
        CheckpointError,
        r"Input/output error.*\(found on rank 1\)",
    )


@pytest.mark.parametrize("damage", [lambda f: f.unlink(), truncated], ids=["missing", "truncated"])
def test_a_part_of_a_distributed_checkpoint_is_looked_for_first(
    ranks: RankPool, tmp_path: Path, damage: Callable[[Path], Any]
) -> None:
    ranks(2, save_from_fsdp2, tmp_path / "fsdp2")
    damage(tmp_path / "fsdp2" / "__1_0.distcp")
    [one, other] = ranks(2, refusals, run_of("mics", ranks_per_node=1), {"": tmp_path / "fsdp2"})
    assert one == other
    assert re.search(r"__1_0.distcp` (is missing|has \d+ bytes, but should)", one[""])
