"""How many ranks does each word of a configuration mean in this job, and how do they reach one another?

Pure.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from mics_strategy.comm.codecs.format import Codec
from mics_strategy.comm.route import Algorithm, Hop, Route, SizedRoutes
from mics_strategy.comm.traffic import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from mics_strategy.config import ShardConfig
from mics_strategy.errors import ConfigError
from mics_strategy.topology import Axis, Span, Topology
from mics_strategy.tuning.threshold import HierarchicalThreshold, TunableCollective

COLLECTIVES = {
    "param_all_gather": ALL_GATHER,
    "secondary_all_gather": ALL_GATHER,
    "param_sync": ALL_GATHER,
    "grad_reduce_scatter": REDUCE_SCATTER,
    "second_hop_reduce_scatter": REDUCE_SCATTER,
    "second_hop_all_reduce": ALL_REDUCE,
}
ROLES = tuple(COLLECTIVES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Codecs:
    """What is encoded: parameters, gradients in every backward, gradients in the second hop; on which links."""

    params: Codec | None = None
    first_hop: Codec | None = None
    second_hop: Codec | None = None
    is_on_all_links: bool = False

    def for_role(self, role: str) -> Codec | None:
        """The codec of one of `PURPOSES`.

        None for the secondary copy, which has been decoded once: encoded anew, in other blocks, it would give the
        backward other parameters than the forward had.
        """
        if role == "secondary_all_gather":
            return None
        if role == "grad_reduce_scatter":
            return self.first_hop
        return self.second_hop if role.startswith("second_") else self.params


@dataclass(frozen=True, slots=True, kw_only=True)
class Scopes:
    """Ranks over which each model state is sharded, and the axes that these degrees cut.

    Every degree is the product of a prefix of `axes`. `secondary` is the degree of the copy of the parameters that the
    forward leaves for the backward; equal to `params` when there is none. A collective over ranks of several nodes goes
    in two stages where `is_hierarchical` and its tensor is as large as `two_stages` says.
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

    def depth(self, degree: int) -> int:
        """Number of leading axes whose sizes multiply to `degree`."""
        product = 1
        for position, axis in enumerate(self.axes):
            if product == degree:
                return position
            product *= axis.size
        if product != degree:
            raise ConfigError(f"No scope of {degree} ranks among axes {[axis.size for axis in self.axes]}.")
        return len(self.axes)

    def span(self, inner: int, outer: int) -> Span:
        """The axes that a scope of `outer` ranks has and one of `inner` ranks lacks."""
        return Span(axes=self.axes[self.depth(inner) : self.depth(outer)])

    def without_grad_codecs(self) -> Scopes:
        """The same, with gradients sent as they are."""
        return dataclasses.replace(self, codecs=dataclasses.replace(self.codecs, first_hop=None, second_hop=None))

    @property
    def has_quantized_params(self) -> bool:
        """Whether what ranks compute with was encoded on its way, so that it differs from the shards."""
        routes = [self.routes(purpose) for purpose in ("param_all_gather", "param_sync")]
        return any(each is not None and each.hierarchical.is_quantized for each in routes)

    def span_of(self, role: str) -> Span:
        """The ranks that exchange for one of `PURPOSES`."""
        inner, outer = {
            "param_all_gather": (1, self.params),
            "secondary_all_gather": (1, self.secondary if self.secondary < self.params else 1),
            "param_sync": (self.params, self.optimizer),
            "grad_reduce_scatter": (1, self.grads),
            "second_hop_reduce_scatter": (self.grads, self.optimizer),
            "second_hop_all_reduce": (self.optimizer, self.world_size),
        }[role]
        return self.span(inner, outer)

    def routes(self, role: str) -> SizedRoutes | None:
        """The routes of what serves one of `PURPOSES`; None where one rank needs nothing."""
        span, codec = self.span_of(role), self.codecs.for_role(role)
        fast, slow = span.split_by_link()
        if span.size == 1:
            return None
        mixes = fast.size > 1 and slow.size > 1
        if not (mixes and self.is_hierarchical):
            codec = codec if slow.size > 1 or self.codecs.is_on_all_links else None
            way = Algorithm.RING if mixes else Algorithm.DEFAULT
            return SizedRoutes(
                hierarchical=Route(inter=Hop(axis=span.name, size=span.size, codec=codec, algorithm=way))
            )
        in_two_stages = Route(
            inter=Hop(axis=slow.name, size=slow.size, codec=codec),
            intra=Hop(axis=fast.name, size=fast.size, codec=codec if self.codecs.is_on_all_links else None),
        )
        from_bytes = self.two_stages.for_collective((COLLECTIVES[role], span))
        if codec is not None or from_bytes == 0:
            return SizedRoutes(hierarchical=in_two_stages)
        direct = Route(inter=Hop(axis=span.name, size=span.size, algorithm=Algorithm.ALL_TO_ALL))
        return SizedRoutes(hierarchical=in_two_stages, flat=direct, hierarchical_from_bytes=from_bytes)

    def route(self, role: str, full_bytes: int) -> Route | None:
        """The stages in which a tensor of so many bytes goes, as it travels unencoded; None where nothing is sent."""
        routes = self.routes(role)
        return None if routes is None else routes.for_bytes(full_bytes)

    def block_numel(self, *, is_trainable: bool) -> int:
        """What parameters start at multiples of, so that whatever encodes them or their gradients never mixes two."""
        purposes = ROLES if is_trainable else ("param_all_gather", "param_sync")
        routes = {purpose: self.routes(purpose) for purpose in purposes}
        codecs = [
            self.codecs.for_role(purpose)
            for purpose, found in routes.items()
            if found and found.hierarchical.is_quantized
        ]
        return math.lcm(*(codec.bound_numel for codec in codecs if codec is not None))

    def untuned(self) -> dict[TunableCollective, str]:
        """What a calibration would measure, each with the first purpose that it serves."""
        found: dict[TunableCollective, str] = {}
        known = {crossing for crossing, _ in self.two_stages.measured}
        for purpose, collective in COLLECTIVES.items() if self.two_stages.is_untuned and self.is_hierarchical else ():
            span = self.span_of(purpose)
            mixes = all(part.size > 1 for part in span.split_by_link())
            if mixes and self.codecs.for_role(purpose) is None and (collective, span) not in known:
                found.setdefault((collective, span), purpose)
        return found

    def with_tuning(self, measured: dict[TunableCollective, int]) -> Scopes:
        """The same, with what a calibration has found."""
        if not measured:
            return self
        known = dict(self.two_stages.measured) | measured
        return dataclasses.replace(self, two_stages=dataclasses.replace(self.two_stages, measured=tuple(known.items())))

    def with_both_algorithms(self) -> Scopes:
        """The same with collectives that have both ways, for a calibration."""
        return dataclasses.replace(self, two_stages=HierarchicalThreshold(from_bytes=1))


