"""How long does each unit compute, with all ranks computing at once?

Run as ``python -m benchmarks.unit_times WORKLOAD FILE`` by `truth`, under the environment of a launcher. Every rank
trains the plain model for itself, nothing is sent, and rank 0 writes the times of the slowest rank, as
`planner.measured.MeasuredCompute` has them.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.workload import Batch, Workload
from mics_strategy.engine.units import find_units
from mics_strategy.planner.measured import MeasuredCompute, MeasuredUnit

_WARM_UP, _RUNS = 3, 12


class _Clock:
    """Times of one forward and backward: when each unit's forward begins and ends, and when its backward begins."""

    def __init__(self, units: dict[str, nn.Module]) -> None:
        self.forward_s: dict[str, float] = {}
        self.backward_begins_s: dict[str, float] = {}
        for name, module in units.items():
            module.register_forward_pre_hook(self._begin(name))
            module.register_forward_hook(self._end(name))

    def _begin(self, name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            self.forward_s[name] = -time.perf_counter()

        return hook

    def _end(self, name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
            self.forward_s[name] += time.perf_counter()
            output.register_hook(lambda _: self.backward_begins_s.__setitem__(name, time.perf_counter()))

        return hook


def run_once(model: nn.Module, clock: _Clock, batch: Batch, scale: float) -> dict[str, tuple[float, float]]:
    """Seconds of the forward and the backward of each unit; the root, "", has what is left."""
    begin_s = time.perf_counter()
    loss = model(batch.inputs, batch.targets)
    middle_s = time.perf_counter()
    (loss * scale).backward()
    end_s = time.perf_counter()
    forward_s = dict(clock.forward_s)
    begins = sorted(clock.backward_begins_s.items(), key=lambda item: item[1])  # the last unit's is the first
    ends = [start for _, start in begins[1:]] + [end_s]
    backward_s = {name: end - start for (name, start), end in zip(begins, ends, strict=True)}
    rest = ("", (middle_s - begin_s - sum(forward_s.values()), begins[0][1] - middle_s))
    return dict([rest, *((name, (forward_s[name], backward_s[name])) for name in forward_s)])


def measure(workload: Workload) -> MeasuredCompute:
    """Medians of this rank over several micro-steps; all ranks begin each at once."""
    model = workload.model()
    names = [unit.name for unit in find_units(model, "auto")]
    clock = _Clock({name: model.get_submodule(name) for name in names if name})
    optimizer = torch.optim.AdamW(model.parameters(), lr=workload.learning_rate)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    updates_s = []
    for step in range(_WARM_UP + _RUNS):
        for index, batch in enumerate(workload.batches(step, dist.get_rank())):
            dist.barrier()
            found = run_once(model, clock, batch, 1 / workload.accumulation)
            if step >= _WARM_UP and index:  # the first backward of a step allocates gradients
                for name, pair in found.items():
                    times[name].append(pair)
        dist.barrier()
        begin_s = time.perf_counter()
        optimizer.step()
        updates_s.append(time.perf_counter() - begin_s)
        optimizer.zero_grad()
    units = tuple(
        MeasuredUnit(
            name=name,
            forward_s=statistics.median(pair[0] for pair in pairs),
            backward_s=statistics.median(pair[1] for pair in pairs),
        )
        for name, pairs in times.items()
    )
    update_s = statistics.median(updates_s[_WARM_UP:])
    return MeasuredCompute(
        micro_batch=workload.micro_batch, units=units, optimizer_s_per_numel=update_s / workload.numel
    )


def read(path: Path) -> MeasuredCompute:
    """What `main` wrote."""
    fields = json.loads(path.read_text())
    return MeasuredCompute(**{**fields, "units": tuple(MeasuredUnit(**unit) for unit in fields["units"])})


def main(workload: str, path: str) -> None:
    """Measure on every rank, and write the slowest rank's times."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    measured = measure(Workload(**json.loads(workload)))
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, measured)
    if dist.get_rank() == 0:
        slowest = max(gathered, key=lambda rank: sum(unit.forward_s + unit.backward_s for unit in rank.units))
        Path(path).write_text(json.dumps(dataclasses.asdict(slowest)))
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads sometimes end a process with SIGABRT at the interpreter's end (pytorch#190489)


if __name__ == "__main__":
    main(*sys.argv[1:])
