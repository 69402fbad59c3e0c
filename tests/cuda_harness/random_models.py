"""Models, configurations and loops drawn from a seed."""

from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mics_strategy import ShardConfig, shard
from tests.cuda_harness.machine import Machine
from tests.cuda_harness.runs import PRESETS, WIDTH, Training, config_of

OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"prefetch": 2},
    {"overlap": "none"},
    {"param_dtype": "bfloat16", "reduce_dtype": "bfloat16"},
    {"hierarchical": False},
    {"second_hop": "micro_step"},
    {"grad_codec": "int8", "codec_links": "all"},
)


class Cell(nn.Module):
    """x + a layer, perhaps around another cell; one unit, inside of that of the cell around it.

    It may compute in another dtype, use a weight twice, have frozen parameters and a buffer that it writes, and be
    recomputed.
    """

    def __init__(self, random: Random, depth: int = 0) -> None:
        super().__init__()
        self.dtype = random.choice([torch.float32, torch.float32, torch.bfloat16])
        width = random.choice([WIDTH, 24, 7])
        self.up = nn.Linear(WIDTH, width, dtype=self.dtype)
        self.down = nn.Linear(width, WIDTH, bias=random.random() < 0.5, dtype=self.dtype)
        self.again = nn.Linear(WIDTH, width, bias=False, dtype=self.dtype) if random.random() < 0.3 else None
        if self.again is not None:
            self.again.weight = self.up.weight
        for layer in (self.up, self.down):
            layer.requires_grad_(random.random() < 0.8)
        self.inner = Cell(random, depth + 1) if depth < 2 and random.random() < 0.4 else None
        if random.random() < 0.3:
            self.register_buffer("mean", torch.zeros(random.choice([8, 20_000])))
        self.recomputes = random.choice(["", "", "reentrant", "non_reentrant"])

    def forward(self, x: Tensor) -> Tensor:
        if not self.recomputes:
            return self._run(x)
        run: Callable[..., Tensor] = checkpoint
        return run(self._run, x, use_reentrant=self.recomputes == "reentrant")

    def _run(self, x: Tensor) -> Tensor:
        if self.inner is not None:
            x = self.inner(x)
        weight_dtype = self.up.weight.dtype  # of gathered parameters, which may be another one
        hidden = torch.tanh(self.up(x.to(weight_dtype)))
        if self.again is not None:
            hidden = hidden + self.again(x.to(weight_dtype))
        if hasattr(self, "mean") and torch.is_grad_enabled():
            self.mean[:8].add_(hidden.detach().flatten()[:8].to(self.mean.dtype))
        return x + self.down(hidden).to(x.dtype)


class Cells(nn.Module):
    """Cells in a row, of which some are called twice."""

    def __init__(self, random: Random) -> None:
        super().__init__()
        self.inlet, self.outlet = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.cells = nn.ModuleList(Cell(random) for _ in range(random.randint(2, 4)))
        self.order = [*range(len(self.cells)), *random.sample(range(len(self.cells)), random.randint(0, 1))]

    def forward(self, x: Tensor, skipped: tuple[int, ...] = (), *, runs: bool = True) -> Tensor:
        """Without what the skipped cells give; they run, or they do not."""
        x = self.inlet(x.to(self.inlet.weight.dtype))
        for index in self.order:
            if index not in skipped:
                x = self.cells[index](x)
            elif runs:
                self.cells[index](x)
        return self.outlet(x.to(self.outlet.weight.dtype))


class Drawn:
    """A training of a seed.

    Args:
        seed: Seed of model, configuration and loop, the same on all ranks.

    Attributes:
        config: Its configuration, for nodes of `ranks_per_node`.
    """

    def __init__(self, seed: int, ranks_per_node: int) -> None:
        self._random = Random(seed)
        preset, options = self._random.choice(PRESETS), self._random.choice(OPTIONS)
        if preset == "ddp" and "grad_codec" in options:
            options = {}  # it refuses codecs
        self.config: ShardConfig = config_of(preset, ranks_per_node=ranks_per_node, **options)

    def train(self, machine: Machine, num_steps: int, rank: int = 0, *, reentrant: bool = True) -> None:
        """Train; ranks skip different cells, which is refused where reentrant checkpoints hold them (`order.md`)."""
        torch.manual_seed(3)
        model, random = Cells(self._random), self._random
        for cell in (module for module in model.modules() if isinstance(module, Cell)):
            if cell.recomputes and not reentrant:
                cell.recomputes = "non_reentrant"
        sharded = shard(model, self.config, units=[Cell], device=machine.device)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(trained, lr=0.01)]
        training = Training(model, sharded, optimizers, machine, torch.randn(4, WIDTH).to(machine.device))
        training.options["runs"] = sharded.scopes.params > 1  # with whole parameters, cells need not even run
        of_rank = Random(rank)
        for _ in range(num_steps):
            training.micro_steps = random.randint(1, 2)
            count = of_rank.choice([0, 0, 1, 2])
            training.options["skipped"] = tuple(of_rank.sample(range(len(model.cells)), count))
            training.step()
