"""Calibration: measurements of a real cluster for the planner.

Every rank of the job takes part. Collectives run on the communicators that the engine would make for the same scopes,
so that gloo's peer memory and NCCL are measured as training uses them. Ranks start together, and the
time of the slowest one counts.

1. Rates of matrix products, attention, memory and codecs, and the time of a transformer layer, all ranks computing at
   once.
2. Each collective by size, inside nodes, between nodes, and in one stage over both.
3. A reduce-scatter on each link while the device computes: by how much each slows the other.

The command is `mics calibrate`; see docs/planner-calibration.md.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from mics_strategy.comm.codecs.format import Codec
from mics_strategy.comm.communicator import AnyCommunicator
from mics_strategy.comm.consensus import gather_objects
from mics_strategy.comm.resources import CommResources
from mics_strategy.comm.route import ALL_GATHER, REDUCE_SCATTER
from mics_strategy.comm.traffic import SENT_BYTES
from mics_strategy.comm.work import Work
from mics_strategy.comm.workspace import Workspace
from mics_strategy.config import ShardConfig
from mics_strategy.errors import ConfigError
from mics_strategy.planner.cluster import Device
from mics_strategy.planner.device_rates import (
    RUNS,
    codec_rates,
    device_name,
    matmul_rate,
    matrix_product,
    memory_bytes,
    memory_rate,
    repeat,
    synchronize,
)
from mics_strategy.planner.layer_time import attention_rate, layer_seconds, sustained_share
from mics_strategy.planner.measured import FORMAT, monotone, slowdowns
from mics_strategy.scopes import COLLECTIVES, Scopes, resolve_scopes
from mics_strategy.topology import Topology
from mics_strategy.tuning.autotune import collective_starter, collectives_in_a_row, run_collective, time_slowest_rank
from mics_strategy.version import package_version

_GROWTH = 4  # of the sizes from one to the next
_SMALLEST_BYTES = 4096
_LEAST_SIZES = 3  # however long they take: a line needs two, and the smallest shows the latency
_COMPUTED_SHARE = 0.5  # of the collectives' time that the computation beside them takes alone
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationOptions:
    """What is measured, and for how long.

    Attributes:
        name: Name of the cluster in the file.
        max_bytes: Bytes of the largest full tensor.
        stage_s: Seconds for the runs of one size of one collective, at most; larger sizes are left out, but not the
            first three.
        overlap_s: Seconds of the collectives beside which the device computes.
        dtype: Dtype of the matrix products whose rate is the device's: "bfloat16" or "float32"; ``"auto"`` is 16 bits
            on a GPU and 32 on a CPU.
        peak_flop_per_s: FLOP per second of the datasheet; 0 where it is not known, and the measured rate counts.
        device_name: Name of the device in the file; ``"auto"`` asks torch.
    """

    name: str = "calibrated"
    max_bytes: int = 256 * 2**20
    stage_s: float = 1.0
    overlap_s: float = 0.1
    dtype: str = "auto"
    peak_flop_per_s: float = 0.0
    device_name: str = "auto"

    def __post_init__(self) -> None:
        if self.max_bytes < 4 * _SMALLEST_BYTES:
            raise ConfigError(f"`max_bytes={self.max_bytes}` allows too few sizes. Use {4 * _SMALLEST_BYTES} or more.")
        for name in ("stage_s", "overlap_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"`{name}={getattr(self, name)}` allows no measurement. Use a time above 0.")
        if self.dtype not in ("auto", *_DTYPES):
            raise ConfigError(f"`dtype={self.dtype!r}` is not measured. Use 'auto', {' or '.join(map(repr, _DTYPES))}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One collective over one span, to be measured.

    Attributes:
        role: Role for which the engine makes the communicator.
        scopes: Scopes in which the role has this span.
    """

    role: str
    scopes: Scopes

    @property
    def collective(self) -> str:
        """Name of the collective."""
        return COLLECTIVES[self.role]

    @property
    def ranks_of_node(self) -> int:
        """Ranks of each node that take part."""
        return math.prod(axis.size for axis in self.scopes.span_of(self.role).axes if axis.is_inside_node)

    @property
    def link(self) -> str:
        """Slowest link that it crosses."""
        return self.scopes.span_of(self.role).axes[-1].link