def resolve_scopes(config: ShardConfig, topology: Topology, world_size: int) -> Scopes:
    """Turn the words of a configuration into numbers of ranks, and cut the axes.

    Raises:
        ConfigError: A scope that does not divide the world, straddles nodes unevenly, does not nest with the
            others, or optimizer states coarser than parameters or gradients.
    """
    topology.check_world(world_size)
    per_node = topology.ranks_per_node
    if config.is_auto:
        raise ConfigError("The scopes are still to be chosen ('auto'). Give them, or let `shard()` choose.")
    words = {"none": 1, "node": per_node, "world": world_size}
    partition = per_node if config.partition_size == "auto" else _ranks_of(config.partition_size, words)
    words["partition"] = partition
    degrees = {name: _ranks_of(getattr(config, name), words) for name in ("params", "grads", "optimizer")}
    for name, degree in {"partition_size": partition, **degrees}.items():
        _check_degree(name, degree, per_node, world_size)
    for name in ("params", "grads"):
        if degrees["optimizer"] < degrees[name]:
            raise ConfigError(
                f"`optimizer` is sharded over {degrees['optimizer']} ranks, coarser than `{name}` over "
                f"{degrees[name]}. Shard `optimizer` over {degrees[name]} ranks or more, or `{name}` over fewer."
            )
    secondary = degrees["params"]
    if config.secondary_params != "none":
        secondary = _ranks_of(config.secondary_params, words)
        _check_degree("secondary_params", secondary, per_node, world_size)
        if secondary > degrees["params"]:
            raise ConfigError(
                f"`secondary_params` is sharded over {secondary} ranks, more than `params` over {degrees['params']}: "
                f"a backward would gather from further away. Use {degrees['params']} ranks or fewer, or 'none'."
            )
    scopes = Scopes(
        world_size=world_size,
        ranks_per_node=per_node,
        axes=_cut_axes(sorted({*degrees.values(), secondary}), per_node, world_size),
        secondary=secondary,
        is_hierarchical=config.hierarchical is not False,
        two_stages=_two_stages_of(config),
        codecs=_codecs_of(config),
        **degrees,
    )
    _check_codecs(config, scopes)
    return scopes


