"""The test-bed of a public run: its GPUs, and its links by the row or by the product's datasheet.

Pure.
"""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING

from benchmarks.papers.testbed import NotPredictable, Testbed, published_table
from mics_strategy.planner.cluster import Cluster, Device

if TYPE_CHECKING:
    from benchmarks.papers.row import PublishedRow

# Words of the column `gpu_type`, the cluster whose links count where a row states none, and the device. The first match
# counts.
_GPUS = (
    (r"gb300", "gb300-nvl72", "gb300-279gb"),
    (r"gb200", "gb200-nvl72", "gb200-186gb"),
    (r"b300", "dgx-b300", "b300-270gb"),
    (r"b200|b100", "dgx-b200", "b200-180gb"),
    (r"gh200", "dgx-h100", "gh200-96gb"),
    (r"h200", "dgx-h200", "h200-141gb"),
    (r"h20\b", "dgx-h100", "h20-96gb"),
    (r"h100.*(96 ?gb|500 ?w)", "dgx-h100", "h100-96gb-500w"),
    (r"h100.*pcie", "l40s-8x", "h100-pcie-80gb"),
    (r"h100", "dgx-h100", "h100-80gb"),
    (r"h800", "h800-8x", "h100-80gb"),
    (r"a800", "amsp-a800", "a100-80gb"),
    (r"a100.*pcie.*80|a100.*80.*pcie", "l40s-8x", "a100-pcie-80gb"),
    (r"a100.*40 ?g|p4d\b|p4d\.", "p4d.24xlarge", "a100-40gb"),
    (r"a100|p4de", "dgx-a100", "a100-80gb"),
    (r"mi325", "mi300x-8x", "mi325x-256gb"),
    (r"mi300", "mi300x-8x", "mi300x-192gb"),
    (r"dgx-?2|v100.*sxm3", "dgx-2", "v100-32gb"),
    (r"v100.*16 ?g", "p3dn.24xlarge", "v100-16gb"),
    (r"v100", "p3dn.24xlarge", "v100-32gb"),
    (r"\bt4\b", "l4-8x", "t4-16gb"),
    (r"l40", "l40s-8x", "l40s-48gb"),
    (r"\bl4\b", "l4-8x", "l4-24gb"),
    (r"a10g|g5\.", "g5.48xlarge", "a10g-24gb"),
    (r"\ba10\b", "a10-4x", "a10-24gb"),
    (r"pro ?6000", "rtx5090-2x", "rtx-pro-6000-96gb"),
    (r"6000 ?ada|ada ?6000", "rtx4090-2x", "rtx6000-ada-48gb"),
    (r"a6000", "rtx3090-2x", "a6000-48gb"),
    (r"5090", "rtx5090-2x", "rtx5090-32gb"),
    (r"4090", "rtx4090-2x", "rtx4090-24gb"),
    (r"3090", "rtx3090-2x", "rtx3090-24gb"),
    (r"gb10|spark", "dgx-spark", "gb10-128gb"),
)
# Words of a row's software, and its attention in `published.toml`.
# InternEvo's table is InternLM's of 2023, whose installation names flash-attention 1.0.5.
_ATTENTION = (
    (r"composer|llm-foundry|internevo|internlm", "flash1"),
    (r"megatron|nemo|automodel|transformer engine", "cudnn"),
)
# Beginnings of the names of devices before Ada and Hopper, whose matrix units have no 8-bit floats: datasheets.
_WITHOUT_FP8 = ("v100", "t4-", "a100", "a10-", "a10g", "a6000", "rtx3090")
_NCCL_EFFICIENCY = 0.88  # as in `clusters.toml`


def testbed_of(row: PublishedRow) -> Testbed:
    """The test-bed of a row, with as many nodes as the row has.

    Raises:
        NotPredictable: The device is not in the catalog, or the ranks are not stated.
    """
    words = row.words("gpu_type")
    match = next(((cluster, device) for pattern, cluster, device in _GPUS if re.search(pattern, words)), None)
    if match is None:
        raise NotPredictable(f"device `{row.text('gpu_type')}` is not in the catalog of {len(_GPUS)} devices")
    world_size = row.world_size
    if world_size is None:
        raise NotPredictable("the number of GPUs is not stated")
    cluster = Cluster.preset(match[0], nodes=1)
    assumptions = []
    per_node = min(row.count("gpus_per_node") or row.ranks_per_node or cluster.ranks_per_node, world_size)
    if world_size % per_node:
        raise NotPredictable(f"{world_size} GPUs do not fill nodes of {per_node}")
    node_bytes_per_s = cluster.inter_node.bytes_per_s * cluster.ranks_per_node
    stated = _stated_bytes_per_s(row, per_node)
    link = dataclasses.replace(cluster.inter_node, bytes_per_s=node_bytes_per_s / per_node)
    if stated == 0:
        raise NotPredictable(f"links of `{row.text('interconnect_inter')}` between nodes send nothing")
    if stated is not None:
        link = dataclasses.replace(link, bytes_per_s=stated * _NCCL_EFFICIENCY / per_node, source="the row")
    elif world_size > per_node:
        text = row.text("interconnect_inter")
        assumptions.append(f"links {f'`{text}` without a rate' if text else 'not stated'}: those of {match[0]}")
    cluster = dataclasses.replace(
        cluster,
        device=Device.named(match[1]),
        ranks_per_node=per_node,
        num_nodes=world_size // per_node,
        inter_node=link,
        overlap_slowdown=published_table()["overlap_slowdown"],
    )
    return Testbed(
        cluster=cluster,
        deepspeed="2023",
        tokens=2048,
        micro_batch=0,
        num_micro_steps=1,
        world_sizes=(world_size,),
        assumptions=tuple(assumptions),
    )


def has_fp8(device: Device) -> bool:
    """Whether a device multiplies 8-bit floats."""
    return not device.name.startswith(_WITHOUT_FP8)


def with_attention(device: Device, row: PublishedRow) -> Device:
    """The device with the attention kernels of the row's software."""
    name = next((name for pattern, name in _ATTENTION if re.search(pattern, row.words("system"))), None)
    if name is None:
        return device
    shares = published_table()["attention"][name]
    share = next((share for prefix, share in shares.items() if device.name.startswith(prefix)), device.attention_share)
    return dataclasses.replace(device, attention_share=share)


def _stated_bytes_per_s(row: PublishedRow, per_node: int) -> float | None:
    """Bytes per second of a node's adapters, as in "4 x 100 Gb", "400 Gb/s per GPU", "10 GbE" or "3200 Gbps"."""
    text = row.text("interconnect_inter")
    words = text.lower()
    whole = row.node_bytes_per_s
    if whole is None:
        plain = re.search(r"(\d[\d.]*)\s*g(?:be|b)?\b", words) or re.search(r"(\d[\d.]*)\s*(?:gbase|gigabit)", words)
        if plain is None:
            return None
        whole = float(plain[1]) * 1e9 / 8
    times = re.match(r"\s*(\d+)\s*x\s*\d", words) or re.search(r"x\s*(\d+)\s*$", words)
    if times:
        return whole * int(times[1])
    first_number = re.search(r"\d[\d.]*\s*[gt]b[^(]*", words)
    is_each = first_number is not None and re.search(r"(per|/|a|each)\s*gpu", first_number[0])
    return whole * per_node if is_each else whole
