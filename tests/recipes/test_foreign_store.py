"""A token store from somebody else is verified before it is mapped: two dtypes, counts, and files of its folder."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recipes.data.config import DataConfig
from recipes.data.prepare import prepare_store
from recipes.data.progress import NoProgress
from recipes.data.store import MANIFEST, TOKENIZER, digest_of, open_store
from recipes.errors import RecipeError

Fields = dict[str, Any]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("store")
    (folder / "text").mkdir()
    for number in range(40):
        (folder / "text" / f"{number}.txt").write_text(f"The old king counted {number} ships.")
    config = DataConfig(source="text", path=str(folder / "text"), cache_dir=str(folder), validation_share=0.4)
    return prepare_store(config, 270, "causal", workers=1, progress=NoProgress()).folder


@pytest.fixture
def store(whole: Path, tmp_path: Path) -> Path:
    shutil.copytree(whole, tmp_path / "own")
    return tmp_path / "own"


def rewrite(folder: Path, change: Callable[[Fields], object]) -> None:
    """Change the manifest, and give it the checksum of its new contents, as its author could."""
    fields = json.loads((folder / MANIFEST).read_text())
    change(fields)
    summed = {name: value for name, value in fields.items() if name not in ("checksum", "totals")}
    text = json.dumps(summed, sort_keys=True)
    fields["checksum"] = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    (folder / MANIFEST).write_text(json.dumps(fields))


def name_part(folder: Path, name: str) -> None:
    """Give the only part another name, and put its files where that name leads."""
    (old,) = {file.name.split(".")[0] for file in (folder / "parts").glob("*.bin")}
    for split in ("train", "validation"):
        target = folder / "parts" / f"{name}.{split}.bin"
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(folder / "parts" / f"{old}.{split}.bin", target)
    rewrite(folder, lambda fields: fields["parts"][0].update(name=name))


def test_a_rewritten_manifest_is_read_when_nothing_in_it_changed(store: Path):
    rewrite(store, lambda fields: None)
    assert len(open_store(store).stream("train")) > 0


CHANGES: dict[str, tuple[Callable[[Fields], object], str]] = {
    "objects": (lambda fields: fields.update(dtype="O8"), "`dtype` is 'O8'"),
    "big endian": (lambda fields: fields.update(dtype=">u2"), "`dtype` is '>u2'"),
    "bytes of any kind": (lambda fields: fields.update(dtype="V2"), "`dtype` is 'V2'"),
    "a list of fields": (lambda fields: fields.update(dtype=[["a", "O"]]), r"`dtype` is \[\["),
    "a negative number": (lambda fields: fields["parts"][0]["train"].update(num_tokens=-1), "`num_tokens` is -1"),
    "a share of a token": (lambda fields: fields["parts"][0]["train"].update(num_tokens=1.5), r"`num_tokens` is 1\.5"),
    "a truth": (lambda fields: fields["parts"][0].update(num_empty=True), "`num_empty` is True"),
    "more tokens": (lambda fields: fields["parts"][0]["train"].update(num_tokens=2**62), "bytes instead of"),
    "no number": (lambda fields: fields["parts"][0].update(information_nats=float("nan")), "`information_nats` is nan"),
    "a part twice": (lambda fields: fields["parts"].append(fields["parts"][0]), r"`parts` is \["),
    "a wild token": (lambda fields: fields["special"].update(end=-5), r"`special` is \(-5"),
    "a word for a digest": (lambda fields: fields["parts"][0]["train"].update(digest="../x"), "`digest` is '../x'"),
    "no list": (lambda fields: fields.update(parts={"a": 1}), "cannot be read"),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_manifest_that_no_preparation_writes_is_refused(kind: str, store: Path):
    change, words = CHANGES[kind]
    rewrite(store, change)
    with pytest.raises(RecipeError, match=f"is damaged: .*{words}"):
        open_store(store)


@pytest.mark.parametrize("name", ["../outside", "/outside", "a/b", "..", "", ".hidden", "a\x00b"], ids=repr)
def test_the_name_of_a_part_stays_inside_the_folder(name: str, store: Path, tmp_path: Path):
    if name == "../outside":
        name_part(store, name)
    else:
        rewrite(store, lambda fields: fields["parts"][0].update(name=name))
    with pytest.raises(RecipeError, match="`name` is "):
        open_store(store)


def link_out(file: Path) -> None:
    target = file.parents[2] / "elsewhere"
    shutil.move(file, target)
    file.symlink_to(target)


def test_a_link_that_leads_out_is_refused(store: Path):
    link_out(next((store / "parts").glob("*.train.bin")))
    with pytest.raises(RecipeError, match=r"train\.bin is a link that leads out of the folder"):
        open_store(store)


@pytest.mark.parametrize("name", [MANIFEST, TOKENIZER])
def test_a_device_and_a_pipe_are_not_read(name: str, store: Path):
    (store / name).unlink()
    os.mkfifo(store / name)
    with pytest.raises(RecipeError, match=f"{name} is missing"):
        open_store(store)
    (store / name).unlink()
    (store / name).symlink_to("/dev/zero")
    with pytest.raises(RecipeError, match=f"{name} is missing"):
        open_store(store)


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"model": {"type": "BPE", "vocab": 3}}', "\x00"], ids=repr)
def test_a_tokenizer_of_another_kind_is_refused(text: str, store: Path):
    (store / TOKENIZER).write_text(text)
    rewrite(store, lambda fields: fields.update(tokenizer_digest=digest_of(store / TOKENIZER)))
    with pytest.raises(RecipeError, match=r"is not a tokenizer\.json"):
        open_store(store)
