"""What should training have done? The truth: one process, the whole batch, plain torch.

A sharded run on R ranks with A micro-steps must equal this: every micro-batch of every rank adds
loss / (R * A) to one gradient, then one ordinary optimizer takes one step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from tests.models import Batch


@dataclass(slots=True)
class Trace:
    """What happened, step by step, and what came out.

    Attributes:
        losses_by_rank: [step][rank], mean over the micro-steps, before the step's update.
        grad_norms: [step], of all parameters together, before clipping.
        grads: [step][name], before clipping.
        parameters: By name, at the end. Tied parameters stand under their first name.
        buffers_by_rank: [rank][name], at the end: each rank has seen its own batches only.
    """

    losses_by_rank: list[list[float]] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    grads: list[dict[str, Tensor]] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    buffers_by_rank: list[dict[str, Tensor]] = field(default_factory=list)

    @property
    def losses(self) -> list[float]:
        """[step], mean over ranks and micro-steps."""
        return [sum(by_rank) / len(by_rank) for by_rank in self.losses_by_rank]


def train_reference(
    model: nn.Module,
    batches: Sequence[Sequence[Sequence[Batch]]],
    make_optimizer: Callable[[list[nn.Parameter]], Optimizer],
    *,
    loss_fn: Callable[[nn.Module, Batch], Tensor],
    clip: float | None = None,
    make_scheduler: Callable[[Optimizer], LRScheduler] | None = None,
    missing_grads_are_zero: bool = True,
) -> Trace:
    """Train `model` in place and tell what happened.

    Args:
        model: On one device; changed.
        batches: [step][micro-step][rank].
        make_optimizer: Gets the parameters that require gradients.
        loss_fn: Returns the mean loss of one batch.
        clip: Greatest gradient norm; None for no clipping.
        make_scheduler: Its scheduler advances once per step.
        missing_grads_are_zero: A trainable parameter that no batch of a step has used gets a zero
            gradient (so weight decay still acts on it), not None.
    """
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = make_optimizer(list(trainable.values()))
    scheduler = make_scheduler(optimizer) if make_scheduler else None
    trace = Trace()
    num_ranks = len(batches[0][0])
    trace.buffers_by_rank = [_clone(dict(model.named_buffers())) for _ in range(num_ranks)]
    for micro_steps in batches:
        optimizer.zero_grad(set_to_none=True)
        losses = _accumulate(model, micro_steps, loss_fn, trace.buffers_by_rank)
        for p in trainable.values():
            if p.grad is None and missing_grads_are_zero:
                p.grad = torch.zeros_like(p)
        grads = {name: p.grad for name, p in trainable.items() if p.grad is not None}
        trace.losses_by_rank.append(losses)
        trace.grads.append(_clone(grads))
        trace.grad_norms.append(nn.utils.get_total_norm(grads.values()).item())
        if clip is not None:
            nn.utils.clip_grad_norm_(trainable.values(), clip)
        optimizer.step()
        if scheduler:
            scheduler.step()
    trace.parameters = _clone(dict(model.named_parameters()))
    return trace


def _accumulate(
    model: nn.Module,
    micro_steps: Sequence[Sequence[Batch]],
    loss_fn: Callable[[nn.Module, Batch], Tensor],
    buffers_by_rank: list[dict[str, Tensor]],
) -> list[float]:
    """Add every batch's share to the gradients; return the mean loss by rank."""
    num_ranks, accumulation = len(buffers_by_rank), len(micro_steps)
    losses = [0.0] * num_ranks
    for by_rank in micro_steps:
        for rank, batch in enumerate(by_rank):
            _load(model, buffers_by_rank[rank])
            loss = loss_fn(model, batch)
            (loss / (num_ranks * accumulation)).backward()
            losses[rank] += loss.item() / accumulation
            buffers_by_rank[rank] = _clone(dict(model.named_buffers()))
    return losses


def _load(model: nn.Module, buffers: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])


def _clone(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}
