"""Do the pages of the documentation say what the code does?"""

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mics_strategy import ShardConfig, Topology, shard
from mics_strategy.scopes import Scopes
from tests.ranks import RankContext, RankPool

DOCS = Path(__file__).parents[1] / "docs"
PRESETS: dict[str, Any] = runpy.run_path(str(DOCS / "presets.py"))
STATES = ("optimizer shards", "parameter shards", "secondary parameter shards", "unsharded parameters", "gradients")
STATES += ("reduced gradients",)


def test_the_page_of_presets_is_as_its_program_writes_it() -> None:
    assert (DOCS / "presets.md").read_text() == PRESETS["page"](), "run: python docs/presets.py"


def test_every_preset_has_a_reason() -> None:
    assert {*PRESETS["WHEN"], *PRESETS["SAME"]} == set(ShardConfig.PRESETS)


@pytest.mark.parametrize(("one", "other"), PRESETS["SAME"].items())
def test_presets_with_two_names_are_the_same(one: str, other: str) -> None:
    assert ShardConfig.preset(one) == ShardConfig.preset(other)


def measured_bytes(ctx: RankContext) -> dict[str, tuple[float, Scopes]]:
    """Of model states for each parameter, and the scopes, by preset."""
    found = {}
    for preset in ShardConfig.PRESETS:
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
        config = ShardConfig.preset(preset, param_dtype="bfloat16", topology=Topology(ranks_per_node=2))
        sharded = shard(model, config, units=[nn.Linear])
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 64)).sum().backward()
        optimizer.step()
        total = sum(sharded.memory.bytes_by_purpose.get(purpose, 0) for purpose in STATES)
        moments = (state[name].to_local() for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq"))
        total += sum(moment.numel() * moment.element_size() for moment in moments)
        found[preset] = (total / (4 * 64 * 64), sharded.scopes)
    return found


def test_memory_is_what_the_page_calculates(ranks: RankPool) -> None:
    """On 2 nodes of 2 ranks, with the page's own formula."""
    for preset, (measured, scopes) in ranks(4, measured_bytes, ranks_per_node=2)[0].items():
        assert measured == pytest.approx(PRESETS["bytes_of_states"](scopes)), preset
