"""Quantities with units, as people write them: "100 Gb/s", "3.4 us", "40 GB".

SI prefixes are decimal (GB = 1e9 bytes), binary ones are GiB and MiB. A "b" is a bit, a "B" a byte. A number without a
unit is in bytes, seconds, bytes per second or FLOP per second.

Pure.
"""

from __future__ import annotations

import enum
import math
import re
from typing import Any

from mics_strategy.errors import ConfigError

_PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
LARGEST = 1e300  # no float holds an integer of any size
_LEAST = 1e4  # bytes, bytes or FLOP per second of anything in a cluster: below it, a unit was forgotten


class Quantity(enum.Enum):
    """Kinds of quantities, with an example each for errors."""

    BYTES = "40 GB"
    SECONDS = "3.4 us"
    BYTES_PER_S = "12.5 GB/s or 100 Gb/s"
    FLOP_PER_S = "312 TFLOP/s"


_UNITS = {
    Quantity.BYTES: {"B": 1.0, "b": 1 / 8},
    Quantity.SECONDS: {"s": 1.0},
    Quantity.BYTES_PER_S: {"B/s": 1.0, "bit/s": 1 / 8, "b/s": 1 / 8, "bps": 1 / 8},
    Quantity.FLOP_PER_S: {"FLOP/s": 1.0, "FLOPS": 1.0},
}


def parse_quantity(value: Any, kind: Quantity, where: str) -> float:
    """A quantity in its base unit.

    Args:
        value: Text with a unit, or a number in the base unit.
        kind: Kind of the quantity.
        where: Name of the field in errors.

    Raises:
        ConfigError: The text is no quantity of this kind, not above 0, or lacks its unit.
    """
    number = _number(value, kind)
    if kind is not Quantity.SECONDS and 0 < number < _LEAST:
        raise ConfigError(f"{where} is {value!r}, which is next to nothing without a unit. Write it like {kind.value}.")
    if not math.isfinite(number) or number <= 0:
        raise ConfigError(f"{where} is {value!r}, not a quantity above 0. Write it like {kind.value}.")
    return number


def _number(value: Any, kind: Quantity) -> float:
    """The number in base units; NaN where the value is no quantity."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value) if abs(value) < LARGEST else math.inf
    match = re.fullmatch(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*(\S*)\s*", value) if isinstance(value, str) else None
    if match is None:
        return math.nan
    number, unit = match.groups()
    if not unit and "e" in number:  # YAML reads 8e10 as text
        return float(number)
    for name, factor in _UNITS[kind].items():
        prefix = unit.removesuffix(name)
        scale = {**_PREFIXES, **_BINARY}.get(prefix)
        if unit.endswith(name) and scale is not None and number.count(".") <= 1:
            return float(number) * scale * factor
    return math.nan
