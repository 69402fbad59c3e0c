"""What travels, when, and who waits for whom?"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.utils.data import DataLoader

from mics_strategy.comm.communicator import Communicator
from tests.lightning.modules import Plain, Regression, Stream, loader, samples
from tests.lightning.runs import mics, run, trainer
from tests.ranks import RankContext, RankPool

MICRO_STEPS = 3


class _Traffic(Callback):
    """What every optimizer step sent: (axis, collective) to number, as the traffic log of the engine has it."""

    def __init__(self) -> None:
        self.steps: list[Counter[tuple[str, str]]] = []
        self.as_planned: list[bool] = []

    def on_before_zero_grad(self, trainer: Any, *_: Any) -> None:
        if not trainer.global_step or len(self.steps) == trainer.global_step:
            return
        rows = trainer.strategy.sharded.traffic()
        self.steps.append(Counter({(row.axis, row.collective): row.count for row in rows}))
        self.as_planned.append(all((r.count, r.sent_bytes) == (r.planned_count, r.planned_bytes) for r in rows))


def _traffic(ctx: RankContext, accumulate: int) -> tuple[list[Counter[tuple[str, str]]], list[bool]]:
    traffic = _Traffic()
    options = {"accumulate_grad_batches": accumulate, "limit_train_batches": accumulate * 4}
    fitting = trainer(ctx, mics("mics", partition_size=2), callbacks=[traffic], **options)
    fitting.fit(Regression(), loader(128))
    return traffic.steps, traffic.as_planned


def test_gradients_are_scattered_in_every_micro_step_and_reduced_once_a_step(ranks: RankPool) -> None:
    one = run(ranks, 4, _traffic, 1, ranks_per_node=2)[0][0][-1]
    results = run(ranks, 4, _traffic, MICRO_STEPS, ranks_per_node=2)
    for steps, as_planned in results:
        for (axis, collective), count in one.items():
            times = MICRO_STEPS if axis == "intra_node" else 1
            if collective != "all_gather":  # what is still there is not gathered again
                assert steps[-1][axis, collective] == times * count, (axis, collective)
        assert as_planned[-1]
    assert any(axis == "inter_node" for axis, _ in one)


@contextmanager
def _counting_all_reduces() -> Iterator[list[int]]:
    """Sizes of the groups in which gradients are all-reduced; an independent count of what the traffic log holds."""
    sizes: list[int] = []
    original = dist.all_reduce

    def counting(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.numel() > 8 and tensor.is_floating_point():  # neither a norm nor a vote
            sizes.append(dist.get_world_size(kwargs.get("group")))
        return original(tensor, *args, **kwargs)

    with mock.patch.object(dist, "all_reduce", counting):
        yield sizes


def _all_reduces(ctx: RankContext, accumulate: int) -> list[int]:
    with _counting_all_reduces() as sizes:
        options = {"accumulate_grad_batches": accumulate, "limit_train_batches": 8}
        trainer(ctx, mics("mics", partition_size=2), **options).fit(Regression(), loader(128))
    return sizes


def test_four_times_the_micro_steps_need_a_quarter_of_the_all_reduces(ranks: RankPool) -> None:
    every_step = run(ranks, 4, _all_reduces, 1)[0]
    every_fourth = run(ranks, 4, _all_reduces, 4)[0]
    assert len(every_step) == 4 * len(every_fourth) > 0
    assert 4 not in every_step  # never over the whole world


class _SecondHops(Callback):
    """Second hops that were submitted before the backward of each micro-step had ended."""

    def __init__(self) -> None:
        self.submitted = 0
        self.by_backward: list[int] = []

    def on_before_backward(self, *_: Any) -> None:
        self.submitted = 0

    def on_after_backward(self, *_: Any) -> None:
        self.by_backward.append(self.submitted)


def _second_hops(ctx: RankContext) -> list[int]:
    seen, all_reduce = _SecondHops(), Communicator.all_reduce

    def spy(comm: Communicator, *args: Any) -> Any:
        seen.submitted += 1
        return all_reduce(comm, *args)

    options = {"accumulate_grad_batches": MICRO_STEPS, "limit_train_batches": 2 * MICRO_STEPS}
    with mock.patch.object(Communicator, "all_reduce", spy):
        trainer(ctx, mics("mics", partition_size=2), callbacks=[seen], **options).fit(Regression(), loader(128))
    return seen.by_backward


def test_second_hops_start_inside_the_last_backward_and_no_other(ranks: RankPool) -> None:
    for hops in run(ranks, 4, _second_hops, ranks_per_node=2):
        assert len(hops) == 2 * MICRO_STEPS
        assert [count > 0 for count in hops] == [False, False, True] * 2


class _Boundary(Callback):
    """Where the strategy says that a window ends."""

    def __init__(self) -> None:
        self.nested: list[bool] = []

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        strategy, micro_step = trainer.strategy, trainer.strategy.sharded.micro_step
        seen: list[int] = []

        @contextmanager
        def spy(index: int, *, of: int) -> Iterator[None]:
            seen.append(of - index)  # 1: the last micro-step
            with micro_step(index, of=of):
                yield
            seen.pop()

        with mock.patch.object(type(strategy.sharded), "micro_step", lambda _, index, *, of: spy(index, of=of)):
            with strategy.block_backward_sync():
                with pytest.raises(ValueError, match="inside"), strategy.block_backward_sync():
                    raise ValueError("inside")
                seen.pop()
                self.nested.append(seen == [2])
            self.nested.append(seen == [])


def _nested(ctx: RankContext) -> list[bool]:
    boundary = _Boundary()
    trainer(ctx, "mics", max_steps=1, callbacks=[boundary]).fit(Plain(), loader())
    return boundary.nested


def test_blocking_synchronisation_restores_what_was_before(ranks: RankPool) -> None:
    assert run(ranks, 1, _nested) == [[True, True]]


class _Indices(Callback):
    """The first number of every sample that a rank has trained on."""

    def __init__(self) -> None:
        self.seen: list[float] = []
        self.sampler = ""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        first = batch[0] if isinstance(batch, list) else batch
        self.seen += first[:, 0].tolist()
        self.sampler = type(trainer.train_dataloader.sampler).__name__


def _indices(ctx: RankContext, data: Any) -> tuple[list[float], str]:
    indices = _Indices()
    module = Plain() if isinstance(data, Stream) is False else StreamModule()
    trainer(ctx, "mics", callbacks=[indices]).fit(module, DataLoader(data, batch_size=2))
    return indices.seen, indices.sampler


class StreamModule(Plain):
    """Takes bare tensors."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch).sum()


