"""Fit a checkout for an index of packages: the project's address, and links that hold on the index's page.

Usage: python .github/prepare_release.py https://github.com/OWNER/NAME v0.1.0
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
URLS = """
[project.urls]
Source = "{home}"
Documentation = "{home}/blob/{tag}/docs/index.md"
Changelog = "{home}/blob/{tag}/docs/CHANGELOG.md"
Issues = "{home}/issues"
"""


def prepare(root: Path, home: str, tag: str) -> None:
    """Make links and pictures of README.md absolute, and add the addresses to pyproject.toml."""
    readme, project = root / "README.md", root / "pyproject.toml"
    relative = r"\]\((?!\w+:|#)([^)]+)\)"
    text = re.sub(rf"(!\[[^]]*){relative}", rf"\1]({home}/raw/{tag}/\2)", readme.read_text())
    text = re.sub(relative, rf"]({home}/blob/{tag}/\1)", text)
    readme.write_text(text)
    project.write_text(project.read_text() + URLS.format(home=home, tag=tag))


if __name__ == "__main__":
    prepare(ROOT, *sys.argv[1:])
