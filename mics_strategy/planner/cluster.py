"""Cluster for the planner: devices, and links with measured or stated speeds.

`Cluster.preset` knows products and the papers' test-beds by name (`clusters.toml`). `Cluster.load` reads a file with
the same fields, as TOML, JSON or YAML:

```yaml
name: my-cluster
nodes: 16
ranks_per_node: 8
device: {name: a100, memory: 39.4 GiB, memory_bandwidth: 1555 GB/s, peak: 312 TFLOP/s}
intra_node: {bandwidth: 300 GB/s, latency: 3.4 us, source: datasheet}
inter_node: {node_bandwidth: 400 Gb/s, latency: 14 us, source: datasheet}
```

docs/planner.md has every field.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mics_strategy.comm.codecs.format import Codec
from mics_strategy.comm.scratch import COMMUNICATOR_BYTES
from mics_strategy.errors import ConfigError, nearest
from mics_strategy.planner.catalog import FILE_SUFFIXES, look_up, read_file, read_table
from mics_strategy.planner.measured import (
    CalibrationOrigin,
    MeasuredCodec,
    MeasuredOverlap,
    MeasuredStage,
    parse_codecs,
    parse_origin,
    parse_overlaps,
    parse_stages,
)
from mics_strategy.planner.quantities import LARGEST, Quantity, parse_quantity

_DEVICE_FIELDS = ("name", "memory", "memory_bandwidth", "peak")
_OPTIONAL_DEVICE_FIELDS = ("matmul_efficiency", "sustained_efficiency", "sustained_source", "attention_share")
_LINK_FIELDS = ("bandwidth", "node_bandwidth", "efficiency", "latency", "source")
_CLUSTER_FIELDS = (
    *("name", "nodes", "device", "ranks_per_node", "intra_node", "inter_node"),
    *("nodes_per_switch", "inter_switch", "slowest_node_factor", "overlap_slowdown", "backend", "communicator_memory"),
    *("measured_stages", "measured_overlaps", "measured_codecs", "calibration"),
)
FILE_FIELDS = ("like", *_CLUSTER_FIELDS, *_DEVICE_FIELDS, *_OPTIONAL_DEVICE_FIELDS, *_LINK_FIELDS)
# Bytes of memory traffic of Adam for each element, in fp32: master and two moments are read and written, the gradient
# is read; in addition, the parameter is written in the dtype in which it is used.
_ADAM_BYTES = 28
# Share of its memory's speed at which a training's kernels that are no matrix products run. Fitted together with the
# width in `simulator`, on the half of the public runs that docs/planner-leaderboard.md names.
MEMORY_SHARE = 0.71
# What a file of one's own that was not calibrated is given where it states none: the median of the catalog's devices
# (a test computes them), and what MiCS (arXiv:2205.00119), section 3.2, measured of links.
TYPICAL_DEVICE = {"matmul_efficiency": 0.74, "sustained_efficiency": 0.93, "attention_share": 0.75}
_TYPICAL_LINKS = {"intra_node": 0.853, "inter_node": 0.88, "inter_switch": 0.88}
_BACKENDS = ("nccl", "gloo")


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One GPU, or another processor that holds a rank.

    Attributes:
        name: Name of the product.
        memory_bytes: Bytes of its memory.
        memory_bytes_per_s: Bytes per second between its memory and its processor.
        peak_flop_per_s: Dense 16-bit FLOP per second by the datasheet.
        matmul_efficiency: Share of that peak that large matrix products reach, 0 to 1; measured or stated.
        sustained_efficiency: Share of its best speed, in matrix products and in memory, that the kernels of a training
            sustain, 0 to 1; 1 where the figures above are those of a training.
        sustained_source: Origin of that share.
        attention_share: Speed of fused attention with long sequences, in times of that of matrix products, 0 to 1.
        communicator_bytes: Bytes of the memory of one communicator of NCCL.
        assumed: Shares that its file does not state, as text; typical ones count.
    """

    name: str
    memory_bytes: int
    memory_bytes_per_s: float
    peak_flop_per_s: float
    matmul_efficiency: float
    sustained_efficiency: float = 1.0
    sustained_source: str = ""
    attention_share: float = 1.0
    communicator_bytes: int = COMMUNICATOR_BYTES
    assumed: tuple[str, ...] = ()

    @property
    def sustained_flop_per_s(self) -> float:
        """FLOP per second of a training's matrix products."""
        return self.peak_flop_per_s * self.matmul_efficiency * self.sustained_efficiency

    @property
    def sustained_bytes_per_s(self) -> float:
        """Bytes per second between memory and processor in a training's other kernels."""
        return self.memory_bytes_per_s * MEMORY_SHARE * self.sustained_efficiency

    def with_best_kernels(self) -> Device:
        """The same device, whose trainings sustain its best speed."""
        return dataclasses.replace(self, sustained_efficiency=1.0, sustained_source="")

    @classmethod
    def named(cls, name: str) -> Device:
        """A device of `clusters.toml`, by its name in any case.

        Raises:
            ConfigError: No device has this name.
        """
        return _device(name, "the catalog", {})

    def adam_seconds(self, numel: float, param_bytes: int) -> float:
        """Seconds of Adam's update of so many elements.

        Args:
            numel: Elements of the shards that one rank updates.
            param_bytes: Bytes of an element in the dtype in which parameters are used.
        """
        return numel * (_ADAM_BYTES + param_bytes) / self.sustained_bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The links of one level of the network.

    Attributes:
        bytes_per_s: Bytes per second that one rank sends while all ranks of its node send, in one direction.
        latency_s: Seconds of one step of a ring, whatever its bytes (alpha).
        source: Origin of the figures, as free text: datasheet, paper, or file of a calibration.
        assumed: Efficiency that its file does not state, as text; the typical one counts.
    """

    bytes_per_s: float
    latency_s: float
    source: str
    assumed: str = ""


_NOT_STATED = Link(bytes_per_s=1e9, latency_s=1e-6, source="not stated, and used by no collective")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Nodes with equal numbers of equal devices.

    Attributes:
        name: Name of the product or of the file.
        device: Device of every rank.
        ranks_per_node: Ranks of a node.
        num_nodes: Nodes of the job.
        intra_node: Links inside a node.
        inter_node: Links between nodes, under one switch where there are several.
        nodes_per_switch: Nodes under one leaf switch; 0 where all nodes are equally near.
        inter_switch: Links between switches; None where `nodes_per_switch` is 0.
        slowest_node_factor: Time of the same arithmetic on the slowest node over that on the others, at least 1. All
            ranks wait for it.
        overlap_slowdown: Time of compute while a collective runs, in times of that otherwise; measured or stated.
        backend: Backend of collectives: "nccl" or "gloo".
        measured_stages: Measured stages of collectives, which count instead of the links' figures.
        measured_overlaps: Measured slow-downs by link, which count instead of `overlap_slowdown`.
        measured_codecs: Measured speeds of codecs, which count instead of that of the device's memory.
        origin: Origin of the measurements; None where the cluster was not calibrated.
    """

    name: str
    device: Device
    ranks_per_node: int
    num_nodes: int
    intra_node: Link
    inter_node: Link
    nodes_per_switch: int = 0
    inter_switch: Link | None = None
    slowest_node_factor: float = 1.0
    overlap_slowdown: float = 1.0
    backend: str = "nccl"
    measured_stages: tuple[MeasuredStage, ...] = ()
    measured_overlaps: tuple[MeasuredOverlap, ...] = ()
    measured_codecs: tuple[MeasuredCodec, ...] = ()
    origin: CalibrationOrigin | None = None

    def __post_init__(self) -> None:
        for name in ("ranks_per_node", "num_nodes"):
            _check_count(name, getattr(self, name), f"cluster {self.name}")
        if not _is_factor(self.slowest_node_factor):
            raise ConfigError(
                f"`slowest_node_factor={self.slowest_node_factor}` of cluster {self.name} makes its slowest node "
                "faster than the others. Use 1 or more."
            )
        if not _is_factor(self.overlap_slowdown):
            raise ConfigError(
                f"`overlap_slowdown={self.overlap_slowdown}` of cluster {self.name} makes compute faster while a "
                "collective runs. Use 1 or more."
            )
        if self.backend not in _BACKENDS:
            raise ConfigError(f"`backend={self.backend!r}` of cluster {self.name}. Use {' or '.join(_BACKENDS)}.")
        if self.origin is not None and len(self.origin.hosts) == 1 < self.num_nodes:
            raise ConfigError(
                f"{self.num_nodes} nodes were asked for, and cluster {self.name} was calibrated on one, "
                f"{self.origin.hosts[0]}: the links between nodes were not measured. Calibrate on 2 nodes or more."
            )
        for name, count in (("intra_node", self.ranks_per_node), ("inter_node", self.num_nodes)):
            if count > 1 and getattr(self, name).source == _NOT_STATED.source:
                raise ConfigError(
                    f"{self.num_nodes} nodes of {self.ranks_per_node} ranks were asked for, and cluster {self.name} "
                    f"states no `{name}`. State it."
                )
        if self.nodes_per_switch != 0:
            _check_count("nodes_per_switch", self.nodes_per_switch, f"cluster {self.name}")
        if (self.nodes_per_switch > 0) != (self.inter_switch is not None):
            raise ConfigError(
                f"`nodes_per_switch={self.nodes_per_switch}` of cluster {self.name} and its `inter_switch` do not "
                "belong together. State both, or neither."
            )

    @classmethod
    def preset(cls, name: str, nodes: int = 16) -> Cluster:
        """A cluster by name.

        Args:
            name: Name in `clusters.toml`, in any case.
            nodes: Nodes of the job.

        Raises:
            ConfigError: No cluster has this name, or `nodes` is not positive.
        """
        fields = look_up(read_table("clusters.toml")["cluster"], name, "cluster")
        return cls.from_fields({"name": name.lower(), "nodes": nodes, **fields})

    @classmethod
    def preset_names(cls) -> tuple[str, ...]:
        """Names of all presets."""
        return tuple(read_table("clusters.toml")["cluster"])

    @classmethod
    def load(cls, path: str | Path) -> Cluster:
        """A cluster from a TOML, JSON or YAML file.

        docs/planner.md has all fields.

        Raises:
            ConfigError: The file does not exist, is not of these formats, or states a field wrongly.
        """
        path = Path(path)
        fields = read_file(path)
        if not isinstance(fields, Mapping):
            raise ConfigError(f"{path} holds {type(fields).__name__}, not the fields of a cluster. Write a mapping.")
        return cls.from_fields({"name": path.stem, **fields})

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Cluster:
        """A cluster from fields with units, as in the files.

        Raises:
            ConfigError: A field is unknown, missing or not a quantity.
        """
        fields = dict(fields)
        if "like" in fields:
            fields = {**look_up(read_table("clusters.toml")["cluster"], str(fields.pop("like")), "cluster"), **fields}
        where = f"cluster {fields.get('name', '')}"
        counts = {"intra_node": fields.get("ranks_per_node"), "inter_node": fields.get("nodes", 1)}
        links_needed = [name for name, count in counts.items() if count != 1]  # no collective uses that of one
        _check_fields(fields, _CLUSTER_FIELDS, ("device", "ranks_per_node", *links_needed), where)
        ranks = fields["ranks_per_node"]
        _check_count("ranks_per_node", ranks, where)
        is_measured = "calibration" in fields
        device = _device(fields["device"], where, {} if is_measured else TYPICAL_DEVICE)
        communicator = fields.get("communicator_memory", COMMUNICATOR_BYTES)
        communicator = parse_quantity(communicator, Quantity.BYTES, f"`communicator_memory` of {where}")
        links = {
            name: _link(fields[name], ranks, f"{name} of {where}", 1.0 if is_measured else share)
            for name, share in _TYPICAL_LINKS.items()
            if fields.get(name) is not None
        }
        return cls(
            name=str(fields["name"]),
            device=dataclasses.replace(device, communicator_bytes=round(communicator)),
            ranks_per_node=ranks,
            num_nodes=fields.get("nodes", 1),
            intra_node=links.get("intra_node", links.get("inter_node", _NOT_STATED)),
            inter_node=links.get("inter_node", _NOT_STATED),
            inter_switch=links.get("inter_switch"),
            nodes_per_switch=fields.get("nodes_per_switch", 0),
            slowest_node_factor=fields.get("slowest_node_factor", 1.0),
            overlap_slowdown=fields.get("overlap_slowdown", 1.0),
            backend=fields.get("backend", "nccl"),
            measured_stages=parse_stages(fields.get("measured_stages", ()), where),
            measured_overlaps=parse_overlaps(fields.get("measured_overlaps", ()), where),
            measured_codecs=parse_codecs(fields.get("measured_codecs", ()), where),
            origin=parse_origin(fields["calibration"], where) if "calibration" in fields else None,
        )

    @classmethod
    def of(cls, source: str) -> Cluster:
        """A cluster from a file, or else by name; see `with_nodes`.

        Args:
            source: Path of a file, as for `load`, or a name, as for `preset`.

        Raises:
            ConfigError: There is no such file or cluster, or the file states a field wrongly.
        """
        return cls.load(source) if is_cluster_file(source) else cls.preset(source)

    def with_nodes(self, num_nodes: int) -> Cluster:
        """The same cluster with another number of nodes."""
        return dataclasses.replace(self, num_nodes=num_nodes)

    def with_best_kernels(self) -> Cluster:
        """The same cluster with devices whose trainings sustain their best speed."""
        return dataclasses.replace(self, device=self.device.with_best_kernels())

    def measured(self, collective: str, link: str, size: int, ranks_of_node: int) -> tuple[tuple[int, float], ...]:
        """Measured bytes and seconds of a stage; empty where nothing was measured."""
        for stage in self.measured_stages:
            if (stage.collective, stage.link, stage.size, stage.ranks_of_node) == (
                *(collective, link),
                *(size, ranks_of_node),
            ):
                return stage.seconds_by_bytes
        return ()

    def measured_codec(self, codec: Codec) -> MeasuredCodec | None:
        """Measured speed of a codec; None where it was not measured."""
        for measured in self.measured_codecs:
            if (measured.bits, measured.rotation) == (codec.bits, codec.rotation):
                return measured
        return None

    @property
    def world_size(self) -> int:
        """All ranks."""
        return self.num_nodes * self.ranks_per_node

    @property
    def assumed(self) -> tuple[str, ...]:
        """Efficiencies that the file does not state, as text."""
        links = (self.intra_node, self.inter_node, self.inter_switch)
        of_links = (link.assumed for link in links if link is not None and link.assumed)
        return (*self.device.assumed, *dict.fromkeys(of_links))


