"""Which engine, configured how? Words of the command line as data."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

PEERS = ("ddp", "fsdp2", "fsdp2-hybrid", "fsdp2-hybrid-deferred", "fsdp2-hybrid-tuned")
OPTIONAL_PEERS = ("deepspeed-mics",)
COMPUTE = "compute"
OURS = ("mics", "zero1", "zero2", "zero3", "zeropp-hpz", "zeropp", "paro-iig")

Value = str | int | float | bool | list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One row of the comparison.

    Attributes:
        label: As it was written.
        name: A preset of ours, or a peer's.
        is_ours: Which of the two.
        overrides: Fields of `ShardConfig`; and "declares", whether the loop declares its last micro-step.
    """

    label: str
    name: str
    is_ours: bool
    overrides: dict[str, Value] = field(default_factory=dict)


def parse_ours(text: str) -> list[Entry]:
    """Presets with overrides: ``mics,zero3:prefetch=2,overlap=gather+reduce``.

    Commas separate entries and the overrides of one entry; what follows a comma is an override where it holds ``=``
    and no colon.

    Raises:
        ValueError: An override of nothing, or a preset without a name.
    """
    labels: list[str] = []
    for piece in filter(None, text.split(",")):
        if "=" in piece and ":" not in piece:
            if not labels or ":" not in labels[-1]:
                raise ValueError(f"`{piece}` follows no preset. Write preset:field=value,field=value.")
            labels[-1] += f",{piece}"
        else:
            labels.append(piece)
    return [_parse_entry(label) for label in labels]


def _parse_entry(label: str) -> Entry:
    name, _, rest = label.partition(":")
    overrides = {}
    for piece in filter(None, rest.split(",")):
        key, equals, value = piece.partition("=")
        if not (equals and key and value):
            raise ValueError(f"`{piece}` in `{label}` is no override. Write preset:field=value,field=value.")
        overrides[key] = _parse_value(value)
    if not name:
        raise ValueError(f"`{label}` names no preset. Write preset:field=value,field=value.")
    return Entry(label=label, name=name, is_ours=True, overrides=overrides)


def _parse_value(text: str) -> Value:
    if text in ("True", "False"):
        return text == "True"
    if "+" in text:
        return text.split("+")
    for convert in (int, float):
        try:
            number = convert(text)
        except ValueError:
            continue
        if math.isfinite(number):
            return number
    return text


def default_ours(nodes: int, ranks_per_node: int) -> str:
    """What is compared when nothing is said; with four nodes or more a partition of two of them, too."""
    wide = [f"mics:partition_size={2 * ranks_per_node}"] if nodes >= 4 and nodes % 2 == 0 else []
    return ",".join([OURS[0], *wide, *OURS[1:]])


def peer(name: str) -> Entry:
    """A peer, or the compute that the floor is made of.

    Raises:
        ValueError: There is none of that name.
    """
    names = (*PEERS, *OPTIONAL_PEERS, COMPUTE)
    if name not in names:
        raise ValueError(f"`{name}` is not known. Use {', '.join(names)}.")
    return Entry(label=name, name=name, is_ours=False)
