"""Wikipedia and C4, from files laid out as on the Hugging Face hub.

Files are read by `datasets`, one after the other and without its shuffle buffer. Nothing is fetched while they are
read: `download` brings the missing files first, in one process, so that a job of many ranks never asks the hub.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from ..errors import RecipeError
from .source import SPLITS, Document, Split, TextPart, import_extra

_COLUMN = "text"


@dataclass(frozen=True, slots=True, kw_only=True)
class HubDataset:
    """A data set on the hub.

    Args:
        name: Value of `data.source`.
        repository: Name on the hub.
        subset: Configuration that `auto` means.
        prefix: Beginning of the files' names.
        separator: Between the split and the number of a file.
        suffix: End of the files' names.
        reader: Builder of `datasets` that reads the files.
        licence: Licence of the text, for the log.
    """

    name: str
    repository: str
    subset: str
    prefix: str
    separator: str
    suffix: str
    reader: Literal["parquet", "json"]
    licence: str

    def file_name(self, split: str, index: str, total: str) -> str:
        """Return the name of a file: `train-00000-of-00041.parquet`, `c4-train.00000-of-01024.json.gz`."""
        return f"{self.prefix}{split}{self.separator}{index}-of-{total}{self.suffix}"


WIKIPEDIA = HubDataset(
    name="wikipedia",
    repository="wikimedia/wikipedia",
    subset="20231101.en",
    prefix="",
    separator="-",
    suffix=".parquet",
    reader="parquet",
    licence="CC BY-SA 3.0 and GFDL",
)
C4 = HubDataset(
    name="c4",
    repository="allenai/c4",
    subset="en",
    prefix="c4-",
    separator=".",
    suffix=".json.gz",
    reader="json",
    licence="ODC-BY and the terms of use of Common Crawl",
)


@dataclass(frozen=True)
class HubSource:
    """The documents of a data set on the hub, one part per file.

    Args:
        dataset: Which one.
        subset: Configuration, a folder on the hub.
        num_shards: Training files to use, the first ones, or `all`.
        path: Folder with the files, or with a folder named like the subset.
    """

    dataset: HubDataset
    subset: str
    num_shards: int | Literal["all"]
    path: Path | Literal["none"]

    @property
    def origin(self) -> str:
        """Where the text comes from, and its licence."""
        shards = "" if self.num_shards == "all" else f", first {self.num_shards} training files"
        return f"{self.dataset.repository} {self.subset}{shards} ({self.dataset.licence})"

    @property
    def identity(self) -> str:
        """Name, configuration and number of files; a store is found where the files are not."""
        return f"{self.dataset.repository} {self.subset} shards={self.num_shards}"

    @property
    def is_small(self) -> bool:
        """Never: training only reads what the command has prepared."""
        return False

    @cached_property
    def folder(self) -> Path:
        """The folder that contains the files.

        Raises:
            RecipeError: There is no such folder.
        """
        if self.path == "none":
            raise RecipeError(
                f"`data.source={self.dataset.name}` needs files, and `data.path` names no folder. {self._how_to_get()}"
            )
        path = self.path.expanduser()
        folder = path / self.subset if (path / self.subset).is_dir() else path
        if not folder.is_dir():
            raise RecipeError(f"`data.path={self.path}` is not a folder. {self._how_to_get()}")
        return folder

    def parts(self) -> tuple[TextPart, ...]:
        """Return one part per file: those of `train`, then those of `validation`.

        Raises:
            RecipeError: Files are missing.
        """
        train, validation = (self._files(split) for split in SPLITS)
        if not train:
            expected = self.dataset.file_name("train", "00000", "NNNNN")
            raise RecipeError(
                f"`data.path={self.path}` has no training file of {self.dataset.repository}: {self.folder} contains "
                f"none named like {expected}. {self._how_to_get()}"
            )
        train_split: Split | Literal["by_hash"] = "train" if validation else "by_hash"
        parts = [TextPart(name=f"train-{index:05d}", files=(file,), split=train_split) for index, file in train.items()]
        return (
            *parts,
            *(
                TextPart(name=f"validation-{index:05d}", files=(file,), split="validation")
                for index, file in validation.items()
            ),
        )

    def read(self, part: TextPart) -> Iterator[Document]:
        """Read the documents of one file.

        Raises:
            RecipeError: The file is damaged or has no column of text.
        """
        (file,) = part.files
        try:
            for row in self._rows(file):
                if _COLUMN not in row:
                    raise RecipeError(f"{file} has no column `{_COLUMN}`; found {sorted(row)}. {self._how_to_get()}")
                yield Document(row[_COLUMN] or "")
        except (OSError, EOFError, ValueError) as error:  # pyarrow's errors are ValueErrors
            if isinstance(error, RecipeError):
                raise
            raise RecipeError(
                f"{file} cannot be read: {error}. The download may have been interrupted: delete the file, fetch it "
                "again and repeat the command; parts that are prepared are kept."
            ) from error

    def download(self) -> None:
        """Fetch missing files into the folder, in this process alone. A second call continues the first.

        Raises:
            RecipeError: The hub cannot be reached, or refuses.
        """
        huggingface_hub = import_extra("huggingface_hub")
        if self.path == "none":
            raise RecipeError("`data.download` needs a folder for the files. Name it with `--data.path=FOLDER`.")
        indices = ["*"] if self.num_shards == "all" else [f"{index:05d}" for index in range(self.num_shards)]
        names = [self.dataset.file_name(split, index, "*") for split in SPLITS for index in indices]
        try:
            huggingface_hub.snapshot_download(
                self.dataset.repository,
                repo_type="dataset",
                allow_patterns=[f"{self.subset}/{name}" for name in names],
                local_dir=self.path.expanduser(),
                max_workers=4,  # more are answered with 429 sooner
            )
        except Exception as error:  # whatever the connection raises
            raise RecipeError(
                f"`data.download` asked the hub for {self.dataset.repository} and failed: {error}. Files that arrived "
                f"are kept in {self.path}; run the command again, or fetch them elsewhere: {self._how_to_get()}"
            ) from error

    def _files(self, split: Split) -> dict[int, Path]:
        """Return the files of a split by number, checked for gaps, limited to `num_shards`."""
        pattern = re.compile(
            re.escape(self.dataset.file_name(split, "NUMBER", "TOTAL"))
            .replace("NUMBER", r"(\d{5})")
            .replace("TOTAL", r"(\d{5})")
        )
        matches = [(match, file) for file in self.folder.iterdir() if (match := pattern.fullmatch(file.name))]
        totals = {int(match[2]) for match, _ in matches}
        if len(totals) > 1:
            raise RecipeError(
                f"{self.folder} mixes {split} files of {' and '.join(map(str, sorted(totals)))}, which are two "
                "versions of the data set. Keep one of them."
            )
        files = {int(match[1]): file for match, file in sorted(matches, key=lambda pair: pair[1])}
        total = max(totals, default=0)
        needed = total if self.num_shards == "all" else min(self.num_shards, total)
        if split == "train" and self.num_shards != "all" and self.num_shards > total > 0:
            raise RecipeError(
                f"`data.num_shards={self.num_shards}` asks for more files than {self.dataset.repository} {self.subset} "
                f"has: {total}. Use `--data.num_shards=all`."
            )
        missing = [index for index in range(needed) if index not in files]
        if missing:
            raise RecipeError(
                f"{self.folder} has {len(files)} of {total} {split} files of {self.dataset.repository}; number "
                f"{missing[0]} of the {needed} needed ones is missing. Fetch the rest (`--data.download=true`), or use "
                "the first files only with `--data.num_shards=N`."
            )
        return {index: files[index] for index in range(needed)}

    def _rows(self, file: Path) -> Iterator[dict[str, Any]]:
        datasets = import_extra("datasets")
        datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False  # each reading of a local file would be sent to a counter
        options = {"columns": [_COLUMN]} if self.dataset.reader == "parquet" else {}
        rows = datasets.load_dataset(
            self.dataset.reader, data_files=[str(file)], split="train", streaming=True, **options
        )
        return iter(rows)

    def _how_to_get(self) -> str:
        return (
            f"Fetch them once with `hf download {self.dataset.repository} --repo-type dataset --include "
            f'"{self.subset}/*" --local-dir FOLDER` and add `--data.path=FOLDER`, or let the preparation do it with '
            "`--data.path=FOLDER --data.download=true`."
        )
