"""Is nothing read that is not the checkpoint's own, whatever its manifest or its description names?"""

import enum
import io
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mics_strategy import CheckpointError
from mics_strategy.checkpoint import atomic
from mics_strategy.checkpoint.load import load_checkpoint
from mics_strategy.checkpoint.manifest import NAME, Manifest
from mics_strategy.checkpoint.save import save_checkpoint
from mics_strategy.checkpoint.weights import load_weights
from tests.checkpoint.test_atomic import manifest
from tests.checkpoint.test_sharded import run_of
from tests.engine.training import Run, start
from tests.ranks import RankContext, RankPool

EMPTY = {"num_bytes": 0, "sha256": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"}


def edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    found = json.loads((path / NAME).read_text())
    change(found)
    (path / NAME).write_text(json.dumps(found))


def names(file: str) -> Callable[[Path], None]:
    return lambda path: edit(path, lambda found: found["files"].update({file: EMPTY}))


def forgets(file: str) -> Callable[[Path], None]:
    return lambda path: edit(path, lambda found: found["files"].pop(file))


def put_pipe(path: Path) -> None:
    (path / "pipe").unlink(missing_ok=True)
    os.mkfifo(path / "pipe")
    names("pipe")(path)


def link_to_device(path: Path) -> None:
    (path / "link").symlink_to("/dev/zero")
    names("link")(path)


def redirect(path: Path) -> None:
    """Let the description name a file elsewhere, and the manifest know the new description."""
    found = pickle.loads((path / ".metadata").read_bytes())
    for piece in found.storage_data.values():
        piece.relative_path = f"../other/{piece.relative_path}"
    describe(path, pickle.dumps(found))


class EnumsByName(pickle.Pickler):
    """Pickles as Python 3.11.2."""

    def reducer_override(self, obj: object) -> Any:
        return (getattr, (type(obj), obj.name)) if isinstance(obj, enum.Enum) else NotImplemented


def pickle_enums_by_name(path: Path) -> None:
    file = io.BytesIO()
    EnumsByName(file).dump(pickle.loads((path / ".metadata").read_bytes()))
    assert b"getattr" in file.getvalue()
    describe(path, file.getvalue())


class Reach:
    """Unpickled, it is the attribute of a class that metadata may hold."""

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (Path, "unlink")


def describe(path: Path, metadata: bytes) -> None:
    """Write a description, and let the manifest know it."""
    (path / ".metadata").write_bytes(metadata)
    entry = atomic.entry_of(path / ".metadata")
    described = {"num_bytes": entry.num_bytes, "sha256": entry.sha256}
    edit(path, lambda manifest: manifest["files"].update({".metadata": described}))


CHANGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "a device": (names("/dev/zero"), "`files` names '/dev/zero', which is outside the folder"),
    "a file above": (names("../../etc/passwd"), "`files` names '../../etc/passwd', which is outside the folder"),
    "a pipe": (put_pipe, "pipe` is not a regular file"),
    "a link to a device": (link_to_device, "link` is not a regular file"),
    "an unlisted shard": (
        forgets("__1_0.distcp"),
        f"__1_0.distcp` does not belong to the checkpoint.*`{NAME}` does not list it",
    ),
    "an unlisted description": (forgets(".metadata"), r"\.metadata` does not belong to the checkpoint"),
    "a description of elsewhere": (
        redirect,
        r"\.metadata` names `../other/__\d_0.distcp`, which is outside the folder",
    ),
    "an attribute": (
        lambda path: describe(path, pickle.dumps(Reach())),
        r"not checkpoint metadata \(it needs the attribute unlink of <class 'pathlib\.Path'>",
    ),
    "a word for a number": (
        lambda path: edit(path, lambda found: found.update(step="x")),
        "`step` is 'x' instead of an integer",
    ),
}


def save(ctx: RankContext, run: Run, path: Path) -> None:
    training = start(ctx, run)
    training.step(0)
    save_checkpoint(path, training.sharded, [training.optimizer], {"epoch": 1})


def refusals(ctx: RankContext, run: Run, paths: list[Path]) -> list[str]:
    """What is said of each, by both ways of loading it."""
    training, said = start(ctx, run), []
    for path in paths:
        for load in (
            lambda path=path: load_checkpoint(path, training.sharded, [training.optimizer]),
            lambda path=path: load_weights(path, training.sharded),
        ):
            with pytest.raises(CheckpointError) as caught:
                load()
            said.append(str(caught.value))
    return said


def test_what_is_not_the_checkpoints_own_is_refused_on_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    run = run_of("zero3", ranks_per_node=1)
    ranks(2, save, run, tmp_path / "whole")
    paths = []
    for number, (change, _) in enumerate(CHANGES.values()):
        paths.append(tmp_path / str(number))
        shutil.copytree(tmp_path / "whole", paths[-1])
        change(paths[-1])
    for said in ranks(2, refusals, run, paths):
        for place, (_, words) in enumerate(CHANGES.values()):
            for text in said[2 * place : 2 * place + 2]:
                assert re.search(words, text), text


def load_step(ctx: RankContext, run: Run, path: Path) -> dict[str, Any]:
    training = start(ctx, run)
    return load_checkpoint(path, training.sharded, [training.optimizer])


def test_the_description_of_every_python_is_read(ranks: RankPool, tmp_path: Path) -> None:
    run = run_of("zero3", ranks_per_node=1)
    ranks(2, save, run, tmp_path / "one")
    pickle_enums_by_name(tmp_path / "one")
    assert ranks(2, load_step, run, tmp_path / "one") == [{"epoch": 1}] * 2


def load_with_stranger(ctx: RankContext, run: Run, path: Path) -> str:
    training = start(ctx, run)
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path, training.sharded)
    return str(caught.value)


def test_extras_that_were_added_later_are_refused(ranks: RankPool, tmp_path: Path) -> None:
    run = run_of("zero3", ranks_per_node=1)
    ranks(2, save, run, tmp_path / "one")
    forgets("meta.pt")(tmp_path / "one")
    for said in ranks(2, load_with_stranger, run, tmp_path / "one"):
        assert "meta.pt` does not belong to the checkpoint" in said


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("step", -1, "`step` is -1"),
        ("step", True, "`step` is True"),
        ("step", 1.5, "`step` is 1.5"),
        ("world_size", 0, "`world_size` is 0"),
        ("pending_micro_steps", None, "`pending_micro_steps` is None"),
        ("scopes", {"params": "all"}, "`scopes: params` is 'all'"),
        ("scopes", [1], "has no attribute 'items'"),
        ("torch_version", 2, "`torch_version` is 2 instead of a string"),
        ("optimizer_classes", [1], "`optimizer_classes` is 1"),
        ("files", {"a//b": EMPTY}, "'a//b', which is outside the folder"),
        ("files", {"a/./b": EMPTY}, "outside the folder"),
        ("files", {"": EMPTY}, "outside the folder"),
        ("files", {"a": {"num_bytes": -1, "sha256": ""}}, "`files: a` is -1"),
        ("files", {"a": {"num_bytes": 1, "sha256": 7}}, "`files: a` is 7 instead of a string"),
        ("format", "2", "`format` is '2'"),
    ],
)
def test_a_field_of_another_kind_is_named(field: str, value: Any, words: str) -> None:
    found = json.loads(manifest(7, {}).to_json())
    with pytest.raises(CheckpointError, match=rf"`here` is not a complete manifest \(.*{words}"):
        Manifest.from_json(json.dumps(found | {field: value}), "here")


def test_a_manifest_nested_without_end_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"not a complete manifest \(RecursionError"):
        Manifest.from_json("[" * 100_000, "here")
