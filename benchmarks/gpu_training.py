"""What does the engine cost on one device, where it has nothing to send?

A model like LLaMA in plain torch, trained by plain PyTorch, FSDP2, Megatron-FSDP and the engine: the same values, data,
step and fused AdamW. Parameters, gradients and states that an optimizer reads are fp32; compute is bf16.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks.gpu_codecs import Meter, Row
from benchmarks.gpu_model import SIZES, Block, Shape
from benchmarks.megatron_peer import NotMeasuredError, adopt_optimizer, load, sharded_model
from benchmarks.workload import Batch
from mics_strategy import ShardConfig, shard
from recipes.flops import peak_tflop_per_s

FSDP2_SHARE = 1.0  # of FSDP2's tokens/s: what is asked of the engine
MFU = 0.5  # what is asked of the engine with the model of `MFU_SIZE`
MFU_SIZE = "1b"
_HAS_BF16 = (8, 0)  # compute capability from which the peaks of `recipes.flops` are those of bf16
_LEARNING_RATE = 1e-4


_adamw = partial(torch.optim.AdamW, lr=_LEARNING_RATE, fused=True)


class Trained:
    """A model and its optimizer.

    Args:
        model: On its device.
        masters: What the optimizer updates; the model's own parameters where they are not given.
        make_optimizer: Makes it of an iterable of parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        masters: list[torch.Tensor] | None = None,
        make_optimizer: Callable[..., torch.optim.Optimizer] = _adamw,
    ) -> None:
        self.model = model
        self.optimizer = make_optimizer(model.parameters() if masters is None else masters)

    def step(self, batch: Batch) -> torch.Tensor:
        """Train on a batch. Returns its loss, without waiting for it."""
        loss: torch.Tensor = self.model(batch.inputs, batch.targets)
        loss.backward()
        self.update()
        return loss.detach()

    def update(self) -> None:
        """Use the gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad()


class _Autocast(Trained):
    """fp32 parameters, computing under autocast, which casts them in every step and keeps residuals in fp32."""

    def step(self, batch: Batch) -> torch.Tensor:
        with torch.autocast(batch.inputs.device.type, torch.bfloat16):
            loss = self.model(batch.inputs, batch.targets)
        loss.backward()
        self.update()
        return torch.as_tensor(loss).detach()


class _Masters(Trained):
    """bf16 parameters, of which the optimizer has an fp32 copy: the arithmetic of the sharded engines."""

    def __init__(self, model: nn.Module) -> None:
        self.masters = [parameter.detach().clone().requires_grad_() for parameter in model.parameters()]
        super().__init__(model.bfloat16(), self.masters)

    def update(self) -> None:
        parameters: list[torch.Tensor] = list(self.model.parameters())
        for master, parameter in zip(self.masters, parameters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        super().update()
        with torch.no_grad():
            torch._foreach_copy_(parameters, self.masters)


def build_fsdp2(shape: Shape, device: torch.device, *, num_ranks: int = 1, is_light: bool) -> Trained:
    """`fully_shard` of each block and the root: with fp32 reductions, or in the way that does the least."""
    model = shape.model(device)
    dtype = torch.bfloat16 if is_light else torch.float32
    options: dict[str, Any] = {
        "mesh": init_device_mesh(device.type, (num_ranks,), mesh_dim_names=("shard",)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=dtype),
    }
    if is_light:
        options["reshard_after_forward"] = False
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return Trained(model)


def _megatron(shape: Shape, device: torch.device, *, strategy: str) -> Trained:
    """Megatron-FSDP, sharded as its users do by default or in the way that does the least on one GPU."""
    package = load(device)
    trained = Trained(sharded_model(package, shape.model(device).bfloat16(), Block, device, strategy))
    adopt_optimizer(package, trained.optimizer)
    return trained


def _ours(shape: Shape, device: torch.device, *, preset: str) -> Trained:
    model = shape.model(device)
    shard(
        model, ShardConfig.preset(preset, partition_size="node", param_dtype="bfloat16"), units=[Block], device=device
    )
    return Trained(model)


BUILDERS: dict[str, Callable[[Shape, torch.device], Trained]] = {
    "plain": lambda shape, device: _Masters(shape.model(device)),
    "plain-autocast": lambda shape, device: _Autocast(shape.model(device)),
    "fsdp2": lambda shape, device: build_fsdp2(shape, device, is_light=False),
    "fsdp2-light": lambda shape, device: build_fsdp2(shape, device, is_light=True),
    "megatron-fsdp": lambda shape, device: _megatron(shape, device, strategy="optim_grads_params"),
    "megatron-fsdp-light": lambda shape, device: _megatron(shape, device, strategy="no_shard"),
    "mics": lambda shape, device: _ours(shape, device, preset="mics"),
    "zero3": lambda shape, device: _ours(shape, device, preset="zero3"),
}
_COMPILED = "-compiled"


def _compiled(name: str) -> Callable[[Shape, torch.device], Trained]:
    """A builder whose blocks are compiled one by one, as torch advises for FSDP2."""

    def build(shape: Shape, device: torch.device) -> Trained:
        trained = BUILDERS[name](shape, device)
        blocks: Any = trained.model.blocks
        for block in blocks:
            block.compile()
        return trained

    return build


COMPILED_BUILDERS = {name + _COMPILED: _compiled(name) for name in ("plain", "fsdp2", "mics")}
OURS = ("mics", "zero3", "mics-compiled")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """How often engines are measured; in each round every engine is built again.

    Attributes:
        rounds: Of all engines in turn.
        warm_up: Steps before those that are measured.
        steps: Measured steps.
        loss_tolerance: Largest difference to the loss of the first engine at any step, by that loss.
        is_compiled: Whether engines with compiled blocks are measured as well.
    """

    rounds: int = 3
    warm_up: int = 3
    steps: int = 8
    loss_tolerance: float = 0.02
    is_compiled: bool = False


@dataclass(slots=True)
class EngineResult:
    """What one engine did, over all rounds.

    Attributes:
        step_s: Seconds of each measured step.
        peak_bytes: Most bytes of live tensors in measured steps, by round.
        reserved_bytes: Bytes that the allocator holds after the last step, by round.
        losses: Loss of every step, by round.
        failure: Error that ended it.
        reason: Why it cannot run here, which is no failure.
    """

    step_s: list[float] = field(default_factory=list)
    peak_bytes: list[int] = field(default_factory=list)
    reserved_bytes: list[int] = field(default_factory=list)
    losses: list[list[float]] = field(default_factory=list)
    failure: str = ""
    reason: str = ""

    @property
    def is_measured(self) -> bool:
        """Whether it has steps, and all it was asked for."""
        return not self.failure and not self.reason


@dataclass(frozen=True, slots=True)
class Peak:
    """Dense bf16 peak of a device.

    Attributes:
        device: Name of the device.
        flop_per_s: FLOP per second by the datasheet; None where it is not known.
    """

    device: str
    flop_per_s: float | None = None

    @classmethod
    def of(cls, device: torch.device) -> Peak:
        """The peak by the device's name; that of a CPU is not known."""
        if device.type != "cuda":
            return cls(device.type)
        name, has_bf16 = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device) >= _HAS_BF16
        return cls(name, (peak_tflop_per_s(name) * 1e12 or None) if has_bf16 else None)

    def utilization(self, tokens_per_s: float, shape: Shape, *, is_held: bool) -> Row:
        """Columns of the model FLOP utilization, by both ways to count attention; empty where the peak is not known.

        Args:
            tokens_per_s: Measured.
            shape: Shape of the model.
            is_held: Whether the target is asked of this engine.
        """
        if self.flop_per_s is None:
            return {"mfu": None, "mfu PaLM": None, "mfu target": f"no peak of {self.device} is known"}
        row: Row = {"mfu": tokens_per_s * shape.causal_flop_per_token / self.flop_per_s}
        row["mfu PaLM"] = tokens_per_s * shape.flop_per_token / self.flop_per_s
        is_asked = is_held and shape == SIZES[MFU_SIZE]
        row["mfu target"] = ("met" if row["mfu"] >= MFU else "missed") if is_asked else None
        return row


