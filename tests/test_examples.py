"""Do the example scripts run, and does the change that is shown for each give the same losses?"""

import functools
import os
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import yaml

from mics_strategy.accelerate import MiCSPlugin, framework
from tests.accelerate.runs import forget
from tests.lightning.runs import in_lightning
from tests.ranks import RankContext, RankPool

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "integrations.md").read_text()
SECTIONS = {title: text for title, text in re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)}
_kept: list[dict[str, Any]] = []  # on a rank: torch's DDP may hang when it is freed after its process group
LAUNCHED = {"Accelerate", "transformers.Trainer"}  # configured by the launcher: their scripts stay as they are


def script_of(section: str) -> Path:
    (path,) = set(re.findall(r"docs/(examples/\w+\.py)", SECTIONS[section]))
    return DOCS / path


def changed(section: str) -> str:
    """The script with the changes of its section."""
    text = script_of(section).read_text()
    if section in LAUNCHED:
        assert "```diff" not in SECTIONS[section]
        return text
    (diff,) = re.findall(r"```diff\n(.*?)```", SECTIONS[section], re.DOTALL)
    for hunk in diff.split("@@\n"):
        lines = hunk.splitlines()
        before = "".join(f"{line[1:]}\n" for line in lines if line[:1] != "+")
        after = "".join(f"{line[1:]}\n" for line in lines if line[:1] != "-")
        assert text.count(before) == 1, f"{section}: the script has this {text.count(before)} times:\n{before}"
        text = text.replace(before, after)
    return text


def environment(section: str) -> dict[str, str]:
    """What the launcher makes of the file that the page shows."""
    if section not in LAUNCHED:
        return {}
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    options = {name.removeprefix("fsdp_"): value for name, value in yaml.safe_load(text)["fsdp_config"].items()}
    return {"ACCELERATE_USE_FSDP": "true", **{f"FSDP_{name.upper()}": str(value) for name, value in options.items()}}


def executed(ctx: RankContext, code: str, *, asks: bool = False) -> str:
    """What a script prints last on this rank; `asks` tells whether its Accelerator shall have been ours."""
    printed: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        names = {"__name__": "__main__", "print": printed.append}
        exec(compile(code, "example.py", "exec"), names)
    _kept.append(names)
    assert isinstance(framework.current_plugin(), MiCSPlugin) == asks
    if dist.is_initialized():
        dist.barrier()  # gloo may wait for ever for a rank that has left
        dist.destroy_process_group()
    forget()
    return printed[-1]


@pytest.mark.parametrize("section", SECTIONS)
def test_the_change_gives_the_same_losses(ranks: RankPool, section: str) -> None:
    env = {"ACCELERATE_USE_CPU": "true"}
    plain = ranks(2, in_lightning, executed, script_of(section).read_text(), default_group=False, env=env)
    env |= environment(section)
    asking = functools.partial(executed, asks=section in LAUNCHED)
    sharded = ranks(2, in_lightning, asking, changed(section), default_group=False, env=env)
    assert all(re.fullmatch(r"rank \d: loss \d\.\d{4}", line) for line in plain)
    losses, expected = ([float(line.split()[-1]) for line in lines] for lines in (sharded, plain))
    assert losses == pytest.approx(expected, abs=2e-4)


def test_every_script_is_shown() -> None:
    assert {script_of(section) for section in SECTIONS} == set((DOCS / "examples").glob("*.py"))
    assert len(SECTIONS) == 5
    assert os.path.isfile(DOCS / "integrations.md")
