"""Does a Trainer begin with rank 0's values, though `from_pretrained` has read them on some ranks only?"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import LlamaForCausalLM, LlamaForSequenceClassification

from mics_strategy import ConfigError, shard
from tests.accelerate.runs import PLAIN, assert_same, run
from tests.accelerate.trainer_runs import Sequences, arguments, assert_same_logs, launched, llama, logs, trainer, values
from tests.ranks import RankContext, RankPool, raises_on_every_rank

CONFIGS = ["mics", "zero1"]
EFFICIENT = {"cpu_ram_efficient_loading": "true"}


def pretrained(ctx: RankContext) -> str:
    """A folder that rank 0 has written."""
    if ctx.rank == 0:
        llama(tie_word_embeddings=True).save_pretrained("pretrained")
    dist.barrier()
    return "pretrained"


def from_rank_0(ctx: RankContext) -> None:
    """What other ranks have read is overwritten, as memory that was only allocated would be anything."""
    folder = pretrained(ctx)
    found = {}
    for config in (PLAIN, *CONFIGS):
        with launched(config, **EFFICIENT):
            model = LlamaForCausalLM.from_pretrained(folder)
            if config != PLAIN and ctx.rank > 0:
                for tensor in model.parameters():
                    nn.init.constant_(tensor, ctx.rank)
            made = trainer(model, arguments("out"))
            made.train()
            found[config] = logs(made), values(made.model)
    expected_logs, expected = found.pop(PLAIN)
    for own_logs, own in found.values():
        assert_same_logs(own_logs, expected_logs)
        assert_same(own, expected, 1e-5)


def test_every_rank_begins_with_the_weights_that_rank_0_has_read(ranks: RankPool) -> None:
    run(ranks, 4, from_rank_0, ranks_per_node=2)


class Classes(Sequences):
    """Whose first token is even."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.tokens[index], "labels": int(self.tokens[index, 0]) % 2}


def with_new_head(ctx: RankContext) -> None:
    """The head is not in the files; transformers gives it values on the first rank of each node only."""
    folder = pretrained(ctx)
    found, heads = {}, []
    for config in (*CONFIGS, PLAIN):
        with launched(config, **EFFICIENT):
            torch.manual_seed(0)
            model = LlamaForSequenceClassification.from_pretrained(folder, num_labels=2, pad_token_id=0)
            heads.append(model.score.weight.is_meta)
            made = trainer(model, arguments("out"))
            made.train_dataset, made.eval_dataset = Classes(10 * ctx.world_size), Classes(13)
            made.train()
            found[config] = logs(made), values(made.model)
    assert heads == [*(len(CONFIGS) * [ctx.local_rank > 0]), False]
    expected_logs, expected = found.pop(PLAIN)
    for own_logs, own in found.values():
        assert_same_logs(own_logs, expected_logs)
        assert_same(own, expected, 1e-5)


@pytest.mark.slow
def test_a_head_that_only_some_ranks_have_trains_as_with_ddp(ranks: RankPool) -> None:
    run(ranks, 4, with_new_head, ranks_per_node=2)


def half_on_meta(ctx: RankContext) -> None:
    with torch.device("meta" if ctx.rank == 1 else "cpu"):
        model = nn.Linear(3, 3)
    shard(model, "zero3")


def test_a_model_that_is_on_meta_on_some_ranks_only_is_refused_by_shard(ranks: RankPool) -> None:
    raises_on_every_rank(lambda: run(ranks, 2, half_on_meta), ConfigError, "meta tensors.*0 parameters.*2 parameters")
