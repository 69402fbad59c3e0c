"""Wrappers of the engine's methods that record its steps.

While a model is recorded, methods of its own objects are replaced by wrappers: of the engine's seven functions, of
queues, control groups and side streams. Afterwards the classes' methods are found again, so a model that is not
recorded does not even ask whether it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from typing_extensions import override

from mics_strategy.comm.control import ControlGroup
from mics_strategy.comm.queue import CollectiveQueue, CommTask, OpRequest
from mics_strategy.comm.traffic import CollectiveTraffic, all_reduce_bytes
from mics_strategy.comm.work import Steps, Work
from mics_strategy.engine.grad_bucket import GradBucket
from mics_strategy.engine.internals import Internals
from mics_strategy.engine.optimizer.local_swap import LocalParamSwap
from mics_strategy.engine.optimizer.owner_exchange import OwnerExchange
from mics_strategy.engine.order import ForwardCall
from mics_strategy.engine.parameter import ShardedParameter
from mics_strategy.engine.profile.recorder import (
    AFTER_BACKWARD,
    DATA,
    ENGINE,
    LOSS,
    OPTIMIZER,
    RecordedCollective,
    Recorder,
)
from mics_strategy.engine.streams import OpChain
from mics_strategy.engine.unit import Unit
from mics_strategy.timeline import Category, PartKey

Method = Callable[..., Any]
StepArguments = tuple[tuple[Any, ...], dict[str, Any], LocalParamSwap | None]

_OUTERMOST = 2  # entries of the compute row at the end of an outermost forward: the forward, and the engine
_QUEUED_COLLECTIVES = {"All-gather": "all_gather", "Reduce-scatter": "reduce_scatter", "All-reduce": "all_reduce"}


class Replacements:
    """Methods of single objects that are replaced for a while."""

    def __init__(self) -> None:
        self._before: list[tuple[object, str, Method | None]] = []

    def replace(self, owner: object, name: str, wrap: Callable[[Method], Method]) -> None:
        """Replace the method of one object by `wrap` of it."""
        self._before.append((owner, name, vars(owner).get(name)))
        setattr(owner, name, wrap(getattr(owner, name)))

    def restore(self) -> None:
        """Undo all replacements, the last one first."""
        while self._before:
            owner, name, method = self._before.pop()
            if method is None:
                delattr(owner, name)
            else:
                setattr(owner, name, method)


class RecordedWork(Work):
    """A work whose waits are recorded.

    Args:
        work: The work.
        recorder: Recorder of the waits.
        key: Identity of the collective.
        on_end: Called when a wait has returned first.
    """

    __slots__ = ("_key", "_on_end", "_recorder", "_work")

    def __init__(self, work: Work, recorder: Recorder, key: PartKey, on_end: Callable[[], None] | None = None) -> None:
        super().__init__(work.label, [], queued=work.queued)
        self.keepalive = work.keepalive
        self._work = work
        self._recorder = recorder
        self._key = key
        self._on_end = on_end

    @override
    def wait(self) -> None:
        with self._recorder.waiting(self._key):
            self._work.wait()
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end()
        super().wait()

    @property
    @override
    def has_completed(self) -> bool:
        return self._work.has_completed


class EngineWrappers:
    """Wrappers of one model's engine, handle and optimizer steps.

    Args:
        model: Model that is recorded.
        recorder: Recorder of its steps.
        on_step: Called at the end of every optimizer step.
    """

    def __init__(self, model: Internals, recorder: Recorder, on_step: Callable[[], None]) -> None:
        self._engine = model.engine
        self._target = model.target
        self._row = recorder.compute
        self._on_step = on_step
        self._keys: dict[tuple[str, int], PartKey] = {}
        self._is_stepping = False

    def install(self, model: Internals, replacements: Replacements) -> None:
        """Replace the methods, until `Replacements.restore`."""
        wrappers: tuple[tuple[object, str, Method], ...] = (
            (model.engine, "pre_forward", self._pre_forward),
            (model.engine, "post_forward", self._post_forward),
            (model.engine, "pre_backward", self._pre_backward),
            (model.engine, "on_grad", self._on_grad),
            (model.engine, "post_backward", self._post_backward),
            (model.engine, "finish_gradients", self._finish_gradients),
            (model.step_hooks, "before", self._before_step),
            (model.target, "post_step", self._post_step),
        )
        for owner, name, wrapper in wrappers:
            replacements.replace(owner, name, partial(partial, wrapper))

    def _key(self, name: str, unit: Unit) -> PartKey:
        key = self._keys.get((name, unit.index))
        if key is None:
            key = self._keys[name, unit.index] = PartKey(category=Category.COMPUTE, name=name, unit=unit.name)
        return key

    def _pre_forward(self, method: Method, unit: Unit) -> ForwardCall:
        is_recomputing = self._engine.is_recomputing
        if not is_recomputing and self._row.depth == 0:
            self._row.begin_forward()
        self._row.enter(ENGINE)
        try:
            call: ForwardCall = method(unit)
        except BaseException:
            self._row.leave()
            raise
        self._row.become(self._key("recompute" if is_recomputing else "forward", unit))
        return call

    def _post_forward(self, method: Method, call: ForwardCall, outputs: list[torch.Tensor]) -> None:
        self._row.enter(ENGINE)
        try:
            method(call, outputs)
        finally:
            if self._row.depth == _OUTERMOST and not call.is_recomputed:
                self._row.continue_with(LOSS)
            self._row.leave(_OUTERMOST)

    def _pre_backward(self, method: Method, call: ForwardCall, gradient: torch.Tensor | None = None) -> None:
        with self._row.inside(ENGINE):
            method(call, gradient)
            self._row.continue_with(self._key("backward", call.unit))

    def _on_grad(
        self, method: Method, unit: Unit, gradient: GradBucket, position: int, parameter: torch.Tensor
    ) -> None:
        self._row.attribute(self._key("backward", unit))
        with self._row.inside(ENGINE):
            method(unit, gradient, position, parameter)

    def _post_backward(self, method: Method) -> None:
        with self._row.inside(ENGINE):
            method()
            self._row.continue_with(OPTIMIZER if self._is_stepping else AFTER_BACKWARD)

    def _finish_gradients(self, method: Method) -> bool:
        if not self._engine.reducer.is_dirty:  # a read of `.grad`
            return bool(method())
        with self._row.inside(ENGINE):
            return bool(method())

    def _before_step(
        self, method: Method, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> StepArguments:
        result: StepArguments = method(optimizer, args, kwargs)
        if result[2] is not None:
            self._row.begin_step()
        elif result[0] is not args or result[1] is not kwargs:  # its closure has been wrapped, and runs first
            self._is_stepping = True
        return result

    def _post_step(self, method: Method, parameters: list[ShardedParameter], exchanges: list[OwnerExchange]) -> None:
        is_first = self._engine.backwards.num_in_step > 0  # of the optimizers that share a step
        method(parameters, exchanges)
        self._is_stepping = False
        self._row.continue_with(DATA)
        if is_first:
            self._on_step()


class CommWrappers:
    """Wrappers of one model's queues, control groups and side streams.

    Args:
        recorder: Recorder of its collectives.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def install(self, model: Internals, replacements: Replacements) -> None:
        """Replace the methods, until `Replacements.restore`. No queue is made after `shard()`."""
        groups, streams = model.groups, model.engine.reducer.streams
        for queue in groups.resources.queues:
            recording = _QueueRecording(queue, self._recorder)
            for name in ("next_op", "log", "submit"):
                replacements.replace(queue, name, partial(partial, getattr(recording, name)))
        for control in {group for group in (groups.world_group, groups.shard_group) if group is not None}:
            controls = _ControlRecording(control, self._recorder)
            for name in ("all_reduce", "all_to_all", "broadcast", "all_reduce_scalar"):
                replacements.replace(control, name, partial(partial, getattr(controls, name)))
        if groups.device.type == "cuda":
            for stream in (streams.all_gather, streams.reduce_scatter, streams.second_hop):
                replacements.replace(stream, "launch", partial(partial, self._launch))

    def _launch(self, method: Method, *args: Any, **options: Any) -> OpChain:
        """Launch a chain on a side stream. A later wait for it is recorded as one for its last collective."""
        self._recorder.submitted.append([])
        try:
            chain: OpChain = method(*args, **options)
        finally:
            keys = self._recorder.submitted.pop()
        if keys:
            self._replacements_of(chain, keys[-1])
        return chain

    def _replacements_of(self, chain: OpChain, key: PartKey) -> None:
        wait, recorder = chain.wait, self._recorder

        def recorded_wait() -> None:
            with recorder.waiting(key):
                wait()

        Replacements().replace(chain, "wait", lambda _: recorded_wait)  # for the chain's own life


