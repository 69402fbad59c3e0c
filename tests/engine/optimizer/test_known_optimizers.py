"""Every optimizer of torch, schedulefree and pytorch_optimizer trains as in one process, or is refused.

In fp64, and with steps after a spike of the gradients: an update that depends on a norm only above a threshold, or only
after some steps, then differs from the update in one process.
"""

import inspect
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_optimizer
import schedulefree
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mics_strategy import ShardConfig, shard
from mics_strategy.checkpoint.save import save_checkpoint
from mics_strategy.engine.optimizer.locality import UpdateLocality, locality_by_group
from mics_strategy.errors import CheckpointError, ConfigError, LifecycleError
from tests.engine.training import wholes
from tests.ranks import RankContext, RankPool

SCALES = (1, 1, 5, 1, 200, 1, 1e-3, 1e-3, 50, 1, 1, 20, 1, 1)
LAYOUTS = {UpdateLocality.ELEMENTWISE: "rows", UpdateLocality.PER_TENSOR: "tensors"}
REFERENCES = ("Closure", "SAM", "AliG", "LBFGS")  # parts of names of optimizers that want a closure
STEPS_ANOTHER = "FriendlySAM LookSAM Lookahead Magma OrthoGrad PCGrad SAM ScheduleFreeWrapper TRAC"
# Take a model or a process group, or have loops of their own. DeMo needs a package that the tests do not install.
NOT_BUILT = "AdaLOMO AdamMini LOMO DeMo DistributedMuon GSAM SafeFP16Optimizer WSAM"


def named(package: str, names: str) -> list[str]:
    return [f"{package}.{name}" for name in names.split()]


def classes() -> dict[str, type[Optimizer]]:
    found = {}
    for package in (torch.optim, schedulefree, pytorch_optimizer):
        for name, value in vars(package).items():
            if isinstance(value, type) and issubclass(value, Optimizer) and value is not Optimizer:
                found.setdefault(value, f"{package.__name__}.{name}")
    return {name: value for value, name in found.items()}


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def make(name: str, parameters: list[nn.Parameter], **options: Any) -> Any:
    cls: Any = classes()[name]
    accepted = inspect.signature(cls.__init__).parameters
    chosen = {"lr": 0.01, "num_iterations": 28, "num_data": 8, "base_optimizer": torch.optim.AdamW}
    options |= {option: value for option, value in chosen.items() if option in accepted}
    matrices, others = [p for p in parameters if p.dim() == 2], [p for p in parameters if p.dim() != 2]
    if "muon" in cls.__module__:
        return cls([{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False}], **options)
    if name in ("torch.optim.Muon", "pytorch_optimizer.SpectralSphere"):
        return cls(matrices, **options)
    if not {"optimizer", "base"}.isdisjoint(accepted):
        return cls(torch.optim.AdamW(parameters, lr=0.01), **options)
    return cls(parameters, **options)


def train(name: str, model: nn.Module, ranks: list[int], num_steps: int) -> list[Tensor]:
    optimizer = make(name, list(model.parameters()))
    if hasattr(optimizer, "train"):
        optimizer.train()

    def closure(step: int) -> Tensor:
        optimizer.zero_grad()
        for rank in ranks:
            generator = torch.Generator().manual_seed(10 * step + rank)
            loss = model(torch.randn(4, 6, generator=generator, dtype=torch.float64)).square().mean()
            (loss * SCALES[step % len(SCALES)] / len(ranks)).backward()
        return loss.detach()

    for step in range(num_steps):
        if any(part in name for part in REFERENCES):
            optimizer.step(partial(closure, step))
        else:
            closure(step)
            optimizer.step()
    return [*wholes(dict(model.named_parameters())).values()]


def locality_of(name: str) -> UpdateLocality | None:
    """The largest of its groups; None where it is not known."""
    try:
        return max(locality_by_group(make(name, list(build().parameters())), "auto"))
    except ConfigError:
        return None


def train_each(ctx: RankContext, layouts: dict[str, str], num_steps: int) -> dict[str, list[Tensor] | Exception]:
    found: dict[str, list[Tensor] | Exception] = {}
    for name, layout in layouts.items():
        model = build()
        shard(model, ShardConfig(optimizer_layout=layout, replica_check="never"))
        try:
            found[name] = train(name, model, [ctx.rank], num_steps)
        except (ConfigError, RuntimeError, AssertionError, UserWarning) as error:
            found[name] = error
    return found


def differing(found: dict[str, Any], num_steps: int) -> dict[str, Any]:
    """Relative distance, or the error, of those that did not train as in one process."""
    worst: dict[str, Any] = {}
    for name, values in found.items():
        expected = train(name, build(), [0, 1], num_steps)
        worst[name] = values if isinstance(values, Exception) else max(map(distance, values, expected))
        assert any(map(distance, expected, build().parameters())), f"{name} changes nothing"
    return {name: value for name, value in worst.items() if isinstance(value, Exception) or not value < 1e-9}


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).detach().abs().max() / expected.detach().abs().max().clamp(min=1e-12))


def known() -> dict[str, str]:
    """The layout that each known optimizer needs."""
    skipped = named("pytorch_optimizer", f"{STEPS_ANOTHER} {NOT_BUILT}")
    localities = {name: locality_of(name) for name in classes() if name not in skipped}
    return {name: LAYOUTS[locality] for name, locality in localities.items() if locality in LAYOUTS}


