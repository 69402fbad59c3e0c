"""Residuals of error feedback in a checkpoint.

Every rank saves its residuals as they are, with the layout of their buckets. The same ranks with the same layout load
them unchanged, so that a resumed training has the bits of the uninterrupted one. Other ranks load their sum: what the
saved ranks had not sent yet for the elements of this rank's shard is added, once, to the first sum of gradients (the
*carry*). It is scaled with the number of ranks, so that its part in the mean over the ranks stays the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mics_strategy.checkpoint.state import SOLE, LocalState, ReplicaId
from mics_strategy.comm.consensus import gather_objects
from mics_strategy.engine.feedback import GradFeedback, Residual
from mics_strategy.engine.handle import Sharded
from mics_strategy.engine.layout import ParamSlice

FEEDBACK = "feedback"
_LAYOUT, _RESIDUALS, _CARRY = "layout", "residuals", "carry"


def add_feedback(local: LocalState, sharded: Sharded, rank: int) -> None:
    """Add this rank's residuals to what it saves; nothing without feedback.

    Once the codec of gradients is off, nothing sends what the residuals hold.
    """
    feedbacks, codecs = sharded.internals.feedback, sharded.scopes.codecs
    is_off = codecs.first_hop is None and codecs.second_hop is None
    settled = _local_residuals(sharded, GradFeedback.without_unsettled)
    residuals = {key: values for key, values in settled.items() if values and not is_off}
    carries = {str(index): f.carry for index, f in enumerate(feedbacks) if f.carry is not None}
    if not residuals and not carries:
        return
    shard = str(sharded.internals.index)
    local.values[FEEDBACK] = {
        _LAYOUT: _layout_of(sharded),
        _RESIDUALS: {str(rank): residuals},
        _CARRY: {index: {shard: carry} for index, carry in carries.items()},
    }
    for index, values in residuals.items():
        local.copies.update({f"{FEEDBACK}.{_RESIDUALS}.{rank}.{index}.{key}": SOLE for key in values})
    local.copies.update(
        {f"{FEEDBACK}.{_CARRY}.{index}.{shard}": ReplicaId(*sharded.internals.replica) for index in carries}
    )


def _values(feedback: GradFeedback, role: str) -> torch.Tensor:
    return feedback.residuals[role].values


def _local_residuals(
    sharded: Sharded, values_of: Callable[[GradFeedback, str], torch.Tensor] = _values
) -> dict[str, dict[str, torch.Tensor]]:
    """Residuals of this rank by bucket, then by role, first element and number."""
    return {
        str(index): {f"{role}+{r.start}+{r.numel}": values_of(feedback, role) for role, r in feedback.residuals.items()}
        for index, feedback in enumerate(sharded.internals.feedback)
    }


def _layout_of(sharded: Sharded) -> str:
    """The layout of all buckets as text, the same on all ranks."""
    buckets = [
        {
            "shard_numel": feedback.layout.shard_numel,
            "predivisor": feedback.predivisor,
            "slices": [[s.name, [*s.shape], s.dim, s.chunk, s.offset] for s in feedback.layout.param_slices],
        }
        for feedback in sharded.internals.feedback
    ]
    return json.dumps({"world_size": sharded.scopes.world_size, "buckets": buckets})


@dataclass(frozen=True, slots=True, kw_only=True)
class _SavedBucket:
    """Layout of a saved bucket, and the factor of its residuals in this job's sums."""

    shard_numel: int
    slices: tuple[ParamSlice, ...]
    scale: float


