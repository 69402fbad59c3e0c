"""Cells of a public run that would be read as something else than they say: they are refused in words.

What is empty, or says that nothing is stated, is not malformed: it is assumed, and named among the assumptions.

Pure.
"""

from __future__ import annotations

import dataclasses
import math
import re
from typing import TYPE_CHECKING

from benchmarks.papers.testbed import NotPredictable
from mics_strategy.errors import ConfigError
from mics_strategy.planner.recompute import Recompute, parse_recompute

if TYPE_CHECKING:
    from benchmarks.papers.row import PublishedRow

_COUNTS = (
    *("layers", "hidden", "heads", "vocab", "seq_len", "gpus_per_node", "nodes", "total_gpus"),
    *("micro_batch", "grad_accum_steps", "global_batch", "tp", "pp", "cp", "ep"),
)
_UNSTATED = ("", "-", "?", "n/a", "na", "unknown", "not stated")
_MAX_COUNT, _MAX_TOKENS = 10**7, 10**10
_NUMBER = r"[~≈]?\s*(\d{1,3}(?:,\d{3})+(?:\.\d+)?|(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)"
_COUNT = re.compile(rf"{_NUMBER}\s*(?:[a-z]{{3,}}[a-z /]*)?")  # a noun may follow, as in "8 GPUs"
_TOKENS = re.compile(r"\d+\.?\d*\s*[km]?\s*tokens[a-z /]*")  # as in "4M tokens" or "1K tokens/GPU"
_SCALED = re.compile(r"[1-9]\d*\s*k")  # as in a length of "8k"
_COMMA = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")  # between thousands
_ODD_NUMBER = re.compile(r"\d\.\d*\.|\de[+-]?\d")  # whose last part would count
_NEGATIVE = re.compile(r"^\s*[-\u2212]|(?<![\w.)])[-\u2212]\d")
_PRECISIONS = re.compile(r"bf16|bfloat16|fp16|float16|half|fp32|fp8|amp|mixed")
_OTHER_PRECISIONS = re.compile(r"fp4|int4|int8|float8")
_OTHER_UNITS = re.compile(
    r"\b(mins?|minutes?|h|hrs?|hours?|days?|weeks?|[uµn]s|[mb]illions?)\b|^[kmgb]$|\b([mgb] ?tok|[kmgb] ?(sample|seq))"
)


def checked(row: PublishedRow) -> PublishedRow:
    """The row with its numbers in plain digits, where its numbers and its words of a known few are well formed.

    Raises:
        NotPredictable: One would be read as something else than it says.
    """
    numbers = {name: _COMMA.sub("", row.text(name)) for name in (*_COUNTS, "params", "interconnect_inter")}
    row = dataclasses.replace(row, cells={**row.cells, **numbers})
    for column in _COUNTS:
        if not _is_count(row, column):
            raise _refused(
                row, column, f"no whole number from 1 to {_MAX_COUNT}", "Write it in digits, or leave it out"
            )
    for column in ("params", "interconnect_inter"):
        if _NEGATIVE.search(row.words(column)) or _ODD_NUMBER.search(row.words(column)):
            raise _refused(row, column, "no number from 0 in plain digits", "Write it so, or leave it out")
    precision = row.words("precision")
    if not is_unstated(row, "precision") and (_OTHER_PRECISIONS.search(precision) or not _PRECISIONS.search(precision)):
        raise _refused(row, "precision", "no known precision", "Write bf16, fp16, fp8 or fp32, or leave it out")
    unit = "unit" if row.text("unit") else "metric"
    if _OTHER_UNITS.search(row.words(unit)):
        raise _refused(row, unit, "not in seconds and single tokens", "Convert it, as to s, ms or tokens/s")
    _check_nodes(row)
    return row


def is_unstated(row: PublishedRow, column: str) -> bool:
    """Whether a cell says nothing."""
    return row.words(column) in _UNSTATED


def published_value(row: PublishedRow) -> float | None:
    """The published value, as in "6,000", "~6000", "41 %" or "6000 ± 50"; None where it is no number above 0.

    Its own unit may follow; other letters would scale it, as in "3.5k".
    """
    text = re.sub(r"\([^)]*\)|(?:±|\+/?-).*", "", row.words("value")).strip()
    unit = re.escape(row.words("unit"))
    match = re.fullmatch(rf"{_NUMBER}\s*(?:%|x|{unit})?", text)
    value = float(match[1].replace(",", "")) if match else 0.0
    return value if 0 < value < math.inf else None


def stated_recompute(row: PublishedRow) -> Recompute | None:
    """What `activation_ckpt` says, in the words of a table or of `mics plan`; None where it leaves the choice.

    Raises:
        NotPredictable: It is none of these.
    """
    word = _without_notes(row, "activation_ckpt")
    if word in (*_UNSTATED, "auto"):
        return None
    if (stated := dataclasses.replace(row, cells={"activation_ckpt": word}).recomputes) is not None:
        return stated
    if re.fullmatch(r"0(\.0*)?", word):
        return False
    try:
        return parse_recompute(word)
    except ConfigError as error:
        words = "Write yes, no, attention, selective or a share of the layers as 1/2, or leave it out"
        raise _refused(row, "activation_ckpt", "no known word for recomputation", words) from error


def _refused(row: PublishedRow, column: str, found: str, remedy: str) -> NotPredictable:
    return NotPredictable(f"`{column}` is `{row.text(column)}`, {found}. {remedy}.")


def _without_notes(row: PublishedRow, column: str) -> str:
    return re.sub(r"\([^)]*\)", "", row.words(column)).strip()


def _is_count(row: PublishedRow, column: str) -> bool:
    """Whether a cell is a whole number that counts something, a number of tokens, or empty."""
    text = _without_notes(row, column)
    has_digit = any(letter.isdigit() for letter in text)  # "varies" states nothing
    if is_unstated(row, column) or not has_digit or (column == "seq_len" and _SCALED.fullmatch(text)):
        return True
    is_odd = "token" in row.words(column) and _ODD_NUMBER.search(row.words(column))
    if column in ("seq_len", "micro_batch", "global_batch") and (is_odd or _TOKENS.fullmatch(text)):
        return not is_odd and 1 <= (row.tokens(column) or 0) <= _MAX_TOKENS
    match = _COUNT.fullmatch(text)
    number = float(match[1].replace(",", "")) if match else 0.0
    return 1 <= number <= _MAX_COUNT and number == int(number)


def _check_nodes(row: PublishedRow) -> None:
    total, nodes = row.count("total_gpus"), row.count("nodes")
    if not total or not nodes:
        return
    each = min(row.count("gpus_per_node") or total // nodes, total)
    if nodes > total or nodes * each < total:  # the last node may have idle ones
        found = f"and {nodes} nodes of {each} GPUs hold {nodes * each}"
        raise _refused(row, "total_gpus", found, "State numbers that agree, or leave one out")