def test_every_rank_trains_on_its_own_part_of_the_data(ranks: RankPool) -> None:
    results = run(ranks, 4, _indices, samples(), ranks_per_node=2)
    assert {sampler for _, sampler in results} == {"DistributedSampler"}
    seen = [value for values, _ in results for value in values]
    assert sorted(seen) == sorted(samples()[i][0][0].item() for i in range(32))


def test_an_iterable_is_left_alone(ranks: RankPool) -> None:
    whole_stream = [row[0].item() for row in Stream()]
    assert [seen for seen, _ in run(ranks, 2, _indices, Stream())] == [whole_stream] * 2


class Logging(Regression):
    """Logs norms of gradients in the ways that people do."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norm = nn.utils.get_total_norm([p.grad for p in self.parameters()])
        self.log("norm", norm)
        self.log("norm_synced", norm, sync_dist=True)
        self.log_dict({"clipped": nn.utils.clip_grad_norm_(self.parameters(), 1e9)})
        self.log("item", norm.item())


def _logged(ctx: RankContext, strategy: str) -> dict[str, Any]:
    fitting = trainer(ctx, strategy, max_steps=3)
    fitting.fit(Logging(), loader())
    return {name: (type(value), value.item()) for name, value in fitting.callback_metrics.items()}


def test_logged_norms_are_plain_numbers_and_equal_ddp(ranks: RankPool) -> None:
    expected = run(ranks, 4, _logged, "ddp", ranks_per_node=2)
    for found, reference in zip(run(ranks, 4, _logged, "mics", ranks_per_node=2), expected, strict=True):
        for name, (kind, value) in reference.items():
            assert found[name] == (kind, pytest.approx(value, rel=1e-5)), name


class LogsLightningsNorm(Regression):
    """Uses a function of Lightning that takes gradients for plain tensors."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self, 2))


