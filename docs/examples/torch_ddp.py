"""Plain data parallel training with torch: `torchrun --nproc-per-node 2 torch_ddp.py`."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(64, 32), *(nn.Linear(32, 32) for _ in range(4)), nn.Linear(32, 64)).to(device)
model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
tokens = torch.randint(64, (20, 8), generator=torch.Generator().manual_seed(dist.get_rank())).to(device)
for step in range(20):
    logits = model(tokens[step : step + 1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[step])
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
print(f"rank {dist.get_rank()}: loss {loss.item():.4f}")
dist.destroy_process_group()
