"""The configuration of a sharded model.

It is one frozen object. Each model state (parameters P, gradients G, optimizer states OS) has a *scope* over which it
is sharded; the other fields configure the collectives between those scopes. Nothing here depends on the job:
`scopes.resolve_scopes` resolves fields that depend on the number of ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from mics_strategy.comm.codecs.format import Codec
from mics_strategy.config_checks import (
    CODEC_FIELDS,
    Scope,
    as_codec,
    as_dtype,
    as_overlap,
    check_auto,
    check_choice,
    check_codecs,
    check_hierarchical,
    check_scope,
)
from mics_strategy.errors import ConfigError, nearest
from mics_strategy.islands import OUTER_NUMBERS, Round, check_outer
from mics_strategy.topology import Switches, Topology, topology_of

_CHOSEN_TOGETHER = ("params", "grads", "optimizer")
_LETTER_SCOPES = {"n": "replicate", "i": "partition", "g": "world"}
_PRESET_LETTERS = {
    "ddp": "nnn",
    "zero1": "nng",
    "zero2": "ngg",
    "zero3": "ggg",
    "zeropp": "ggg",
    "zeropp-hpz": "ggg",
    "mics": "iii",
    "hsdp": "iii",
}
_PRESET_FIELDS: dict[str, dict[str, Any]] = {  # beside the scopes
    "zeropp": {"secondary_params": "partition", "weight_codec": "int8", "grad_codec": "int4", "codec_links": "all"},
    "zeropp-hpz": {"secondary_params": "partition"},
    "auto": {"secondary_params": "auto"},
}
_FSDP_NAMES = {"no-shard": "ddp", "shard-grad-op": "zero2", "full-shard": "zero3", "hybrid-shard": "mics"}
_COARSENESS = {"n": 0, "i": 1, "g": 2}
_PARO_LETTERS = tuple(
    p + g + os for p in "nig" for g in "nig" for os in "nig" if _COARSENESS[os] >= max(_COARSENESS[p], _COARSENESS[g])
)
_NUMBERS = (  # fields, the least number and the word in place of one
    *(("micro_steps", 1, "unknown"), ("training_steps", 1, "unknown")),
    *(("activation_bytes", 0, "auto"), ("world_size", 1, "any")),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardConfig:
    """Sharding of the model states, and configuration of their collectives.

    Args:
        partition_size: Ranks of the scope ``"partition"``: ``"node"``, ``"world"``, a number of ranks,
            or ``"auto"``: the fewest whose states and buffers fit into the memory of each GPU; on CPUs, whose memory
            the ranks of a node share, a node or the fewest beyond it. Without a device: a node.
        params: Scope of the parameters between uses: ``"replicate"`` (every rank keeps all of them; also ``"none"``),
            ``"partition"``, ``"world"`` or a number of ranks. ``"auto"``, for this and the next two fields together,
            chooses the scopes whose communication takes the shortest time of those that fit into memory, and prints the
            choice and the reasons.
        grads: Scope to which gradients are reduced in every micro-step.
        optimizer: Scope of the optimizer states and of the parameters that the optimizer updates. Never coarser than
            `params` or `grads`.
        secondary_params: Scope of a second copy of the parameters, which the first forward after an optimizer step
            leaves for its backward and for later micro-steps. They gather over these ranks only (hpZ). ``"none"`` keeps
            no copy. Smaller than `params`. ``"auto"``, only where the scopes are: chosen with them.
        cluster: Links for ``"auto"`` scopes: a name of the planner's catalog, or the path of a cluster's file, such as
            `mics calibrate` writes. ``"auto"``: those of p4d.24xlarge.
        micro_steps: Micro-steps of an optimizer step for ``"auto"`` scopes, or ``"unknown"``, which counts as 2.
            Lightning's Trainer and Accelerate set it.
        activation_bytes: Bytes of a rank's memory that ``"auto"`` scopes and partitions leave to activations;
            ``"auto"``: a quarter of the memory.
        hierarchical: Whether collectives over several kinds of links have a stage for each of them: inside the nodes,
            between the nodes of a switch, between switches. Stages send the fewest bytes over slow links, but their
            messages wait for one another. True: always. False: never; one stage over all ranks. A number: tensors of at
            least so many bytes; smaller ones are sent directly, from every rank to every other. ``"auto"`` measures
            that number when a job starts, for the all-gathers, reduce-scatters and all-reduces of every span, prints
            the result, and caches it for later jobs. Without a job, and for all quantized collectives, it means stages.
            Sums round
            differently with each algorithm: give a number or True where a training must be bitwise reproducible on
            other nodes or without the user's cache.
        coalesce: Whether units use coalesced collectives, one launch per unit, instead of one flat buffer. This saves
            the copies from and to the flat buffer. It requires that parameters and sums are sharded over the ranks of
            `optimizer`, that nothing is quantized, and that the first dimension of every parameter is a multiple of
            these ranks. True: always. False: never. ``"auto"`` measures both when a job starts, and caches the result.
            On gloo, whose ranks read one another's memory instead, only False is available.
        topology: Links between ranks, as a `Topology` or a mapping of its fields. ``"auto"`` reads the ranks of each
            node from the launcher's environment, and so does a mapping without ``"ranks_per_node"``, such as
            ``{"nodes_per_switch": 4}``. Leaf switches are never found; without them all nodes are equally near.
        weight_codec: Codec of parameters on the wire: ``"none"``, ``"int8"``, ``"int4"``, ``"int2"``, a `Codec` that
            rounds to nearest, or a mapping of its fields such as ``{"bits": 4, "block_size": 128}``. All ranks compute
            with the decoded values, the same bits in forward and backward. The masters that the optimizer updates stay
            exact.
        grad_codec: Codec of gradients on the wire, with the same values as `weight_codec`, or a `Codec` with
            stochastic rounding or feedback. Decoded values are summed in fp32. With either codec, every parameter
            starts with its own block: each rank pads its part of a parameter to whole blocks.
        codec_links: Links on which payloads are quantized: ``"slow"`` (all that leave a node, whether to another one
            under its switch or to another switch) or ``"all"``.
        grad_codec_hops: Hops in which gradients are quantized: ``"first"`` (of every backward), ``"second"`` (of the
            optimizer step) or ``"all"``.
        grad_codec_until: Share of the training after which `grad_codec` is off, 0 to 1. Below 1 it requires
            `training_steps`.
        training_steps: Optimizer steps of the whole training, or ``"unknown"``. Lightning's Trainer sets it.
        param_dtype: Dtype in which parameters are gathered and used; fp8 and integers keep theirs. ``"auto"`` keeps
            the dtype of each parameter, but under mixed precision of Lightning or Accelerate it is the 16-bit dtype.
            There, fp32 means autocast over parameters gathered in fp32.
        reduce_dtype: Dtype of gradients on the wire; ``"auto"`` is fp32, also under mixed precision. Sums are always
            kept in fp32, but NCCL adds in this dtype. bf16 rounds at every rank. fp16 would overflow, so gradients in
            fp16 are divided by about the square root of the number of ranks before they are summed, and by the rest
            afterwards.
        grad_accum_dtype: Dtype in which a rank adds the gradients of its micro-steps where `grads` has fewer ranks than
            `optimizer`, as in `zero1`: ``"auto"`` (fp32) or ``"bfloat16"``, which halves their memory and rounds after
            every micro-step. The sums over ranks that the optimizer reads stay in fp32. Refused where both scopes
            agree, whose sums are the optimizer's own, and with a quantized first hop.
        optimizer_layout: ``"rows"`` shards every tensor. ``"tensors"`` assigns each tensor that an optimizer must
            update as a whole (Muon, Adafactor, ...) to one rank of the optimizer scope; other tensors are sharded by
            rows.
        update_locality: Elements on which the update of one element depends, for optimizers that are not known:
            ``"element"`` (its own) or ``"tensor"`` (those of its tensor, which requires that ``optimizer_layout`` is
            ``"tensors"``). ``"auto"``: optimizers that are not known are refused.
        second_hop: Time at which gradients are reduced beyond their scope: ``"boundary"`` (once per optimizer step),
            ``"micro_step"`` (after every backward, the schedule with which MiCS compares itself) or ``"delayed"``
            (while the backwards of the next step compute, ACCO). The last one changes the algorithm of the training:
            of two calls of `step` the second updates, with the gradients of both.
        overlap: Communication that may overlap compute: ``"all"``, ``"none"`` or a set of ``{"gather", "reduce",
            "second_hop", "update"}``.
        prefetch: Number of units gathered ahead of the one in use. Each needs one more slot of the largest unit. The
            last `prefetch` + 1 units of a forward are still in their slots when the backward needs them.
        broadcast_buffers: Whether all ranks receive rank 0's buffers (running statistics, codebooks) in training when
            `DistributedDataParallel` broadcasts them: before a forward that follows one whose gradients were
            synchronized. Where `params` is ``"none"``, once per optimizer step. False: only when the model is
            evaluated or saved.
        replica_check: Steps in which ranks that hold the same shard compare digests of it, and raise an error where
            they differ, for example after random numbers that each rank drew independently. ``"start"``: the first 10
            optimizer steps. A number: the first 10, and every so many steps. ``"never"``: none. A check reads the
            shards once and sends nothing more.
        check: ``"poison"`` shows reads that torch cannot see (through a NumPy array or an address) of parameters that
            are not unsharded: they are NaN then, integers -1. Every rank has memory for all parameters. Right trainings
            stay bitwise the same. ``"none"``: tensors raise an error in such reads, and nothing else does.
        world_size: Number of ranks that the scopes were planned for; a job of another size is refused. ``"any"``: no
            job is refused.
        outer_every: Optimizer steps that the ranks of each node, or of each leaf switch where `topology` states them,
            take without the others: an *island*. After so many steps all islands take an outer step, in which they
            exchange what their parameters have changed by. 0: never; all ranks synchronize gradients in every step.
            This changes the algorithm of the training. Every scope must fit into an island.
        outer_lr: Learning rate of the outer step.
        outer_momentum: Nesterov momentum of the outer step, 0 to 1.
        outer_fragments: Fragments of the units, each of which takes its outer step behind another step, evenly spread
            over `outer_every` of them. Each sends its part of the bytes. 1: all units together.
        outer_delay: Optimizer steps for which the result of an outer step may be in flight while they compute, fewer
            than `outer_every`. 0: the islands wait for it.
        outer_alpha: Share of its own parameters that an island keeps when the result of a delayed outer step comes, 0
            to 1; the rest is that of the outer step. 0 drops what it has done meanwhile.
        outer_codec: Codec of what outer steps send, with the values of `weight_codec`: ``"int4"`` sends an eighth. All
            islands step on the same decoded values.

    Raises:
        ConfigError: An unknown value, or a value that is not available.
    """

    partition_size: Scope = "auto"
    params: Scope = "partition"
    grads: Scope = "partition"
    optimizer: Scope = "partition"
    secondary_params: Scope = "none"
    cluster: str = "auto"
    micro_steps: int | str = "unknown"
    activation_bytes: int | str = "auto"
    hierarchical: str | bool | int = "auto"
    coalesce: str | bool = "auto"
    topology: str | Topology | Switches | Mapping[str, int] = "auto"
    weight_codec: str | Codec | Mapping[str, Any] = "none"
    grad_codec: str | Codec | Mapping[str, Any] = "none"
    codec_links: str = "slow"
    grad_codec_hops: str = "all"
    grad_codec_until: float = 1.0
    training_steps: int | str = "unknown"
    param_dtype: str | torch.dtype = "auto"
    reduce_dtype: str | torch.dtype = "auto"
    grad_accum_dtype: str | torch.dtype = "auto"
    optimizer_layout: str = "rows"
    update_locality: str = "auto"
    second_hop: str = "boundary"
    overlap: str | frozenset[str] | set[str] = "all"
    prefetch: int = 1
    broadcast_buffers: bool = True
    replica_check: str | int = "start"
    check: str = "none"
    world_size: str | int = "any"
    outer_every: int = 0
    outer_lr: float = 0.7
    outer_momentum: float = 0.5
    outer_fragments: int = 1
    outer_delay: int = 0
    outer_alpha: float = 0.0
    outer_codec: str | Codec | Mapping[str, Any] = "none"

    PRESETS: ClassVar[tuple[str, ...]] = (*_PRESET_LETTERS, *(f"paro-{letters}" for letters in _PARO_LETTERS))

    def __post_init__(self) -> None:
        check_scope("partition_size", self.partition_size, words=("auto", "node", "world"))
        for name in _CHOSEN_TOGETHER:
            if getattr(self, name) == "none":
                object.__setattr__(self, name, "replicate")
            check_scope(name, getattr(self, name), words=("replicate", "partition", "world", "auto"))
        check_scope("secondary_params", self.secondary_params, words=("none", "partition", "world", "auto"))
        check_auto({name: getattr(self, name) for name in _CHOSEN_TOGETHER}, self.secondary_params)
        self._check_hints()
        check_hierarchical(self.hierarchical)
        if not (isinstance(self.coalesce, bool) or self.coalesce == "auto"):
            raise ConfigError(f"`coalesce={self.coalesce!r}` is none of 'auto', True and False. Use one of them.")
        for name in CODEC_FIELDS:
            object.__setattr__(self, name, as_codec(name, getattr(self, name)))
        check_codecs(**{name: self.codec_of(name) for name in CODEC_FIELDS})
        check_choice("codec_links", self.codec_links, ("slow", "all"))
        check_choice("grad_codec_hops", self.grad_codec_hops, ("all", "first", "second"))
        check_choice("optimizer_layout", self.optimizer_layout, ("rows", "tensors"))
        check_choice("update_locality", self.update_locality, ("auto", "element", "tensor"))
        check_choice("second_hop", self.second_hop, ("boundary", "micro_step", "delayed"))
        check_choice("check", self.check, ("none", "poison"))
        if isinstance(self.topology, Mapping):
            object.__setattr__(self, "topology", topology_of(self.topology))
        elif not (isinstance(self.topology, (Topology, Switches)) or self.topology == "auto"):
            raise ConfigError(
                f"`topology={self.topology!r}` is neither 'auto' nor a Topology. Use Topology(ranks_per_node=8)."
            )
        for name in ("param_dtype", "reduce_dtype", "grad_accum_dtype"):
            object.__setattr__(self, name, as_dtype(name, getattr(self, name)))
        if self.grad_accum_dtype not in ("auto", torch.float32, torch.bfloat16):
            raise ConfigError(
                f"`grad_accum_dtype={self.grad_accum_dtype}` is no dtype of sums. Use 'auto', 'float32' or 'bfloat16'."
            )
        object.__setattr__(self, "overlap", as_overlap(self.overlap))
        if isinstance(self.prefetch, bool) or not isinstance(self.prefetch, int) or self.prefetch < 1:
            raise ConfigError(f"`prefetch={self.prefetch!r}` is not a positive number of units. Use 1 or more.")
        if not isinstance(self.broadcast_buffers, bool):
            raise ConfigError(f"`broadcast_buffers={self.broadcast_buffers!r}` is neither True nor False. Use one.")
        check = self.replica_check
        if check not in ("start", "never") and (isinstance(check, bool) or not isinstance(check, int) or check < 1):
            raise ConfigError(f"`replica_check={check!r}` is not available. Use 'start', 'never' or a number of steps.")
        until = self.grad_codec_until
        if isinstance(until, bool) or not isinstance(until, (int, float)) or not 0.0 <= until <= 1.0:
            raise ConfigError(f"`grad_codec_until={until!r}` is not a share of the training. Use 0.0 to 1.0.")
        check_outer(self.outer_round, {name: getattr(self, name) for name in OUTER_NUMBERS})
        self._check_beside_outer()
        self._check_delayed()

    def _check_hints(self) -> None:
        """Check what ``"auto"`` scopes and partitions depend on."""
        if not isinstance(self.cluster, str) or not self.cluster:
            raise ConfigError(f"`cluster={self.cluster!r}` is no cluster's name or path. Use e.g. 'p4d.24xlarge'.")
        for name, least, word in _NUMBERS:
            value = getattr(self, name)
            is_count = isinstance(value, int) and not isinstance(value, bool) and value >= least
            if not is_count and value != word:
                raise ConfigError(f"`{name}={value!r}` is not a number. Use {least} or more, or {word!r}.")
        for name, default in (("cluster", "auto"), ("micro_steps", "unknown")):
            if not self.is_auto and getattr(self, name) != default:
                raise ConfigError(
                    f"`{name}={getattr(self, name)!r}` counts for scopes that are chosen, and `params={self.params!r}` "
                    f"is not. Use the preset 'auto', or remove `{name}`."
                )
        if self.is_auto and self.partition_size != "auto":
            raise ConfigError(
                f"`partition_size={self.partition_size!r}` is the size of scopes 'partition', and 'auto' scopes are "
                "chosen with their sizes. Remove it, or use the preset 'mics'."
            )

    def _check_beside_outer(self) -> None:
        """Refuse fields that outer steps do not support."""
        weight_codec, grad_codec = self.codec_of("weight_codec"), self.codec_of("grad_codec")
        problem = ""
        if self.is_auto:
            problem = "`params='auto'` chooses scopes for gradients that all ranks synchronize. Name the scopes"
        elif weight_codec is not None and weight_codec.differences:
            problem = "`weight_codec` encodes differences, which an outer step would make large. Use differences=False"
        elif grad_codec is not None and grad_codec.feedback:
            problem = "`grad_codec` has feedback, whose residuals checkpoints of islands lack. Use feedback=False"
        if self.outer_codec != "none" and not self.outer_every:
            raise ConfigError(
                f"`outer_codec={self.outer_codec!r}` counts for outer steps, and `outer_every=0` takes none. Set "
                "`outer_every`, or remove `outer_codec`."
            )
        if self.outer_every and problem:
            raise ConfigError(f"`outer_every={self.outer_every}` is set, and {problem}, or outer_every=0.")

    def _check_delayed(self) -> None:
        """Refuse fields that delayed second hops do not support."""
        grad_codec, problem = self.codec_of("grad_codec"), ""
        if self.is_auto:
            problem = "`params='auto'` chooses scopes for gradients that every step waits for. Name the scopes"
        elif self.outer_every:
            problem = f"`outer_every={self.outer_every}` lets nodes step alone. Use outer_every=0"
        elif not {"second_hop", "update"}.issubset(self.overlap):
            problem = "`overlap` leaves out 'second_hop' or 'update', which it needs. Use overlap='all'"
        elif grad_codec is not None and grad_codec.feedback:
            problem = "`grad_codec` has feedback, whose residuals belong to the step that sends. Use feedback=False"
        if self.second_hop == "delayed" and problem:
            raise ConfigError(f"`second_hop='delayed'` is set, and {problem}, or second_hop='boundary'.")

    def param_dtype_of(self, dtype: torch.dtype) -> torch.dtype:
        """Dtype in which a parameter of `dtype` is gathered and used."""
        is_cast = dtype.is_floating_point and dtype.itemsize > 1  # fp8 values have no meaning without their scales
        return self.param_dtype if isinstance(self.param_dtype, torch.dtype) and is_cast else dtype

    def wire_dtype_of(self, dtype: torch.dtype) -> torch.dtype:
        """Dtype on the wire of the gradient of a parameter of `dtype`."""
        return self.reduce_dtype if isinstance(self.reduce_dtype, torch.dtype) else sum_dtype_of(dtype)

    def accum_dtype_of(self, dtype: torch.dtype) -> torch.dtype:
        """Dtype in which gradients of micro-steps are added, of a parameter of `dtype`."""
        total = sum_dtype_of(dtype)
        return torch.bfloat16 if self.rounds_sums and total is torch.float32 else total

    @property
    def rounds_sums(self) -> bool:
        """Whether gradients of micro-steps are added in 16 bits."""
        return self.grad_accum_dtype is torch.bfloat16

    @property
    def grad_codec_steps(self) -> int | None:
        """Optimizer steps with `grad_codec`; None for all.

        Raises:
            ConfigError: `grad_codec_until` is a share of a training of unknown length.
        """
        if self.grad_codec == "none" or self.grad_codec_until == 1.0:
            return None
        if not isinstance(self.training_steps, int):
            raise ConfigError(
                f"`grad_codec_until={self.grad_codec_until!r}` is a share of a training whose length is unknown. Set "
                "`training_steps` to the number of its optimizer steps."
            )
        return round(self.grad_codec_until * self.training_steps)

    @property
    def steps_between_checks(self) -> int:
        """Optimizer steps between two replica checks after the first steps.

        It is 0 for none of these, and -1 for no check at all.
        """
        check = self.replica_check
        return check if isinstance(check, int) else {"start": 0, "never": -1}[check]

    def codec_of(self, name: str) -> Codec | None:
        """The codec of one of `CODEC_FIELDS`; None for ``"none"``."""
        value = getattr(self, name)
        return None if value == "none" else Codec.of(value)

    @property
    def outer_round(self) -> Round:
        """When the parts of the model take outer steps."""
        return Round(every=self.outer_every, fragments=self.outer_fragments, delay=self.outer_delay)

    @property
    def is_auto(self) -> bool:
        """Whether `shard()` chooses the scopes."""
        return self.params == "auto"

    @property
    def has_auto_partition(self) -> bool:
        """Whether `shard()` chooses the size of a partition that a scope names; with outer steps it is a node."""
        scopes = (self.params, self.grads, self.optimizer, self.secondary_params)
        return self.partition_size == "auto" and "partition" in scopes and not self.outer_every

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> ShardConfig:
        """The configuration of a published system, by name, with any field overridden.

        Args:
            name: One of `ShardConfig.PRESETS`: ``ddp zero1 zero2 zero3 zeropp zeropp-hpz mics hsdp`` or
                ``paro-XYZ`` with the letters n (none), i (partition), g (world) for parameters, gradients and optimizer
                states; or ``auto``, which chooses any scopes. ``zeropp`` is all of ZeRO++: secondary copy, INT8
                parameters and INT4 gradients on all links; ``zeropp-hpz`` is the copy alone, which rounds nothing.
            **overrides: Fields of `ShardConfig`.

        Raises:
            ConfigError: Unknown preset or field.

        Source:
            MiCS (arXiv:2205.00119); ZeRO (arXiv:1910.02054); ZeRO++ (arXiv:2306.10209), sections 3.1 to 3.3;
            PaRO (arXiv:2310.06003), table 1.
        """
        key = str(name).lower().replace("_", "-")
        is_paro = key.startswith("paro-") and key[5:] in _PARO_LETTERS
        letters = key[5:] if is_paro else _PRESET_LETTERS.get(key)
        if letters is None and key != "auto":
            hint = nearest(_FSDP_NAMES.get(key, key), (*cls.PRESETS, "auto"))
            raise ConfigError(f"`preset={name!r}` is not known.{hint}")
        cls._refuse_unknown(overrides)
        words = [_LETTER_SCOPES[letter] for letter in letters] if letters else ["auto"] * 3
        scopes = dict(zip(_CHOSEN_TOGETHER, words, strict=True))
        return cls(**{**scopes, **_PRESET_FIELDS.get(key, {}), **overrides})

    @classmethod
    def of(cls, config: str | ShardConfig, **overrides: Any) -> ShardConfig:
        """The configuration of a preset or of another one, with fields overridden.

        Args:
            config: A preset's name or a `ShardConfig`.
            **overrides: Fields of `ShardConfig`; those that are None keep the value in `config`.

        Raises:
            ConfigError: Unknown preset or field.
        """
        changes = {name: value for name, value in overrides.items() if value is not None}
        if isinstance(config, str):
            return cls.preset(config, **changes)
        if not isinstance(config, cls):
            raise ConfigError(f"`config={config!r}` is no configuration. Use a preset's name or a `ShardConfig`.")
        return config.replace(**changes)

    @classmethod
    def _refuse_unknown(cls, names: Iterable[str]) -> None:
        fields = [field.name for field in dataclasses.fields(cls)]
        for name in sorted(set(names) - set(fields)):
            raise ConfigError(f"Unknown option {name!r}.{nearest(name, fields)}")

    def describe(self) -> dict[str, str]:
        """Every field as text; the texts of two ranks are equal when their values are."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: str(sorted(v) if isinstance(v, frozenset) else v) for name, v in values.items()}

    def replace(self, **changes: Any) -> ShardConfig:
        """A validated copy with some fields changed."""
        self._refuse_unknown(changes)
        return dataclasses.replace(self, **changes)


def sum_dtype_of(dtype: torch.dtype) -> torch.dtype:
    """Dtype in which gradients of a parameter of `dtype` are added: fp32, or wider."""
    is_narrow = dtype.is_floating_point and dtype.itemsize < 4  # also fp8, which torch does not promote
    return torch.float32 if is_narrow else torch.promote_types(dtype, torch.float32)
