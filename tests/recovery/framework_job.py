"""A rank of a training by a framework: ``python -m tests.recovery.framework_job NAME FOLDER DIES`` of two ranks.

The ranks in DIES (such as 1 or 01) kill themselves in front of step 9. What it prints as losses are bits of rank 0.
"""

import os
import signal
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset

from mics_strategy import restart_on_loss

NAME, FOLDER, DIES = sys.argv[1:]
FIRST_RANK = os.environ["RANK"]
NUM_STEPS, DIES_IN = 16, 9


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Random rows."""

    def __init__(self) -> None:
        self._rows = torch.randn(128, 8, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"values": self._rows[index]}


class Model(nn.Module):
    """A small model with dropout, which prints its losses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, values: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = nn.functional.dropout(torch.tanh(self.first(values)), 0.2, training=self.training)
        loss = (self.second(hidden) - values).square().mean()
        if dist.get_rank() == 0:
            print("loss", loss.item().hex(), flush=True)
        return {"loss": loss}


def strike(step: int) -> None:
    """Die here, if this is the rank and the step."""
    if FIRST_RANK in DIES and step == DIES_IN:
        time.sleep(1.0)  # until the snapshot is whole
        os.kill(os.getpid(), signal.SIGKILL)


def train() -> None:
    """Train by the framework, from the newest snapshot."""
    torch.manual_seed(0)
    {"lightning": train_by_lightning, "transformers": train_by_transformers}[NAME]()


def train_by_lightning() -> None:
    """Lightning's Trainer."""
    import lightning
    from torch.utils.data import DataLoader

    from mics_strategy.lightning import MiCSStrategy

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()

        def training_step(self, batch: dict[str, torch.Tensor], index: int) -> Any:
            strike(self.global_step)
            return self.model(**batch)["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    trainer = lightning.Trainer(
        strategy=MiCSStrategy("zero3", recovery={"every": 2, "job": "job", "folder": FOLDER}),
        accelerator="cpu",
        devices=1,
        num_nodes=dist.get_world_size(),
        max_steps=NUM_STEPS,
        default_root_dir=FOLDER,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    print("places", trainer.global_rank, trainer.world_size, flush=True)
    trainer.fit(Module(), DataLoader(Rows(), batch_size=4))


def train_by_transformers() -> None:
    """The Trainer of transformers, as `accelerate launch` starts it."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Strike(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            strike(state.global_step)

    arguments = TrainingArguments(
        output_dir=FOLDER,
        max_steps=NUM_STEPS,
        per_device_train_batch_size=4,
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(model=Model(), args=arguments, train_dataset=Rows(), callbacks=[Strike()])
    print("places", trainer.accelerator.process_index, trainer.accelerator.num_processes, flush=True)
    trainer.train()


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    restart_on_loss(train)
    os._exit(0)  # its own end is not under test
