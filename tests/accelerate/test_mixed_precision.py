"""Does `mixed_precision` mean to Accelerate and to `transformers.Trainer` what it means with FSDP2?"""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from mics_strategy import ConfigError
from tests.accelerate.runs import accelerator, forget, run
from tests.accelerate.trainer_runs import Sequences, arguments, launched, llama, logs
from tests.fsdp2_policy import MAX_NORM, Tagger, batches, full_values, loss_of, trained_by_fsdp2
from tests.ranks import RankContext, RankPool, raises_on_every_rank

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
Outcome = tuple[dict[str, Tensor], list[float]]


def _scaler() -> Any:
    return torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)


def by_accelerate(ctx: RankContext, mixed_precision: str, norms: list[float] | None = None, **options: Any) -> Outcome:
    acc = accelerator(options.pop("config", "zero3"), accelerator_mixed_precision=mixed_precision, **options)
    if mixed_precision == "fp16":  # as on a GPU
        acc.native_amp, acc.scaler = True, _scaler()
    model = Tagger()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = DataLoader(batches(ctx.rank), batch_size=None)
    wrapped, optimizer = acc.prepare(model, optimizer)
    losses = []
    for index, (tokens, features, target) in enumerate(data):
        scores = wrapped(tokens, features)
        assert scores.dtype == torch.float32
        loss = loss_of(scores, tokens, target)
        acc.backward(loss / 2)
        losses.append(loss.item())
        if index % 2 == 1:
            if norms is not None:
                norms.append(acc.clip_grad_norm_(wrapped.parameters(), MAX_NORM).item())
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        tokens, features, target = batches(ctx.rank)[0]
        losses.append(loss_of(wrapped.eval()(tokens, features), tokens, target).item())
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    return full_values(model), losses


def compared(ctx: RankContext, mixed_precision: str, options: dict[str, Any]) -> tuple[Outcome, Outcome]:
    scaler = _scaler() if mixed_precision == "fp16" else None
    dtypes = DTYPES[mixed_precision], torch.float32
    expected = trained_by_fsdp2(*dtypes, loss_in_autocast=False, scaler=scaler, replicas=ctx.num_nodes)
    return by_accelerate(ctx, mixed_precision, **options), expected


def assert_equal_bits(outcome: Outcome, expected: Outcome) -> None:
    assert outcome[1] == expected[1]
    assert list(outcome[0]) == list(expected[0])
    for name, value in expected[0].items():
        assert torch.equal(outcome[0][name], value), name


@pytest.mark.wide(every=3)
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("mixed_precision", "options"),
    [("bf16", {}), ("fp16", {}), ("bf16", {"activation_checkpointing": True, "units": "Block"})],
    ids=["bf16", "fp16", "bf16 recomputed"],
)
def test_an_accelerator_trains_as_fsdp2_to_the_bit(
    ranks: RankPool, world_size: int, mixed_precision: str, options: dict[str, Any]
) -> None:
    for outcome, expected in run(ranks, world_size, compared, mixed_precision, options):
        assert_equal_bits(outcome, expected)


@pytest.mark.parametrize("mixed_precision", ["bf16", pytest.param("fp16", marks=pytest.mark.slow)])
def test_mics_trains_as_fsdp2_over_replicas_and_shards_to_the_bit(ranks: RankPool, mixed_precision: str) -> None:
    """A partition is a node of two ranks: in it, and between two nodes, a sum has one order."""
    for outcome, expected in run(ranks, 4, compared, mixed_precision, {"config": "mics"}, ranks_per_node=2):
        assert_equal_bits(outcome, expected)


def clipped(ctx: RankContext) -> tuple[Outcome, list[float], Outcome, list[float]]:
    norms: list[float] = []
    expected_norms: list[float] = []
    outcome = by_accelerate(ctx, "bf16", norms)
    expected = trained_by_fsdp2(torch.bfloat16, torch.float32, loss_in_autocast=False, norms=expected_norms)
    return outcome, norms, expected, expected_norms


def test_clipping_is_that_of_fsdp2(ranks: RankPool) -> None:
    """Norms are summed in another order, and AdamW amplifies what rounds otherwise."""
    for outcome, norms, expected, expected_norms in run(ranks, 2, clipped):
        assert norms[0] == pytest.approx(expected_norms[0], rel=1e-6)
        assert norms == pytest.approx(expected_norms, rel=1e-3)
        assert outcome[1] == pytest.approx(expected[1], rel=1e-3)


def contradicting(ctx: RankContext) -> None:
    accelerator("mics", accelerator_mixed_precision="bf16", param_dtype="float16").prepare(Tagger())


def test_another_param_dtype_is_refused_on_every_rank(ranks: RankPool) -> None:
    match = "mixed_precision='bf16'.*computes in bfloat16.*param_dtype=float16.*Remove"
    raises_on_every_rank(lambda: run(ranks, 2, contradicting), ConfigError, match)


def _after_a_step(param_dtype: str, folder: str = "") -> tuple[Any, Any]:
    """An Accelerator and a model after a step, or with a loaded state."""
    acc = accelerator("zero3", accelerator_mixed_precision="bf16", param_dtype=param_dtype)
    model = Tagger()
    model, optimizer = acc.prepare(model, torch.optim.AdamW(model.parameters()))
    if folder:
        acc.load_state(folder)
    else:
        tokens, features, target = batches(dist.get_rank())[0]
        acc.backward(loss_of(model(tokens, features), tokens, target))
        optimizer.step()
    return acc, model


