"""How is the task run through each adapter, as a user would write it?

Every function trains from the start, or resumes the checkpoint in the folder, and writes its result after each epoch.
"""

import os
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning.pytorch
import pytorch_lightning
import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator
from lightning.fabric import Fabric
from torch import Tensor

from mics_strategy import load_checkpoint, save_checkpoint, shard
from mics_strategy.accelerate import MiCSPlugin
from mics_strategy.lightning import MiCSFabricStrategy
from tests.lightning.runs import full
from tests.ranks import RankContext
from tests.scenario.task import (
    CLIP,
    EPOCHS,
    MICRO_STEPS,
    SAMPLES,
    RankResult,
    Task,
    adamw,
    batches_of,
    eval_set,
    loader,
    sampled_loader,
    train_set,
)


def values(task: Task) -> dict[str, Tensor]:
    """The plain parameters. Collective."""
    return {name: full(parameter).clone() for name, parameter in task.named_parameters()}


def mean(value: float) -> float:
    """Over all ranks."""
    total = torch.tensor(value)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def plain(ctx: RankContext, task: Task, folder: Path, is_resumed: bool) -> RankResult:
    result, state = RankResult(), folder / "state"
    sharded = shard(task, "mics")
    optimizer = adamw(task)
    if is_resumed:
        load_checkpoint(state, sharded, [optimizer])
    for _ in range(int(is_resumed), EPOCHS):
        for index, batch in enumerate(batches_of(train_set(), ctx)):
            with sharded.micro_step(index % MICRO_STEPS, of=MICRO_STEPS):
                (task(**batch)["loss"] / MICRO_STEPS).backward()
            if index % MICRO_STEPS == MICRO_STEPS - 1:
                result.norms.append(sharded.clip_grad_norm_(CLIP).item())
                optimizer.step()
                optimizer.zero_grad()
        task.eval()
        losses = [task(**batch)["loss"].item() for batch in batches_of(eval_set(), ctx)]
        task.train()
        result.evaluations.append(mean(sum(losses) / len(losses)))
        save_checkpoint(state, sharded, [optimizer])
        result.losses = task.losses
        result.write(folder, ctx.rank)
    result.values = values(task)
    return result


def accelerate(ctx: RankContext, task: Task, folder: Path, is_resumed: bool) -> RankResult:
    result = RankResult()
    accelerator = Accelerator(fsdp_plugin=MiCSPlugin("mics"), gradient_accumulation_steps=MICRO_STEPS)
    model, optimizer, data, evaluation = accelerator.prepare(
        task, adamw(task), loader(train_set(), ctx.world_size), loader(eval_set(), ctx.world_size)
    )
    if is_resumed:
        accelerator.load_state(str(folder / "state"))
    for _ in range(int(is_resumed), EPOCHS):
        for batch in data:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch)["loss"])
                if accelerator.sync_gradients:
                    result.norms.append(accelerator.clip_grad_norm_(model.parameters(), CLIP).item())
                optimizer.step()
                optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            losses = [accelerator.gather_for_metrics(model(**batch)["loss"]).mean().item() for batch in evaluation]
        model.train()
        result.evaluations.append(sum(losses) / len(losses))
        accelerator.save_state(str(folder / "state"))
        result.losses = task.losses
        result.write(folder, ctx.rank)
    result.values = values(task)
    return result


def in_fabric(ctx: RankContext, task: Task, folder: Path, is_resumed: bool) -> RankResult:
    result = RankResult()
    strategy = MiCSFabricStrategy("mics", state_dict_type="sharded")
    fabric = Fabric(strategy=strategy, accelerator="cpu", devices=ctx.ranks_per_node, num_nodes=ctx.num_nodes)
    fabric.launch()
    model, optimizer = fabric.setup(task, adamw(task))
    data, evaluation = fabric.setup_dataloaders(
        loader(train_set(), ctx.world_size), loader(eval_set(), ctx.world_size), use_distributed_sampler=True
    )
    if is_resumed:
        fabric.load(folder / "state", {"model": model, "optimizer": optimizer})
    for _ in range(int(is_resumed), EPOCHS):
        for index, batch in enumerate(data):
            is_last = index % MICRO_STEPS == MICRO_STEPS - 1
            with fabric.no_backward_sync(model, enabled=not is_last):
                fabric.backward(model(**batch)["loss"] / MICRO_STEPS)
            if is_last:
                result.norms.append(fabric.clip_gradients(model, optimizer, max_norm=CLIP).item())
                optimizer.step()
                optimizer.zero_grad()
        model.eval()
        losses = [fabric.all_reduce(model(**batch)["loss"].detach()).item() for batch in evaluation]
        model.train()
        result.evaluations.append(sum(losses) / len(losses))
        fabric.save(folder / "state", {"model": model, "optimizer": optimizer})
        result.losses = task.losses
        result.write(folder, ctx.rank)
    result.values = values(task)
    return result


