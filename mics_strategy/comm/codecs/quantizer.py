"""Who packs and unpacks numbers, on which device?

A `Quantizer` belongs to one codec, one device and one thread. On a CPU it works in `codec_tiles`, on CUDA with
`codec_kernels`; both write the same bits, except for the noise of stochastic rounding.
"""

from __future__ import annotations

import functools
import logging
from types import ModuleType

import torch

from mics_strategy.comm.codecs.format import Codec
from mics_strategy.comm.codecs.torch_codec import TorchCodec
from mics_strategy.errors import ConfigError, ShapeError

_log = logging.getLogger(__name__)

LARGEST_KERNEL_BLOCK = 8192  # a program of a kernel keeps a whole block in registers


class Quantizer:
    """Encodes and decodes flat tensors. It keeps tiles, so that two threads need two of them.

    Values may be fp16, bf16, fp32 or fp64; arithmetic is fp32. Tensors are contiguous, on `device` (on CUDA, the
    current one), and do not overlap; encoded buffers start at a multiple of 4 bytes of their storage. Nothing is
    recorded for autograd. Kernels do not wait for the device.

    Args:
        codec: What is written, and read where nothing else is said.
        device: Where all tensors are.
        generator: On the CPU, seeded by the caller; needed by stochastic rounding, and advanced by every encoding.

    Raises:
        ConfigError: Stochastic rounding without a generator, or with one that is not on the CPU.

    Cost:
        1.2 MB of tiles on a CPU, none on CUDA. Without Triton, and for blocks of more than 8192 values, 38 MB on CUDA,
        where it then works with many launches and waits for the device.
    """

    def __init__(self, codec: Codec, device: torch.device, generator: torch.Generator | None = None) -> None:
        if codec.rounding == "stochastic" and (generator is None or generator.device.type != "cpu"):
            found = "no generator" if generator is None else f"a generator on {generator.device}"
            raise ConfigError(f"`rounding='stochastic'` with {found}. Pass a seeded torch.Generator() on the CPU.")
        self.codec = codec
        self.device = device
        self._generator = generator
        kernels = load_kernels() if device.type == "cuda" else None
        has_kernels = kernels is not None and codec.block_size <= LARGEST_KERNEL_BLOCK
        self._triton = kernels.Kernels(codec, generator) if kernels is not None and has_kernels else None
        self._torch = None if has_kernels else TorchCodec(codec, device, generator)

    @torch.no_grad()
    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        """Compress a flat tensor.

        Args:
            values: [n], floating.
            out: [encoded_bytes(n)] uint8; overwritten, its padding too.

        Raises:
            ShapeError: Sizes, dtypes or places do not fit.
        """
        self._check_values("values", values, values.numel())
        self._check_encoded("out", out, self.codec, values.numel())
        (self._triton or self._torch_codec()).encode(values, out)

    @torch.no_grad()
    def decode(self, encoded: torch.Tensor, out: torch.Tensor) -> None:
        """Restore a flat tensor.

        Args:
            encoded: [encoded_bytes(n)] uint8.
            out: [n], floating; overwritten with the fp32 value rounded once.

        Raises:
            ShapeError: Sizes, dtypes or places do not fit.
        """
        self._check_values("out", out, out.numel())
        self._check_encoded("encoded", encoded, self.codec, out.numel())
        (self._triton or self._torch_codec()).decode(encoded, out, accumulate=False)

    @torch.no_grad()
    def decode_add(self, encoded: torch.Tensor, out: torch.Tensor) -> None:
        """Add what `decode` would restore.

        Args:
            encoded: [encoded_bytes(n)] uint8.
            out: [n] fp32; added to.

        Raises:
            ShapeError: Sizes, dtypes or places do not fit.
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
        """Decode pieces, sum them in fp32 and encode the sum, without a tensor of `numel` numbers in between.

        The bits are those of copying `addend`, adding the rows from the first to the last with `decode_add`, and
        `encode`. A value that overflows in the sum poisons its block, like any other.

        Args:
            pieces: [ranks, bytes] uint8, each row an encoded tensor; one row or more.
            numel: Values that every row holds.
            out: [encoded_bytes(numel)] uint8, in this coder's codec; overwritten.
            source: The codec of the rows; this coder's own where it is not given.
            addend: [numel] fp32, the first summand.

        Raises:
            ShapeError: Sizes, dtypes or places do not fit.

        Source:
            ZeRO++ (arXiv:2306.10209), section 4.2: dequantize, reduce and quantize in one kernel.
        """
        source = source or self.codec
        self._check_encoded("pieces", pieces, source, numel)
        self._check_encoded("out", out, self.codec, numel)
        if addend is not None:
            self._check_values("addend", addend, numel, torch.float32)
        is_small = source.block_size <= LARGEST_KERNEL_BLOCK
        worker = self._triton if self._triton is not None and is_small else self._torch_codec()
        worker.encode_sum(source, pieces, addend, numel, out)

    def _torch_codec(self) -> TorchCodec:
        if self._torch is None:
            self._torch = TorchCodec(self.codec, self.device, self._generator)
        return self._torch

    def _check_values(self, what: str, values: torch.Tensor, numel: int, dtype: torch.dtype | None = None) -> None:
        is_fit = values.dim() == 1 and values.numel() == numel and values.is_contiguous()
        is_kind = values.dtype is dtype if dtype is not None else values.dtype.is_floating_point
        if not (is_fit and is_kind and values.device.type == self.device.type):
            raise ShapeError(
                f"`{what}` is {_describe(values)}. Pass a flat, contiguous tensor of {numel} values, "
                f"{dtype or 'of a floating dtype'}, on {self.device}."
            )

    def _check_encoded(self, what: str, encoded: torch.Tensor, codec: Codec, numel: int) -> None:
        dims = 2 if what == "pieces" else 1
        num_bytes = codec.encoded_bytes(numel)
        is_fit = encoded.dim() == dims and encoded.shape[-1] == num_bytes and encoded.is_contiguous()
        is_placed = encoded.device.type == self.device.type and encoded.storage_offset() % 4 == 0
        if not (is_fit and is_placed and encoded.dtype is torch.uint8 and encoded.shape[0] >= dims - 1):
            shape = f"[ranks, {num_bytes}]" if dims == 2 else f"[{num_bytes}]"
            raise ShapeError(
                f"`{what}` is {_describe(encoded)}. Pass contiguous torch.uint8 {shape} for {numel} values of {codec}, "
                f"on {self.device}, from a multiple of 4 bytes."
            )


def _describe(tensor: torch.Tensor) -> str:
    contiguous = "" if tensor.is_contiguous() else ", not contiguous"
    return f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}, from element {tensor.storage_offset()}{contiguous}"


@functools.cache
def load_kernels() -> ModuleType | None:
    """The kernels, or None, said once, where Triton is missing."""
    try:
        from mics_strategy.comm.codecs import triton_codec
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        _log.warning(
            "Triton is not installed: codecs on CUDA run in plain torch, which is right but slow. Install the `triton` "
            "that this torch asks for; wheels of torch for CUDA bring it along."
        )
        return None
    return triton_codec
