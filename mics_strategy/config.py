"""What did the user ask for?

One frozen object. Model states (parameters P, gradients G, optimizer states OS) each name the *scope* over
which they are sharded; everything else is how the collectives between those scopes travel. Nothing here
knows the job: what needs the number of ranks is resolved by `topology.resolve_scopes`.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from mics_strategy.comm.codecs.format import Codec
from mics_strategy.errors import ConfigError
from mics_strategy.topology import Topology

Scope = str | int
OVERLAPS = frozenset({"gather", "reduce", "second_hop", "update"})

_LARGEST_COMMON = 8192  # values that are a multiple of both codecs' blocks
_CHOSEN_TOGETHER = ("params", "grads", "optimizer")
_LETTER_SCOPES = {"n": "none", "i": "partition", "g": "world"}
_PRESET_LETTERS = {
    "ddp": "nnn",
    "zero1": "nng",
    "zero2": "ngg",
    "zero3": "ggg",
    "zeropp": "ggg",
    "mics": "iii",
    "hsdp": "iii",
}
_COARSENESS = {"n": 0, "i": 1, "g": 2}
_PARO_LETTERS = tuple(
    p + g + os for p in "nig" for g in "nig" for os in "nig" if _COARSENESS[os] >= max(_COARSENESS[p], _COARSENESS[g])
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardConfig:
    """How the model states are sharded, and how they travel.

    Args:
        partition_size: Ranks that the word ``"partition"`` means: ``"node"``, ``"world"``, a number of ranks,
            or ``"auto"`` (the ranks of one node).
        params: Scope of the parameters between uses: ``"none"`` (every rank keeps all of them),
            ``"partition"``, ``"world"`` or a number of ranks. ``"auto"``, for this and the next two together, chooses
            them by the share of trained parameters, memory and traffic, and says what it chose and why.
        grads: Scope to which gradients are reduced in every micro-step.
        optimizer: Scope of the optimizer states and of the parameters it updates. Never coarser than
            `params` or `grads`.
        secondary_params: Scope of a second copy that the forward leaves for the backward, which then gathers over these
            ranks only (hpZ). ``"none"`` keeps none; smaller than `params`.
        hierarchical: Whether collectives over several ranks of several nodes go in two stages, inside the nodes and
            between them, which sends the least over the slow links but waits for one message after another. True:
            always; False: never, round a ring of all ranks; a number: tensors of so many bytes or more, while smaller
            ones go directly, every rank to every other. ``"auto"`` measures that number when a job starts, for
            gathers, sums and all-reduces of every span, says what it found, and keeps it for later jobs; where
            there is no job, and for all that is encoded, it means two stages. Sums round differently in each way:
            a training that must repeat bit by bit on other nodes, or without the user's cache, gives a number or True.
        coalesce: Whether parameters are gathered, and gradients summed, each for itself, a unit in one launch,
            which saves the copies out of and into one flat tensor: where parameters and sums are sharded over the ranks
            of `optimizer`, nothing is encoded, and the first dimension of all is a multiple of the ranks. True: always;
            False: never. ``"auto"`` measures both ways when a job starts, and keeps what it found. gloo, whose ranks
            read one another's memory instead, offers False only.
        topology: ``"auto"`` reads the launcher's environment; `Topology` states it.
        weight_codec: Encodes parameters while they travel: ``"none"``, ``"int8"``, ``"int4"`` or a `Codec` that rounds
            to the nearest. What every rank then computes with is what was decoded, the same bits in forward and
            backward; the optimizer's own stay exact.
        grad_codec: Encodes gradients while they travel, the same words. Sums are made of decoded numbers, in fp32.
            With either, every parameter starts with a block of its own: each rank pads its part of one to whole blocks.
        codec_links: Which links carry encoded numbers: ``"slow"`` (those between nodes) or ``"all"``.
        grad_codec_hops: Which hops of gradients are encoded: ``"first"`` (of every backward), ``"second"`` (of the
            optimizer step) or ``"all"``.
        grad_codec_until: Share of the training after which `grad_codec` is off. Below 1 it needs `training_steps`.
        training_steps: Optimizer steps of the whole training, or ``"unknown"``. Lightning's Trainer fills it in.
        param_dtype: Dtype in which parameters are gathered and used; ``"auto"`` keeps each parameter's own.
        reduce_dtype: Dtype in which gradients travel; ``"auto"`` is fp32. Sums are always kept in fp32, but NCCL adds
            in this dtype: bf16 rounds at every rank, fp16 would overflow, so gradients in fp16 are divided by about
            the square root of the number of ranks before they are summed, and by the rest afterwards.
        optimizer_layout: ``"rows"`` shards every tensor. ``"tensors"`` gives each tensor of an optimizer that needs it
            whole (Muon, Adafactor, ...) to one rank of the optimizer scope, which updates it; others stay in rows.
        second_hop: When gradients meet beyond their scope: ``"boundary"`` (once per optimizer step) or
            ``"micro_step"`` (after every backward, the schedule that MiCS compares itself with).
        overlap: ``"all"``, ``"none"`` or a set of ``{"gather", "reduce", "second_hop", "update"}``: which
            communication may run under compute.
        prefetch: Units gathered ahead of the one in use. Each costs one more slot of the largest unit.
        broadcast_buffers: Whether all ranks take over rank 0's buffers (running statistics, codebooks) in training when
            `DistributedDataParallel` does: before a forward that follows one whose gradients were synchronised. Where
            `params` is ``"none"``, once per optimizer step. False: only when the model is evaluated or saved.
        replica_check: When ranks that hold the same shard compare digests of it, and raise where they differ, as after
            random numbers that each drew for itself: ``"start"`` in the first 10 optimizer steps; a number: then, and
            every so many steps; ``"never"``. Costs one read of the shards and sends nothing more.

    Raises:
        ConfigError: An unknown value, or a value that this version does not offer.
    """

    partition_size: Scope = "auto"
    params: Scope = "partition"
    grads: Scope = "partition"
    optimizer: Scope = "partition"
    secondary_params: Scope = "none"
    hierarchical: str | bool | int = "auto"
    coalesce: str | bool = "auto"
    topology: str | Topology = "auto"
    weight_codec: str | Codec = "none"
    grad_codec: str | Codec = "none"
    codec_links: str = "slow"
    grad_codec_hops: str = "all"
    grad_codec_until: float = 1.0
    training_steps: int | str = "unknown"
    param_dtype: str | torch.dtype = "auto"
    reduce_dtype: str | torch.dtype = "auto"
    optimizer_layout: str = "rows"
    second_hop: str = "boundary"
    overlap: str | frozenset[str] | set[str] = "all"
    prefetch: int = 1
    broadcast_buffers: bool = True
    replica_check: str | int = "start"

    PRESETS: ClassVar[tuple[str, ...]] = (*_PRESET_LETTERS, *(f"paro-{letters}" for letters in _PARO_LETTERS))

    def __post_init__(self) -> None:
        _check_scope("partition_size", self.partition_size, words=("auto", "node", "world"))
        for name in _CHOSEN_TOGETHER:
            _check_scope(name, getattr(self, name), words=("none", "partition", "world", "auto"))
        _check_scope("secondary_params", self.secondary_params, words=("none", "partition", "world"))
        _check_auto({name: getattr(self, name) for name in _CHOSEN_TOGETHER}, self.secondary_params)
        _check_hierarchical(self.hierarchical)
        if not (isinstance(self.coalesce, bool) or self.coalesce == "auto"):
            raise ConfigError(f"`coalesce={self.coalesce!r}` is none of 'auto', True and False. Use one of them.")
        for name in ("weight_codec", "grad_codec"):
            if not isinstance(getattr(self, name), Codec):
                _check_choice(name, getattr(self, name), ("none", *Codec.NAMES))
        _check_codecs(self.codec_of("weight_codec"), self.codec_of("grad_codec"))
        _check_choice("codec_links", self.codec_links, ("slow", "all"))
        _check_choice("grad_codec_hops", self.grad_codec_hops, ("all", "first", "second"))
        _check_choice("optimizer_layout", self.optimizer_layout, ("rows", "tensors"))
        _check_choice("second_hop", self.second_hop, ("boundary", "micro_step"))
        if not (isinstance(self.topology, Topology) or self.topology == "auto"):
            raise ConfigError(
                f"`topology={self.topology!r}` is neither 'auto' nor a Topology. Use Topology(ranks_per_node=8)."
            )
        for name in ("param_dtype", "reduce_dtype"):
            object.__setattr__(self, name, _as_dtype(name, getattr(self, name)))
        object.__setattr__(self, "overlap", _as_overlap(self.overlap))
        if isinstance(self.prefetch, bool) or not isinstance(self.prefetch, int) or self.prefetch < 1:
            raise ConfigError(f"`prefetch={self.prefetch!r}` is not a positive number of units. Use 1 or more.")
        if not isinstance(self.broadcast_buffers, bool):
            raise ConfigError(f"`broadcast_buffers={self.broadcast_buffers!r}` is neither True nor False. Use one.")
        check = self.replica_check
        if check not in ("start", "never") and (isinstance(check, bool) or not isinstance(check, int) or check < 1):
            raise ConfigError(f"`replica_check={check!r}` is not available. Use 'start', 'never' or a number of steps.")
        steps, until = self.training_steps, self.grad_codec_until
        if steps != "unknown" and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 1):
            raise ConfigError(f"`training_steps={steps!r}` is not a number of steps. Use 1 or more, or 'unknown'.")
        if isinstance(until, bool) or not isinstance(until, (int, float)) or not 0.0 <= until <= 1.0:
            raise ConfigError(
                f"`grad_codec_until={self.grad_codec_until!r}` is not a share of the training. Use 0.0 to 1.0."
            )

    def param_dtype_of(self, dtype: torch.dtype) -> torch.dtype:
        """Dtype in which a parameter of `dtype` is gathered and used."""
        return self.param_dtype if isinstance(self.param_dtype, torch.dtype) and dtype.is_floating_point else dtype

    def wire_dtype_of(self, dtype: torch.dtype) -> torch.dtype:
        """Dtype in which the gradient of a parameter of `dtype` travels."""
        return self.reduce_dtype if isinstance(self.reduce_dtype, torch.dtype) else sum_dtype_of(dtype)

    @property
    def grad_codec_steps(self) -> int | None:
        """Optimizer steps with `grad_codec`; None for all.

        Raises:
            ConfigError: A share of a training of unknown length.
        """
        if self.grad_codec == "none" or self.grad_codec_until == 1.0:
            return None
        if not isinstance(self.training_steps, int):
            raise ConfigError(
                f"`grad_codec_until={self.grad_codec_until!r}` is a share of a training whose length is unknown. Give "
                "`training_steps`, the number of its optimizer steps."
            )
        return round(self.grad_codec_until * self.training_steps)

    @property
    def steps_between_checks(self) -> int:
        """Optimizer steps between two comparisons of replicas after the first steps; 0 for none, -1 for never any."""
        check = self.replica_check
        return check if isinstance(check, int) else {"start": 0, "never": -1}[check]

    def codec_of(self, name: str) -> Codec | None:
        """The codec that ``"weight_codec"`` or ``"grad_codec"`` asks for; None for ``"none"``."""
        value = getattr(self, name)
        return None if value == "none" else Codec.of(value)

    @property
    def is_auto(self) -> bool:
        """Whether the scopes are to be chosen."""
        return self.params == "auto"

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> ShardConfig:
        """The configuration of a published system, by name, with any field overridden.

        Args:
            name: One of `ShardConfig.PRESETS`: ``ddp zero1 zero2 zero3 zeropp mics hsdp`` or ``paro-XYZ`` with the
                letters n (none), i (partition), g (world) for parameters, gradients and optimizer states; or ``auto``,
                which chooses among the latter.
            **overrides: Fields of `ShardConfig`.

        Raises:
            ConfigError: Unknown preset or field.

        Source:
            MiCS (arXiv:2205.00119); ZeRO (arXiv:1910.02054); ZeRO++ (arXiv:2306.10209), its secondary partition;
            PaRO (arXiv:2310.06003), table 1.
        """
        key = name.lower().replace("_", "-")
        letters = _PRESET_LETTERS.get(key) or (
            key[5:] if key.startswith("paro-") and key[5:] in _PARO_LETTERS else None
        )
        if letters is None and key != "auto":
            raise ConfigError(f"`preset={name!r}` is not known. Use one of {', '.join(cls.PRESETS)} or auto.")
        cls._refuse_unknown(overrides)
        words = [_LETTER_SCOPES[letter] for letter in letters] if letters else ["auto"] * 3
        scopes = dict(zip(_CHOSEN_TOGETHER, words, strict=True))
        scopes["secondary_params"] = "partition" if key == "zeropp" else "none"
        return cls(**{**scopes, **overrides})

    @classmethod
    def of(cls, config: str | ShardConfig, **overrides: Any) -> ShardConfig:
        """What a preset's name or a configuration means, with any field overridden.

        Args:
            config: A preset's name or a `ShardConfig`.
            **overrides: Fields; those that are None keep what `config` says.

        Raises:
            ConfigError: Unknown preset or field.
        """
        given = {name: value for name, value in overrides.items() if value is not None}
        if isinstance(config, str):
            return cls.preset(config, **given)
        cls._refuse_unknown(given)
        return config.replace(**given)

    @classmethod
    def _refuse_unknown(cls, names: Iterable[str]) -> None:
        known = sorted(field.name for field in dataclasses.fields(cls))
        for name in sorted(set(names) - set(known)):
            near = difflib.get_close_matches(name, known, n=1)
            meant = f" Did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"Unknown option {name!r}.{meant} Known: {', '.join(known)}.")

    def describe(self) -> dict[str, str]:
        """Every field as text that is equal on two ranks when the values are."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: str(sorted(v) if isinstance(v, frozenset) else v) for name, v in values.items()}

    def replace(self, **changes: Any) -> ShardConfig:
        """A copy with some fields changed, validated again."""
        return dataclasses.replace(self, **changes)


