"""Does `fabric.save` write what others read, and does `fabric.load` restore in place what others wrote?"""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import TorchCheckpointIO
from torch import Tensor, nn

from mics_strategy.errors import CheckpointError, ConfigError
from mics_strategy.lightning import MiCSStrategy
from tests.lightning.fabric_runs import adamw, launched, mics, train, values
from tests.lightning.modules import Net, Regression, loader
from tests.lightning.runs import assert_same, full, run, trainer
from tests.ranks import RankContext, RankPool, raises_on_every_rank


class Renaming(TorchCheckpointIO):
    """A plug-in of the user's, whose files are not what they seem."""

    def load_checkpoint(self, path: Any, **options: Any) -> Any:
        return super().load_checkpoint(Path(path).with_suffix(".real"), **options)


class Counter:
    """Something with a state."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def _strategy(name: str) -> Any:
    return mics("mics", state_dict_type="sharded") if name == "sharded" else name


def _ready(ctx: RankContext, name: str) -> tuple[Any, dict[str, Any]]:
    """Fabric, and a state that is not trained."""
    fabric = launched(ctx, _strategy(name))
    net = Net()
    model, optimizer = fabric.setup(net, adamw(net))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    state = {"net": model, "adamw": optimizer, "schedule": scheduler, "counter": Counter(), "step": 0, "ema": None}
    return fabric, state


def _moments(optimizer: Any) -> list[Tensor]:
    groups = optimizer.optimizer.param_groups
    return [full(optimizer.optimizer.state[p]["exp_avg_sq"]).clone() for group in groups for p in group["params"]]


def _saved(ctx: RankContext, name: str, path: Path) -> tuple[dict[str, Tensor], list[Tensor]]:
    fabric, state = _ready(ctx, name)
    train(fabric, state["net"], state["adamw"], 16)
    state["schedule"].step()
    state.update(counter=Counter(5), step=7, ema=torch.arange(3.0))
    fabric.save(path, state)
    return values(state["net"]), _moments(state["adamw"])


def _resumed(ctx: RankContext, name: str, path: Path) -> tuple[dict[str, Tensor], list[Tensor], dict[str, Tensor]]:
    """What was loaded, and what it becomes in a step."""
    fabric, state = _ready(ctx, name)
    model, optimizer = state["net"], state["adamw"]
    remainder = fabric.load(path, state)
    assert remainder == {}
    assert state["net"] is model
    assert state["adamw"] is optimizer
    assert (state["counter"].count, state["step"], state["ema"].tolist()) == (5, 7, [0.0, 1.0, 2.0])
    assert [group["lr"] for group in optimizer.param_groups] == [0.005, 0.005]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert state["schedule"].last_epoch == 1
    loaded, moments = values(model), _moments(optimizer)
    torch.manual_seed(0)
    x = torch.randn(4, 6)
    for _ in range(2):
        fabric.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return loaded, moments, values(model)


KINDS = ["ddp", "mics", "sharded"]


# DDP reads no folders; `mics export` makes files of them.
PAIRS = [(a, b) for a in KINDS for b in KINDS if (a, b) not in {("ddp", "ddp"), ("sharded", "ddp")}]


@pytest.mark.wide(every=3)
@pytest.mark.parametrize(("writer", "reader"), PAIRS)
def test_training_resumes_from_each_others_checkpoints_exactly(
    ranks: RankPool, tmp_path: Path, writer: str, reader: str
) -> None:
    path = tmp_path / "saved"
    expected, expected_moments = run(ranks, 4, _saved, writer, path, ranks_per_node=2)[0]
    assert path.is_dir() == (writer == "sharded")
    loaded, moments, stepped = run(ranks, 4, _resumed, reader, path, ranks_per_node=2)[-1]
    assert_same(loaded, expected, tolerance=0)
    torch.testing.assert_close(moments, expected_moments, rtol=0, atol=0)
    for num_ranks in (2, 1) if reader == writer else (1,):  # other ranks, and a single device
        loaded_there, moments_there, stepped_there = run(ranks, num_ranks, _resumed, reader, path)[0]
        assert_same(loaded_there, expected, tolerance=0)
        torch.testing.assert_close(moments_there, expected_moments, rtol=0, atol=0)
        assert_same(stepped_there, stepped)


def test_the_file_is_the_one_that_ddp_writes(ranks: RankPool, tmp_path: Path) -> None:
    files = {}
    for name in ("ddp", "mics"):
        run(ranks, 2, _saved, name, tmp_path / name)
        files[name] = torch.load(tmp_path / name, weights_only=True)
    found, expected = files["mics"], files["ddp"]
    assert list(found) == list(expected)
    assert_same(found["net"], expected["net"])
    assert found["adamw"]["param_groups"] == expected["adamw"]["param_groups"]
    torch.testing.assert_close(found["adamw"]["state"], expected["adamw"]["state"])
    Net().load_state_dict(found["net"])


def _partly(ctx: RankContext, name: str) -> None:
    path = ctx.tmp_path / "saved"
    _saved(ctx, name, path)
    fabric, state = _ready(ctx, name)
    with pytest.raises(KeyError, match="'coconut' that does not exist"):
        fabric.load(path, {**state, "coconut": 11})
    assert (values(state["net"])["0.offset"] == Net().offset).all()  # nothing was changed
    wanted = {"coconut": 11, "step": 0, "net": state["net"]}
    remainder = fabric.load(path, wanted, strict=False)
    assert (wanted["coconut"], wanted["step"]) == (11, 7)
    expected = {"schedule", "counter", "ema"} | ({"adamw"} if name == "mics" else set())
    assert set(remainder) == expected
    only_optimizer = {"adamw": state["adamw"]}
    fabric.load(path, only_optimizer)
    assert _moments(state["adamw"])[0].any()
    values_only = {"step": 0}
    fabric.load(path, values_only)
    assert values_only == {"step": 7}
    if name == "mics":
        assert list(fabric.load(path)["net"]) == list(Net().state_dict())


@pytest.mark.parametrize("name", ["mics", "sharded"])
def test_what_is_missing_is_refused_or_left_and_the_rest_is_returned(ranks: RankPool, name: str) -> None:
    run(ranks, 2, _partly, name)


def _overwritten(ctx: RankContext) -> None:
    path = ctx.tmp_path / "saved"
    _saved(ctx, "mics", path)
    fabric, state = _ready(ctx, "mics")
    everything = fabric.load(path)
    fabric.load(path, state)
    fabric.barrier()
    if ctx.rank == 0:
        path.write_bytes(b"")  # pages of a mapped file would be gone
    fabric.barrier()
    assert everything["net"]["offset"].isfinite().all()
    assert state["ema"].tolist() == [0.0, 1.0, 2.0]
    train(fabric, state["net"], state["adamw"], 8)


def test_what_was_loaded_outlives_the_file(ranks: RankPool) -> None:
    run(ranks, 2, _overwritten)


def _raw(ctx: RankContext) -> None:
    fabric, state = _ready(ctx, "mics")
    model, optimizer = state["net"], state["adamw"]
    folder_state = _saved(ctx, "sharded", ctx.tmp_path / "folder")
    _saved(ctx, "mics", ctx.tmp_path / "saved")
    saved = torch.load(ctx.tmp_path / "saved", weights_only=True)
    if ctx.rank == 0:
        torch.save(saved["net"], ctx.tmp_path / "net.pt")
        torch.save(saved["net"], ctx.tmp_path / "old.pt", _use_new_zipfile_serialization=False)
        torch.save(saved["adamw"], ctx.tmp_path / "adamw.pt")
        torch.save({"offset": torch.ones(2)}, ctx.tmp_path / "part.pt")
    fabric.barrier()
    fabric.load_raw(ctx.tmp_path / "net.pt", model)
    assert_same(values(model), {f"0.{name}": value for name, value in saved["net"].items()}, tolerance=0)
    with pytest.raises(CheckpointError, match=r"older than torch 1\.6"):
        fabric.load_raw(ctx.tmp_path / "old.pt", model)
    fabric.load_raw(ctx.tmp_path / "adamw.pt", optimizer)
    torch.testing.assert_close(_moments(optimizer)[0], saved["adamw"]["state"][0]["exp_avg_sq"], rtol=0, atol=0)
    with pytest.raises(RuntimeError, match=r"layers\.0\.up\.weight"):
        fabric.load_raw(ctx.tmp_path / "part.pt", model)
    fabric.load_raw(ctx.tmp_path / "part.pt", model, strict=False)
    assert values(model)["0.offset"].tolist() == [1.0, 1.0]
    fabric.load_raw(ctx.tmp_path / "folder", model)
    assert_same(values(model), folder_state[0], tolerance=0)
    with pytest.raises(ConfigError, match=r"is a folder.*AdamW.*mics export"):
        fabric.load_raw(ctx.tmp_path / "folder", optimizer)
    plain = nn.Linear(2, 2)
    if ctx.rank == 0:
        torch.save({"weight": torch.ones(2, 2), "bias": torch.ones(2)}, ctx.tmp_path / "plain.pt")
    fabric.barrier()
    fabric.load_raw(ctx.tmp_path / "plain.pt", plain)
    assert plain.bias.tolist() == [1.0, 1.0]


def _through_a_plugin(ctx: RankContext) -> list[float]:
    fabric = launched(ctx, plugins=[Renaming()])
    model = fabric.setup(Net())
    if ctx.rank == 0:
        torch.save({"offset": torch.ones(2)}, ctx.tmp_path / "part.real")
    fabric.barrier()
    fabric.load_raw(ctx.tmp_path / "part.seeming", model, strict=False)
    return values(model)["0.offset"].tolist()


def test_files_are_read_through_the_plugin_of_the_user(ranks: RankPool) -> None:
    assert run(ranks, 2, _through_a_plugin) == [[1.0, 1.0]] * 2


def test_raw_states_are_loaded(ranks: RankPool) -> None:
    run(ranks, 2, _raw)


def _filtered(ctx: RankContext, name: str) -> list[str]:
    fabric, state = _ready(ctx, name)
    path = ctx.tmp_path / "part"
    del state["adamw"]
    state["table"] = {"a": 1, "b": 2}
    filters = {"net": lambda key, _: "bias" in key, "table": lambda key, _: key == "a"}
    fabric.save(path, state, filter=filters)
    with torch.no_grad():
        for parameter in state["net"].parameters():
            parameter.zero_()
    state["table"] = None
    fabric.load(path, state, strict=False)
    assert state["table"] == {"a": 1}
    return [key for key, value in values(state["net"]).items() if value.any()]


@pytest.mark.parametrize("name", ["mics", "sharded"])
def test_filters_choose_what_is_saved(ranks: RankPool, name: str) -> None:
    expected = [f"0.{key}" for key, value in Net().named_parameters() if "bias" in key and value.any()]
    assert run(ranks, 2, _filtered, name)[0] == expected


def _several_models(ctx: RankContext, name: str) -> None:
    fabric, state = _ready(ctx, name)
    other = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model, optimizer = fabric.setup(other, torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9))
    state.update(other=model, sgd=optimizer, plain=nn.Linear(1, 1))
    fabric.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    expected = values(state["net"], model)
    fabric.save(ctx.tmp_path / "several", state)
    with torch.no_grad():
        for parameter in [*model.parameters(), *state["net"].parameters()]:
            parameter.zero_()
    fabric.load(ctx.tmp_path / "several", state)
    assert_same(values(state["net"], model), expected, tolerance=0)


def test_a_file_holds_several_models_and_a_folder_one(ranks: RankPool) -> None:
    run(ranks, 2, _several_models, "mics")
    message = r"one sharded model, but the state to be saved has 2 \('net', 'other'\)"
    raises_on_every_rank(lambda: run(ranks, 2, _several_models, "sharded"), ConfigError, message)


def _fails(ctx: RankContext, what: str) -> None:
    name = "sharded" if "folder" in what else "mics"
    fabric, state = _ready(ctx, name)
    path = ctx.tmp_path / "here"
    if what == "directory in the way":
        path.mkdir(exist_ok=True)
        fabric.save(path, state)
    elif what == "file that cannot be written":
        (ctx.tmp_path / "file").write_text("")
        fabric.save(ctx.tmp_path / "file" / "model", state)
    elif what == "folder that cannot be written":
        (ctx.tmp_path / "file").write_text("")
        fabric.save(ctx.tmp_path / "file" / "model", state)
    elif what == "remote folder":
        fabric.save("gs://bucket/model", state)
    elif what == "part of an optimizer in a folder":
        fabric.save(path, state, filter={"adamw": lambda *_: False})
    elif what == "nothing there":
        fabric.load(ctx.tmp_path / "nothing", state)
    elif what == "no checkpoint":
        (ctx.tmp_path / "empty").mkdir(exist_ok=True)
        fabric.load(ctx.tmp_path / "empty", state)
    elif what == "storage options":
        fabric.strategy.save_checkpoint(path, state, storage_options={"a": 1})
    elif what == "missing on one rank":
        own = ctx.tmp_path / f"model-{ctx.rank}"
        fabric.strategy.broadcast = lambda value, src=0: value
        if ctx.rank == 0:
            torch.save({"step": 1}, own)
        fabric.load(own, {"step": 0})
    elif what == "other keys":
        fabric.save(path, {**state, f"of rank {ctx.rank}": 1})
    elif what == "objects":
        if ctx.rank == 0:
            torch.save({"step": Counter()}, path)
        fabric.barrier()
        fabric.load(path, {"step": 0})


@pytest.mark.parametrize(
    ("what", "kind", "message"),
    [
        ("directory in the way", IsADirectoryError, "is a directory, but the checkpoint is one file"),
        ("file that cannot be written", Exception, "file"),
        ("folder that cannot be written", CheckpointError, "file"),
        ("remote folder", CheckpointError, "is not in a file system"),
        ("part of an optimizer in a folder", ConfigError, "selects a part of an optimizer"),
        ("nothing there", Exception, "nothing"),
        ("no checkpoint", CheckpointError, "empty"),
        ("storage options", TypeError, "storage_options"),
        ("missing on one rank", Exception, "model-1"),
        ("other keys", Exception, "the keys .* on rank 0"),
        ("objects", CheckpointError, r"not plain data.*weights_only=False"),
    ],
)
def test_failures_reach_every_rank(ranks: RankPool, what: str, kind: type[Exception], message: str) -> None:
    raises_on_every_rank(lambda: run(ranks, 2, _fails, what), kind, message)


def _objects(ctx: RankContext) -> None:
    fabric, _ = _ready(ctx, "mics")
    if ctx.rank == 0:
        torch.save({"counter": Counter(3)}, ctx.tmp_path / "objects")
    fabric.barrier()
    assert fabric.load(ctx.tmp_path / "objects", weights_only=False)["counter"].count == 3


def test_objects_are_loaded_with_permission(ranks: RankPool) -> None:
    run(ranks, 2, _objects)


def _from_a_trainer(ctx: RankContext, kind: str) -> None:
    fitting = trainer(ctx, MiCSStrategy("mics", state_dict_type=kind), max_steps=2)
    fitting.fit(Regression("adamw"), loader())
    fitting.save_checkpoint(ctx.tmp_path / "saved")
    expected = fitting.strategy.sharded.full_state_dict()
    fabric = launched(ctx)
    net = Regression()
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters()))
    state = {"state_dict": model, "optimizer": optimizer, "global_step": 0}
    if kind == "full":  # optimizers are in a list there
        del state["optimizer"]
    remainder = fabric.load(ctx.tmp_path / "saved", state)
    assert state["global_step"] == 2
    assert "loops" in remainder
    found = fabric.strategy.sharded_of(model).full_state_dict()
    assert_same(found, expected, tolerance=0)
    fabric.load_raw(ctx.tmp_path / "saved", model)


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_checkpoints_of_a_trainer_are_read(ranks: RankPool, kind: str) -> None:
    run(ranks, 2, _from_a_trainer, kind)


def _kept_in_memory(ctx: RankContext) -> None:
    fabric, state = _ready(ctx, "mics")
    model, optimizer = state["net"], state["adamw"]
    train(fabric, model, optimizer, 8)
    expected = values(model)
    kept = {name: value.clone() for name, value in model.state_dict().items()}, optimizer.state_dict()
    train(fabric, model, optimizer, 8)
    model.load_state_dict(kept[0])
    optimizer.load_state_dict(kept[1])
    assert_same(values(model), expected, tolerance=0)


def test_state_dicts_go_back_where_they_came_from(ranks: RankPool) -> None:
    run(ranks, 2, _kept_in_memory)


def _asynchronous(ctx: RankContext) -> None:
    fabric = launched(ctx, mics("mics", state_dict_type="sharded", save_asynchronously=True))
    net = Net()
    model, optimizer = fabric.setup(net, adamw(net))
    train(fabric, model, optimizer, 8)
    expected = values(model)
    fabric.save(ctx.tmp_path / "step-1", {"model": model, "optimizer": optimizer, "step": 1})
    train(fabric, model, optimizer, 8)
    state = {"model": model, "optimizer": optimizer, "step": 0}
    fabric.load(ctx.tmp_path, state)  # waits, and takes the newest in the folder
    assert state["step"] == 1
    assert_same(values(model), expected, tolerance=0)


def _averaged(ctx: RankContext, kind: str) -> None:
    fabric, state = _ready(ctx, kind)
    model = state["net"]
    average = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    fabric.save(ctx.tmp_path / "saved", {**state, "average": average})
    loaded = {**state, "average": None}
    fabric.load(ctx.tmp_path / "saved", loaded)
    for name, parameter in model.named_parameters():
        assert torch.equal(loaded["average"][name], parameter.full_tensor())


@pytest.mark.parametrize("kind", ["mics", "sharded"])
def test_sharded_tensors_beside_a_model_are_saved_whole(ranks: RankPool, kind: str) -> None:
    run(ranks, 2, _averaged, kind)


def test_before_launch_lightning_says_what_to_call(tmp_path: Path) -> None:
    fabric, path = Fabric(accelerator="cpu", devices=1, strategy="mics"), tmp_path / "plain.ckpt"
    with pytest.raises(RuntimeError, match=r"you must call `.launch\(\)`"):
        fabric.save(path, {"step": 3})
    with pytest.raises(RuntimeError, match=r"you must call `.launch\(\)`"):
        fabric.load(path)


def test_training_goes_on_while_a_folder_is_written(ranks: RankPool) -> None:
    run(ranks, 2, _asynchronous)