def is_cluster_file(source: str) -> bool:
    """Whether it is the path of a cluster's file, not the name of a product."""
    return Path(source).suffix in FILE_SUFFIXES or Path(source).is_file()


def _is_factor(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 1 <= value < LARGEST


def _check_count(name: str, value: Any, where: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"`{name}={value!r}` of {where} is not a whole number above 0. Use 1 or more.")


def _check_fields(fields: Mapping[str, Any], known: tuple[str, ...], required: tuple[str, ...], where: str) -> None:
    for name in fields:
        if name not in known:
            raise ConfigError(f"`{name}` is no field of {where}.{nearest(str(name), known)}")
    missing = [name for name in required if fields.get(name) is None]
    if missing:
        raise ConfigError(f"`{missing[0]}` of {where} is missing. State it; required are {', '.join(required)}.")


def _device(value: Any, where: str, typical: Mapping[str, float]) -> Device:
    if isinstance(value, str):
        value = {"name": value, **look_up(read_table("clusters.toml")["device"], value, "device")}
    where = f"the device of {where}"
    if not isinstance(value, Mapping):
        raise ConfigError(f"{value!r} is not {where}. Use the name of a device, or its fields.")
    _check_fields(value, (*_DEVICE_FIELDS, *_OPTIONAL_DEVICE_FIELDS), _DEVICE_FIELDS, where)
    missing = {name: share for name, share in typical.items() if name not in value}
    source = "assumed, as for most devices" if "sustained_efficiency" in missing else "stated"
    value = {**value, **missing}
    sustained = _share(value.get("sustained_efficiency", 1.0), f"`sustained_efficiency` of {where}")
    return Device(
        name=str(value["name"]),
        memory_bytes=round(parse_quantity(value["memory"], Quantity.BYTES, f"`memory` of {where}")),
        memory_bytes_per_s=parse_quantity(
            value["memory_bandwidth"], Quantity.BYTES_PER_S, f"`memory_bandwidth` of {where}"
        ),
        peak_flop_per_s=parse_quantity(value["peak"], Quantity.FLOP_PER_S, f"`peak` of {where}"),
        matmul_efficiency=_share(value.get("matmul_efficiency", 1.0), f"`matmul_efficiency` of {where}"),
        sustained_efficiency=sustained,
        sustained_source=str(value.get("sustained_source", source if sustained < 1 else "")),
        attention_share=_share(value.get("attention_share", 1.0), f"`attention_share` of {where}"),
        assumed=tuple(f"{name} {share}" for name, share in missing.items()),
    )


def _link(value: Any, ranks_per_node: int, where: str, typical: float) -> Link:
    """A link from its fields.

    `bandwidth` is that of one rank while all ranks of its node send, `node_bandwidth` that of the whole node.
    """
    if not isinstance(value, Mapping):
        raise ConfigError(f"{value!r} is not the link {where}. State bandwidth and latency.")
    _check_fields(value, _LINK_FIELDS, ("latency",), where)
    if ("bandwidth" in value) == ("node_bandwidth" in value):
        raise ConfigError(
            f"{where} states both `bandwidth` and `node_bandwidth`, or neither. State one: the speed of one rank, or "
            "of its whole node."
        )
    share = 1 if "bandwidth" in value else ranks_per_node
    name = "bandwidth" if "bandwidth" in value else "node_bandwidth"
    return Link(
        bytes_per_s=parse_quantity(value[name], Quantity.BYTES_PER_S, f"`{name}` of {where}")
        / share
        * _share(value.get("efficiency", typical), f"`efficiency` of {where}"),
        latency_s=parse_quantity(value["latency"], Quantity.SECONDS, f"`latency` of {where}"),
        source=str(value.get("source", "")),
        assumed="" if "efficiency" in value or typical == 1 else f"efficiency {typical} of {where.split()[0]}",
    )


def _share(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
        raise ConfigError(f"{where} is {value!r}, not a share. Use a number above 0 and up to 1.")
    return float(value)