def probes(topology: Topology, world_size: int) -> list[Probe]:
    """Collectives that a calibration measures, each once.

    They go over ranks of a node, over nodes, and over both in one stage.
    """
    per_node, num_nodes = topology.ranks_per_node, world_size // topology.ranks_per_node
    found: dict[tuple[str, int, int], Probe] = {}

    def add(role: str, params: int, optimizer: int, *, hierarchical: bool = True) -> None:
        config = ShardConfig(
            params=params, grads=params, optimizer=optimizer, hierarchical=hierarchical, topology=topology
        )
        probe = Probe(role=role, scopes=resolve_scopes(config, topology, world_size))
        routes = probe.scopes.routes(role)
        if routes is not None and len(routes.hierarchical.stages) == 1:
            found.setdefault((probe.collective, probe.scopes.span_of(role).size, probe.ranks_of_node), probe)

    for size in _divisors(per_node):
        add("param_all_gather", size, size)
        add("grad_reduce_scatter", size, size)
    for size in _divisors(num_nodes):
        add("param_sync", per_node, per_node * size)
        add("second_hop_reduce_scatter", per_node, per_node * size)
        add("second_hop_all_reduce", world_size // size, world_size // size)
    add("param_all_gather", world_size, world_size, hierarchical=False)
    add("grad_reduce_scatter", world_size, world_size, hierarchical=False)
    add("second_hop_all_reduce", 1, 1, hierarchical=False)
    return list(found.values())


def _divisors(count: int) -> list[int]:
    return [size for size in range(2, count + 1) if count % size == 0]


def calibrate(
    hosts: list[str], topology: Topology, device: torch.device, options: CalibrationOptions
) -> dict[str, Any]:
    """Measure this job's cluster. Collective; equal results on all ranks.

    Args:
        hosts: Name of each rank's node.
        topology: Ranks of a node.
        device: Device of this rank.
        options: See `CalibrationOptions`.

    Returns:
        The fields of a file for `Cluster.load`.

    Cost:
        About `stage_s` for each collective and size: a minute on two nodes, some minutes on many.
    """
    resources = CommResources(len(hosts), device)
    try:
        return _Calibration(hosts, topology, resources, options).fields()
    finally:
        resources.traffic_log.drain()
        resources.stop()


class _Calibration:
    """One calibration in progress."""

    def __init__(
        self, hosts: list[str], topology: Topology, resources: CommResources, options: CalibrationOptions
    ) -> None:
        self._hosts = hosts[:: topology.ranks_per_node]
        self._topology = topology
        self._resources = resources
        self._device = resources.device
        self._options = options
        whole = resolve_scopes(ShardConfig.preset("zero3"), topology, len(hosts))
        self._control = resources.control_group("control", whole.span(1, len(hosts)))

    def fields(self) -> dict[str, Any]:
        """Measure everything, in one order on all ranks."""
        compute, codecs = self._compute(), self._codecs()
        stages, overlaps = [], {}
        for probe in probes(self._topology, self._resources.world_size):
            workspace = Workspace()
            comm = self._resources.communicator(probe.role, probe.scopes, workspace)
            if comm is None:
                continue
            table = self._table(probe.collective, comm, workspace)
            stages.append(
                {
                    "collective": probe.collective,
                    "link": probe.link,
                    "size": comm.size,
                    "ranks_of_node": probe.ranks_of_node,
                    "seconds_by_bytes": table,
                }
            )
            if probe.collective == REDUCE_SCATTER and probe.ranks_of_node in (1, comm.size):  # the last is the widest
                overlaps[probe.link] = self._overlap(probe, comm, workspace, table)
        slowest = max((overlap["compute"] for overlap in overlaps.values()), default=1.0)
        return {
            "name": self._options.name,
            "nodes": len(self._hosts),
            "ranks_per_node": self._topology.ranks_per_node,
            "backend": "gloo" if self._resources.is_point_to_point else "nccl",
            **compute,
            **_links(stages),
            "overlap_slowdown": slowest,
            "measured_stages": stages,
            "measured_overlaps": [{"link": link, **overlap} for link, overlap in overlaps.items()],
            "measured_codecs": codecs,
        }

    def _compute(self) -> dict[str, Any]:
        """Rates of the device, the slowest node, and the origin of the figures. Rates are medians over all ranks."""
        rates = {name: matmul_rate(dtype, self._device, self._start_together) for name, dtype in _DTYPES.items()}
        gathered = gather_objects((rates, memory_rate(self._device, self._start_together)))
        flop_per_s = {name: statistics.median(other[name] for other, _ in gathered) for name in rates}
        dtype = self._options.dtype
        if dtype == "auto":
            dtype = "bfloat16" if self._device.type == "cuda" else "float32"
        per_node, of_ranks = self._topology.ranks_per_node, [other[dtype] for other, _ in gathered]
        of_nodes = [min(of_ranks[first : first + per_node]) for first in range(0, len(of_ranks), per_node)]
        peak = self._options.peak_flop_per_s or flop_per_s[dtype]
        if flop_per_s[dtype] > peak:
            raise ConfigError(
                f"The datasheet's peak of {peak / 1e12:.4g} TFLOP/s was given, and ranks reach "
                f"{flop_per_s[dtype] / 1e12:.4g} in {dtype}. Give the peak of this device in this dtype, or none."
            )
        name = device_name(self._device) if self._options.device_name == "auto" else self._options.device_name
        attention_flop_per_s = attention_rate(_DTYPES[dtype], self._device, self._start_together)
        device = Device(
            name=name,
            memory_bytes=memory_bytes(self._device, per_node),
            memory_bytes_per_s=statistics.median(other for _, other in gathered),
            peak_flop_per_s=peak,
            matmul_efficiency=flop_per_s[dtype] / peak,
            attention_share=min(1.0, statistics.median(gather_objects(attention_flop_per_s)) / flop_per_s[dtype]),
        )
        return {
            "device": {
                "name": device.name,
                "memory": device.memory_bytes,
                "memory_bandwidth": device.memory_bytes_per_s,
                "peak": device.peak_flop_per_s,
                "matmul_efficiency": device.matmul_efficiency,
                "attention_share": device.attention_share,
                "sustained_efficiency": self._sustained_share(device, _DTYPES[dtype]),
                "sustained_source": "a transformer layer by mics calibrate",
            },
            "slowest_node_factor": max(1.0, statistics.median(of_nodes) / min(of_nodes)),
            "calibration": {
                "format": FORMAT,
                "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
                "hosts": self._hosts,
                "world_size": self._resources.world_size,
                "torch_version": torch.__version__,
                "package_version": package_version(),
                "dtype": dtype,
                "flop_per_s": flop_per_s,
            },
        }

    def _sustained_share(self, device: Device, dtype: torch.dtype) -> float:
        """Share of the best speed that a layer sustains on the median rank."""
        seconds = gather_objects(layer_seconds(dtype, self._device, self._start_together))
        return sustained_share(device, dtype, self._device.type, statistics.median(seconds))

    def _codecs(self) -> list[dict[str, Any]]:
        """Speeds of the codecs on the median rank."""
        rows = []
        for codec in (dataclasses.replace(Codec.of(name), rotation=r) for name in Codec.NAMES for r in (False, True)):
            gathered = gather_objects(codec_rates(codec, self._device, self._start_together))
            encoded_per_s, decoded_per_s = map(statistics.median, zip(*gathered, strict=True))
            rows.append(
                {
                    "bits": codec.bits,
                    "rotation": codec.rotation,
                    "encoded_per_s": encoded_per_s,
                    "decoded_per_s": decoded_per_s,
                }
            )
        return rows

    def _table(self, collective: str, comm: AnyCommunicator, workspace: Workspace) -> list[tuple[int, float]]:
        """Bytes of the full tensor and seconds, until the next size would take too long."""
        table: list[tuple[int, float]] = []
        size_bytes, num_in_a_row = _SMALLEST_BYTES, collectives_in_a_row(self._device)
        while size_bytes <= self._options.max_bytes:
            start, full_bytes = self._starter(collective, comm, workspace, size_bytes)
            if table and full_bytes <= table[-1][0]:
                size_bytes *= _GROWTH
                continue
            run = partial(run_collective, start, num_in_a_row)
            times = [self._time(run) for _ in range(RUNS + 1)][1:]
            table.append((full_bytes, statistics.median(times) / num_in_a_row))
            if len(table) >= _LEAST_SIZES and (RUNS + 1) * _GROWTH * min(times) > self._options.stage_s:
                break
            size_bytes *= _GROWTH
        return monotone(table)

    def _starter(
        self, collective: str, comm: AnyCommunicator, workspace: Workspace, size_bytes: int
    ) -> tuple[Callable[[], Work], int]:
        numel = max(1, size_bytes // 4 // comm.size)
        start = collective_starter(collective, comm, numel, self._device)
        workspace.bind(torch.empty(workspace.needed_bytes, dtype=torch.uint8, device=self._device))
        return start, 4 * numel * comm.size

    def _overlap(
        self, probe: Probe, comm: AnyCommunicator, workspace: Workspace, table: list[tuple[int, float]]
    ) -> dict[str, float]:
        """Slow-downs of a collective and of matrix products by each other.

        The products take alone about half of the collective's time, so that it goes on alone when they have ended:
        they are slower by ``busy / alone``, and the collective did ``collective - rest`` of its work in ``busy``. All
        three are measured in turn, so that what else the machine does falls on all.
        """
        full_bytes, collective_s = min(table, key=lambda row: abs(math.log(2 * row[1] / self._options.overlap_s)))
        start, _ = self._starter(probe.collective, comm, workspace, full_bytes)
        product = matrix_product(_DTYPES["float32"], self._device, small=True)
        count = max(1, round(self._options.overlap_s / collective_s))
        one_s = min(self._time(partial(repeat, product, RUNS)) for _ in range(RUNS)) / RUNS
        products = partial(repeat, product, max(1, round(_COMPUTED_SHARE * count * collective_s / one_s)))
        side = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        computed, alone, busy, rest = [], [], [], []
        for _ in range(2 * RUNS):
            computed.append(self._time(products))
            alone.append(self._time(partial(_run_beside, start, count, side)))
            self._start_together()
            begin_s = time.perf_counter()
            works = _start_beside(start, count, side)
            products()
            if side is not None:
                torch.cuda.current_stream(self._device).synchronize()
            busy_s = time.perf_counter() - begin_s
            for work in works:
                work.wait()
            synchronize(self._device)
            rest_s = time.perf_counter() - begin_s - busy_s
            busy.append(self._maximum(busy_s))
            rest.append(self._maximum(rest_s))
        return slowdowns(*map(statistics.median, (computed, alone, busy, rest)))

    def _time(self, run: Callable[[], object]) -> float:
        """Time of a run on the slowest rank, seconds."""
        if self._control is not None:
            return time_slowest_rank(run, self._control, self._device)
        synchronize(self._device)
        begin_s = time.perf_counter()
        run()
        synchronize(self._device)
        return time.perf_counter() - begin_s

    def _maximum(self, seconds: float) -> float:
        if self._control is None:
            return seconds
        value = torch.tensor([seconds], dtype=torch.float64, device=self._device)
        return float(self._control.all_reduce_scalar(value, is_max=True).item())

    def _start_together(self) -> None:
        synchronize(self._device)
        self._maximum(0.0)


def _start_beside(start: Callable[[], Work], count: int, side: torch.cuda.Stream | None) -> list[Work]:
    """Start collectives that run beside what follows.

    They run in a thread on the CPU, and on a side stream on a GPU.
    """
    if side is None:
        return [start() for _ in range(count)]
    side.wait_stream(torch.cuda.current_stream(side.device))
    with torch.cuda.stream(side):
        for _ in range(count):
            start().wait()  # the side stream waits, not the host
    return []


def _run_beside(start: Callable[[], Work], count: int, side: torch.cuda.Stream | None) -> None:
    """Start collectives, and wait for them."""
    for work in _start_beside(start, count, side):
        work.wait()


def _links(stages: list[dict[str, Any]]) -> dict[str, Any]:
    """Alpha-beta figures of the links, from their widest all-gathers.

    They count for sizes of groups that were not measured.

    A job of one node, or of one rank a node, lacks one of the links: it has the other's figures, and no collective.
    """
    links: dict[str, dict[str, Any]] = {}
    for stage in stages:
        is_one_link = stage["ranks_of_node"] in (1, stage["size"])
        if stage["collective"] == ALL_GATHER and is_one_link:
            links[stage["link"]] = _link(stage)  # sizes ascend, so the widest counts
    if not links:
        unmeasured = {"bandwidth": 1e9, "latency": 1e-6, "source": "stated: one rank was calibrated"}
        return {"intra_node": unmeasured, "inter_node": unmeasured}
    only = next(iter(links.values()))
    return {name: links.get(name, {**only, "source": "not measured"}) for name in ("intra_node", "inter_node")}


def _link(stage: dict[str, Any]) -> dict[str, Any]:
    table, size = stage["seconds_by_bytes"], stage["size"]
    (small_bytes, small_s), (large_bytes, large_s) = table[0], table[-1]
    sent = SENT_BYTES[stage["collective"]](large_bytes, size) - SENT_BYTES[stage["collective"]](small_bytes, size)
    return {
        "bandwidth": max(1.0, sent / max(large_s - small_s, 1e-9)),
        "latency": small_s / (size - 1),
        "source": "mics calibrate",
    }
