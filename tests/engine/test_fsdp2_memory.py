"""The engine's buffers take no more than FSDP2's at its peak."""

from pathlib import Path
from typing import Any

import pytest

from mics_strategy.engine.reducer import Reducer
from mics_strategy.engine.unit import Unit
from tests.cuda_harness.runs import config_of, one_of_many, start
from tests.engine import fsdp2_memory as memory

PAGE = (Path(__file__).parents[2] / "docs" / "design" / "memory.md").read_text()


def on_the_page() -> dict[str, dict[str, str]]:
    """The cells of the table of the documentation, by model and row."""
    header, _, *lines = PAGE[PAGE.index(f"| {memory.CORNER} |") :].partition("\n\n")[0].splitlines()
    names, rows = header.strip("| ").split(" | ")[1:], [line.strip("| ").split(" | ") for line in lines]
    return {name: {row: cells[index] for row, *cells in rows} for index, name in enumerate(names)}


@pytest.mark.parametrize("name", memory.SIZES)
def test_the_page_says_what_our_buffers_and_shards_take(name: str) -> None:
    column = on_the_page()[name]
    own = {row: memory.cell(size) for row, size in memory.own_rows(name).items()}
    assert {row: column.get(row) for row in own} == own


@pytest.mark.slow
@pytest.mark.parametrize("name", memory.SIZES)
def test_the_page_is_as_its_program_writes_it(name: str) -> None:
    assert list(on_the_page()) == list(memory.SIZES)
    column = {row: memory.cell(size) for row, size in memory.column_of(name).items()}
    assert list(on_the_page()[name].items()) == list(column.items())


@pytest.mark.parametrize(
    "name", [name if name == "LLaMA 7B" else pytest.param(name, marks=pytest.mark.slow) for name in memory.SIZES]
)
def test_buffers_are_not_larger_than_those_of_fsdp2(name: str) -> None:
    buffers = memory.buffers_of(memory.of_mics(name))
    assert sum(buffers.values()) <= memory.of_fsdp2(name, memory.LAYERS)


@pytest.mark.wide(every=2)
@pytest.mark.parametrize("name", memory.SIZES)
def test_shards_are_those_of_fsdp2_and_padding(name: str) -> None:
    """Masters and gradients, with no copy of the masters in bf16."""
    assert memory.own_rows(name)["shards"] == pytest.approx(memory.fsdp2_shards(name), rel=1e-4)


def test_buffers_do_not_grow_with_the_number_of_layers() -> None:
    whole, short = (memory.buffers_of(memory.of_mics("LLaMA 7B", layers)) for layers in (None, memory.LAYERS))
    tables = {"used parameters"}  # one number for each parameter
    assert {k: v for k, v in whole.items() if k not in tables} == {k: v for k, v in short.items() if k not in tables}


@pytest.mark.slow
def test_buffers_of_fsdp2_do_not_grow_with_the_number_of_layers() -> None:
    deep, short = (memory.of_fsdp2("LLaMA 7B", layers) for layers in (3 * memory.LAYERS, memory.LAYERS))
    assert 0 <= deep - short < 0.01 * short  # activations of two tokens


def test_gradients_of_the_root_and_two_units_wait_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where autograd stored them, until the stream of first hops has copied them."""
    add_grad, waiting = Reducer.add_grad, []

    def measured(reducer: Reducer, unit: Unit, *arguments: Any) -> bool:
        is_last = add_grad(reducer, unit, *arguments)
        kept = {grad for ones in reducer.grad_buckets.values() for one in ones for grad in one.collected.kept.values()}
        sent = {tensor for _, chains in reducer._first_hops for chain in chains for tensor in chain._keepalive}
        waiting.append(sum(grad.numel() for grad in kept | sent))
        return is_last

    monkeypatch.setattr(Reducer, "add_grad", measured)
    with one_of_many(8) as machine:
        training = start(machine, config_of("mics"))
        for _ in range(2):
            training.step()
        root, *units = (
            sum(part.numel for bucket in unit.buckets for part in bucket.layout.param_slices)
            for unit in training.sharded.internals.units
        )
    assert len(units) > 2
    assert max(units) < max(waiting) <= root + 2 * max(units)
