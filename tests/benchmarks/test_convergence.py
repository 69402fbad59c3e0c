"""Does the comparison of what was learned count right, and does the command train what it says?"""

import json
import math
import re
from pathlib import Path

import pytest

from benchmarks.convergence import VARIANTS, Row, curve_table, main, parser, rows, table
from benchmarks.learning import Curve, learn
from mics_strategy import ShardConfig
from recipes.config import load_recipe
from tests.ranks import RankContext, RankPool

ROOT = Path(__file__).parents[2]
DOCS, DEMO = ROOT / "docs", ROOT / "recipes" / "llama" / "demo.yaml"
PAGES = "\n".join((DOCS / name).read_text() for name in ("benchmarks.md", "lab-book.md"))
SMALL = "model.hidden_size=32 model.intermediate_size=64 model.num_heads=1 model.num_kv_heads=1 data.sequence_length=16"


def curve(variant: str, seed: int, *losses: float, sent_bytes: int = 1000) -> Curve:
    return Curve(
        variant=variant,
        seed=seed,
        steps=tuple(range(len(losses))),
        losses=losses,
        train_losses=losses[1:],
        sent_bytes=sent_bytes,
        elapsed_s=1.0,
    )


CURVES = [
    curve("uncompressed", 1, 6.0, 4.0),
    curve("int8-int4", 1, 6.0, 4.04, sent_bytes=250),
    curve("uncompressed", 2, 6.0, 2.0),
    curve("int8-int4", 2, 6.0, 1.9, sent_bytes=250),
]


def test_each_end_is_compared_with_the_uncompressed_one_of_its_seed() -> None:
    base, encoded = rows(CURVES)
    assert base == Row(variant="uncompressed", loss=3.0, distances=(0.0, 0.0), sent_share=1.0)
    assert (encoded.variant, encoded.loss, encoded.sent_share) == ("int8-int4", pytest.approx(2.97), 0.25)
    assert encoded.distances == pytest.approx((0.01, -0.05))
    assert encoded.largest == pytest.approx(-0.05)


def test_a_training_that_gave_nan_is_the_farthest() -> None:
    assert math.isnan(Row(variant="a", loss=math.nan, distances=(0.5, math.nan, -0.7), sent_share=1.0).largest)


def test_tables_are_aligned() -> None:
    assert table(rows(CURVES)).splitlines() == [
        "variant         loss  seed 1  seed 2  largest   sent",
        "uncompressed  3.0000  +0.00%  +0.00%   +0.00%  1.000",
        "int8-int4     2.9700  +1.00%  -5.00%   -5.00%  0.250",
    ]
    assert curve_table(CURVES).splitlines() == [
        "steps             0      1",
        "uncompressed  6.000  3.000",
        "int8-int4     6.000  2.970",
    ]


def test_an_unknown_variant_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--variants", "int2"]) == 2
    assert "`int2` is no variant" in capsys.readouterr().err


@pytest.mark.weekly
def test_variants_learn_and_the_encoded_one_sends_less(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    generated = f"data.source=grammar data.grammar_documents=200 data.cache_dir={tmp_path} data.validation_sequences=32"
    variants = "int8-int4-half outer-30-warm"
    arguments = f"--variants {variants} --seeds 3 --steps 9 --every 4 --timeout-s 200 --recipe {SMALL} {generated}"
    assert main([*arguments.split(), "--output", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "convergence.json").read_text())
    assert [row["variant"] for row in found["rows"]] == ["uncompressed", *variants.split()]
    assert 0.1 < found["rows"][1]["sent_share"] < 0.4
    for learned in found["curves"]:
        assert (learned["seed"], learned["steps"]) == (3, [0, 4, 8, 9])
        assert learned["losses"][-1] < learned["losses"][0]
    plain, encoded, _ = (learned["losses"] for learned in found["curves"])
    assert plain == pytest.approx(encoded, rel=0.02)
    assert plain != encoded
    assert "int8-int4-half" in capsys.readouterr().out


def learned(ctx: RankContext, configs: dict[int, ShardConfig]) -> tuple[float, ...]:
    """Losses on held-out text before the first step and after each of eight."""
    cache = ctx.tmp_path / "data"
    generated = f"data.source=grammar data.grammar_documents=200 data.cache_dir={cache} data.validation_sequences=16"
    changes = f"{SMALL} {generated} model.vocab_size=512 model.num_layers=1 batch.global_size=8 batch.micro_size=2"
    arguments = [f"--{change}" for change in (*changes.split(), "trainer.max_steps=8", "schedule.warmup_steps=1")]
    recipe = load_recipe([f"--config={DEMO}", *arguments], has_cuda=False)
    return learn(recipe, "", configs, every=1).losses


def test_a_synchronous_training_continues_with_outer_steps(ranks: RankPool) -> None:
    synchronous = ShardConfig.preset("mics", topology={"ranks_per_node": 2})
    outer = synchronous.replace(outer_every=2, outer_lr=1e-9, outer_momentum=0.0)  # each returns to where it began
    whole, losses = ranks(4, learned, {0: synchronous})[0], ranks(4, learned, {0: synchronous, 4: outer})[0]
    assert losses[:5] == whole[:5]
    assert losses[6] == pytest.approx(losses[4], rel=1e-5)
    assert losses[8] == pytest.approx(losses[4], rel=1e-5)
    assert {losses[step] < losses[4] * (1 - 1e-3) for step in (5, 7)} == {True}


def test_every_command_of_the_page_is_one() -> None:
    commands = re.findall(r"^python -m benchmarks.convergence(.*)$", PAGES.replace("\\\n", ""), flags=re.MULTILINE)
    assert commands
    for command in commands:
        assert {*parser().parse_args(command.split()).variants} <= {*VARIANTS}
