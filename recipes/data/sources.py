"""The source that a recipe names."""

from pathlib import Path
from typing import assert_never

from .config import DataConfig
from .grammar import GrammarSource
from .hub import C4, WIKIPEDIA, HubSource
from .local_docs import LocalDocsSource
from .source import TextSource
from .text_files import TextFiles


def open_source(config: DataConfig) -> TextSource:
    """Return the source of text of a recipe; no file is opened yet.

    Args:
        config: Its `source` is not `synthetic_images`.
    """
    match config.source:
        case "grammar":
            return GrammarSource(num_documents=config.grammar_documents)
        case "local_docs":
            return LocalDocsSource(packages=config.packages)
        case "text":
            return TextFiles(tuple(Path(path) for path in config.paths))
        case "wikipedia" | "c4":
            dataset = WIKIPEDIA if config.source == "wikipedia" else C4
            subset = dataset.subset if config.subset == "auto" else config.subset
            path = Path(config.paths[0]) if config.paths else "none"
            return HubSource(dataset=dataset, subset=subset, num_shards=config.num_shards, path=path)
        case "synthetic_images":
            raise AssertionError("synthetic images have no text")
        case _:
            assert_never(config.source)
