"""What a training loop needs besides the recipe, in either framework."""

from dataclasses import dataclass
from pathlib import Path

from .batch import BatchPlan
from .data.prepare import PreparedData
from .metrics import MetricsLog
from .report import ClosingReport
from .signals import SaveRequests


@dataclass(frozen=True, kw_only=True)
class RunInputs:
    """Batches, data, log and checkpoint of one run.

    Attributes:
        plan: Batch of every step.
        data: Prepared data.
        metrics: Log.
        report: Report at the end.
        requests: Signals of the run.
        checkpoint: Checkpoint to continue, as of `checkpoint_to_resume`, or None.
    """

    plan: BatchPlan
    data: PreparedData
    metrics: MetricsLog
    report: ClosingReport
    requests: SaveRequests
    checkpoint: Path | None
