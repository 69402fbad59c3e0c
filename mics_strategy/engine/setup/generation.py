"""Text generation with a sharded model of transformers.

Forwards of sharded parameters are collective, so every rank runs forwards until the last one has finished its text.
transformers does so (`synced_gpus`) for models that it takes for sharded. `generate` also runs parts of a model without
the model's own forward, such as the encoder of an encoder-decoder or the model inside of an adapter. So it runs inside
of a forward of the root, in which the root unit is unsharded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NoReturn

import torch
from torch import nn

from mics_strategy.errors import LifecycleError

_SYNCED_FLAG = "_is_fsdp_managed_module"  # transformers reads it to decide on `synced_gpus`
_PER_RANK_METHODS = (
    "generate_batch",
    "init_continuous_batching",
)  # these run forwards in a thread, a different number on each rank


def prepare_generation(
    model: nn.Module, register_forward_method: Callable[[nn.Module, str], None], *, is_forward_collective: bool
) -> None:
    """Wrap `model.generate` of transformers so that it works on shards.

    Args:
        model: Sharded model. Models without transformers' `generate` are not changed.
        register_forward_method: See `Sharded.register_forward_method`.
        is_forward_collective: Whether forwards are collective, so that all ranks must run the same number.
    """
    if hasattr(model, "generation_config") and callable(getattr(model, "generate", None)):
        register_forward_method(model, "generate")
        _wrap_generate(model, model.generate, is_forward_collective)
    for module in model.modules() if is_forward_collective else ():
        for name in _PER_RANK_METHODS:
            if callable(getattr(type(module), name, None)):
                setattr(module, name, _raise_on_per_rank_method)


def _raise_on_per_rank_method(*_: Any, **__: Any) -> NoReturn:
    raise LifecycleError(
        "Continuous batching (`generate_batch`) runs a different number of forwards on each rank, but ranks with "
        "sharded parameters must run every forward together. Use `generate`, or set `params='replicate'`."
    )


def _wrap_generate(model: nn.Module, generate: Any, is_forward_collective: bool) -> None:
    @functools.wraps(generate)
    def generate_together(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad(), _synced_generation(model) if is_forward_collective else nullcontext():
            return generate(*args, **kwargs)

    model.generate = generate_together  # type: ignore[assignment]


@contextmanager
def _synced_generation(model: nn.Module) -> Iterator[None]:
    """Turn on transformers' `synced_gpus` while this context is open.

    The flag is removed afterwards, because torch.compile also reads it and would trace differently.
    """
    modules = [module for module in model.modules() if _SYNCED_FLAG not in module.__dict__]
    with ExitStack() as stack:
        for module in modules:
            setattr(module, _SYNCED_FLAG, True)
            stack.callback(delattr, module, _SYNCED_FLAG)
            if callable(getattr(module, "generate", None)):
                stack.callback(module.register_forward_pre_hook(_trim_attention_mask, with_kwargs=True).remove)
        yield


def _trim_attention_mask(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Trim the mask to the length of the text.

    On a rank that has finished and runs on for the others, the mask grows and, without a cache, the text does not.
    """
    input_ids, mask = kwargs.get("input_ids"), kwargs.get("attention_mask")
    has_cache = kwargs.get("use_cache") or kwargs.get("past_key_values") is not None
    if input_ids is None or mask is None or mask.ndim != 2 or has_cache:
        return None
    return args, {**kwargs, "attention_mask": mask[:, : input_ids.shape[1]]}
