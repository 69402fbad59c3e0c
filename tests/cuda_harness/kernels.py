"""The codecs' kernels: the same values from the CPU's code, noted as one launch."""

from types import SimpleNamespace
from typing import Any

import torch

from mics_strategy.comm.codecs.format import Codec, Summands
from mics_strategy.comm.codecs.torch_codec import TorchCodec
from tests.cuda_harness.streams import alone, here, machine


class Kernels:
    """In the place of `triton_codec.TritonCodec`."""

    def __init__(self, codec: Codec, generator: torch.Generator | None) -> None:
        self._tiles = TorchCodec(codec, torch.device("cpu"), generator)

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        with alone():
            self._tiles.encode(values, out)
        machine().kernel("encode", [values], [out])

    def decode(self, encoded: torch.Tensor, out: torch.Tensor, accumulate: bool) -> None:
        with alone():
            self._tiles.decode(encoded, out, accumulate)
        machine().kernel("decode", [encoded, *([out] if accumulate else [])], [out])

    def decode_sum(self, summands: Summands, out: torch.Tensor, accumulate: bool) -> None:
        with alone():
            self._tiles.decode_sum(summands, out, accumulate)
        machine().kernel("decode_sum", [summands.rows, summands.exact, *([out] if accumulate else [])], [out])


def loader(original: Any) -> Any:
    """In the place of `quantizer.load_kernels`."""
    return lambda: original() if here().machine is None else SimpleNamespace(TritonCodec=Kernels)
