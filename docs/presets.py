"""Writes docs/presets.md: what every preset shards, sends and keeps. Run: ``python -m docs.presets``.

The numbers come from the plan that the engine's own tests hold it to, for a model large enough that headers, padding
and small tensors do not show.
"""

from __future__ import annotations

import textwrap
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.papers.cost import ParameterKind, state_bytes
from mics_strategy import ShardConfig, Topology
from mics_strategy.engine.layout import make_layout
from mics_strategy.engine.plan import BucketPlan, Plan, StepOrder, UnitPlan, plan_step
from mics_strategy.planner.auto import AutoJob, choose
from mics_strategy.planner.catalog import describe_model
from mics_strategy.planner.model import ParameterShape
from mics_strategy.scopes import Scopes, resolve_scopes

PAGE = Path(__file__).with_name("presets.md")
NODES, PER_NODE, NUM_MICRO_STEPS = 4, 8, 4
NUM_UNITS = 32
UNIT_NUMEL = 1024 * NODES * PER_NODE * 32
MODEL_BYTES = 2 * NUM_UNITS * UNIT_NUMEL  # bf16

WHEN = {
    "ddp": "The model and its states fit on one GPU.",
    "zero1": "Parameters and gradients fit, Adam's states do not.",
    "zero2": "Parameters fit; little accumulation, or gradients are what does not fit.",
    "zero3": "Nothing else fits, or the links between nodes are as fast as those inside.",
    "zeropp": "As zeropp-hpz, where the links between nodes are the limit: both payloads are encoded, which rounds.",
    "zeropp-hpz": "As zero3, with memory for one copy of the parameters in each node.",
    "mics": "The states fit into one node: nothing but one all-reduce of shards leaves it, once per step.",
    "hsdp": "Another name for mics.",
    "paro-nni": "As zero1, with the states spread over one node, so that updates stay inside.",
    "paro-nii": "Parameters fit; gradients and states are spread over one node.",
    "paro-nig": "Parameters fit, and accumulation is long: gradients cross nodes once per step.",
    "paro-ini": "Few parameters are trained (LoRA): gradients stay whole, the frozen rest is spread over a node.",
    "paro-ing": "As paro-ini, with more trained parameters, whose states are spread over all ranks.",
    "paro-iig": "As mics, when the states do not fit into one node. The same bytes leave a node.",
    "paro-igg": "As paro-iig, when gradients do not fit either; they cross nodes in every micro-step.",
    "paro-gng": "A large frozen model with few trained parameters that fits on no node.",
    "paro-gig": "As paro-gng, with more trained parameters.",
}
SAME = {"paro-nnn": "ddp", "paro-nng": "zero1", "paro-ngg": "zero2", "paro-ggg": "zero3", "paro-iii": "mics"}


def scopes_of(preset: str) -> Scopes:
    """The scopes of a preset on the page's cluster."""
    topology = Topology(ranks_per_node=PER_NODE)
    return resolve_scopes(ShardConfig.preset(preset), topology, NODES * PER_NODE)


