"""Which buckets travel as several tensors in one launch, and which as one flat tensor?

One launch saves the copies between the parameters and the flat form, and costs the backend more work for each tensor.
Which is faster depends on the tensors and the links, so both ways are timed when a job starts, by turns, with tensors
of the model's own shapes, and what was found is kept for later jobs.
"""

from __future__ import annotations

import dataclasses
import hashlib
import socket
import statistics
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from mics_strategy.agreement import gather_objects
from mics_strategy.collectives import decisions
from mics_strategy.collectives.by_size import AnyCollective
from mics_strategy.collectives.calibration import moved_by, slowest_s
from mics_strategy.collectives.coalesced import Coalesced
from mics_strategy.collectives.crossover import RUNS
from mics_strategy.collectives.decisions import Links
from mics_strategy.collectives.peers import Peers
from mics_strategy.collectives.workspace import Workspace
from mics_strategy.config import ShardConfig, sum_dtype_of
from mics_strategy.errors import ConfigError, LifecycleError
from mics_strategy.mesh import Mesh
from mics_strategy.sharding.bucket import BucketSpec
from mics_strategy.sharding.direct import coalesced_of, in_one_launch
from mics_strategy.sharding.layout import BucketLayout
from mics_strategy.sharding.loose import CoalescedGradients

_WHAT = "a trial"
_SUM = "reduce"  # the purpose of sums in a backward
Run = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is gathered, or summed.

    Attributes:
        purpose: Of the collective.
        layout: Of the bucket.
        dtype: In which it travels.
        num_stages: Of the collective: over the same ranks it may go in one or in two.
    """

    purpose: str
    layout: BucketLayout
    dtype: torch.dtype
    num_stages: int

    @property
    def shapes(self) -> tuple[torch.Size, ...]:
        """Of the tensors; what matters of the layout."""
        return tuple(region.shape for region in self.layout.regions)

    @property
    def text(self) -> str:
        """Names it among others over the same ranks."""
        shapes = ";".join("x".join(map(str, shape)) for shape in self.shapes)
        digest = hashlib.blake2b(shapes.encode(), digest_size=8).hexdigest()
        tensors = f"{len(self.shapes)} tensors {digest} {self.dtype} over {self.layout.ranks}"
        return f"{self.purpose} coalesced, {tensors}, stages {self.num_stages}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Both ways, by the median of some runs of the slowest rank."""

    flat_s: float
    coalesced_s: float

    @property
    def coalesces(self) -> bool:
        """Whether one launch is no slower."""
        return self.coalesced_s <= self.flat_s


def choose(
    specs: list[list[BucketSpec]], config: ShardConfig, mesh: Mesh, device: torch.device
) -> list[list[BucketSpec]]:
    """The same buckets, with what is coalesced of each. Collective where something is measured.

    Args:
        specs: Of every unit, the same on all ranks.
        config: Says whether.
        mesh: The process groups.
        device: Of the tensors.

    Raises:
        ConfigError: On every rank: it is asked for, and no bucket can be.
    """
    asked = {id(spec): _questions(spec, config, mesh) for of_unit in specs for spec in of_unit}
    questions = {question.text: question for of_spec in asked.values() for question in of_spec}
    if config.coalesce is True and not questions:
        raise ConfigError(
            "`coalesce=True`: no unit can be moved so. It takes another backend than gloo, parameters or gradients "
            "that are sharded and not encoded, and first dimensions that are multiples of the ranks of `optimizer`. "
            "Use 'auto'."
        )
    if config.coalesce == "auto":
        yes = _measured(questions, mesh, device)
    else:
        yes = set(questions) if config.coalesce else set()

    def decided(spec: BucketSpec) -> BucketSpec:
        purposes = {question.purpose for question in asked[id(spec)] if question.text in yes}
        return dataclasses.replace(spec, coalesces_gathers=bool(purposes - {_SUM}), coalesces_sums=_SUM in purposes)

    return [[decided(spec) for spec in of_unit] for of_unit in specs]


def _questions(spec: BucketSpec, config: ShardConfig, mesh: Mesh) -> list[Question]:
    """What of a bucket can be coalesced."""
    found = []
    gathers, purpose = _gather_of(spec, mesh)
    wire_dtype = config.wire_dtype_of(spec.master_dtype)
    sums = mesh.reduce_grads if spec.trainable and spec.param_dtype == wire_dtype else None
    for across, for_what, dtype in ((gathers, purpose, spec.param_dtype), (sums, _SUM, wire_dtype)):
        coalesced = coalesced_of(across, spec.layout, dtype.itemsize) if across is not None else None
        if coalesced is not None:
            stages = coalesced.num_stages
            found.append(Question(purpose=for_what, layout=spec.layout, dtype=dtype, num_stages=stages))
    return found


def _gather_of(spec: BucketSpec, mesh: Mesh) -> tuple[AnyCollective | None, str]:
    """What gathers a bucket into the parameters themselves, and leaves nothing of the flat form to be kept."""
    if mesh.scopes.params == 1:
        return (mesh.trained if spec.trainable else mesh.frozen).update, "update"
    return (mesh.gather_secondary, "secondary") if mesh.has_secondary else (mesh.gather_params, "gather")


