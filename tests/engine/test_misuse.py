"""What does a mistake with the handle of a sharded model say? What was asked, what was found, what to do."""

import os
import re

import pytest
import torch
from torch import nn

from mics_strategy import load_weights, save_checkpoint, shard
from tests.ranks import RankContext, RankPool

MISTAKES = {
    "shard(model.parameters(), 'mics')": "ConfigError: `model` is a generator, not a module. Pass the model itself",
    "sharded.clip_grad_norm_(-1.0)": "ConfigError: `max_norm=-1.0` is not a norm. Use a number from 0 on",
    "sharded.clip_grad_norm_('1.0')": "ConfigError: `max_norm='1.0'` is not a norm. Use a number",
    "save_checkpoint('saved', sharded, optimizer)": "CheckpointError: .*`optimizers` is one SGD. Pass a list: `[optim",
    "save_checkpoint('saved', model)": "CheckpointError: `sharded` is a Linear. Pass what `shard()` returned",
    "save_checkpoint(sharded, 'saved')": "CheckpointError: `sharded` is a str. Pass what `shard()` returned, after the",
    "load_weights(sharded, 'saved')": "CheckpointError: `sharded` is a str. Pass what `shard()` returned, after the",
}


def answer(ctx: RankContext, mistake: str) -> str:
    """What a mistake raises on this rank."""
    os.chdir(ctx.tmp_path)
    model = nn.Linear(4, 4)
    names = {"shard": shard, "save_checkpoint": save_checkpoint, "load_weights": load_weights, "torch": torch}
    names |= {"model": model, "sharded": shard(model, "mics"), "optimizer": torch.optim.SGD(model.parameters())}
    try:
        eval(mistake, names)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.one_job
@pytest.mark.parametrize("mistake", MISTAKES)
def test_every_rank_says_what_to_do(ranks: RankPool, mistake: str) -> None:
    pattern = re.escape(MISTAKES[mistake]).replace(r"\.\*", ".*")
    answers = ranks(2, answer, mistake)
    assert [bool(re.match(pattern, text)) for text in answers] == [True, True], answers
