"""Is what `save_state` writes whole, and of one step, whenever and whoever is killed?"""

import os
import random
import signal
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.accelerate.runs import accelerator, full, run
from tests.accelerate.test_checkpoints import Counter
from tests.rank_report import RankError
from tests.ranks import RankContext, RankPool

pytestmark = pytest.mark.slow

VICTIMS = {"rank 0": [0], "rank 1": [1], "all": [0, 1]}


def prepared() -> tuple:
    """A small model whose every number says after how many steps it was saved."""
    acc = accelerator("mics")
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = acc.prepare(model, optimizer)
    counter = Counter()
    acc.register_for_checkpointing(counter)
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()  # momenta
    return acc, model, optimizer, counter


def saves_until_killed(ctx: RankContext, folder: str, victims: list[int], delay_s: float) -> None:
    """One state after another under the same name."""
    acc, model, optimizer, counter = prepared()
    for step in range(1, 10**6):
        counter.count = step
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float(step))
                optimizer.optimizer.state[parameter]["momentum_buffer"].fill_(float(step))
        acc.save_state(folder)
        if step == 1 and ctx.rank in victims:
            timer = threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL))
            timer.daemon = True
            timer.start()


def loaded(ctx: RankContext, folder: str) -> tuple[int, set[float]]:
    """The step, and every number there is."""
    acc, model, optimizer, counter = prepared()
    acc.load_state(folder)
    states = [state["momentum_buffer"] for state in optimizer.optimizer.state.values()]
    numbers = {number for tensor in [*model.parameters(), *states] for number in full(tensor).unique().tolist()}
    return counter.count, numbers


@pytest.mark.wide(every=2)
@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize("seed", [1, 2])
def test_a_killed_save_leaves_the_state_of_one_step(ranks: RankPool, tmp_path: Path, victim: str, seed: int) -> None:
    delay_s = random.Random(f"{victim} {seed}").random()
    folder = str(tmp_path / "state")
    with pytest.raises(RankError):
        run(ranks, 2, saves_until_killed, folder, VICTIMS[victim], delay_s)
    for step, numbers in run(ranks, 1, loaded, folder):
        assert numbers == {float(step)}
