"""Does `transformers.Trainer` train with delayed second hops, and finish the last step?"""

from typing import Any

import pytest
import torch

from mics_strategy import finish_delayed
from tests.accelerate.runs import run
from tests.accelerate.trainer_runs import arguments, launched, llama, logs, trainer
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
