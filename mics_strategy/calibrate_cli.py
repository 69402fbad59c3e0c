"""The command ``mics calibrate``: measurements of a cluster for the planner.

A launcher such as torchrun starts it on all ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mics_strategy.comm.consensus import gather_objects, run_on_files
from mics_strategy.engine.setup.resolve import node_name, target_device
from mics_strategy.errors import ConfigError
from mics_strategy.planner.calibrate import CalibrationOptions, calibrate
from mics_strategy.topology import RankLocation, topology_from_locations

_BACKENDS = {"cuda": "nccl", "cpu": "gloo"}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--output", type=Path, required=True, help="the file for `--cluster`, written by rank 0")
    parser.add_argument("--name", default="calibrated", help="name of the cluster; default: calibrated")
    parser.add_argument("--device", choices=sorted(_BACKENDS), default=None, help="default: the GPUs, if there are")
    parser.add_argument("--max-mib", type=int, default=256, help="the largest tensor, MiB; default: 256")
    parser.add_argument("--stage-s", type=float, default=1.0, help="seconds for a collective of a size; default: 1")
    parser.add_argument("--dtype", choices=("auto", "bfloat16", "float32"), default="auto", help="of the peak")
    parser.add_argument("--peak-tflops", type=float, default=0.0, help="of the datasheet; default: what is measured")


def run(options: Namespace) -> int:
    """Measure the cluster of this job; return the exit code.

    Collective. Rank 0 writes the file.

    Raises:
        ConfigError: No launcher has started this process, or its options are wrong; on every rank.
        CheckpointError: The file cannot be written; on every rank.
    """
    if "RANK" not in os.environ:
        raise ConfigError(
            "`mics calibrate` measures the links between the ranks of a job, and no launcher has started one. Run "
            "`torchrun --nproc-per-node GPUS --no-python mics calibrate --output cluster.json` on every node."
        )
    device_type = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    settings = CalibrationOptions(
        name=options.name,
        max_bytes=options.max_mib * 2**20,
        stage_s=options.stage_s,
        dtype=options.dtype,
        peak_flop_per_s=options.peak_tflops * 1e12,
    )
    if device_type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    dist.init_process_group(_BACKENDS[device_type])
    try:
        run_on_files(lambda: _check_folder(options.output))
        nodes = gather_objects(node_name())
        topology = topology_from_locations([RankLocation(node=node) for node in nodes])
        fields = calibrate(gather_objects(socket.gethostname()), topology, target_device("auto"), settings)
        run_on_files(lambda: _write_calibration(options.output, fields) if dist.get_rank() == 0 else None)
        if dist.get_rank() == 0:
            print(f"{options.output} is written. Use it with `mics plan --cluster {options.output}`.")
    finally:
        dist.destroy_process_group()
    return 0


def _check_folder(path: Path) -> None:
    if dist.get_rank() == 0 and not path.absolute().parent.is_dir():
        raise ConfigError(f"There is no folder {path.absolute().parent} for `--output {path}`. Make it first.")


def _write_calibration(path: Path, fields: dict[str, Any]) -> None:
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(fields, indent=1))
    partial.replace(path)
