"""A training script that knows nothing of MiCS: what users have. Each rank writes what it saw, rank 0 the weights."""

import json
import os
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def made() -> tuple[nn.Module, torch.optim.Optimizer, TensorDataset]:
    """A model of three layers, an optimizer and 16 samples, the same on every rank."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    data = TensorDataset(torch.randn(16, 4), torch.randn(16, 2))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4), data


def trained_alone(batch_size: int) -> dict[str, torch.Tensor]:
    """What one process makes of whole batches."""
    model, optimizer, data = made()
    for inputs, wanted in DataLoader(data, batch_size=batch_size):
        nn.functional.mse_loss(model(inputs), wanted).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


def main(folder: Path) -> None:
    """Train with an Accelerator that nothing is said to."""
    accelerator = Accelerator()
    model, optimizer, data = made()
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=2))
    for inputs, wanted in loader:
        accelerator.backward(nn.functional.mse_loss(model(inputs).float(), wanted))
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    second = Accelerator()  # shares the state
    plan = second.state.fsdp_plugin.config.describe() if hasattr(accelerator, "handles") else None
    seen = {
        "class": [type(accelerator).__name__, type(second).__name__],
        "processes": accelerator.num_processes,
        "precision": accelerator.mixed_precision,
        "device": accelerator.device.type,
        "node": int(os.environ["GROUP_RANK"]),
        "config": plan,
        "arguments": sys.argv[1:],
    }
    if plan is not None:
        planned = accelerator.sharded_of(model).plan.collectives
        seen["collectives"] = sorted({(each.collective, each.axis, each.size) for each in planned})
    (folder / f"seen-{accelerator.process_index}.json").write_text(json.dumps(seen))
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        torch.save(state, folder / "model.pt")
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
