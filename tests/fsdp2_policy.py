"""How does FSDP2 train under mixed precision?

Each block and the model are sharded by ``fully_shard`` with one `MixedPrecisionPolicy`, and the forward runs under
autocast, as in Lightning's and Accelerate's own strategies. It is the oracle for what the same flags mean here.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

WIDTH, VOCABULARY, LENGTH = 12, 17, 5
MAX_NORM = 0.1
Batch = tuple[Tensor, Tensor, Tensor]


class Fp32Gate(nn.Module):
    """A layer that computes in fp32, whatever autocast says."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return torch.sigmoid((x.float() * self.weight.float()).sum(-1, keepdim=True))


class Block(nn.Module):
    """A residual block that begins with a norm and ends with a gate in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 19), nn.Linear(19, WIDTH, bias=False)
        self.gate = Fp32Gate()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x)))) * self.gate(x).to(x.dtype)


class Tagger(nn.Module):
    """Tokens and features in, scores out; positions are an fp32 buffer, so the first block gets fp32."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            self.embedding = nn.Embedding(VOCABULARY, WIDTH)
            self.project = nn.Linear(3, WIDTH)
            self.register_buffer("positions", torch.randn(LENGTH, WIDTH))
            self.blocks = nn.ModuleList(Block() for _ in range(3))
            self.head = nn.Linear(WIDTH, VOCABULARY)
            self.scale = nn.Parameter(torch.tensor([1.3]))

    def forward(self, tokens: Tensor, features: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.project(features) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale


def loss_of(scores: Tensor, tokens: Tensor, target: Tensor) -> Tensor:
    """Two losses that a user computes outside of the model, one of them against fp32 targets."""
    return F.cross_entropy(scores.flatten(0, 1), tokens.flatten()) + F.mse_loss(scores.mean(-1), target)


def batches(rank: int) -> list[Batch]:
    """The four batches of a rank: tokens, features, fp32 targets that 16 bits do not hold."""
    generator = torch.Generator().manual_seed(100 + rank)
    draw = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    tokens = [torch.randint(VOCABULARY, (2, LENGTH), generator=generator) for _ in range(4)]
    return [(each, draw(2, LENGTH, 3), 1 + draw(2, LENGTH) * 1e-3) for each in tokens]


def trained_by_fsdp2(
    dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    *,
    loss_in_autocast: bool,
    scaler: Any = None,
    norms: list[float] | None = None,
    replicas: int = 1,
) -> tuple[dict[str, Tensor], list[float]]:
    """Parameters, and losses of steps of two micro-steps each and of an evaluation after them.

    Args:
        dtype: Dtype of gathers and of autocast.
        reduce_dtype: Dtype of reductions.
        loss_in_autocast: Whether the loss is computed under autocast, else from outputs in fp32.
        scaler: Scaler of the loss, or None.
        norms: Takes the gradient norms before clipping to `MAX_NORM`; None does not clip.
        replicas: Groups of ranks that each hold all shards (HSDP), which sum gradients in the last micro-step.
    """
    model = Tagger()
    mesh = mesh_of(replicas)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce_dtype)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.01), []
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
    for index, (tokens, features, target) in enumerate(batches(dist.get_rank())):
        model.set_requires_all_reduce(index % 2 == 1)
        with torch.autocast("cpu", dtype=dtype):
            scores = model(tokens, features)
            loss = loss_of(scores, tokens, target) if loss_in_autocast else None
        if loss is None:
            loss = loss_of(scores.float(), tokens, target)
        scaler.scale(loss / 2).backward()
        losses.append(loss.item())
        if index % 2 == 1:
            if norms is not None:
                norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).full_tensor().item())
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    values = full_values(model)  # an evaluation leaves the root unsharded
    with torch.no_grad(), torch.autocast("cpu", dtype=dtype):
        tokens, features, target = batches(dist.get_rank())[0]
        scores = model.eval()(tokens, features)
        scores = scores if loss_in_autocast else scores.float()
        with torch.autocast("cpu", dtype=dtype, enabled=loss_in_autocast):
            losses.append(loss_of(scores, tokens, target).item())
    return values, losses


def mesh_of(replicas: int = 1) -> DeviceMesh:
    """The mesh of `fully_shard`: of all ranks, or of replicas by shards."""
    size = dist.get_world_size() // replicas
    if replicas == 1:
        return dist.init_device_mesh("cpu", (size,))
    return dist.init_device_mesh("cpu", (replicas, size), mesh_dim_names=("replicate", "shard"))


def full_values(model: nn.Module, prefix: str = "") -> dict[str, Tensor]:
    """The full parameters, on every rank. Collective."""
    named = ((name.removeprefix(prefix), p.detach()) for name, p in model.named_parameters())
    with torch.no_grad():
        return {name: p.full_tensor() if isinstance(p, DTensor) else p.clone() for name, p in named}