def in_lightning(ctx: RankContext, task: Task, folder: Path, is_resumed: bool) -> RankResult:
    return _train_with(lightning.pytorch, ctx, task, folder, is_resumed)


def in_pytorch_lightning(ctx: RankContext, task: Task, folder: Path, is_resumed: bool) -> RankResult:
    return _train_with(pytorch_lightning, ctx, task, folder, is_resumed)


def _train_with(namespace: ModuleType, ctx: RankContext, task: Task, folder: Path, is_resumed: bool) -> RankResult:
    result = RankResult()

    class Module(namespace.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.task = task

        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            return self.task(**batch)["loss"]

        def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
            self.log("loss", self.task(**batch)["loss"], sync_dist=True)

        def configure_optimizers(self) -> Any:
            return adamw(self)

    class Recorder(namespace.callbacks.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            result.evaluations.append(trainer.callback_metrics["loss"].item())
            result.losses = task.losses
            trainer.save_checkpoint(folder / "state.ckpt")
            result.write(folder, ctx.rank)

    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    trainer = namespace.Trainer(
        strategy="mics",
        accelerator="cpu",
        devices=ctx.ranks_per_node,
        num_nodes=ctx.num_nodes,
        max_epochs=EPOCHS,
        accumulate_grad_batches=MICRO_STEPS,
        gradient_clip_val=CLIP,
        num_sanity_val_steps=0,
        callbacks=[Recorder()],
        use_distributed_sampler=False,  # Lightning's shuffles what is trained on
        default_root_dir=folder,
        **quiet,
    )
    data = [sampled_loader(samples, ctx) for samples in (train_set(), eval_set())]
    trainer.fit(Module(), *data, ckpt_path=folder / "state.ckpt" if is_resumed else None)
    result.values = values(task)
    return result


class _Trainer(transformers.Trainer):
    """With the optimizer of the other adapters."""

    def create_optimizer(self, model: Any = None) -> Any:
        if self.optimizer is None:
            self.optimizer = adamw(self.model if model is None else model)
        return self.optimizer


def in_transformers(ctx: RankContext, task: Task, folder: Path, is_resumed: bool) -> RankResult:
    """As `accelerate launch --config_file mics.yaml` starts it. What it logs as norm depends on its version."""
    os.environ.update(ACCELERATE_USE_FSDP="true", FSDP_VERSION="mics", FSDP_SHARDING_STRATEGY="mics")
    result = RankResult()

    class Recorder(transformers.TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            result.evaluations.append(state.log_history[-1]["eval_loss"])
            result.losses = task.losses
            result.write(folder, ctx.rank)

    arguments = transformers.TrainingArguments(
        output_dir=str(folder / "trainer"),
        use_cpu=True,
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=SAMPLES // ctx.world_size,
        per_device_eval_batch_size=SAMPLES // ctx.world_size,
        gradient_accumulation_steps=MICRO_STEPS,
        max_grad_norm=CLIP,
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        save_strategy="epoch",
        eval_strategy="epoch",
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = _Trainer(task, arguments, train_dataset=train_set(), eval_dataset=eval_set(), callbacks=[Recorder()])
    trainer.train(resume_from_checkpoint=is_resumed)
    result.values = values(task)
    return result


ADAPTERS = {
    "torch": plain,
    "lightning": in_lightning,
    "pytorch_lightning": in_pytorch_lightning,
    "fabric": in_fabric,
    "accelerate": accelerate,
    "transformers": in_transformers,
}