class _QueueRecording:
    """The collective that a queue names, then logs, then submits."""

    def __init__(self, queue: CollectiveQueue, recorder: Recorder) -> None:
        self._queue = queue.name
        self._recorder = recorder
        self._name = self._label = self._axis = ""
        self._sent_bytes = 0

    def next_op(self, method: Method, kind: str, label: str, *payload: Any) -> OpRequest:
        self._name, self._label = _QUEUED_COLLECTIVES.get(kind, kind), label
        op: OpRequest = method(kind, label, *payload)
        return op

    def log(self, method: Method, *payload: Any) -> list[CollectiveTraffic]:
        stages: list[CollectiveTraffic] = method(*payload)
        axes = {stage.axis: not stage.axis.startswith("intra_node") for stage in stages}
        self._axis = "+".join(sorted(axes, key=lambda axis: axes[axis]))  # the fastest first, as of a span
        self._sent_bytes = sum(stage.sent_bytes for stage in stages)
        return stages

    def submit(
        self, method: Method, op: OpRequest, task: CommTask, tensors: Iterable[torch.Tensor] | None = None
    ) -> Work:
        recorder = self._recorder
        key = PartKey(category=Category.COLLECTIVE, name=self._name, unit=self._label, axis=self._axis)
        if recorder.submitted:
            recorder.submitted[-1].append(key)
        submitted = recorder.clock.stamp()

        def recorded_task() -> Steps:
            started, begun = recorder.clock.stamp(), recorder.ranges.begin(key)
            try:
                yield from task()
            finally:
                recorder.ranges.end(begun)
            recorder.add(
                RecordedCollective(
                    queue=self._queue,
                    key=key,
                    submitted=submitted,
                    started=started,
                    ended=recorder.clock.stamp(),
                    sent_bytes=sent_bytes,
                )
            )

        sent_bytes = self._sent_bytes
        return RecordedWork(method(op, recorded_task, tensors), recorder, key)


