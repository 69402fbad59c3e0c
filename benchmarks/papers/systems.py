"""The systems of published results, as configurations of this engine.

A row's system is recognized by the words in its column, and by the generation of DeepSpeed of its test-bed.

Pure.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.papers.testbed import NotPredictable, Testbed, published_table
from mics_strategy.config import ShardConfig
from mics_strategy.config_checks import OVERLAPS
from mics_strategy.planner.quantities import Quantity, parse_quantity

if TYPE_CHECKING:
    from benchmarks.papers.row import PublishedRow

Factor = tuple[int, int]  # ranks in a node, and nodes
_AMSP_OVERLAPS = {"ag/rs": {"gather", "reduce"}, "allreduce": {"second_hop"}, "broadcast": {"update"}}
_ANALYTIC = ("analytic", "from measured bandwidth", "case study", "1-hop", "fus", "kernel", "basic")
# Words of a system, and the name of its table; the first that matches counts.
_NAMES = (
    (r"mics.*\(zero-?3\)", "mics-zero3"),
    (r"mics.*amsp|amsp.*mics", "amsp-mics"),
    (r"mics.*(without|no|w/o).*(hierarch|3-stage|two-stage)|mics.*(vanilla|flat)", "mics-one-stage"),
    (r"(without|no|w/o).*(2-hop|two-hop)|all-?reduce every micro|alternative", "mics-one-hop"),
    (r"^(vanilla|flat)", "mics-one-stage"),
    (r"^hierarchical|^(2|two)-hop", "mics"),
    (r"mics.*deepspeed", "deepspeed-mics"),
    (r"mics", "mics"),
    (r"zero\+\+.*no quantization|zero\+\+.*without quantization|^hpz", "zeropp-hpz"),
    (r"zero\+\+", "zeropp"),
    (r"^qwz", "zeropp-qwz"),
    (r"^qgz", "zeropp-qgz"),
    (r"zero-?3", "deepspeed-zero3"),
    (r"zero-?2", "deepspeed-zero2"),
    (r"zero-?1", "deepspeed-zero1"),
    (r"deepspeed|^zero\b", "deepspeed-zero3"),
    (r"fsdp.*(hs|hybrid)", "fsdp-hs"),
    (r"amsp", "amsp"),
    (r"paro|^(?:[nig]{3})\b", "paro"),
    (r"ddp|standard dp|data parallel", "ddp"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """One system in one configuration; ranks of scopes are resolved by `config`.

    Attributes:
        name: Name of its table.
        scopes: Letters of parameters, gradients and optimizer states: n, i or g.
        factors: Sharding factors that the row states, in place of the letters.
        partition: Ranks of a partition; 0 for a node.
        overlap: Overlaps of `ShardConfig`.
        wire: Dtype of gradients on the wire.
        gathers_layers: Whether layers are gathered as a whole, not each parameter alone.
        is_hierarchical: Whether collectives have two stages.
        secondary: Ranks of the secondary copy; 0 for none, -1 for a node.
        second_hop: As in `ShardConfig`.
        weight_codec: As in `ShardConfig`.
        grad_codec: As in `ShardConfig`.
        buffer_bytes: Bytes of buffers of constant size.
        assumptions: Assumptions about its implementation.
    """

    name: str
    scopes: str = "ggg"
    factors: tuple[Factor, Factor, Factor] | None = None
    partition: int = 0
    overlap: frozenset[str] = frozenset()
    wire: str = "bfloat16"
    gathers_layers: bool = True
    is_hierarchical: bool = True
    secondary: int = 0
    second_hop: str = "boundary"
    weight_codec: str = "none"
    grad_codec: str = "none"
    buffer_bytes: int = 0
    assumptions: tuple[str, ...] = ()

    def degrees(self, ranks_per_node: int, world_size: int) -> tuple[int, int, int]:
        """Ranks of the scopes of parameters, gradients and optimizer states."""
        if self.factors is not None:
            params, grads, optimizer = (
                world_size if factor == WORLD else factor[0] * factor[1] for factor in self.factors
            )
        else:
            ranks = {"n": 1, "i": self.partition or ranks_per_node, "g": world_size}
            params, grads, optimizer = (min(ranks[letter], world_size) for letter in self.scopes)
        return params, grads, optimizer

    def config(self, ranks_per_node: int, world_size: int, param_dtype: str) -> ShardConfig:
        """The configuration in one job."""
        params, grads, optimizer = self.degrees(ranks_per_node, world_size)
        secondary = ranks_per_node if self.secondary == NODE else self.secondary
        is_copied = 0 < secondary < params
        spans = world_size > ranks_per_node and max(params, optimizer) > ranks_per_node
        sums = world_size > ranks_per_node
        return ShardConfig(
            params=params,
            grads=grads,
            optimizer=optimizer,
            secondary_params=secondary if is_copied else "none",
            hierarchical=self.is_hierarchical,
            overlap=self.overlap,
            param_dtype=param_dtype,
            reduce_dtype=self.wire if param_dtype != "float32" else "float32",
            second_hop=self.second_hop,
            weight_codec=self.weight_codec if spans else "none",
            grad_codec=self.grad_codec if sums else "none",
            codec_links="all",
        )


WORLD: Factor = (0, 0)
NODE = -1


def systems_of(text: str, row: PublishedRow, testbed: Testbed) -> list[System]:
    """The systems that a cell names.

    They are one, or several of which a row states the least or the greatest result.

    Args:
        text: Cell `system` or `baseline`.
        row: Row, for its partition.
        testbed: Its test-bed.

    Raises:
        NotPredictable: No system has these words.
    """
    words = text.lower()
    if "megatron" in words:
        raise NotPredictable("tensor and pipeline parallelism are not modelled")
    if any(word in words for word in _ANALYTIC) and "all-reduce every" not in words:
        raise NotPredictable(f"`{text}` is a formula or a kernel, not a training")
    if re.search(r"(zero-?[123]|mics|zero\+\+)\s*(,|/|and)\s*(zero|mics|amsp)", words):
        raise NotPredictable(f"`{text}` are several systems; the row does not say which")
    alone = re.findall(r"qwz|hpz|qgz", words)
    if len(alone) > 1:
        return [_system(name, row, testbed) for name in dict.fromkeys(alone)]
    if "product of individual" in words:
        raise NotPredictable("a product of three results, not a result")
    return [_system(words, row, testbed)]


def _system(words: str, row: PublishedRow, testbed: Testbed) -> System:
    name = next((name for pattern, name in _NAMES if re.search(pattern, words)), None)
    if name is None:
        raise NotPredictable(f"system `{words}` is not known")
    if name == "mics" and row.text("paper") in ("PaRO", "ZeRO++", "AMSP"):
        name = "deepspeed-mics"  # which these papers compare themselves with
    if name.startswith("deepspeed-zero"):
        name = f"{name}-{testbed.deepspeed}"
    system = system_named(name)
    if name == "amsp":
        system = _with_amsp_overlaps(system, words)
    letters = re.search(r"(?:paro-)?\b([nig]{3})\b", words)
    if name == "paro" and letters:
        system = dataclasses.replace(system, scopes=letters[1])
    return system


def system_named(name: str) -> System:
    """The system of a table in `published.toml`."""
    fields = dict(_fields(name))
    overlap = frozenset(fields.get("overlap", ()))
    return System(
        name=name,
        scopes=fields.get("scopes", "ggg"),
        overlap=overlap & OVERLAPS,
        wire=fields.get("wire", "bfloat16"),
        gathers_layers=fields.get("gathers", "layer") == "layer",
        is_hierarchical=fields.get("hierarchical", True),
        secondary=NODE if fields.get("secondary", False) else 0,
        second_hop=fields.get("second_hop", "boundary"),
        weight_codec=fields.get("weight_codec", "none"),
        grad_codec=fields.get("grad_codec", "none"),
        buffer_bytes=round(parse_quantity(fields["buffers"], Quantity.BYTES, name)) if "buffers" in fields else 0,
        assumptions=tuple(fields["assumptions"]),
    )


def _fields(name: str) -> Mapping[str, Any]:
    fields = published_table()["system"][name]
    return {**_fields(fields["like"]), **fields} if "like" in fields else fields


def _with_amsp_overlaps(system: System, words: str) -> System:
    """AMSP with the overlaps that a row names (AMSP VI-D2)."""
    if "no overlap" in words:
        overlap: set[str] = set()
    elif "all overlap" in words:
        overlap = set(OVERLAPS)
    elif "overlap" in words:
        overlap = set().union(*(flags for word, flags in _AMSP_OVERLAPS.items() if word in words.replace(" ", "")))
    else:
        return system
    names = ", ".join(word for word, flags in _AMSP_OVERLAPS.items() if flags <= overlap)
    return dataclasses.replace(
        system,
        overlap=frozenset(overlap),
        assumptions=(f"overlapped: {names or 'nothing'}", *system.assumptions[1:]),
    )


def with_partition(system: System, text: str, ranks_per_node: int, *, is_baseline: bool) -> System:
    """The system with the partition that the column `partition_config` states.

    Args:
        system: System.
        text: The cell.
        ranks_per_node: Ranks of a node.
        is_baseline: Whether the system is the row's baseline: the column describes the other one, unless it names
            both with "vs", or the baseline is MiCS without one technique.
    """
    words = text.lower()
    if " vs " in words:
        words = words.split(" vs ")[is_baseline]
    elif is_baseline and not system.name.startswith("mics-one-"):
        return system
    factors = _factors(words)
    if factors is not None:
        system = dataclasses.replace(system, factors=factors)
    letters = re.fullmatch(r"\s*([nig]{3})\s*", words)
    if letters and system.name == "paro":
        system = dataclasses.replace(system, scopes=letters[1])
    partition = _partition(words, ranks_per_node)
    if partition and "i" in system.scopes:
        system = dataclasses.replace(system, partition=partition)
    return system


def _partition(words: str, ranks_per_node: int) -> int:
    """Ranks of a partition; 0 where none is stated."""
    nodes = re.search(r"(?:p|group)\s*=\s*(\d+)\s*node", words)
    if nodes:
        return int(nodes[1]) * ranks_per_node
    ranks = re.search(r"\bp\s*=\s*(\d+)", words) or re.search(r"group (?:size )?(?:of )?(\d+)", words)
    return int(ranks[1]) if ranks else 0


def _factors(words: str) -> tuple[Factor, Factor, Factor] | None:
    """Factors as in "sp=1x1 sg=1x1 sos=8x1" or "sp=sg=sos=RxN".

    None where not all three are stated.
    """
    values: dict[str, Factor] = {}
    for names, value in re.findall(r"((?:s_?(?:p|g|os)\s*=\s*)+)(\d+x\d+|rxn|\d+)", words):
        factor = WORLD if value == "rxn" else (int(value.split("x")[0]), int(([*value.split("x"), "1"])[1]))
        values |= dict.fromkeys(re.findall(r"s_?(p|g|os)\b", names), factor)
    if set(values) != {"p", "g", "os"}:
        return None
    return values["p"], values["g"], values["os"]
