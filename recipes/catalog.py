"""The recipes that come with the project: their names, files and facts."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from .config import Recipe, load_recipe, recipe_files
from .errors import RecipeError
from .models.build import num_parameters

ROOT = Path(__file__).parent


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogEntry:
    """One line of the catalog.

    Attributes:
        name: Name of the recipe.
        family: Architecture.
        parameters: Exact number of parameters, counted on the meta device; tied ones once.
        sequence_length: Tokens of a sequence, or pixels along the edge of an image.
        global_batch: Samples in one optimizer step.
        data: Data set.
        cluster: Machines that the recipe is meant for.
    """

    name: str
    family: str
    parameters: int
    sequence_length: int
    global_batch: int
    data: str
    cluster: str


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
        f"`{text}` is neither a file nor a recipe. The recipes are: {', '.join(by_name)}. `mics pretrain --list` shows "
        "what each trains."
    )


def catalog() -> list[CatalogEntry]:
    """Describe every recipe, by family and size."""
    recipes = [load_recipe([f"--config={file}"], has_cuda=False) for file in recipe_files(ROOT)]
    entries = [_describe(recipe) for recipe in recipes]
    return sorted(entries, key=lambda entry: (entry.family, entry.parameters))


def catalog_json(entries: Sequence[CatalogEntry]) -> str:
    """Return the catalog as a JSON list."""
    return json.dumps([asdict(entry) for entry in entries], indent=2)


def catalog_table(entries: Sequence[CatalogEntry]) -> str:
    """Return the catalog as a table."""
    rows = [("name", "family", "parameters", "length", "batch", "data", "cluster")]
    rows += [
        (
            *(entry.name, entry.family, f"{entry.parameters:,}", f"{entry.sequence_length}"),
            *(f"{entry.global_batch:,}", entry.data, entry.cluster),
        )
        for entry in entries
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    alignment = "<<>>><<"
    return "\n".join(
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, alignment, widths, strict=True)).rstrip()
        for row in rows
    )


def _describe(recipe: Recipe) -> CatalogEntry:
    return CatalogEntry(
        name=recipe.name,
        family=recipe.model.family,
        parameters=num_parameters(recipe.model, recipe.sample_size),
        sequence_length=recipe.sample_size,
        global_batch=recipe.batch.global_size,
        data=recipe.data.source,
        cluster=recipe.cluster.name,
    )
