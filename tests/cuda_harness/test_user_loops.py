"""Does what users run race, or wait for the device: GradScaler, compiled layers, buffers, Lightning, Accelerate?"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate import Accelerator
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from mics_strategy.accelerate import MiCSPlugin
from mics_strategy.engine import grad_scaler
from mics_strategy.lightning import MiCSStrategy
from mics_strategy.topology import Topology
from tests.accelerate.runs import forget
from tests.cuda_harness.machine import Machine
from tests.cuda_harness.runs import WIDTH, Loop, Tower, Training, config_of, declared, one_of_many, run, start
from tests.cuda_harness.test_host_waits import START_UP
from tests.lightning.runs import utilities_rank_zero_only
from tests.rank_report import RankContext, node_environment

RANKS, PER_NODE = 8, 2
LONG = START_UP + 2  # steps
SCALER_READS = "`_local_scalar_dense`"  # a GradScaler asks whether any gradient overflowed: once for each optimizer
OPTIONS: dict[str, Any] = {"partition_size": "node", "topology": Topology(ranks_per_node=PER_NODE)}
NEITHER = pytest.mark.filterwarnings("ignore")  # frameworks warn of workers, of devices and of their own futures


def scaled(training: Training) -> None:
    """fp16 under autocast, with a scaler that grows its scale."""
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10, growth_interval=2)
    for _ in range(LONG):
        with training.machine.step():
            for micro in range(training.micro_steps):
                with training.sharded.micro_step(micro, of=training.micro_steps), torch.autocast("cuda", torch.float16):
                    loss = training.loss()
                scaler.scale(loss).backward()
            scaler.unscale_(training.optimizers[0])
            training.sharded.clip_grad_norm_(1.0)
            scaler.step(training.optimizers[0])
            scaler.update()
            training.optimizers[0].zero_grad()
        forget_start_up(training.machine)


def compiled(training: Training) -> None:
    """Layers compiled one by one, as torch advises."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for layer in training.model.layers:
        layer.compile(backend="aot_eager")
    for _ in range(LONG):
        training.step()
        forget_start_up(training.machine)
    assert torch._dynamo.utils.counters["frames"]["ok"]  # of graphs; Dynamo skips what it finds in other modes


def forget_start_up(machine: Machine) -> None:
    """Waits of the first steps are allowed."""
    if machine.step_number <= START_UP:
        machine.waits.clear()


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # Dynamo reads it of plain models, too
@pytest.mark.wide(every=3)
@pytest.mark.parametrize("preset", ["mics", "zero3", "zero2", "ddp", "zeropp", "paro-iig"])
@pytest.mark.parametrize(("loop", "waits"), [(scaled, [SCALER_READS]), (compiled, [])])
def test_scalers_and_compiled_layers_do_not_race(preset: str, loop: Loop, waits: list[str]) -> None:
    machine = run(config_of(preset), loop)
    assert machine.races == []
    assert [wait.partition(" of ")[0] for wait in machine.waits] == waits


def test_a_scaler_on_a_stream_of_its_own_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: it runs on a stream for which no other waits."""
    original = grad_scaler.unscale

    def on_another_stream(*args: Any) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            original(*args)

    monkeypatch.setattr("mics_strategy.engine.exact_dtensor.unscale", on_another_stream)
    assert run(config_of("mics"), scaled).races != []


@pytest.mark.parametrize("preset", ["mics", "ddp"])
def test_buffers_that_forwards_write_do_not_race(preset: str) -> None:
    """Large and small ones; rank 0's are sent while a forward may still read them."""
    with one_of_many() as machine:
        training = start(machine, config_of(preset), buffers=(100, 20_000))

        def write(module: nn.Module, *_: Any) -> None:
            for buffer in module.buffers():
                buffer.add_(1.0)

        training.model.register_forward_hook(write)
        declared(training)
    assert machine.races == []


