"""Second hops in flight while the next window computes: `second_hop="delayed"`.

A *window* is all backwards in front of one optimizer step. At its end its sum leaves the accumulator, to which the next
window adds, and is sent from memory of its own:

    accumulator, at the end of window k
      | copy
    delayed sum    [numel_at(G)]
      | second hop, while window k + 1 computes
    delayed mean   [shard_numel]      the delayed sum itself where gradients have the scope of optimizer states
      | copy, or mean with the one before
    kept mean      [shard_numel]      until the next one comes
      | copy
    result         [shard_numel]      what the optimizer reads behind window k + 1

The kept mean of the window before is what a tentative step reads; a committed step reads the mean of two windows (see
`optimizer.delayed`). The first window waits for its own hop, and stands for the one that is missing before it.

Source:
    ACCO (arXiv:2406.02613), algorithm 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from typing_extensions import override

from mics_strategy.engine.bucket_specs import delayed_pieces
from mics_strategy.engine.grad_bucket import GradBucket, GradMemory
from mics_strategy.engine.lifecycle import ACCUMULATOR_TRANSITIONS, AccumulatorState, GradFlag, transition
from mics_strategy.engine.memory import MemoryTracker, StagingPool, arena
from mics_strategy.engine.rank_agreement import AccumulationWindow, RankAgreement
from mics_strategy.engine.second_hops import SecondHops
from mics_strategy.engine.streams import OpChain, OpStream
from mics_strategy.errors import LifecycleError


class DelayedGrad(GradBucket):
    """The gradient of one bucket in the window before the present one.

    Args:
        window: Gradient of the present window.
        pieces: Memory by purpose, as `delayed_pieces` says.

    Attributes:
        window: Gradient of the present window.
        kept: Kept mean.
        tentative: Tentative parameters, or the committed ones while the masters hold these.
        positions: Positions of the parameters that any rank has used in that window.
        kept_positions: The same of the kept mean.
    """

    def __init__(self, window: GradBucket, pieces: Mapping[str, torch.Tensor]) -> None:
        accumulator = pieces["delayed sums"]
        mean = pieces.get("delayed means", accumulator)
        memory = GradMemory(accumulator=accumulator, result=mean, result_cast=mean, feedback=window.feedback)
        super().__init__(window.bucket, memory)
        self.window = window
        self.kept = pieces["kept means"]
        self.tentative = pieces["tentative parameters"]
        self.positions: list[int] = []
        self.kept_positions: list[int] = []

    def clear(self) -> None:
        """Forget the window before: its hop has ended."""
        self.flags.apply("zero_grad")
        self.state, self.positions = AccumulatorState.NONE, []

    def resume(self, positions: list[int], kept_positions: list[int]) -> None:
        """Continue with means that were loaded, of the parameters at these positions."""
        self.clear()
        self.state, self.positions, self.kept_positions = AccumulatorState.SHARDED, positions, kept_positions

    def take_sum(self) -> None:
        """Take over the sum of the present window; nothing where this rank has none."""
        if self.window.state is AccumulatorState.PARTIAL:
            self.accumulator.copy_(self.window.accumulator)
            self._start_accumulating()
            self.flags.apply("accumulate", self.window.flags.positions_with(GradFlag.ACCUMULATED))

    def keep(self, *, with_earlier: bool) -> None:
        """Let the kept mean be that of the window before.

        Args:
            with_earlier: Whether it is averaged with the present one; a window without a gradient counts as zeros.
        """
        if self.state is AccumulatorState.NONE:
            self.result.zero_()  # no rank had a gradient
        if with_earlier:
            self.kept.add_(self.result).mul_(0.5)
            self.kept_positions = sorted({*self.kept_positions, *self.positions})
        else:
            self.kept.copy_(self.result)
            self.kept_positions = self.positions

    def expose_kept(self) -> None:
        """Expose the kept mean on the parameters, in place of the present window's gradient."""
        window = self.window
        window.result.copy_(self.kept)
        if window._result_cast is not window.result:
            window._result_cast.copy_(window.result)
        for event in ("zero_grad", "start_accumulation", "finish"):
            window.flags.apply(event)
        for event in ("accumulate", "finish"):
            window.state = transition(ACCUMULATOR_TRANSITIONS, window.state, event, self.name)
        if self.kept_positions:
            window.expose(self.kept_positions)
        else:
            window.discard_unused()


class LossScales:
    """Scales of a `GradScaler`: gradients of a window are unscaled with those of its own backwards.

    A step unscales the gradients of windows before, and the scale may have grown since. Inverse scales, each a tensor
    of one number; None where nothing has been scaled.

    Attributes:
        pending: Scale of the window whose hop is in flight.
        kept: Scale of the kept means.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all scales."""
        self.pending: torch.Tensor | None = None
        self.kept: torch.Tensor | None = None

    def keep(self, kept: Iterable[torch.Tensor], *, with_earlier: bool) -> None:
        """Let `kept` have the scale of the pending window, with which it is averaged."""
        if with_earlier and self.kept is not None and self.pending is not None:
            for mean in kept:
                mean.mul_(self.kept / self.pending)
        self.kept = self.pending

    def unscale(self, inverse: torch.Tensor) -> torch.Tensor:
        """The inverse scale of exposed gradients.

        Args:
            inverse: That of the window in front of this step. Behind the first window its own gradients are exposed.
        """
        self.pending = inverse.clone()
        if self.kept is None:
            self.kept = self.pending
        return self.kept


