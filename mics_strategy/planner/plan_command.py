"""The command `mics plan`: the fastest sharding of a model on a cluster."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from typing import Any

from mics_strategy.errors import MiCSError
from mics_strategy.planner.choice import Choice, plan, step_json
from mics_strategy.planner.flips import communicators_decide, flips
from mics_strategy.planner.plan_options import add_workload_options, cluster_of, codec_pairs, workload_of
from mics_strategy.planner.recompute import recompute_word
from mics_strategy.planner.report import Section, print_report
from mics_strategy.planner.solver import paused_collector
from mics_strategy.planner.space import Space
from mics_strategy.planner.upgrades import Upgrade, concessions, upgrades


def parser() -> ArgumentParser:
    """Make the parser of the command's options."""
    options = ArgumentParser(
        prog="mics plan",
        description="Chooses the fastest sharding that fits into the memory of a cluster, without a GPU.",
        allow_abbrev=False,
    )
    add_workload_options(options)
    options.add_argument(
        "--codecs",
        default="lossless",
        help="codecs to choose from: lossless (none), int8, int4, all; default: lossless",
    )
    options.add_argument("--what-if", action="store_true", help="plan faster links, more memory and more nodes as well")
    return options


def main(arguments: Sequence[str]) -> int:
    """Run the command; return its exit code, 0 on success."""
    options = parser().parse_args(arguments)
    try:
        cluster = cluster_of(options)
        space = Space(codecs=codec_pairs(options.codecs))
        workload = workload_of(options, cluster.world_size)
        with paused_collector():
            chosen = plan(workload, cluster, space)
            assumed = (*flips(chosen), *communicators_decide(chosen))
            conceded = concessions(chosen, space)
            upgraded = upgrades(workload, cluster, space) if options.what_if else ()
    except MiCSError as error:
        print(f"mics plan: {error}", file=sys.stderr)
        return 1
    if options.json:
        changes = {"give_up": conceded, "what_if": upgraded}
        parts = {name: [_upgrade_json(change, chosen) for change in found] for name, found in changes.items()}
        print(json.dumps(chosen.to_json() | {"flips": assumed} | parts, indent=2))
    else:
        sections = [*chosen.sections(), *([Section(lines=assumed)] if assumed else [])]
        if conceded:
            warning = "These change the arithmetic of the training: compare losses with and without first."
            sections.append(_changes("What to give up, for more than is uncertain", conceded, chosen, warning))
        if upgraded:
            sections.append(_changes("What to buy next, at the same batch", upgraded, chosen))
        print_report(sections, sys.stdout)
    return 0


def _changes(title: str, upgraded: Sequence[Upgrade], chosen: Choice, *notes: str) -> Section:
    rows: list[tuple[str, ...]] = [("change", "set", "speed", "P/G/OS", "micro-batch", "recompute", "step s", "GB")]
    lines = [*notes]
    for upgrade in upgraded:
        speedup = upgrade.speedup(chosen)
        if upgrade.choice is None or speedup is None:
            rows.append((upgrade.name, *[""] * 7))
            lines.append(f"{upgrade.name}: {upgrade.reason}")
            continue
        step = upgrade.choice.step
        rows.append(
            (
                upgrade.name,
                upgrade.setting,
                f"{speedup:.2f}x",
                step.job.scopes.short,
                str(step.job.micro_batch),
                recompute_word(step.job.recompute),
                f"{step.step_s:.4g}",
                f"{step.memory.total_bytes / 1e9:.1f}",
            )
        )
    num_left = 2
    if not any(upgrade.setting for upgrade in upgraded):
        rows, num_left = [(name, *others) for name, _, *others in rows], 1
    return Section(title=title, rows=tuple(rows), num_left=num_left, lines=tuple(lines))


def _upgrade_json(upgrade: Upgrade, chosen: Choice) -> dict[str, Any]:
    return {
        "change": upgrade.name,
        "setting": upgrade.setting,
        "speedup": upgrade.speedup(chosen),
        "chosen": None if upgrade.choice is None else step_json(upgrade.choice.step),
        "reason": upgrade.reason,
    }
