"""Encoding and decoding of tensors on the CPU and on CUDA.

A `Quantizer` belongs to one codec, one device and one thread. It uses `TorchCodec` on a CPU and `TritonCodec` on CUDA.
Both write the same bits, except for the random numbers of stochastic rounding.

Rows of equal size, side by side, are encoded or decoded together, in as many launches as one of them.
"""

from __future__ import annotations

import functools
import logging
from types import ModuleType

import torch

from mics_strategy.comm.codecs.format import Codec, Summands
from mics_strategy.comm.codecs.torch_codec import TorchCodec
from mics_strategy.errors import ConfigError, ShapeError

_log = logging.getLogger(__name__)

LARGEST_KERNEL_BLOCK = 8192  # a kernel program keeps a whole block in registers


class Quantizer:
    """Encodes and decodes flat tensors and tables of them.

    It holds scratch tiles, so that two threads need two objects.

    Values may be fp16, bf16, fp32 or fp64; arithmetic is fp32. Tensors are contiguous, on `device` (on CUDA, the
    current one), and do not overlap. Encoded buffers start at a multiple of 4 bytes of their storage. Nothing is
    recorded for autograd. Kernels do not synchronize with the host.

    Args:
        codec: Codec of the encoded buffers.
        device: Device of all tensors.
        generator: Generator on the CPU, seeded by the caller. Stochastic rounding needs it, and every encoding
            advances it.

    Raises:
        ConfigError: Stochastic rounding without a generator, or with one that is not on the CPU.

    Cost:
        1.2 MB of tiles on a CPU, none on CUDA. Without Triton, for blocks of more than 8192 values, for 2 bits and
        with `rotation`, 38 MB on CUDA, with some ten launches for each tile of 4 M values (two more for each doubling
        of the block with `rotation`) and synchronization with the host.
    """

    def __init__(self, codec: Codec, device: torch.device, generator: torch.Generator | None = None) -> None:
        if codec.rounding == "stochastic" and (generator is None or generator.device.type != "cpu"):
            problem = "no generator" if generator is None else f"a generator on {generator.device}"
            raise ConfigError(f"`rounding='stochastic'` with {problem}. Pass a seeded torch.Generator() on the CPU.")
        self.codec = codec
        self.device = device
        kernels = kernels_for(codec, device)
        if kernels is not None:
            self._implementation = kernels.TritonCodec(codec, generator)
        else:
            self._implementation = TorchCodec(codec, device, generator)

    @torch.no_grad()
    def encode(self, values: torch.Tensor, out: torch.Tensor, residual: torch.Tensor | None = None) -> None:
        """Encode a flat tensor, or every row of a table.

        A table has the bits of its rows encoded one after the other, except for the random numbers of stochastic
        rounding on CUDA.

        Args:
            values: [n], or [rows, n]; floating.
            out: [encoded_bytes(n)], or [rows, encoded_bytes(n)] uint8; overwritten, with its padding.
            residual: Same shape as `values`, fp32: what earlier encodings have lost, which is added to `values`;
                overwritten with what this one loses, and with zeros in nonfinite blocks. None without feedback.

        Raises:
            ShapeError: A size, dtype, device or alignment does not fit.

        Cost:
            On CUDA one launch, and a second one where a row ends in a shorter block. With `residual` also a
            `decode_add` and four passes over it: on CUDA five more launches.

        Source:
            Seide et al., 1-bit stochastic gradient descent (Interspeech 2014), error feedback.
        """
        if residual is not None:
            self.encode(residual.add_(values), out)
            self.decode_add(out, residual.neg_())
            residual.neg_().nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
            return
        self._check_values("values", values, values.shape)
        self._check_encoded("out", out, values.shape)
        self._implementation.encode(values, out)

    @torch.no_grad()
    def encode_difference(
        self, values: torch.Tensor, reference: torch.Tensor, out: torch.Tensor, scratch: torch.Tensor
    ) -> None:
        """Encode the difference of a flat tensor from what the receivers have.

        A reference that is not finite counts as 0, so that parameters that are set back after a step with NaN recover.

        Args:
            values: [n], floating.
            reference: [n], floating.
            out: As in `encode`.
            scratch: [n] fp32; overwritten.

        Cost:
            That of `encode`, and three passes: on CUDA three more launches.

        Source:
            SDP4Bit (arXiv:2410.15526), quantization of weight differences.
        """
        scratch.copy_(reference).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        self.encode(torch.sub(values, scratch, out=scratch), out)

    @torch.no_grad()
    def decode_difference(self, encoded: torch.Tensor, reference: torch.Tensor, scratch: torch.Tensor) -> None:
        """Decode a difference, and add it to `reference` in fp32, rounded once.

        A reference that is not finite counts as 0, as in `encode_difference`.

        Args:
            encoded: As in `decode`.
            reference: [n], floating; the same bits on all ranks.
            scratch: [n] fp32; overwritten.

        Cost:
            That of `decode`, and three passes: on CUDA three more launches.
        """
        self.decode(encoded, scratch)
        reference.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        reference.copy_(scratch.add_(reference))

    @torch.no_grad()
    def decode(self, encoded: torch.Tensor, out: torch.Tensor) -> None:
        """Decode a flat tensor, or every row of a table.

        Args:
            encoded: [encoded_bytes(n)], or [rows, encoded_bytes(n)] uint8.
            out: [n], or [rows, n]; floating; overwritten with fp32 values, rounded once.

        Raises:
            ShapeError: A size, dtype, device or alignment does not fit.

        Cost:
            That of `encode`.
        """
        self._check_values("out", out, out.shape)
        self._check_encoded("encoded", encoded, out.shape)
        self._implementation.decode(encoded, out, accumulate=False)

    @torch.no_grad()
    def decode_add(self, encoded: torch.Tensor, out: torch.Tensor) -> None:
        """Decode a flat tensor, or every row of a table, and add it to `out`.

        Args:
            encoded: [encoded_bytes(n)], or [rows, encoded_bytes(n)] uint8.
            out: [n], or [rows, n] fp32; added to.

        Raises:
            ShapeError: A size, dtype, device or alignment does not fit.

        Cost:
            That of `encode`.
        """
        self._check_values("out", out, out.shape, torch.float32)
        self._check_encoded("encoded", encoded, out.shape)
        self._implementation.decode(encoded, out, accumulate=True)

    @torch.no_grad()
    def decode_sum(self, summands: Summands, out: torch.Tensor, *, accumulate: bool) -> None:
        """Add contributions in the order of their rows.

        The bits are those of one `decode_add` for each row, with `exact` added in the place of its row.

        Args:
            summands: Contributions of n values.
            out: [n], fp32 or fp64; overwritten with the sum, or added to.
            accumulate: Whether to add to `out` instead of overwriting it.

        Raises:
            ShapeError: A size, dtype, device or alignment does not fit.

        Cost:
            That of `encode`, whatever the number of rows.
        """
        self._check_values("out", out, out.shape)
        exact, rows = summands.exact, summands.rows
        self._check_values("exact", exact, out.shape)
        self._check_encoded("rows", rows, torch.Size((rows.shape[0], *out.shape)))
        if exact.itemsize > out.itemsize or not 0 <= summands.exact_index < rows.shape[0]:
            raise ShapeError(
                f"`summands` replace row {summands.exact_index} by {exact.dtype}. Pass one of the {rows.shape[0]} "
                f"rows, and values not wider than {out.dtype}."
            )
        self._implementation.decode_sum(summands, out, accumulate)

    def _check_values(
        self, name: str, values: torch.Tensor, shape: torch.Size, dtype: torch.dtype | None = None
    ) -> None:
        is_shape_right = values.shape == shape and values.dim() in (1, 2) and values.is_contiguous()
        is_dtype_right = values.dtype is dtype if dtype is not None else values.dtype.is_floating_point
        if not (is_shape_right and is_dtype_right and values.device.type == self.device.type):
            raise ShapeError(
                f"`{name}` is {_describe(values)}. Pass a contiguous tensor [n] or table [rows, n], here "
                f"{list(shape)}, {dtype or 'of a floating dtype'}, on {self.device}."
            )

    def _check_encoded(self, name: str, encoded: torch.Tensor, shape: torch.Size) -> None:
        expected = (*shape[:-1], self.codec.encoded_bytes(shape[-1]))
        is_shape_right = encoded.shape == expected and encoded.is_contiguous()
        is_memory_right = encoded.device.type == self.device.type and (
            encoded.storage_offset() % 4 == 0 or not encoded.numel()
        )
        is_dtype_right = encoded.dtype is torch.uint8
        if not (is_shape_right and is_memory_right and is_dtype_right):
            raise ShapeError(
                f"`{name}` is {_describe(encoded)}. Pass contiguous torch.uint8 {list(expected)} for "
                f"{list(shape)} values of {self.codec}, on {self.device}, from a multiple of 4 bytes of its storage."
            )


def kernels_for(codec: Codec, device: torch.device) -> ModuleType | None:
    """The module of the Triton kernels, where they encode and decode a codec; else None, and torch does."""
    has_kernels = codec.block_size <= LARGEST_KERNEL_BLOCK and codec.bits != 2 and not codec.rotation
    return load_kernels() if has_kernels and device.type == "cuda" else None


def _describe(tensor: torch.Tensor) -> str:
    contiguous = "" if tensor.is_contiguous() else ", not contiguous"
    return f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}, from element {tensor.storage_offset()}{contiguous}"


@functools.cache
def load_kernels() -> ModuleType | None:
    """The module of the Triton kernels. It is None, with one warning, where Triton is missing."""
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
