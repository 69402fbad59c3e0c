"""Do the pages of the documentation say what the code does?"""

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.papers.cost import ParameterKind, state_bytes
from mics_strategy import ShardConfig, Topology, shard
from mics_strategy.scopes import Scopes
from mics_strategy.topology import Axis, Span
from mics_strategy.tuning.autotune import TuningResult, report
from mics_strategy.tuning.threshold import SizeTiming
from tests.ranks import RankContext, RankPool

pytestmark = pytest.mark.wide

DOCS = Path(__file__).parents[1] / "docs"
PRESETS: dict[str, Any] = runpy.run_path(str(DOCS / "presets.py"))
PICTURES: dict[str, Any] = runpy.run_path(str(DOCS / "pictures.py"))
STATES = ("master shards", "parameter shards", "secondary shards", "unsharded parameters", "gradients")
STATES += ("reduced gradients",)


def test_the_page_of_presets_is_as_its_program_writes_it() -> None:
    assert (DOCS / "presets.md").read_text() == PRESETS["page"](), "run: python -m docs.presets"


def test_the_pictures_are_as_their_program_draws_them() -> None:
    drawn = {name: draw() for name, draw in PICTURES["PICTURES"].items()}
    present = {path.name: path.read_text() for path in (DOCS / "pictures").iterdir()}
    assert present == drawn, "run: python -m docs.pictures"


def test_every_preset_has_a_reason() -> None:
    assert {*PRESETS["WHEN"], *PRESETS["SAME"]} == set(ShardConfig.PRESETS)


@pytest.mark.parametrize(("one", "other"), PRESETS["SAME"].items())
def test_presets_with_two_names_are_the_same(one: str, other: str) -> None:
    assert ShardConfig.preset(one) == ShardConfig.preset(other)


def measured_bytes(ctx: RankContext, num_trained: int, frozen_dtype: torch.dtype) -> dict[str, tuple[int, Scopes]]:
    """Of model states on this rank, and the scopes, by preset. The last of four layers are trained."""
    found = {}
    for preset in ShardConfig.PRESETS:
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
        model[: 4 - num_trained].requires_grad_(False).to(frozen_dtype)
        config = ShardConfig.preset(preset, param_dtype="bfloat16", topology=Topology(ranks_per_node=2))
        sharded = shard(model, config, units=[nn.Linear])
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
        model(torch.ones(1, 64, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        total = sum(sharded.memory.bytes_by_purpose.get(purpose, 0) for purpose in STATES)
        moments = (state[name].to_local() for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq"))
        found[preset] = (total + sum(moment.numel() * moment.element_size() for moment in moments), sharded.scopes)
    return found


def test_memory_is_what_the_page_calculates(ranks: RankPool) -> None:
    """On 2 nodes of 2 ranks, with the page's own formula."""
    for preset, (measured, scopes) in ranks(4, measured_bytes, 4, torch.float32, ranks_per_node=2)[0].items():
        assert measured == 4 * 64 * 64 * PRESETS["bytes_of_states"](scopes), preset


@pytest.mark.wide(every=6)
@pytest.mark.parametrize("num_trained", [3, 1])
@pytest.mark.parametrize("frozen_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_frozen_parameters_have_neither_gradients_nor_optimizer_states(
    ranks: RankPool, num_trained: int, frozen_dtype: torch.dtype
) -> None:
    trained = ParameterKind(numel=num_trained * 64 * 64, master_bytes=4, param_bytes=2, is_trained=True)
    frozen = ParameterKind(
        numel=(4 - num_trained) * 64 * 64,
        master_bytes=frozen_dtype.itemsize,
        param_bytes=2,
        is_trained=False,
    )
    for preset, (measured, scopes) in ranks(4, measured_bytes, num_trained, frozen_dtype, ranks_per_node=2)[2].items():
        assert measured == state_bytes([trained, frozen], scopes), preset


def test_the_report_of_the_autotuner_is_in_its_present_format() -> None:
    """The page's report is what the autotuner prints of the page's own numbers."""
    page = (DOCS / "design" / "hierarchical.md").read_text()
    (text,) = re.findall(r"```text\n(.*?)\n```", page, flags=re.DOTALL)
    axes = (Axis(name="intra_node", size=2, stride=1), Axis(name="inter_node", size=2, stride=2))
    numbers = [line[22:].replace(",", "").split() for line in text.splitlines() if line.startswith("    ")]
    results = [
        TuningResult(
            collective=collective,
            span=Span(axes=axes),
            from_bytes=0,
            timings=tuple(
                SizeTiming(int(size), float(flat) / 1e3, float(hierarchical) / 1e3, winner="")
                for size, flat, hierarchical in zip(*rows, strict=True)
            ),
        )
        for collective, rows in (("all_gather", numbers[:3]), ("reduce_scatter", numbers[3:]))
    ]
    assert report(results) == text
