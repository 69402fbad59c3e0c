"""The engine's buffers take no more than FSDP2's at its peak."""

import pytest

from tests.engine import fsdp2_memory as memory


@pytest.mark.parametrize(
    "name", [name if name == "LLaMA 7B" else pytest.param(name, marks=pytest.mark.slow) for name in memory.SIZES]
)
def test_buffers_are_not_larger_than_those_of_fsdp2(name: str) -> None:
    buffers = memory.buffers_of(memory.of_mics(name))
    assert sum(buffers.values()) <= memory.of_fsdp2(name, memory.LAYERS)


def test_buffers_do_not_grow_with_the_number_of_layers() -> None:
    whole, short = (memory.buffers_of(memory.of_mics("LLaMA 7B", layers)) for layers in (None, memory.LAYERS))
    tables = {"used parameters"}  # one number for each parameter
    assert {k: v for k, v in whole.items() if k not in tables} == {k: v for k, v in short.items() if k not in tables}


@pytest.mark.slow
def test_buffers_of_fsdp2_do_not_grow_with_the_number_of_layers() -> None:
    deep, short = (memory.of_fsdp2("LLaMA 7B", layers) for layers in (3 * memory.LAYERS, memory.LAYERS))
    assert 0 <= deep - short < 0.01 * short  # activations of two tokens
