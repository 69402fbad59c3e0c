"""Which random generators does a process have, and how are they put into a known state?"""

import random
import sys
from dataclasses import dataclass
from typing import Any

import torch

SEED = 1234


def seed_generators(seed: int = SEED) -> None:
    """Seed Python's, torch's and, where it is loaded, numpy's generator."""
    random.seed(seed)
    torch.default_generator.manual_seed(seed)  # `torch.manual_seed` formats the stack for every absent kind of device
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


@dataclass(frozen=True, slots=True)
class GeneratorState:
    """The state of the three generators of a process (CPU)."""

    python: tuple[Any, ...]
    torch: torch.Tensor
    numpy: Any

    @classmethod
    def save(cls) -> "GeneratorState":
        """Copy the present state."""
        numpy = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None
        return cls(random.getstate(), torch.get_rng_state(), numpy)

    def restore(self) -> None:
        """Put it back."""
        random.setstate(self.python)
        torch.set_rng_state(self.torch)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)
