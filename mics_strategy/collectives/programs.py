"""How does a collective become a program that ranks know by the same name?"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

from mics_strategy.collectives.channel import RouteBinding
from mics_strategy.collectives.lane import Executor
from mics_strategy.collectives.ledger import TrafficLog
from mics_strategy.collectives.ops import Work
from mics_strategy.collectives.route import HopTraffic
from mics_strategy.collectives.workspace import Workspace


@dataclass(frozen=True, slots=True)
class OpRequest:
    """A collective as ranks know it; all that ranks share which are asked for the same."""

    name: str
    size: str
    tag: int


class CollectiveQueue:
    """Names, counts and runs the programs of one channel.

    Args:
        channel: Where they go.
        runner: Runs them.
        workspace: Of the runner's programs.
        ledger: Receives every stage.
    """

    def __init__(self, channel: RouteBinding, runner: Executor, workspace: Workspace, ledger: TrafficLog) -> None:
        self._channel = channel
        self._executor = runner
        self._workspace = workspace
        self._traffic_log = ledger
        self._where = " and ".join(transport.description for transport in channel.transports)

    def next_op(self, kind: str, what: str, numel: int, dtype: torch.dtype) -> OpRequest:
        """Write into the trails what is asked for."""
        for transport in self._channel.transports:
            transport.fingerprint.update(what)
        count = self._channel.transports[0].fingerprint.count
        tag = zlib.crc32(f"{self._executor.name} {count} {kind} {what} {numel} {dtype}".encode()) % (2**31 - 1)
        return OpRequest(f"{kind} of {what}", f"{numel} {dtype}", tag)

    def log(self, messages: list[HopTraffic]) -> None:
        """Count what is to be sent."""
        for m in messages:
            self._traffic_log.record(m.collective, m.axis, m.size, m.dtype, m.full_bytes)

    def submit(self, asked: OpRequest, program: Callable[[], None]) -> Work:
        """Run a program, with the workspace to itself."""

        def in_workspace() -> None:
            self._workspace.reset()
            program()

        name = f"{asked.name} over {self._where}"
        work = self._executor.submit(name, asked.size, self._channel.ranks, in_workspace)
        works = [] if work is None else [work]
        return Work(name, works, is_queued=self._executor.is_async, on_failure=self._channel.watch.explain)
