"""The states of a rank, as a newcomer in the same place of another block gets them.

Masters, buffers, optimizer states and options of parameter groups, the step, and the user's own state: bitwise, as JSON
and tensors, so nothing is unpickled. What is gathered from masters (parameter shards, secondary copies) is not sent:
all ranks gather it again in the next forward.

A sender posts messages with the length of the text, the text, the state of torch's generator, and one for each tensor.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from typing import Any, Protocol, cast

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from mics_strategy.comm.consensus import gather_objects
from mics_strategy.comm.host_messages import MessageWaits
from mics_strategy.comm.transport import GlooTransport
from mics_strategy.engine.handle import Sharded
from mics_strategy.engine.optimizer.kinds import has_states_elsewhere
from mics_strategy.engine.parameter import ShardedParameter
from mics_strategy.errors import ConfigError
from mics_strategy.recovery.plain_data import Encoded, as_bytes, decode, encode

_TAG = 2
_PARAMS = "params"  # of a parameter group


class Stateful(Protocol):
    """An object of the training whose state a newcomer gets: a scheduler, a counter, a sampler."""

    def state_dict(self) -> Any:
        """Its state: plain data and dense tensors."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Take over such a state."""


@dataclass(frozen=True, slots=True)
class StateBytes:
    """What was sent to newcomers.

    Attributes:
        planned_bytes: Bytes of tensors, as they were added up before.
        tensor_bytes: Bytes of tensors, as messages had them.
        text_bytes: Bytes of names, shapes and numbers, and of generators.
    """

    planned_bytes: int
    tensor_bytes: int
    text_bytes: int

    @classmethod
    def total(cls, parts: Iterable[StateBytes]) -> StateBytes:
        """The sum of several."""
        return cls(*(sum(column) for column in zip((0, 0, 0), *map(astuple, parts), strict=True)))


class RankStates:
    """The states of one rank, to send or to receive.

    Args:
        sharded: Model.
        optimizers: Its optimizers.
        others: The user's own state, by name.
    """

    def __init__(self, sharded: Sharded, optimizers: Sequence[Optimizer], others: Mapping[str, Stateful]) -> None:
        self._sharded = sharded
        self._optimizers = optimizers
        self._others = others

    def check_others(self) -> None:
        """Check that the user's own state can be sent.

        Raises:
            ConfigError: Something in it cannot.
        """
        encode(self._states_of_others(), "state")

    def _states_of_others(self) -> dict[str, Any]:
        return {name: other.state_dict() for name, other in self._others.items()}

    def encode(self) -> Encoded:
        """All states. The tensors share memory with them.

        Raises:
            ConfigError: Something in them cannot be sent.
        """
        internals = self._sharded.internals
        value = {
            "masters": [bucket.master_shard for unit in internals.units for bucket in unit.buckets],
            "requires_grad": [parameter.requires_grad for parameter in internals.parameters],
            "buffers": dict(self._sharded.model.named_buffers()),
            "optimizers": [_optimizer_states(optimizer) for optimizer in self._optimizers],
            "steps_done": self._sharded.steps_done,
            "others": self._states_of_others(),
        }
        return encode(value, "states")

    def describe(self) -> dict[str, str]:
        """What a newcomer must have beside the model, as texts by name.

        Raises:
            ConfigError: Something in the states cannot be sent.
        """
        self.encode()
        names = {id(parameter): parameter.mics_name for parameter in self._sharded.internals.parameters}
        described = {"`state`": ", ".join(f"{name} ({type(o).__qualname__})" for name, o in self._others.items())}
        for index, optimizer in enumerate(self._optimizers):
            described[f"optimizer {index}"] = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
            for number, group in enumerate(optimizer.param_groups):
                of_group = f"of group {number} of optimizer {index}"
                described[f"parameters {of_group}"] = ", ".join(
                    names.get(id(p), "one of no name") for p in group[_PARAMS]
                )
                described[f"options {of_group}"] = ", ".join(sorted(name for name in group if name != _PARAMS))
        return described

    def transfer(self, sources: Mapping[int, int]) -> StateBytes:
        """Send states to newcomers, or receive them, in new process groups.

        Args:
            sources: Rank that sends, for each rank that receives.

        Returns:
            What this rank has sent.

        Raises:
            RuntimeError: A rank was lost.

        Cost:
            Each newcomer receives what a rank has of the states. Memory: a second copy of them on the newcomer, until
            all are there; the text, and the largest tensor that is not contiguous, on the sender.
        """
        rank = self._sharded.internals.groups.rank
        sent = [self._send(target) for target, source in sources.items() if source == rank]
        if rank in sources:
            self._receive(sources[rank])
        return StateBytes.total(sent)

    def settle(self, sent: StateBytes, sources: Mapping[int, int], number: int) -> StateBytes:
        """Wait until all newcomers have their states, and set their generators. Collective over all ranks of the job.

        Args:
            sent: Bytes that this rank has sent.
            sources: See `transfer`.
            number: Number of this process, for the random numbers of a newcomer.

        Returns:
            What all ranks have sent.

        Raises:
            CommunicationError: A rank was lost.
        """
        is_newcomer = self._sharded.internals.groups.rank in sources
        state = torch.get_rng_state().numpy().tobytes()
        digest = None if is_newcomer else zlib.crc32(state)
        by_rank = gather_objects((sent, digest), "Recovery")
        if is_newcomer and len({digest for _, digest in by_rank if digest is not None}) > 1:
            torch.manual_seed(zlib.crc32(state, number))
        return StateBytes.total(of_rank for of_rank, _ in by_rank)

    def _send(self, target: int) -> StateBytes:
        """Send this rank's states."""
        states = self.encode()
        text = torch.frombuffer(bytearray(states.text.encode()), dtype=torch.uint8)
        with self._link_to(target) as (transport, index, waits):

            def send(message: torch.Tensor) -> int:
                if message.numel():
                    waits.wait([(index, transport.send(message, index, _TAG))])
                return message.numel() * message.itemsize

            text_bytes = sum(map(send, (torch.tensor([len(text)]), text, torch.get_rng_state())))
            return StateBytes(states.num_bytes, sum(send(as_bytes(tensor)) for tensor in states.tensors), text_bytes)

    def _receive(self, source: int) -> None:
        """Receive the states of a rank, and take them over, with the state of its generator."""
        length, random_state = torch.zeros(1, dtype=torch.int64), torch.get_rng_state()
        with self._link_to(source) as (transport, index, waits):

            def receive(out: torch.Tensor) -> torch.Tensor:
                waits.wait([(index, transport.recv(out, index, _TAG))])
                return out

            text = receive(torch.empty(int(receive(length)), dtype=torch.uint8))
            receive(random_state)
            value = decode(bytes(text.numpy()).decode(), receive)
        try:
            self._take_over(value)
        except Exception as error:  # of an object's `load_state_dict`: no failure of the job
            raise ConfigError(
                f"The states of the running job could not be loaded here: {type(error).__name__}: {error}. This node "
                "leaves, and the job goes on. Start the script of the running job."
            ) from error
        torch.set_rng_state(random_state)

    @contextmanager
    def _link_to(self, rank: int) -> Iterator[tuple[GlooTransport, int, MessageWaits]]:
        """The transport to another rank, its index there, and waits for messages."""
        group = self._sharded.internals.groups.world_group
        transport = cast("GlooTransport", group.transport if group is not None else None)  # checked by `Recovery`
        waits = MessageWaits("mics states", transport)
        try:
            yield transport, transport.fingerprint.ranks.index(rank), waits
        finally:
            waits.close()

    def _take_over(self, value: dict[str, Any]) -> None:
        internals = self._sharded.internals
        buckets = [bucket for unit in internals.units for bucket in unit.buckets]
        with torch.no_grad():
            for bucket, master in zip(buckets, value["masters"], strict=True):
                bucket.master_shard.copy_(master)
            for name, buffer in self._sharded.model.named_buffers():
                received = value["buffers"].get(name)
                if received is not None and (received.shape, received.dtype) == (buffer.shape, buffer.dtype):
                    buffer.copy_(received)  # others are caches of a rank: persistent ones were compared before
        for parameter, requires_grad in zip(internals.parameters, value["requires_grad"], strict=True):
            parameter.requires_grad_(requires_grad)
        for optimizer, states in zip(self._optimizers, value["optimizers"], strict=True):
            _load_optimizer_states(optimizer, states)
            internals.step_hooks.swap_of(optimizer)  # so that the states follow if groups are made once more
        self._sharded.steps_done = value["steps_done"]
        for name, other in self._others.items():
            other.load_state_dict(value["others"][name])


def _optimizer_states(optimizer: Optimizer) -> dict[str, Any]:
    """Options of the groups, and the states of each parameter in their order.

    Raises:
        ConfigError: A state belongs to no parameter, or is sharded in another way than its parameter.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group[_PARAMS]]
    known = {id(parameter) for parameter in parameters}
    if has_states_elsewhere(optimizer) or any(id(key) not in known for key in optimizer.state):
        raise ConfigError(
            f"{type(optimizer).__name__} has states beside those of its parameters, which a newcomer cannot get."
        )
    return {
        "groups": [{name: option for name, option in g.items() if name != _PARAMS} for g in optimizer.param_groups],
        "states": [_states_of(parameter, optimizer.state.get(parameter)) for parameter in parameters],
    }


def _states_of(parameter: torch.Tensor, states: dict[Any, Any] | None) -> list[Any] | None:
    """Name, whether it is sharded, and value of each state of a parameter; None where it has not been stepped."""
    if states is None:
        return None
    rows = []
    for name, value in states.items():
        if isinstance(value, DTensor):
            if (value.shape, value.placements) != (parameter.shape, getattr(parameter, "placements", None)):
                raise ConfigError(f"The state `{name}` of an optimizer is sharded in another way than its parameter.")
            rows.append([name, True, value.to_local()])
        else:
            rows.append([name, False, value])
    return rows


def _load_optimizer_states(optimizer: Optimizer, value: dict[str, Any]) -> None:
    for group, options in zip(optimizer.param_groups, value["groups"], strict=True):
        group.update(options)
    parameters = [parameter for group in optimizer.param_groups for parameter in group[_PARAMS]]
    optimizer.state.clear()
    for parameter, rows in zip(parameters, value["states"], strict=True):
        if rows is not None:
            optimizer.state[parameter] = {
                name: cast("ShardedParameter", parameter).like_self(state) if is_sharded else state
                for name, is_sharded, state in rows
            }
