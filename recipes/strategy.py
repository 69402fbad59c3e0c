"""How does the `strategy` block of a recipe become what Lightning's Trainer takes?"""

from typing import TYPE_CHECKING, Any

from mics_strategy import ShardConfig, Topology

from .config import StrategyConfig
from .errors import RecipeError

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy


def build_strategy(config: StrategyConfig, checkpoint_format: str = "full") -> "Strategy | str":
    """Return the strategy of a recipe.

    Args:
        config: `mics` and `mics_<preset>` become a `MiCSStrategy`; any other name is left to Lightning.
        checkpoint_format: `full` or `sharded`.

    Returns:
        A strategy object, or a name from Lightning's registry.

    Raises:
        mics_strategy.errors.ConfigError: the preset or a field of `config.shard` is not valid.
        RecipeError: sharded checkpoints of another strategy.
    """
    is_sharded = checkpoint_format == "sharded"
    if not is_ours(config):
        if is_sharded:
            raise RecipeError(
                f"`trainer.checkpoint_format=sharded` with `strategy.name={config.name}`: only `mics` strategies write "
                "sharded checkpoints here. Use `--trainer.checkpoint_format=full`."
            )
        return config.name
    from mics_strategy.lightning import MiCSStrategy

    strategy: Strategy = MiCSStrategy(
        shard_config(config), state_dict_type=checkpoint_format, save_asynchronously=is_sharded
    )
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
