"""The order of samples against a list: any ranks, micro-batches, stops and resumes."""

import random
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest

from recipes.batch import BatchPlan
from recipes.data.loaders import LoaderState, TrainLoader
from recipes.data.permutation import Permutation
from recipes.data.samples import NextTokenSamples
from recipes.data.stream import TokenStream


def store(num_samples: int, source: random.Random) -> NextTokenSamples:
    """Sample i begins with token 2 i; cut into parts at random places."""
    tokens = np.arange(2 * num_samples + 1, dtype=np.uint32)
    cuts = sorted({0, len(tokens), *(source.randrange(len(tokens)) for _ in range(source.randrange(4)))})
    arrays = [tokens[start:end] for start, end in pairwise(cuts)]
    return NextTokenSamples(tokens=TokenStream(arrays), sequence_length=2, name="n")


def reference(num_samples: int, seed: int, length: int) -> list[int]:
    """The samples of a run as one list: every epoch is the list of all samples in the epoch's order."""
    order: list[int] = []
    epoch = 0
    while len(order) < length:
        permutation = Permutation(size=num_samples, seed=seed, epoch=epoch)
        order += [int(permutation(np.array([position]))[0]) for position in range(num_samples)]
        epoch += 1
    return order[:length]


def factors(number: int) -> list[int]:
    return [factor for factor in range(1, number + 1) if number % factor == 0]


class Job:
    """All ranks of a run, one step at a time."""

    def __init__(self, samples: NextTokenSamples, plan: BatchPlan, num_steps: int, seed: int) -> None:
        self.plan = plan
        self.ranks = [TrainLoader(samples, plan, rank, num_steps, seed) for rank in range(plan.world_size)]
        self.iterators: list[Iterator] = []

    def resume(self, state: LoaderState) -> None:
        for rank in self.ranks:
            rank.load_state_dict(state)

    def step(self) -> list[int]:
        self.iterators = self.iterators or [iter(rank) for rank in self.ranks]
        batch = []
        for _ in range(self.plan.accumulation):
            for iterator in self.iterators:
                batch += (next(iterator)["input_ids"][:, 0] // 2).tolist()
        return batch


def some_plan(global_size: int, source: random.Random) -> BatchPlan:
    micro_size = source.choice(factors(global_size))
    world_size = source.choice(factors(global_size // micro_size))
    return BatchPlan(global_size=global_size, micro_size=micro_size, world_size=world_size, sequence_length=2)


@pytest.mark.parametrize("case", range(60))
def test_steps_are_slices_of_a_list_through_any_resumes(case: int):
    source = random.Random(case)
    num_samples, global_size = source.choice([1, 2, 5, 17, 40]), source.choice([1, 4, 6, 12])
    num_steps, seed = source.randrange(1, 12), source.randrange(3)
    order = reference(num_samples, seed, num_steps * global_size)
    samples = store(num_samples, source)
    job = Job(samples, some_plan(global_size, source), num_steps, seed)
    for step in range(num_steps):
        assert job.step() == order[step * global_size : (step + 1) * global_size]
        states = [rank.state_dict() for rank in job.ranks]
        assert all(state == states[0] for state in states)
        assert states[0]["consumed_samples"] == (step + 1) * global_size
        if source.random() < 0.5:
            job = Job(samples, some_plan(global_size, source), num_steps, seed)
            job.resume(states[-1])


def test_the_first_global_batches_of_two_and_four_ranks_are_identical():
    samples = store(1000, random.Random(0))
    plans = [BatchPlan(global_size=16, micro_size=m, world_size=w, sequence_length=2) for w, m in ((2, 4), (4, 2))]
    two, four = (Job(samples, plan, num_steps=2, seed=5) for plan in plans)
    batches = [(two.step(), four.step()) for _ in range(2)]
    assert all(of_two == of_four for of_two, of_four in batches)
    assert len({sample for of_two, _ in batches for sample in of_two}) == 32


def test_a_resumed_run_continues_with_the_very_next_sample_in_the_middle_of_an_epoch():
    samples = store(100, random.Random(0))
    first = Job(samples, BatchPlan(global_size=12, micro_size=3, world_size=2, sequence_length=2), 20, seed=1)
    read = [sample for _ in range(3) for sample in first.step()]
    second = Job(samples, BatchPlan(global_size=12, micro_size=2, world_size=3, sequence_length=2), 20, seed=1)
    second.resume(first.ranks[0].state_dict())
    read += [sample for _ in range(5) for sample in second.step()]
    assert read == reference(100, 1, 96)
    assert len(set(read)) == 96  # none twice, within an epoch


def test_a_longer_run_continues_a_shorter_one():
    samples = store(10, random.Random(0))
    plan = BatchPlan(global_size=4, micro_size=2, world_size=1, sequence_length=2)
    short = Job(samples, plan, 3, seed=1)
    read = [sample for _ in range(3) for sample in short.step()]
    longer = Job(samples, plan, 9, seed=1)
    longer.resume(short.ranks[0].state_dict())
    assert read + [sample for _ in range(6) for sample in longer.step()] == reference(10, 1, 36)
