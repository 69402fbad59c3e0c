"""Facts that FSDP2's own tests hold are true here, or refused in one sentence on every rank."""

import dataclasses
import re
from pathlib import Path

import pytest

from tests.fsdp2_parity.page import page
from tests.fsdp2_parity.runner import Scenario, assert_parity, fully_sharded, sharded
from tests.fsdp2_parity.suite import AREAS
from tests.ranks import RankError, RankPool, assert_refused, refusal

SCENARIOS = {(area, name): each for area, cases in AREAS.items() for name, each in cases.scenarios.items()}
TRAINED, OTHERWISE = (
    [
        pytest.param(
            scenario, placement, id=f"{area}: {name}: {placement}", marks=[pytest.mark.slow] * scenario.is_slow
        )
        for number, ((area, name), scenario) in enumerate(SCENARIOS.items())
        for turn, placement in enumerate(scenario.placements)
        if (turn == number % 2) == is_its_turn
    ]
    for is_its_turn in (True, False)
)
ON_TWO_NODES = [
    pytest.param(dataclasses.replace(scenario, ranks=4), ("part", "hybrid")[number % 2], id=f"{area}: {name}")
    for number, ((area, name), scenario) in enumerate(SCENARIOS.items())
    if scenario.ranks == 2
]
BY_FSDP2 = [pytest.param(scenario, id=f"{area}: {name}") for (area, name), scenario in SCENARIOS.items()]
FACTS = [
    pytest.param(*fact, id=f"{area}: {name}") for area, cases in AREAS.items() for name, fact in cases.facts.items()
]
REFUSED = [
    pytest.param(*use, id=f"{area}: {name}") for area, cases in AREAS.items() for name, use in cases.refused.items()
]


@pytest.mark.one_job
@pytest.mark.parametrize(("scenario", "placement"), TRAINED)
def test_a_scenario_trains_as_a_plain_process(ranks: RankPool, scenario: Scenario, placement: str) -> None:
    found = ranks(scenario.ranks, sharded, scenario, placement, ranks_per_node=min(scenario.ranks, 2))
    assert_parity(found, scenario)


@pytest.mark.slow
@pytest.mark.wide(every=5)
@pytest.mark.one_job
@pytest.mark.parametrize(("scenario", "placement"), [*OTHERWISE, *ON_TWO_NODES])
def test_it_does_in_its_other_placements_and_on_two_nodes(ranks: RankPool, scenario: Scenario, placement: str) -> None:
    found = ranks(scenario.ranks, sharded, scenario, placement, ranks_per_node=min(scenario.ranks, 2))
    assert_parity(found, scenario)


@pytest.mark.slow
@pytest.mark.wide(every=7)
@pytest.mark.one_job
@pytest.mark.parametrize("scenario", BY_FSDP2)
def test_fsdp2_trains_it_as_a_plain_process(ranks: RankPool, scenario: Scenario) -> None:
    """So that a scenario means what FSDP2 means by it."""
    if scenario.fsdp2_raises:
        with pytest.raises(RankError, match=scenario.fsdp2_raises):
            ranks(scenario.ranks, fully_sharded, scenario, scenario.placements[0])
    else:
        assert_parity(ranks(scenario.ranks, fully_sharded, scenario, scenario.placements[0]), scenario)


@pytest.mark.one_job
@pytest.mark.parametrize(("num_ranks", "job"), FACTS)
def test_a_fact_holds(ranks: RankPool, num_ranks: int, job: object) -> None:
    ranks(num_ranks, job, ranks_per_node=min(num_ranks, 2))


@pytest.mark.one_job
@pytest.mark.parametrize(("job", "error", "sentence"), REFUSED)
def test_a_use_is_refused_on_every_rank(ranks: RankPool, job: object, error: type, sentence: str) -> None:
    assert_refused(ranks(2, refusal, job, timeout_s=30.0), error, re.escape(sentence))


def test_the_page_counts_and_quotes_the_suite() -> None:
    found = (Path(__file__).parents[2] / "docs" / "fsdp2-behaviours.md").read_text()
    assert found == page(), "run: python -m tests.fsdp2_parity.page > docs/fsdp2-behaviours.md"
