"""Does a long training keep its memory, its descriptors and its threads?"""

import dataclasses
import itertools
import statistics
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks.soak import EVERY, Sample, Soak, draw, growth, header, last_line, line, soak
from tests.ranks import RankContext, RankPool

KEPT_NUMEL = 16_384  # of the tensor that an injected leak keeps at each step


def samples(**values: list[int]) -> list[Sample]:
    """Samples a hundred steps apart, with these values and zeros."""
    names = [field.name for field in dataclasses.fields(Sample)]
    length = len(next(iter(values.values())))
    rows = ({name: values.get(name, [0] * length)[i] for name in names} | {"step": 100 * i} for i in range(length))
    return [Sample(**row) for row in rows]


def test_growth_is_that_of_the_second_half_and_no_outlier_counts() -> None:
    assert growth(samples(objects=[0, 500, 900, 1000, 1000, 1000, 1000, 1000]), "objects") == 0
    assert growth(samples(objects=[0, 0, 0, 0, 100, 200, 9000, 400, 500, 600]), "objects") == 1


def test_the_table_says_what_a_step_added(tmp_path: Path) -> None:
    counted = samples(threads=[1, 1, 5, 9], descriptors=[7, 7, 7, 7])
    assert header().split() == [field.name for field in dataclasses.fields(Sample)]
    assert line(counted[2]).split() == ["200", "0", "0", "0", "7", "5", "0"]
    assert last_line(counted).split()[4:] == ["0.000", "0.000", "0.000", "0.000", "0.040", "0.000"]
    draw(counted, tmp_path / "soak.png")
    assert (tmp_path / "soak.png").stat().st_size


def soaked(ctx: RankContext, leaks: bool) -> list[Sample]:
    """All events often; with a leak, every step keeps a tensor."""
    kept: list[torch.Tensor] = []
    step = Soak.step

    def leaking(training: Any, number: int) -> None:
        step(training, number)
        kept.append(torch.ones(KEPT_NUMEL))

    often = dict.fromkeys(EVERY, 3) | {"load": 15, "profile": 30}
    with mock.patch.dict(EVERY, often), mock.patch.object(Soak, "step", leaking) if leaks else nullcontext():
        return soak(90, 18, ctx.tmp_path)


def most_steps_add(samples: list[Sample], field: str) -> float:
    """The median of what neighbouring samples of the second half differ by, for a step.

    Where a process allocates something once, as a table that doubles (4 MB were seen on a busy machine), no step more
    than that one adds it.
    """
    pairs = itertools.pairwise(samples[len(samples) // 2 :])
    return statistics.median((getattr(b, field) - getattr(a, field)) / (b.step - a.step) for a, b in pairs)


@pytest.mark.weekly
def test_a_soak_adds_nothing_and_finds_a_leak(ranks: RankPool) -> None:
    ranks.stop()  # what other tests left in a process moves counts
    for leaky, clean in zip(ranks(2, soaked, True), ranks(2, soaked, False), strict=True):
        for field in ("descriptors", "threads", "store_keys"):
            assert growth(clean, field) <= 0, field
        for field in ("objects", "allocated_bytes"):
            assert most_steps_add(clean, field) < most_steps_add(leaky, field) / 4, (field, clean, leaky)
        assert growth(leaky, "allocated_bytes") > 4 * KEPT_NUMEL
