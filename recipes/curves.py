"""Loss curves of several trainings beside that of DDP: comparison, table, files and figure.

Two trainings with the same weights and data that add the same numbers in another order differ by rounding, which grows
from step to step. So equality is a bound on the relative difference of the losses of every step:

    largest difference = max over steps of |loss - loss of DDP| / loss of DDP

`TOLERANCE` is the bound for trainings that quantize nothing. A control, DDP itself with micro-batches of half the
size, measures what the order of sums alone does; where the control leaves the bound, the bound decides nothing, and
the comparison says so.
"""

import csv
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from .errors import RecipeError

REFERENCE = "ddp"
CONTROL = "ddp, half micro-batches"
TOLERANCE = 1e-4  # relative; a wrong scale of gradients or a lost micro-batch gives more than 1e-2 within ten steps

Verdict = Literal["reference", "equal", "DIFFERENT", "quantized", "control"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Losses of one training.

    Attributes:
        family: Architecture.
        strategy: Name of the strategy.
        is_quantized: Whether the strategy rounds what it sends.
        losses: Training loss by optimizer step, mean over all ranks.
        validation_losses: Loss on held-out samples, before and after training.
    """

    family: str
    strategy: str
    is_quantized: bool
    losses: dict[int, float]
    validation_losses: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One training beside DDP's.

    Attributes:
        family: Architecture.
        strategy: Name of the strategy.
        last_loss: Training loss of the last optimizer step.
        validation_loss: Held-out loss after training; NaN without validation.
        largest: Largest relative difference to DDP's loss of the same step; NaN where a loss is no number.
        at_step: Optimizer step of that difference.
        validation_gap: Relative difference of the held-out losses after training, with its sign.
        verdict: `equal` and `DIFFERENT` for what quantizes nothing; `quantized` is never called equal.
    """

    family: str
    strategy: str
    last_loss: float
    validation_loss: float
    largest: float
    at_step: int
    validation_gap: float
    verdict: Verdict


def read_curve(file: Path, family: str, strategy: str, *, is_quantized: bool) -> Curve:
    """Read `metrics.jsonl` of a run.

    Raises:
        RecipeError: It holds no loss.
    """
    records: list[dict[str, Any]] = [json.loads(line) for line in file.read_text().splitlines()]
    losses = {int(record["step"]): float(record["loss"]) for record in records if "loss" in record}
    if not losses:
        raise RecipeError(f"{file} holds no training loss. Look into log.txt beside it.")
    validation = tuple(float(record["validation_loss"]) for record in records if "validation_loss" in record)
    return Curve(
        family=family, strategy=strategy, is_quantized=is_quantized, losses=losses, validation_losses=validation
    )


def compare(curves: Sequence[Curve]) -> list[Comparison]:
    """Compare every curve with DDP's of the same family.

    Raises:
        RecipeError: A family has no curve of DDP, or another one has other steps.
    """
    references = {curve.family: curve for curve in curves if curve.strategy == REFERENCE}
    return [_compare(curve, references.get(curve.family)) for curve in curves]


def _compare(curve: Curve, reference: Curve | None) -> Comparison:
    if reference is None or curve.losses.keys() != reference.losses.keys():
        found = "no curve of DDP" if reference is None else f"{len(reference.losses)} steps of DDP"
        raise RecipeError(
            f"{curve.family} {curve.strategy} has losses of {len(curve.losses)} steps, but there is {found}. Run all "
            "strategies with the same `--steps` into an empty `--out`."
        )
    differences = {step: abs(loss / reference.losses[step] - 1) for step, loss in curve.losses.items()}
    at_step, largest = max(differences.items(), key=lambda item: (math.isnan(item[1]), item[1]))
    mine, theirs = (c.validation_losses[-1] if c.validation_losses else math.nan for c in (curve, reference))
    is_equal = largest <= TOLERANCE and (not curve.validation_losses or abs(mine / theirs - 1) <= TOLERANCE)
    return Comparison(
        family=curve.family,
        strategy=curve.strategy,
        last_loss=curve.losses[max(curve.losses)],
        validation_loss=mine,
        largest=largest,
        at_step=at_step,
        validation_gap=mine / theirs - 1,
        verdict=_verdict(curve, is_equal=is_equal),
    )


def _verdict(curve: Curve, *, is_equal: bool) -> Verdict:
    if curve.strategy == REFERENCE:
        return "reference"
    if curve.is_quantized:
        return "quantized"
    if curve.strategy == CONTROL and is_equal:
        return "control"
    return "equal" if is_equal else "DIFFERENT"


def failures(comparisons: Sequence[Comparison]) -> list[str]:
    """Return a sentence for each training that quantizes nothing and yet differs from DDP."""
    different = [row for row in comparisons if row.verdict == "DIFFERENT"]
    uncertain = {row.family for row in different if row.strategy == CONTROL}
    return [
        f"{row.family} {row.strategy} differs from DDP by {row.largest:.1e} at step {row.at_step}; "
        f"{row.validation_gap:+.1e} on held-out text; at most {TOLERANCE:.0e} is rounding."
        + (" So does DDP in another order of sums: use fewer `--steps`." if row.family in uncertain else "")
        for row in different
    ]


def table(comparisons: Sequence[Comparison]) -> str:
    """Return the comparison as text, one training a line."""
    rows = [("model", "strategy", "loss", "held out", "largest difference", "at step", "held out", "verdict")]
    rows += [
        (
            *(row.family, row.strategy, f"{row.last_loss:.4f}", f"{row.validation_loss:.4f}"),
            *(("", "", "") if row.verdict == "reference" else _gaps(row)),
            row.verdict,
        )
        for row in comparisons
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    alignment = "<<>>>>><"
    return "\n".join(
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, alignment, widths, strict=True)).rstrip()
        for row in rows
    )


