"""Prepared data: made once per machine, never half, and found again by every run.

`mics data prepare RECIPE` writes the token store of a recipe with many processes and without
a process group. Training finds the store. Small sources it prepares itself, before ranks are launched: the first
process takes a lock, the others wait for the lock and find the work done. The lock is the operating system's and
dies with its holder.
"""

import contextlib
import fcntl
import os
import shutil
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from ..errors import RecipeError
from .build import StoreRequest, build_store, reopen_as_draft, verify_store
from .config import DataConfig
from .hub import HubSource
from .images import SyntheticImages
from .progress import NoProgress, Progress
from .samples import MaskedSamples, NextTokenSamples, SampleStore
from .source import Split
from .sources import open_source
from .store import Manifest, TokenStore, open_store, open_tokenizer
from .tokenizer import Objective, TokenizerRequest, vocabulary_size

COMMAND = "mics data prepare RECIPE"


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedData:
    """What training reads.

    Args:
        train: samples to learn from.
        validation: samples of held-out documents or images.
        tokenizer: turns tokens into text and back; images have none.
        origin: a sentence for the log: where the data comes from.
        floor_nats: lowest possible mean loss per token, when the source knows it; 0.0 when unknown.
        bytes_per_token: mean length of a token's text; 0.0 for images.
        folder: where the tokens are; images are nowhere.
    """

    train: SampleStore[Any]
    validation: SampleStore[Any]
    tokenizer: Tokenizer | None
    origin: str
    floor_nats: float
    bytes_per_token: float
    folder: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where a store is, or will be.

    Args:
        request: Its contents.
        folder: Its name when it is complete.
    """

    request: StoreRequest
    folder: Path

    @property
    def lock(self) -> Path:
        """File that the process which prepares has locked."""
        return self.folder.with_suffix(".lock")

    @property
    def draft(self) -> Path:
        """Folder of a preparation that is continued after an interruption."""
        return self.folder.with_suffix(".partial")

    @property
    def own_draft(self) -> Path:
        """Folder of a preparation in this process; nothing else writes there even where locks do not work."""
        return self.folder.with_suffix(f".{socket.gethostname()}-{os.getpid()}.partial")


def prepare(config: DataConfig, vocab_size: int, objective: Objective = "causal") -> PreparedData:
    """Return the data of a recipe, preparing small sources when no earlier run did.

    Safe to call from any number of processes at once; call it in the parent, before ranks are launched, so
    that the ranks only open files.

    Args:
        config: which data, and how it is cut.
        vocab_size: largest vocabulary of the tokenizer; unused by images.
        objective: what the model predicts; unused by images.

    Returns:
        Samples over read-only memory maps.

    Cost:
        First call for a small source: reading it and about 1 s per MB for the tokenizer, and a line that says so.
        Later calls: milliseconds, and one check of size per file.

    Raises:
        RecipeError: A large source is not prepared, or a store is damaged.
    """
    if config.source == "synthetic_images":
        return _prepared_images(config)
    place = _place(config, vocab_size, objective)
    if not place.folder.is_dir():
        _refuse_large(config, place)
        place.folder.parent.mkdir(parents=True, exist_ok=True)
        with _exclusive(place.lock):
            if not place.folder.is_dir():
                print("preparing text and tokenizer, once on this machine ...", flush=True)
                _build_at_once(place)
    return _prepared_text(open_store(place.folder), config, objective)


def prepare_store(
    config: DataConfig, vocab_size: int, objective: Objective, *, workers: int, progress: Progress
) -> TokenStore:
    """Prepare the store of a recipe, or verify and repair the one that is there.

    Args:
        config: which text.
        vocab_size: largest vocabulary of the tokenizer.
        objective: what the model predicts.
        workers: processes.
        progress: shows the parts.

    Returns:
        The complete store, all of whose files were read or written just now.

    Raises:
        RecipeError: Another process prepares this store, files are missing or damaged, or a worker was killed.
    """
    place = _place(config, vocab_size, objective, download=config.download)
    place.folder.parent.mkdir(parents=True, exist_ok=True)
    with _exclusive(place.lock, waits=False):
        if place.folder.is_dir():
            if _is_intact(place, workers, progress):
                return open_store(place.folder)
        if config.download and isinstance(place.request.source, HubSource):
            place.request.source.download()
        build_store(place.request, place.folder, place.draft, workers, progress)
    return open_store(place.folder)


def objective_of(family: str) -> Objective:
    """Return what models of a family predict: hidden tokens (BERT, RoBERTa), or next ones."""
    return "masked" if "bert" in family else "causal"


def store_folder(config: DataConfig, vocab_size: int, objective: Objective) -> Path:
    """Return where the store of a recipe is, whether or not it is prepared."""
    return _place(config, vocab_size, objective).folder


def _place(config: DataConfig, vocab_size: int, objective: Objective, *, download: bool = False) -> _Place:
    tokenizer = TokenizerRequest(name=config.tokenizer, vocab_size=vocab_size, objective=objective, download=download)
    request = StoreRequest(source=open_source(config), tokenizer=tokenizer, validation_share=config.validation_share)
    return _Place(request=request, folder=_cache_folder(config.cache_dir) / f"{config.source}-{request.key}")


def _cache_folder(cache_dir: str) -> Path:
    if cache_dir != "auto":
        return Path(cache_dir).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "mics_strategy" / "recipes"


def _refuse_large(config: DataConfig, place: _Place) -> None:
    if not place.request.source.is_small:
        unfinished = " An unfinished preparation is there, which continues." if place.draft.is_dir() else ""
        raise RecipeError(
            f"`data.source={config.source}` is prepared before training, and {place.folder} does not exist."
            f"{unfinished} Run `{COMMAND}` once, without ranks, with the recipe and options of this run "
            "(and `--workers=N`); see docs/data.md. If it was run, compare `data.cache_dir`, `data.tokenizer`, "
            "`data.num_shards` and `model.vocab_size`, which name the folder."
        )


def _build_at_once(place: _Place) -> None:
    """Prepare a small source in this process; nothing is left of a failure."""
    try:
        build_store(place.request, place.folder, place.own_draft, 1, NoProgress())
    finally:
        shutil.rmtree(place.own_draft, ignore_errors=True)


def _is_intact(place: _Place, workers: int, progress: Progress) -> bool:
    """Verify a complete store; a damaged one becomes a draft that keeps its intact parts."""
    try:
        manifest = Manifest.read(place.folder)
        open_tokenizer(place.folder, manifest.tokenizer_digest)
    except RecipeError:
        shutil.rmtree(place.folder)  # nothing says what its files should be
        return False
    faulty = verify_store(place.folder, workers, progress)
    if faulty:
        shutil.rmtree(place.draft, ignore_errors=True)
        reopen_as_draft(place.folder, place.draft, place.request, faulty)
    return not faulty


def _prepared_text(store: TokenStore, config: DataConfig, objective: Objective) -> PreparedData:
    manifest = store.manifest
    num_tokens, num_bytes = manifest.total("num_tokens"), manifest.total("num_bytes")
    return PreparedData(
        train=_samples(store, "train", config, objective),
        validation=_samples(store, "validation", config, objective),
        tokenizer=store.tokenizer,
        origin=f"{manifest.origin} ({manifest.total('num_documents'):,} documents, {num_bytes / 1e6:,.2f} MB)",
        floor_nats=sum(part.information_nats for part in manifest.parts) / num_tokens,
        bytes_per_token=num_bytes / num_tokens,
        folder=store.folder,
    )


def _samples(store: TokenStore, split: Split, config: DataConfig, objective: Objective) -> SampleStore[Any]:
    stream = store.stream(split)
    name = f"{store.manifest.key}-{store.manifest.digest[:12]}"
    if objective == "causal":
        return NextTokenSamples(tokens=stream, sequence_length=config.sequence_length, name=name)
    return MaskedSamples(
        stream,
        sequence_length=config.sequence_length,
        name=name,
        special=store.manifest.special,
        vocab_size=vocabulary_size(store.tokenizer),
        mask_share=config.mask_share,
    )


def _prepared_images(config: DataConfig) -> PreparedData:
    images = config.images
    return PreparedData(
        train=SyntheticImages(config=images),
        validation=SyntheticImages(config=images, is_validation=True),
        tokenizer=None,
        origin=f"{images.count:,} synthetic images of {images.num_classes:,} classes, no files read",
        floor_nats=0.0,
        bytes_per_token=0.0,
        folder=None,
    )


@contextlib.contextmanager
def _exclusive(path: Path, *, waits: bool = True) -> Iterator[None]:
    """Hold a lock that only one process on this machine (or shared file system) can hold."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RecipeError(
                f"Another process prepares the same store now: it holds {path}. Wait for it, or stop it; what it has "
                "completed is kept."
            ) from None
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)


if __name__ == "__main__":
    from .command import main

    main()
