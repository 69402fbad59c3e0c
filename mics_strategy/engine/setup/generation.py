"""How does a sharded model of transformers generate text?

Ranks that hold shards need each other in every forward, so that all must go on until the last one is done: transformers
does so for models that say that they are sharded. And `generate` runs parts of a model past its forward, such as the
encoder of an encoder-decoder or the model inside of an adapter; so it counts as a forward, in which the root unit is
gathered.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NoReturn

import torch
from torch import nn

from mics_strategy.errors import LifecycleError

_SYNCED_FLAG = "_is_fsdp_managed_module"  # transformers asks for it: must ranks run the module together?
_PER_RANK_METHODS = (
    "generate_batch",
    "init_continuous_batching",
)  # each rank runs its own number of forwards, in a thread


def prepare_generation(model: nn.Module, *, ranks_need_each_other: bool) -> None:
    """Let `model.generate` work on shards, where it is that of transformers, which takes no gradients.

    Args:
        model: Sharded.
        ranks_need_each_other: Whether every forward gathers parameters: then all ranks take as many.
    """
    if hasattr(model, "generation_config") and callable(getattr(model, "generate", None)):
        _count_as_forward(model, model.generate, ranks_need_each_other)
    for module in model.modules() if ranks_need_each_other else ():
        for name in _PER_RANK_METHODS:
            if callable(getattr(type(module), name, None)):
                setattr(module, name, _block_on_one_rank)


def _block_on_one_rank(*_: Any, **__: Any) -> NoReturn:
    raise LifecycleError(
        "Continuous batching (`generate_batch`) lets every rank run as many forwards as its own texts take, and ranks "
        "that hold parts of the parameters must run all of them together. Use `generate`, or `params='none'`."
    )


def _count_as_forward(model: nn.Module, generate: Any, ranks_need_each_other: bool) -> None:
    @functools.wraps(generate)
    def gathered(*args: Any, **kwargs: Any) -> Any:
        forward = model.forward

        def entered(*args: Any, **kwargs: Any) -> Any:
            model.forward = forward  # which `generate` calls
            return generate(*args, **kwargs)

        model.forward = entered
        try:
            with torch.no_grad(), _synced_generation(model) if ranks_need_each_other else nullcontext():
                return model(*args, **kwargs)
        finally:
            model.forward = forward

    model.generate = gathered  # type: ignore[assignment]


@contextmanager
def _synced_generation(model: nn.Module) -> Iterator[None]:
    """Have transformers keep ranks together, meanwhile: the compiler asks for the same name, to trace differently."""
    modules = [module for module in model.modules() if _SYNCED_FLAG not in module.__dict__]
    with ExitStack() as stack:
        for module in modules:
            setattr(module, _SYNCED_FLAG, True)
            stack.callback(delattr, module, _SYNCED_FLAG)
            if callable(getattr(module, "generate", None)):
                stack.callback(module.register_forward_pre_hook(_trim_attention_mask, with_kwargs=True).remove)
        yield


def _trim_attention_mask(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Cut the mask of a rank that goes on for the others: without a cache its text has ended and its mask grows."""
    text, mask = kwargs.get("input_ids"), kwargs.get("attention_mask")
    has_cache = kwargs.get("use_cache") or kwargs.get("past_key_values") is not None
    if text is None or mask is None or mask.ndim != 2 or has_cache:
        return None
    return args, {**kwargs, "attention_mask": mask[:, : text.shape[1]]}
