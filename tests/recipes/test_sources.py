"""Files of the real layout: Wikipedia, C4, the user's own."""

import gzip
import json
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from recipes.config import DataConfig
from recipes.data.sources import open_source
from recipes.data.text_files import TextFiles
from recipes.errors import RecipeError
from tests.recipes.hub_layout import EMPTY, texts, write_c4, write_json_lines, write_wikipedia


def read_all(config: DataConfig) -> dict[str, list[str]]:
    """The texts of each split that parts name, in order."""
    source = open_source(config)
    read: dict[str, list[str]] = {}
    for part in source.parts():
        read.setdefault(part.split, []).extend(document.text for document in source.read(part))
    return read


# Wikipedia and C4


def test_wikipedia_is_read_whole_and_in_order_from_a_prime_number_of_files(tmp_path: Path):
    written = write_wikipedia(tmp_path, num_shards=5)
    assert read_all(DataConfig(source="wikipedia", path=str(tmp_path))) == {"by_hash": written}


def test_reading_asks_no_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked: list[object] = []
    monkeypatch.setattr("socket.getaddrinfo", lambda *arguments, **_: asked.append(arguments))
    write_wikipedia(tmp_path, num_shards=1)
    write_c4(tmp_path, num_train=1, num_validation=0)
    for source in ("wikipedia", "c4"):
        read_all(DataConfig(source=source, path=str(tmp_path)))
    assert asked == []


def test_the_folder_of_the_subset_itself_can_be_named(tmp_path: Path):
    written = write_wikipedia(tmp_path, num_shards=1)
    config = DataConfig(source="wikipedia", path=str(tmp_path / "20231101.en"))
    assert read_all(config) == {"by_hash": written}


def test_c4_brings_its_own_validation_split(tmp_path: Path):
    written = write_c4(tmp_path, num_train=3, num_validation=2)
    assert read_all(DataConfig(source="c4", path=str(tmp_path))) == written


def test_c4_without_validation_files_is_held_out_by_hash(tmp_path: Path):
    written = write_c4(tmp_path, num_train=1, num_validation=0)
    assert read_all(DataConfig(source="c4", path=str(tmp_path))) == {"by_hash": written["train"]}


def test_the_first_files_can_be_used_alone(tmp_path: Path):
    written = write_c4(tmp_path, num_train=3, num_validation=2)
    (tmp_path / "en" / "c4-train.00002-of-00003.json.gz").unlink()
    config = DataConfig(source="c4", path=str(tmp_path), num_shards=2)
    assert read_all(config)["train"] == written["train"][:24]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"needs files.*hf download wikimedia/wikipedia.*data.download=true"),
        ({"path": "nowhere"}, r"data.path=nowhere. is not a folder.*hf download"),
        ({"path": "empty"}, r"no training file of wikimedia/wikipedia.*train-00000-of-NNNNN.parquet"),
        ({"path": "holed"}, r"2 of 3 train files.*number 1 of the 3 needed.*num_shards"),
        ({"path": "holed", "num_shards": 4}, r"num_shards=4.*more files.*has: 3"),
        ({"path": "mixed"}, r"mixes train files of 1 and 2"),
    ],
    ids=["no-path", "no-folder", "no-files", "a-hole", "too-many", "two-versions"],
)
def test_missing_files_are_named_with_what_to_do(
    options: dict[str, object], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    write_wikipedia(Path("holed"), num_shards=3, rows=3)
    Path("holed/20231101.en/train-00001-of-00003.parquet").unlink()
    write_wikipedia(Path("mixed"), num_shards=2, rows=3)
    Path("mixed/20231101.en/train-00000-of-00001.parquet").touch()
    with pytest.raises(RecipeError, match=message):
        read_all(DataConfig(source="wikipedia", **options))


def test_a_truncated_file_is_named(tmp_path: Path):
    write_c4(tmp_path, num_train=1, num_validation=0)
    file = tmp_path / "en" / "c4-train.00000-of-00001.json.gz"
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(RecipeError, match=r"c4-train.00000-of-00001.json.gz cannot be read.*delete the file"):
        read_all(DataConfig(source="c4", path=str(tmp_path)))


def test_a_file_without_text_is_named(tmp_path: Path):
    folder = tmp_path / "20231101.en"
    folder.mkdir()
    pyarrow.parquet.write_table(pyarrow.table({"body": ["a"]}), folder / "train-00000-of-00001.parquet")
    with pytest.raises(RecipeError, match=r"train-00000-of-00001.parquet.*text"):
        read_all(DataConfig(source="wikipedia", path=str(tmp_path)))


class Hub:
    """Stands in for huggingface_hub: keeps what it was asked for, and brings files."""

    def __init__(self, num_shards: int) -> None:
        self.num_shards = num_shards
        self.calls: list[dict[str, object]] = []

    def snapshot_download(self, repo_id: str, **options: object) -> str:
        self.calls.append({"repo_id": repo_id, **options})
        write_wikipedia(Path(str(options["local_dir"])), self.num_shards, rows=3)
        return str(options["local_dir"])


def test_a_download_asks_for_the_needed_files_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    hub = Hub(num_shards=2)
    monkeypatch.setattr("huggingface_hub.snapshot_download", hub.snapshot_download)
    config = DataConfig(source="wikipedia", path=str(tmp_path), num_shards=2, download=True)
    open_source(config).download()
    (call,) = hub.calls
    assert (call["repo_id"], call["repo_type"], call["local_dir"]) == ("wikimedia/wikipedia", "dataset", tmp_path)
    assert call["allow_patterns"][:2] == [
        "20231101.en/train-00000-of-*.parquet",
        "20231101.en/train-00001-of-*.parquet",
    ]
    assert len(read_all(config)["by_hash"]) == 6


def test_a_hub_that_cannot_be_reached_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object, **__: object) -> None:
        raise ConnectionError("429 Too Many Requests")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(RecipeError, match=r"asked the hub for allenai/c4 and failed: 429.*run the command again"):
        open_source(DataConfig(source="c4", path=str(tmp_path), download=True)).download()


