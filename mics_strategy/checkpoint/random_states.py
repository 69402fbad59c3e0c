"""States of random number generators in a checkpoint.

Every rank saves the states of its generators. With the same number of ranks, each rank restores its own. With another
number, or where its own are lost, each rank derives new seeds from rank 0's states, so that ranks differ from one
another and every resume is reproducible.
"""

from __future__ import annotations

import io
import random
import sys
import zlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

RNG_KEY = "random"


def save_rng(rank: int, generators: Sequence[torch.Generator]) -> dict[str, bytes]:
    """Return the generator states of this rank, which no other rank holds, by name.

    Args:
        rank: Rank of this process.
        generators: Generators of the model, for stochastic rounding.
    """
    numpy, buffer = sys.modules.get("numpy"), io.BytesIO()
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_initialized():  # else a training on CPUs would take memory of a GPU
        states["cuda"] = torch.cuda.get_rng_state()
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        states["numpy"] = [name, keys.tolist(), *rest]
    if generators:
        states["codecs"] = [generator.get_state() for generator in generators]
    torch.save(states, buffer)
    return {str(rank): buffer.getvalue()}


def request_rng(rank: int, world_size: int, saved_world_size: int, saved: Collection[str]) -> dict[str, None]:
    """Name the states that this rank needs, with None as their values.

    Args:
        rank: Rank of this process.
        world_size: Ranks of this job.
        saved_world_size: Ranks of the job that has saved.
        saved: Names of the states that there are. Those of ranks whose nodes are lost may be missing in a snapshot.
    """
    if world_size == saved_world_size and str(rank) in saved:
        return {str(rank): None}
    return dict.fromkeys(sorted(saved, key=int)[:1])


def restore_rng(loaded: Mapping[str, bytes], rank: int, generators: Sequence[torch.Generator]) -> None:
    """Set the generators of this rank.

    The model's own are set if it has as many as were saved.

    Args:
        loaded: Entry that `request_rng` named, with its value; may be empty.
        rank: Rank of this process.
        generators: Generators of the model, for stochastic rounding.
    """
    if not loaded:
        return
    [(name, encoded)] = loaded.items()
    if name != str(rank):
        seed = zlib.crc32(encoded + str(rank).encode())
        torch.manual_seed(seed)
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed)
        return
    states = torch.load(io.BytesIO(encoded), weights_only=True)
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    if len(states.get("codecs", ())) == len(generators):
        for generator, state in zip(generators, states.get("codecs", ()), strict=True):
            generator.set_state(state)
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    if "numpy" in states and "numpy" in sys.modules:
        kind, keys, *rest = states["numpy"]
        sys.modules["numpy"].random.set_state((kind, keys, *rest))
