"""Training of every odd model under every setting: right, refused or wrong.

``python -m tests.engine.odd_product four six`` takes half an hour on two cores; tests take pairs of it.
"""

import sys
from collections import Counter
from functools import lru_cache
from itertools import product

from mics_strategy import ShardConfig
from tests.engine.odd_models import MIXTURES, MODELS, OTHERS, UNSHARDED_ONLY, Case, train
from tests.engine.unusual import Parameters, Trained, difference, reference
from tests.ranks import RankError, RankPool

SEVERAL_NODES = ("mics", "zero3", "zeropp-hpz", "paro-nig", "paro-iig", "zero2")
ON_SIX = ("mixtral", "experts in layers", "in two places", "gan", "lstm", "spectral norm", "tied", "uneven")


def on_four_ranks() -> dict[str, ShardConfig]:
    """Every preset once that rounds nothing, by its first name."""
    exact = [name for name in ShardConfig.PRESETS if ShardConfig.preset(name).weight_codec == "none"]
    first_names = {str(ShardConfig.preset(name)): name for name in reversed(exact)}
    return {name: ShardConfig.preset(name) for name in exact if name in first_names.values()}


def on_six_ranks(ranks_per_node: int) -> dict[str, ShardConfig]:
    """Partitions inside a node, and of the whole world."""
    return {
        f"{preset}, partitions of {size}, hierarchical={two_stages}": ShardConfig.preset(
            preset, partition_size=size, hierarchical=two_stages
        )
        for preset, size, two_stages in product(SEVERAL_NODES, (ranks_per_node, 6), (True, False))
    }


@lru_cache
def expected(name: str, world_size: int) -> Parameters:
    return reference(MODELS[name], world_size)


def verdict(name: str, by_rank: list[Trained]) -> str:
    """What the case ended with: right, refused or wrong, and why."""
    errors = [of_rank.error for of_rank in by_rank]
    if any(errors):
        return f"refused: {errors[0]}" if all(errors) else f"wrong: some ranks raise {errors}"
    worst = max(difference(of_rank.parameters, expected(name, len(by_rank))) for of_rank in by_rank)
    return "right" if worst < 1e-9 else f"wrong: by {worst:.1e}"


def verdicts(ranks: RankPool, cases: list[Case], world_size: int, ranks_per_node: int) -> list[str]:
    """Of many cases in one job; each by itself where that job fails."""
    try:
        results = ranks(world_size, train, cases, ranks_per_node=ranks_per_node, timeout_s=60 + 10 * len(cases))
    except RankError as error:
        if len(cases) == 1:
            return [f"wrong: {str(error)[-3000:]}"]
        half = len(cases) // 2
        parts = (cases[:half], cases[half:])
        return [each for part in parts for each in verdicts(ranks, part, world_size, ranks_per_node)]
    return [verdict(name, [of_rank[i] for of_rank in results]) for i, (name, _) in enumerate(cases)]


def main(parts: list[str]) -> None:
    ranks, counts = RankPool(), Counter[tuple[str, str, str]]()
    jobs = [(4, 2, on_four_ranks(), list(MODELS))] if "four" in parts else []
    jobs += [(6, size, on_six_ranks(size), list(ON_SIX)) for size in (2, 3)] if "six" in parts else []
    for world_size, ranks_per_node, settings, names in jobs:
        for setting, config in settings.items():
            found = verdicts(ranks, [(name, config) for name in names], world_size, ranks_per_node)
            where = f"{world_size // ranks_per_node} x {ranks_per_node}"
            for name, text in zip(names, found, strict=True):
                counts[where, group_of(name), text.partition(":")[0]] += 1
                if text != "right":
                    print(f"{where}, {setting}, {name}: {text}", flush=True)
            print(f"-- {where}, {setting}: {sum(text == 'right' for text in found)} of {len(found)}", flush=True)
    for key, count in sorted(counts.items()):
        print(*key, count, sep=" | ")
    ranks.close()


def group_of(name: str) -> str:
    groups = {"mixtures of experts": MIXTURES, "unsharded only": UNSHARDED_ONLY, "others": OTHERS}
    return next(group for group, of_group in groups.items() if name in of_group)


if __name__ == "__main__":
    main(sys.argv[1:])