class _ControlRecording:
    """Collectives of a control group, from the call to the end of the wait.

    Args:
        control: The group.
        recorder: Recorder of the collectives.
    """

    def __init__(self, control: ControlGroup, recorder: Recorder) -> None:
        self._axis, self._size, self._index = control.axis, control.size, control.index
        self._recorder = recorder

    def all_reduce(self, method: Method, tensor: torch.Tensor, label: str) -> Work:
        sent_bytes = all_reduce_bytes(tensor.numel() * tensor.itemsize, self._size)
        return self._started("all_reduce", label, sent_bytes, lambda: method(tensor, label))

    def all_to_all(
        self,
        method: Method,
        out: torch.Tensor,
        out_numels: list[int],
        full: torch.Tensor,
        full_numels: list[int],
        label: str,
    ) -> Work:
        sent_bytes = (sum(full_numels) - full_numels[self._index]) * full.itemsize
        return self._started("all_to_all", label, sent_bytes, lambda: method(out, out_numels, full, full_numels, label))

    def broadcast(self, method: Method, tensor: torch.Tensor, label: str, source: int = 0) -> None:
        self._blocking("broadcast", label, lambda: method(tensor, label, source))

    def all_reduce_scalar(self, method: Method, value: torch.Tensor, *, is_max: bool) -> torch.Tensor:
        result: torch.Tensor = self._blocking("all_reduce", "norm", lambda: method(value, is_max=is_max))
        return result

    def _key(self, name: str, label: str) -> PartKey:
        return PartKey(category=Category.COLLECTIVE, name=name, unit=label, axis=self._axis)

    def _started(self, name: str, label: str, sent_bytes: int, start: Callable[[], Work]) -> Work:
        key, started = self._key(name, label), self._recorder.clock.stamp()
        return RecordedWork(start(), self._recorder, key, partial(self._end, key, started, sent_bytes))

    def _blocking(self, name: str, label: str, run: Callable[[], Any]) -> Any:
        key, started = self._key(name, label), self._recorder.clock.stamp()
        with self._recorder.waiting(key):
            result = run()
        self._end(key, started, sent_bytes=0)  # not part of a plan
        return result

    def _end(self, key: PartKey, started: Any, sent_bytes: int) -> None:
        ended = self._recorder.clock.stamp()
        self._recorder.add(
            RecordedCollective(
                queue="control", key=key, submitted=started, started=started, ended=ended, sent_bytes=sent_bytes
            )
        )
