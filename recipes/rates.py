"""Rates of a run: samples, tokens and arithmetic per second, and the used share of the device's peak.

Names and formulas are listed in docs/runs.md. Rates that do not apply are absent instead of 0: tokens of images,
Megatron's formula outside of transformers, recomputed arithmetic where nothing is recomputed, a share of a peak that is
not known.
"""

from dataclasses import dataclass

from .batch import BatchPlan
from .models.cost import SampleCost


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """Conversion of optimizer steps and seconds to rates.

    Attributes:
        plan: Batch of an optimizer step.
        cost: Arithmetic of one sample.
        peak_tflop_per_s: Peak of one device at the precision of the run; 0.0 when unknown.
    """

    plan: BatchPlan
    cost: SampleCost
    peak_tflop_per_s: float = 0.0

    @property
    def main_rate(self) -> str:
        """Name of the rate that the log and the report show first."""
        return "samples_per_s" if self.plan.unit == "images" else "tokens_per_s"

    def progress(self, step: int) -> dict[str, float]:
        """Return samples and tokens of the optimizer steps up to and including `step`."""
        counts: dict[str, float] = {"samples": step * self.plan.global_size}
        if self.plan.unit == "tok":
            counts["tokens"] = step * self.plan.tokens_per_step
        return counts

    def rates(self, steps: int, seconds: float) -> dict[str, float]:
        """Return the mean rates of optimizer steps.

        Args:
            steps: Number of optimizer steps, at least 1.
            seconds: Time that they took.
        """
        cost, peak = self.cost, self.peak_tflop_per_s
        samples_per_s = steps * self.plan.global_size / seconds
        tflop_per_s = samples_per_s / self.plan.world_size / 1e12  # times FLOP of a sample: of one rank
        rates = {"step_s": seconds / steps, "samples_per_s": samples_per_s}
        if self.plan.unit == "tok":
            rates["tokens_per_s"] = steps * self.plan.tokens_per_step / seconds
            rates["tokens_per_s_per_rank"] = rates["tokens_per_s"] / self.plan.world_size
        rates["model_tflop_per_s_per_rank"] = cost.model_flop * tflop_per_s
        if cost.recomputed_flop:
            rates["paper_tflop_per_s_per_rank"] = cost.recomputed_flop * tflop_per_s
        if peak:
            rates["mfu"] = cost.model_flop * tflop_per_s / peak
            if cost.megatron_flop:
                rates["mfu_megatron"] = cost.megatron_flop * tflop_per_s / peak
        return rates