def test_a_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_wikipedia(tmp_path, num_shards=1, rows=3)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(RecipeError, match=r"`datasets` is not installed.*[Rr]un `pip install .*`"):
        read_all(DataConfig(source="wikipedia", path=str(tmp_path)))


# The user's own files


def test_all_kinds_of_files_of_a_folder_are_read_in_the_order_of_names(tmp_path: Path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "a.txt").write_text("One short text.", encoding="utf-8")
    (tmp_path / "b.md").write_bytes("\ufeff# Café\r\n".encode())
    (tmp_path / "c.jsonl").write_text('{"text": "x", "n": 1}\n\n{"text": "", "n": "one"}\n{"text": null}\n')
    write_json_lines(tmp_path / "d.jsonl.gz", ["compressed 数据"])
    pyarrow.parquet.write_table(pyarrow.table({"text": ["row", None], "n": [1, 2]}), tmp_path / "deep" / "e.parquet")
    (tmp_path / "deep" / "picture.png").write_bytes(b"\x89PNG")
    expected = ["One short text.", "# Café\r\n", "x", "", "", "compressed 数据", "row", ""]
    assert read_all(DataConfig(source="text", path=str(tmp_path))) == {"by_hash": expected}


def test_a_long_file_becomes_several_documents_and_loses_nothing(tmp_path: Path):
    paragraphs = "\n\n".join(f"Paragraph {i}. " + "word " * 60 for i in range(200))
    text = paragraphs + "\n" + "x" * 20_000 + " 🙂"
    (tmp_path / "book.txt").write_text(text, encoding="utf-8")
    documents = read_all(DataConfig(source="text", path=str(tmp_path / "book.txt")))["by_hash"]
    assert "".join(documents) == text
    assert len(documents) > 15
    assert all(document.startswith("Paragraph") for document in documents[:10])
    assert max(map(len, documents)) <= 4_000


def test_several_paths_are_read_one_after_the_other(tmp_path: Path):
    for name in ("b", "a"):
        (tmp_path / f"{name}.txt").write_text(name)
    paths = (str(tmp_path / "b.txt"), str(tmp_path / "a.txt"))
    assert read_all(DataConfig(source="text", path=paths)) == {"by_hash": ["b", "a"]}


def test_small_files_are_read_together_and_large_ones_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("recipes.data.text_files._PART_BYTES", 100)
    for index, size in enumerate([30, 30, 30, 30, 500, 10]):
        (tmp_path / f"{index}.txt").write_text("x" * size)
    parts = open_source(DataConfig(source="text", path=str(tmp_path))).parts()
    assert [[file.stem for file in part.files] for part in parts] == [["0", "1", "2", "3"], ["4"], ["5"]]


