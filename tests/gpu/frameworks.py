"""Do the frameworks train on one device as on a plain one? One rank, so that what is shown is the way there.

``python -m tests.gpu.frameworks CASE [cuda|cpu]`` trains a small model twice with the same batches, plain and sharded,
and ends with an error where losses differ. World 1 sends nothing; devices, streams, precision, saving and the
frameworks' own ways to a GPU are those of every job.
"""

import os
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mics_strategy import finish_saves, load_newest_checkpoint, save_checkpoint, shard

WIDTH, STEPS = 64, 6
Losses = list[float]


class Layer(nn.Module):
    """x + tanh(linear)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(*(Layer() for _ in range(4)), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 1))


def batches(device: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(8, WIDTH, generator=generator).to(device) for _ in range(STEPS)]


def loss_of(module: nn.Module, batch: Tensor) -> Tensor:
    return (module(batch).float() - 1).square().mean()


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.01)


def loop(
    module: nn.Module, device: torch.device, scaler: torch.amp.GradScaler | None = None, **autocast: Any
) -> Losses:
    """Train a module in plain torch."""
    optimizer, losses = adamw(module), []
    for batch in batches(device):
        with torch.autocast(device.type, enabled=bool(autocast), **autocast):
            loss = loss_of(module, batch)
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def plain(device: torch.device, **autocast: Any) -> Losses:
    return loop(model().to(device), device, **autocast)


def grad_scaler(device: torch.device) -> tuple[Losses, Losses]:
    """fp16 under autocast, with dynamic loss scaling."""
    half = {"dtype": torch.float16 if device.type == "cuda" else torch.bfloat16}
    sharded = model()
    shard(sharded, "mics", units=[Layer], device=device)
    scalers = [torch.amp.GradScaler(device.type, enabled=device.type == "cuda") for _ in range(2)]
    return loop(sharded, device, scalers[0], **half), loop(model().to(device), device, scalers[1], **half)


def compiled(device: torch.device) -> tuple[Losses, Losses]:
    """Blocks compiled one by one; on a GPU as CUDA graphs."""
    sharded = model()
    shard(sharded, "mics", units=[Layer], device=device)
    for module in sharded.modules():
        if isinstance(module, Layer):
            module.compile(mode="reduce-overhead" if device.type == "cuda" else None)
    return loop(sharded, device), plain(device)


def checkpoint(device: torch.device) -> tuple[Losses, Losses]:
    """Saved in the background after half of the steps, loaded into another model, trained on."""

    def train(module: nn.Module, optimizer: torch.optim.Optimizer, steps: list[Tensor]) -> Losses:
        losses = []
        for batch in steps:
            loss = loss_of(module, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    half, steps, found = STEPS // 2, batches(device), []
    with tempfile.TemporaryDirectory() as folder:
        for part in (steps[:half], steps[half:]):
            module = model()
            handle = shard(module, "mics", units=[Layer], device=device)
            optimizer = adamw(module)
            if found:
                load_newest_checkpoint(folder, handle, [optimizer])
            found += train(module, optimizer, part)
            if len(found) == half:
                save_checkpoint(Path(folder, "saved"), handle, [optimizer], asynchronous=True)
                finish_saves(handle)
    return found, plain(device)


def lightning(device: torch.device) -> tuple[Losses, Losses]:
    """`Trainer(strategy=..., precision="bf16-mixed")`."""
    import lightning

    from mics_strategy.lightning import MiCSStrategy

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.losses = model(), []

        def training_step(self, batch: list[Tensor], _: int) -> Tensor:
            loss = loss_of(self.model, batch[0])
            self.losses.append(loss.detach())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return adamw(self)

    data = torch.utils.data.TensorDataset(torch.cat(batches(torch.device("cpu"))))
    module = Module()
    trainer = lightning.Trainer(
        accelerator="gpu" if device.type == "cuda" else "cpu",
        devices=1,
        strategy=MiCSStrategy("mics", units=[Layer], param_dtype="float32"),
        precision="bf16-mixed",
        max_epochs=1,
        use_distributed_sampler=False,  # it shuffles
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=8))
    return [loss.item() for loss in module.losses], plain(device, dtype=torch.bfloat16)


def accelerate(device: torch.device) -> tuple[Losses, Losses]:
    """`Accelerator(fsdp_plugin=MiCSPlugin(...))`."""
    from accelerate import Accelerator

    from mics_strategy.accelerate import MiCSPlugin

    accelerator = Accelerator(fsdp_plugin=MiCSPlugin("mics"), cpu=device.type == "cpu")
    prepared = model()
    prepared, optimizer = accelerator.prepare(prepared, adamw(prepared))
    losses = []
    for batch in batches(accelerator.device):
        loss = loss_of(prepared, batch)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, plain(device)


def transformers(device: torch.device) -> tuple[Losses, Losses]:
    """`transformers.Trainer` of a small GPT-2 under the plugin of the process."""
    from accelerate.state import AcceleratorState
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    from mics_strategy.accelerate import launch

    data = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 64, (2 * STEPS, 16)).tolist()]

    def train(folder: str, *, is_sharded: bool) -> Losses:
        torch.manual_seed(1)
        gpt = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2))
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=2,
            max_steps=STEPS,
            learning_rate=0.01,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            use_cpu=device.type == "cpu",
            disable_tqdm=True,
        )
        trainer = Trainer(gpt, arguments, train_dataset=data)
        trainer.train()
        assert isinstance(next(gpt.parameters()), DTensor) == is_sharded
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    with tempfile.TemporaryDirectory() as folder:
        expected = train(folder, is_sharded=False)
        AcceleratorState._reset_state(reset_partial_state=True)
        os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "mics"}
        launch.enable()
        return train(folder, is_sharded=True), expected


CASES: dict[str, Callable[[torch.device], tuple[Losses, Losses]]] = {
    each.__name__: each for each in (grad_scaler, compiled, checkpoint, lightning, accelerate, transformers)
}
OWN_GROUP = ("grad_scaler", "compiled", "checkpoint")


def main(case: str, kind: str = "cuda") -> None:
    """Train twice and compare."""
    device = torch.device(kind, 0) if kind == "cuda" else torch.device(kind)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    if case in OWN_GROUP:
        dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    found, expected = CASES[case](device)
    assert len(found) == len(expected) == STEPS
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=2e-2, atol=2e-2)
    print(case, found)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
