"""Checks of the single fields of a configuration; each raises `ConfigError`.

Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from mics_strategy.comm.codecs.format import Codec
from mics_strategy.errors import ConfigError

Scope = str | int
OVERLAPS = frozenset({"gather", "reduce", "second_hop", "update"})
CODEC_FIELDS = ("weight_codec", "grad_codec", "outer_codec")
_LARGEST_COMMON = 8192  # largest allowed common multiple of codecs' blocks, in values


def check_scope(name: str, value: object, words: tuple[str, ...]) -> None:
    """A scope is one of `words` or a number of ranks."""
    is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    if not is_count and value not in words:
        raise ConfigError(f"`{name}={value!r}` is not a scope. Use {', '.join(map(repr, words))} or a number of ranks.")


def check_auto(scopes: dict[str, Scope], secondary_params: Scope) -> None:
    """The scopes are all chosen, or none is."""
    chosen = [name for name, scope in scopes.items() if scope != "auto"]
    if 0 < len(chosen) < len(scopes):
        raise ConfigError(
            f"`{chosen[0]}={scopes[chosen[0]]!r}` is set, but other scopes are 'auto', and these are chosen together. "
            f"Set {', '.join(scopes)} all to 'auto', or none of them."
        )
    if not chosen and secondary_params not in ("none", "auto"):
        raise ConfigError(
            f"`secondary_params={secondary_params!r}` copies shards whose scope is still to be chosen ('auto'). Name "
            "the scopes `params`, `grads` and `optimizer`, or set `secondary_params` to 'none' or 'auto'."
        )
    if chosen and secondary_params == "auto":
        raise ConfigError(
            f"`secondary_params='auto'` is chosen with the scopes, and `{chosen[0]}={scopes[chosen[0]]!r}` is set. Use "
            "a scope or 'none', or set all of them to 'auto'."
        )


def as_codec(name: str, value: object) -> str | Codec:
    """A codec or the name of one; a mapping, as in a YAML file, becomes a `Codec`."""
    if isinstance(value, Mapping):
        try:
            return Codec.of(value)
        except ConfigError as error:
            raise ConfigError(f"`{name}`: {error}") from error
    if isinstance(value, Codec):
        return value
    check_choice(name, value, ("none", *Codec.NAMES))
    return str(value)


def check_codecs(weight_codec: Codec | None, grad_codec: Codec | None, outer_codec: Codec | None) -> None:
    """Codecs fit their payloads, and each other."""
    codecs = dict(zip(CODEC_FIELDS, (weight_codec, grad_codec, outer_codec), strict=True))
    blocks = {name: codec for name, codec in codecs.items() if codec is not None}
    common_numel = math.lcm(*(codec.bound_numel for codec in blocks.values()))
    if len(blocks) > 1 and common_numel > _LARGEST_COMMON:
        sizes = ", ".join(f"`{name}` of {codec.block_size}" for name, codec in blocks.items())
        raise ConfigError(
            f"Codecs have blocks of different sizes, {sizes} values: every parameter starts with a block of each, and "
            f"would be padded to {common_numel} values on every rank. Use block sizes of which one divides the other."
        )
    if outer_codec is not None and outer_codec.rounding != "nearest":
        raise ConfigError(
            f"`outer_codec={outer_codec!r}` rounds at random, so that ranks of an island which hold the same shard "
            "would step on different sums. Use rounding='nearest'."
        )
    if outer_codec is not None and (outer_codec.feedback or outer_codec.differences):
        raise ConfigError(
            f"`outer_codec={outer_codec!r}` has feedback or encodes differences of its own, and an outer step sends "
            "differences already, with nothing to keep what they lose. Use feedback=False and differences=False."
        )
    if weight_codec is not None and weight_codec.rounding != "nearest":
        raise ConfigError(
            f"`weight_codec={weight_codec!r}` rounds at random: every all-gather would give other parameters, in the "
            "backward others than in the forward. Use rounding='nearest'. Only `grad_codec` may be stochastic."
        )
    if weight_codec is not None and weight_codec.feedback:
        raise ConfigError(
            f"`weight_codec={weight_codec!r}` has feedback, but parameters are encoded from exact masters each time: "
            "no loss adds up that feedback could send. Use feedback=False. Only `grad_codec` may have feedback."
        )
    if grad_codec is not None and grad_codec.differences:
        raise ConfigError(
            f"`grad_codec={grad_codec!r}` encodes differences, but gradients of two steps have nothing in common. Use "
            "differences=False. Only `weight_codec` may encode differences."
        )


def check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    """A value is one of `choices`."""
    if not any(value is choice or (value == choice and type(value) is type(choice)) for choice in choices):
        raise ConfigError(f"`{name}={value!r}` is not available. Use {' or '.join(map(repr, choices))}.")


def check_hierarchical(value: object) -> None:
    """The value of `hierarchical` is a word, a truth value or a number of bytes."""
    if value != "auto" and not isinstance(value, bool) and not (isinstance(value, int) and value > 0):
        raise ConfigError(
            f"`hierarchical={value!r}` is neither 'auto', True, False nor a number of bytes. Use 'auto', or a number "
            "such as 65536: tensors of 64 KiB or more then have several stages, smaller ones have one."
        )


def as_dtype(name: str, value: str | torch.dtype) -> str | torch.dtype:
    """A floating dtype, or ``'auto'``; a string becomes the dtype of that name."""
    dtype = vars(torch).get(value) if isinstance(value, str) and value != "auto" else value
    if dtype != "auto" and dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        raise ConfigError(
            f"`{name}={value!r}` is not a floating dtype. Use 'auto', 'float32', 'bfloat16' or 'float16'."
        )
    return dtype


def as_overlap(value: object) -> frozenset[str]:
    """The set of overlaps that a word or a set names."""
    if value in ("all", "none"):
        return OVERLAPS if value == "all" else frozenset()
    if isinstance(value, (set, frozenset, list, tuple)) and all(item in OVERLAPS for item in map(str, value)):
        return frozenset(map(str, value))
    raise ConfigError(f"`overlap={value!r}` is not known. Use 'all', 'none' or a set of {', '.join(sorted(OVERLAPS))}.")
