"""Can others read what we write, and do we read what they write?"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from mics_strategy.checkpoint.load import load_checkpoint
from tests import models
from tests.checkpoint.test_sharded import run_of, save_after, state_of
from tests.engine.training import OPTIMIZERS, assert_identical, start, whole, wholes
from tests.ranks import RankContext, RankPool


def build_fsdp2(ctx: RankContext) -> tuple[models.Case, torch.nn.Module, torch.optim.Optimizer]:
    """Trained for one step."""
    case = models.transformer()
    model = case.build()
    mesh = init_device_mesh("cpu", (ctx.world_size,))
    for module in model.modules():
        if isinstance(module, tuple(case.units)):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = OPTIMIZERS["adamw"](list(model.parameters()))
    case.loss(model, case.batch(0, 0, 0)).backward()
    optimizer.step()
    return case, model, optimizer


def tell(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    found = wholes(model.state_dict())
    names = {id(p): name for name, p in model.named_parameters()}
    for parameter, states in optimizer.state.items():
        found |= {f"{names[id(parameter)]}:{key}": whole(value) for key, value in states.items()}
    return dict(sorted(found.items()))


def save_from_fsdp2(ctx: RankContext, path: Path) -> dict[str, Tensor]:
    """By torch's means alone."""
    _, model, optimizer = build_fsdp2(ctx)
    state = {"model": get_model_state_dict(model), "optimizer_0": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=path)
    return tell(model, optimizer)


def load_into_fsdp2(ctx: RankContext, path: Path) -> dict[str, Tensor]:
    """By torch's means alone."""
    _, model, optimizer = build_fsdp2(ctx)
    state = {"model": get_model_state_dict(model), "optimizer_0": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=path)
    set_optimizer_state_dict(model, optimizer, state["optimizer_0"])
    return tell(model, optimizer)


def test_fsdp2_reads_ours(ranks: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "step-2"
    saved = ranks(4, save_after, run_of("mics"), 2, path, False)[0]
    for found in ranks(2, load_into_fsdp2, path):
        assert_identical(found, saved)


def load_fsdp2s(ctx: RankContext, path: Path) -> dict[str, Tensor]:
    training = start(ctx, run_of("mics"))
    load_checkpoint(path, training.sharded, [training.optimizer])
    return state_of(training)


def test_we_read_fsdp2s(ranks: RankPool, tmp_path: Path) -> None:
    saved = ranks(2, save_from_fsdp2, tmp_path / "fsdp2")[0]
    for found in ranks(4, load_fsdp2s, tmp_path / "fsdp2"):
        assert_identical(found, saved)


@pytest.mark.slow
def test_lightning_makes_one_file_of_ours(ranks: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "step-2"
    saved = ranks(4, save_after, run_of("mics"), 2, path, False)[0]
    tool = [sys.executable, "-m", "lightning.pytorch.utilities.consolidate_checkpoint"]
    subprocess.run([*tool, str(path), "--output_file", str(tmp_path / "one.ckpt")], check=True)
    consolidated = torch.load(tmp_path / "one.ckpt", weights_only=True)
    assert (consolidated["step"], consolidated["note"]) == (2, "here")
    plain = models.transformer().build()
    plain.load_state_dict(consolidated["state_dict"])
    assert_identical(dict(plain.state_dict()), {name: saved[name] for name in plain.state_dict()})
    assert len(consolidated["optimizer_states"]) == 1


def test_torch_makes_one_file_of_ours(ranks: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "step-2"
    saved = ranks(4, save_after, run_of("zero3"), 2, path, False)[0]
    dcp_to_torch_save(path, tmp_path / "whole.pt")
    found = torch.load(tmp_path / "whole.pt", weights_only=True)
    plain = models.transformer().build()
    plain.load_state_dict(found["model"])
    names = list(plain.state_dict())
    assert_identical({name: plain.state_dict()[name] for name in names}, {name: saved[name] for name in names})
    states = found["optimizer_0"]["state"]
    flat = {f"{name}:{key}": value for name, of_name in states.items() for key, value in of_name.items()}
    assert_identical(dict(sorted(flat.items())), {name: value for name, value in saved.items() if ":" in name})
    assert found["optimizer_0"]["param_groups"][0]["params"] == [name for name, _ in plain.named_parameters()]
