"""Readers of files that somebody else may have written, and edits of such files.

A longer run than the suite's, with new random edits each time: `python -m tests.foreign_files MINUTES [READER ...]`.
"""

import faulthandler
import json
import resource
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import mics_strategy
from benchmarks.papers.row import COLUMNS, read_rows
from benchmarks.papers.validate import report_json, report_lines, validate
from mics_strategy.checkpoint import atomic
from mics_strategy.checkpoint.manifest import Manifest
from mics_strategy.checkpoint.safe_reader import METADATA
from mics_strategy.checkpoint.shard_report import shard_report_from
from mics_strategy.checkpoint.weight_formats import as_checkpoint_error, open_source
from mics_strategy.errors import MiCSError
from mics_strategy.planner.cluster import Cluster
from recipes.config import load_recipe
from recipes.data.config import DataConfig
from recipes.data.prepare import prepare_store
from recipes.data.progress import NoProgress
from recipes.data.store import MANIFEST, TOKENIZER, digest_of, open_store
from tests.audit import Audit

PACKAGE = Path(mics_strategy.__file__).parent  # whose tables are looked up
STATE = {"a.weight": torch.arange(12.0).view(4, 3), "a.bias": torch.arange(4.0), "step": torch.tensor(3)}
_WORDS = (
    *(b"../", b"/etc/passwd", b"$(x)", b"class_path", b"!!python/object/apply:os.system [id]", b"<<: *a", b"&a [*a]"),
    *(b"null", b"true", b"-1", b"0", b"1e999", b"NaN", b"9" * 30, b"18446744073709551615", b'"', b"'", b"\\", b"\n"),
    *(
        b"{",
        b"}",
        b"[",
        b"]",
        b":",
        b",",
        b"\x00",
        b"\xff\xff\xff\xff",
        b"\x7f\xff\xff\xff",
        b"O8",
        b"F64",
        b"cos\nsystem\n",
    ),
)
_VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 2**31, 2**63, 10**30, 1.5, 1e308, float("nan"), float("inf"), "", "x", "O8", "../x", "/x"),
    *(
        "a\nb",
        "\x00",
        "é",
        [],
        {},
        [1],
        [[]],
        {"x": 1},
        {"class_path": "os.system"},
        [-1, -1],
        [2**40, 2**40],
        "9" * 400,
    ),
)


@dataclass(frozen=True)
class Reader:
    """One kind of file.

    Attributes:
        write: Writes a valid folder.
        edited: Files that are edited, and whether each is edited as JSON.
        read: Reads the folder; returns what can be compared.
        mend: Brings checksums up to date after an edit, as the author of a file would.
        is_equal: Whether what is read must be that of the valid folder.
    """

    write: Callable[[Path], None]
    edited: dict[str, bool]
    read: Callable[[Path], Any]
    mend: Callable[[Path], None] = lambda folder: None
    is_equal: bool = False


RECIPE = {
    "name": "own",
    "model": {"family": "llama", "hidden_size": 64, "num_layers": 2, "num_heads": 2, "tie_embeddings": False},
    "data": {"source": "text", "path": ["a", "b"], "sequence_length": 64},
    "optimizer": {"lr": 0.005, "betas": [0.9, 0.95]},
    "strategy": {"name": "mics", "shard": {"partition_size": 2, "overlap": ["gather"]}, "ranks_per_node": 2},
    "trainer": {"accelerator": "auto", "precision": "bf16-mixed", "loggers": ["wandb"]},
    "sample": {"prompt": "The old king"},
    "ci": {"data": {"source": "grammar", "path": []}, "trainer": {"max_steps": 2}},
    "cuda": {"model": {"num_layers": 4}, "trainer": {"devices": "auto"}},
}


def read_recipe(folder: Path) -> Any:
    return load_recipe([f"--config={folder / 'recipe.yaml'}", "--ci"], has_cuda=True)


def write_checkpoint(folder: Path) -> None:
    save_dcp(folder)
    files = {file.name: atomic.entry_of(file) for file in sorted(folder.iterdir())}
    manifest = Manifest(step=1, world_size=2, scopes={"params": 2}, package_version="1", torch_version="2", files=files)
    atomic.write_manifest(folder, manifest)


def read_checkpoint(folder: Path) -> Any:
    manifest = atomic.read_manifest(folder)
    atomic.check_files(folder, manifest, sorted(manifest.files))
    return sorted(manifest.files), read_weights(folder)


