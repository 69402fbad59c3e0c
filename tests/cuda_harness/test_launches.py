"""How many collectives and kernels does a unit launch? A change is to be seen, not judged.

Each launch costs the host some ten microseconds, whatever it moves.
"""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.cuda_harness.counting import chains, table, totals
from tests.cuda_harness.machine import Machine
from tests.cuda_harness.runs import WIDTH, Tower, config_of, one_of_many, start
from tests.cuda_harness.streams import Stream

PER_NODE = 4
WIDE = 512  # a layer of 4 MB, of which shards go in pieces
Rows = dict[str, tuple[int, int, int]]

# Preset, nodes of 4 ranks, codec of gradients: by roles the chains of a step of one micro-step over 5 units, and of
# one chain the calls of collectives and the kernels.
LAUNCHES: dict[tuple[str, int, str], Rows] = {
    ("ddp", 2, "none"): {"second_hop_all_reduce": (5, 4, 8)},
    ("ddp", 16, "none"): {"second_hop_all_reduce": (5, 4, 8)},
    ("zero1", 2, "none"): {"param_sync": (5, 3, 2), "second_hop_reduce_scatter": (5, 2, 3)},
    ("zero1", 16, "none"): {"param_sync": (5, 17, 2), "second_hop_reduce_scatter": (5, 2, 3)},
    ("zero2", 2, "none"): {"param_sync": (5, 3, 2), "grad_reduce_scatter": (5, 2, 3)},
    ("zero2", 16, "none"): {"param_sync": (5, 17, 2), "grad_reduce_scatter": (5, 2, 3)},
    ("zero3", 2, "none"): {"param_all_gather": (7, 3, 2), "grad_reduce_scatter": (5, 2, 3)},
    ("zero3", 16, "none"): {"param_all_gather": (7, 17, 2), "grad_reduce_scatter": (5, 2, 3)},
    ("zero3", 2, "int8"): {"param_all_gather": (7, 3, 2), "grad_reduce_scatter": (5, 2, 7)},
    ("zero3", 16, "int8"): {"param_all_gather": (7, 17, 2), "grad_reduce_scatter": (5, 2, 35)},
    ("zeropp-hpz", 2, "none"): {"param_all_gather": (7, 3, 3), "grad_reduce_scatter": (5, 2, 3)},  # 2 of a copy
    ("zeropp-hpz", 16, "none"): {"param_all_gather": (7, 17, 3), "grad_reduce_scatter": (5, 2, 3)},  # 2 of a copy
    ("mics", 2, "none"): {
        "param_all_gather": (7, 1, 2),
        "grad_reduce_scatter": (5, 1, 2),
        "second_hop_all_reduce": (5, 1, 1),
    },
    ("mics", 16, "none"): {
        "param_all_gather": (7, 1, 2),
        "grad_reduce_scatter": (5, 1, 2),
        "second_hop_all_reduce": (5, 1, 1),
    },
    ("mics", 2, "int8"): {
        "param_all_gather": (7, 1, 2),
        "grad_reduce_scatter": (5, 1, 3),
        "second_hop_all_reduce": (5, 2, 12),
    },
    ("mics", 16, "int8"): {
        "param_all_gather": (7, 1, 2),
        "grad_reduce_scatter": (5, 1, 3),
        "second_hop_all_reduce": (5, 2, 54),
    },
    ("paro-iig", 2, "none"): {
        "param_sync+param_all_gather": (5, 2, 3),
        "param_all_gather": (2, 1, 2),
        "grad_reduce_scatter": (5, 1, 2),
        "second_hop_reduce_scatter": (5, 1, 2),
    },
    ("paro-nii", 2, "none"): {
        "param_sync": (5, 1, 2),
        "grad_reduce_scatter": (5, 1, 2),
        "second_hop_all_reduce": (5, 1, 1),
    },
}
IN_PIECES: dict[tuple[str, str], Rows] = {
    ("zero3", "none"): {"param_all_gather": (7, 24, 9), "grad_reduce_scatter": (5, 24, 49)},
    ("mics", "int8"): {
        "param_all_gather": (7, 1, 2),
        "grad_reduce_scatter": (5, 1, 3),
        "second_hop_all_reduce": (5, 16, 61),
    },
}
# A step on one node of 8 ranks, the model's and the optimizer's kernels included: collectives, kernels.
ZERO3_TOTALS = (13, 113)
FSDP2_TOTALS = (14, 89)
counts_of_torch = pytest.mark.skipif(
    not torch.__version__.startswith("2.13"), reason="other versions of torch launch other kernels in a step"
)


def _log(preset: str, nodes: int, per_node: int = PER_NODE, **options: Any) -> list[tuple[str, int, str]]:
    width = options.pop("width", WIDTH)
    with one_of_many(nodes * per_node) as machine:
        training = start(machine, config_of(preset, ranks_per_node=per_node, **options), width=width)
        for _ in range(3):  # the order of units is known after the first
            machine.log.clear()
            training.loss().backward()
            training.optimizers[0].step()
            training.optimizers[0].zero_grad()
    return machine.log


@pytest.mark.parametrize(("preset", "nodes", "codec"), LAUNCHES)
def test_a_unit_launches_as_many_as_before(preset: str, nodes: int, codec: str) -> None:
    assert table(_log(preset, nodes, grad_codec=codec)) == LAUNCHES[preset, nodes, codec]


@pytest.mark.parametrize("nodes", [2, 16])
def test_a_copy_is_gathered_in_one_launch_by_the_group_of_the_stage_inside_nodes(nodes: int) -> None:
    gathers = [chain for chain in chains(_log("zeropp-hpz", nodes)) if chain.name == "param_all_gather"]
    assert sorted((chain.collectives, chain.kernels) for chain in gathers)[:2] == [(1, 2)] * 2
    assert {chain.collectives for chain in gathers} == {1, nodes + 1}


@pytest.mark.parametrize(("preset", "codec"), IN_PIECES)
def test_a_large_unit_launches_as_many_as_before(preset: str, codec: str) -> None:
    assert table(_log(preset, 2, grad_codec=codec, width=WIDE)) == IN_PIECES[preset, codec]


def _fsdp2() -> Machine:
    """Three steps of torch's own engine; the log is that of the last."""
    with one_of_many() as machine:
        mesh = init_device_mesh("cuda", (8,))
        torch.manual_seed(3)
        model: nn.Module = Tower()
        for layer in (*model.layers, model):
            fully_shard(layer, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        batch = torch.randn(4, WIDTH).to("cuda")
        for _ in range(3):
            machine.log.clear()
            with machine.step():
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    return machine


@counts_of_torch
def test_a_step_launches_as_many_as_before_beside_fsdp2() -> None:
    assert (totals(_log("zero3", 1, 8)), totals(_fsdp2().log)) == (ZERO3_TOTALS, FSDP2_TOTALS)


def test_fsdp2_is_found_without_fault() -> None:
    """An engine that thousands use on GPUs: a race or a wait that is found in it would be one of the harness."""
    machine = _fsdp2()
    assert machine.launches
    assert (machine.races, machine.waits) == ([], [])


def test_fsdp2_is_found_faulty_without_its_events() -> None:
    with mock.patch.object(Stream, "wait_event", return_value=None):
        assert _fsdp2().races != []
