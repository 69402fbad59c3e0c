"""Does a script see what it sees with Accelerate's FSDP2, and can either read what the other has saved?"""

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import load, merge_fsdp_weights
from safetensors.torch import load_file
from torch import Tensor

from mics_strategy.errors import CheckpointError
from tests.accelerate.fsdp2 import fsdp2
from tests.accelerate.runs import accelerator, assert_same, full, run, values
from tests.accelerate.test_training import adamw, loader, loss_of, transformer
from tests.ranks import RankContext, RankPool, raises_on_every_rank


def job(engine: str, **options: Any) -> tuple[Any, ...]:
    """An Accelerator, and what it has prepared."""
    options = {"accelerator_gradient_accumulation_steps": 2, **options}
    acc = (
        fsdp2(replicas=2 if engine == "hsdp" else 1, **options) if engine != "mics" else accelerator("mics", **options)
    )
    model = transformer()
    return acc, *acc.prepare(model, adamw(model), loader())


def epoch(acc: Any, model: Any, optimizer: Any, data: Any) -> list[float]:
    """Windows of two micro-steps and an odd one, clipped; losses and norms."""
    numbers = []
    for (tokens,) in data:
        with acc.accumulate(model):
            loss = loss_of(model, tokens)
            acc.backward(loss)
            if acc.sync_gradients:
                norm = acc.clip_grad_norm_(model.parameters(), 0.3)
                numbers.append(full(norm).item())
            optimizer.step()
            optimizer.zero_grad()
        numbers.append(loss.item())
    return numbers


def end(model: Any, optimizer: Any) -> dict[str, Any]:
    states = optimizer.optimizer.state.values()
    return {"values": values(model), "states": [{k: full(v) for k, v in sorted(s.items())} for s in states]}


def trained(ctx: RankContext, engine: str) -> tuple[list[float], dict[str, Any], list[str]]:
    acc, model, optimizer, data = job(engine)
    numbers = epoch(acc, model, optimizer, data)
    state = acc.get_state_dict(model)
    assert all(type(value) is Tensor for value in state.values())
    return numbers, end(model, optimizer), [*state]


@pytest.mark.parametrize("engine", ["fsdp2", "hsdp"])
def test_training_and_what_a_script_gets_equal_fsdp2(ranks: RankPool, engine: str) -> None:
    expected = run(ranks, 4, trained, engine, ranks_per_node=2)
    found = run(ranks, 4, trained, "mics", ranks_per_node=2)
    for (numbers, own, names), (other_numbers, other, other_names) in zip(found, expected, strict=True):
        assert numbers == pytest.approx(other_numbers, rel=1e-5)
        assert_same(own["values"], other["values"])
        for state, other_state in zip(own["states"], other["states"], strict=True):
            assert_same(state, other_state)
        assert names == other_names


def saved(ctx: RankContext, engine: str, folder: str, form: str) -> dict[str, Any]:
    acc, model, optimizer, data = job(engine, state_dict_type=form)
    epoch(acc, model, optimizer, data)
    acc.save_state(folder)
    return end(model, optimizer)


def loaded(ctx: RankContext, engine: str, folder: str, form: str) -> dict[str, Any]:
    acc, model, optimizer, data = job(engine, state_dict_type=form)
    epoch(acc, model, optimizer, data)  # for FSDP2, whose optimizer must have states to load any
    acc.load_state(folder)
    return end(model, optimizer)


@pytest.mark.wide(every=2)
@pytest.mark.parametrize(
    ("writer", "reader"), [("fsdp2", "mics"), ("hsdp", "mics"), ("mics", "fsdp2"), ("mics", "hsdp")]
)
def test_sharded_states_are_read_by_the_other(ranks: RankPool, tmp_path: Path, writer: str, reader: str) -> None:
    folder = str(tmp_path / "state")
    expected = run(ranks, 4, saved, writer, folder, "SHARDED_STATE_DICT", ranks_per_node=2)[0]
    for found in run(ranks, 2 if reader == "mics" else 4, loaded, reader, folder, "SHARDED_STATE_DICT"):
        assert_same(found["values"], expected["values"], 0.0)
        for state, other in zip(found["states"], expected["states"], strict=True):
            assert_same(state, other, 0.0)


def test_a_full_optimizer_of_fsdp2_is_refused_with_what_to_do(ranks: RankPool, tmp_path: Path) -> None:
    folder = str(tmp_path / "state")
    run(ranks, 2, saved, "fsdp2", folder, "FULL_STATE_DICT")
    reading = lambda: run(ranks, 2, loaded, "mics", folder, "FULL_STATE_DICT")  # noqa: E731
    raises_on_every_rank(reading, CheckpointError, r"optimizer\.bin.*names parameters.*sharded")


def test_merging_weights_by_accelerate_gives_the_plain_model(ranks: RankPool, tmp_path: Path) -> None:
    folder = str(tmp_path / "state")
    expected = run(ranks, 4, saved, "mics", folder, "SHARDED_STATE_DICT", ranks_per_node=2)[0]["values"]
    run(ranks, 1, merged, f"{folder}/pytorch_model_fsdp_0", str(tmp_path))
    found = load_file(tmp_path / "model.safetensors")
    assert_same({name: found[name] for name in expected}, expected, 0.0)


def merged(ctx: RankContext, source: str, folder: str) -> None:
    merge_fsdp_weights(source, folder)


def test_full_weights_are_what_fsdp2_writes(ranks: RankPool, tmp_path: Path) -> None:
    for engine in ("fsdp2", "mics"):
        run(ranks, 2, saved, engine, str(tmp_path / engine), "FULL_STATE_DICT")
    found, expected = (load(tmp_path / engine / "pytorch_model_fsdp.bin") for engine in ("mics", "fsdp2"))
    assert {type(value) for value in found.values()} == {torch.Tensor}
    assert_same(found, expected)
