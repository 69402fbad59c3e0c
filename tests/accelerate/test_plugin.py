"""Does `MiCSPlugin` take what it says, and refuse the rest? No ranks are needed."""

from typing import Any

import pytest
import torch
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, StateDictType
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

from mics_strategy import Codec, ConfigError, ShardConfig
from mics_strategy.accelerate import MiCSPlugin
from tests.models import Transformer

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plugin of Accelerate writes into the environment what it was given."""
    for name in ("ACCELERATE_USE_FSDP", "FSDP_VERSION", "FSDP_CPU_RAM_EFFICIENT_LOADING"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("given", "options", "expected"),
    [
        (None, {}, ShardConfig.preset("mics")),
        ("zero3", {}, ShardConfig.preset("zero3")),
        ("zero3", {"prefetch": 2, "grad_codec": "int8"}, ShardConfig.preset("zero3", prefetch=2, grad_codec="int8")),
        (ShardConfig(partition_size=4), {"prefetch": 2}, ShardConfig(partition_size=4, prefetch=2)),
        (None, {"grad_codec": Codec(bits=4)}, ShardConfig(grad_codec=Codec(bits=4))),
        (None, {"grad_codec": {"bits": 4, "feedback": True}}, ShardConfig(grad_codec=Codec(bits=4, feedback=True))),
    ],
    ids=str,
)
def test_a_preset_a_configuration_and_options_are_taken(given: Any, options: Any, expected: ShardConfig) -> None:
    assert MiCSPlugin(given, **options).config == expected


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"partition_sise": 2}, "Unknown option 'partition_sise'.*'partition_size'"),
        ({"partition_group_size": 2}, "Unknown option 'partition_group_size'.*Known: units, recovery, activation"),
        ({"state_dict": "FULL_STATE_DICT"}, "Unknown option 'state_dict'.*'state_dict_type'"),
        ({"prefetch": 0}, "prefetch=0"),
        ({"config": "zero4"}, "zero4.*not known"),
        *(({name: value}, f"MiCSPlugin\\({name}=...\\).*FSDP.*Remove it") for name, value in {
            "sharding_strategy": "HYBRID_SHARD",
            "reshard_after_forward": False,
            "cpu_offload": True,
            "ignored_modules": [],
            "fsdp_version": 2,
            "use_orig_params": True,
            "backward_prefetch": "BACKWARD_PRE",
            "sync_module_states": True,
        }.items()),
    ],
    ids=str,
)  # fmt: skip
def test_what_means_nothing_here_is_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        MiCSPlugin(**options)


def test_words_shared_with_fsdp_keep_their_meaning() -> None:
    plugin = MiCSPlugin(
        state_dict_type="full_state_dict", activation_checkpointing=True, cpu_ram_efficient_loading=False
    )
    assert plugin.state_dict_type.name == "FULL_STATE_DICT"
    assert plugin.activation_checkpointing is True
    assert plugin.cpu_ram_efficient_loading is False
    assert plugin.fsdp_version == 2
    assert MiCSPlugin().state_dict_type.name == "SHARDED_STATE_DICT"


class Named(Transformer):
    """As models of transformers name their layers."""

    _no_split_modules = ("Block", "Absent")


UNITS = {
    "nothing": ({}, "auto"),
    "units": ({"units": 100}, 100),
    "names": ({"transformer_cls_names_to_wrap": ["Block", "Head"]}, ("Block", "Head")),
    "units before names": ({"units": "auto", "transformer_cls_names_to_wrap": ["Block"]}, "auto"),
    "the policy of layers": ({"auto_wrap_policy": "transformer_based_wrap"}, ("Block",)),
    "the policy of layers itself": ({"auto_wrap_policy": transformer_auto_wrap_policy}, ("Block",)),
    "the policy of sizes": ({"auto_wrap_policy": "size_based_wrap", "min_num_params": 500}, 500),
    "the policy of sizes itself": ({"auto_wrap_policy": size_based_auto_wrap_policy}, "auto"),
    "no policy": ({"auto_wrap_policy": "no_wrap"}, "auto"),
}


@pytest.mark.parametrize("name", UNITS)
def test_units_are_what_was_named(name: str) -> None:
    options, expected = UNITS[name]
    assert MiCSPlugin(**options).units_for(Named()) == expected


def test_a_policy_of_ones_own_chooses_modules() -> None:
    def wide(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        return not recurse and nonwrapped_numel > 1000 and isinstance(module, nn.Linear)

    rule = MiCSPlugin(auto_wrap_policy=wide).units_for(Named())
    assert [rule(nn.Linear(40, 40)), rule(nn.Linear(4, 4)), rule(nn.Embedding(40, 40))] == [True, False, False]


def test_a_precision_policy_gives_the_dtypes() -> None:
    assert MiCSPlugin(mixed_precision_policy=BF16).config == ShardConfig(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32
    )
    kept = MiCSPlugin(mixed_precision_policy=BF16, reduce_dtype=torch.float32).config
    assert kept.reduce_dtype == torch.float32
    plugin = MiCSPlugin()
    plugin.set_mixed_precision("bf16")
    assert plugin.mixed_precision_policy is None
    assert plugin.config == ShardConfig()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"mixed_precision_policy": BF16, "param_dtype": torch.float16}, "param_dtype=torch.bfloat16.*torch.float16"),
        ({"mixed_precision_policy": MixedPrecisionPolicy(cast_forward_inputs=False)}, "cast_forward_inputs"),
        (
            {"mixed_precision_policy": MixedPrecisionPolicy(output_dtype=torch.float32, param_dtype=torch.bfloat16)},
            "out",
        ),
    ],
    ids=["two dtypes", "inputs", "outputs"],
)
def test_precision_that_contradicts_itself_is_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        MiCSPlugin(**options)


def test_a_stock_plugin_of_a_script_reads_the_launchers_version(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "mics")
    monkeypatch.setenv("FSDP_SHARDING_STRATEGY", "zero3")
    stock = FullyShardedDataParallelPlugin(state_dict_type="FULL_STATE_DICT")
    plugin = MiCSPlugin.from_fsdp_plugin(stock)
    assert plugin.config == ShardConfig.preset("zero3")
    assert plugin.state_dict_type is StateDictType.FULL_STATE_DICT
    assert "the model is sharded, and of the plugin count only its `state_dict_type`" in caplog.text


def test_a_stock_plugin_is_upgraded_with_what_both_share() -> None:
    stock = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        state_dict_type="FULL_STATE_DICT",
        activation_checkpointing=True,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
    )
    plugin = MiCSPlugin.from_fsdp_plugin(stock)
    assert plugin.config == ShardConfig()
    assert plugin.state_dict_type.name == "FULL_STATE_DICT"
    assert plugin.activation_checkpointing is True
    assert plugin.units_for(Named()) == ("Block",)


@pytest.mark.parametrize(
    "options",
    [
        {"reshard_after_forward": False},
        {"cpu_offload": True},
        {"ignored_modules": "head"},
        {"fsdp_version": 1, "reshard_after_forward": "HYBRID_SHARD"},
        {"fsdp_version": 1, "cpu_offload": True},
    ],
    ids=str,
)
def test_a_stock_plugin_that_asks_for_more_is_refused(options: dict[str, Any]) -> None:
    stock = FullyShardedDataParallelPlugin(**{"fsdp_version": 2, **options})
    with pytest.raises(ConfigError, match=r"of an FSDP plugin.*is not supported"):
        MiCSPlugin.from_fsdp_plugin(stock)


@pytest.mark.parametrize("version", [1, 2])
def test_a_stock_plugin_that_asks_for_nothing_is_upgraded(version: int) -> None:
    assert MiCSPlugin.from_fsdp_plugin(FullyShardedDataParallelPlugin(fsdp_version=version)).config == ShardConfig()
