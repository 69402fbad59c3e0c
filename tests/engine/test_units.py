"""Choice of units, and the unit of a parameter that several units share."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from mics_strategy import ShardConfig, Topology
from mics_strategy.engine import layout as layout_module
from mics_strategy.engine import units as units_module
from mics_strategy.engine.units import UnitSpec, find_units
from mics_strategy.errors import ConfigError
from tests import models
from tests.engine.training import Run, start
from tests.models import Block, Residual, Transformer
from tests.ranks import RankContext, RankPool, simulate


class EncoderDecoder(nn.Module):
    """Two layer classes, each repeated.

    The decoder's layers hold an inner layer of the encoder's kind.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.encoder = nn.ModuleList(Block(8, 2, 16) for _ in range(3))
        self.decoder = nn.ModuleDict({name: Decoder() for name in "ab"})
        self.head = nn.Linear(8, 20)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cross = nn.MultiheadAttention(8, 2)
        self.inner = nn.Sequential(Residual(8, 9), Residual(8, 9))


class SharesModule(nn.Module):
    """Two layers that hold the same norm module."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.LayerNorm(4)
        self.layers = nn.ModuleList(nn.ModuleDict({"linear": nn.Linear(4, 4), "norm": norm}) for _ in range(2))
        self.other = nn.Linear(4, 4)


def _names(units: Iterable[UnitSpec]) -> list[str]:
    return [unit.name for unit in units]


def _owners(units: list[UnitSpec]) -> dict[str, str]:
    return {entry.name: unit.name for unit in units for entry in unit.parameters}


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (models.mlp().build(), ["", "0", "2", "3", "4"]),
        (models.transformer().build(), ["", "blocks.0", "blocks.1", "blocks.2"]),
        (models.conv_bn().build(), ["", "blocks.0", "blocks.1", "blocks.2"]),
        (EncoderDecoder(), ["", "encoder.0", "encoder.1", "encoder.2", "decoder.a", "decoder.b"]),
        (nn.Linear(3, 3), [""]),
        (nn.Sequential(nn.Linear(3, 3), nn.ReLU()), [""]),
        (models.shared().build(), [""]),
    ],
    ids=["mlp", "transformer", "conv", "encoder-decoder", "one layer", "one of a kind", "no container"],
)
def test_auto_takes_the_repeated_layers(model: nn.Module, expected: list[str]) -> None:
    assert _names(find_units(model, "auto")) == expected


def test_auto_takes_the_outer_of_nested_layers() -> None:
    units = find_units(EncoderDecoder(), "auto")
    assert not any("inner" in name for name in _names(units))


def test_auto_leaves_small_change_with_the_root() -> None:
    model = nn.Sequential(nn.ModuleList(nn.LayerNorm(2) for _ in range(3)), nn.Linear(50, 50), nn.Linear(50, 50))
    assert _names(find_units(model, "auto")) == ["", "1", "2"]


class LanguageModel(nn.Module):
    """Repeated blocks between an embedding, which the head may share, and an attention that is not repeated."""

    def __init__(self, *, tie: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(300, 8)
        self.blocks = nn.ModuleList(Block(8, 2, 400) for _ in range(2))
        self.attention = nn.MultiheadAttention(48, 2)
        self.small = nn.Linear(8, 8)
        self.head = nn.Linear(8, 300, bias=False)
        if tie:
            self.head.weight = self.embedding.weight


@pytest.fixture
def large_is_2000(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mics_strategy.engine.units.LARGE_NUMEL", 2000)


@pytest.mark.usefixtures("large_is_2000")
def test_auto_takes_large_embeddings_and_heads_outside_of_layers() -> None:
    units = find_units(LanguageModel(tie=False), "auto")
    assert _names(units) == ["", "embedding", "blocks.0", "blocks.1", "head"]
    assert _owners(units)["attention.out_proj.weight"] == ""  # of 2304 numbers, which the attention reads itself


@pytest.mark.usefixtures("large_is_2000")
def test_tied_large_embedding_stays_with_the_unit_around_both() -> None:
    units = find_units(LanguageModel(tie=True), "auto")
    assert _names(units) == ["", "blocks.0", "blocks.1"]
    assert _owners(units)["embedding.weight"] == ""


def test_llama_has_units_of_its_embedding_and_its_head() -> None:
    with torch.device("meta"):
        model = Transformer()
        model.embedding, model.head = nn.Embedding(32000, 4096), nn.Linear(4096, 32000, bias=False)
    names = _names(find_units(model, "auto"))
    assert [name for name in names if "blocks" not in name] == ["", "embedding", "head"]


def test_class_takes_all_its_instances() -> None:
    assert _names(find_units(EncoderDecoder(), Residual)) == [
        "",
        *[f"decoder.{name}.inner.{i}" for name in "ab" for i in range(2)],
    ]


def test_several_classes_nest() -> None:
    units = find_units(EncoderDecoder(), [Decoder, Residual])
    assert [(unit.name, unit.depth) for unit in units] == [
        ("", 0),
        ("decoder.a", 1),
        ("decoder.a.inner.0", 2),
        ("decoder.a.inner.1", 2),
        ("decoder.b", 1),
        ("decoder.b.inner.0", 2),
        ("decoder.b.inner.1", 2),
    ]


def test_predicate_chooses_any_modules() -> None:
    units = find_units(Transformer(), lambda module: isinstance(module, nn.Linear) and module.bias is not None)
    assert len(units) == 1 + 3 * 4


def test_number_takes_the_innermost_modules_of_that_size() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), nn.Linear(9, 9), nn.Linear(2, 2))
    assert _names(find_units(model, 20)) == ["", "0", "1"]


def test_number_above_the_model_leaves_the_root() -> None:
    assert _names(find_units(Transformer(), 10**9)) == [""]


def test_root_is_a_unit_once_when_a_rule_takes_it() -> None:
    assert _names(find_units(Transformer(), Transformer)) == [""]


@pytest.mark.parametrize("rule", ["auto", Residual, 50], ids=["auto", "class", "number"])
def test_every_parameter_has_one_owner(rule: object) -> None:
    model = EncoderDecoder()
    owners = _owners(find_units(model, rule))
    assert sorted(owners) == sorted(name for name, _ in model.named_parameters())


@pytest.mark.parametrize("rule", ["auto", Residual, 50], ids=["auto", "class", "number"])
def test_owner_is_the_innermost_unit_around(rule: object) -> None:
    units = find_units(EncoderDecoder(), rule)
    for name, owner in _owners(units).items():
        around = [unit.name for unit in units if not unit.name or name.startswith(unit.name + ".")]
        assert owner == max(around, key=len)


def test_tied_parameter_belongs_to_the_root_when_its_modules_share_no_unit() -> None:
    model = Transformer(tie=True)
    model.blocks[1].down.weight = model.blocks[0].down.weight
    owners = _owners(find_units(model, Block))
    assert owners["embedding.weight"] == ""
    assert owners["blocks.0.down.weight"] == ""
    assert "head.weight" not in owners


def test_tied_parameter_belongs_to_the_unit_around_all_its_modules() -> None:
    model = EncoderDecoder()
    first, second = model.decoder["a"].inner
    second.up.weight = first.up.weight
    owners = _owners(find_units(model, [Decoder, Residual]))
    assert owners["decoder.a.inner.0.up.weight"] == "decoder.a"


def test_tied_parameter_stays_inside_a_unit_with_all_its_modules() -> None:
    model = Transformer()
    model.blocks[1].norm2.weight = model.blocks[1].norm1.weight
    assert _owners(find_units(model, Block))["blocks.1.norm1.weight"] == "blocks.1"


def test_tied_parameter_lists_all_its_locations() -> None:
    model = Transformer(tie=True)
    locations = next(
        e.locations for unit in find_units(model, Block) for e in unit.parameters if e.name == "embedding.weight"
    )
    assert locations == [(model.embedding, "weight"), (model.head, "weight")]


def test_unit_name_that_begins_like_another_is_not_inside_it() -> None:
    model = nn.ModuleDict({"a": Residual(2, 2), "ab": Residual(2, 2)})
    model["ab"].down.weight = model["a"].down.weight
    assert _owners(find_units(model, Residual))["a.down.weight"] == ""


def test_parameters_of_a_module_shared_by_units_belong_around_them() -> None:
    model = SharesModule()
    units = find_units(model, lambda module: isinstance(module, nn.ModuleDict))
    assert _owners(units)["layers.0.norm.weight"] == ""


CUTS = {  # the rule, the smallest large layer, the largest bucket
    "root": ("Block", 10**9, 10**9),
    "own units": ("auto", 100, 10**9),
    "own units in buckets": ("auto", 100, 1000),
}


@contextmanager
def cut(name: str) -> Iterator[str]:
    """Cut parameters in this way, in this process; yields the rule."""
    rule, large_numel, bucket_bytes = CUTS[name]
    with (
        mock.patch.object(units_module, "LARGE_NUMEL", large_numel),
        mock.patch.object(layout_module, "MAX_BUCKET_BYTES", bucket_bytes),
    ):
        yield rule


def bits(ctx: RankContext, preset: str, name: str, rule: str) -> list[Any]:
    """Losses and parameters of a training."""
    config = ShardConfig.preset(preset, topology=Topology(ranks_per_node=2), prefetch=2)
    training = start(ctx, Run(case=models.transformer, config=config, accumulation=2, units=rule))
    losses = [training.step(step) for step in range(2)]
    units = training.sharded.internals.units
    assert {"embedding", "head"} <= {unit.name for unit in units} or rule != "auto"
    assert (max(len(unit.buckets) for unit in units) > 2) == (name == "own units in buckets")
    return [losses, *(each.tolist() for each in training.parameters().values())]


def bits_by_cut(ctx: RankContext, preset: str) -> dict[str, list[Any]]:
    outcomes = {}
    for name in CUTS:
        with cut(name) as rule:
            outcomes[name] = bits(ctx, preset, name, rule)
    return outcomes


@pytest.mark.parametrize("preset", ["mics", "paro-nig"])
def test_units_and_buckets_do_not_change_a_bit(ranks: RankPool, preset: str) -> None:
    for outcomes in ranks(4, bits_by_cut, preset, ranks_per_node=2):
        assert outcomes["own units"] == outcomes["root"]
        assert outcomes["own units in buckets"] == outcomes["root"]


@pytest.mark.parametrize("preset", ["mics", "paro-nig"])
def test_units_and_buckets_do_not_change_a_bit_where_a_stream_orders_collectives(preset: str) -> None:
    outcomes = {}
    for name in CUTS:
        with cut(name) as rule:
            outcomes[name] = simulate(4, bits, preset, name, rule, ranks_per_node=2)
    assert outcomes["own units"] == outcomes["root"]
    assert outcomes["own units in buckets"] == outcomes["root"]


def test_missing_class_is_refused_with_the_present_ones() -> None:
    with pytest.raises(ConfigError, match=r"no module of class Conv2d\. It has .*LayerNorm"):
        find_units(Transformer(), nn.Conv2d)


@pytest.mark.parametrize("rule", ["Block", "tests.models.Block", ["Block"], [Block, "Block"]], ids=repr)
def test_a_class_may_be_given_by_its_name(rule: object) -> None:
    model = Transformer()
    assert [unit.name for unit in find_units(model, rule)] == [unit.name for unit in find_units(model, Block)]


@pytest.mark.parametrize("rule", ["Blok", [Block, "Blok"]], ids=repr)
def test_unknown_class_name_is_refused_next_to_known_ones(rule: object) -> None:
    with pytest.raises(ConfigError, match=r"no module of class Blok\. It has Block"):
        find_units(Transformer(), rule)


@pytest.mark.parametrize("rule", [True, 1.5, None, [1], [], torch.zeros(1)], ids=repr)
def test_rule_of_another_kind_is_refused(rule: object) -> None:
    with pytest.raises(ConfigError, match="`units"):
        find_units(Transformer(), rule)
