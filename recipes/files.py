"""The files of the recipes that come with the project, by name."""

from pathlib import Path

from mics_strategy.errors import nearest

from .config import recipe_files
from .errors import RecipeError

ROOT = Path(__file__).parent


def name_of(file: Path) -> str:
    """Return the name of a recipe's file: folder and stem, joined by a hyphen."""
    return f"{file.parent.name}-{file.stem}"


def find_recipe(text: str) -> Path:
    """Return the file of a recipe.

    Args:
        text: Path of a YAML file, or the name of a recipe of the project.

    Raises:
        RecipeError: There is neither such a file nor such a recipe.
    """
    path = Path(text)
    if path.is_file():
        return path
    by_name = {name_of(file): file for file in recipe_files(ROOT)}
    if text in by_name:
        return by_name[text]
    raise RecipeError(
        f"`{text}` is neither a file nor a recipe.{nearest(text, by_name)} `mics pretrain --list` shows what "
        "each trains."
    )
