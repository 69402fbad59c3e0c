"""Which configurations are refused, and what do the presets mean?"""

import re
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from mics_strategy import ShardConfig, Topology
from mics_strategy.errors import ConfigError, MiCSError

LETTERS = {"n": "replicate", "i": "partition", "g": "world"}
SENSIBLE = ("nnn", "nni", "nng", "nii", "nig", "ngg", "ini", "ing", "iii", "iig", "igg", "gng", "gig", "ggg")
REFUSED = [
    *[
        (name, value)
        for name in ("params", "grads", "optimizer", "secondary_params")
        for value in ("node", "all", 0, -2, True, 2.0)
    ],
    ("secondary_params", "auto"),
    *[("partition_size", value) for value in ("none", "partition", 0, -1, False, 1.5, None)],
    *[("hierarchical", value) for value in ("yes", "65536", 0, -1, 65536.0, None)],
    *[("weight_codec", value) for value in ("int3", "fp8", 8, None)],
    *[("grad_codec", value) for value in ("int3", "INT4", None)],
    *[("codec_links", value) for value in ("fast", "none", None)],
    *[("grad_codec_hops", value) for value in ("both", "third", None)],
    *[("grad_codec_until", value) for value in (-0.1, 1.1, float("nan"), "half", None)],
    *[("param_dtype", value) for value in (torch.int8, torch.bool, "int32", "bf16", "nn", None, 16)],
    *[("reduce_dtype", value) for value in (torch.int64, "float8", None)],
    *[("optimizer_layout", value) for value in ("columns", None)],
    *[("second_hop", value) for value in ("step", "never", None)],
    *[("overlap", value) for value in ("some", {"gather", "everything"}, "gather", None, 1, [["gather"]])],
    *[("prefetch", value) for value in (0, -1, True, 1.5, "2", None)],
    *[("topology", value) for value in ("nodes", 8, None, {"ranks": 8}, {})],
]


@pytest.mark.parametrize(("name", "value"), REFUSED, ids=[f"{n}={v!r}" for n, v in REFUSED])
def test_value_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"`{name}=")) as caught:
        ShardConfig(**{name: value})
    assert "Use " in str(caught.value)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: ShardConfig.preset("micz"), r"`preset='micz'` is not known. Did you mean mics.* Use one of auto, ddp"),
        (lambda: ShardConfig.preset("FULL_SHARD"), r"`preset='FULL_SHARD'` is not known. Did you mean zero3"),
        (lambda: ShardConfig.preset(None), r"`preset=None` is not known.*Use one of auto, ddp"),
        (
            lambda: ShardConfig.preset("mics", partition=2),
            r"Unknown option 'partition'. Did you mean partition_size.* Use",
        ),
        (lambda: ShardConfig().replace(prefech=2), r"Unknown option 'prefech'. Did you mean prefetch.* Use one of"),
        (lambda: ShardConfig.of({"preset": "mics"}), r"`config={'preset': 'mics'}` is no config.*Use a preset's name"),
    ],
)
def test_a_mistake_is_answered_with_what_to_do(made: Callable[[], ShardConfig], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        made()


def test_none_is_another_word_for_replicate() -> None:
    assert ShardConfig(params="none", grads="none", optimizer="none") == ShardConfig.preset("ddp")
    assert ShardConfig(params="replicate", secondary_params="none").params == "replicate"


def test_config_error_is_a_value_error_of_this_package() -> None:
    assert issubclass(ConfigError, ValueError)
    assert issubclass(ConfigError, MiCSError)


def test_unknown_preset_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="zero9") as caught:
        ShardConfig.preset("zero9")
    assert all(name in str(caught.value) for name in ShardConfig.PRESETS)


@pytest.mark.parametrize("letters", [p + g + o for p in "nig" for g in "nig" for o in "nig"])
def test_only_the_fourteen_sensible_triples_are_presets(letters: str) -> None:
    if letters in SENSIBLE:
        config = ShardConfig.preset(f"paro-{letters}")
        assert (config.params, config.grads, config.optimizer) == tuple(LETTERS[letter] for letter in letters)
    else:
        with pytest.raises(ConfigError, match=letters):
            ShardConfig.preset(f"paro-{letters}")


@pytest.mark.parametrize(
    ("preset", "letters"),
    [("ddp", "nnn"), ("zero1", "nng"), ("zero2", "ngg"), ("zero3", "ggg"), ("mics", "iii"), ("hsdp", "iii")],
)
def test_named_preset_is_its_triple(preset: str, letters: str) -> None:
    assert ShardConfig.preset(preset) == ShardConfig.preset(f"paro-{letters}")


def test_zeropp_is_zero3_with_all_three_parts_of_the_paper() -> None:
    copy_alone = ShardConfig.preset("zero3", secondary_params="partition")
    assert ShardConfig.preset("zeropp_hpz") == copy_alone
    quantized = copy_alone.replace(weight_codec="int8", grad_codec="int4", codec_links="all")
    assert ShardConfig.preset("zeropp") == quantized


def test_preset_is_found_in_any_spelling() -> None:
    assert ShardConfig.preset("PaRO_IIG") == ShardConfig.preset("paro-iig")


def test_preset_takes_overrides() -> None:
    config = ShardConfig.preset("zero3", prefetch=3, param_dtype="bfloat16")
    assert (config.params, config.prefetch, config.param_dtype) == ("world", 3, torch.bfloat16)


def test_preset_refuses_an_unknown_option_by_name() -> None:
    with pytest.raises(ConfigError, match="'prefetsch'"):
        ShardConfig.preset("zero3", prefetsch=3)


def test_overridden_preset_is_validated() -> None:
    with pytest.raises(ConfigError, match="prefetch"):
        ShardConfig.preset("mics", prefetch=0)


def test_replace_validates_again() -> None:
    with pytest.raises(ConfigError, match="overlap"):
        ShardConfig().replace(overlap="some")


def test_config_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        ShardConfig().prefetch = 2


def test_all_means_every_overlap() -> None:
    assert ShardConfig(overlap="all") == ShardConfig(overlap={"gather", "reduce", "second_hop", "update"})


def test_dtype_names_are_dtypes() -> None:
    assert ShardConfig(param_dtype="bfloat16") == ShardConfig(param_dtype=torch.bfloat16)


def test_description_differs_where_the_configuration_does() -> None:
    first, second = ShardConfig().describe(), ShardConfig(topology=Topology(ranks_per_node=2), prefetch=2).describe()
    assert {name for name in first if first[name] != second[name]} == {"topology", "prefetch"}


@pytest.mark.slow
def test_description_is_equal_in_processes_with_other_hash_seeds() -> None:
    code = "from mics_strategy import ShardConfig; print(ShardConfig().describe())"
    texts = set()
    for seed in (1, 2):
        child = subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": str(seed), "PYTHONPATH": ":".join(filter(None, sys.path)), "PATH": ""},
            capture_output=True,
            text=True,
            check=True,
        )
        texts.add(child.stdout)
    assert len(texts) == 1
