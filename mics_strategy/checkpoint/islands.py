"""Islands in a checkpoint (see `mics_strategy.islands`).

The first island's state has the plain names. That of island k is under ``island_<k>``, with the same names. The outer
state, which is equal on all, has the names of its parameters under ``outer.anchor`` and ``outer.momentum``, and under
``outer.sum`` where an outer step is in flight: saving waits for its sum. Random states have the number of their rank,
as without islands. A checkpoint without optimizers holds the first island alone.

As many islands load what each of them has saved. Others load the first island's, and only where the parameters are
those of all islands: behind an outer step of all of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any

from mics_strategy.checkpoint.manifest import IN_FLIGHT_FORMAT, ISLANDS_FORMAT, Manifest
from mics_strategy.checkpoint.random_states import RNG_KEY
from mics_strategy.checkpoint.state import MODEL, LocalState, ReplicaId, names_of
from mics_strategy.engine.handle import Sharded
from mics_strategy.errors import CheckpointError
from mics_strategy.outer.state import OuterBucket
from mics_strategy.outer.target import OuterTarget, outer_of

_OUTER, _ANCHOR, _MOMENTUM, _SUM = "outer", "anchor", "momentum", "sum"


def add_islands(local: LocalState, sharded: Sharded, *, has_optimizers: bool) -> None:
    """Name what this rank's island saves, and add the outer state. Nothing is copied.

    Args:
        local: State that this rank holds, changed in place.
        sharded: Model.
        has_optimizers: Whether optimizers are saved.

    Raises:
        CheckpointError: Trained parameters are left out, although they differ between islands.
    """
    outer, island = outer_of(sharded), sharded.internals.groups.island
    if outer is None:
        return
    local.holder = ReplicaId(island.index, len(island.ranks))
    number = island.ranks.start // len(island.ranks)
    if not has_optimizers:
        if number:
            local.values, local.copies = {}, {}
        return
    _check_complete(local, sharded, outer)
    if number == 0:
        outer.fill()
        local.values[_OUTER] = state = _outer_state(outer)
        scalars = [(kind, name) for kind, of_kind in state.items() for name, v in of_kind.items() if v.dim() == 0]
        local.scalars.update(f"{_OUTER}.{kind}.{name}" for kind, name in scalars)
        return
    key = f"island_{number}"
    own = {name: values for name, values in local.values.items() if name != RNG_KEY}
    local.values = {key: own, RNG_KEY: local.values[RNG_KEY]}
    local.copies = {
        name if name.startswith(f"{RNG_KEY}.") else f"{key}.{name}": copy for name, copy in local.copies.items()
    }
    local.scalars = {f"{key}.{name}" for name in local.scalars}


def _check_complete(local: LocalState, sharded: Sharded, outer: OuterTarget) -> None:
    names = names_of(sharded.model)
    missing = [
        name
        for parameter in sharded.internals.parameters
        if parameter.requires_grad and (name := names.get(id(parameter), "")) not in local.values[MODEL]
    ]
    if missing and outer.num_in_round:
        raise CheckpointError(
            f"Nothing was saved: optimizers are saved without `{missing[0]}`, {outer.num_in_round} steps after an "
            f"outer step, when it differs between islands. Save it in the same checkpoint, or save {outer.when_equal}."
        )


def _outer_state(outer: OuterTarget) -> dict[str, dict[str, Any]]:
    """Views of the outer state by kind and name, as tensors that are sharded like their parameters.

    Waits for what is in flight.
    """
    state: dict[str, dict[str, Any]] = {_ANCHOR: {}, _MOMENTUM: {}, _SUM: {}}
    for bucket in outer.buckets:
        kinds = {_ANCHOR: bucket.anchor, _MOMENTUM: bucket.momentum}
        if bucket.is_in_flight:
            bucket.wait()
            kinds[_SUM] = bucket.difference
        index, slices = bucket.bucket.placement.index, bucket.bucket.layout.param_slices
        for param_slice, parameter in zip(slices, bucket.bucket.sharded_params, strict=True):
            for kind, values in kinds.items():
                state[kind][param_slice.name] = parameter.like_self(param_slice.view_in(values, index))
    return {kind: of_kind for kind, of_kind in state.items() if of_kind}


def _names(bucket: OuterBucket, kind: str, entries: Container[str]) -> list[str]:
    """Parameters of a bucket for which a checkpoint has a kind of outer state."""
    names = (param_slice.name for param_slice in bucket.bucket.layout.param_slices)
    return [name for name in names if f"{_OUTER}.{kind}.{name}" in entries]


def with_islands(manifest: Manifest, sharded: Sharded) -> Manifest:
    """The manifest of a checkpoint with optimizers, with the number of islands and of steps in their round."""
    outer = outer_of(sharded)
    if outer is None:
        return manifest
    number = manifest.format
    if outer.num_in_round:  # others would load the first island's alone, or leave out what is in flight
        number = IN_FLIGHT_FORMAT if any(bucket.is_in_flight for bucket in outer.buckets) else ISLANDS_FORMAT
    islands = sharded.scopes.num_islands
    return dataclasses.replace(manifest, islands=islands, steps_in_round=outer.num_in_round, format=number)


@dataclass(frozen=True, slots=True)
class SavedIsland:
    """The part of a checkpoint that this rank's island loads.

    Attributes:
        entries: Metadata of its entries, by their plain names.
        key: Name under which the checkpoint has them; empty for plain names.
    """

    entries: Mapping[str, Any]
    key: str = ""

    def nested(self, values: dict[str, Any]) -> dict[str, Any]:
        """Nested dicts with plain names, as the checkpoint has them."""
        if not self.key:
            return values
        shared = {name: inner for name, inner in values.items() if name == RNG_KEY}
        return {**shared, self.key: {name: inner for name, inner in values.items() if name not in shared}}


def saved_island(entries: Mapping[str, Any], manifest: Manifest | None, sharded: Sharded) -> SavedIsland:
    """Find what this rank's island loads.

    Args:
        entries: Metadata of the entries of the checkpoint, by name.
        manifest: Manifest; None for a checkpoint of another library.
        sharded: Model that loads it.
    """
    island = sharded.internals.groups.island
    number = island.ranks.start // len(island.ranks)
    if manifest is None or manifest.islands != sharded.scopes.num_islands or not number:
        return SavedIsland(entries)
    prefix = f"island_{number}."
    own = {name.removeprefix(prefix): entry for name, entry in entries.items() if name.startswith(prefix)}
    shared = {name: entry for name, entry in entries.items() if name.startswith((f"{RNG_KEY}.", f"{_OUTER}."))}
    return SavedIsland({**own, **shared}, prefix.removesuffix("."))


def check_islands(manifest: Manifest | None, sharded: Sharded, entries: Container[str]) -> None:
    """Check that this job can continue what as many islands have saved. Equal on all ranks.

    Args:
        manifest: Manifest; None for a checkpoint of another library.
        sharded: Model that loads it.
        entries: Names in the checkpoint.

    Raises:
        CheckpointError: The job has another number of islands, and the saved ones differ; or it cannot continue the
            outer steps in flight.
    """
    if manifest is None or not manifest.steps_in_round:
        return
    if manifest.islands == sharded.scopes.num_islands:
        _check_in_flight(sharded, entries)
        return
    count = sharded.scopes.num_islands
    job = "this job synchronizes gradients in every step" if count == 1 else f"this job has {count} islands"
    raise CheckpointError(
        f"The checkpoint was saved {manifest.steps_in_round} steps after an outer step, when the parameters of its "
        f"{manifest.islands} islands differed, and {job}. Load it on {manifest.islands} islands (`outer_every`) and "
        "save after an outer step (with a delay or fragments, behind `finish_delayed`), load one that was saved there, "
        "or load the weights alone, which are the first island's."
    )


def _check_in_flight(sharded: Sharded, entries: Container[str]) -> None:
    outer = outer_of(sharded)
    for bucket in () if outer is None else outer.buckets:
        sums, known = _names(bucket, _SUM, entries), _names(bucket, _ANCHOR, entries)
        if sums and (sums != known or not sharded.config.outer_delay):
            problem = "`outer_delay=0` has no memory for them"
            if sums != known:
                problem = f"of unit `{bucket.bucket.spec.name}` they have `{sums[0]}` and not all other parameters"
            raise CheckpointError(
                f"The checkpoint was saved with outer steps in flight, and {problem}. Load it with the `outer_delay` "
                "and the units of the job that saved it, or call `finish_delayed(sharded)` there before saving."
            )


def check_same_step(sharded: Sharded) -> None:
    """Check that all islands save after the same step. Collective.

    Raises:
        CheckpointError: They do not. Raised on every rank.
    """
    outer = outer_of(sharded)
    progress = (sharded.steps_done, 0 if outer is None else outer.num_in_round)
    by_rank = sharded.internals.groups.agree_on(progress, "save_checkpoint (call it on every rank)")
    for rank, (steps, in_round) in enumerate(by_rank) if outer is not None else ():
        if (steps, in_round) != by_rank[0]:
            raise CheckpointError(
                f"Nothing was saved: rank 0 has run {by_rank[0][0]} steps, {by_rank[0][1]} of them since the last "
                f"outer step, and rank {rank} {steps}, {in_round} of them since then. Save on all islands after the "
                "same step: by its number, and not by the clock or when one island gets a signal."
            )


def load_outer(
    manifest: Manifest | None,
    sharded: Sharded,
    read: Callable[[dict[str, Any]], None],
    entries: Container[str],
    *,
    has_optimizers: bool,
) -> None:
    """Continue the round of the checkpoint, or begin one.

    Args:
        manifest: Manifest; None for a checkpoint of another library.
        sharded: Model, whose parameters are loaded.
        read: Function that fills nested dicts with names of the checkpoint.
        entries: Names in the checkpoint. A parameter that is not there begins a round.
        has_optimizers: Whether optimizers are loaded.
    """
    outer = outer_of(sharded)
    if outer is None:
        return
    if manifest is None or manifest.islands == 1 or not has_optimizers:
        outer.restart()
        return
    outer.fill()
    steps = manifest.steps_in_round
    outer.resume(steps, {bucket for bucket in outer.buckets if steps and _names(bucket, _SUM, entries)})
    state = {
        kind: {name: values for name, values in of_kind.items() if f"{_OUTER}.{kind}.{name}" in entries}
        for kind, of_kind in _outer_state(outer).items()
    }
    read({_OUTER: state})