def sum_dtype_of(dtype: torch.dtype) -> torch.dtype:
    """Dtype in which gradients of a parameter of `dtype` are added: fp32, or wider."""
    is_narrow = (
        dtype.is_floating_point and dtype.itemsize < torch.float32.itemsize
    )  # fp8, which torch does not promote, too
    return torch.float32 if is_narrow else torch.promote_types(dtype, torch.float32)


def _check_scope(name: str, value: object, words: tuple[str, ...]) -> None:
    is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    if not is_count and value not in words:
        raise ConfigError(f"`{name}={value!r}` is not a scope. Use {', '.join(map(repr, words))} or a number of ranks.")


def _check_auto(scopes: dict[str, Scope], secondary_params: Scope) -> None:
    given = [name for name, scope in scopes.items() if scope != "auto"]
    if 0 < len(given) < len(scopes):
        raise ConfigError(
            f"`{given[0]}={scopes[given[0]]!r}` beside scopes that are 'auto': they are chosen together. Set "
            f"{', '.join(scopes)} all to 'auto', or none of them."
        )
    if not given and secondary_params != "none":
        raise ConfigError(
            f"`secondary_params={secondary_params!r}` is a copy of shards whose scope is still to be chosen ('auto'). "
            "Give the scopes, or leave `secondary_params` 'none'."
        )


