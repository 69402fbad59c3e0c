"""Names of the recipes, which the package finds without importing them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path


def recipes_package() -> str:
    """Name of the recipes' package. In a checkout that is not installed, they are beside this package."""
    if importlib.util.find_spec("mics_strategy.recipes") is None:
        checkout = Path(__file__).resolve().parents[1]
        if (checkout / "recipes" / "pretrain.py").is_file():
            sys.path.append(str(checkout))
            return "recipes"
    return "mics_strategy.recipes"


def recipe_names() -> set[str]:
    """Names of the project's recipes: folder and file, joined by a hyphen."""
    folders = (parent / "recipes" for parent in Path(__file__).parents[:2])  # of a wheel, of a checkout
    return {f"{file.parent.name}-{file.stem}" for folder in folders for file in folder.glob("*/*.yaml")}
