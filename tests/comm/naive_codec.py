"""What a codec means, written block by block and value by value, slowly."""

import torch
from torch import Tensor

from mics_strategy import Codec


def encode(codec: Codec, values: Tensor) -> Tensor:
    """The bytes that hold `values`."""
    payload, scales = [], []
    for block in values.float().split(codec.block_size) if values.numel() else ():
        if codec.rotation and len(block) == codec.block_size:
            block = hadamard(block * (1 / len(block)))
        codes, scale = _encode_block(codec, block)
        scales.append(scale)
        if codec.bits == 8:
            payload += [code % 256 for code in codes]
        else:
            payload += _bytes(codec.bits, codes)
    tail = torch.tensor(scales, dtype=torch.float32).view(torch.uint8).tolist()
    padding = -(len(payload) + len(tail)) % 16
    return torch.tensor(payload + [0] * padding + tail, dtype=torch.uint8)


def _bytes(bits: int, codes: list[int]) -> list[int]:
    """Bytes of several codes each, the first parts of the block in the lowest bits."""
    per_byte, offset = 8 // bits, 1 << (bits - 1)
    lane = -(-len(codes) // per_byte)
    padded = codes + [0] * (lane * per_byte - len(codes))
    return [sum((padded[part * lane + i] + offset) << (bits * part) for part in range(per_byte)) for i in range(lane)]


def hadamard(block: Tensor) -> Tensor:
    """Sylvester's matrix times the block: halves of halves, sums in front of differences."""
    if len(block) == 1:
        return block
    low, high = (hadamard(half) for half in block.chunk(2))  # so that neighbours are added first
    return torch.cat([low + high, low - high])


def _encode_block(codec: Codec, block: Tensor) -> tuple[list[int], float]:
    if not block.isfinite().all():
        return [0] * len(block), float("nan")
    scale = block.abs().max() * torch.tensor(1 / codec.largest_code)
    if scale < 2.0**-123:
        return [0] * len(block), 0.0
    inverse = torch.ones(()) / scale
    return [round((value * inverse).item()) for value in block], scale.item()  # round() is half to even


def decode(codec: Codec, encoded: Tensor, numel: int) -> Tensor:
    """The values that bytes hold, in fp32."""
    num_blocks = -(-numel // codec.block_size)
    scales = encoded[len(encoded) - 4 * num_blocks :].clone().view(torch.float32)
    values, place = [], 0
    for scale, block in zip(scales, torch.arange(numel).split(codec.block_size), strict=numel > 0):
        width = len(block)
        count = -(-width * codec.bits // 8)
        held = encoded[place : place + count].int()
        place += count
        shifts = range(0, 8, codec.bits)
        parts = [((held >> shift) & ((1 << codec.bits) - 1)) - (1 << (codec.bits - 1)) for shift in shifts]
        codes = held.to(torch.int8).int() if codec.bits == 8 else torch.cat(parts)
        decoded = codes[:width].float() * scale
        values.append(hadamard(decoded) if codec.rotation and width == codec.block_size else decoded)
    return torch.cat(values) if values else torch.empty(0)
