"""How a newcomer, a block of ranks that has started the same script, finds a running job and is let in.

Everything goes through the store of the running job. No rank of it waits for a newcomer before that is a member:

    numbers                how many numbers processes have got so far, so that no two have the same
    address/<number>       host and port of a process, to which others connect (see `peer_sockets`)
    running                members of the newest generation
    applications           how many blocks have asked to join
    application/<index>    numbers of a block, and the description of what it has sharded
    invited/<generation>   applications whose blocks are members of the next generation
    answer/<index>         generation behind which the block joins, and the terms; or why it is refused
    ended                  set when the job has ended

The first member compares each description with its own, in front of a barrier, and invites those that fit. The barrier
tells all ranks that there is an invitation; in front of the next attempt they end the generation together.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore

from mics_strategy.engine.handle import Sharded
from mics_strategy.engine.module_buffers import buffer_specs
from mics_strategy.errors import ConfigError
from mics_strategy.recovery.states import RankStates
from mics_strategy.topology import Axis, Span
from mics_strategy.version import package_version

JOB = "mics/recovery"  # key of the name of the newest job in a store
_SHOWN = 3  # differences in an error
_ABSENT = "none"
_BLOCK, _UNREADABLE = "ranks of a block", "application that cannot be read"  # names in descriptions


def store_of_job(client: Any, name: str) -> Any:
    """The keys of one job in a store that it may share with others."""
    return PrefixStore(f"{JOB}/{name}", client)


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What a newcomer takes over of the running job before process groups are made.

    Attributes:
        is_one_node: Whether the job is one node, of any number of ranks; see `resize`.
        random: Seed and number of the random draws into shards.
        thresholds: Measured thresholds of hierarchical collectives: collective, axes of the span, bytes.
    """

    is_one_node: bool
    random: Sequence[int]
    thresholds: Sequence[tuple[str, Sequence[Mapping[str, Any]], int]]

    @classmethod
    def without_model(cls, *, is_one_node: bool) -> Terms:
        """The terms of a job that makes its model anew."""
        return cls(is_one_node=is_one_node, random=(), thresholds=())

    @classmethod
    def of(cls, sharded: Sharded, *, is_one_node: bool) -> Terms:
        """The terms of the job in which a model is sharded."""
        groups = sharded.internals.groups
        return cls(
            is_one_node=is_one_node,
            random=groups.trainable_placement.random.position,
            thresholds=[
                (collective, [asdict(axis) for axis in span.axes], from_bytes)
                for (collective, span), from_bytes in groups.scopes.two_stages.measured
            ],
        )

    def apply(self, sharded: Sharded) -> None:
        """Let the model of a newcomer have these terms."""
        groups = sharded.internals.groups
        measured = {
            (collective, Span(axes=tuple(Axis(**axis) for axis in axes))): from_bytes
            for collective, axes, from_bytes in self.thresholds
        }
        groups.scopes = groups.scopes.with_tuning(measured)
        groups.trainable_placement.random.move_to((self.random[0], self.random[1]))


def describe_block(block: int) -> dict[str, str]:
    """What must be equal whatever is trained; see `describe`."""
    return {
        "version of mics_strategy": package_version(),
        "version of torch": str(torch.__version__),
        _BLOCK: str(block),
    }


def describe(sharded: Sharded, states: RankStates, block: int) -> dict[str, str]:
    """What must be equal on a newcomer and in the running job, as texts by name.

    Args:
        sharded: Model.
        states: States that a newcomer gets.
        block: Ranks of a block: of a newcomer, all of its ranks.

    Raises:
        ConfigError: The states hold something that a newcomer cannot get.
    """
    scopes, fields = sharded.scopes, sharded.config.describe()
    del fields["topology"]  # of the whole job: of a block its ranks count, and those of a node
    described = {
        **describe_block(block),
        **{f"`{name}`": text for name, text in fields.items()},
        "ranks of a node": str(min(block, scopes.ranks_per_node)),
        "scopes": scopes.phrase,
    }
    for bucket in (bucket for unit in sharded.internals.units for bucket in unit.buckets):
        kind = "trained" if bucket.spec.trainable else "frozen"
        for piece in bucket.layout.param_slices:
            place = f"at {piece.offset} of {bucket.master_shard.numel()} elements"
            described[f"parameter `{piece.name}`"] = (
                f"{tuple(piece.shape)}, {bucket.spec.master_dtype}, {kind}, {place}"
            )
    specs = buffer_specs(sharded.model)
    described |= {f"buffer `{name}`": str(spec) for name, spec in specs.items() if spec.is_persistent}
    return described | states.describe()


