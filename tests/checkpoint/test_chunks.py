"""Metadata of a distributed checkpoint describes every value once, or the tensor and the place are named."""

import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex

from mics_strategy import CheckpointError
from mics_strategy.checkpoint.chunks import check_metadata
from mics_strategy.checkpoint.load import load_checkpoint
from mics_strategy.checkpoint.safe_reader import METADATA, SafeReader
from mics_strategy.checkpoint.save import save_checkpoint
from mics_strategy.checkpoint.weights import load_weights
from tests.checkpoint.test_sharded import run_of
from tests.engine.training import Run, start
from tests.ranks import RankContext, RankPool

NAME = "model.w"


def chunk(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved")
    model = {"w": torch.zeros(6, 4), "scalar": torch.tensor(1.0), "empty": torch.zeros(0, 3)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one process is meant
        dcp.save({"model": model, "note": "a"}, checkpoint_id=path, no_dist=True)
    return path


def described(folder: Path, chunks: list[ChunkStorageMetadata]) -> Metadata:
    """The metadata with other chunks of `NAME`, all of them stored."""
    metadata: Metadata = pickle.loads((folder / METADATA).read_bytes())
    place = next(info for index, info in metadata.storage_data.items() if index.fqn == NAME)
    metadata.state_dict_metadata[NAME].chunks = chunks
    metadata.storage_data |= {MetadataIndex(NAME, part.offsets): place for part in chunks}
    return metadata


WHOLE = {
    "one": [chunk((0, 0), (6, 4))],
    "rows": [chunk((4, 0), (2, 4)), chunk((0, 0), (4, 4))],
    "columns": [chunk((0, column), (6, 1)) for column in range(4)],
    "a grid": [chunk((row, column), (3, 2)) for row in (0, 3) for column in (2, 0)],
    "bricks": [chunk((0, 0), (3, 3)), chunk((0, 3), (6, 1)), chunk((3, 0), (3, 1)), chunk((3, 1), (3, 2))],
    "an empty one": [chunk((0, 0), (6, 4)), chunk((6, 0), (0, 4))],
}
TORN: dict[str, tuple[list[ChunkStorageMetadata], str]] = {
    "none": ([], r"no chunk holds 24 of the 24 values of `model\.w`, the first at offsets \[0, 0\]"),
    "no first": ([chunk((2, 0), (4, 4))], r"no chunk holds 8 .* the first at offsets \[0, 0\]"),
    "no middle": ([chunk((0, 0), (2, 4)), chunk((4, 0), (2, 4))], r"no chunk holds 8 .* the first at offsets \[2, 0\]"),
    "no corner": ([chunk((0, 0), (6, 2)), chunk((0, 2), (4, 2))], r"no chunk holds 4 .* the first at offsets \[4, 2\]"),
    "twice": (
        [chunk((0, 0), (6, 4)), chunk((0, 0), (6, 4))],
        r"offsets \[0, 0\].* and the .*offsets \[0, 0\].* overlap",
    ),
    "a row twice": (
        [chunk((0, 0), (4, 4)), chunk((3, 0), (3, 4))],
        r"offsets \[0, 0\] of sizes \[4, 4\] and the .* \[3, 0\] of sizes \[3, 4\] of `model\.w` overlap",
    ),
    "as many values": ([chunk((0, 0), (4, 4)), chunk((2, 0), (2, 4))], "overlap"),
    "a column twice": ([chunk((0, 0), (6, 3)), chunk((0, 2), (6, 2))], "overlap"),
    "too far": ([chunk((0, 0), (6, 4)), chunk((6, 0), (1, 4))], r"offsets \[6, 0\].* leaves its shape \[6, 4\]"),
    "too wide": ([chunk((0, 0), (6, 5))], r"leaves its shape \[6, 4\]"),
    "another rank": ([chunk((0,), (24,))], r"a chunk of `model\.w` is not in it"),
}


@pytest.mark.parametrize("kind", WHOLE)
def test_chunks_that_cover_a_tensor_once_are_read(kind: str, folder: Path) -> None:
    check_metadata(described(folder, WHOLE[kind]))


@pytest.mark.parametrize("kind", TORN)
def test_a_missing_or_repeated_part_is_named(kind: str, folder: Path) -> None:
    chunks, words = TORN[kind]
    with pytest.raises(ValueError, match=words):
        check_metadata(described(folder, chunks))


def test_a_second_scalar_is_a_repeated_part(folder: Path) -> None:
    metadata: Metadata = pickle.loads((folder / METADATA).read_bytes())
    metadata.state_dict_metadata["model.scalar"].chunks *= 2
    with pytest.raises(ValueError, match=r"`model\.scalar` overlap"):
        check_metadata(metadata)


def first_place(found: Metadata) -> Any:
    return next(iter(found.storage_data.values()))


FIELDS: dict[str, tuple[Callable[[Any], object], str]] = {
    "a shape of words": (lambda found: setattr(found.state_dict_metadata[NAME], "size", ("a", 4)), "has no shape"),
    "a negative shape": (lambda found: setattr(found.state_dict_metadata[NAME], "size", (-6, -4)), "has no shape"),
    "a dtype of words": (lambda found: setattr(found.state_dict_metadata[NAME].properties, "dtype", "O8"), "or dtype"),
    "an entry of another class": (lambda found: found.state_dict_metadata.update({NAME: 3}), "is a int"),
    "no entries": (lambda found: setattr(found, "state_dict_metadata", []), "it has no entries"),
    "no places": (lambda found: setattr(found, "storage_data", None), "it has no entries"),
    "a place of words": (lambda found: setattr(first_place(found), "offset", "a"), "at no offset"),
    "a place before the file": (lambda found: setattr(first_place(found), "offset", -4), "at no offset"),
    "nothing stored": (lambda found: found.storage_data.clear(), "stored nowhere"),
}


@pytest.mark.parametrize("kind", FIELDS)
def test_fields_of_another_type_are_refused(kind: str, folder: Path, tmp_path: Path) -> None:
    change, words = FIELDS[kind]
    metadata: Metadata = pickle.loads((folder / METADATA).read_bytes())
    change(metadata)
    (tmp_path / METADATA).write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=rf"\.metadata` does not describe a complete checkpoint: .*{words}"):
        SafeReader(tmp_path).read_metadata()


def word(text: str) -> bytes:
    return b"X" + len(text).to_bytes(4, "little") + text.encode()


@pytest.mark.parametrize("name", ["__eq__", "__init__", "added", "__name__"])
def test_metadata_that_assigns_to_a_class_is_refused_and_undone(name: str, tmp_path: Path) -> None:
    before = {**vars(Metadata), "name": Metadata.__name__}
    code = b"ctorch.distributed.checkpoint.metadata\nMetadata\nN}" + word(name) + word("x") + b"s\x86b."
    (tmp_path / METADATA).write_bytes(b"\x80\x02" + code)
    with pytest.raises(CheckpointError, match=f"assigns to .*{name}"):
        SafeReader(tmp_path).read_metadata()
    assert {**vars(Metadata), "name": Metadata.__name__} == before


def save(ctx: RankContext, run: Run, path: Path) -> None:
    training = start(ctx, run)
    save_checkpoint(path, training.sharded)


def refusals(ctx: RankContext, run: Run, path: Path) -> list[str]:
    training, said = start(ctx, run), []
    for load in (load_checkpoint, load_weights):
        before = {name: value.clone() for name, value in training.sharded.full_state_dict().items()}
        with pytest.raises(CheckpointError) as caught:
            load(path, training.sharded)
        said.append(str(caught.value))
        after = training.sharded.full_state_dict()
        assert all(torch.equal(value, after[name]) for name, value in before.items())
    return said


def test_a_foreign_checkpoint_without_a_chunk_is_refused_on_every_rank_before_anything_changes(
    ranks: RankPool, tmp_path: Path
) -> None:
    run = run_of("zero3", ranks_per_node=1)
    ranks(2, save, run, tmp_path / "own")
    (tmp_path / "own" / "manifest.json").unlink()  # as another library leaves it
    metadata: Metadata = pickle.loads((tmp_path / "own" / METADATA).read_bytes())
    name = next(name for name, entry in metadata.state_dict_metadata.items() if len(getattr(entry, "chunks", ())) == 2)
    lost = metadata.state_dict_metadata[name].chunks.pop()
    (tmp_path / "own" / METADATA).write_bytes(pickle.dumps(metadata))
    for said in ranks(2, refusals, run, tmp_path / "own"):
        for text in said:
            assert f"values of `{name}`, the first at offsets {list(lost.offsets)}" in text
