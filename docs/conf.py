"""Sphinx's settings for the site of these pages: `make docs` builds it.

The pages are written for GitHub first: they hold plain Markdown and relative links. What a site needs beyond that (the
sidebar, addresses of files that are no pages) is added here while a page is read.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import mics_strategy

if TYPE_CHECKING:
    from docutils import nodes
    from sphinx.addnodes import pending_xref
    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment

DOCS = Path(__file__).parent
PAGE_SUFFIXES = {".md", ".rst"}

project = "mics_strategy"
author = "The mics_strategy authors"
version = release = mics_strategy.__version__
html_title = f"{project} {version}"
html_theme = "furo"
html_static_path, html_css_files = ["static"], ["phone.css"]
html_copy_source = html_show_copyright = False

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
myst_heading_anchors = 4  # those that GitHub makes, to which the pages link
myst_disable_syntax = ["myst_line_comment", "myst_block_break", "myst_target"]  # "30\n% of" is text, as on GitHub

linkcheck_anchors = False  # GitHub's pages make theirs with a script

default_role = "code"  # docstrings write `names` in single backticks
napoleon_google_docstring, napoleon_numpy_docstring = True, False
napoleon_use_ivar = True  # attributes in a list, not each as an entry of its own
napoleon_custom_sections = ["Cost", "Source"]
autodoc_member_order = "bysource"
autodoc_typehints = "description"  # beside the text of each argument; the signatures have 27 of them
autodoc_typehints_description_target = "documented_params"
add_module_names = False
python_use_unqualified_type_names = True
maximum_signature_line_length = 100
toc_object_entries_show_parents = "hide"


def source_address(path: Path) -> str:
    """Address of a file or folder of the repository: of this commit on GitHub, or of this checkout."""
    checkout = DOCS.parent
    home = checkout.as_uri()
    if "GITHUB_REPOSITORY" in os.environ:
        home = "{GITHUB_SERVER_URL}/{GITHUB_REPOSITORY}/blob/{GITHUB_SHA}".format(**os.environ)
    return f"{home}/{path.relative_to(checkout)}"


def with_addresses(text: str, folder: Path) -> str:
    """The text of a page in `folder`, with links that leave the pages led to the repository."""

    def lead(link: re.Match[str]) -> str:
        path = (folder / link["path"]).resolve()
        if not path.exists() or (DOCS in path.parents and path.suffix in PAGE_SUFFIXES):
            return link[0]
        # As HTML: Markdown has no links to addresses that begin with file:.
        return f'<a class="reference external" href="{source_address(path)}{link["anchor"]}">{link["text"]}</a>'

    return re.sub(r"(?<!!)\[(?P<text>[^]]*)\]\((?P<path>[^)\s#:]+)(?P<anchor>[^)\s:]*)\)", lead, text)


def with_sidebar(text: str) -> str:
    """The text of the index, with a hidden table of contents of the pages that each section links to."""
    tables, placed = [], set()
    for section in text.split("\n## ")[1:]:
        links = re.findall(r"\[([^]]+)\]\(([\w/-]+\.(?:md|rst))\)", section)
        lines = [f"{title[0].upper()}{title[1:]} <{page}>" for title, page in links if page not in placed]
        placed.update(page for _, page in links)
        caption, listed = section.partition("\n")[0], "\n".join(lines)
        tables.append(f"```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{listed}\n```\n")
    return "\n".join([text, *tables])


def read_page(app: Sphinx, page: str, source: list[str]) -> None:
    """Add to a page what only the site needs."""
    source[0] = with_addresses(source[0], (DOCS / page).parent)
    if page == "index":
        source[0] = with_sidebar(source[0])


def public_name(app: Sphinx, env: BuildEnvironment, xref: pending_xref, content: nodes.Element) -> nodes.Node | None:
    """Lead a type, which annotations name by the module that defines it, to the public name that is documented."""
    if xref.get("refdomain") != "py":
        return None
    python, name = env.get_domain("py"), xref["reftarget"].rpartition(".")[2]
    for package in ("", ".lightning", ".accelerate", ".planner"):
        target = f"mics_strategy{package}.{name}"
        if target in python.objects:
            return python.resolve_xref(env, xref["refdoc"], app.builder, "obj", target, xref, content)
    return None


def setup(app: Sphinx) -> None:
    """Connect the functions above."""
    app.connect("source-read", read_page)
    app.connect("missing-reference", public_name)
