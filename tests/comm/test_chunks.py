"""Do the pieces of a collective in two stages go one behind the other, so that both links are at work?"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch

from mics_strategy.comm.transport import GlooTransport
from tests.comm.networks import Network
from tests.ranks import RankContext, RankPool

EIGHT_PIECES = 150_000


class Spy:
    """Writes down in which order pieces are begun and waited for, by axis."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str, int]] = []
        self._counts: dict[str, int] = {}

    @contextmanager
    def on(self, method: str) -> Iterator[None]:
        """Watch one method of `GlooTransport`."""
        original = getattr(GlooTransport, method)

        def begin(transport: GlooTransport, *args: object) -> object:
            pieces, spy = original(transport, *args), self
            number = self._counts[transport.axis] = self._counts.get(transport.axis, -1) + 1
            self.events.append(("begin", transport.axis, number))

            class Watched:
                def wait_recv(self, index: int) -> None:
                    pieces.wait_recv(index)

                def wait(self) -> None:
                    spy.events.append(("wait", transport.axis, number))
                    pieces.wait()

            return Watched()

        with mock.patch.object(GlooTransport, method, begin):
            yield

    def at(self, what: str, axis: str, number: int) -> int:
        """When that happened."""
        return self.events.index((what, axis, number))


def pipelined(ctx: RankContext, kind: str) -> bool:
    """Whether the second stage of the first piece begins before the first stage of the last piece is waited for."""
    network = Network(ctx)
    one, other, spy, numel = network.one, network.other, Spy(), EIGHT_PIECES
    other.reserve_reduce_scatter(4 * numel, torch.float32, torch.float32)
    other.reserve_all_reduce(2 * numel, torch.float32, torch.float32)
    network.lend()
    if kind == "gather":
        with spy.on("all_gather"):
            one.all_gather(torch.empty(4 * numel), torch.zeros(numel), "block").wait()
        # The own row goes over the fast links at once, in 8 pieces; then the other row follows piece by piece.
        return spy.at("wait", "inter_node", 0) < spy.at("begin", "intra_node", 8) < spy.at("wait", "inter_node", 1)
    with spy.on("exchange"):
        if kind == "reduce":
            other.reduce_scatter(torch.empty(numel), torch.zeros(4 * numel), False, "block").wait()
        else:
            other.all_reduce(torch.zeros(2 * numel), torch.float32, "block").wait()
    rows = 2 if kind == "reduce" else 1
    begun = spy.at("begin", "inter_node", 0)
    return spy.at("wait", "intra_node", rows - 1) < begun < spy.at("wait", "intra_node", rows)


@pytest.mark.parametrize("kind", ["gather", "reduce", "all_reduce"])
def test_a_piece_is_on_its_second_stage_while_later_ones_are_on_the_first(ranks: RankPool, kind: str) -> None:
    assert ranks(4, pipelined, kind, ranks_per_node=2) == [True] * 4