def plan_of(preset: str) -> Plan:
    """The plan of a bf16 model of equal units, with one unit gathered ahead."""
    scopes = scopes_of(preset)
    units = []
    for index in range(NUM_UNITS):
        bucket = BucketPlan(
            layout=make_layout([(f"{index}", torch.Size((UNIT_NUMEL // 1024, 1024)))], scopes.optimizer),
            param_dtype=torch.bfloat16,
            wire_dtype=torch.bfloat16,
            sum_dtype=torch.float32,
            trainable=True,
        )
        units.append(UnitPlan(name=str(index), slot=index % 2, buckets=(bucket,)))
    order = tuple(range(NUM_UNITS))
    shape = StepOrder(forward=order, backward=order[::-1], num_micro_steps=NUM_MICRO_STEPS)
    return plan_step(tuple(units), scopes, shape)


def sent_by_link(preset: str) -> dict[str, float]:
    """Bytes that one rank sends per step inside its node, and on axes that leave it, in sizes of the model."""
    sent: dict[str, float] = defaultdict(float)
    for planned in plan_of(preset).collectives:
        link = "inter" if "inter" in planned.axis else "intra"
        sent[link] += planned.sent_bytes / MODEL_BYTES
    return sent


def bytes_of_states(scopes: Scopes) -> float:
    """Bytes for each parameter on one rank: bf16 parameters, fp32 gradients, master copy and Adam's two moments."""
    kind = ParameterKind(numel=UNIT_NUMEL, master_bytes=4, param_bytes=2, is_trained=True)
    return state_bytes([kind], scopes) / UNIT_NUMEL


def example() -> str:
    """What is printed for a LLaMA of 7 B parameters with adapters, on 32 GPUs of 16 GB."""
    model = describe_model("llama-7b", tokens=4096)
    adapters = ParameterShape(name="lora", shape=(624_640 // 8, 8))  # rank 8, on the 7 matrices of a layer
    units = []
    for unit in model.units:
        frozen = tuple(replace(p, is_trained=False, dtype=torch.bfloat16) for p in unit.parameters)
        units.append(replace(unit, parameters=(*frozen, adapters) if unit.is_layer else frozen))
    job = AutoJob(
        model=replace(model, units=tuple(units)),
        topology=Topology(ranks_per_node=PER_NODE),
        world_size=NODES * PER_NODE,
        memory_bytes=16 * 10**9,
    )
    config = ShardConfig.preset("auto", param_dtype="bfloat16", cluster="p4d.24xlarge", micro_steps=NUM_MICRO_STEPS)
    return choose(config, job).reasons


def wrapped(item: str) -> str:
    """A list item in lines of at most 100 columns."""
    return textwrap.fill(item, width=100, subsequent_indent="  ")


def page() -> str:
    """The text of the page."""
    rows, reasons = [], []
    for preset in (p for p in ShardConfig.PRESETS if p not in SAME):
        scopes, sent = scopes_of(preset), sent_by_link(preset)
        degrees = f"{scopes.params} / {scopes.grads} / {scopes.optimizer}"
        if scopes.secondary < scopes.params:
            degrees += f", copy {scopes.secondary}"
        also = ", ".join(f"`{other}`" for other, name in SAME.items() if name == preset)
        name = f"`{preset}`" + (f" ({also})" if also else "")
        memory = bytes_of_states(scopes)
        traffic = f"{sent['intra']:.2f} | {sent['inter']:.2f}"
        rows.append(f"| {name} | {degrees} | {traffic} | {memory:.2f} |")
        reasons.append(f"- `{preset}`: {WHEN[preset]}")
    setting = textwrap.fill(
        f"Per rank and optimizer step, for {NODES} nodes of {PER_NODE} ranks, {NUM_MICRO_STEPS} micro-steps, "
        f"{NUM_UNITS} equal layers in bf16 with bf16 on the wire:",
        width=100,
    )
    return (
        f"""# Which preset?

Written by `python -m docs.presets`; a test keeps it as the code is.

{setting}

- *P / G / OS*: ranks over which parameters, gradients and optimizer states are sharded.
- *Intra* and *inter*: bytes that one rank sends on axes inside a node, and on axes that also leave
  it, in sizes of the model (2 bytes for each parameter). A collective over both kinds of links has
  two stages.
- *Memory*: bytes of model states for each parameter: a master copy and Adam's moments in fp32,
  gradients summed in fp32, and parameters in bf16 where fewer ranks share them than optimizer
  states (or none); elsewhere masters are cast before every all-gather. Slots for two layers come
  on top.

| preset | P / G / OS | intra | inter | memory |
|---|---|---|---|---|
"""
        + "\n".join(rows)
        + "\n\n## When to use which\n\n"
        + "\n".join(wrapped(reason) for reason in reasons)
        + f"""

## Let it choose

`ShardConfig.preset("auto")`, `Trainer(strategy="mics_auto")`. The candidates are those of the
[planner](planner.md): every scope that the job allows, with and without a secondary copy in the
node. Codecs and all other fields are those of the configuration. What the model computes is unknown
when it is sharded, so its collectives are not hidden by anything: of the scopes that fit, those
with the shortest collectives and update are chosen, and rank 0 prints why. What is known can be
stated:

- `cluster`: a name of the planner's catalog, or a file that `mics calibrate` wrote. By default, the
  links of p4d.24xlarge count.
- `micro_steps`: micro-steps of an optimizer step. Lightning's Trainer and Accelerate set it; else 2
  count.
- `activation_bytes`: memory to leave to activations. By default, a quarter.

`mics plan` knows the arithmetic and the activations of a model as well, and simulates the step; its
answer can be handed to `shard`. For a LLaMA of 6.7 B frozen parameters and adapters of 20 M, on
{NODES} nodes of {PER_NODE} GPUs with 16 GB:

```text
{example()}
```
"""
    )


if __name__ == "__main__":
    PAGE.write_text(page())
