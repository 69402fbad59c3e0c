"""Gradients of one bucket and one backward, until the first hop takes them.

On gloo a unit borrows a flat buffer from a pool, because a thread sends it while the next unit computes: a gradient is
kept only until the next one comes from another bucket. Where a stream runs collectives, all units share one buffer,
`staging`. Gradients stay where autograd has stored them until their first hop, which copies them, on its stream; what a
unit borrows then is empty.
"""

from __future__ import annotations

import torch

from mics_strategy.engine.lifecycle import GRAD_BUFFER_TRANSITIONS, GradBufferState, GradFlags, transition
from mics_strategy.engine.streams import order_behind
from mics_strategy.errors import ConfigError


class BackwardGrads:
    """The gradients of one bucket and one backward, until the first hop takes them.

    Args:
        name: Name of the bucket, for errors.
        flags: Flags of its parameters, shared with `GradBucket`.
        staging: See `GradBucket`.

    Attributes:
        state: State of the flat buffer.
        num_arrived: Number of parameters whose gradient has arrived.
        kept: Gradients where autograd has stored them, by position. Their memory stays unchanged: autograd gives a
            parameter a tensor without other references, or a copy.
        flat: [full_numel] in the wire dtype; None while no buffer is bound; empty with `staging`.
        is_zero: Whether `flat` holds zeros that other buckets also send, so that nothing is written to it.
    """

    def __init__(self, name: str, flags: GradFlags, staging: torch.Tensor | None) -> None:
        self.state = GradBufferState.EMPTY
        self.num_arrived = 0
        self.kept: dict[int, torch.Tensor] = {}
        self.flat: torch.Tensor | None = None
        self.is_zero = False
        self.staging = staging
        self._streams: list[torch.cuda.Stream] = []  # on which kept gradients were computed
        self._name = name
        self._flags = flags

    def bind_buffer(self, flat: torch.Tensor, *, is_zero: bool) -> None:
        """Use `flat` until the first hop of this backward has completed."""
        self.flat, self.is_zero = flat, is_zero
        self.state = transition(GRAD_BUFFER_TRANSITIONS, self.state, "bind_buffer", self._name)

    def keep_until_reduced(self, position: int, grad: torch.Tensor, earlier: torch.Tensor | None) -> None:
        """Keep a gradient until the first hop.

        It is added to an earlier one of its parameter, with the rounding of a flat buffer.
        """
        if earlier is not None and self.staging is not None:
            grad = earlier.to(self.staging.dtype) + grad.detach()
        self.kept[position] = grad.detach().clone() if grad.requires_grad else grad

    def follow(self, stream: torch.cuda.Stream | None) -> None:
        """Gradients arrive on `stream`; None on the CPU."""
        if stream is not None and stream not in self._streams:
            self._streams.append(stream)

    def join_streams(self) -> None:
        """Order the current stream behind those on which gradients have arrived."""
        if self._streams:
            order_behind(self._streams, self.kept.values())
            self._streams.clear()

    def start_reduce(self) -> dict[int, torch.Tensor]:
        """The first hop takes the buffer. Returns the gradients that it reads in place."""
        self.state = transition(GRAD_BUFFER_TRANSITIONS, self.state, "start_reduce", self._name)
        self.flat = None
        self.num_arrived = 0
        kept, self.kept = self.kept, {}
        return kept

    def finish_reduce(self) -> None:
        """The first hop has completed."""
        self.state = transition(GRAD_BUFFER_TRANSITIONS, self.state, "finish_reduce", self._name)

    def end(self) -> None:
        """The backward has ended; the next one starts with nothing collected."""
        self._flags.apply("end_backward")
        self.num_arrived = 0

    def discard(self) -> None:
        """Drop what an interrupted backward has collected and not sent."""
        self.end()
        self.flat = None
        self.kept = {}
        if self.state is not GradBufferState.REDUCING:
            self.state = transition(GRAD_BUFFER_TRANSITIONS, self.state, "discard", self._name)


def sparse_gradients(name: str) -> ConfigError:
    """The error for a module or parameter with sparse gradients."""
    return ConfigError(
        f"`{name}` makes sparse gradients, which cannot be reduce-scattered. Build or call it with `sparse=False`."
    )
