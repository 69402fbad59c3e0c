"""Is Megatron-FSDP asked for what the page says, and is it left out with a reason where it cannot run?

The package needs a GPU: a stand-in that keeps what it is given takes its place.
"""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.gpu import table
from benchmarks.gpu_model import SIZES, Block
from benchmarks.gpu_training import BUILDERS, EngineResult, Peak, Rounds, compare_engines, engine_rows
from benchmarks.megatron_peer import NotMeasuredError, adopt_optimizer, load, sharded_model
from tests.ranks import RankContext, RankPool

CPU, GPU = torch.device("cpu"), torch.device("cuda")
NO_PEAK = Peak("cpu")
ENGINES = ["megatron-fsdp", "megatron-fsdp-light"]


class ProxyParameter:
    """The package's two functions: the model is as before, the optimizer makes its states as the package lets it."""

    MixedPrecisionPolicy = SimpleNamespace

    def __init__(self) -> None:
        self.options: dict[str, Any] = {}

    def fully_shard_model(self, model: nn.Module, **options: Any) -> nn.Module:
        self.options = options
        return model

    def fully_shard_optimizer(self, optimizer: torch.optim.Optimizer, **_: Any) -> None:
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("package", "device", "reason"),
    [
        (None, GPU, "megatron-fsdp is not installed: python -m pip install megatron-fsdp==0.6.1"),
        (ProxyParameter(), CPU, "megatron-fsdp runs on CUDA devices only"),
    ],
)
def test_the_reason_is_said(
    monkeypatch: pytest.MonkeyPatch, package: object, device: torch.device, reason: str
) -> None:
    monkeypatch.setitem(sys.modules, "megatron_fsdp", package)
    with pytest.raises(NotMeasuredError, match=reason):
        load(device)


def test_a_missing_dependency_of_the_package_is_named(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "megatron_fsdp.py").write_text("import no_such_dependency")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "megatron_fsdp", raising=False)
    with pytest.raises(NotMeasuredError, match="cannot be imported: No module named 'no_such_dependency'"):
        load(GPU)


def test_what_is_not_measured_is_a_row_without_a_problem() -> None:
    engines = {"plain": EngineResult(step_s=[1.0], peak_bytes=[0], reserved_bytes=[0], losses=[[4.0]])}
    engines |= {name: EngineResult(reason="not installed") for name in ENGINES}
    rows = list(engine_rows(engines, SIZES["tiny"], 0.02, NO_PEAK))
    assert [row["engine"] for row in rows] == list(engines)
    assert not any(row["problem"] for row in rows)
    assert table(rows).count("not measured: not installed") == 2
    assert "WRONG" not in table(rows)


def test_ours_is_compared_with_the_faster_row() -> None:
    def result(step_s: float) -> EngineResult:
        return EngineResult(step_s=[step_s], peak_bytes=[0], reserved_bytes=[0], losses=[[4.0]])

    engines = {"plain": result(1.0), "fsdp2": result(1.0), "megatron-fsdp": result(4.0)}
    engines |= {"megatron-fsdp-light": result(2.0), "mics": result(1.0)}
    *_, mics = engine_rows(engines, SIZES["tiny"], 0.02, NO_PEAK)
    assert mics["of megatron"] == 2.0


def test_options_are_those_of_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    meshes: list[tuple[Any, ...]] = []
    monkeypatch.setattr("benchmarks.megatron_peer.init_device_mesh", lambda *args, **_: meshes.append(args))
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 1)
    package, model = ProxyParameter(), nn.Linear(2, 2)
    assert sharded_model(package, model, Block, CPU, "no_shard") is model
    assert meshes == [("cpu", (1, 1))]
    assert package.options["zero_dp_strategy"] == "no_shard"
    assert package.options["fsdp_unit_modules"] == [Block]
    policy = package.options["mixed_precision_policy"]
    assert vars(policy) == dict.fromkeys(("main_params_dtype", "main_grads_dtype", "grad_comm_dtype"), torch.float32)


def test_the_step_that_makes_states_does_not_count() -> None:
    parameters = [nn.Parameter(torch.linspace(1, 2, 5)) for _ in range(2)]
    adopted, fresh = (torch.optim.AdamW([each], lr=0.1, weight_decay=0.5) for each in parameters)
    adopt_optimizer(ProxyParameter(), adopted)
    assert torch.equal(*parameters)
    for parameter, optimizer in zip(parameters, (adopted, fresh), strict=True):
        parameter.grad = torch.linspace(-1, 1, 5)
        optimizer.step()
    assert torch.equal(*parameters)


def train(ctx: RankContext) -> dict[str, list[float]]:
    """Losses of the rows that a stand-in can train, with the real loop around it."""
    package: Any = ProxyParameter()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("benchmarks.gpu_training.load", lambda _: package)
        patch.setattr("benchmarks.gpu_training.BUILDERS", {name: BUILDERS[name] for name in ("plain", *ENGINES)})
        rows = list(compare_engines(SIZES["tiny"], CPU, Rounds(rounds=1, warm_up=1, steps=2), lambda _: None))
    assert not any(row["problem"] for row in rows), rows
    assert package.options["zero_dp_strategy"] == "no_shard"
    return {row["engine"]: row["losses"][0] for row in rows}


def test_its_rows_are_trained_as_the_others(ranks: RankPool) -> None:
    (losses,) = ranks(1, train, default_group=False)
    assert list(losses) == ["plain", *ENGINES]
    assert losses["plain"][0] == losses["megatron-fsdp"][0]
