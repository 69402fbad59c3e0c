"""The `strategy` block of a recipe, and what Lightning's Trainer takes in its place."""

import difflib
import importlib.util
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from mics_strategy import ShardConfig, Topology

from .errors import RecipeError
from .plain_data import Plain

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy


@dataclass(frozen=True, kw_only=True)
class StrategyConfig:
    """How ranks share the work.

    Args:
        name: any strategy name that Lightning knows. `mics` and `mics_<preset>` are this project's.
        shard: fields of `mics_strategy.ShardConfig` on top of the preset; other strategies ignore them.
        ranks_per_node: what counts as a node; `auto` asks the launcher, a number imitates nodes on one
            machine (`mics` only).
    """

    name: str = "mics"
    shard: dict[str, Plain] = field(default_factory=dict, metadata={"fields_of": ShardConfig})
    ranks_per_node: int | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        """Refuse fields that the engine does not have."""
        if is_ours(self):
            shard_config(self)


def build_strategy(config: StrategyConfig, checkpoint_format: str = "full") -> "Strategy | str":
    """Return the strategy of a recipe.

    Args:
        config: `mics` and `mics_<preset>` become a `MiCSStrategy`; any other name is left to Lightning.
        checkpoint_format: `full` or `sharded`.

    Returns:
        A strategy object, or a name from Lightning's registry.

    Raises:
        mics_strategy.errors.ConfigError: the preset or a field of `config.shard` is not valid.
        RecipeError: a name that Lightning does not know, or sharded checkpoints of another strategy.
    """
    is_sharded = checkpoint_format == "sharded"
    if not is_ours(config):
        _check_name(config.name)
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


def _check_name(name: str) -> None:
    from lightning.pytorch.strategies import StrategyRegistry

    names = {"auto", "mics", *StrategyRegistry.available_strategies()}
    if name not in names:
        matches = difflib.get_close_matches(name, sorted(names), n=1)
        hint = f" Did you mean `{matches[0]}`?" if matches else ""
        raise RecipeError(
            f"`strategy.name={name}` is no strategy of this project or of Lightning.{hint} Use one of "
            f"{', '.join(sorted(names))}."
        )
    if name.startswith("deepspeed") and importlib.util.find_spec("deepspeed") is None:
        raise RecipeError(
            f"`strategy.name={name}` needs the package `deepspeed`, which is not installed. Run `pip install "
            "deepspeed`, or use a `mics` strategy."
        )


def shard_config(config: StrategyConfig) -> ShardConfig:
    """Return what a recipe with one of this project's strategies asks of the engine.

    Raises:
        mics_strategy.errors.ConfigError: the preset or a field of `config.shard` is not valid.
    """
    fields: dict[str, Any] = dict(config.shard)
    if config.ranks_per_node != "auto":
        fields["topology"] = Topology(ranks_per_node=config.ranks_per_node)
    return ShardConfig.preset(config.name.removeprefix("mics_"), **fields)


def described(config: StrategyConfig) -> str:
    """Return the name of a strategy, with the fields that the recipe sets on top of it."""
    fields = ", ".join(f"{name}={value}" for name, value in config.shard.items()) if is_ours(config) else ""
    return f"{config.name} ({fields})" if fields else config.name


def is_ours(config: StrategyConfig) -> bool:
    """Say whether the name belongs to this project."""
    return config.name == "mics" or config.name.startswith("mics_")
