"""Is what a release uploads fit for an index of packages, and what its workflow runs there?"""

import re
import runpy
import shutil
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
HOME = "https://example.org/us/mics_strategy"


def test_links_hold_on_the_page_of_an_index(tmp_path: Path) -> None:
    for name in ("README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    runpy.run_path(str(ROOT / ".github" / "prepare_release.py"))["prepare"](tmp_path, HOME, "v1.2.3")
    text = (tmp_path / "README.md").read_text()
    links, pictures = (re.findall(rf"{mark}\[[^]]*\]\(([^)]+)\)", text) for mark in ("", "!"))
    assert f"{HOME}/blob/v1.2.3/docs/index.md" in links
    assert pictures == [f"{HOME}/raw/v1.2.3/docs/pictures/groups.svg"]  # a blob is a page around the picture
    assert [link for link in links if not link.startswith("https://")] == []
    urls = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]["urls"]
    files = [url.removeprefix(f"{HOME}/blob/v1.2.3/") for url in urls.values() if "/blob/" in url]
    assert files == [file for file in files if (ROOT / file).is_file()] != []


@pytest.mark.parametrize("workflow", sorted((ROOT / ".github" / "workflows").iterdir()), ids=lambda path: path.stem)
def test_a_workflow_runs_what_there_is(workflow: Path) -> None:
    jobs = yaml.safe_load(workflow.read_text())["jobs"].values()
    commands = "\n".join(step.get("run", "") for job in jobs for step in job["steps"])
    targets = {*re.findall(r"make ([a-z-]+)", commands)} | {
        leg["tests"] for job in jobs for leg in job.get("strategy", {}).get("matrix", {}).get("include", ())
    }
    makefile = (ROOT / "Makefile").read_text()
    assert [target for target in targets if not re.search(rf"^{target}:", makefile, flags=re.MULTILINE)] == []
    used = [step["uses"] for job in jobs for step in job["steps"] if "uses" in step]
    assert [action for action in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action)] == [], "pin the commit"
    files = re.findall(r"(?:tests|docs|\.github)/[\w./-]+", commands)
    assert [file for file in files if not (ROOT / file).exists()] == []
