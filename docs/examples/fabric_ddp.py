"""Plain data parallel training with Fabric: `python fabric_ddp.py`."""

import torch
from lightning.fabric import Fabric
from torch import nn

fabric = Fabric(strategy="ddp", accelerator="cpu", devices=2)
fabric.launch()
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(64, 32), *(nn.Linear(32, 32) for _ in range(4)), nn.Linear(32, 64))
model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
tokens = torch.randint(64, (20, 8), generator=torch.Generator().manual_seed(fabric.global_rank))
for step in range(20):
    loss = nn.functional.cross_entropy(model(tokens[step : step + 1]).flatten(0, 1), tokens[step])
    fabric.backward(loss)
    fabric.clip_gradients(model, optimizer, max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()
print(f"rank {fabric.global_rank}: loss {loss.item():.4f}")
