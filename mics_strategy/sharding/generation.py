"""How does a sharded model of transformers generate text?

Ranks that hold shards need each other in every forward, so that all must go on until the last one is done: transformers
does so for models that say that they are sharded. And `generate` runs parts of a model past its forward, such as the
encoder of an encoder-decoder or the model inside of an adapter; so it counts as a forward, in which the root unit is
gathered.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

_TOGETHER = "_is_fsdp_managed_module"  # transformers asks for it: must ranks run the module together?


def prepare_generation(model: nn.Module, *, ranks_need_each_other: bool) -> None:
    """Let `model.generate` work on shards, where it is that of transformers, which takes no gradients.

    Args:
        model: Sharded.
        ranks_need_each_other: Whether every forward gathers parameters: then all ranks take as many.
    """
    if hasattr(model, "generation_config") and callable(getattr(model, "generate", None)):
        _count_as_forward(model, model.generate, ranks_need_each_other)


def _count_as_forward(model: nn.Module, generate: Any, ranks_need_each_other: bool) -> None:
    @functools.wraps(generate)
    def gathered(*args: Any, **kwargs: Any) -> Any:
        forward = model.forward

        def entered(*args: Any, **kwargs: Any) -> Any:
            model.forward = forward  # which `generate` calls
            return generate(*args, **kwargs)

        model.forward = entered
        try:
            with torch.no_grad(), _together(model) if ranks_need_each_other else nullcontext():
                return model(*args, **kwargs)
        finally:
            model.forward = forward

    model.generate = gathered  # type: ignore[assignment]


@contextmanager
def _together(model: nn.Module) -> Iterator[None]:
    """Have transformers keep ranks together, meanwhile: the compiler asks for the same name, to trace differently."""
    modules = [module for module in model.modules() if _TOGETHER not in module.__dict__]
    for module in modules:
        setattr(module, _TOGETHER, True)
    try:
        yield
    finally:
        for module in modules:
            delattr(module, _TOGETHER)