# -- frameworks ---------------------------------------------------------------------------------------------


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    """Rank 0 of a job in nodes, as a launcher starts it."""
    place = node_environment(RankContext(rank=0, world_size=RANKS, ranks_per_node=PER_NODE, tmp_path=tmp_path))
    place |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    with mock.patch.dict(os.environ, place), one_of_many(RANKS) as made:  # both frameworks set more variables
        yield made
    forget()
    utilities_rank_zero_only.rank = 0


class Module(LightningModule):
    """A tower; logs its loss.

    Args:
        waits: Whether each step reads the loss on the host.
    """

    def __init__(self, waits: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.tower, self.waits = Tower(buffers=(100,)), waits

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        loss = self.tower(batch).square().mean()
        self.log("loss", loss)
        if self.waits:
            loss.item()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Steps(Callback):
    """Tell a machine what is a step."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def on_train_batch_start(self, *_: Any) -> None:
        self.step = self.machine.step()
        self.step.__enter__()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.step.__exit__(None, None, None)
        if trainer.global_step <= START_UP:
            self.machine.waits.clear()


def fit(machine: Machine, module: Module, preset: str, precision: Any, accumulation: int, folder: Path) -> None:
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    place = {"accelerator": "cuda", "devices": PER_NODE, "num_nodes": RANKS // PER_NODE, "default_root_dir": folder}
    trainer = Trainer(
        strategy=MiCSStrategy(preset, **OPTIONS),
        precision=precision,
        max_steps=LONG,
        gradient_clip_val=1.0,
        accumulate_grad_batches=accumulation,
        use_distributed_sampler=False,
        callbacks=[Steps(machine)],
        **quiet,
        **place,
    )
    trainer.fit(module, DataLoader(torch.randn(4 * LONG * accumulation, WIDTH), batch_size=4))


@NEITHER
@pytest.mark.parametrize(
    ("preset", "precision", "accumulation"),
    [("mics", "32-true", 1), ("mics", "16-mixed", 2), ("zero2", "bf16-mixed", 2), ("zero3", "16-mixed", 1)],
)
def test_a_trainer_neither_races_nor_waits(
    machine: Machine, tmp_path: Path, preset: str, precision: str, accumulation: int
) -> None:
    fit(machine, Module(), preset, precision, accumulation, tmp_path)
    assert machine.races == []
    assert machine.step_number == LONG * accumulation
    waits = [SCALER_READS] if precision == "16-mixed" else []
    assert [wait.partition(" of ")[0] for wait in machine.waits] == waits


@NEITHER
def test_a_training_step_that_waits_is_found(machine: Machine, tmp_path: Path) -> None:
    fit(machine, Module(waits=True), "mics", "32-true", 1, tmp_path)
    assert [wait.partition(" of ")[0] for wait in machine.waits] == [SCALER_READS]


@NEITHER
@pytest.mark.parametrize(
    ("preset", "precision", "accumulation"), [("mics", "no", 1), ("mics", "fp16", 2), ("zero2", "bf16", 2)]
)
@pytest.mark.parametrize("reads", [False, True], ids=["", "reads the loss"])
def test_an_accelerator_neither_races_nor_waits(
    machine: Machine, preset: str, precision: str, accumulation: int, reads: bool
) -> None:
    plugin = MiCSPlugin(preset, **OPTIONS)
    accelerator = Accelerator(fsdp_plugin=plugin, mixed_precision=precision, gradient_accumulation_steps=accumulation)
    assert accelerator.device == machine.device
    torch.manual_seed(3)
    tower = Tower(buffers=(100,))
    model, optimizer = accelerator.prepare(tower, torch.optim.AdamW(tower.parameters(), lr=0.01))
    batch = torch.randn(4, WIDTH).to(accelerator.device)
    for _ in range(LONG):
        with machine.step():
            for _ in range(accumulation):
                with accelerator.accumulate(model):
                    loss = model(batch).square().mean()
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
            if reads:
                loss.item()
        forget_start_up(machine)
    assert machine.races == []
    assert [wait.partition(" of ")[0] for wait in machine.waits] == [SCALER_READS] * ((precision == "fp16") + reads)
