"""What a codec means, written block by block and value by value, slowly."""

import torch
from torch import Tensor

from mics_strategy import Codec


def encode(codec: Codec, values: Tensor) -> Tensor:
    """The bytes that hold `values`."""
    payload, scales = [], []
    for block in values.float().split(codec.block_size) if values.numel() else ():
        codes, scale = _encode_block(codec, block)
        scales.append(scale)
        if codec.bits == 8:
            payload += [code % 256 for code in codes]
        else:
            half = -(-len(codes) // 2)
            high = codes[half:] + [0] * (len(codes) % 2)
            payload += [low + 8 + 16 * (up + 8) for low, up in zip(codes[:half], high, strict=True)]
    tail = torch.tensor(scales, dtype=torch.float32).view(torch.uint8).tolist()
    padding = -(len(payload) + len(tail)) % 16
    return torch.tensor(payload + [0] * padding + tail, dtype=torch.uint8)


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
        count = width if codec.bits == 8 else -(-width // 2)
        held = encoded[place : place + count].int()
        place += count
        codes = held.to(torch.int8).int() if codec.bits == 8 else torch.cat([(held & 15) - 8, (held >> 4) - 8])
        values.append(codes[:width].float() * scale)
    return torch.cat(values) if values else torch.empty(0)