class FeedbackSource:
    """The residuals of a checkpoint. Collective methods.

    Args:
        saved: Entries of the checkpoint, by flat name.
        read: Function that fills nested dicts with names of the checkpoint.
        sharded: Model that loads them.
        rank: Rank of this process.
    """

    def __init__(
        self, saved: Mapping[str, Any], read: Callable[[dict[str, Any]], None], sharded: Sharded, rank: int
    ) -> None:
        self._names = [name for name in saved if name.startswith(f"{FEEDBACK}.")]
        self._saved = saved
        self._read = read
        self._sharded = sharded
        self._internals = sharded.internals
        self._rank = rank
        self._layout = ""

    def read_layout(self) -> None:
        """Read what the saved residuals belong to. Not collective."""
        if self._names:
            target: dict[str, Any] = {FEEDBACK: {_LAYOUT: None}}
            self._read(target)
            self._layout = str(target[FEEDBACK][_LAYOUT])

    def agree(self) -> Callable[[], None]:
        """Decide on all ranks how to load.

        Returns a function that loads and is not collective.
        """
        own = {
            f"{FEEDBACK}.{_RESIDUALS}.{self._rank}.{index}.{key}": tuple(values.shape)
            for index, by_key in _local_residuals(self._sharded).items()
            for key, values in by_key.items()
        }
        prefix = f"{FEEDBACK}.{_RESIDUALS}.{self._rank}."
        found = {name: tuple(self._saved[name].size) for name in self._names if name.startswith(prefix)}
        is_same = self._layout == _layout_of(self._sharded) and own == found
        return self._load_unchanged if all(gather_objects(is_same)) else self._load_sum

    def _load_unchanged(self) -> None:
        for feedback in self._internals.feedback:
            feedback.clear()
        if not self._names:
            return
        residuals = {index: values for index, values in _local_residuals(self._sharded).items() if values}
        carries: dict[str, dict[str, torch.Tensor]] = {}
        for index, feedback in enumerate(self._internals.feedback):
            name = f"{FEEDBACK}.{_CARRY}.{index}.{self._internals.index}"
            if name in self._names:
                feedback.carry = _empty_carry(self._sharded, index)
                carries[str(index)] = {str(self._internals.index): feedback.carry}
        self._read({FEEDBACK: {_RESIDUALS: {str(self._rank): residuals}, _CARRY: carries}})

    def _load_sum(self) -> None:
        """Add up what all saved ranks have for this rank's shard, one after the other."""
        for feedback in self._internals.feedback:
            feedback.clear()
        buckets = self._saved_buckets() if self._names else []
        for name, bucket, start, numel in self._saved_residuals(buckets):
            residual = Residual(values=torch.empty(0), start=start, numel=numel)
            if not any(self._overlaps(bucket, row) for row in residual.rows(bucket.shard_numel)):
                continue
            values = torch.empty(self._saved[name].size, dtype=torch.float32)
            self._read(_nested(name, values))
            whole = Residual(values=values.mul_(bucket.scale), start=start, numel=numel)
            table = whole.table(bucket.shard_numel)
            for row, row_values in zip(whole.rows(bucket.shard_numel), table, strict=True):
                self._add_row(bucket, row, row_values)

    def _saved_buckets(self) -> list[_SavedBucket]:
        layout = json.loads(self._layout)
        ranks = self._sharded.scopes.world_size / layout["world_size"]
        own_predivisor = {
            s.name: feedback.predivisor for feedback in self._internals.feedback for s in feedback.layout.param_slices
        }
        buckets = []
        for bucket in layout["buckets"]:
            slices = tuple(
                ParamSlice(name=name, shape=torch.Size(shape), dim=dim, chunk=chunk, offset=offset)
                for name, shape, dim, chunk, offset in bucket["slices"]
            )
            predivisor = own_predivisor.get(slices[0].name, 1)
            scale = ranks * bucket["predivisor"] / predivisor
            buckets.append(_SavedBucket(shard_numel=bucket["shard_numel"], slices=slices, scale=scale))
        return buckets

    def _saved_residuals(self, buckets: list[_SavedBucket]) -> Iterator[tuple[str, _SavedBucket, int, int]]:
        """Name, bucket, first element and number of elements of each saved tensor."""
        for name in self._names:
            kind, *path = name.removeprefix(f"{FEEDBACK}.").split(".")
            if kind == _RESIDUALS:
                _, index, key = path
                _, start, numel = key.split("+")
                yield name, buckets[int(index)], int(start), int(numel)
            elif kind == _CARRY:
                index, shard = path
                bucket = buckets[int(index)]
                yield name, bucket, int(shard) * bucket.shard_numel, bucket.shard_numel

    def _pairs(self, bucket: _SavedBucket) -> Iterator[tuple[int, ParamSlice, ParamSlice]]:
        """Index of a bucket of this model, its slice of a parameter, and the saved slice."""
        saved = {param_slice.name: param_slice for param_slice in bucket.slices}
        for index, feedback in enumerate(self._internals.feedback):
            for own in feedback.layout.param_slices:
                if own.name in saved and saved[own.name].shape == own.shape:
                    yield index, own, saved[own.name]

    def _overlaps(self, bucket: _SavedBucket, row: int) -> bool:
        return any(
            common_ranges(own, self._internals.index, saved, row) is not None for _, own, saved in self._pairs(bucket)
        )

    def _add_row(self, bucket: _SavedBucket, row: int, row_values: torch.Tensor) -> None:
        for index, own, saved in self._pairs(bucket):
            ranges = common_ranges(own, self._internals.index, saved, row)
            if ranges is None:
                continue
            feedback = self._internals.feedback[index]
            if feedback.carry is None:
                feedback.carry = _empty_carry(self._sharded, index)
            target, source = own.view_in(feedback.carry, self._internals.index), saved.view_in(row_values, row)
            for dim, (target_start, source_start, length) in ranges.items():
                target, source = target.narrow(dim, target_start, length), source.narrow(dim, source_start, length)
            target.add_(source.to(target.device))


def common_ranges(
    own: ParamSlice, own_index: int, saved: ParamSlice, saved_index: int
) -> dict[int, tuple[int, int, int]] | None:
    """The elements of a parameter that two pieces have in common; None for none.

    Args:
        own: Slice of the parameter in one layout.
        own_index: Number of the shard with the first piece.
        saved: Slice in another layout.
        saved_index: Number of the shard with the second piece. Scalars are in every shard, and the first one counts.

    Returns:
        By dimension: the start in the first piece, the start in the second one, and the length.
    """
    if own.dim is None or saved.dim is None:
        return {} if saved_index == 0 else None
    own_ranges = {dim: (0, length) for dim, length in enumerate(own.shape)}
    saved_ranges = {**own_ranges, saved.dim: saved.shard_range(saved_index)}
    own_ranges[own.dim] = own.shard_range(own_index)
    common = {}
    for dim in {own.dim, saved.dim}:
        (own_start, own_length), (saved_start, saved_length) = own_ranges[dim], saved_ranges[dim]
        start, end = max(own_start, saved_start), min(own_start + own_length, saved_start + saved_length)
        if end <= start:
            return None
        common[dim] = (start - own_start, start - saved_start, end - start)
    return common


def _empty_carry(sharded: Sharded, index: int) -> torch.Tensor:
    return torch.zeros(sharded.internals.feedback[index].layout.shard_numel, device=sharded.device)


def _nested(name: str, value: Any) -> dict[str, Any]:
    """Nested dicts with one value under a flat name."""
    *outer, last = name.split(".")
    nested: dict[str, Any] = {last: value}
    for key in reversed(outer):
        nested = {key: nested}
    return nested