@pytest.mark.parametrize("part_bytes", [1, 7, 50, 64, 1000])
def test_a_long_file_of_lines_is_divided_and_read_once(
    part_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("recipes.data.text_files._PART_BYTES", part_bytes)
    written = texts(30)
    lines = [json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in written]
    (tmp_path / "a.jsonl").write_text("".join(lines), encoding="utf-8")
    (tmp_path / "b.txt").write_text("the end")
    config = DataConfig(source="text", path=str(tmp_path))
    size = (tmp_path / "a.jsonl").stat().st_size
    assert len(open_source(config).parts()) == -(-size // part_bytes) + 1
    assert read_all(config) == {"by_hash": [*written, "the end"]}


def test_a_bad_line_of_a_divided_file_is_named_by_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("recipes.data.text_files._PART_BYTES", 10)
    (tmp_path / "a.jsonl").write_text('{"text": "0123456789"}\n{"text": }\n')
    with pytest.raises(RecipeError, match=r"a.jsonl \(line at byte 23\) cannot be read"):
        read_all(DataConfig(source="text", path=str(tmp_path)))


@pytest.mark.parametrize("is_small", [True, False], ids=["small", "large"])
def test_a_changed_file_is_another_source(is_small: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("recipes.data.text_files.SMALL_BYTES", 100 if is_small else 0)
    file = tmp_path / "a.txt"
    file.write_text("one")
    before = TextFiles((file,))
    assert (before.is_small, before.identity) == (is_small, TextFiles((file,)).identity)
    file.write_text("two")
    assert TextFiles((file,)).identity != before.identity


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"caf\xe9", r"a.txt is not UTF-8.*iconv"),
        ("a.jsonl", b'{"text": "x"}\n{"text":', r"a.jsonl:2 cannot be read.*one JSON object"),
        ("a.jsonl", b'{"body": "x"}\n', r"a.jsonl:1 has no string in the field `text`; found \['body'\]"),
        ("a.jsonl", b"[1]\n", r"a.jsonl:1 has no string.*found list"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "x"}\n')[:-9], r"after .*a.jsonl.gz:\d cannot be read"),
        ("a.parquet", b"PAR1", r"a.parquet cannot be read"),
        ("a.csv", b"x", r"a.csv. has an unknown suffix.*\.jsonl"),
    ],
    ids=["latin1", "half-a-line", "other-field", "no-object", "truncated", "no-parquet", "csv"],
)
def test_files_that_cannot_be_read_are_named(name: str, content: bytes, message: str, tmp_path: Path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(RecipeError, match=message):
        read_all(DataConfig(source="text", path=str(tmp_path / name)))


def test_half_of_a_surrogate_pair_becomes_text(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud83d"}\n')
    assert read_all(DataConfig(source="text", path=str(tmp_path))) == {"by_hash": ["a?"]}


def test_an_empty_folder_and_a_missing_path_are_refused(tmp_path: Path):
    for path, message in ((tmp_path, "without files of text"), (tmp_path / "no.txt", "does not exist")):
        with pytest.raises(RecipeError, match=message):
            read_all(DataConfig(source="text", path=str(path)))


# Options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"source": "text"}, r"data.source=text.*data.path=FILE_OR_FOLDER"),
        ({"source": "grammar", "path": "x"}, r"data.path=x. has no effect with .data.source=grammar"),
        ({"source": "text", "path": "x", "subset": "en"}, r"data.subset=en. has no effect"),
        ({"source": "local_docs", "num_shards": 3}, r"data.num_shards=3. has no effect"),
        ({"source": "grammar", "download": True}, r"data.download=True. has no effect"),
        ({"source": "synthetic_images", "tokenizer": "gpt2"}, r"data.tokenizer=gpt2. has no effect"),
        ({"source": "c4", "path": ("a", "b")}, r"data.path. names 2 folders"),
        ({"source": "c4", "num_shards": 0}, r"data.num_shards=0.*at least 1"),
    ],
    ids=lambda value: "" if isinstance(value, str) else "-".join(map(str, value)),
)
def test_options_that_would_do_nothing_are_refused(options: dict[str, object], message: str):
    with pytest.raises(RecipeError, match=message):
        DataConfig(**options)


def test_the_layout_of_the_tests_is_that_of_the_data_sets(tmp_path: Path):
    write_wikipedia(tmp_path, num_shards=1, rows=3)
    write_c4(tmp_path, num_train=1, num_validation=1, rows=3)
    table = pyarrow.parquet.read_table(tmp_path / "20231101.en" / "train-00000-of-00001.parquet")
    assert table.column_names == ["id", "url", "title", "text"]
    with gzip.open(tmp_path / "en" / "c4-train.00000-of-00001.json.gz", "rt") as lines:
        assert list(json.loads(next(lines))) == ["text", "timestamp", "url"]
    assert EMPTY in texts(3)
