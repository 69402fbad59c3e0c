"""How fast is each engine when nodes are joined by slow links?

``python -m benchmarks.compare --rate-mbit 200 --nodes 2 --ranks-per-node 2 --accumulation 4`` runs every engine in the
same testbed in one run, prints a table and writes JSON and a plot. See docs/benchmarks.md. It ends with an error when
engines that must train alike do not, or when one fails. With ``--compute away`` layers sleep in place of computing, so
that cores are free for what is sent.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import deepspeed_setup, workload_options
from benchmarks.entries import COMPUTE, PEERS, Entry, default_ours, parse_ours, peer
from benchmarks.launch import RankFailedError
from benchmarks.measure import Setup, measure
from benchmarks.report import Cluster, Report, describe, make_report, plot, table, write_json
from benchmarks.testbed import TestbedError, make_testbed
from benchmarks.workload import Workload

_DEEPSPEED = "deepspeed-mics"
_LOSS_TOLERANCE = 1e-4
_LEAST_STEPS = 5
_LEGEND = """\
step s: median over all measured steps of the slowest rank; where outer steps are among them the mean, as of the other
columns. cpu s: CPU time of all ranks in a step, which the machine's cores share. sent MB: most that left one node in a
step, counted on its link, headers included; plan MB: what our plan says of axes between nodes. peak MB: the largest
rank's VmHWM; train MB: without interpreter and libraries. peer, floor: step s by that of the fastest peer, and by the
floor; compute: by that of compute alone."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, print and write; 0 when all engines ran or were refused, and agree."""
    try:
        return _compare(workload_options.parse(parser(), arguments))
    except (TestbedError, RankFailedError, ValueError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2


def _compare(options: argparse.Namespace) -> int:
    entries = _entries(options)
    _check_outer_steps(entries, options)
    if options.rounds * options.steps < _LEAST_STEPS:
        raise ValueError(
            f"{options.rounds} rounds of {options.steps} steps are too few for a median: raise `--steps` or "
            f"`--rounds` until there are {_LEAST_STEPS}."
        )
    if options.deepspeed_python:
        deepspeed_setup.build_extension(options.deepspeed_python)
    print(_sharing(options), flush=True)
    reports = []
    with make_testbed(nodes=options.nodes, rate_mbit=options.rate_mbit, loopback_mbit=options.loopback_mbit) as bed:
        for workload in workload_options.workloads(options, options.dtype):
            measured = measure(bed, entries, _setup(options, workload), say=lambda line: print(line, flush=True))
            cluster = Cluster(nodes=options.nodes, ranks_per_node=options.ranks_per_node, rate_mbit=options.rate_mbit)
            reports.append(make_report(measured, workload, cluster, loss_tolerance=options.loss_tolerance))
            print(f"\n{describe(reports[-1])}\n{table(reports[-1])}\n", flush=True)
    print(_LEGEND)
    if options.output is not None:
        _write(reports, options)
    return 0 if all(report.is_sound for report in reports) else 1


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__.splitlines()[0])
    add = made.add_argument
    add("--nodes", type=int, default=2)
    add("--ranks-per-node", type=int, default=2)
    add("--rate-mbit", type=float, default=200.0, help="of each node's link, in each direction")
    add("--loopback-mbit", type=float, default=None, help="inside each node; not limited by default")
    add("--peers", default=",".join(PEERS), help="any of %(default)s")
    add("--ours", default=None, help="presets, each with overrides: mics,zero3:prefetch=2,overlap=none")
    add("--deepspeed-python", default=None, help="an interpreter with deepspeed==0.19.2, to run its MiCS, too")
    workload_options.add_options(made, accumulation=[4])
    add("--dtype", choices=("float32", "bfloat16"), default="float32")
    add("--rounds", type=int, default=2, help="in each, every engine runs once")
    add("--steps", type=int, default=4, help="measured in each round")
    add("--warm-up", type=int, default=2, help="steps before them")
    add("--timeout-s", type=float, default=300.0, help="for one engine in one round")
    add("--loss-tolerance", type=float, default=_LOSS_TOLERANCE, help="of exact engines, relative")
    add("--output", type=Path, default=None, help="a folder for compare.json and, with matplotlib, plots")
    return made


def _entries(options: argparse.Namespace) -> list[Entry]:
    ours = default_ours(options.nodes, options.ranks_per_node) if options.ours is None else options.ours
    peers = [peer(name) for name in filter(None, options.peers.split(","))]
    optional = [peer(_DEEPSPEED)] if options.deepspeed_python else []
    return [peer(COMPUTE), *peers, *optional, *parse_ours(ours)]


def _check_outer_steps(entries: list[Entry], options: argparse.Namespace) -> None:
    for entry in entries:
        every = entry.overrides.get("outer_every", 0)
        if isinstance(every, int) and every and (options.steps % every or options.warm_up % every):
            raise ValueError(
                f"`--steps {options.steps} --warm-up {options.warm_up}`: `{entry.label}` takes an outer step after "
                f"every {every} steps, and a mean is of whole rounds. Use multiples of {every} for both."
            )


def _setup(options: argparse.Namespace, workload: Workload) -> Setup:
    return Setup(
        workload=workload,
        ranks_per_node=options.ranks_per_node,
        rounds=options.rounds,
        warm_up=options.warm_up,
        steps=options.steps,
        timeout_s=options.timeout_s,
        peer_python={_DEEPSPEED: options.deepspeed_python} if options.deepspeed_python else {},
    )


def _sharing(options: argparse.Namespace) -> str:
    num_ranks = options.nodes * options.ranks_per_node
    return (
        f"{num_ranks} ranks compute and pack on {os.cpu_count()} cores that they share, also with whatever else this "
        "machine does: compare times inside one run only."
    )


def _write(reports: list[Report], options: argparse.Namespace) -> None:
    options.output.mkdir(parents=True, exist_ok=True)
    facts: dict[str, Any] = {
        "options": {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()},
        "date": datetime.date.today().isoformat(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "kernel": platform.release()},
        "cores": os.cpu_count(),
        "load": os.getloadavg(),  # with our own ranks, at the end
    }
    write_json(reports, facts, options.output / "compare.json")
    if importlib.util.find_spec("matplotlib") is None:
        print("No plot: matplotlib is not installed (the extra `bench` has it).")
        return
    for index, report in enumerate(reports):
        plot(report, options.output / f"compare-{index}.png")


if __name__ == "__main__":
    sys.exit(main())
