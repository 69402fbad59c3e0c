"""Does everything in the README that can be run, run?"""

import contextlib
import io
import re
from pathlib import Path

from tests.ranks import RankContext, RankPool

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PYTHON_BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def printed_by(ctx: RankContext, code: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(code, "README.md", "exec"), {})
    return printed.getvalue()


def test_the_training_example_uses_the_models_device() -> None:
    assert "device=sharded.device" in PYTHON_BLOCKS[0]


def test_the_plain_example_runs_on_four_ranks_and_prints_what_a_page_explains(ranks: RankPool) -> None:
    (example,) = [block for block in PYTHON_BLOCKS if "init_process_group" in block]
    first, *others = ranks(4, printed_by, example, default_group=False)
    assert others == [""] * 3
    loss, _, *rows = first.splitlines()
    assert re.fullmatch(r"loss 0\.\d{4}", loss)
    explained = (ROOT / "docs" / "concepts.md").read_text().split("## The plan")[1].split("\n## ")[0]
    axes, dtypes = ({row.split()[column] for row in rows} for column in (1, 3))
    assert axes == {"intra_node.0", "intra_node.1", "intra_node.0+intra_node.1"}
    assert all(f"`{axis}`" in explained for axis in axes)
    assert dtypes == {"float32", "int32"}
    assert "int32" in explained


def test_it_fits_on_one_page() -> None:
    assert len(README.splitlines()) <= 120


def test_its_first_command_is_the_demo() -> None:
    assert re.findall(r"```bash\n(\S+ \S+)", README)[0] == "make demo"


def test_its_commands_are_targets_of_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text()
    commands = re.findall(r"(?:^|`)make ([\w-]+)", README, flags=re.MULTILINE)
    assert {*commands} == {"demo", "test", "test-all"}
    assert all(re.search(rf"^{command}:", makefile, flags=re.MULTILINE) for command in commands)
    (config,) = re.findall(r"--config (\S+)", makefile)
    assert (ROOT / config).is_file()


def test_continuous_integration_runs_the_same_test_command() -> None:
    commands = (ROOT / ".ci" / "run").read_text().splitlines()
    assert {"time make test", "make test-slow", "make lint"} <= set(commands)


def test_every_path_it_names_exists() -> None:
    tree = README.split("## Where things are")[1].split("```text")[1].split("```")[0]
    paths = [line.split()[0] for line in tree.splitlines() if re.match(r"\s*[\w./]+\s{2,}\w", line)]
    missing = [p for p in paths if not ((ROOT / p).exists() or (ROOT / "mics_strategy" / p).exists())]
    assert missing == []
    assert len(paths) >= 8