def compare_engines(
    shape: Shape, device: torch.device, rounds: Rounds, say: Callable[[str], None] = print
) -> Iterator[Row]:
    """Train with every engine in turn at world size 1; an engine that fails has a row that says so."""
    builders = BUILDERS | (COMPILED_BUILDERS if rounds.is_compiled else {})
    results, meter = {name: EngineResult() for name in builders}, Meter(device)
    with _own_group(device):
        for index, (name, engine) in itertools.product(range(rounds.rounds), results.items()):
            if not engine.is_measured:
                continue
            try:
                batches = [shape.batch(step, device) for step in range(rounds.warm_up + rounds.steps)]
                train(partial(builders[name], shape, device), batches, rounds.warm_up, meter, engine)
                say(f"round {index}: {name} {statistics.median(engine.step_s[-rounds.steps :]):.4f} s a step")
            except NotMeasuredError as error:
                engine.reason = str(error)
            except Exception as error:  # out of memory, say; the others have their rows
                engine.failure = f"{type(error).__name__}: {error}".splitlines()[0]
        yield from engine_rows(results, shape, rounds.loss_tolerance, Peak.of(device))


@contextmanager
def _own_group(device: torch.device) -> Iterator[None]:
    """A default process group of this process alone."""
    is_cuda = device.type == "cuda"
    options: dict[str, Any] = {"device_id": device} if is_cuda else {}
    backend, store = "nccl" if is_cuda else "gloo", torch._C._distributed_c10d.HashStore()
    dist.init_process_group(backend, store=store, rank=0, world_size=1, **options)
    try:
        yield
    finally:
        dist.destroy_process_group()


