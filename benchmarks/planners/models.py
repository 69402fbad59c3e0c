"""The model of a public run, by its name, by the row's own numbers, or by its size.

Pure.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import tomllib
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

from benchmarks.papers.testbed import NotPredictable
from mics_strategy.planner.model_formulas import TransformerShape

if TYPE_CHECKING:
    from benchmarks.papers.row import PublishedRow

_NOT_TRANSFORMERS = ("resnet", "unet", "diffusion", "mamba", "nemotron_3_nano", "nemotronv3nano", "rwkv", "vit", "dlrm")
_LLAMA_RATIO = 128  # hidden size over layers


@dataclass(frozen=True, slots=True, kw_only=True)
class RunModel:
    """The model of a run.

    Attributes:
        shape: Numbers of a dense transformer.
        assumptions: Assumptions for what the row does not state.
    """

    shape: TransformerShape
    assumptions: tuple[str, ...] = ()


def model_of_run(row: PublishedRow) -> RunModel:
    """The model of a row.

    Raises:
        NotPredictable: It is no transformer, or neither its name nor its size is known.
    """
    name = re.sub(r"[\s_]+", "-", row.words("model"))
    if row.words("class") == "moe" or re.search(r"moe\b|a\d+b\b|deepseek-?v[23]", name):
        raise NotPredictable(f"`{row.text('model')}` is a mixture of experts, whose routing is not modelled")
    if any(word.replace("_", "-") in name for word in _NOT_TRANSFORMERS):
        raise NotPredictable(f"`{row.text('model')}` is no transformer; only transformers have formulas here")
    known = _known(name, row)
    stated = _stated(row, known)
    found = stated or known
    if found is not None:
        notes = () if known is None else _against_name(row, known.shape, found.shape)
        return dataclasses.replace(found, assumptions=(*found.assumptions, *notes))
    numel = _numel(row)
    if numel is None or not 1e7 <= numel < 1e13:
        raise NotPredictable(f"the structure of `{row.text('model')}` is not known, and its size is not stated")
    return _llama_like(numel)


def _against_name(row: PublishedRow, named: TransformerShape, found: TransformerShape) -> tuple[str, ...]:
    """Numbers of the row that are not those of the model that it names."""
    pairs = (
        ("layers", named.num_layers, found.num_layers),
        ("hidden", named.hidden_size, found.hidden_size),
    )
    return tuple(
        f"{column} {stated} of the row, where the model of this name has {number}: {counted} counts"
        for column, number, counted in pairs
        if (stated := row.count(column)) is not None and stated != number
    )


def _known(name: str, row: PublishedRow) -> RunModel | None:
    """The model of the table with this name and size."""
    depth = re.search(r"nanochat.*?\bd(\d+)", name)
    if depth:  # its width is 64 for each layer: nanochat, scripts/base_train.py
        layers = int(depth[1])
        nanochat: dict[str, Any] = {
            "family": "gpt2",
            "vocab": 65536,
            "tied": False,
            "sizes": {"d": [layers, 64 * layers]},
        }
        return RunModel(shape=_shape("d", nanochat, name))
    for entry in _table():
        if not re.search(entry["pattern"], name):
            continue
        size = _size_of(name, row, entry["sizes"])
        if size is None:
            return None
        if size in entry.get("experts", ()):
            raise NotPredictable(f"`{name}` is a mixture of experts, whose routing is not modelled")
        return RunModel(shape=_shape(size, entry, name))
    return None


def _size_of(name: str, row: PublishedRow, sizes: dict[str, Any]) -> str | None:
    """The size of a model's family that the name says, or else that is next to the number of parameters."""
    for size in sorted(sizes, key=len, reverse=True):
        if re.search(rf"(?<![\d.]){re.escape(size)}(?![a-z\d])", name):
            return size
    numel = _numel(row)
    if numel is None:
        return None
    billions = {size: _billions(size) for size in sizes if _billions(size)}
    if not billions:
        return None
    best = min(billions, key=lambda size: abs(billions[size] - numel / 1e9))
    return best if abs(billions[best] / (numel / 1e9) - 1) < 0.15 else None


