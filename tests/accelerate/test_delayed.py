"""Does `transformers.Trainer` train with delayed second hops, and finish the last step? Does an Accelerator resume?"""

from pathlib import Path
from typing import Any

import pytest
import torch

from mics_strategy import ShardConfig, finish_delayed
from tests.accelerate.runs import run
from tests.accelerate.test_checkpoints import assert_same_end, resumed, uninterrupted
from tests.accelerate.trainer_runs import SHARDED, arguments, launched, llama, logs, trainer
from tests.ranks import RankContext, RankPool


def trained(ctx: RankContext, second_hop: str, epochs: int) -> tuple[list[dict[str, float]], float, bool]:
    """Logs, updates of the optimizer, and whether gradients were left."""
    with launched({"preset": "mics", "second_hop": second_hop}):
        made = trainer(llama(), arguments("out", num_train_epochs=epochs, weight_decay=0.1, learning_rate=1e-3))
        made.train()
        states: list[Any] = [*made.optimizer.state.values()]
        return logs(made), float(states[0]["step"]), finish_delayed(made.accelerator.sharded_of(made.model))


@pytest.mark.parametrize("epochs", [1, 2])
def test_a_trainer_commits_every_second_step_and_a_last_one(ranks: RankPool, epochs: int) -> None:
    num_calls = 3 * epochs  # five batches, two of which make a step
    (synchronous, updates, _), *_ = run(ranks, 4, trained, "boundary", epochs, ranks_per_node=2)
    assert updates == num_calls
    for log, updates, is_left in run(ranks, 4, trained, "delayed", epochs, ranks_per_node=2):
        assert not is_left
        assert updates == num_calls // 2 + 1
        assert [entry.get("step") for entry in log] == [entry.get("step") for entry in synchronous]
        losses = [entry["loss"] for entry in log if "loss" in entry]
        assert all(torch.isfinite(torch.tensor(losses)))
        assert losses[0] == pytest.approx(synchronous[0]["loss"], rel=1e-5)


@pytest.mark.parametrize("name", ["mics", "zero1"])
def test_an_accelerator_with_a_scaler_resumes_bit_by_bit(ranks: RankPool, tmp_path: Path, name: str) -> None:
    """The scale grows in the third step, whose window is in flight when it is saved."""
    config, folder = ShardConfig.preset(name, second_hop="delayed"), str(tmp_path / "state")
    expected = run(ranks, 4, uninterrupted, config, SHARDED, folder, ranks_per_node=2)
    found = run(ranks, 4, resumed, config, SHARDED, folder, ranks_per_node=2)
    for own, other in zip(found, expected, strict=True):
        assert_same_end(own["saved"], other["saved"])
        assert own["losses"] == other["losses"]
        assert own["steps"] == other["steps"] == 6
        assert_same_end(own["end"], other["end"])
