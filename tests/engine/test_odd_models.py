"""Models for which the engine was not designed train as plain.

Pairs of the product of `python -m tests.engine.odd_product`; docs/design/odd-models.md has its counts.
"""

import re

import pytest
import torch

from mics_strategy import ShardConfig
from tests.engine import odd_models, odd_product
from tests.engine.odd_models import MIXTURES, OTHERS, UNSHARDED_ONLY, Case
from tests.engine.unusual import batch, built
from tests.ranks import RankPool

PRESETS = odd_product.on_four_ranks()
UNSHARDED = [name for name, config in PRESETS.items() if config.params == "replicate"]


def pair_names_and_settings(names: list[str], settings: dict[str, ShardConfig]) -> dict[str, Case]:
    """Every name and every setting at least once."""
    count = max(len(names), len(settings))
    keys = list(settings)
    pairs = [(names[i % len(names)], keys[(i + i // len(keys)) % len(keys)]) for i in range(count)]
    return {f"{name}: {key}": (name, settings[key]) for name, key in pairs}


def assert_right(ranks: RankPool, cases: dict[str, Case], world_size: int, ranks_per_node: int) -> None:
    found = odd_product.verdicts(ranks, list(cases.values()), world_size, ranks_per_node)
    others = {case: text for case, text in zip(cases, found, strict=True) if text != "right"}
    assert not others


def test_some_ranks_only_use_some_experts() -> None:
    """What the cases below are about."""
    used = []
    for rank in range(4):
        model = built(MIXTURES["mixtral"])
        MIXTURES["mixtral"].body(model, batch(0, rank), 0)
        weights = [each.grad for name, each in model.named_parameters() if "experts" in name and each.dim() == 3]
        used.append(torch.stack([weight.abs().amax((1, 2)) > 0 for weight in weights]))
    of_all, of_any = torch.stack(used).all(0), torch.stack(used).any(0)
    assert (of_any & ~of_all).any(1).all()  # in every layer


@pytest.mark.weekly
def test_mixtures_of_experts_train_as_plain_under_every_preset(ranks: RankPool) -> None:
    unsharded = {name: PRESETS[name] for name in UNSHARDED[::3]}
    assert_right(
        ranks,
        pair_names_and_settings(list(MIXTURES), PRESETS) | pair_names_and_settings(list(UNSHARDED_ONLY), unsharded),
        4,
        2,
    )


def test_odd_models_train_as_plain(ranks: RankPool) -> None:
    assert_right(ranks, pair_names_and_settings(list(OTHERS), PRESETS), 4, 2)


@pytest.mark.wide(every=3)
@pytest.mark.parametrize("ranks_per_node", [2, 3], ids=["3 nodes", "2 nodes"])
def test_six_ranks_train_as_plain(ranks: RankPool, ranks_per_node: int) -> None:
    """Every preset, with partitions of a node or of all ranks.

    In two stages or in one.
    """
    settings = list(odd_product.on_six_ranks(ranks_per_node).items())
    assert_right(
        ranks,
        pair_names_and_settings(list(odd_product.ON_SIX), dict(settings[0::4][:3] + settings[3::4][3:])),
        6,
        ranks_per_node,
    )


REFUSALS = {
    "lone experts": "LifecycleError: Ranks diverged.*blocks.0.experts.*make the layer around them a unit",
    "lone experts, nested": "LifecycleError: Ranks diverged.*blocks.0.experts.*make the layer around them a unit",
}


@pytest.mark.parametrize("name", UNSHARDED_ONLY)
def test_unsupported_uses_of_sharded_parameters_raise_on_every_rank(ranks: RankPool, name: str) -> None:
    for (result,) in ranks(4, odd_models.train, [(name, PRESETS["mics"])], ranks_per_node=2):
        assert re.search(REFUSALS[name], result.error)