@pytest.mark.slow
def test_known_optimizers_train_as_in_one_process(ranks: RankPool) -> None:
    layouts = known()
    assert list(layouts.values()).count("rows") >= 60
    assert list(layouts.values()).count("tensors") >= 40
    for found in ranks(2, train_each, layouts, 14):
        assert not differing(found, 14)


REPRESENTATIVES = {
    "torch.optim.Rprop": "rows",
    "torch.optim.Muon": "tensors",
    "schedulefree.AdamWScheduleFree": "rows",
    "pytorch_optimizer.Adan": "rows",
    "pytorch_optimizer.AdaShift": "tensors",
    "pytorch_optimizer.Muon": "tensors",
    "pytorch_optimizer.SAM": "rows",
}


def test_some_optimizers_train_as_in_one_process(ranks: RankPool) -> None:
    for found in ranks(2, train_each, REPRESENTATIVES, 12):
        assert not differing(found, 12)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["rows", "tensors"])
def test_all_others_are_refused(ranks: RankPool, layout: str) -> None:
    skipped = [*known(), *named("pytorch_optimizer", f"{STEPS_ANOTHER} {NOT_BUILT}")]
    others = [name for name in classes() if name not in skipped]
    assert len(others) >= 20
    for found in ranks(2, train_each, dict.fromkeys(others, layout), 1):
        assert [name for name, error in found.items() if not isinstance(error, ConfigError)] == []


@pytest.mark.slow
def test_optimizers_that_step_another_train_as_in_one_process(ranks: RankPool) -> None:
    for found in ranks(2, train_each, dict.fromkeys(named("pytorch_optimizer", STEPS_ANOTHER), "rows"), 14):
        assert not differing(found, 14)


def _step_alone(name: str, model: nn.Module, loss: Tensor) -> None:
    """A step of an optimizer that is not built and stepped as others are."""
    make = getattr(pytorch_optimizer, name)
    if name in ("LOMO", "AdaLOMO"):
        make(model).fused_backward(loss, lr=0.1)
    elif name == "SafeFP16Optimizer":
        make(torch.optim.SGD(model.parameters())).backward(loss)
    elif name == "WSAM":
        loss.backward()
        make(model, model.parameters(), torch.optim.SGD, lr=0.1).step(lambda: loss)
    elif name == "GSAM":
        base = torch.optim.SGD(model.parameters(), lr=0.1)
        rates = pytorch_optimizer.LinearScheduler(base, t_max=9, max_lr=0.1)
        radii = pytorch_optimizer.ProportionScheduler(rates, max_lr=0.1)
        made = make(model.parameters(), base_optimizer=base, model=model, rho_scheduler=radii)
        made.set_closure(nn.functional.mse_loss, torch.ones(2, 4), torch.ones(2, 4))
        made.step()
    else:
        loss.backward()
        make([{"params": [*model.parameters()], "use_muon": True}] if name == "DistributedMuon" else model).step()


def step_alone(ctx: RankContext) -> dict[str, str]:
    """Errors by optimizer."""
    found = {}
    for name in set(NOT_BUILT.split()) - {"DeMo"}:
        model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(6, 4, bias=False))
        shard(model, "zero3")
        try:
            _step_alone(name, model, model(torch.ones(2, 4)).square().mean())
            found[name] = ""
        except (ConfigError, LifecycleError, RuntimeError) as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


@pytest.mark.slow
def test_optimizers_with_loops_of_their_own_are_refused(ranks: RankPool) -> None:
    words = {
        "LOMO": "LifecycleError: A gradient hook on the sharded parameter",
        "AdaLOMO": "LifecycleError: A gradient hook on the sharded parameter",
        "AdamMini": "ConfigError: It is not known on which elements an update",
        "DistributedMuon": "ConfigError: DistributedMuon couples parameters",
        "GSAM": "LifecycleError: `c10d::allreduce_` got a sharded tensor",
        "WSAM": "LifecycleError: `c10d::allreduce_` got a sharded tensor",
        "SafeFP16Optimizer": "RuntimeError: Creating a Parameter from an instance of type ShardedParameter",
    }
    for found in ranks(2, step_alone):
        assert found.keys() == words.keys()
        for name, word in words.items():
            assert found[name].startswith(word), f"{name}: {found[name]}"


def keep_lookahead(ctx: RankContext, folder: Path) -> list[str]:
    plain = build()
    before, model = pytorch_optimizer.Lookahead(torch.optim.AdamW(plain.parameters())), build()
    handles = shard(plain, ShardConfig()), shard(model, ShardConfig())
    after = pytorch_optimizer.Lookahead(torch.optim.AdamW(model.parameters()))
    with pytest.raises(ConfigError) as adopting:
        handles[0].adopt(before)
    with pytest.raises(CheckpointError) as saving:
        save_checkpoint(folder, handles[1], [after])
    return [str(adopting.value), str(saving.value)]


def test_states_of_an_optimizer_in_another_are_not_lost(ranks: RankPool, tmp_path: Path) -> None:
    for errors in ranks(2, keep_lookahead, tmp_path / "saved"):
        assert all("Lookahead steps another optimizer, which holds states of its own" in error for error in errors)