def train(
    build: Callable[[], Trained], batches: Sequence[Batch], warm_up: int, meter: Meter, into: EngineResult
) -> None:
    """Build an engine and train it once.

    Args:
        build: Makes the engine.
        batches: Batch of every step.
        warm_up: Steps that are not measured.
        meter: Meter of the device.
        into: Result that is extended.
    """
    meter.release()
    before, reserved = meter.allocated_bytes, meter.reserved_bytes
    engine = build()
    losses = [engine.step(batch) for batch in batches[:warm_up]]
    meter.forget_peak()
    marks = [meter.mark()]
    for batch in batches[warm_up:]:
        losses.append(engine.step(batch))
        marks.append(meter.mark())
    into.step_s += [meter.seconds(begin, end) for begin, end in itertools.pairwise(marks)]
    into.losses.append([float(loss) for loss in losses])
    into.peak_bytes.append(meter.peak_bytes - before)
    into.reserved_bytes.append(meter.reserved_bytes - reserved)


def engine_rows(results: dict[str, EngineResult], shape: Shape, loss_tolerance: float, peak: Peak) -> Iterator[Row]:
    """A row for each engine, with ratios of tokens/s: ours to the faster of each peer, and to the faster plain loop.

    Compiled engines are compared with compiled ones.

    Args:
        results: Results by engine; the losses of the first engine in its first round are the reference.
        shape: That was trained.
        loss_tolerance: See `Rounds`.
        peak: Peak of the device.
    """
    speeds = {name: shape.tokens / statistics.median(each.step_s) for name, each in results.items() if each.is_measured}
    expected = next((each.losses[0] for each in results.values() if each.is_measured), [])
    for name, each in results.items():
        if not each.is_measured:
            yield {"engine": name, "problem": each.failure, "not measured": each.reason}
            continue
        row: Row = {"engine": name, "step s": statistics.median(each.step_s)}
        row |= {"min s": min(each.step_s), "max s": max(each.step_s), "tokens/s": speeds[name]}
        fsdp2, megatron, plain = (
            _fastest(speeds, peer, is_compiled=name.endswith(_COMPILED)) for peer in ("fsdp2", "megatron", "plain")
        )
        if name in OURS and fsdp2 is not None and plain is not None:
            share = speeds[name] / fsdp2
            target = "met" if share >= FSDP2_SHARE else "missed"
            row |= {"of fsdp2": share, "of plain": speeds[name] / plain, "target": target}
        if name in OURS and megatron is not None:
            row |= {"of megatron": speeds[name] / megatron}
        row |= peak.utilization(speeds[name], shape, is_held=name in OURS)
        row |= memory_columns(each) | {"loss": each.losses[-1][-1], "losses": each.losses}
        yield {**row, "problem": loss_difference(each.losses, expected, loss_tolerance)}


def memory_columns(result: EngineResult) -> Row:
    """The most of live tensors and of what the allocator holds; empty where there is no GPU."""
    columns = {"peak MB": max(result.peak_bytes) / 1e6, "reserved MB": max(result.reserved_bytes) / 1e6}
    return {name: value or None for name, value in columns.items()}


def _fastest(speeds: dict[str, float], peer: str, *, is_compiled: bool) -> float | None:
    of_peer = [
        speed for name, speed in speeds.items() if name.startswith(peer) and name.endswith(_COMPILED) == is_compiled
    ]
    return max(of_peer, default=None)


def loss_difference(losses: list[list[float]], expected: list[float], tolerance: float) -> str:
    """The first loss that is not the expected one within a relative tolerance; empty where all are."""
    pairs = [pair for of_round in losses for pair in zip(of_round, expected, strict=True)]
    wrong = [pair for pair in pairs if not abs(pair[0] - pair[1]) <= tolerance * abs(pair[1])]  # NaN is wrong
    return f"loss {wrong[0][0]:.4f} where {wrong[0][1]:.4f} is expected" if wrong else ""
