"""How does the `strategy` block of a recipe become what Lightning's Trainer takes?"""

from typing import TYPE_CHECKING, Any

from mics_strategy import ShardConfig, Topology
from recipes.config import StrategyConfig

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy


def build_strategy(config: StrategyConfig) -> "Strategy | str":
    """Return the strategy of a recipe.

    Args:
        config: `mics` and `mics_<preset>` become a `MiCSStrategy`; any other name is left to Lightning.

    Returns:
        A strategy object, or a name from Lightning's registry.

    Raises:
        mics_strategy.errors.ConfigError: the preset or a field of `config.shard` is not valid.
    """
    if not is_ours(config):
        return config.name
    from mics_strategy.lightning import MiCSStrategy

    strategy: Strategy = MiCSStrategy(shard_config(config))
    return strategy


def shard_config(config: StrategyConfig) -> ShardConfig:
    """Return what a recipe with one of this project's strategies asks of the engine.

    Raises:
        mics_strategy.errors.ConfigError: the preset or a field of `config.shard` is not valid.
    """
    fields: dict[str, Any] = dict(config.shard)
    if config.ranks_per_node != "auto":
        fields["topology"] = Topology(ranks_per_node=config.ranks_per_node)
    return ShardConfig.preset(config.name.removeprefix("mics_"), **fields)


def is_ours(config: StrategyConfig) -> bool:
    """Say whether the name belongs to this project."""
    return config.name == "mics" or config.name.startswith("mics_")
