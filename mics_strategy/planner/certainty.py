"""How sure a predicted step is, from the errors of predictions of public runs.

Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Certainty:
    """Errors of the runs that wait for collectives about as much.

    Attributes:
        waiting_below: Share of the step that waits for collectives, below which a run is of this kind.
        half: Error that half of the runs do not exceed, as a share of the published speed.
        most: Error that 8 of 10 runs do not exceed.
        runs: Number of runs.
    """

    waiting_below: float
    half: float
    most: float
    runs: int

    @property
    def interval(self) -> float:
        """Share of a step by which another prediction may differ without being another answer."""
        return self.most if self.most < 1 else self.half

    def text(self, step_s: float) -> str:
        """What to expect of a step that is predicted to take `step_s` seconds, and why, as a sentence."""
        if self.waiting_below < 1:
            least_s, most_s = step_s * (1 - self.most), step_s * (1 + self.most)
            return (
                f"expect {least_s:.3g} to {most_s:.3g} s: 8 in 10 of {self.runs} public runs that wait less "
                f"than {self.waiting_below:.0%} of a step were predicted within {self.most:.0%}"
            )
        least_s, most_s = step_s * (1 - self.half), step_s * (1 + self.half)
        return (
            f"expect {least_s:.3g} to {most_s:.3g} s: half of {self.runs} public runs that wait as long were predicted "
            f"within {self.half:.0%}; 2 in 10 took over {1 + self.most:.0f} times as long, here over "
            f"{step_s * (1 + self.most):.3g} s"
        )


# Printed by `python -m benchmarks.planners --certainty`, from the held-out public runs and the throughputs of the four
# papers. A test compares them.
CERTAINTIES = (
    Certainty(waiting_below=0.2, half=0.05, most=0.10, runs=134),
    Certainty(waiting_below=0.4, half=0.06, most=0.16, runs=25),
    Certainty(waiting_below=math.inf, half=0.19, most=2.2, runs=17),
)


def certainty(waiting: float) -> Certainty:
    """The errors of runs like a step that waits for such a share of its time."""
    return next(kind for kind in CERTAINTIES if waiting < kind.waiting_below)