def round_trip(ctx: RankContext, folder: str, param_dtype: str) -> tuple[bool, set[torch.dtype]]:
    """Saved by one meaning and loaded by the default one: whether values are equal, and dtypes of the full state."""
    acc, model = _after_a_step(param_dtype)
    saved = full_values(model)
    acc.save_state(folder)
    forget()
    acc, model = _after_a_step("auto", folder)
    assert acc.sharded_of(model).config.param_dtype == torch.bfloat16
    loaded = full_values(model)
    dtypes = {value.dtype for value in acc.get_state_dict(model).values()}
    return all(torch.equal(value, loaded[name]) for name, value in saved.items()), dtypes


@pytest.mark.parametrize("param_dtype", ["auto", "float32"], ids=["the default", "autocast"])
def test_states_hold_fp32_masters_and_those_of_autocast_load(ranks: RankPool, tmp_path: Path, param_dtype: str) -> None:
    outcomes = run(ranks, 2, round_trip, str(tmp_path / "state"), param_dtype)
    assert outcomes == [(True, {torch.float32}), (True, set())]  # rank 1 gets no state


def fp16_on_a_cpu(ctx: RankContext) -> Any:
    """Accelerate computes in fp32 there."""
    acc = accelerator("mics", accelerator_mixed_precision="fp16")
    return acc.sharded_of(acc.prepare(Tagger())).config.param_dtype


def test_parameters_are_gathered_in_fp32_where_accelerate_has_no_fp16(ranks: RankPool) -> None:
    assert run(ranks, 1, fp16_on_a_cpu) == ["auto"]


def generated(ctx: RankContext) -> tuple[Tensor, Tensor]:
    """By a model with a cache of keys and values, whose units write into it."""
    acc = accelerator("zero3", accelerator_mixed_precision="bf16")
    options = {"max_new_tokens": 6, "do_sample": False, "use_cache": True}
    tokens = torch.tensor([[1, 5, 9, 4]])
    plain = llama(use_cache=True).bfloat16().eval()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = plain.generate(tokens, **options)
    return acc.prepare(llama(use_cache=True)).eval().generate(tokens, **options), expected


def test_generation_with_a_cache_is_that_of_a_model_in_16_bits(ranks: RankPool) -> None:
    for tokens, expected in run(ranks, 2, generated):
        assert tokens.tolist() == expected.tolist()


class WeightCasts(TorchDispatchMode):
    """Counts 16-bit casts of the weights of linear layers, and those that are still referenced."""

    def __init__(self, shapes: set[tuple[int, ...]]) -> None:
        super().__init__()
        self.shapes = shapes
        self.casts: list[weakref.ref[Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and out.dtype == torch.bfloat16 and tuple(out.shape) in self.shapes:
            self.casts.append(weakref.ref(out))
        return out

    @property
    def num_alive(self) -> int:
        gc.collect()
        return sum(cast() is not None for cast in self.casts)


class ReadsAtTheEnd(Tagger):
    """Reads at the end of its forward, inside autocast, how many casts are alive."""

    read: Any = None

    def forward(self, tokens: Tensor, features: Tensor) -> Tensor:
        scores = super().forward(tokens, features)
        return scores if self.read is None else self.read(scores)


def cast_weights(ctx: RankContext, options: dict[str, Any]) -> tuple[bool, int]:
    """Whether autocast casts weights of blocks, and how many casts are alive at the end of a forward."""
    acc = accelerator("zero3", accelerator_mixed_precision="bf16", units="Block", **options)
    model = ReadsAtTheEnd()
    shapes = {tuple(linear.weight.shape) for linear in (model.blocks[0].up, model.blocks[0].down)}
    prepared = acc.prepare(model)
    alive = []
    with WeightCasts(shapes) as casts:
        model.read = lambda scores: alive.append(casts.num_alive) or scores
        prepared(*batches(ctx.rank)[0][:2])
    return len(casts.casts) > 0, alive[0]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (False, 0)),
        ({"param_dtype": "float32"}, (True, 6)),
        ({"param_dtype": "float32", "activation_checkpointing": True}, (True, 0)),
    ],
    ids=["16 bits gathered", "autocast", "autocast recomputed"],
)
def test_no_rank_keeps_a_16_bit_copy_of_the_model_unless_autocast_saves_it(
    ranks: RankPool, options: dict[str, Any], expected: tuple[bool, int]
) -> None:
    assert run(ranks, 2, cast_weights, options) == [expected] * 2


def by_transformers(num: int, **more: Any) -> Outcome:
    from transformers import Trainer

    options = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "num_train_epochs": num}
    options |= {"max_grad_norm": 0.0, "lr_scheduler_type": "constant", "bf16": True, "optim": "adamw_torch", **more}
    with launched("zero3"):
        model = llama()
        data = Sequences(dist.get_world_size())
        made = Trainer(model=model, args=arguments("out", **options), train_dataset=data)
        made.train()
        return full_values(model), [entry["loss"] for entry in logs(made) if "loss" in entry]


def llama_by_fsdp2(num: int) -> dict[str, Tensor]:
    """One sequence a rank, so that the order of sequences does not matter."""
    model, rank = llama(), dist.get_rank()
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4, weight_decay=0.0)
    tokens = Sequences(dist.get_world_size()).tokens[rank : rank + 1]
    for _ in range(num):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return full_values(model)


def llamas(ctx: RankContext, options: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    return by_transformers(3, **options)[0], llama_by_fsdp2(3)


@pytest.mark.parametrize(
    ("world_size", "options"), [(1, {}), (2, {}), (2, {"gradient_checkpointing": True})], ids=["1", "2", "recomputed"]
)
def test_a_trainer_of_transformers_trains_as_fsdp2_to_the_bit(
    ranks: RankPool, world_size: int, options: dict[str, Any]
) -> None:
    for values, expected in run(ranks, world_size, llamas, options):
        assert list(values) == list(expected)
        for name, value in expected.items():
            assert torch.equal(values[name], value), name
