"""A recipe is data: whatever a stranger writes into it, reading it runs nothing, and shows no other file."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mics_strategy.errors import MiCSError
from recipes.config import Recipe, load_recipe, recipe_files, resolve
from recipes.launch import main
from recipes.plain_data import dump, read_file, typed
from tests.audit import Audit

ROOT = Path(__file__).resolve().parents[2] / "recipes"
FILES = recipe_files(ROOT)
DEBUG = ROOT / "llama" / "debug.yaml"
COMMAND = {"class_path": "os.system", "init_args": {"command": "touch PWNED"}}


def nodes(values: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """The path of every value of a recipe, mappings before what they hold."""
    for name, value in values.items():
        yield (name,)
        if isinstance(value, dict):
            yield from ((name, *path) for path in nodes(value))


def planted(values: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Copies of a recipe with a command in the place of one node, or beside what a mapping holds."""
    yield "beside all", {**values, **COMMAND}
    for path in nodes(values):
        for is_beside in (False, True):
            changed = copy.deepcopy(values)
            holder = changed
            for name in path[:-1]:
                holder = holder[name]
            if is_beside and not isinstance(holder[path[-1]], dict):
                continue
            holder[path[-1]] = {**holder[path[-1]], **COMMAND} if is_beside else COMMAND
            yield f"{'beside' if is_beside else 'at'} {'.'.join(path)}", changed


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_a_class_path_at_any_node_is_refused_in_a_sentence_and_runs_nothing(file: Path):
    for place, values in planted(read_file(file, Recipe)):
        blocks = [name for name in ("cuda", "ci") if f" {name}." in place]
        with Audit() as audit, pytest.raises(MiCSError) as refused:
            resolve(typed(values, Recipe), {}, blocks)
        assert "\n" not in str(refused.value), place
        assert len(str(refused.value)) < 600, place
        assert audit.events == [], place


@pytest.mark.slow
def test_a_file_with_a_class_path_is_refused_by_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """At every node of the first recipe that has it: the commands resolve a recipe as the test above does."""
    monkeypatch.chdir(tmp_path)
    places = {place: values for file in reversed(FILES) for place, values in planted(read_file(file, Recipe))}
    for place, values in places.items():
        (tmp_path / "evil.yaml").write_text(dump(values))
        options = ["--ci"] if " ci." in place else []  # the values of a block count when it applies
        with pytest.raises(MiCSError):
            load_recipe(["--config=evil.yaml", *options], has_cuda=" cuda." in place)
        main(["slurm", "evil.yaml", *options])  # with the block `cuda`, which may replace the node
    assert [path.name for path in tmp_path.iterdir()] == ["evil.yaml"]


BOMB = "\n".join(
    ["a: &a [x, x]", *(f"{now}: &{now} [*{last}, *{last}]" for last, now in zip("abcdef", "bcdefg", strict=True))]
)
YAML = {
    "an object": "name: !!python/object/apply:os.system ['touch PWNED']",
    "a name of Python": "name: !!python/name:os.system",
    "a new tag": "name: !include /etc/passwd",
    "an alias": "name: &x a\nmodel: *x",
    "aliases of aliases": BOMB,
    "a merge key": "a: &a {x: 1}\nname: {<<: *a}",
    "a list as key": "? [a, b]\n: c",
    "a repeated key": "name: a\nname: b",
    "two documents": "name: a\n---\nname: b",
    "lists without end": "name: " + "[" * 2_000,
    "a number without end": "name: a\nmodel: {num_layers: " + "9" * 10_000 + "}",
    "a binary": "name: !!binary aGVsbG8=",
    "a set": "name: !!set {a, b}",
    "half a mapping": "name: {a",
    "a tab": "name:\n\t- a",
}


@pytest.mark.parametrize("kind", YAML)
def test_more_than_plain_data_is_refused_with_its_place(kind: str, tmp_path: Path):
    file = tmp_path / "evil.yaml"
    file.write_text(YAML[kind])
    with Audit(reads=[file]) as audit, pytest.raises(MiCSError, match=r"evil\.yaml`.* is not plain YAML") as ended:
        load_recipe([f"--config={file}"], has_cuda=False)
    assert ("A tab stands there, and YAML is indented by spaces." in str(ended.value)) == (kind == "a tab")
    assert audit.events == []


@pytest.mark.parametrize(
    "value", ["${oc.env:HOME}", "${HOME}", "$HOME", "@/etc/passwd", "~/.bashrc", "{class_path: os.system}", "!!str x"]
)
def test_a_string_stays_what_it_is(value: str, tmp_path: Path):
    file = tmp_path / "own.yaml"
    file.write_text(dump({"name": "own", "sample": {"prompt": value}}))
    assert load_recipe([f"--config={file}"], has_cuda=False).sample.prompt == value
    assert load_recipe([f"--config={DEBUG}", f"--sample.prompt={value}"], has_cuda=False).sample.prompt == value


SECRET = {
    "passwd": "root:x:0:0:hunter2:/root:/bin/bash\ndaemon:x:1:1:hunter2\n",
    "a netrc": "machine hunter2 login hunter2\n",
    "a mapping of others": "hunter2: hunter2\npassword: hunter2\n",
    "a key": "-----BEGIN KEY-----\nhunter2: [hunter2\n",
    "a list": "[hunter2, hunter2]",
    "JSON": '{"token": "hunter2"}',
    "a program": "export TOKEN='hunter2' && {hunter2",
    "bytes": "\x00\x01hunter2",
}


@pytest.mark.parametrize("kind", SECRET)
def test_an_error_shows_nothing_of_a_file_that_is_no_recipe(kind: str, tmp_path: Path):
    file = tmp_path / "file"
    file.write_text(SECRET[kind])
    with pytest.raises(MiCSError) as refused:
        load_recipe([f"--config={file}"], has_cuda=False)
    assert "hunter2" not in str(refused.value)
    assert refused.value.__cause__ is None


@pytest.mark.parametrize("name", ["config", "model", "data", "strategy", "cuda", "__default_config__"])
def test_a_recipe_names_no_other_file(name: str, tmp_path: Path):
    (tmp_path / "secret.yaml").write_text("name: hunter2\nnum_layers: 3\n")
    (tmp_path / "own.yaml").write_text(f"name: own\n{name}: {tmp_path / 'secret.yaml'}\n")
    with Audit(reads=[tmp_path / "own.yaml"]) as audit, pytest.raises(MiCSError, match=f"`{name}` is ") as refused:
        load_recipe([f"--config={tmp_path / 'own.yaml'}"], has_cuda=False)
    assert audit.events == []
    assert "hunter2" not in str(refused.value)


def test_variables_of_the_environment_are_no_options(monkeypatch: pytest.MonkeyPatch):
    for name in (
        "MICS_PRETRAIN_CONFIG",
        "PRETRAIN_NAME",
        "JSONARGPARSE_DEFAULT_ENV",
        "MICS_PRETRAIN_TRAINER__MAX_STEPS",
    ):
        monkeypatch.setenv(name, "true")
    assert load_recipe([f"--config={DEBUG}"], has_cuda=False).trainer.max_steps == 150


@pytest.mark.parametrize("name", ["a\nb", "a\x1b[2J", "a\u2028b", "..", "a/../b", "", "\t"])
def test_a_name_is_one_line_and_no_path(name: str):
    with pytest.raises(MiCSError, match="name") as refused:
        load_recipe([f"--config={DEBUG}", f"--name={name}"], has_cuda=False)
    assert str(refused.value).isprintable()
