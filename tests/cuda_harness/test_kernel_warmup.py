"""Does a step launch only kernels that were compiled when the model was sharded? By Triton's own keys."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch

from mics_strategy import Codec
from mics_strategy.comm.codecs import quantizer
from mics_strategy.comm.codecs.format import Summands
from tests.cuda_harness.kernels import Kernels
from tests.cuda_harness.runs import config_of, one_of_many, start

pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from mics_strategy.comm.codecs import triton_codec

KERNELS = ("encode_blocks", "decode_blocks", "sum_blocks")
LINKS = {"codec_links": "all", "grad_codec_hops": "all"}
BOTH = {"weight_codec": "int8", "grad_codec": "int4"}
SHORT = Codec(bits=4, block_size=24)  # rows of many sizes, with every remainder that Triton distinguishes
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "zeropp": ("zeropp", {}),
    "zeropp on all links": ("zeropp", LINKS),
    "zeropp in short blocks": ("zeropp", LINKS | {"weight_codec": SHORT, "grad_codec": SHORT}),
    "hpz": ("zeropp-hpz", BOTH),
    "zero3 in bf16": ("zero3", BOTH | LINKS | {"param_dtype": "bfloat16"}),
    "zero3 flat": ("zero3", BOTH | LINKS | {"hierarchical": False}),
    "mics": ("mics", {"grad_codec": "int8"}),
    "mics, one parameter a collective": ("mics", {"grad_codec": "int8", "coalesce": True}),
    "feedback": ("mics", {"grad_codec": Codec(bits=4, feedback=True)} | LINKS),
    "mics every micro-step": ("mics", {"grad_codec": "int8", "second_hop": "micro_step"}),
    "mics on all links": ("mics", {"grad_codec": "int4"} | LINKS),
    "feedback in zero3": ("zero3", {"grad_codec": Codec(bits=8, feedback=True)} | LINKS),
    "differences": ("paro-iig", {"weight_codec": Codec(bits=8, differences=True), "grad_codec": "int8"} | LINKS),
    "stochastic": ("zero3", {"grad_codec": Codec(bits=8, rounding="stochastic")} | LINKS),
    "paro": ("paro-iig", BOTH | LINKS | {"param_dtype": "bfloat16", "reduce_dtype": "bfloat16"}),
}


class Keys(Kernels):
    """The pretended kernels, with a note of what Triton would compile for each launch.

    Attributes:
        launched: Keys of all launches.
    """

    launched: ClassVar[set[tuple[Any, ...]]] = set()

    def __init__(self, codec: Codec, generator: torch.Generator | None) -> None:
        super().__init__(codec, generator)
        self._launches = triton_codec.TritonCodec(codec, generator and torch.Generator())

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        self._launches.encode(values, out)
        super().encode(values, out)

    def decode(self, encoded: torch.Tensor, out: torch.Tensor, accumulate: bool) -> None:
        self._launches.decode(encoded, out, accumulate)
        super().decode(encoded, out, accumulate)

    def decode_sum(self, summands: Summands, out: torch.Tensor, accumulate: bool) -> None:
        self._launches.decode_sum(summands, out, accumulate)
        super().decode_sum(summands, out, accumulate)


class Noted:
    """In the place of a kernel: a launch notes Triton's key of the compiled code."""

    def __init__(self, kernel: Any) -> None:
        backend = make_backend(GPUTarget("cuda", 90, 32))
        self._name = kernel.__name__
        self._key_of: Callable[..., Any] = create_function_from_signature(kernel.signature, kernel.params, backend)

    def __getitem__(self, grid: tuple[int, int]) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            _, specialization, rest = self._key_of(*args, **options)
            Keys.launched.add((self._name, *map(str, specialization), str(rest)))

        return launch


@contextmanager
def noted_keys() -> Iterator[set[tuple[Any, ...]]]:
    Keys.launched.clear()
    kernels = {name: Noted(getattr(triton_codec, name)) for name in KERNELS}
    loader = mock.patch.object(quantizer, "load_kernels", return_value=SimpleNamespace(TritonCodec=Keys))
    with mock.patch.multiple(triton_codec, **kernels), loader:
        yield Keys.launched


@pytest.mark.wide(every=4)
@pytest.mark.parametrize(("preset", "options"), CASES.values(), ids=CASES)
def test_steps_launch_only_kernels_that_are_compiled_when_a_model_is_sharded(
    preset: str, options: dict[str, Any]
) -> None:
    with one_of_many(8) as machine, noted_keys() as launched:
        training = start(machine, config_of(preset, **options), width=64 if SHORT in options.values() else 16)
        compiled = launched.copy()
        launched.clear()
        for _ in range(2):
            training.step()
        for _ in range(2):  # micro-steps that are not declared
            training.loss().backward()
        training.update()
    assert launched
    assert launched - compiled == set()


def test_random_numbers_of_rounding_are_those_of_the_steps() -> None:
    with one_of_many(8) as machine, noted_keys():
        preset, options = CASES["stochastic"]
        training = start(machine, config_of(preset, **options))
        generators = training.sharded.internals.generators
        fresh = [torch.Generator().manual_seed(generator.initial_seed()) for generator in generators]
        assert fresh
        assert all(torch.equal(a.get_state(), b.get_state()) for a, b in zip(fresh, generators, strict=True))