def _numel(row: PublishedRow) -> float | None:
    """Parameters by the columns, as in "7B", "6658859008" or "T5-11B"; None where nothing is stated."""
    if row.num_parameters is not None:
        return row.num_parameters
    number, named = row.number("params"), re.search(r"(\d+(?:\.\d+)?)b\b", row.words("model"))
    if number is not None and number > 1e6:
        return number
    return float(named[1]) * 1e9 if named else None


def _billions(size: str) -> float:
    match = re.fullmatch(r"([\d.]+)([bm])", size)
    return float(match[1]) * {"b": 1.0, "m": 1e-3}[match[2]] if match else 0.0


def _shape(size: str, entry: dict[str, Any], name: str) -> TransformerShape:
    numbers = entry["sizes"][size]
    num_layers, hidden = numbers[:2]
    intermediate = numbers[2] if len(numbers) > 2 else 4 * hidden
    heads = numbers[3] if len(numbers) > 3 else max(1, hidden // entry.get("head", 128))
    kv_heads = numbers[4] if len(numbers) > 4 and numbers[4] != heads and entry["family"] == "llama" else 0
    return TransformerShape(
        name=name,
        family=entry["family"],
        num_layers=num_layers,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_heads=heads if hidden % heads == 0 else max(1, hidden // 128),
        num_kv_heads=kv_heads,
        vocab_size=entry["vocab"],
        tie_embeddings=entry.get("tied", True),
        dropout=False,
    )


def _stated(row: PublishedRow, known: RunModel | None) -> RunModel | None:
    """The model by the row's layers and hidden size; the rest is that of the name."""
    num_layers, hidden = row.count("layers"), row.count("hidden")
    if not num_layers or not hidden or num_layers < 2:
        return None
    intermediate = re.search(r"intermediate (?:size )?(\d+)", row.words("notes"))
    base = known.shape if known is not None else _llama_like(12.0 * num_layers * hidden**2).shape
    is_base = base.hidden_size == hidden
    heads = row.count("heads") or (base.num_heads if is_base else max(1, hidden // 128))
    heads = heads if hidden % heads == 0 else max(1, hidden // 128)
    ffn = int(intermediate[1]) if intermediate else base.intermediate_size if is_base else 0
    kv_heads = base.num_kv_heads if is_base and base.num_kv_heads and heads % base.num_kv_heads == 0 else 0
    shape = dataclasses.replace(
        base,
        name=row.text("model") or "stated",
        num_layers=num_layers,
        hidden_size=hidden,
        intermediate_size=ffn or (_swiglu(hidden) if base.family == "llama" else 4 * hidden),
        num_heads=heads,
        num_kv_heads=kv_heads,
        vocab_size=row.count("vocab") or base.vocab_size,
    )
    assumptions = () if known is not None else ("structure by the row's layers and hidden size, gated like LLaMA's",)
    return RunModel(shape=shape, assumptions=assumptions)


def _swiglu(hidden: int) -> int:
    return 256 * round(hidden * 8 / 3 / 256 + 0.49)


def _llama_like(numel: float) -> RunModel:
    """A LLaMA of about so many parameters."""
    hidden = 128 * max(1, round((numel * _LLAMA_RATIO / 12) ** (1 / 3) / 128))
    num_layers = max(2, round((numel - 2 * 32000 * hidden) / (12 * hidden**2)))
    shape = TransformerShape(
        name=f"llama-like-{numel / 1e9:.3g}b",
        family="llama",
        num_layers=num_layers,
        hidden_size=hidden,
        intermediate_size=_swiglu(hidden),
        num_heads=max(1, hidden // 128),
        vocab_size=32000,
        tie_embeddings=False,
        dropout=False,
    )
    note = f"structure not known: LLaMA of {num_layers} layers of {hidden}"
    return RunModel(shape=shape, assumptions=(note,))


@functools.cache
def _table() -> list[dict[str, Any]]:
    text = resources.files(__package__).joinpath("models.toml").read_text()
    return tomllib.loads(text)["model"]  # type: ignore[no-any-return]
