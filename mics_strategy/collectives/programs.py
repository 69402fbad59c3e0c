"""How does a collective become a program that ranks know by the same name?"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

from mics_strategy.collectives.channel import Channel
from mics_strategy.collectives.lane import Runner
from mics_strategy.collectives.ledger import Ledger
from mics_strategy.collectives.ops import Handle
from mics_strategy.collectives.route import Message
from mics_strategy.collectives.workspace import Workspace


@dataclass(frozen=True, slots=True)
class Asked:
    """A collective as ranks know it; all that ranks share which are asked for the same."""

    name: str
    size: str
    tag: int


class Programs:
    """Names, counts and runs the programs of one channel.

    Args:
        channel: Where they go.
        runner: Runs them.
        workspace: Of the runner's programs.
        ledger: Receives every stage.
    """

    def __init__(self, channel: Channel, runner: Runner, workspace: Workspace, ledger: Ledger) -> None:
        self._channel = channel
        self._runner = runner
        self._workspace = workspace
        self._ledger = ledger
        self._where = " and ".join(transport.where for transport in channel.transports)

    def ask(self, kind: str, what: str, numel: int, dtype: torch.dtype) -> Asked:
        """Write into the trails what is asked for."""
        for transport in self._channel.transports:
            transport.trail.note(what)
        count = self._channel.transports[0].trail.count
        tag = zlib.crc32(f"{self._runner.name} {count} {kind} {what} {numel} {dtype}".encode()) % (2**31 - 1)
        return Asked(f"{kind} of {what}", f"{numel} {dtype}", tag)

    def write(self, messages: list[Message]) -> None:
        """Count what is to be sent."""
        for m in messages:
            self._ledger.write(m.collective, m.axis, m.ranks, m.dtype, m.full_bytes)

    def run(self, asked: Asked, program: Callable[[], None]) -> Handle:
        """Run a program, with the workspace to itself."""

        def in_workspace() -> None:
            self._workspace.begin()
            program()

        name = f"{asked.name} over {self._where}"
        work = self._runner.run(name, asked.size, self._channel.ranks, in_workspace)
        works = [] if work is None else [work]
        return Handle(name, works, is_queued=self._runner.is_queue, on_failure=self._channel.watch.explain)
