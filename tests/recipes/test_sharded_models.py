"""Every family on two ranks: a start on the meta device is a normal start, and the sharded step is the plain one."""

from typing import Any

import torch

from mics_strategy import ShardConfig, shard
from recipes.models.build import build_model
from recipes.models.config import IMAGE_FAMILIES, ModelConfig
from tests.ranks import RankContext, RankPool

TEXT = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 88, "num_layers": 3, "num_heads": 4}
MODELS = {
    "llama": ModelConfig(**TEXT, num_kv_heads=2, activation_checkpointing=True),
    "gpt2": ModelConfig(family="gpt2", **TEXT, dropout=0.0),
    "bert": ModelConfig(family="bert", **TEXT, dropout=0.0, activation_checkpointing=True),
    "roberta": ModelConfig(family="roberta", **TEXT, dropout=0.0),
    "pre": ModelConfig(family="roberta", **TEXT, dropout=0.0, norm_position="pre"),
    "wide_resnet": ModelConfig(
        family="wide_resnet", stage_blocks=(1, 2, 1, 1), width_factor=2, base_width=4, num_classes=7
    ),
}
ON_META, NORMAL = "on meta", "normal"


def built(config: ModelConfig) -> Any:
    torch.manual_seed(0)
    return build_model(config, 12)


def step(model: Any, config: ModelConfig) -> None:
    """Take one step on the same batch on every rank, so that the mean gradient is that of one process."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if config.family in IMAGE_FAMILIES:
        logits = model(torch.linspace(-1, 1, 2 * 3 * 64 * 64).reshape(2, 3, 64, 64))
    else:
        logits = model(input_ids=torch.arange(24).reshape(2, 12) * 7 % 300).logits
    logits.float().logsumexp(-1).mean().backward()
    optimizer.step()


def train_sharded(_: RankContext, start: str) -> dict[str, dict[str, torch.Tensor]]:
    """Return the weights of every model after a step; they begin as those of a plain one."""
    weights = {}
    for name, config in MODELS.items():
        plain = built(config)
        if start == ON_META:
            with torch.device("meta"):
                model: Any = build_model(config, 12)
        else:
            model = plain
        state = {key: value.clone() for key, value in plain.state_dict().items()}
        sharded = shard(model, ShardConfig.preset("mics", partition_size=2))
        if start == ON_META:
            sharded.load_full_state_dict(state)
        step(model, config)
        weights[name] = sharded.full_state_dict()
    return weights


def test_a_start_on_meta_trains_as_a_normal_one_and_both_as_one_process(ranks: RankPool):
    normal, on_meta = (ranks(2, train_sharded, start)[0] for start in (NORMAL, ON_META))
    for name, config in MODELS.items():
        assert normal[name].keys() == on_meta[name].keys()
        assert [key for key in normal[name] if not torch.equal(normal[name][key], on_meta[name][key])] == [], name
        model = built(config)
        before = {key: value.clone() for key, value in model.state_dict().items()}
        step(model, config)
        expected = model.state_dict()
        assert any(not torch.equal(before[key], expected[key]) for key in expected)
        for key, value in normal[name].items():
            torch.testing.assert_close(value, expected[key], rtol=1e-5, atol=1e-6, msg=lambda m, k=key: f"{k}: {m}")