def _lightnings_norm(ctx: RankContext) -> list[str]:
    try:
        trainer(ctx, "mics", max_steps=1).fit(LogsLightningsNorm(), loader())
    except RuntimeError as error:
        return error.__notes__
    return []


def test_lightnings_grad_norm_is_explained(ranks: RankPool) -> None:
    for notes in run(ranks, 2, _lightnings_norm):
        assert "get_total_norm" in notes[0]


def _talk(ctx: RankContext) -> tuple[Any, ...]:
    fitting = trainer(ctx, "mics", max_steps=0)
    strategy = fitting.strategy
    fitting.fit(Plain(), loader())
    mine = torch.tensor(float(ctx.rank))
    return (
        strategy.broadcast({"rank": ctx.rank}, src=1),
        strategy.reduce(mine.clone()).item(),
        strategy.reduce(mine.clone(), reduce_op="sum").item(),
        strategy.reduce("text"),
        strategy.all_gather(mine).tolist(),
        strategy.reduce_boolean_decision(ctx.rank == 1, all=True),
        strategy.reduce_boolean_decision(ctx.rank == 1, all=False),
    )


def test_ranks_talk_over_the_whole_world(ranks: RankPool) -> None:
    for results in run(ranks, 4, _talk, ranks_per_node=2):
        assert results == ({"rank": 1}, 1.5, 6.0, "text", [0.0, 1.0, 2.0, 3.0], False, True)


def test_before_there_is_a_process_group_talking_changes_nothing(one_rank: RankContext) -> None:
    strategy = trainer(one_rank, "mics").strategy
    strategy.barrier("early")
    assert strategy.broadcast("path") == "path"
    assert strategy.reduce(torch.tensor(1.5)).item() == 1.5


def _sigterm_checks(ctx: RankContext, every: int) -> int:
    with mock.patch.object(dist, "broadcast", side_effect=dist.broadcast) as broadcast:
        fitting = trainer(ctx, mics(sigterm_check_every_n_steps=every), limit_train_batches=8)
        fitting.fit(Plain(), loader(128))
        return sum(call.args[0].numel() == 1 and "group" not in call.kwargs for call in broadcast.call_args_list)


@pytest.mark.parametrize(("every", "expected"), [(1, 8), (4, 2), (100, 1)])
def test_the_question_for_a_sigterm_can_be_asked_less_often(ranks: RankPool, every: int, expected: int) -> None:
    assert run(ranks, 2, _sigterm_checks, every) == [expected] * 2


class Modes(Regression):
    """Notes under which mode it is evaluated."""

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        super().validation_step(batch, batch_idx)


def _validated_then_fitted(ctx: RankContext) -> tuple[bool, bool]:
    module = Modes("adamw")
    fitting = trainer(ctx, "mics")
    with mock.patch("lightning.pytorch.loops.utilities.dist") as backend:  # Lightning spares gloo what it does to NCCL
        backend.get_backend.return_value = "nccl"
        fitting.validate(module, loader(8), verbose=False)
        modes = module.modes
        fitting.fit(module, loader(8), loader(8))
    return modes


def test_evaluation_leaves_a_model_that_can_be_trained(ranks: RankPool) -> None:
    assert run(ranks, 2, _validated_then_fitted) == [(False, False)] * 2


class SlowIO(AsyncCheckpointIO):
    """Notes when it is told to finish."""

    finished = 0

    def teardown(self) -> None:
        super().teardown()
        self.finished += 1


def _asynchronous(ctx: RankContext) -> tuple[int, bool]:
    slow = SlowIO()
    path = ctx.tmp_path / "async.ckpt"

    class Saves(Callback):
        def on_train_end(self, trainer: Any, *_: Any) -> None:
            trainer.save_checkpoint(path)

    fitting = trainer(ctx, "mics", max_steps=1, plugins=[slow], callbacks=[Saves()])
    fitting.fit(Plain(), loader())
    fitting.strategy.barrier()
    torch.load(path, weights_only=True)
    return slow.finished, path.exists()


def test_the_end_waits_for_checkpoints_that_are_being_written(ranks: RankPool) -> None:
    assert run(ranks, 2, _asynchronous) == [(1, True)] * 2
