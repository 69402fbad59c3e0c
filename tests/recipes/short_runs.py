"""Runs of a tiny recipe in this process, without ranks."""

import contextlib
import io
import json
import os
from pathlib import Path
from unittest import mock

from accelerate.state import AcceleratorState

from recipes.config import load_recipe
from recipes.pretrain import pretrain

DEBUG = Path(__file__).resolve().parents[2] / "recipes" / "llama" / "debug.yaml"
STRATEGIES = {"lightning": "auto", "accelerate": "ddp"}


def run_debug_recipe(
    output_dir: Path, cache_dir: Path, *options: str, framework: str = "lightning", draws: bool = False
) -> str:
    """Train the smallest recipe for 7 steps with a log every 3 steps; return what it prints.

    Args:
        output_dir: Folder of the run.
        cache_dir: Folder of the prepared data.
        options: Further options of the recipe.
        framework: Loop that trains.
        draws: Whether the page has plots, which take most of the time.
    """
    given = [
        *(f"--config={DEBUG}", f"--data.cache_dir={cache_dir}", f"--trainer.output_dir={output_dir}"),
        *(f"--trainer.framework={framework}", f"--strategy.name={STRATEGIES[framework]}", "--strategy.shard={}"),
        *("--trainer.devices=1", "--trainer.max_steps=7", "--trainer.log_every_steps=3"),
        *("--batch.global_size=8", "--batch.micro_size=4", "--sample.num_tokens=0", *options),
    ]
    output = io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(output))
        stack.enter_context(mock.patch.dict(os.environ))  # frameworks note seeds there
        if not draws:
            stack.enter_context(mock.patch("recipes.report_page._plots", return_value=[]))
        pretrain(load_recipe(given, has_cuda=False))
    AcceleratorState._reset_state(reset_partial_state=True)
    return output.getvalue()


def check_run(output_dir: Path) -> None:
    """Check that a run of a small version has taken two steps, and validated before and after them."""
    records = [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in records if "loss" in record]
    assert [record["step"] for record in records if "loss" in record] == [1, 2]
    assert all(0 < loss < 20 for loss in losses)
    assert [record["step"] for record in records if "validation_loss" in record] == [0, 2]
