"""The token store: whole or refused, continued after a kill, the same from any number of workers."""

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from recipes.data import build
from recipes.data.config import DataConfig
from recipes.data.prepare import prepare, prepare_store, store_folder
from recipes.data.progress import NoProgress
from recipes.data.source import SPLITS, held_out
from recipes.data.store import Manifest, TokenStore, open_store, part_file
from recipes.data.tokenizer import train_tokenizer
from recipes.errors import RecipeError
from tests.recipes.hub_layout import texts, write_c4, write_wikipedia

VOCAB = 300
SHARDS = 5  # a prime number, as Wikipedia's 41


class Interrupted(Exception):
    """Ends a preparation as a kill would: at once, in the middle."""


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    return DataConfig(source="text", path=str(tmp_path / "texts"), cache_dir=str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file with a tokenizer: training one takes longer than the rest of a test."""
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_tokenizer(texts(50), VOCAB).save(str(file))
    return str(file)


@pytest.fixture
def wikipedia(tmp_path: Path, tokenizer: str) -> DataConfig:
    write_wikipedia(tmp_path / "wiki", num_shards=SHARDS)
    path, cache = str(tmp_path / "wiki"), str(tmp_path / "cache")
    options = {"path": path, "cache_dir": cache, "tokenizer": tokenizer}
    return DataConfig(source="wikipedia", **options, validation_share=0.2, sequence_length=16)


def run(config: DataConfig, vocab_size: int = VOCAB) -> TokenStore:
    return prepare_store(config, vocab_size, "causal", workers=1, progress=NoProgress())


def documents(store: TokenStore, split: str) -> list[str]:
    """The texts that the tokens of a split stand for."""
    tokens = np.concatenate([np.empty(0, "<u2"), *store.stream(split).arrays]).tolist()
    end = store.manifest.special.end
    groups = (list(group) for is_end, group in itertools.groupby(tokens, lambda t: t == end) if not is_end)
    return [store.tokenizer.decode(group, skip_special_tokens=False) for group in groups]


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


# What is stored


def test_every_document_is_stored_once_on_its_side(wikipedia: DataConfig):
    store = run(wikipedia)
    written = [text for shard in range(SHARDS) for text in texts(20, first=shard * 20) if text]
    assert documents(store, "train") == [text for text in written if not held_out(text, 0.2)]
    assert documents(store, "validation") == [text for text in written if held_out(text, 0.2)]
    assert store.manifest.total("num_documents") == len(written)
    assert store.manifest.total("num_bytes") == sum(len(text.encode()) for text in written)
    assert sum(part.num_empty for part in store.manifest.parts) == SHARDS


def test_c4_is_stored_with_its_own_split(tmp_path: Path):
    written = write_c4(tmp_path / "c4", num_train=3, num_validation=1)
    store = run(DataConfig(source="c4", path=str(tmp_path / "c4"), cache_dir=str(tmp_path / "cache")))
    for split in SPLITS:
        assert documents(store, split) == [text for text in written[split] if text]


def test_the_manifest_describes_the_store(wikipedia: DataConfig):
    store = run(wikipedia)
    fields = json.loads((store.folder / "manifest.json").read_text())
    assert [part["name"] for part in fields["parts"]] == [f"train-{index:05d}" for index in range(SHARDS)]
    assert fields["totals"]["train"]["num_tokens"] == len(store.stream("train"))
    assert (fields["source"], fields["dtype"]) == ("wikimedia/wikipedia 20231101.en shards=all", "<u2")
    assert "CC BY-SA" in fields["origin"]


def test_training_reads_across_the_boundaries_of_parts(wikipedia: DataConfig):
    store = run(wikipedia)
    data = prepare(wikipedia, VOCAB)
    whole = np.concatenate(store.stream("train").arrays).astype(np.int64)
    ends = np.cumsum([len(array) for array in store.stream("train").arrays])
    assert all(end % 16 for end in ends[:-1].tolist())  # sequences do cross boundaries
    stream = data.train.tokens
    for start in [0, *(end - 5 for end in ends[:-1].tolist()), len(whole) - 11]:
        assert np.array_equal(stream.read(np.array([start]), 11)[0], whole[start : start + 11])
    assert data.train.num_samples == (len(whole) - 1) // 16


def test_vocabularies_beyond_16_bits_have_32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wikipedia: DataConfig):
    small = run(wikipedia)
    monkeypatch.setattr("recipes.data.tokenizer.vocabulary_size", lambda _: 2**16 + 1)
    large = run(replace(wikipedia, cache_dir=str(tmp_path / "other")), vocab_size=2**17)
    assert (small.manifest.dtype, large.manifest.dtype) == ("<u2", "<u4")
    assert documents(large, "train") == documents(small, "train")
    part = small.manifest.parts[0]
    sizes = [part_file(store.folder, part.name, "train").stat().st_size for store in (small, large)]
    assert sizes == [2 * part.train.num_tokens, 4 * part.train.num_tokens]


# Own text, without a command


def test_own_text_is_prepared_by_the_training(config: DataConfig, capsys: pytest.CaptureFixture[str]):
    folder = Path(config.paths[0])
    folder.mkdir()
    (folder / "a.txt").write_text("\n\n".join(f"Paragraph {i} of my own text, {i * i}." for i in range(1500)))
    data = prepare(replace(config, sequence_length=32, validation_sequences=4), VOCAB)
    assert "once on this machine" in capsys.readouterr().out
    assert "a.txt" not in data.origin
    assert f"1 files of {folder}" in data.origin
    assert min(data.train.num_samples, data.validation.num_samples) > 4


@pytest.mark.parametrize("count", [2, 12])
def test_of_few_documents_one_is_held_out(count: int, config: DataConfig):
    folder = Path(config.paths[0])
    folder.mkdir()
    written = [f"Document {i} about lamps and rivers." for i in range(count)]
    assert not any(held_out(text, 0.05) for text in written)
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in written))
    prepare(replace(config, sequence_length=4), VOCAB)
    store = open_store(store_folder(config, VOCAB, "causal"))
    (held,) = documents(store, "validation")
    assert sorted([*documents(store, "train"), held]) == sorted(written)


def test_a_large_source_names_the_command_instead(wikipedia: DataConfig):
    with pytest.raises(RecipeError, match=r"prepared before training.*mics data prepare RECIPE.*--workers"):
        prepare(wikipedia, VOCAB)
    assert not Path(wikipedia.cache_dir).exists()


def test_training_finds_a_store_without_the_files(wikipedia: DataConfig):
    run(wikipedia)
    shutil.rmtree(wikipedia.paths[0])
    assert prepare(replace(wikipedia, path=()), VOCAB).train.num_samples > 0


# Interruptions


@pytest.mark.parametrize("survivors", [0, 1, 3, SHARDS - 1])
def test_a_preparation_continues_after_an_interruption(
    survivors: int, wikipedia: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    whole = files_of(run(replace(wikipedia, cache_dir=str(tmp_path / "whole"))).folder)
    interrupt(wikipedia, survivors, monkeypatch)
    draft = store_folder(wikipedia, VOCAB, "causal").with_suffix(".partial")
    assert len(list((draft / "parts").glob("*.json"))) == survivors
    rewritten = count_parts(monkeypatch)
    assert files_of(run(wikipedia).folder) == whole
    assert len(rewritten) == SHARDS - survivors
    assert not draft.exists()


def interrupt(config: DataConfig, survivors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prepare some parts, write half of the next one, and stop."""
    names: list[str] = []

    def stop(job: build.PartJob) -> build.PartRecord:
        names.append(job.part.name)
        if len(names) > survivors:
            part_file(job.folder, job.part.name, "train").write_bytes(b"\0\0\0\0")  # renamed, but without a record
            part_file(job.folder, job.part.name, "validation").with_suffix(".bin.7.tmp").write_bytes(b"half")
            raise Interrupted
        return write_part(job)

    write_part = build.write_part
    with monkeypatch.context() as patch:
        patch.setattr(build, "write_part", stop)
        with pytest.raises(Interrupted):
            run(config)


def count_parts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the parts that are written from now on."""
    names: list[str] = []
    write_part = build.write_part
    monkeypatch.setattr(build, "write_part", lambda job: (names.append(job.part.name), write_part(job))[1])
    return names


@pytest.mark.parametrize("moment", ["training the tokenizer", "before the manifest", "before the renaming"])
def test_an_interruption_between_parts_is_survived(
    moment: str, wikipedia: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    whole = files_of(run(replace(wikipedia, cache_dir=str(tmp_path / "whole"))).folder)

    def stop(*_: object) -> None:
        raise Interrupted

    targets = {
        "training the tokenizer": (build, "load_tokenizer"),
        "before the manifest": (build, "_require_documents"),
        "before the renaming": (Path, "rename"),
    }
    with monkeypatch.context() as patch:
        patch.setattr(*targets[moment], stop)
        with pytest.raises(Interrupted):
            run(wikipedia)
    rewritten = count_parts(monkeypatch)
    assert files_of(run(wikipedia).folder) == whole
    assert len(rewritten) == (SHARDS if moment == "training the tokenizer" else 0)


@pytest.mark.parametrize("damage", ["flip", "truncate", "delete", "record"])
def test_a_damaged_part_of_a_draft_is_written_again(
    damage: str, wikipedia: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    whole = files_of(run(replace(wikipedia, cache_dir=str(tmp_path / "whole"))).folder)
    interrupt(wikipedia, 3, monkeypatch)
    draft = store_folder(wikipedia, VOCAB, "causal").with_suffix(".partial")
    spoil(part_file(draft, "train-00001", "json" if damage == "record" else "train"), damage)
    rewritten = count_parts(monkeypatch)
    assert files_of(run(wikipedia).folder) == whole
    assert rewritten == ["train-00001", "train-00003", "train-00004"]


def spoil(file: Path, damage: str) -> None:
    content = file.read_bytes()
    match damage:
        case "flip":
            file.write_bytes(bytes([content[0] ^ 1]) + content[1:])
        case "truncate" | "record":
            file.write_bytes(content[:-2])
        case "delete":
            file.unlink()


def test_a_draft_of_other_files_is_not_continued(wikipedia: DataConfig, monkeypatch: pytest.MonkeyPatch):
    interrupt(wikipedia, 3, monkeypatch)
    shutil.rmtree(wikipedia.paths[0])
    write_wikipedia(Path(wikipedia.paths[0]), num_shards=SHARDS, rows=21)
    rewritten = count_parts(monkeypatch)
    run(wikipedia)
    assert len(rewritten) == SHARDS


def test_a_draft_whose_tokenizer_changed_is_not_continued(wikipedia: DataConfig, monkeypatch: pytest.MonkeyPatch):
    interrupt(wikipedia, 3, monkeypatch)
    spoil(store_folder(wikipedia, VOCAB, "causal").with_suffix(".partial") / "tokenizer.json", "truncate")
    rewritten = count_parts(monkeypatch)
    run(wikipedia)
    assert len(rewritten) == SHARDS


# Damage


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("parts/train-00001.train.bin", "flip", "train-00001.train.bin does not match its checksum"),
        ("parts/train-00001.train.bin", "truncate", r"train-00001.train.bin has [\d,]+ bytes instead of [\d,]+"),
        ("parts/train-00004.validation.bin", "delete", "train-00004.validation.bin is missing"),
        ("manifest.json", "truncate", "manifest.json cannot be read"),
        ("manifest.json", "delete", "manifest.json is missing"),
        ("tokenizer.json", "truncate", "tokenizer.json does not match its checksum"),
        ("tokenizer.json", "delete", "tokenizer.json is missing"),
    ],
)
def test_a_damaged_store_is_refused_and_repaired(name: str, damage: str, message: str, wikipedia: DataConfig):
    folder = run(wikipedia).folder
    whole = files_of(folder)
    spoil(folder / name, damage)
    with pytest.raises(RecipeError, match=rf"is damaged: {message}.*mics data prepare RECIPE"):
        prepare(wikipedia, VOCAB)
    run(wikipedia)
    assert files_of(folder) == whole
    prepare(wikipedia, VOCAB)


def test_a_changed_number_in_the_manifest_is_noticed(wikipedia: DataConfig):
    folder = run(wikipedia).folder
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text.replace('"num_empty": 1', '"num_empty": 2'))
    with pytest.raises(RecipeError, match=r"manifest.json does not match its checksum"):
        Manifest.read(folder)


def test_a_store_of_another_format_is_refused(wikipedia: DataConfig):
    folder = run(wikipedia).folder
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text.replace('"format": 2', '"format": 3'))
    with pytest.raises(RecipeError, match=r"has format 3, this version reads 2.*Delete"):
        prepare(wikipedia, VOCAB)


def test_large_stores_are_checked_by_size_and_verified_by_the_command(
    wikipedia: DataConfig, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("recipes.data.store._VERIFIED_AT_EACH_START", 100)
    folder = run(wikipedia).folder
    whole = files_of(folder)
    spoil(folder / "parts" / "train-00000.train.bin", "flip")
    prepare(wikipedia, VOCAB)
    rewritten = count_parts(monkeypatch)
    run(wikipedia)
    assert (files_of(folder), rewritten) == (whole, ["train-00000"])


def test_two_preparations_of_one_store_do_not_meet(wikipedia: DataConfig):
    import fcntl

    lock = store_folder(wikipedia, VOCAB, "causal").with_suffix(".lock")
    lock.parent.mkdir()
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(RecipeError, match="Another process prepares the same store"):
            run(wikipedia)
    run(wikipedia)


# Several processes


def command(config: DataConfig, repository: Path, workers: int) -> list[str]:
    recipe = repository / "recipes" / "llama" / "debug.yaml"
    options = ("source", "cache_dir", "validation_share", "tokenizer")
    return [
        *(sys.executable, "-m", "recipes.data.prepare", f"--config={recipe}", f"--workers={workers}", "--for=cpu"),
        *(f"--data.path={config.paths[0]}", f"--model.vocab_size={VOCAB}"),
        *(f"--data.{name}={getattr(config, name)}" for name in options),
    ]


@pytest.mark.weekly
def test_more_workers_than_files_write_what_one_writes(wikipedia: DataConfig, repository: Path, tmp_path: Path):
    whole = files_of(run(replace(wikipedia, cache_dir=str(tmp_path / "whole"))).folder)
    done = subprocess.run(
        command(wikipedia, repository, SHARDS + 2), cwd=repository, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert f"tokenizing {SHARDS} of {SHARDS} parts: {SHARDS}/{SHARDS}" in done.stdout
    assert "complete and verified" in done.stdout
    assert files_of(store_folder(wikipedia, VOCAB, "causal")) == whole


@pytest.mark.slow
def test_a_part_that_fails_is_reported_after_the_others(wikipedia: DataConfig, repository: Path):
    file = Path(wikipedia.paths[0]) / "20231101.en" / "train-00002-of-00005.parquet"
    file.write_bytes(b"PAR1" + file.read_bytes()[4:-4] + b"XXXX")
    done = subprocess.run(
        command(wikipedia, repository, 2), cwd=repository, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "mics data prepare: 1 of 5 parts failed, the others are kept. The first: " in done.stderr
    assert "train-00002-of-00005.parquet cannot be read" in done.stderr
    draft = store_folder(wikipedia, VOCAB, "causal").with_suffix(".partial")
    assert len(list((draft / "parts").glob("*.json"))) == SHARDS - 1


@pytest.mark.slow
def test_a_killed_preparation_leaves_no_worker_and_continues(wikipedia: DataConfig, repository: Path, tmp_path: Path):
    whole = files_of(run(replace(wikipedia, cache_dir=str(tmp_path / "whole"))).folder)
    parts = store_folder(wikipedia, VOCAB, "causal").with_suffix(".partial") / "parts"
    process = subprocess.Popen(
        command(wikipedia, repository, 2), cwd=repository, stdout=subprocess.DEVNULL, start_new_session=True
    )
    deadline = time.monotonic() + 100
    while not list(parts.glob("*.json")) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    while session_members(process.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert session_members(process.pid) == {}
    done = subprocess.run(
        command(wikipedia, repository, 2), cwd=repository, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert files_of(store_folder(wikipedia, VOCAB, "causal")) == whole


@pytest.mark.slow
def test_a_killed_worker_is_reported_with_what_to_do(wikipedia: DataConfig, repository: Path):
    process = subprocess.Popen(
        command(wikipedia, repository, 2), cwd=repository, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    workers: list[int] = []
    while len(workers) < 2 and process.poll() is None:
        members = session_members(process.pid)
        server = [pid for pid, parent in members.items() if parent == process.pid]
        workers = [pid for pid, parent in members.items() if parent in server]
        time.sleep(0.01)
    for pid in workers:
        os.kill(pid, signal.SIGSTOP)  # no part is finished from here on
    time.sleep(1.0)  # Python's pool may wait for ever where a worker dies before the last one is entered in its list
    os.kill(workers[0], signal.SIGKILL)
    os.kill(workers[1], signal.SIGCONT)
    assert "mics data prepare: One of 2 workers was killed, usually because memory" in process.communicate()[1]
    assert process.returncode == 1


@pytest.mark.slow
def test_two_ranks_train_on_a_prepared_store_and_not_without(wikipedia: DataConfig, repository: Path, tmp_path: Path):
    options = ("source", "cache_dir", "validation_share", "tokenizer", "sequence_length")
    train = [
        *(sys.executable, "-m", "recipes.pretrain", "--config=recipes/llama/debug.yaml", "--sample.num_tokens=0"),
        *(f"--data.{name}={getattr(wikipedia, name)}" for name in options),
        *(f"--model.vocab_size={VOCAB}", "--trainer.max_steps=2", f"--trainer.output_dir={tmp_path / 'run'}"),
    ]
    refused = subprocess.run(train, cwd=repository, capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert refused.stderr.startswith("mics pretrain: `data.source=wikipedia` is prepared before training")
    assert not (tmp_path / "run").exists()
    run(wikipedia)
    done = subprocess.run(train, cwd=repository, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "wikimedia/wikipedia 20231101.en (CC BY-SA 3.0 and GFDL) (95 documents" in done.stdout
    assert "step 2/2 | loss" in done.stdout


def session_members(session: int) -> dict[int, int]:
    """Processes of a session that still run, each with its parent (Linux)."""
    members = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, *fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == session and state != "Z":
            members[int(folder.name)] = int(fields[0])
    return members
