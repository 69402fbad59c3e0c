"""The `data` block of a recipe."""

from dataclasses import dataclass, field
from typing import Literal

from ..errors import RecipeError, require

SourceName = Literal["local_docs", "grammar", "text", "wikipedia", "c4", "synthetic_images"]
HUB_SOURCES = ("wikipedia", "c4")


@dataclass(frozen=True, kw_only=True)
class ImagesConfig:
    """Images of `synthetic_images`.

    Args:
        count: images in an epoch; 1,281,167 is ImageNet's number.
        channels: channels of an image.
        size: height and width.
        num_classes: labels, 0 to num_classes - 1.
    """

    count: int = 1_281_167
    channels: int = 3
    size: int = 224
    num_classes: int = 1000

    def __post_init__(self) -> None:
        """Refuse images without pixels or classes."""
        for name in ("count", "channels", "size", "num_classes"):
            require(getattr(self, name) >= 1, f"data.images.{name}", getattr(self, name), "at least 1")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Text or images, and how they are cut into samples.

    Args:
        source: `local_docs` (English from the Python documentation on this machine), `grammar` (generated
            sentences, the same everywhere), `text` (your own files), `wikipedia` (`wikimedia/wikipedia`), `c4`
            (`allenai/c4`) or `synthetic_images`.
        path: files or folders of `text`; folder with the files of `wikipedia` or `c4`, laid out as on the hub.
        subset: configuration on the hub; `auto` is `20231101.en` for `wikipedia` and `en` for `c4`.
        num_shards: training files of `wikipedia` or `c4` to use, the first ones; `all` needs every file.
        download: allow the preparation to fetch missing files and tokenizers from the hub. Training never does.
        packages: installed packages whose documentation `local_docs` reads as well.
        grammar_documents: documents that `grammar` writes, 8 sentences each.
        images: size and number of synthetic images.
        tokenizer: `bpe` trains a byte-level BPE on the text; otherwise a tokenizer.json, a folder with one, or
            a name on the hub.
        sequence_length: tokens in a sequence.
        mask_share: part of the tokens of a sequence that a masked model predicts.
        validation_share: part of the documents that is held out; C4's own validation files are used instead.
        validation_sequences: samples in one validation pass; 0 turns validation off.
        cache_dir: where prepared tokens are kept; `auto` is `mics_strategy/recipes` in the user's cache
            folder.
    """

    source: SourceName = "local_docs"
    path: str | tuple[str, ...] = ()
    subset: str = "auto"
    num_shards: int | Literal["all"] = "all"
    download: bool = False
    packages: tuple[str, ...] = ()
    grammar_documents: int = 2000
    images: ImagesConfig = field(default_factory=ImagesConfig)
    tokenizer: str = "bpe"
    sequence_length: int = 128
    mask_share: float = 0.15
    validation_share: float = 0.05
    validation_sequences: int = 64
    cache_dir: str = "auto"

    def __post_init__(self) -> None:
        """Refuse sizes that hold no text, and options that the source does not read."""
        require(self.sequence_length >= 2, "data.sequence_length", self.sequence_length, "at least 2")
        require(0 < self.validation_share < 1, "data.validation_share", self.validation_share, "between 0 and 1")
        require(0 < self.mask_share < 1, "data.mask_share", self.mask_share, "between 0 and 1")
        require(self.validation_sequences >= 0, "data.validation_sequences", self.validation_sequences, "at least 0")
        if self.num_shards != "all":
            require(self.num_shards >= 1, "data.num_shards", self.num_shards, "`all` or at least 1")
        for package in self.packages:  # the parent of a dotted name would be imported
            require(package.isidentifier(), "data.packages", package, "names of packages without dots")
        self._check_options_of_the_source()

    @property
    def paths(self) -> tuple[str, ...]:
        """Files or folders, one or several."""
        return (self.path,) if isinstance(self.path, str) else self.path

    def _check_options_of_the_source(self) -> None:
        is_hub = self.source in HUB_SOURCES
        if self.source == "text" and not self.paths:
            raise RecipeError(
                "`data.source=text` reads your own files, but `data.path` names none. Add "
                "`--data.path=FILE_OR_FOLDER` (.txt, .md, .jsonl, .jsonl.gz or .parquet)."
            )
        if is_hub and len(self.paths) > 1:
            raise RecipeError(
                f"`data.path` names {len(self.paths)} folders for `data.source={self.source}`, which has one. "
                "Name the folder that contains all its files."
            )
        unread = {
            "path": bool(self.paths) and not is_hub and self.source != "text",
            "subset": self.subset != "auto" and not is_hub,
            "num_shards": self.num_shards != "all" and not is_hub,
            "tokenizer": self.tokenizer != "bpe" and self.source == "synthetic_images",
            "download": self.download and not is_hub and self.tokenizer == "bpe",
        }
        for name in (name for name, is_unread in unread.items() if is_unread):
            raise RecipeError(
                f"`data.{name}={getattr(self, name)}` has no effect with `data.source={self.source}`. "
                f"Remove it, or choose a source that reads it (see docs/data.md)."
            )
