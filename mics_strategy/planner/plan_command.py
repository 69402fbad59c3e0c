"""The command `mics plan`: the fastest sharding of a model on a cluster."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from typing import Any

from mics_strategy.errors import MiCSError
from mics_strategy.planner.choice import Choice, plan, step_json
from mics_strategy.planner.flips import flips
from mics_strategy.planner.plan_options import add_workload_options, cluster_of, codec_pairs, workload_of
from mics_strategy.planner.report import Section, print_report
from mics_strategy.planner.space import Space
from mics_strategy.planner.upgrades import Upgrade, upgrades


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
        chosen = plan(workload, cluster, space)
        flipped = tuple(flips(chosen))
        upgraded = upgrades(workload, cluster, space) if options.what_if else ()
    except MiCSError as error:
        print(f"mics plan: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(
            json.dumps(
                chosen.to_json() | {"flips": flipped, "what_if": [_upgrade_json(p, chosen) for p in upgraded]}, indent=2
            )
        )
    else:
        notes = [Section(lines=flipped)] if flipped else []
        print_report([*chosen.sections(), *notes, *_what_if(upgraded, chosen)], sys.stdout)
    return 0


def _what_if(upgraded: Sequence[Upgrade], chosen: Choice) -> list[Section]:
    if not upgraded:
        return []
    rows = [("change", "speed", "P/G/OS", "micro-batch", "recompute", "step s")]
    notes = []
    for upgrade in upgraded:
        speedup = upgrade.speedup(chosen)
        if upgrade.choice is None or speedup is None:
            rows.append((upgrade.name, "", "", "", "", ""))
            notes.append(f"{upgrade.name}: {upgrade.reason}")
            continue
        job = upgrade.choice.step.job
        rows.append(
            (
                upgrade.name,
                f"{speedup:.2f}x",
                f"{job.scopes.params}/{job.scopes.grads}/{job.scopes.optimizer}",
                str(job.micro_batch),
                "yes" if job.recompute else "no",
                f"{upgrade.choice.step.step_s:.4g}",
            )
        )
    title = "What to buy next, at the same batch"
    return [Section(title=title, rows=tuple(rows), num_left=1, lines=tuple(notes))]


def _upgrade_json(upgrade: Upgrade, chosen: Choice) -> dict[str, Any]:
    return {
        "change": upgrade.name,
        "speedup": upgrade.speedup(chosen),
        "chosen": None if upgrade.choice is None else step_json(upgrade.choice.step),
        "reason": upgrade.reason,
    }