def _gaps(row: Comparison) -> tuple[str, str, str]:
    return f"{row.largest:.1e}", f"{row.at_step}", f"{row.validation_gap:+.1e}"


def write_files(curves: Sequence[Curve], facts: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write all losses as `losses.csv`, everything as `fidelity.json`, and the figure `curves.png`.

    Args:
        curves: All trainings.
        facts: Options that the trainings share.
        folder: An existing folder.

    Returns:
        The files.
    """
    with (folder / "losses.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("model", "strategy", "step", "loss"))
        for curve in curves:
            writer.writerows((curve.family, curve.strategy, *point) for point in curve.losses.items())
    record = {
        **facts,
        "tolerance": TOLERANCE,
        "comparisons": [asdict(row) for row in compare(curves)],
        "curves": [asdict(curve) for curve in curves],
    }
    (folder / "fidelity.json").write_text(json.dumps(record, indent=1) + "\n")
    draw(curves, folder / "curves.png")
    return [folder / name for name in ("losses.csv", "fidelity.json", "curves.png")]


def draw(curves: Sequence[Curve], file: Path) -> None:
    """Draw losses above and relative differences to DDP below, one column for each family."""
    from matplotlib.figure import Figure  # takes a second, which no other command of the recipes should pay

    families = list(dict.fromkeys(curve.family for curve in curves))
    figure = Figure(figsize=(6 * len(families), 7), layout="constrained")
    axes: Any = figure.subplots(2, len(families), squeeze=False, sharex=True)
    for column, family in enumerate(families):
        losses, differences = axes[0][column], axes[1][column]
        reference = next(curve for curve in curves if (curve.family, curve.strategy) == (family, REFERENCE))
        for curve in (curve for curve in curves if curve.family == family):
            steps = list(curve.losses)
            style: dict[str, Any] = {"linestyle": "--" if curve.is_quantized else "-", "linewidth": 1.2}
            (line,) = losses.plot(steps, list(curve.losses.values()), label=curve.strategy, **style)
            if curve is not reference:
                gaps = [max(abs(loss / reference.losses[step] - 1), 1e-9) for step, loss in curve.losses.items()]
                differences.plot(steps, gaps, color=line.get_color(), **style)
        losses.set(title=family, ylabel="training loss")
        losses.legend(fontsize="small")
        differences.axhline(TOLERANCE, color="black", linestyle=":", linewidth=1)
        differences.set(xlabel="optimizer step", ylabel="relative difference to DDP", yscale="log")
    figure.savefig(file, dpi=100)
