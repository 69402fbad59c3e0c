"""How does text become tokens on disk, once per machine and never half?

Preparation needs no process group, so it can run long before the ranks start. The first process takes a lock,
writes into a folder beside the final one and renames it; the others wait for the lock and find the work done.
The lock is the operating system's and dies with its holder.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import BPE

from ..errors import RecipeError
from .config import DataConfig
from .corpus import Corpus, held_out
from .grammar import make_grammar_corpus
from .local_docs import read_local_docs, versions_key
from .stand_in import SyntheticImages
from .tokenizer import encode_documents, train_tokenizer
from .tokens import TokenStore

_FORMAT = 1  # counts up when equal keys would give other tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedData:
    """What training reads.

    Args:
        train: tokens to learn from.
        validation: tokens of held-out documents.
        tokenizer: turns tokens into text and back.
        origin: a sentence for the log: where the text comes from.
        floor_nats: lowest possible mean loss per token, when the source knows it; 0.0 when unknown.
        bytes_per_token: mean length of a token's text.
        folder: where all this lies.
    """

    train: TokenStore
    validation: TokenStore
    tokenizer: Tokenizer
    origin: str
    floor_nats: float
    bytes_per_token: float
    folder: Path


def prepare(config: DataConfig, vocab_size: int) -> PreparedData:
    """Return the tokens of a recipe, making them when no earlier run did.

    Safe to call from any number of processes at once; call it in the parent, before ranks are launched, so
    that the ranks only open files.

    Args:
        config: which corpus, and how it is cut.
        vocab_size: largest vocabulary of the tokenizer.

    Returns:
        Tokens as read-only memory maps.

    Cost:
        First call: reading the corpus and about 1 s per MB for the tokenizer, and a line that says so. Later
        calls: milliseconds.
    """
    if config.source == "synthetic_images":
        images: Any = SyntheticImages(config.images)
        return PreparedData(
            train=images,
            validation=images,
            tokenizer=Tokenizer(BPE()),
            origin="random images",
            floor_nats=0.0,
            bytes_per_token=1.0,
            folder=_cache_folder(config.cache_dir),
        )
    key = _key(config, vocab_size)
    folder = _cache_folder(config.cache_dir) / f"{config.source}-{key}"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _exclusive(folder.with_suffix(".lock")):
            if not folder.is_dir():
                print("preparing text and tokenizer, once on this machine ...", flush=True)
                _write_atomically(folder, _read_corpus(config), config.validation_share, vocab_size)
    facts = json.loads((folder / "facts.json").read_text())
    fingerprint = f"{key}-{facts['digest'][:12]}-s{config.sequence_length}"
    stores = {
        part: TokenStore(
            tokens=np.load(folder / f"{part}.npy", mmap_mode="r"),
            sequence_length=config.sequence_length,
            fingerprint=fingerprint,
        )
        for part in ("train", "validation")
    }
    return PreparedData(
        **stores,
        tokenizer=Tokenizer.from_file(str(folder / "tokenizer.json")),
        origin=facts["origin"],
        floor_nats=facts["floor_nats"],
        bytes_per_token=facts["num_bytes"] / facts["num_tokens"],
        folder=folder,
    )


def _key(config: DataConfig, vocab_size: int) -> str:
    """Name everything that decides the tokens, short enough for a folder name."""
    if config.source == "grammar":
        text = f"documents={config.grammar_documents}"
    else:
        text = versions_key(config.packages) if config.source == "local_docs" else ""
    described = f"{_FORMAT} {config.source} {text} held_out={config.validation_share} vocab={vocab_size}"
    return hashlib.blake2b(described.encode(), digest_size=6).hexdigest()


def _read_corpus(config: DataConfig) -> Corpus:
    if config.source == "grammar":
        return make_grammar_corpus(config.grammar_documents, seed=0)
    if config.source == "local_docs":
        return read_local_docs(config.packages)
    raise RecipeError(f"`data.source={config.source}` cannot be prepared yet. Use `grammar` or `local_docs`.")


def _cache_folder(cache_dir: str) -> Path:
    if cache_dir != "auto":
        return Path(cache_dir).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "mics_strategy" / "recipes"


def _write_atomically(folder: Path, corpus: Corpus, validation_share: float, vocab_size: int) -> None:
    """Write all files of one prepared corpus beside `folder`, then give the whole its name."""
    beside = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir()
    try:
        _write_files(beside, corpus, validation_share, vocab_size)
        beside.rename(folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _write_files(folder: Path, corpus: Corpus, validation_share: float, vocab_size: int) -> None:
    tokenizer = train_tokenizer(corpus.documents, vocab_size)
    digest, num_tokens = hashlib.blake2b(digest_size=16), 0
    for part in ("train", "validation"):
        chosen = [text for text in corpus.documents if held_out(text, validation_share) == (part == "validation")]
        if not chosen:
            raise RecipeError(
                f"`data.validation_share={validation_share}` of {len(corpus.documents)} documents leaves "
                f"none for {part}. Use a share nearer to 0.05, or a larger corpus."
            )
        tokens = encode_documents(tokenizer, chosen)
        np.save(folder / f"{part}.npy", tokens)
        digest.update(tokens.tobytes())
        num_tokens += len(tokens)
    tokenizer.save(str(folder / "tokenizer.json"))
    facts = {
        "origin": corpus.origin,
        "floor_nats": corpus.surprise_nats / num_tokens,
        "num_tokens": num_tokens,
        "num_bytes": corpus.num_bytes,
        "digest": digest.hexdigest(),
    }
    (folder / "facts.json").write_text(json.dumps(facts, indent=2) + "\n")


@contextlib.contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    """Hold a lock that only one process on this machine (or shared file system) can hold."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)