def _two_stages_of(config: ShardConfig) -> HierarchicalThreshold:
    asked = config.hierarchical
    from_bytes = asked if isinstance(asked, int) and not isinstance(asked, bool) else 0
    return HierarchicalThreshold(from_bytes=from_bytes, is_untuned=asked == "auto")


def _codecs_of(config: ShardConfig) -> Codecs:
    return Codecs(
        params=config.codec_of("weight_codec"),
        first_hop=config.codec_of("grad_codec") if config.grad_codec_hops != "second" else None,
        second_hop=config.codec_of("grad_codec") if config.grad_codec_hops != "first" else None,
        is_on_all_links=config.codec_links == "all",
    )


def unused_codecs(config: ShardConfig, scopes: Scopes) -> list[str]:
    """Fields of a configuration that ask for a codec with which nothing is encoded in this job."""
    purposes = {"weight_codec": ("param_all_gather", "param_sync"), "grad_codec": ROLES[3:]}
    routes = {name: [scopes.routes(purpose) for purpose in served] for name, served in purposes.items()}
    return [
        name
        for name, of_name in routes.items()
        if config.codec_of(name) is not None
        and not any(each is not None and each.hierarchical.is_quantized for each in of_name)
    ]


def _check_codecs(config: ShardConfig, scopes: Scopes) -> None:
    """Refuse idle codecs in a job of several nodes; on one node, a configuration for several may be tried."""
    for name in unused_codecs(config, scopes) if scopes.world_size > scopes.ranks_per_node else ():
        what = "Parameters" if name == "weight_codec" else "Gradients"
        raise ConfigError(
            f"`{name}={getattr(config, name)!r}` has nothing to encode: {what.lower()} of these scopes never "
            f"travel where `codec_links={config.codec_links!r}` and `grad_codec_hops={config.grad_codec_hops!r}` "
            f"encode. Use {', '.join(_remedies(name, config, scopes))} or `{name}='none'`."
        )


def _remedies(name: str, config: ShardConfig, scopes: Scopes) -> list[str]:
    """The changes with which an idle codec would encode something: of one field, or of both where it takes both."""
    fields = [field for field in ("codec_links", "grad_codec_hops") if getattr(config, field) != "all"]
    found: list[str] = []
    for changed in (*([field] for field in fields), fields):
        other = config.replace(**dict.fromkeys(changed, "all"))
        is_idle = name in unused_codecs(other, dataclasses.replace(scopes, codecs=_codecs_of(other)))
        if changed and not is_idle and not (len(changed) > 1 and found):
            found.append(" with ".join(f"`{field}='all'`" for field in changed))
    if name == "weight_codec":
        found.append("a wider scope of `params` or `optimizer`")
    return list(dict.fromkeys(found)) or ["another `grad_codec_hops`"]


def _ranks_of(scope: str | int, words: dict[str, int]) -> int:
    return scope if isinstance(scope, int) else words[scope]


def _check_degree(name: str, degree: int, per_node: int, world_size: int) -> None:
    allowed = [d for d in range(1, world_size + 1) if world_size % d == 0 and (per_node % d == 0 or d % per_node == 0)]
    if degree in allowed:
        return
    if degree > world_size or world_size % degree:
        problem = f"does not divide the {world_size} ranks of this job"
    else:
        problem = f"straddles nodes of {per_node} ranks"
    raise ConfigError(f"`{name}={degree}` {problem}. Use {', '.join(map(str, allowed))}.")


def _cut_axes(degrees: list[int], per_node: int, world_size: int) -> tuple[Axis, ...]:
    cuts = sorted({*degrees, per_node, world_size} - {1})
    sizes: list[tuple[int, int]] = []
    inner = 1
    for cut in cuts:
        if cut % inner:
            raise ConfigError(
                f"Scopes of {inner} and {cut} ranks do not nest. Choose sizes of which each divides the next larger "
                "one."
            )
        sizes.append((cut // inner, inner))
        inner = cut
    links = ["intra_node" if size * stride <= per_node else "inter_node" for size, stride in sizes]
    names = [link if links.count(link) == 1 else f"{link}.{links[:i].count(link)}" for i, link in enumerate(links)]
    return tuple(Axis(name=name, size=size, stride=stride) for name, (size, stride) in zip(names, sizes, strict=True))
