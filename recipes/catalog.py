"""The recipes that come with the project, and what each of them trains."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from .config import Recipe, load_recipe, recipe_files
from .files import ROOT
from .models.build import num_parameters


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
        global_batch=recipe.global_batch,
        data=recipe.data.source,
        cluster=recipe.cluster.name,
    )
