"""Small control-plane collectives of one group.

They carry counts, norms, states, initial values, and pieces of any sizes. One stage, never quantized.
"""

from __future__ import annotations

from typing import TypeVar

import torch

from mics_strategy.comm.desync import DesyncWatchdog
from mics_strategy.comm.ranges import Ranges, RecordedCollective
from mics_strategy.comm.route import ALL_REDUCE, ALL_TO_ALL
from mics_strategy.comm.traffic import StageTraffic, TrafficLog
from mics_strategy.comm.transport import Transport
from mics_strategy.comm.watched_work import WatchedWork
from mics_strategy.comm.work import DEVICE_ERRORS, BackendWork, Work, as_communication_error, check_shapes
from mics_strategy.errors import MiCSError

T = TypeVar("T")


class ControlGroup:
    """The ranks of one group, for control-plane collectives.

    Args:
        transport: Transport of the group.
        traffic_log: Log that receives the collectives of a training step.
        watchdog: Finds out whether ranks have diverged.
        ranges: Ranges of the model.
    """

    def __init__(self, transport: Transport, traffic_log: TrafficLog, watchdog: DesyncWatchdog, ranges: Ranges) -> None:
        self._watchdog = watchdog
        self._ranges = ranges
        self.transport = transport
        self.size = transport.size
        self.index = transport.index
        self.axis = transport.axis
        self._traffic_log = traffic_log

    def all_reduce(self, tensor: torch.Tensor, label: str) -> Work:
        """Sum `tensor` over the ranks, in place. Cost: 2 (size - 1) / size * n sent."""
        num_bytes = tensor.numel() * tensor.itemsize
        stage = StageTraffic(ALL_REDUCE, self.axis, self.size, tensor.dtype, num_bytes)
        self._traffic_log.record([stage])
        recorded = self._record(ALL_REDUCE, label, stage.sent_bytes)
        return self._as_work(f"All-reduce of {label}", self.transport.start_all_reduce(tensor), recorded)

    def all_to_all(
        self, out: torch.Tensor, out_numels: list[int], full: torch.Tensor, full_numels: list[int], label: str
    ) -> Work:
        """Send every rank its piece of `full`, and receive the pieces of all ranks.

        They are stored in `out` in the order of the ranks' index.

        Args:
            out: [sum of `out_numels`], same dtype as `full`; overwritten.
            out_numels: Elements received from each rank.
            full: [sum of `full_numels`]; must stay unchanged until the work has been waited for.
            full_numels: Elements sent to each rank.
            label: Label of the payload in errors.

        Cost:
            Sent: all of `full` except this rank's own piece.
        """
        fits = (out.numel(), full.numel(), out.dtype) == (sum(out_numels), sum(full_numels), full.dtype)
        check_shapes(fits, label, out, full)
        self.transport.fingerprint.update(label)
        self._traffic_log.record_all_to_all(self.axis, self.size, full, full_numels[self.index])
        recorded = self._record(ALL_TO_ALL, label, (full.numel() - full_numels[self.index]) * full.itemsize)
        work = self.transport.all_to_all(out, out_numels, full, full_numels)
        return self._as_work(f"Exchange of {label}", work, recorded)

    def broadcast(self, tensor: torch.Tensor, label: str, source: int = 0) -> None:
        """Copy the tensor of one rank to all, in place.

        For initial values, buffers and states; not part of a plan.

        Any strides: a tensor that is not contiguous is copied before and after.
        """
        tensor = as_dense(tensor)
        dense = tensor.contiguous()
        recorded = self._record("broadcast", label)
        self._as_work(f"Broadcast of {label}", self.transport.broadcast(dense, source), recorded).wait()
        if dense.data_ptr() != tensor.data_ptr():
            tensor.copy_(dense)

    def broadcast_object(self, value: T, source: int) -> T:
        """Broadcast an object of rank `source`, and return it on all ranks.

        For states; not part of a plan.

        Raises:
            CommunicationError: A rank died or did not take part in time.
        """
        try:
            return self.transport.broadcast_object(value, source)
        except (MiCSError, *DEVICE_ERRORS):  # the first of a value that cannot be pickled
            raise
        except RuntimeError as error:
            label = f"Broadcast of an object over {self.transport.description}"
            raise as_communication_error(label, error, self._watchdog.explain()) from error

    def all_reduce_scalar(self, value: torch.Tensor, *, is_max: bool) -> torch.Tensor:
        """The sum or maximum of a small tensor over the ranks, in place. For norms; not part of a plan."""
        recorded = self._record(ALL_REDUCE, "norm")
        self._as_work("All-reduce of a norm", self.transport.start_all_reduce(value, is_max=is_max), recorded).wait()
        return value

    def _record(self, name: str, label: str, planned_bytes: int = 0) -> RecordedCollective | None:
        recorder = self._ranges.recorder
        return None if recorder is None else recorder.collective("control", name, label, self.axis, planned_bytes)

    def _as_work(self, label: str, work: BackendWork, recorded: RecordedCollective | None) -> Work:
        if self.transport.blocks_host:
            ranks = frozenset(self.transport.fingerprint.ranks)
            work = WatchedWork(work, self._watchdog, self._watchdog.record("peers", label, "", ranks))
        name = f"{label} over {self.transport.description}"
        return Work(name, work, on_failure=self._watchdog.explain, recorded=recorded)


def as_dense(tensor: torch.Tensor) -> torch.Tensor:
    """A view that holds every element of an expanded tensor once."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim]:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor
