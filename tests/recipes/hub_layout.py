"""Files laid out as on the hub, with the columns and names of Wikipedia and C4."""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path

import pyarrow
import pyarrow.parquet

WORDS = ("lamp", "river", "naïve", "数据", "garden", "brave", "🙂", "letter", "market", "clock")
LONG = " ".join(WORDS * 100)  # far more than a sequence
EMPTY = ""


def texts(count: int, first: int = 0) -> list[str]:
    """Different short texts in several scripts; the second is empty, the third is long."""
    made = [f"Text {first + i}: {WORDS[i % 10]} {WORDS[i * 7 % 10]}\nand {i} more." for i in range(count)]
    made[1:3] = [EMPTY, f"{first} {LONG}"][: max(0, count - 1)]
    return made


def write_wikipedia(root: Path, num_shards: int, rows: int = 20) -> list[str]:
    """Write 20231101.en/train-*.parquet; return all texts in order."""
    folder = root / "20231101.en"
    folder.mkdir(parents=True)
    written: list[str] = []
    for shard in range(num_shards):
        chosen = texts(rows, first=shard * rows)
        table = {
            "id": [str(shard * rows + i) for i in range(rows)],
            "url": [f"https://en.wikipedia.org/wiki/{i}" for i in range(rows)],
            "title": [f"Title {i}" for i in range(rows)],
            "text": chosen,
        }
        file = folder / f"train-{shard:05d}-of-{num_shards:05d}.parquet"
        pyarrow.parquet.write_table(pyarrow.table(table), file, row_group_size=7)
        written += chosen
    return written


def write_c4(root: Path, num_train: int, num_validation: int, rows: int = 12) -> dict[str, list[str]]:
    """Write en/c4-*.json.gz; return the texts of both splits in order."""
    folder = root / "en"
    folder.mkdir(parents=True)
    written: dict[str, list[str]] = {"train": [], "validation": []}
    for split, total in (("train", num_train), ("validation", num_validation)):
        for shard in range(total):
            chosen = texts(rows, first=shard * rows + (10_000 if split == "validation" else 0))
            write_json_lines(folder / f"c4-{split}.{shard:05d}-of-{total:05d}.json.gz", chosen)
            written[split] += chosen
    return written


def write_json_lines(file: Path, chosen: Sequence[str]) -> None:
    """Write one object per text, with C4's other columns."""
    with gzip.open(file, "wt", encoding="utf-8") as stream:
        for index, text in enumerate(chosen):
            record = {"text": text, "timestamp": f"2019-04-{index % 28 + 1:02d}T12:57:54Z", "url": f"http://a/{index}"}
            stream.write(json.dumps(record) + "\n")
