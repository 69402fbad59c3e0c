"""The system of a public run, as a configuration of this engine.

A row names its system in words, and its scopes in the column `partition_config`; the rest is the system's table in
`benchmarks/papers/published.toml`.

Pure.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.papers.systems import System, system_named
from benchmarks.papers.testbed import NotPredictable

if TYPE_CHECKING:
    from benchmarks.papers.row import PublishedRow

# Words of a system, and the name of its table; the first that matches counts.
_NAMES = (
    (r"zero\+\+", "zeropp"),
    (r"internevo", "internevo"),
    (r"deepspeed.*mics|mics.*deepspeed", "deepspeed-mics"),
    (r"\bmics\b", "mics"),
    (r"deepspeed", "deepspeed"),
    (r"megatron.*fsdp", "fsdp"),
    (r"megatron|nemo|dist.*opt", "distributed-optimizer"),
    (r"fsdp|hsdp|torchtitan|composer|fully.?shard|shard_grad_op|full_shard", "fsdp"),
    (r"torchtune|litgpt|accelerate", "fsdp"),
    (r"\bddp\b|data parallel|trainer|nanogpt|nanochat|lightning|unsloth|axolotl", "ddp"),
    (r"fast-llm|colossal|zero", "distributed-optimizer"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Degrees:
    """Ranks of what is not data parallel, all 1 for most runs."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1


def degrees_of(row: PublishedRow) -> Degrees:
    """Degrees that the row states, in columns of their own or in `partition_config`."""
    words = row.words("partition_config")

    def degree(column: str) -> int:
        stated = re.search(rf"\b{column}\s*=?\s*(\d+)", words)
        return max(row.count(column) or 1, int(stated[1]) if stated else 1)

    return Degrees(tensor=degree("tp"), pipeline=degree("pp"), context=degree("cp"), expert=degree("ep"))


def system_of_run(row: PublishedRow, num_ranks: int, ranks_per_node: int) -> System:
    """The system of a row.

    Args:
        row: Row.
        num_ranks: Ranks of data parallelism.
        ranks_per_node: Ranks of data parallelism in a node.

    Raises:
        NotPredictable: Neither the system nor its scopes are known.
    """
    words = f"{row.words('system')} {row.words('partition_config')}"
    name = next((name for pattern, name in _NAMES if re.search(pattern, words)), None)
    if name is None and num_ranks == 1:
        name = "ddp"
    if name is None:
        raise NotPredictable(f"system `{row.text('system')}` is not known, and its scopes are not stated")
    scopes, partition = _scopes(row, words, num_ranks, ranks_per_node)
    if num_ranks == 1:
        scopes, partition = "", 0
    if name == "deepspeed":
        stage = {"nnn": 1, "nng": 1, "ngg": 2}.get(scopes or "ggg", 3)
        name = f"deepspeed-zero{stage}-2023"
    system = system_named(name)
    if scopes and not (name.startswith("zeropp")):
        system = dataclasses.replace(system, scopes=scopes, partition=partition)
    return dataclasses.replace(system, wire=_wire(row, system))


def _wire(row: PublishedRow, system: System) -> str:
    """Dtype of gradients on the wire.

    It is fp32 where a row says so, and by default with FSDP2: torchtitan's `mixed_precision_reduce`, and NeMo's policy.
    """
    precision = row.words("precision")
    if "pure" in precision:
        return "bfloat16"
    is_fp32 = re.search(r"default|fp32 (reduce|grad)", precision) or re.search(r"fsdp2|titan", row.words("system"))
    return "float32" if is_fp32 else system.wire


def _scopes(row: PublishedRow, words: str, num_ranks: int, ranks_per_node: int) -> tuple[str, int]:
    """Letters of parameters, gradients and optimizer states, and ranks of a partition; empty where none are stated."""
    partition = _partition(words, num_ranks)
    letters = _by_states(row.words("partition_config"), num_ranks, ranks_per_node)
    if letters:
        return letters
    if "hybrid_shard_zero2" in words:
        return "nii", partition
    if re.search(r"hybrid|hsdp", words):
        return "iii", partition
    if "shard_grad_op" in words or "grad_op" in words:
        return "ngg", 0
    if "no_shard" in words:
        return "nnn", 0
    if "full_shard" in words or "fully" in words:
        return "ggg", 0
    stage = re.search(r"zero[\s_-]*(?:stage[\s_-]*)?([0-3])", words)
    if stage and "zero++" not in words:
        letters_of_stage = {"0": "nnn", "1": "nng", "2": "ngg", "3": "ggg"}[stage[1]]
        return letters_of_stage.replace("g", "i") if partition else letters_of_stage, partition
    sharded = re.search(r"\bfsdp\s*=?\s*(\d+)", row.words("partition_config"))
    if sharded:
        degree = int(sharded[1])
        return ("nng", 0) if degree == 0 else ("iii", degree) if 1 < degree < num_ranks else ("ggg", 0)
    if re.search(r"\bddp\b", words) and not re.search(r"dist.*opt|fsdp|zero", words):
        return "nnn", 0
    return "", 0


def _partition(words: str, num_ranks: int) -> int:
    """Ranks of a partition; 0 for a node, or where none is stated."""
    stated = (
        re.search(r"groups? of (\d+)", words)
        or re.search(r"(?:dp_?)?shard(?:ed|ing)?(?: degree| size| over)?\s*[=:]?\s*(\d+)", words)
        or re.search(r"(\d+) ranks", words)
    )
    if stated:
        return min(int(stated[1]), num_ranks)
    replicas = re.search(r"replicat\w*\s*[=:]?\s*(\d+)", words)
    return num_ranks // int(replicas[1]) if replicas and num_ranks % int(replicas[1]) == 0 else 0


def _by_states(text: str, num_ranks: int, ranks_per_node: int) -> tuple[str, int] | None:
    """Letters by a text like "P none, G none, OS 8 ranks"."""
    found = dict(re.findall(r"\b(p|g|os)\s*[=:]?\s*(none|world|node|all|\d+)", text))
    if set(found) != {"p", "g", "os"}:
        return None
    partition, letters = 0, ""
    for state in ("p", "g", "os"):
        value = found[state]
        if value in ("none", "1"):
            letters += "n"
        elif value in ("world", "all") or (value.isdigit() and int(value) >= num_ranks):
            letters += "g"
        else:
            letters += "i"
            partition = int(value) if value.isdigit() else ranks_per_node
    return letters, partition