def _check_codecs(codec: Codec | None, of_grads: Codec | None) -> None:
    bound = [each.bound_numel for each in (codec, of_grads) if each is not None]
    if codec is not None and of_grads is not None and math.lcm(*bound) > _LARGEST_COMMON:
        raise ConfigError(
            f"Blocks of {codec.block_size} values (`weight_codec`) and of {of_grads.block_size} (`grad_codec`): every "
            f"parameter starts with a block of both and would be padded to {math.lcm(*bound)} values on every rank. "
            "Use block sizes of which one divides the other."
        )
    if codec is not None and codec.rounding != "nearest":
        raise ConfigError(
            f"`weight_codec={codec!r}` rounds at random: every gather would bring other parameters, the backward's "
            "other ones than the forward's. Use rounding='nearest'; gradients may be rounded at random (`grad_codec`)."
        )


def _check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    if not any(value is choice or (value == choice and type(value) is type(choice)) for choice in choices):
        raise ConfigError(f"`{name}={value!r}` is not available. Use {' or '.join(map(repr, choices))}.")


def _check_hierarchical(value: object) -> None:
    if value != "auto" and not isinstance(value, bool) and not (isinstance(value, int) and value > 0):
        raise ConfigError(
            f"`hierarchical={value!r}` is neither 'auto', True, False nor a number of bytes. Use 65536, say: tensors "
            "of 64 KiB or more go in two stages, smaller ones in one."
        )


def _as_dtype(name: str, value: str | torch.dtype) -> str | torch.dtype:
    found = getattr(torch, value, None) if isinstance(value, str) and value != "auto" else value
    if found != "auto" and found not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        raise ConfigError(
            f"`{name}={value!r}` is not a floating dtype. Use 'auto', 'float32', 'bfloat16' or 'float16'."
        )
    return found


def _as_overlap(value: object) -> frozenset[str]:
    if value in ("all", "none"):
        return OVERLAPS if value == "all" else frozenset()
    if isinstance(value, (set, frozenset, list, tuple)) and all(item in OVERLAPS for item in map(str, value)):
        return frozenset(map(str, value))
    raise ConfigError(f"`overlap={value!r}` is not known. Use 'all', 'none' or a set of {', '.join(sorted(OVERLAPS))}.")
