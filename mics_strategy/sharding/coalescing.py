"""Which buckets travel as several tensors in one launch, and which as one flat tensor?

One launch saves the copies between the parameters and the flat form, and costs the backend more work for each tensor.
Which is faster depends on the tensors and the links, so both ways are timed when a job starts, by turns, with tensors
of the model's own shapes, and what was found is kept for later jobs.
"""

from __future__ import annotations

import dataclasses
import socket
import weakref
from typing import Any

import torch
import torch.distributed as dist

from mics_strategy.agreement import gather_objects
from mics_strategy.collectives import decisions
from mics_strategy.collectives.by_size import AnyCollective
from mics_strategy.collectives.calibration import moved_by
from mics_strategy.collectives.decisions import Links
from mics_strategy.config import ShardConfig
from mics_strategy.errors import ConfigError
from mics_strategy.mesh import Mesh
from mics_strategy.sharding import trial
from mics_strategy.sharding.bucket import BucketSpec
from mics_strategy.sharding.direct import coalesced_of
from mics_strategy.sharding.trial import SUM, Answer, Question


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
        return dataclasses.replace(spec, coalesces_gathers=bool(purposes - {SUM}), coalesces_sums=SUM in purposes)

    return [[decided(spec) for spec in of_unit] for of_unit in specs]


def _questions(spec: BucketSpec, config: ShardConfig, mesh: Mesh) -> list[Question]:
    """What of a bucket can be coalesced."""
    found = []
    gathers, purpose = _gather_of(spec, mesh)
    wire_dtype = config.wire_dtype_of(spec.master_dtype)
    sums = mesh.reduce_grads if spec.trainable and spec.param_dtype == wire_dtype else None
    for across, for_what, dtype in ((gathers, purpose, spec.param_dtype), (sums, SUM, wire_dtype)):
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
        answers = {
            text: trial.measure(questions[text], mesh, mesh.control, device) for text in new if kept[text] is None
        }
        mesh.ledger.take()
        if mesh.rank == 0:
            for text, answer in answers.items():
                decisions.keep(links[text], int(answer.coalesces), [answer])
            print(report({text: (questions[text], answers.get(text), kept[text]) for text in new}), flush=True)
        for text in new:
            known[mover, text, spans[text]] = answers[text].coalesces if text in answers else bool(kept[text])
    return {text for text in questions if known[mover, text, spans[text]]}


_known: weakref.WeakKeyDictionary[Any, dict[tuple[Any, ...], bool]] = weakref.WeakKeyDictionary()


def report(found: dict[str, tuple[Question, Answer | None, int | None]]) -> str:
    """What was decided, and how to pin it, as text."""
    lines = ["mics_strategy decided by `coalesce='auto'` which tensors travel in one launch, without a flat form:"]
    for question, answer, kept in found.values():
        what = "sum" if question.purpose == SUM else "gather"
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