def save_dcp(folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one process is meant
        dcp.save({"model": STATE, "extra": {"note": [1, "a"]}}, checkpoint_id=folder, no_dist=True)


def read_weights(folder: Path, name: str = "") -> Any:
    """All that `load_weights` reads of a file or folder."""
    path = folder / name

    def read() -> dict[str, Any]:
        source = open_source(path, weights_only=True)
        sizes = [saved.shape.numel() * saved.dtype.itemsize for saved in source.saved.values() if saved]
        if sum(sizes) > 1_000_000:
            raise MiCSError("A model of this size is not the tests'.")
        return {name: source.value(name) for name in source.saved}

    return {name: comparable(value) for name, value in as_checkpoint_error(path, read).items()}


def comparable(value: Any) -> Any:
    return (
        (str(value.dtype), list(value.shape), str(value.tolist())) if isinstance(value, torch.Tensor) else repr(value)
    )


def write_sharded_safetensors(folder: Path) -> None:
    save_file({"a.weight": STATE["a.weight"]}, folder / "1.safetensors")
    save_file({"a.bias": STATE["a.bias"]}, folder / "2.safetensors")
    index = {"metadata": {}, "weight_map": {"a.weight": "1.safetensors", "a.bias": "2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def write_universal(folder: Path) -> None:
    (folder / "latest_universal").write_text("step")
    (folder / "step" / "zero" / "a.weight").mkdir(parents=True)
    torch.save({"param": STATE["a.weight"].flatten()}, folder / "step" / "zero" / "a.weight" / "fp32.pt")
    torch.save({"module": {"a.bias": STATE["a.bias"]}}, folder / "step" / "mp_rank_00_model_states.pt")


def write_store(folder: Path) -> None:
    text = folder.parent / f"{folder.name}.text"
    text.mkdir()
    for number in range(40):
        (text / f"{number}.txt").write_text(f"The old king counted {number} ships.")
    config = DataConfig(source="text", path=str(text), cache_dir=str(text / "cache"), validation_share=0.4)
    store = prepare_store(config, 270, "causal", workers=1, progress=NoProgress())
    shutil.copytree(store.folder, folder, dirs_exist_ok=True)


def mend_store(folder: Path) -> None:
    try:
        fields = json.loads((folder / MANIFEST).read_text())
        fields["tokenizer_digest"] = digest_of(folder / TOKENIZER)
        for part in fields["parts"]:
            for split in ("train", "validation"):
                part[split]["digest"] = digest_of(folder / "parts" / f"{part['name']}.{split}.bin")
        summed = {name: value for name, value in fields.items() if name not in ("checksum", "totals")}
        fields["checksum"] = blake2b(json.dumps(summed, sort_keys=True).encode(), digest_size=16).hexdigest()
        (folder / MANIFEST).write_text(json.dumps(fields))
    except (ValueError, TypeError, KeyError, AttributeError, OSError):
        return  # what has no such fields stays as it is


def read_store(folder: Path) -> Any:
    store = open_store(folder)
    return [[array.tolist() for array in store.stream(split).arrays] for split in ("train", "validation")]


CLUSTER = {
    "name": "c",
    "nodes": 2,
    "ranks_per_node": 4,
    "device": {
        **{"name": "d", "memory": "40 GB", "memory_bandwidth": "900 GB/s", "peak": "100 TFLOP/s"},
        **{"matmul_efficiency": 0.8, "sustained_efficiency": 0.7, "sustained_source": "stated"},
    },
    "intra_node": {"bandwidth": "300 GB/s", "efficiency": 0.9, "latency": "3 us", "source": "datasheet"},
    "inter_node": {"node_bandwidth": "100 Gb/s", "latency": "14 us", "source": "datasheet"},
    "backend": "nccl",
    "overlap_slowdown": 1.1,
    "slowest_node_factor": 1.0,
    "measured_stages": [
        {
            **{"collective": "all_gather", "link": "intra_node", "size": 4, "ranks_of_node": 4},
            "seconds_by_bytes": [[1024, 0.001], [1048576, 0.01]],
        }
    ],
    "measured_overlaps": [{"link": "inter_node", "compute": 1.2, "collective": 1.1}],
    "measured_codecs": [{"bits": 8, "rotation": False, "encoded_per_s": 1000.5, "decoded_per_s": 2000}],
    "calibration": {
        **{"format": 1, "date": "2026-01-31", "hosts": ["a", "b"], "world_size": 8, "torch_version": "2.13.0"},
        **{"package_version": "0.1.0", "dtype": "bfloat16", "flop_per_s": {"bfloat16": 1000000.0}},
    },
}
TOML = """
name = "c"
nodes = 2
ranks_per_node = 4
device = "a100-40gb"
intra_node = {bandwidth = "300 GB/s", latency = "3 us", source = "datasheet"}
inter_node = {bandwidth = "10 GB/s", latency = "14 us", source = "datasheet"}
"""
ROW = {
    **{"id": "1", "paper": "MiCS", "system": "MiCS", "model": "BERT 10B", "params": "10B", "layers": "127"},
    **{"hidden": "2560", "heads": "40", "vocab": "32008", "seq_len": "512", "gpu_type": "V100 32GB"},
    **{"gpus_per_node": "8", "nodes": "2", "total_gpus": "16", "interconnect_inter": "100 Gbps", "micro_batch": "8"},
    **{"global_batch": "8192", "partition_config": "8", "activation_ckpt": "yes", "precision": "fp16"},
    **{"metric": "throughput", "value": "100", "unit": "samples/s"},
}


def write_rows(folder: Path) -> None:
    lines = [",".join(COLUMNS), ",".join(ROW.get(column, "") for column in COLUMNS)]
    (folder / "rows.csv").write_text("\n".join([*lines, lines[1].replace("MiCS", "ZeRO-3")]) + "\n")


def read_published(folder: Path) -> Any:
    rows = validate(read_rows(folder / "rows.csv"))
    return [*report_lines(rows, has_assumptions=True)], json.dumps(report_json(rows))


def write_report(folder: Path) -> None:
    index = ["model.w", [0], 0]
    tensor = {"offsets": [0], "sizes": [2], "size": [2], "dtype": "float32", "layout": "strided"}
    item = {
        "index": index,
        "type": "SHARD",
        "tensor": {**tensor, "requires_grad": False, "memory_format": "contiguous_format", "pin_memory": False},
    }
    entry = {"num_bytes": 1, "sha256": "0"}
    result = {"index": index, "num_bytes": 8, "file": "a", "offset": 0, "length": 8, "transforms": None}
    report = {"items": [item], "paths": {"model.w": ["model", "w"]}, "results": [result], "files": {"a": entry}}
    (folder / "report.json").write_text(json.dumps(report))


def text_file(name: str, text: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / name).write_text(text)

    return write


READERS = {
    "a recipe": Reader(text_file("recipe.yaml", json.dumps(RECIPE, indent=1)), {"recipe.yaml": True}, read_recipe),
    "a checkpoint": Reader(write_checkpoint, {METADATA: False, "__0_0.distcp": False}, read_checkpoint, is_equal=True),
    "a manifest": Reader(write_checkpoint, {"manifest.json": True}, read_checkpoint),
    "a distributed checkpoint": Reader(save_dcp, {METADATA: False, "__0_0.distcp": False}, read_weights),
    "safetensors": Reader(
        lambda folder: save_file(STATE, folder / "model.safetensors"), {"model.safetensors": False}, read_weights
    ),
    "sharded safetensors": Reader(
        write_sharded_safetensors, {"model.safetensors.index.json": True, "1.safetensors": False}, read_weights
    ),
    "a torch file": Reader(
        lambda folder: torch.save({"state_dict": STATE}, folder / "pytorch_model.bin"),
        {"pytorch_model.bin": False},
        read_weights,
    ),
    "DeepSpeed": Reader(
        write_universal,
        {"latest_universal": False, "step/zero/a.weight/fp32.pt": False, "step/mp_rank_00_model_states.pt": False},
        read_weights,
    ),
    "a damaged store": Reader(
        write_store, {MANIFEST: True, TOKENIZER: True, "parts/00000.train.bin": False}, read_store, is_equal=True
    ),
    "a token store": Reader(
        write_store, {MANIFEST: True, TOKENIZER: True, "parts/00000.train.bin": False}, read_store, mend_store
    ),
    "a calibration": Reader(
        text_file("c.json", json.dumps(CLUSTER)), {"c.json": True}, lambda folder: Cluster.load(folder / "c.json")
    ),
    "a cluster in YAML": Reader(
        text_file("c.yaml", json.dumps(CLUSTER, indent=1)), {"c.yaml": False}, lambda f: Cluster.load(f / "c.yaml")
    ),
    "a cluster in TOML": Reader(text_file("c.toml", TOML), {"c.toml": False}, lambda f: Cluster.load(f / "c.toml")),
    "published rows": Reader(write_rows, {"rows.csv": False}, read_published),
    "a rank's report": Reader(
        write_report,
        {"report.json": True},
        lambda f: str(shard_report_from((f / "report.json").read_text(errors="replace"), 0)),
    ),
}

Edit = tuple[str, float, float, Any]
EDITS: st.SearchStrategy[list[Edit]] = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.floats(0, 1), st.just(0.0), st.sampled_from(_WORDS) | st.binary(max_size=4)),
        st.tuples(
            st.just("write"), st.floats(0, 1), st.just(0.0), st.sampled_from(_WORDS) | st.binary(min_size=1, max_size=4)
        ),
        st.tuples(st.just("cut"), st.floats(0, 1), st.floats(0, 0.2), st.just(b"")),
        st.tuples(st.just("copy"), st.floats(0, 1), st.floats(0, 0.2), st.just(b"")),
        st.tuples(st.just("value"), st.floats(0, 1), st.floats(0, 1), st.sampled_from(_VALUES)),
        st.tuples(
            st.just("key"), st.floats(0, 1), st.floats(0, 1), st.sampled_from(("", "x", "../x", "class_path", "0"))
        ),
    ),
    min_size=1,
    max_size=4,
)


