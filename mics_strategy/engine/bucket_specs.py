"""Buckets of a unit before anything is allocated: how parameters are cut into them, and what each one needs.

Pure.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from mics_strategy.comm.residuals import residual_numel
from mics_strategy.comm.scratch import CollectiveShape, comm_layout
from mics_strategy.config import ShardConfig, sum_dtype_of
from mics_strategy.engine.layout import BucketLayout, make_layout, num_first_hop_chunks, split_into_buckets
from mics_strategy.engine.plan import ROOT_NAME, BucketPlan
from mics_strategy.engine.schedule import first_hop_numel, full_numel, unshard_role
from mics_strategy.scopes import COLLECTIVES, REDUCTIONS, Scopes

Piece = tuple[int, torch.dtype]  # elements and dtype
DELAYED_STATE = ("delayed sums", "delayed means", "kept means", "tentative parameters")
OUTER_STATE = ("outer anchors", "outer momentum", "outer differences")
NOTHING_TO_COALESCE = (
    "`coalesce=True`: no unit of this model can use coalesced collectives. They require a backend other than gloo, "
    "parameters or gradients that are sharded and not quantized, and first dimensions that are multiples of the ranks "
    "of `optimizer`. Use 'auto'."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketSpec:
    """Properties of a bucket that are known before anything is allocated.

    Attributes:
        name: Name of the unit, for errors.
        layout: Layout of the parameters.
        locations: Pairs (module, attribute) that refer to each parameter; several when it is tied.
        master_dtype: Dtype of the master shard, which is the parameters' own.
        param_dtype: Dtype of the computation.
        wire_dtype: Dtype of gradients on the wire; of frozen parameters `param_dtype`.
        accum_dtype: Dtype in which gradients of micro-steps are added; of frozen parameters `param_dtype`.
        sum_dtype: Dtype of the sums over all ranks; of frozen parameters `param_dtype`.
        trainable: Whether the parameters have gradient memory.
        num_first_hop_chunks: Reduce-scatters of the first hop.
        coalesce_all_gather: Whether to gather the parameters as several tensors in one launch.
        coalesce_reduce_scatter: Whether to reduce the gradients as several tensors in one launch.
    """

    name: str
    layout: BucketLayout
    locations: tuple[tuple[tuple[nn.Module, str], ...], ...]
    master_dtype: torch.dtype
    param_dtype: torch.dtype
    wire_dtype: torch.dtype
    accum_dtype: torch.dtype
    sum_dtype: torch.dtype
    trainable: bool
    num_first_hop_chunks: int = 1
    coalesce_all_gather: bool = False
    coalesce_reduce_scatter: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamSpec:
    """A parameter that a bucket will hold. For other attributes see `BucketSpec`.

    Attributes:
        name: Name in the model.
        shape: Shape of the whole parameter.
    """

    name: str
    shape: torch.Size
    master_dtype: torch.dtype
    param_dtype: torch.dtype
    wire_dtype: torch.dtype
    accum_dtype: torch.dtype
    trainable: bool
    locations: tuple[tuple[nn.Module, str], ...] = ()

    @classmethod
    def of(cls, name: str, shape: torch.Size, dtype: torch.dtype, config: ShardConfig, *, trainable: bool) -> ParamSpec:
        """A parameter of `dtype`."""
        param = config.param_dtype_of(dtype)
        return cls(
            name=name,
            shape=shape,
            master_dtype=dtype,
            param_dtype=param,
            wire_dtype=config.wire_dtype_of(dtype) if trainable else param,
            accum_dtype=config.accum_dtype_of(dtype) if trainable else param,
            trainable=trainable,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketRules:
    """What decides how a unit's parameters are cut into buckets, beside the parameters.

    Attributes:
        degrees: Ranks that share the rows of a bucket, of frozen and of trainable parameters.
        block_numels: Elements of a codec block, of frozen and of trainable parameters.
        chunks_first_hops: Whether the first hop of a large parameter has several chunks.
    """

    degrees: tuple[int, int]
    block_numels: tuple[int, int]
    chunks_first_hops: bool

    @classmethod
    def of(cls, scopes: Scopes, *, is_stream_ordered: bool) -> BucketRules:
        """The rules of a job. No optimizer shards frozen parameters, which are whole with `params="replicate"`."""
        return cls(
            degrees=(scopes.optimizer if scopes.params > 1 else 1, scopes.optimizer),
            block_numels=comm_layout(scopes).block_numels,
            chunks_first_hops=scopes.grads > 1 and shares_grad_staging(scopes, is_stream_ordered=is_stream_ordered),
        )


def shares_grad_staging(scopes: Scopes, *, is_stream_ordered: bool) -> bool:
    """Whether first hops may use one flat buffer of gradients, one after the other.

    Not where one is encoded while the one before is on the wire, whose own share is still in the buffer.
    """
    return is_stream_ordered and not comm_layout(scopes).is_first_hop_quantized


def make_buckets(parameters: Iterable[ParamSpec], rules: BucketRules, unit: str = ROOT_NAME) -> tuple[BucketSpec, ...]:
    """The buckets of a unit: its parameters by dtype and trainability.

    Buckets stand in the order of their first parameters. Parameters of more than `MAX_BUCKET_BYTES` have several: a
    staging buffer holds one bucket at a time, where the stream orders collectives.
    """
    by_kind: dict[tuple[torch.dtype, bool], list[ParamSpec]] = defaultdict(list)
    for parameter in parameters:
        by_kind[parameter.master_dtype, parameter.trainable].append(parameter)
    buckets = []
    for of_kind in by_kind.values():
        first, param_bytes = of_kind[0], of_kind[0].param_dtype.itemsize
        is_chunked = first.trainable and rules.chunks_first_hops
        for positions in split_into_buckets([parameter.shape.numel() * param_bytes for parameter in of_kind]):
            members = of_kind[positions.start : positions.stop]
            layout = make_layout(
                [(member.name, member.shape) for member in members],
                rules.degrees[first.trainable],
                rules.block_numels[first.trainable],
                itemsize=min(first.master_dtype.itemsize, param_bytes),
            )
            spec = BucketSpec(
                name=f"{unit}{'' if first.trainable else ' (frozen)'}",
                layout=layout,
                locations=tuple(member.locations for member in members),
                master_dtype=first.master_dtype,
                param_dtype=first.param_dtype,
                wire_dtype=first.wire_dtype,
                accum_dtype=first.accum_dtype,
                sum_dtype=sum_dtype_of(first.master_dtype) if first.trainable else first.param_dtype,
                trainable=first.trainable,
                num_first_hop_chunks=num_first_hop_chunks(layout, param_bytes) if is_chunked else 1,
            )
            buckets.append(spec)
    return tuple(buckets)


def is_synced(bucket: BucketSpec, scopes: Scopes) -> bool:
    """Whether stepped parameters are sent from the optimizer's scope to their own."""
    return scopes.optimizer > scopes.params and (bucket.trainable or scopes.params > 1)