def difference(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """What differs between the running job and a newcomer, for an error; empty where nothing does."""
    names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    shown = [
        f"{name}: {ours.get(name, _ABSENT)} in the running job, {theirs.get(name, _ABSENT)} here"
        for name in names[:_SHOWN]
    ]
    return "; ".join(shown) + (f"; and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


@dataclass(frozen=True, slots=True)
class Application:
    """A block of ranks that asks to join.

    Attributes:
        index: Its number among all applications.
        numbers: Numbers of its processes.
        description: See `describe`.
    """

    index: int
    numbers: list[int]
    description: dict[str, str]

    @classmethod
    def parse(cls, index: int, text: bytes) -> Application:
        """The application that a text describes; one that fits no job, if it describes none."""
        try:
            numbers, described = json.loads(text)
            start = int(numbers[0])
            if numbers != list(range(start, start + len(numbers))):
                raise ValueError(f"{numbers} are no block.")
            description = {str(name): str(value) for name, value in described.items()}
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            return cls(index, [], {_UNREADABLE: repr(error)})  # refused, as it differs
        return cls(index, numbers, description | {_BLOCK: str(len(numbers))})


class Applications:
    """The applications that the first member of a job answers.

    Args:
        store: Store of the job.

    Attributes:
        waiting: Those without an answer.
        description: Description that they must have; where it is None, `invite` compares.
    """

    def __init__(self, store: Any) -> None:
        self._store = store
        self._answered: set[int] = set()
        self.waiting: tuple[Application, ...] = ()
        self.description: Mapping[str, str] | None = None

    def poll(self) -> None:
        """Look for new ones. Called by the thread that watches other processes."""
        waiting = []
        for index in range(self._store.add("applications", 0)):
            if index in self._answered or not self._store.check([f"application/{index}"]):
                continue
            if self._store.check([_answer(index)]):
                self._answered.add(index)
                continue
            application = Application.parse(index, self._store.get(f"application/{index}"))
            if self.description is None or self._fits(application, self.description):
                waiting.append(application)
        self.waiting = tuple(waiting)

    def _fits(self, application: Application, description: Mapping[str, str]) -> bool:
        """Whether one fits; it is refused if not."""
        if problem := difference(description, application.description):
            self._store.set(_answer(application.index), json.dumps({"refused": problem}))
        return not problem

    def invite(self, generation: int, description: Mapping[str, str], max_ranks: int = sys.maxsize) -> bool:
        """Invite those that fit, and refuse the others. Returns whether any fits.

        Args:
            generation: Generation of the job, behind which they join.
            description: See `describe`.
            max_ranks: Ranks that may join. Who comes later waits on.
        """
        invited: dict[int, list[int]] = {}
        for application in self.waiting:
            if self._store.check([_answer(application.index)]):
                continue  # since the thread has looked
            if self._fits(application, description) and len(application.numbers) <= max_ranks:
                invited[application.index] = application.numbers
                max_ranks -= len(application.numbers)
        self._store.set(f"invited/{generation}", json.dumps(invited))
        return bool(invited)

    def refuse(self, problem: str) -> None:
        """Refuse all that wait."""
        for application in self.waiting:
            self._store.set(_answer(application.index), json.dumps({"refused": problem}))

    def accept(self, index: int, generation: int, terms: Terms) -> None:
        """Say to an invited one, which has become a member, behind which generation and on what terms it joins."""
        self._store.set(_answer(index), json.dumps({"generation": generation, "terms": asdict(terms)}))


def apply(store: Any, numbers: Sequence[int], description: Mapping[str, str]) -> int:
    """Ask to join a job. Returns the index of the application."""
    index = int(store.add("applications", 1)) - 1
    store.set(f"application/{index}", json.dumps([list(numbers), dict(description)]))
    return index


def answer_to(store: Any, index: int) -> tuple[int, Terms] | None:
    """The generation behind which an application has been accepted, and the terms; None without an answer yet.

    Raises:
        ConfigError: It was refused.
    """
    if not store.check([_answer(index)]):
        return None
    answer = json.loads(store.get(_answer(index)))
    if "refused" in answer:
        raise ConfigError(
            f"The running job does not let this node in ({answer['refused']}). Start the script of the running job, "
            "with the same versions and arguments, and as many ranks as its nodes or partition groups have."
        )
    return answer["generation"], Terms(**answer["terms"])


def _answer(index: int) -> str:
    return f"answer/{index}"
