"""Draws the pictures of the guides, in docs/pictures/. Run: ``python -m docs.pictures``.

Groups, shards, collectives and times are those of the package: `Scopes` of a preset, and the planner's simulation. The
files are SVG with colours for light and dark pages, and narrow enough for a phone.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from pathlib import Path

from mics_strategy import ShardConfig, Topology
from mics_strategy.planner import Cluster, Workload
from mics_strategy.planner.catalog import describe_model
from mics_strategy.planner.choice import SimulatedStep, simulate
from mics_strategy.planner.step_tasks import COMPUTE, FIRST_HOP, GATHER, SECOND_HOP
from mics_strategy.scopes import Scopes, resolve_scopes
from mics_strategy.timeline import Category, Interval

FOLDER = Path(__file__).with_name("pictures")
WIDTH = 480  # a phone shows it at three quarters
NODES, PER_NODE = 2, 4
LINK_COLOURS = {"intra_node": "near", "inter_node": "far", "inter_switch": "far"}
STYLE = """
text { font: 14px sans-serif; fill: #222 } .small { font-size: 12px } .bold { font-weight: bold }
.middle { text-anchor: middle } .end { text-anchor: end } .on { fill: #fff }
.ground { fill: #fff } .box { fill: none; stroke: #999 } .cell { fill: #e4e4e4 }
.group0 { fill: #2b6cb0 } .group1 { fill: #b7651b } .group2 { fill: #2f7d4f } .group3 { fill: #8a4baf }
.near { fill: #dba100 } .far { fill: #c8502b } .forward { fill: #4c78a8 } .backward { fill: #1f4e79 }
.step { fill: #2f7d4f } .wait { fill: #e6b8b8 } .line { fill: none; stroke: #c8502b; stroke-width: 2 }
@media (prefers-color-scheme: dark) {
  text { fill: #ddd } .on { fill: #fff } .ground { fill: #181818 } .box { stroke: #777 } .cell { fill: #3a3a3a }
  .backward { fill: #8fb8de } .wait { fill: #5d3a3a }
}
"""


def text(x: float, y: float, words: str, classes: str = "") -> str:
    """A line of text; `y` is its baseline."""
    return f'<text x="{x:g}" y="{y:g}" class="{classes}">{words}</text>'


def rectangle(x: float, y: float, width: float, height: float, classes: str, title: str = "") -> str:
    """A filled rectangle, with words that a pointer shows."""
    shape = f'<rect x="{x:.5g}" y="{y:g}" width="{width:.4g}" height="{height:g}" rx="1" class="{classes}"'
    return f"{shape}><title>{title}</title></rect>" if title else f"{shape}/>"


def svg(title: str, height: float, shapes: Iterable[str]) -> str:
    """The text of a picture."""
    lines = "\n".join(shapes)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:g}" '
        f'viewBox="0 0 {WIDTH} {height:g}" role="img">\n<title>{title}</title>\n<style>{STYLE}</style>\n'
        f'<rect width="{WIDTH}" height="{height:g}" rx="6" class="ground"/>\n{lines}\n</svg>\n'
    )


def scopes_of(preset: str, partition_size: int = PER_NODE) -> Scopes:
    """The scopes of a preset on two nodes of four ranks."""
    config = ShardConfig.preset(preset, partition_size=partition_size)
    return resolve_scopes(config, Topology(ranks_per_node=PER_NODE), NODES * PER_NODE)


def groups() -> str:
    """Which ranks gather parameters together, and which add their gradients, with partitions of a node and half."""
    shapes: list[str] = []
    top = 0.0
    for partition_size in (PER_NODE, PER_NODE // 2):
        scopes = scopes_of("mics", partition_size)
        shapes.append(text(12, top + 24, f"mics, partition_size={partition_size}", "bold"))
        shapes += rank_boxes(scopes, top + 36)
        shapes += replicas(scopes, top + 126)
        top += 128 + 16 * scopes.params
    shapes.append(text(12, top + 6, "Boxes of one colour are a partition group: they all-gather", "small"))
    shapes.append(text(12, top + 22, "parameters and reduce-scatter gradients in every micro-step.", "small"))
    shapes.append(text(12, top + 38, "A line joins ranks with the same shard: they all-reduce it once", "small"))
    shapes.append(text(12, top + 54, "in an optimizer step.", "small"))
    return svg("Partition groups of MiCS on 2 nodes of 4 ranks", top + 68, shapes)


def centre(rank: int) -> float:
    """The middle of a rank's column, from the left."""
    return 44 + 52 * rank + 28 * (rank // PER_NODE)


def rank_boxes(scopes: Scopes, top: float) -> Iterator[str]:
    """The nodes, with a box for each rank in the colour of its partition group."""
    partition = scopes.span_of("param_all_gather")
    for node in range(NODES):
        first, last = centre(node * PER_NODE), centre((node + 1) * PER_NODE - 1)
        yield rectangle(first - 32, top, last - first + 64, 78, "box")
        yield text((first + last) / 2, top + 16, f"node {node}", "small middle")
    for index, members in enumerate(partition.groups(scopes.world_size)):
        for rank in members:
            yield rectangle(centre(rank) - 22, top + 24, 44, 46, f"group{index}")
            yield text(centre(rank), top + 42, f"rank {rank}", "small middle on")
            shard = f"{partition.index(rank) + 1}/{partition.size}"
            yield text(centre(rank), top + 61, shard, "middle on bold")


def replicas(scopes: Scopes, top: float) -> Iterator[str]:
    """A line for every group of ranks that hold the same shard."""
    for index, members in enumerate(scopes.span_of("second_hop_all_reduce").groups(scopes.world_size)):
        y = top + 16 * index
        points = [f"M{centre(rank):g} {y - 5:g}V{y:g}" for rank in members]
        yield f'<path class="line" d="M{centre(members[0]):g} {y:g}H{centre(members[-1]):g}{"".join(points)}"/>'


PAYLOADS = {
    "param_all_gather": "all-gather of parameters, before a layer",
    "grad_reduce_scatter": "reduce-scatter of gradients, after a layer",
    "second_hop_reduce_scatter": "reduce-scatter of gradients, once in a step",
    "second_hop_all_reduce": "all-reduce of gradients, once in a step",
    "param_sync": "all-gather of stepped parameters, once in a step",
}


def chain() -> str:
    """The part of each model state that each rank holds, and the collectives that follow, of four presets."""
    shapes: list[str] = []
    top = 0.0
    for preset in ("ddp", "mics", "paro-iig", "zero3"):
        scopes = scopes_of(preset)
        shapes.append(text(12, top + 24, preset, "bold"))
        states = {"parameters": scopes.params, "gradients": scopes.grads, "optimizer": scopes.optimizer}
        for row, (name, degree) in enumerate(states.items()):
            y = top + 34 + 24 * row
            shapes.append(text(12, y + 14, name, "small"))
            span = scopes.span(1, degree)
            for rank in range(scopes.world_size):
                left = 96 + 43 * rank + 12 * (rank // PER_NODE)
                shapes.append(rectangle(left, y, 38, 18, "cell"))
                part = 38 / degree
                colour = f"group{rank // degree}" if degree > 1 else "group0"
                shapes.append(rectangle(left + part * span.index(rank), y, part, 18, colour))
        top += 110
        for role, words in PAYLOADS.items():
            routes = scopes.routes(role)
            if routes is None:
                continue
            stages = routes.hierarchical.stages
            shapes += [
                rectangle(12 + 14 * position, top, 10, 10, LINK_COLOURS[stage.axis.partition(".")[0]])
                for position, stage in enumerate(stages)
            ]
            shapes.append(text(46, top + 10, words, "small"))
            top += 18
        top += 8
    shapes += [rectangle(12, top + 8, 10, 10, "near"), text(28, top + 18, "inside a node", "small")]
    shapes += [rectangle(132, top + 8, 10, 10, "far"), text(148, top + 18, "between nodes", "small")]
    return svg("What 8 ranks on 2 nodes hold of each model state, and what they send", top + 30, shapes)


ROWS = {COMPUTE: "device", GATHER: "all-gathers", FIRST_HOP: "first hop", SECOND_HOP: "second hop"}


def simulated(preset: str) -> SimulatedStep:
    """A step of a LLaMA with six layers, four micro-steps of one sequence, on two nodes of p3dn.24xlarge."""
    model = describe_model("llama-7b", tokens=1024)
    layers = [unit for unit in model.units if unit.is_layer]
    units = tuple(unit for unit in model.units if unit not in layers[6:])
    cluster = Cluster.preset("p3dn.24xlarge", nodes=2)
    workload = Workload(model=dataclasses.replace(model, units=units), global_batch=4 * cluster.world_size)
    return simulate(workload, cluster, ShardConfig.preset(preset), micro_batch=1, recompute=False)


def schedule() -> str:
    """The same step under two presets: what the device does, and each stream of collectives."""
    steps = {preset: simulated(preset) for preset in ("mics", "zero3")}
    scale = 380 / max(step.step_s for step in steps.values())
    shapes: list[str] = []
    top = 0.0
    for preset, step in steps.items():
        shapes.append(text(12, top + 24, f"{preset}: {step.step_s:.2f} s", "bold"))
        rows = {row.resource: row for row in step.timeline().rows_of(0)}
        for index, (resource, name) in enumerate(ROWS.items()):
            y = top + 34 + 26 * index
            shapes.append(text(12, y + 15, name, "small"))
            shapes.append(rectangle(88, y, step.step_s * scale, 20, "cell"))
            for interval in rows[resource].intervals if resource in rows else ():
                x, width = 88 + interval.start_s * scale, interval.seconds * scale
                shapes.append(rectangle(x, y, max(width - 0.3, 0.2), 20, colour_of(interval), f"{interval.key}"))
        top += 150
    legend = {"forward": "forward", "backward": "backward", "step": "optimizer", "wait": "waits"}
    legend |= {"near": "inside a node", "far": "between nodes"}
    for index, (name, words) in enumerate(legend.items()):
        x, y = (12, 118, 230, 344)[index % 4], top + 8 + 20 * (index // 4)
        shapes += [rectangle(x, y, 10, 10, name), text(x + 16, y + 10, words, "small")]
    return svg("One optimizer step under two presets, simulated", top + 42 + 8 * math.ceil(len(legend) / 4), shapes)


def colour_of(interval: Interval) -> str:
    """The class of an interval: what the device does, or the slowest link of a collective."""
    key = interval.key
    if key.category is Category.COLLECTIVE:
        return "far" if "inter" in key.axis else "near"
    return "wait" if key.category is Category.WAIT else key.name


PICTURES = {"groups.svg": groups, "chain.svg": chain, "schedule.svg": schedule}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (FOLDER / name).write_text(draw())
