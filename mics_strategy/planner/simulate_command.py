"""The command `mics simulate`: one optimizer step as numbers, trace, picture."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mics_strategy.config import ShardConfig
from mics_strategy.errors import ConfigError, MiCSError
from mics_strategy.planner.choice import SimulatedStep, plan, simulate, step_json, step_lines
from mics_strategy.planner.cluster import Cluster
from mics_strategy.planner.plan_options import add_workload_options, cluster_of, count, workload_of
from mics_strategy.planner.report import Section, print_report
from mics_strategy.planner.workload import Workload
from mics_strategy.timeline import Timeline, chrome_trace

_SCOPES = ("params", "grads", "optimizer")
_WORDS = ("replicate", "none", "partition", "node", "world", "auto")


def parser() -> ArgumentParser:
    """Make the parser of the command's options."""
    options = ArgumentParser(
        prog="mics simulate",
        description="Simulates one optimizer step of a configuration, or of the planner's choice, without a GPU.",
        allow_abbrev=False,
    )
    add_workload_options(options)
    options.add_argument("--preset", default=None, help="mics, zero3, paro-iig, ...; default: the planner's choice")
    for name in _SCOPES:
        options.add_argument(f"--{name}", default=None, help=f"scope of {name}: ranks, replicate, partition or world")
    options.add_argument("--partition-size", default=None, help="ranks of a partition; default: a node")
    options.add_argument("--secondary", default=None, help="scope of the secondary copy of the parameters")
    options.add_argument("--weight-codec", default=None, help="codec of parameters: int8, int4")
    options.add_argument("--grad-codec", default=None, help="codec of gradients: int8, int4")
    options.add_argument("--prefetch", default=None, help="units gathered ahead; default: 1")
    options.add_argument(
        "--overlap", default=None, help="all, none, or some of gather,reduce,second_hop,update; default: all"
    )
    options.add_argument("--trace", type=Path, default=None, help="file for Perfetto or chrome://tracing (.json)")
    options.add_argument("--picture", type=Path, default=None, help="file for a picture of the step (.png)")
    return options


def main(arguments: Sequence[str]) -> int:
    """Run the command; return its exit code, 0 on success."""
    options = parser().parse_args(arguments)
    try:
        _check_files(options)
        cluster = cluster_of(options)
        config = config_of(options)
        step = _step(config, workload_of(options, cluster.world_size), cluster)
        timeline = step.timeline()
        _write(options, timeline, step)
    except MiCSError as error:
        print(f"mics simulate: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(_json(step, timeline), indent=2))
    else:
        print_report(_sections(step, timeline), sys.stdout)
    return 0


def config_of(options: Namespace) -> ShardConfig | None:
    """The configuration of the options; None where the planner is to choose.

    Raises:
        ConfigError: Options are wrong, or contradict each other.
    """
    stated: dict[str, Any] = {
        name: _scope(name, getattr(options, name)) for name in _SCOPES if getattr(options, name) is not None
    }
    others = {
        "partition_size": _scope("partition-size", options.partition_size),
        "secondary_params": _scope("secondary", options.secondary),
        "weight_codec": options.weight_codec,
        "grad_codec": options.grad_codec,
        "prefetch": None if options.prefetch is None else count("--prefetch", options.prefetch),
        "overlap": _overlap(options.overlap),
    }
    fields = {name: value for name, value in others.items() if value is not None}
    if options.preset is not None:
        if stated:
            raise ConfigError(
                f"`--preset {options.preset}` states all scopes, and `--{next(iter(stated))}` states one again. Give "
                "the preset, or `--params`, `--grads` and `--optimizer`."
            )
        if options.preset.lower() == "auto":
            raise ConfigError("`--preset auto` leaves the scopes to the planner. Leave out `--preset`.")
        return ShardConfig.preset(options.preset, **fields)
    if not stated:
        if fields:
            names = ", ".join(f"`{name}`" for name in fields)
            raise ConfigError(
                f"{names} were given without scopes, which the planner would choose. Add `--preset`, or `--params`, "
                "`--grads` and `--optimizer`."
            )
        return None
    if len(stated) < len(_SCOPES):
        missing = ", ".join(f"`--{name}`" for name in _SCOPES if name not in stated)
        raise ConfigError(f"{missing} missing: scopes are stated together. Add them, or use `--preset`.")
    return ShardConfig(**stated, **fields)


def _scope(name: str, text: str | None) -> str | int | None:
    if text is None or text in _WORDS:
        return text
    return count(f"--{name}", text)


def _overlap(text: str | None) -> Any:
    return text if text in (None, "all", "none") else frozenset(str(text).split(","))


def _step(config: ShardConfig | None, workload: Workload, cluster: Cluster) -> SimulatedStep:
    if config is None:
        return plan(workload, cluster).step
    if workload.micro_batch == "auto":
        raise ConfigError(
            "`--micro-batch auto` with stated scopes: a simulation needs a number. Add for example `--micro-batch 1`, "
            "or leave out the scopes."
        )
    step = simulate(workload, cluster, config, recompute=False if workload.recompute == "auto" else workload.recompute)
    if workload.recompute == "auto" and step.memory.total_bytes > cluster.device.memory_bytes:
        return simulate(workload, cluster, config, recompute=True)
    return step


def _check_files(options: Namespace) -> None:
    """Refuse files that cannot be written, before anything is computed."""
    for name, suffixes in (("trace", (".json",)), ("picture", (".png", ".svg", ".pdf"))):
        path = getattr(options, name)
        if path is None:
            continue
        if path.suffix not in suffixes:
            raise ConfigError(f"`--{name} {path}` is not a file of this kind. Use the suffix {' or '.join(suffixes)}.")
        if not path.parent.is_dir():
            raise ConfigError(f"`--{name} {path}`: the folder {path.parent} does not exist. Make it first.")


def _write(options: Namespace, timeline: Timeline, step: SimulatedStep) -> None:
    if options.trace is not None:
        options.trace.write_text(json.dumps(chrome_trace(None, timeline)))
    if options.picture is not None:
        from mics_strategy.planner.picture import draw

        draw(timeline, step_lines(step), options.picture)


def _sections(step: SimulatedStep, timeline: Timeline) -> list[Section]:
    memory, limit = step.memory.total_bytes, step.job.cluster.device.memory_bytes
    verdict = () if memory <= limit else (f"does NOT fit: {(memory - limit) / 1e9:.1f} GB too many",)
    rows = [("part of the step", "seconds", "share")]
    rows += [(name, f"{seconds:.4g}", f"{seconds / step.step_s:.1%}") for name, seconds in _shares(timeline).items()]
    return [
        Section(lines=(*step_lines(step), *verdict)),
        Section(title="Where the time of rank 0 goes", rows=tuple(rows), num_left=1),
    ]


def _shares(timeline: Timeline) -> dict[str, float]:
    """Seconds of the compute row by category, name and axis; they add up to the step."""
    seconds: dict[str, float] = {}
    for part in timeline.parts(0):
        key = part.key
        name = f"{key.category.value}: {key.name}{f' [{key.axis}]' if key.axis else ''}"
        seconds[name] = seconds.get(name, 0.0) + part.seconds
    return seconds


def _json(step: SimulatedStep, timeline: Timeline) -> dict[str, Any]:
    fits = step.memory.total_bytes <= step.job.cluster.device.memory_bytes
    return step_json(step) | {"fits": fits, "parts_s": _shares(timeline)}
