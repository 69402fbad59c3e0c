"""Do snapshots in host memory work in a loop with an `Accelerator`?"""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from mics_strategy import MemorySnapshots
from tests.accelerate.runs import accelerator, forget, run
from tests.ranks import RankContext, RankPool

NUM_STEPS, DIES_AT, EVERY = 8, 6, 4


def train(folder: str, stop_at: int, *, job: str) -> tuple[list[tuple[int, float]], list[bytes]]:
    """Run steps of one epoch until one, and leave the snapshots; returns what each step saw, and the weights."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    acc: Any = accelerator("zero3", units=[nn.Linear])
    values = torch.arange(2 * NUM_STEPS * 2 * 4, dtype=torch.float32).view(-1, 4) / 64
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    model, optimizer, loader = acc.prepare(model, optimizer, DataLoader(TensorDataset(values), batch_size=2))
    snapshots = MemorySnapshots(acc.sharded_of(model), [optimizer.optimizer], every=EVERY, job=job, folder=folder)
    state = snapshots.load({"step": 0})
    step, seen = state["step"], []
    if "scheduler" in state:
        scheduler.load_state_dict(state["scheduler"])
    for (batch,) in acc.skip_first_batches(loader, step):
        loss = model(batch).square().mean()
        acc.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        seen.append((step, loss.item()))
        step += 1
        snapshots.after_step(lambda step=step: {"step": step, "scheduler": scheduler.state_dict()})
        if step == stop_at:
            break
    weights = [parameter.to_local().detach().numpy().tobytes() for parameter in model.parameters()]
    snapshots.close(keep=stop_at < NUM_STEPS)
    return seen, weights


def die_and_continue(ctx: RankContext, folder: str) -> Any:

    results = []
    for stop_at, job in ((NUM_STEPS, "whole"), (DIES_AT, "dies"), (NUM_STEPS, "dies")):
        results.append(train(folder, stop_at, job=job))
        forget()
    return results


def test_a_loop_with_accelerate_continues(ranks: RankPool, tmp_path: Path) -> None:
    for whole, _, continued in run(ranks, 2, die_and_continue, str(tmp_path)):
        assert [step for step, _ in continued[0]] == list(range(EVERY, NUM_STEPS))
        assert continued[0] == whole[0][EVERY:]
        assert continued[1] == whole[1]
