"""Encoding and decoding of tensors on the CPU and on CUDA.

A `Quantizer` belongs to one codec, one device and one thread. It uses `TorchCodec` on a CPU and `TritonCodec` on CUDA.
Both write the same bits, except for the random numbers of stochastic rounding.
"""

from __future__ import annotations

import functools
import logging
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from mics_strategy.comm.codecs.torch_codec import TorchCodec
from mics_strategy.errors import ConfigError, ShapeError

if TYPE_CHECKING:
    from mics_strategy.comm.codecs.format import Codec

_log = logging.getLogger(__name__)

LARGEST_KERNEL_BLOCK = 8192  # a kernel program keeps a whole block in registers


class Quantizer:
    """Encodes and decodes flat tensors.

    It holds scratch tiles, so that two threads need two objects.

    Values may be fp16, bf16, fp32 or fp64; arithmetic is fp32. Tensors are contiguous, on `device` (on CUDA, the
    current one), and do not overlap. Encoded buffers start at a multiple of 4 bytes of their storage. Nothing is
    recorded for autograd. Kernels do not synchronize with the host.

    Args:
        codec: Codec of the encoded buffers, except where a method takes another one.
        device: Device of all tensors.
        generator: Generator on the CPU, seeded by the caller. Stochastic rounding needs it, and every encoding
            advances it.

    Raises:
        ConfigError: Stochastic rounding without a generator, or with one that is not on the CPU.

    Cost:
        1.2 MB of tiles on a CPU, none on CUDA. Without Triton, and for blocks of more than 8192 values, 38 MB on CUDA,
        with many launches and synchronization with the host.
    """

    def __init__(self, codec: Codec, device: torch.device, generator: torch.Generator | None = None) -> None:
        if codec.rounding == "stochastic" and (generator is None or generator.device.type != "cpu"):
            problem = "no generator" if generator is None else f"a generator on {generator.device}"
            raise ConfigError(f"`rounding='stochastic'` with {problem}. Pass a seeded torch.Generator() on the CPU.")
        self.codec = codec
        self.device = device
        self._generator = generator
        kernels = load_kernels() if device.type == "cuda" else None
        has_kernels = kernels is not None and codec.block_size <= LARGEST_KERNEL_BLOCK
        self._triton = kernels.TritonCodec(codec, generator) if kernels is not None and has_kernels else None
        self._torch = None if has_kernels else TorchCodec(codec, device, generator)

    @torch.no_grad()
    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        """Encode a flat tensor.

        Args:
            values: [n], floating.
            out: [encoded_bytes(n)] uint8; overwritten, with its padding.

        Raises:
            ShapeError: A size, dtype, device or alignment does not fit.
        """
        self._check_values("values", values, values.numel())
        self._check_encoded("out", out, self.codec, values.numel())
        (self._triton or self._torch_codec()).encode(values, out)

    @torch.no_grad()
    def decode(self, encoded: torch.Tensor, out: torch.Tensor) -> None:
        """Decode a flat tensor.

        Args:
            encoded: [encoded_bytes(n)] uint8.
            out: [n], floating; overwritten with fp32 values, rounded once.

        Raises:
            ShapeError: A size, dtype, device or alignment does not fit.
        """
        self._check_values("out", out, out.numel())
        self._check_encoded("encoded", encoded, self.codec, out.numel())
        (self._triton or self._torch_codec()).decode(encoded, out, accumulate=False)

    @torch.no_grad()
    def decode_add(self, encoded: torch.Tensor, out: torch.Tensor) -> None:
        """Decode a flat tensor, and add it to `out`.

        Args:
            encoded: [encoded_bytes(n)] uint8.
            out: [n] fp32; added to.

        Raises:
            ShapeError: A size, dtype, device or alignment does not fit.
        """
        self._check_values("out", out, out.numel(), torch.float32)
        self._check_encoded("encoded", encoded, self.codec, out.numel())
        (self._triton or self._torch_codec()).decode(encoded, out, accumulate=True)

    @torch.no_grad()
    def encode_sum(
        self,
        pieces: torch.Tensor,
        numel: int,
        out: torch.Tensor,
        *,
        source: Codec | None = None,
        addend: torch.Tensor | None = None,
    ) -> None:
        """Decode pieces, sum them in fp32 and encode the sum.

        No tensor of `numel` elements is allocated in between.

        The bits are those of copying `addend`, adding the rows from the first to the last with `decode_add`, and
        `encode`. A value that overflows in the sum makes its block nonfinite, like any other.

        Args:
            pieces: [ranks, bytes] uint8, each row an encoded tensor; one row or more.
            numel: Values of each row.
            out: [encoded_bytes(numel)] uint8, in the codec of this object; overwritten.
            source: Codec of the rows; by default that of this object.
            addend: [numel] fp32, the first summand.

        Raises:
            ShapeError: A size, dtype, device or alignment does not fit.

        Source:
            ZeRO++ (arXiv:2306.10209), section 4.2: dequantize, reduce and quantize in one kernel.
        """
        source = source or self.codec
        self._check_encoded("pieces", pieces, source, numel)
        self._check_encoded("out", out, self.codec, numel)
        if addend is not None:
            self._check_values("addend", addend, numel, torch.float32)
        has_kernels = source.block_size <= LARGEST_KERNEL_BLOCK
        implementation = self._triton if self._triton is not None and has_kernels else self._torch_codec()
        implementation.encode_sum(source, pieces, addend, numel, out)

    def _torch_codec(self) -> TorchCodec:
        if self._torch is None:
            self._torch = TorchCodec(self.codec, self.device, self._generator)
        return self._torch

    def _check_values(self, name: str, values: torch.Tensor, numel: int, dtype: torch.dtype | None = None) -> None:
        is_shape_right = values.dim() == 1 and values.numel() == numel and values.is_contiguous()
        is_dtype_right = values.dtype is dtype if dtype is not None else values.dtype.is_floating_point
        if not (is_shape_right and is_dtype_right and values.device.type == self.device.type):
            raise ShapeError(
                f"`{name}` is {_describe(values)}. Pass a flat, contiguous tensor of {numel} values, "
                f"{dtype or 'of a floating dtype'}, on {self.device}."
            )

    def _check_encoded(self, name: str, encoded: torch.Tensor, codec: Codec, numel: int) -> None:
        dims = 2 if name == "pieces" else 1
        num_bytes = codec.encoded_bytes(numel)
        is_shape_right = encoded.dim() == dims and encoded.shape[-1] == num_bytes and encoded.is_contiguous()
        is_memory_right = encoded.device.type == self.device.type and encoded.storage_offset() % 4 == 0
        is_dtype_right = encoded.dtype is torch.uint8
        if not (is_shape_right and is_memory_right and is_dtype_right and encoded.shape[0] >= dims - 1):
            shape = f"[ranks, {num_bytes}]" if dims == 2 else f"[{num_bytes}]"
            raise ShapeError(
                f"`{name}` is {_describe(encoded)}. Pass contiguous torch.uint8 {shape} for {numel} values of {codec}, "
                f"on {self.device}, from a multiple of 4 bytes of its storage."
            )


def _describe(tensor: torch.Tensor) -> str:
    contiguous = "" if tensor.is_contiguous() else ", not contiguous"
    return f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}, from element {tensor.storage_offset()}{contiguous}"


@functools.cache
def load_kernels() -> ModuleType | None:
    """The module of the Triton kernels.

    It is None, with one warning, where Triton is missing.
    """
    try:
        from mics_strategy.comm.codecs import triton_codec
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        _log.warning(
            "Triton is not installed, so codecs on CUDA run in plain torch: correct, but slow. Install the version of "
            "`triton` that this torch requires; CUDA wheels of torch depend on it."
        )
        return None
    return triton_codec