def casts_each_gather(bucket: BucketSpec, scopes: Scopes) -> bool:
    """Whether every all-gather casts the master shard. No rank then keeps its shard in the compute dtype."""
    return bucket.layout.ranks == scopes.params > 1 and bucket.param_dtype != bucket.master_dtype


def cast_piece(bucket: BucketSpec, scopes: Scopes) -> Piece:
    """The payload that is cast from the master shard."""
    is_cast = is_synced(bucket, scopes) or casts_each_gather(bucket, scopes)
    return bucket.layout.shard_numel if is_cast else 0, bucket.param_dtype


def needs_flat_gather(bucket: BucketSpec, scopes: Scopes) -> bool:
    """Whether an all-gather of parameters needs a flat buffer."""
    if scopes.has_secondary:
        return True
    is_sent = is_synced(bucket, scopes) if scopes.params == 1 else True
    return is_sent and not bucket.layout.is_one_parameter and not bucket.coalesce_all_gather


def casts_second_hop(bucket: BucketSpec, scopes: Scopes) -> bool:
    """Whether the second hop reduce-scatters a copy of the sums, in the wire dtype."""
    return scopes.optimizer > scopes.grads and bucket.wire_dtype != bucket.accum_dtype


def coalescible_roles(bucket: BucketSpec, scopes: Scopes) -> list[str]:
    """Roles in which the bucket's tensors can be sent in one launch, by a backend that can."""
    gather = unshard_role(scopes)
    dtypes = {gather: bucket.param_dtype} if gather != "param_sync" or is_synced(bucket, scopes) else {}
    if can_reduce_in_place(bucket):
        dtypes["grad_reduce_scatter"] = bucket.wire_dtype
    routes = {role: scopes.route(role, bucket.layout.full_numel * dtype.itemsize) for role, dtype in dtypes.items()}
    is_even = bucket.layout.is_evenly_divisible
    return [role for role, route in routes.items() if is_even and route is not None and not route.is_quantized]


