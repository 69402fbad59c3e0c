"""Scopes of model states in this job, mesh axes, and routes of collectives.

Pure.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mics_strategy.comm.route import (
    ALL_GATHER,
    ALL_REDUCE,
    NEVER,
    REDUCE_SCATTER,
    HierarchicalThreshold,
    Route,
    SizedRoutes,
    Stage,
    TunableCollective,
)
from mics_strategy.errors import ConfigError
from mics_strategy.islands import ranks_of_island
from mics_strategy.mesh_axis import check_degree, make_axes
from mics_strategy.topology import Axis, Span, Topology

if TYPE_CHECKING:
    from mics_strategy.comm.codecs.format import Codec
    from mics_strategy.config import ShardConfig

COLLECTIVES = {  # by role
    "param_all_gather": ALL_GATHER,
    "secondary_all_gather": ALL_GATHER,
    "param_sync": ALL_GATHER,
    "grad_reduce_scatter": REDUCE_SCATTER,
    "second_hop_reduce_scatter": REDUCE_SCATTER,
    "second_hop_all_reduce": ALL_REDUCE,
    "outer_all_reduce": ALL_REDUCE,
}
ROLES = tuple(role for role in COLLECTIVES if role != "outer_all_reduce")  # of a step; the outer step is none
GATHERS = tuple(role for role in ROLES if COLLECTIVES[role] == ALL_GATHER)
REDUCTIONS = tuple(role for role in ROLES if role not in GATHERS)  # of gradients
STREAMS = {  # roles by the stream, or queue, of their collectives
    "gather": GATHERS,
    "reduce": ("grad_reduce_scatter",),
    "second_hop": ("second_hop_reduce_scatter", "second_hop_all_reduce"),
    "outer": ("outer_all_reduce",),  # in flight for several steps, which must not wait behind it
}
STREAM_OF = {role: stream for stream, roles in STREAMS.items() for role in roles}


@dataclass(frozen=True, slots=True, kw_only=True)
class Codecs:
    """Codecs by payload: parameters, gradients in the first hop (of every backward) and the second, outer steps."""

    params: Codec | None = None
    first_hop: Codec | None = None
    second_hop: Codec | None = None
    outer: Codec | None = None
    is_on_all_links: bool = False

    @property
    def has_differences(self) -> bool:
        """Whether param syncs encode differences of the parameters."""
        return self.params is not None and self.params.differences

    def for_role(self, role: str) -> Codec | None:
        """The codec of a role.

        None for the secondary copy, which has been decoded once: quantized again, in other blocks, it would give the
        backward other parameters than the forward had. None for all-gathers of parameters that a param sync has brought
        as differences: quantized again, they would lose what the differences keep.
        """
        codecs = {
            "param_all_gather": None if self.has_differences else self.params,
            "secondary_all_gather": None,
            "param_sync": self.params,
            "grad_reduce_scatter": self.first_hop,
            "second_hop_reduce_scatter": self.second_hop,
            "second_hop_all_reduce": self.second_hop,
            "outer_all_reduce": self.outer,
        }
        return codecs[role]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scopes:
    """Degrees of all model states, and the mesh axes that they define.

    Every degree is the product of a prefix of `axes`. A collective over several kinds of links is hierarchical, with
    one stage for each, if `is_hierarchical` and if its tensor reaches the threshold in `two_stages`.

    Attributes:
        world_size: Ranks that synchronize gradients in every step: those of the job, or of an island.
        ranks_per_node: Ranks of a node.
        params: Degree of the parameters between uses.
        grads: Degree to which gradients are reduced in every micro-step.
        optimizer: Degree of the optimizer states and masters.
        secondary: Degree of the copy of the parameters that the forward leaves for the backward; `params` for none.
        axes: Mesh axes, fastest first. The name of each begins with its link: "intra_node", "inter_node" or
            "inter_switch"; a number follows where several cross the same link ("inter_node.0").
        is_hierarchical: Whether collectives may have several stages.
        two_stages: Size thresholds of hierarchical collectives.
        codecs: Codecs by payload.
        num_islands: Groups of `world_size` ranks in the job; 1 without outer steps.
    """

    world_size: int
    ranks_per_node: int
    params: int
    grads: int
    optimizer: int
    secondary: int
    axes: tuple[Axis, ...]
    is_hierarchical: bool = True
    two_stages: HierarchicalThreshold = dataclasses.field(default_factory=HierarchicalThreshold)
    codecs: Codecs = dataclasses.field(default_factory=lambda: Codecs())
    num_islands: int = 1

    @property
    def degrees(self) -> dict[str, int]:
        """Degrees of the three model states."""
        return {"params": self.params, "grads": self.grads, "optimizer": self.optimizer}

    @property
    def short(self) -> str:
        """The degrees as in "1/8/64"."""
        return "/".join(map(str, self.degrees.values()))

    @property
    def phrase(self) -> str:
        """The degrees as part of a sentence, in front of "ranks"."""
        return f"parameters over {self.params}, gradients over {self.grads}, optimizer states over {self.optimizer}"

    @property
    def job_size(self) -> int:
        """Ranks of the job."""
        return self.world_size * self.num_islands

    def depth(self, degree: int) -> int:
        """Number of leading axes whose sizes multiply to `degree`."""
        product = 1
        for position, axis in enumerate(self.axes):
            if product == degree:
                return position
            product *= axis.size
        if product != degree:
            raise ConfigError(
                f"No scope of {degree} ranks among axes {[axis.size for axis in self.axes]}. Use a product of the "
                "first of them."
            )
        return len(self.axes)

    def span(self, inner: int, outer: int) -> Span:
        """The axes that a scope of `outer` ranks has beyond one of `inner` ranks."""
        return Span(axes=self.axes[self.depth(inner) : self.depth(outer)])

    def without_grad_codecs(self) -> Scopes:
        """A copy without codecs for gradients."""
        return dataclasses.replace(self, codecs=dataclasses.replace(self.codecs, first_hop=None, second_hop=None))

    def without_weight_codec(self) -> Scopes:
        """A copy without a codec for parameters."""
        return dataclasses.replace(self, codecs=dataclasses.replace(self.codecs, params=None))

    @property
    def has_quantized_params(self) -> bool:
        """Whether the unsharded parameters were quantized on the wire. They then differ from the shards."""
        return self.is_quantized("param_all_gather", "param_sync")

    def is_quantized(self, *roles: str) -> bool:
        """Whether a collective of any of the roles is quantized."""
        routes = [self.routes(role) for role in roles]
        return any(sized is not None and sized.hierarchical.is_quantized for sized in routes)

    @property
    def has_secondary(self) -> bool:
        """Whether a forward leaves a secondary copy of the parameters for the backward."""
        return self.secondary < self.params

    def degrees_of(self, role: str) -> tuple[int, int]:
        """The smaller and the larger degree of the collectives of one of `ROLES`."""
        match role:
            case "param_all_gather":
                return 1, self.params
            case "secondary_all_gather":
                return 1, self.secondary if self.has_secondary else 1
            case "param_sync":
                return self.params, self.optimizer
            case "grad_reduce_scatter":
                return 1, self.grads
            case "second_hop_reduce_scatter":
                return self.grads, self.optimizer
            case "second_hop_all_reduce":
                return self.optimizer, self.world_size
            case "outer_all_reduce":
                return self.world_size, self.job_size
        raise KeyError(role)

    def span_of(self, role: str) -> Span:
        """The span of the collectives of one of `ROLES`."""
        return self.span(*self.degrees_of(role))

    def routes(self, role: str) -> SizedRoutes | None:
        """The routes of one of `ROLES`; None where its span is one rank."""
        span, codec = self.span_of(role), self.codecs.for_role(role)
        if span.size == 1:
            return None
        parts = span.split_by_link()
        from_bytes = self.two_stages.for_collective((COLLECTIVES[role], span))
        is_flat = not self.is_hierarchical or (codec is None and from_bytes == NEVER)
        if len(parts) == 1 or is_flat:
            only = Stage(axis=span.name, size=span.size, codec=self._codec_on(span, codec))
            return SizedRoutes(hierarchical=Route(stages=(only,)))
        stages = [Stage(axis=part.name, size=part.size, codec=self._codec_on(part, codec)) for part in reversed(parts)]
        hierarchical = Route(stages=tuple(stages))
        if codec is not None or from_bytes == 0:
            return SizedRoutes(hierarchical=hierarchical)
        flat = Route(stages=(Stage(axis=span.name, size=span.size),))
        return SizedRoutes(hierarchical=hierarchical, flat=flat, hierarchical_from_bytes=from_bytes)

    def _codec_on(self, span: Span, codec: Codec | None) -> Codec | None:
        """The codec of one stage: inside a node, only where all links have it."""
        return None if span.is_inside_node and not self.codecs.is_on_all_links else codec

    def route(self, role: str, full_bytes: int) -> Route | None:
        """The route of a tensor of `full_bytes` bytes, counted unquantized. It is None where nothing is sent."""
        routes = self.routes(role)
        return None if routes is None else routes.for_bytes(full_bytes)

    def block_numel(self, *, is_trainable: bool) -> int:
        """The multiple of elements at which parameters start. So no codec block holds two of them."""
        roles = COLLECTIVES if is_trainable else ("param_all_gather", "param_sync")
        numels = []
        for role in roles:
            codec = self.codecs.for_role(role)
            if codec is not None and self.is_quantized(role):
                numels.append(codec.bound_numel)
        return math.lcm(*numels)

    def untuned(self) -> dict[TunableCollective, str]:
        """The collectives with a threshold to be measured, and the first role of each."""
        tunables: dict[TunableCollective, str] = {}
        measured = {tunable for tunable, _ in self.two_stages.measured}
        for role, collective in COLLECTIVES.items() if self.two_stages.is_untuned and self.is_hierarchical else ():
            span = self.span_of(role)
            if (
                len(span.split_by_link()) > 1
                and self.codecs.for_role(role) is None
                and (collective, span) not in measured
            ):
                tunables.setdefault((collective, span), role)
        return tunables

    def with_tuning(self, measured: dict[TunableCollective, int]) -> Scopes:
        """A copy with measured thresholds, in bytes by collective and span."""
        if not measured:
            return self
        merged = dict(self.two_stages.measured) | measured
        return dataclasses.replace(
            self, two_stages=dataclasses.replace(self.two_stages, measured=tuple(merged.items()))
        )

    def with_both_algorithms(self) -> Scopes:
        """A copy whose collectives have both algorithms, for a measurement."""
        return dataclasses.replace(self, two_stages=HierarchicalThreshold(from_bytes=1))


def resolve_scopes(config: ShardConfig, topology: Topology, world_size: int) -> Scopes:
    """Resolve the scopes of a configuration to numbers of ranks and mesh axes.

    Args:
        config: Configuration whose scopes are chosen, not 'auto'.
        topology: Ranks of a node, and nodes of a switch.
        world_size: Ranks of the job.

    Raises:
        ConfigError: A scope does not divide the world, straddles nodes or switches unevenly or does not nest with the
            others; or the configuration was planned for another job; or optimizer states have a coarser scope than
            parameters or gradients; or a codec has nothing to encode.
    """
    _check_world_size(config, world_size)
    topology.check_world(world_size)
    per_node = topology.ranks_per_node
    if config.is_auto:
        raise ConfigError(
            "`params`, `grads` and `optimizer` are 'auto', still to be chosen. Name the scopes, or let `shard()` "
            "choose them."
        )
    words = {"replicate": 1, "node": per_node, "world": world_size}
    partition = per_node if config.partition_size == "auto" else _ranks_of(config.partition_size, words)
    words["partition"] = partition
    degrees = {name: _ranks_of(getattr(config, name), words) for name in ("params", "grads", "optimizer")}
    for name, degree in {"partition_size": partition, **degrees}.items():
        check_degree(name, degree, topology, world_size)
    for name in ("params", "grads"):
        if degrees["optimizer"] < degrees[name]:
            raise ConfigError(
                f"`optimizer` is sharded over {degrees['optimizer']} ranks, coarser than `{name}` over "
                f"{degrees[name]}. Shard `optimizer` over {degrees[name]} ranks or more, or `{name}` over fewer."
            )
    secondary = degrees["params"]
    if config.secondary_params != "none":
        secondary = _ranks_of(config.secondary_params, words)
        check_degree("secondary_params", secondary, topology, world_size)
        if secondary > degrees["params"]:
            raise ConfigError(
                f"`secondary_params` is sharded over {secondary} ranks, more than `params` over {degrees['params']}: "
                f"its all-gather would reach further than that of `params`. Use {degrees['params']} ranks or fewer, "
                "or 'none'."
            )
    island = ranks_of_island(config.outer_every, topology, world_size, degrees)
    scopes = Scopes(
        world_size=island,
        ranks_per_node=per_node,
        axes=make_axes({*degrees.values(), secondary, island}, topology, world_size),
        params=degrees["params"],
        grads=degrees["grads"],
        optimizer=degrees["optimizer"],
        secondary=secondary,
        is_hierarchical=config.hierarchical is not False,
        two_stages=_two_stages_of(config),
        codecs=_codecs_of(config),
        num_islands=world_size // island,
    )
    for check in (_check_differences, _check_codecs, _check_accumulation, _check_delayed):
        check(config, scopes)
    return scopes


def _check_world_size(config: ShardConfig, world_size: int) -> None:
    if config.world_size not in ("any", world_size):
        raise ConfigError(
            f"The configuration was planned for `world_size={config.world_size}` ranks, and the job has {world_size}. "
            "Plan again for this job, or set `world_size='any'` to keep the scopes."
        )


def _check_delayed(config: ShardConfig, scopes: Scopes) -> None:
    if config.second_hop == "delayed" and scopes.grads == scopes.world_size:
        raise ConfigError(
            f"`second_hop='delayed'` has nothing to delay: `grads` is sharded over all {scopes.world_size} ranks of "
            "this job, so that no second hop follows. Shard `grads` over fewer ranks, as 'mics' does on several "
            "nodes, or use second_hop='boundary'."
        )


def _two_stages_of(config: ShardConfig) -> HierarchicalThreshold:
    threshold = config.hierarchical
    from_bytes = threshold if isinstance(threshold, int) and not isinstance(threshold, bool) else 0
    return HierarchicalThreshold(from_bytes=from_bytes, is_untuned=threshold == "auto")


def _codecs_of(config: ShardConfig) -> Codecs:
    return Codecs(
        params=config.codec_of("weight_codec"),
        first_hop=config.codec_of("grad_codec") if config.grad_codec_hops != "second" else None,
        second_hop=config.codec_of("grad_codec") if config.grad_codec_hops != "first" else None,
        outer=config.codec_of("outer_codec"),
        is_on_all_links=config.codec_links == "all",
    )


def unused_codecs(config: ShardConfig, scopes: Scopes) -> list[str]:
    """Fields of a configuration whose codec encodes nothing in this job."""
    roles_by_field = {"weight_codec": ("param_all_gather", "param_sync"), "grad_codec": REDUCTIONS}
    routes = {name: [scopes.routes(role) for role in roles] for name, roles in roles_by_field.items()}
    return [
        name
        for name, field_routes in routes.items()
        if config.codec_of(name) is not None
        and not any(sized is not None and sized.hierarchical.is_quantized for sized in field_routes)
    ]


def _check_codecs(config: ShardConfig, scopes: Scopes) -> None:
    """Raise for unused codecs in a job of several nodes. On one node, a configuration for several may be tried."""
    for name in unused_codecs(config, scopes) if scopes.job_size > scopes.ranks_per_node else ():
        payload = "Parameters" if name == "weight_codec" else "Gradients"
        raise ConfigError(
            f"`{name}={getattr(config, name)!r}` has nothing to encode: with these scopes, {payload.lower()} are never "
            f"sent where `codec_links={config.codec_links!r}` and `grad_codec_hops={config.grad_codec_hops!r}` "
            f"encode. Use {', '.join(_remedies(name, config, scopes))} or `{name}='none'`."
        )


def _check_differences(config: ShardConfig, scopes: Scopes) -> None:
    """Raise for differences of parameters that no param sync brings to a shard."""
    if not scopes.codecs.has_differences:
        return
    if scopes.has_secondary:
        problem = (
            f"`secondary_params={config.secondary_params!r}` copies parameters that an all-gather brings, not a param "
            f"sync. Use secondary_params='none' and `params` over {scopes.secondary} ranks, which sends as few bytes "
            "between nodes"
        )
    elif scopes.params == 1:
        problem = "`params='replicate'` keeps them whole: no shard to add a difference to. Use params='partition'"
    elif scopes.params == scopes.optimizer:
        problem = (
            f"`params` and `optimizer` are both sharded over {scopes.params} ranks, so that no param sync sends them. "
            "Shard `optimizer` over more ranks"
        )
    else:
        return
    raise ConfigError(f"`weight_codec` encodes differences of the parameters, but {problem}, or differences=False.")


def _check_accumulation(config: ShardConfig, scopes: Scopes) -> None:
    """Raise for sums in 16 bits that have no memory of their own, or are decoded from a codec."""
    if not config.rounds_sums:
        return
    asked = "`grad_accum_dtype='bfloat16'` is for sums of micro-steps"
    if scopes.grads == scopes.optimizer:
        raise ConfigError(
            f"{asked}, and here `grads` and `optimizer` have one scope: the sums are the gradients that the optimizer "
            "reads. Use 'auto', or `grads` over fewer ranks than `optimizer`."
        )
    if scopes.is_quantized("grad_reduce_scatter"):
        raise ConfigError(
            f"{asked}, and `grad_codec={config.grad_codec!r}` adds decoded gradients in fp32. Use 'auto', or "
            "grad_codec_hops='second'."
        )


def _remedies(name: str, config: ShardConfig, scopes: Scopes) -> list[str]:
    """Changes of the configuration with which an unused codec encodes something.

    They change one field, or both if one is not enough.
    """
    fields = [field for field in ("codec_links", "grad_codec_hops") if getattr(config, field) != "all"]
    remedies: list[str] = []
    for changed in (*([field] for field in fields), fields):
        changed_config = config.replace(**dict.fromkeys(changed, "all"))
        changed_scopes = dataclasses.replace(scopes, codecs=_codecs_of(changed_config))
        is_unused = name in unused_codecs(changed_config, changed_scopes)
        if changed and not is_unused and not (len(changed) > 1 and remedies):
            remedies.append(" with ".join(f"`{field}='all'`" for field in changed))
    if name == "weight_codec":
        remedies.append("a wider scope of `params` or `optimizer`")
    return list(dict.fromkeys(remedies)) or ["another `grad_codec_hops`"]


def _ranks_of(scope: str | int, words: dict[str, int]) -> int:
    return scope if isinstance(scope, int) else words[scope]
