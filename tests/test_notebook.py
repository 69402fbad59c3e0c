"""Does the notebook of the first hour run, from its first cell to its last, without Jupyter?"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "docs" / "examples" / "first-hour.ipynb"
CELLS = json.loads(NOTEBOOK.read_text())["cells"]


def sources(kind: str) -> list[str]:
    return ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == kind]


def test_it_is_stored_without_outputs() -> None:
    stored = [(cell["outputs"], cell["execution_count"]) for cell in CELLS if cell["cell_type"] == "code"]
    assert stored == [([], None)] * len(sources("code"))


def test_its_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)]+)\)", "\n".join(sources("markdown")))
    assert [link for link in links if not (NOTEBOOK.parent / link).is_file()] == []
    assert links


@pytest.mark.slow
def test_its_cells_train_and_find_the_plan_and_the_losses_kept(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", "\n\n".join(sources("code"))]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr
    assert "largest difference" in run.stdout
    assert re.search(r"all_gather +planned +[1-9]", run.stdout)