class DelayedHops(SecondHops):
    """Second hops, each in flight until the window after its own has ended.

    Args:
        stream: Side stream of second hops.
        wires: Pool of wire buffers.
        unit_grad_buckets: As of `SecondHops`.
        window: As of `SecondHops`.
        delayed: The gradient of the window before, for each of them.

    Attributes:
        delayed: See `Args`.
        scales: Scales of a `GradScaler`.
        has_pending: Whether there is a window whose mean no committed step has used.
        is_tentative: Whether the present window computes with tentative parameters, so that its step commits.
        commits: Whether the step behind the gradients that are exposed commits.
        awaits_step: Whether gradients are final that no step has used.
        on_finish: Called when gradients have become final.
    """

    def __init__(
        self,
        stream: OpStream,
        wires: StagingPool,
        unit_grad_buckets: dict[int, list[GradBucket]],
        window: AccumulationWindow,
        delayed: Sequence[DelayedGrad],
    ) -> None:
        super().__init__(stream, wires, unit_grad_buckets, window)
        self.delayed = delayed
        self.scales = LossScales()
        self.on_finish: Callable[[], None] = lambda: None
        self._delayed_of = {grad_bucket.window: grad_bucket for grad_bucket in delayed}
        self._places |= {grad_bucket: self._places[grad_bucket.window] for grad_bucket in delayed}
        self.restart()

    def restart(self) -> None:
        """Forget all windows. The next one waits for its own hop, as the first does."""
        self.wait_all()
        self.scales.clear()
        self.has_pending = self.is_tentative = self.awaits_step = False
        self.commits = True

    def settle(self) -> None:
        """Wait for the hops in flight, and unscale what is kept and pending."""
        self.wait_all()
        for delayed in self.delayed:
            if self.scales.pending is not None:
                delayed.result.mul_(self.scales.pending)
            if self.scales.kept is not None:
                delayed.kept.mul_(self.scales.kept)
        self._set_unscaled()

    def resume(self, *, has_pending: bool, is_tentative: bool) -> None:
        """Continue with means that were loaded."""
        self.has_pending, self.is_tentative = has_pending, is_tentative
        self._set_unscaled()

    def _set_unscaled(self) -> None:
        if self.has_pending and self.delayed:
            self.scales.pending = self.scales.kept = self.delayed[0].kept.new_ones((), dtype=torch.float32)

    @override
    def begin_backward(self, turns: Iterable[GradBucket]) -> None:
        for window in self._delayed_of:
            if window.state is AccumulatorState.SHARDED:
                raise LifecycleError(
                    f"A backward follows final gradients of `{window.name}` that were not cleared. With "
                    '`second_hop="delayed"` they are those of earlier windows, to which nothing may be added: call '
                    "`zero_grad()` (with `set_to_none=True`, its default) behind every step, read gradients behind the "
                    'last micro-step only, or use `second_hop="boundary"`.'
                )
        if self.awaits_step:  # a step was left out, perhaps for what the window in flight holds
            self.restart()
        super().begin_backward(turns)

    @override
    def start(self, grad_bucket: GradBucket, first_hops: Sequence[OpChain] = ()) -> None:
        delayed = self._delayed_of[grad_bucket]
        delayed.take_sum()
        super().start(delayed, first_hops)

    @override
    def finish(self, agreement: RankAgreement) -> None:
        is_first, self.has_pending = not self.has_pending, True
        if not is_first:
            self._keep()
        for delayed in self.delayed:
            delayed.clear()
            delayed.positions = agreement.used_positions(delayed.window)
        self.start_due(agreement)
        if is_first:
            self._keep()
        self._expose_kept()

    def expose_last(self) -> None:
        """Expose what no committed step has used: no window follows. That of the next training waits for its own."""
        self.settle()
        self._keep()
        self.commits, self.has_pending = True, False
        self._expose_kept()

    def _keep(self) -> None:
        """Wait for the hops of the window before, and keep their means."""
        self.wait_all()
        self._finished.clear()
        self.commits, self.is_tentative = self.is_tentative, False
        self.scales.keep((delayed.kept for delayed in self.delayed), with_earlier=self.commits)
        for delayed in self.delayed:
            delayed.keep(with_earlier=self.commits)

    def _expose_kept(self) -> None:
        for delayed in self.delayed:
            delayed.expose_kept()
        self.awaits_step = True
        self.on_finish()


def make_delayed(
    unit_grad_buckets: Iterable[list[GradBucket]], memory: MemoryTracker, device: torch.device
) -> list[DelayedGrad]:
    """Allocate the memory of delayed hops and of tentative steps, for the gradients of all units."""
    windows = [grad_bucket for grad_buckets in unit_grad_buckets for grad_bucket in grad_buckets]
    pieces = [delayed_pieces(window.bucket.spec, window.bucket.groups.scopes) for window in windows]
    tensors: list[dict[str, torch.Tensor]] = [{} for _ in windows]
    for purpose in dict.fromkeys(purpose for of_bucket in pieces for purpose in of_bucket):
        having = [(own, piece[purpose]) for own, piece in zip(tensors, pieces, strict=True) if purpose in piece]
        for (own, _), tensor in zip(having, arena(memory, purpose, [p for _, p in having], device), strict=True):
            own[purpose] = tensor
    return [DelayedGrad(window, own) for window, own in zip(windows, tensors, strict=True)]