def edited(content: bytes, edits: Iterable[Edit], *, is_json: bool) -> bytes:
    """A file after edits; those of values need JSON, and others are of bytes."""
    for kind, place, length, value in edits:
        if kind in ("value", "key"):
            content = edited_json(content, place, kind, value) if is_json else content
            continue
        start = int(place * len(content))
        end = start + int(length * len(content))
        content = {
            "put": content[:start] + value + content[start:],
            "write": content[:start] + value + content[start + len(value) :],
            "cut": content[:start] + content[end:],
            "copy": content[:end] + content[start:],
        }[kind]
    return content


def edited_json(content: bytes, place: float, kind: str, value: Any) -> bytes:
    try:
        root = json.loads(content)
    except (ValueError, RecursionError):
        return content
    slots = [*_slots(root)]
    if not slots:
        return content
    holder, name = slots[min(int(place * len(slots)), len(slots) - 1)]
    if kind == "value":
        holder[name] = value
    elif isinstance(holder, dict):
        holder[value] = holder.pop(name)
    else:
        del holder[name]
    return json.dumps(root).encode()


def _slots(value: Any) -> Iterable[tuple[Any, Any]]:
    """Every place in nested dicts and lists that holds a value."""
    for name, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield value, name
        yield from _slots(item)


class Trial:
    """A valid folder of one reader, and what happens when copies of it are edited.

    Args:
        reader: Reader.
        folder: Empty folder.
    """

    def __init__(self, reader: Reader, folder: Path) -> None:
        self.reader = reader
        self._whole, self._copy = folder / "whole", folder / "copy"
        self._whole.mkdir()
        reader.write(self._whole)
        self.valid = reader.read(self._whole)  # also loads what is loaded at the first use

    def run(self, name: str, edits: list[Edit]) -> str:
        """Edit one file and read; returns what came of it.

        Raises:
            AssertionError: Something else was run or read, or a damaged file was read as if it were whole.
        """
        shutil.rmtree(self._copy, ignore_errors=True)
        shutil.copytree(self._whole, self._copy)
        file = self._copy / name
        file.write_bytes(edited(file.read_bytes(), edits, is_json=self.reader.edited[name]))
        self.reader.mend(self._copy)
        with Audit(reads=[self._copy, PACKAGE]) as audit:
            try:
                found, refusal = self.reader.read(self._copy), ""
            except MiCSError as error:
                found, refusal = None, str(error)
        assert audit.events == [], audit.events
        if refusal:
            return "refused"
        if found == self.valid:
            return "equal"
        assert not self.reader.is_equal, "a damaged file was read"
        return "another"


def main(minutes: float, names: list[str]) -> None:
    """Try random edits for some minutes, and print how many came out how, or the first that failed."""
    resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))
    for name in names or READERS:
        with tempfile.TemporaryDirectory() as folder:
            counts: Counter[str] = Counter()
            end = time.monotonic() + 60 * minutes / len(names or READERS)
            try:
                try_edits(Trial(READERS[name], Path(folder)), counts, end)
            except Exception:
                traceback.print_exc()
            print(f"{name}: {dict(counts)}", flush=True)


def try_edits(trial: Trial, counts: Counter[str], end: float) -> None:
    """Try random edits until a time of `time.monotonic`, each for at most 30 seconds."""

    @settings(max_examples=500, database=None, deadline=None, suppress_health_check=[*HealthCheck])
    @given(st.sampled_from([*trial.reader.edited]), EDITS)
    def attempt(file: str, edits: list[Edit]) -> None:
        faulthandler.dump_traceback_later(30, exit=True)
        counts[trial.run(file, edits)] += 1
        faulthandler.cancel_dump_traceback_later()

    while time.monotonic() < end:
        attempt()


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2:])
