"""Plain data parallel training with Accelerate: `accelerate launch --num_processes 2 accelerate_ddp.py`."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(gradient_accumulation_steps=2)
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(64, 32), *(nn.Linear(32, 32) for _ in range(4)), nn.Linear(32, 64))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = DataLoader(TensorDataset(torch.randint(64, (40, 8))), batch_size=1)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
for (tokens,) in data:
    with accelerator.accumulate(model):
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
accelerator.save_state("state")
print(f"rank {accelerator.process_index}: loss {loss.item():.4f}")
accelerator.end_training()