def with_coalescing(bucket: BucketSpec, roles: Iterable[str]) -> BucketSpec:
    """The bucket, with its tensors sent in one launch in some roles."""
    chosen = {*roles}
    scatters = "grad_reduce_scatter" in chosen
    gathers = bool(chosen - {"grad_reduce_scatter"})
    return dataclasses.replace(bucket, coalesce_all_gather=gathers, coalesce_reduce_scatter=scatters)


def coalesced(buckets: Iterable[BucketSpec], scopes: Scopes) -> tuple[BucketSpec, ...]:
    """The buckets with all their tensors sent in one launch that can be: `coalesce=True`."""
    return tuple(with_coalescing(bucket, coalescible_roles(bucket, scopes)) for bucket in buckets)


def can_reduce_in_place(bucket: BucketSpec) -> bool:
    """Whether gradients can be sent as autograd stores them: in the parameters' dtype."""
    return bucket.trainable and bucket.param_dtype == bucket.wire_dtype


def outer_pieces(bucket: BucketSpec, *, is_delayed: bool) -> dict[str, Piece]:
    """The state of outer steps of a trainable bucket, by purpose; see `outer.state`."""
    numel, master, wide = bucket.layout.shard_numel, bucket.master_dtype, bucket.sum_dtype
    is_in_masters = master == wide and not is_delayed  # the differences, in memory that nothing reads meanwhile
    dtypes = (master, wide) if is_in_masters else (master, wide, wide)
    return {purpose: (numel, dtype) for purpose, dtype in zip(OUTER_STATE, dtypes, strict=False)}


def delayed_pieces(bucket: BucketSpec, scopes: Scopes) -> dict[str, Piece]:
    """The memory of delayed hops and tentative steps of a trainable bucket, by purpose; see `delayed_hops`."""
    layout, mean = bucket.layout, (bucket.layout.shard_numel, bucket.sum_dtype)
    own_mean = {} if scopes.grads == scopes.optimizer else {"delayed means": mean}
    return {
        "delayed sums": (layout.numel_at(scopes.grads), bucket.accum_dtype),
        **own_mean,
        "kept means": mean,
        "tentative parameters": (layout.shard_numel, bucket.master_dtype),
    }


def residual_numels(bucket: BucketSpec, scopes: Scopes) -> dict[str, int]:
    """Elements of the residuals of error feedback of a trainable bucket, by role; those without any are left out."""
    numels = {}
    for role in (role for role in REDUCTIONS if scopes.codecs.for_role(role) is not None):
        numel = full_numel(role, bucket.layout, scopes)
        route = scopes.route(role, numel * bucket.wire_dtype.itemsize)
        if route is not None and (residual := residual_numel(route, COLLECTIVES[role], numel)):
            numels[role] = residual
    return numels


def collectives_of(bucket: BucketSpec, scopes: Scopes) -> Iterator[CollectiveShape]:
    """The collectives of a bucket that need scratch memory."""
    layout, param = bucket.layout, bucket.param_dtype
    for role in ("param_all_gather", "secondary_all_gather", "param_sync"):
        if role == "param_sync" and not is_synced(bucket, scopes):
            continue
        numel = full_numel(role, layout, scopes)
        yield CollectiveShape(role=role, numel=numel, wire=param, dtype=param)
        if bucket.coalesce_all_gather:
            yield CollectiveShape(role=role, numel=numel, wire=param, dtype=param, is_coalesced=True)
    if not bucket.trainable:
        return
    wire, total = bucket.wire_dtype, bucket.sum_dtype
    first = first_hop_numel(layout, scopes.grads, bucket.num_first_hop_chunks)
    scatter = CollectiveShape(role="grad_reduce_scatter", numel=first, wire=wire, dtype=bucket.accum_dtype)
    yield scatter
    if bucket.coalesce_reduce_scatter and bucket.num_first_hop_chunks == 1:
        yield dataclasses.replace(scatter, is_coalesced=True)
    if scopes.num_islands > 1:
        yield CollectiveShape(role="outer_all_reduce", numel=layout.shard_numel, wire=total, dtype=total)
    for role in REDUCTIONS[1:]:
        yield CollectiveShape(role=role, numel=full_numel(role, layout, scopes), wire=wire, dtype=total)


def bucket_plan(bucket: BucketSpec, *, has_gradients: bool) -> BucketPlan:
    """What the plan of a step depends on, of one bucket."""
    return BucketPlan(
        layout=bucket.layout,
        param_dtype=bucket.param_dtype,
        wire_dtype=bucket.wire_dtype,
        sum_dtype=bucket.sum_dtype,
        trainable=bucket.trainable,
        has_gradients=has_gradients,
        num_first_hop_chunks=bucket.num_first_hop_chunks,
    )