def _measured(questions: dict[str, Question], mesh: Mesh, device: torch.device) -> set[str]:
    """Those that are faster in one launch: as found before by this process, by jobs before, or now."""
    mover = moved_by(mesh.control.transport.group, device) if mesh.control is not None else None
    if mesh.control is None or mover is None or not questions:
        return set()
    known = _known.setdefault(dist.group.WORLD, {})
    spans = {text: mesh.scopes.span_of(question.purpose) for text, question in questions.items()}
    new = [text for text in questions if (mover, text, spans[text]) not in known]
    if new:
        hosts = gather_objects(socket.gethostname())[:: mesh.scopes.ranks_per_node]
        links = {text: Links.of(text, spans[text], hosts, mesh.scopes.ranks_per_node, mover) for text in new}
        recalled = [decisions.recall(links[text]) for text in new] if mesh.rank == 0 else []
        kept = dict(zip(new, mesh.control.share(recalled, 0), strict=True))
        answers = {text: measure(questions[text], mesh, mesh.control, device) for text in new if kept[text] is None}
        mesh.ledger.take()
        if mesh.rank == 0:
            for text, answer in answers.items():
                decisions.keep(links[text], int(answer.coalesces), [answer])
            print(report({text: (questions[text], answers.get(text), kept[text]) for text in new}), flush=True)
        for text in new:
            known[mover, text, spans[text]] = answers[text].coalesces if text in answers else bool(kept[text])
    return {text for text in questions if known[mover, text, spans[text]]}


_known: weakref.WeakKeyDictionary[Any, dict[tuple[Any, ...], bool]] = weakref.WeakKeyDictionary()


def measure(question: Question, mesh: Mesh, control: Peers, device: torch.device) -> Answer:
    """Move tensors of these shapes in both ways by turns. Collective over all ranks; the same answer on all."""
    workspace = Workspace()
    across = mesh.trial(question.purpose, workspace)
    coalesced = coalesced_of(across, question.layout, question.dtype.itemsize)
    if coalesced is None:
        raise LifecycleError(f"{question.text}: no other way. This is a defect; please report it.")
    ways = _ways_to_sum if question.purpose == _SUM else _ways_to_gather
    runs = ways(question, across, coalesced, device)
    workspace.use(torch.empty(workspace.needed_bytes, dtype=torch.uint8, device=device))
    times_s: list[list[float]] = [[], []]
    for _ in range(RUNS):
        for run, of_way in zip(runs, times_s, strict=True):
            of_way.append(slowest_s(run, control, device))
    flat_s, coalesced_s = (statistics.median(of_way[1:]) for of_way in times_s)  # the first was to warm up
    return Answer(flat_s=flat_s, coalesced_s=coalesced_s)


def _ways_to_gather(
    question: Question, across: AnyCollective, coalesced: Coalesced, device: torch.device
) -> tuple[Run, Run]:
    layout, dtype = question.layout, question.dtype
    shard, flat = _zeros(layout.full_numel // across.size, dtype, device), _zeros(layout.full_numel, dtype, device)
    wholes = layout.compact_views(_zeros(layout.compact_numel, dtype, device))
    pieces, parts = _pairs(layout, flat, wholes)
    direct = in_one_launch(coalesced, layout, [whole.view(-1) for whole in wholes], _WHAT)
    across.reserve_gather(shard.numel(), dtype)
    coalesced.reserve_gather(shard.numel(), dtype)

    def by_flat() -> None:
        across.gather(flat, shard, _WHAT).wait()
        torch._foreach_copy_(parts, pieces)

    return by_flat, lambda: direct(shard).wait()


def _ways_to_sum(
    question: Question, across: AnyCollective, coalesced: Coalesced, device: torch.device
) -> tuple[Run, Run]:
    layout, wire = question.layout, question.dtype
    out = _zeros(layout.full_numel // across.size, sum_dtype_of(wire), device)
    flat = _zeros(layout.full_numel, wire, device)
    grads = [_zeros(shape.numel(), wire, device).view(shape) for shape in question.shapes]
    pieces, parts = _pairs(layout, flat, grads)
    kept = CoalescedGradients(coalesced, layout, wire)
    across.reserve_reduce(flat.numel(), wire, out.dtype)
    coalesced.reserve_reduce(out.numel(), wire)

    def by_flat() -> None:
        torch._foreach_copy_(pieces, parts)
        across.reduce(out, flat, False, _WHAT).wait()

    def in_one() -> None:
        for position, grad in enumerate(grads):
            kept.keep(position, grad)
        kept.reduce(out, flat, False, _WHAT).wait()

    return by_flat, in_one


def _pairs(
    layout: BucketLayout, flat: torch.Tensor, wholes: list[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Places in the flat form, and in the tensors themselves."""
    pairs = [pair for position, whole in enumerate(wholes) for pair in layout.pieces(flat, whole, position)]
    return [piece for piece, _ in pairs], [part for _, part in pairs]


def _zeros(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.zeros(numel, dtype=dtype, device=device)


def report(found: dict[str, tuple[Question, Answer | None, int | None]]) -> str:
    """What was decided, and how to pin it, as text."""
    lines = ["mics_strategy decided by `coalesce='auto'` which tensors travel in one launch, without a flat form:"]
    for question, answer, kept in found.values():
        what = "sum" if question.purpose == _SUM else "gather"
        size = f"{len(question.shapes)} tensors, {question.layout.full_numel * question.dtype.itemsize:,} B"
        if answer is None:
            lines.append(f"  {what} of {size}: {'one launch' if kept else 'flat'}, measured by a job before")
        else:
            chosen = "one launch" if answer.coalesces else "flat"
            times = f"{1e3 * answer.coalesced_s:.2f} ms in one launch, {1e3 * answer.flat_s:.2f} ms flat"
            lines.append(f"  {what} of {size}: {chosen}, measured now ({times})")
    lines.append(
        f"It is kept in {decisions.PLACE} for the next job on the same nodes. `coalesce=True` or False pins it."
    )
    return "\n".join(lines)
