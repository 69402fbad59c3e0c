"""Measurements of a real cluster and of a real model, as the planner uses them.

`mics calibrate` writes those of a cluster into a file that `Cluster.load` reads. They count instead of figures from
datasheets.

Pure.
"""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mics_strategy.comm.route import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from mics_strategy.errors import ConfigError
from mics_strategy.planner.quantities import LARGEST
from mics_strategy.topology import LINKS

FORMAT = 1  # of the file; raised when its fields change their meaning
_LARGEST_SLOWDOWN = 10.0
_COLLECTIVES = (ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE)
_ORIGIN_FIELDS = ("format", "date", "hosts", "world_size", "torch_version", "package_version", "dtype", "flop_per_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStage:
    """Measured times of one stage of a collective.

    Attributes:
        collective: Name of the collective, as in `comm.route`.
        link: Slowest link that it crosses: "intra_node", "inter_node" or "inter_switch".
        size: Ranks that take part.
        ranks_of_node: Ranks of each node among them.
        seconds_by_bytes: Bytes of the full tensor, and seconds, ascending.
    """

    collective: str
    link: str
    size: int
    ranks_of_node: int
    seconds_by_bytes: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredOverlap:
    """Slow-downs of computation and of collectives on one link by each other.

    They are in times of what each takes alone.

    Attributes:
        link: Link of the collectives.
        compute: Time of computation while a collective is on the link.
        collective: Time of the collective while the device computes.
    """

    link: str
    compute: float
    collective: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCodec:
    """Measured speed of a codec, while all ranks of a node encode or decode.

    Attributes:
        bits: Bits of a code.
        rotation: Whether blocks are rotated.
        encoded_per_s: Values per second that are encoded.
        decoded_per_s: Values per second that are decoded and added.
    """

    bits: int
    rotation: bool
    encoded_per_s: float
    decoded_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationOrigin:
    """When, where and with what a cluster was calibrated.

    Attributes:
        date: Day, as YYYY-MM-DD.
        hosts: Names of the nodes, in order.
        world_size: Ranks.
        torch_version: Version of torch.
        package_version: Version of this package.
        dtype: Dtype of the matrix products whose rate is the device's.
        flop_per_s: Measured FLOP per second of a rank's matrix products, by dtype.
    """

    date: str
    hosts: tuple[str, ...]
    world_size: int
    torch_version: str
    package_version: str
    dtype: str
    flop_per_s: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredUnit:
    """Measured seconds of one unit for one micro-step.

    They are those of the slowest rank, while all ranks of a node compute. A second forward takes as long as the first
    where `recompute_s` is None.
    """

    name: str
    forward_s: float
    backward_s: float
    recompute_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCompute:
    """Measured computation of one model on one device.

    Attributes:
        micro_batch: Samples of the measured micro-step.
        units: Units, in the order of the model's description.
        optimizer_s_per_numel: Seconds of the optimizer's update for each element.
    """

    micro_batch: int
    units: tuple[MeasuredUnit, ...]
    optimizer_s_per_numel: float


def slowdowns(computed_s: float, collective_s: float, busy_s: float, rest_s: float) -> dict[str, float]:
    """Slow-downs of computation and a collective by each other, at least 1 each.

    Args:
        computed_s: Seconds of the computation alone.
        collective_s: Seconds of the collective alone.
        busy_s: Seconds of the computation while the collective runs.
        rest_s: Seconds for which the collective goes on afterwards, alone.
    """
    overlapped_s = min(busy_s, busy_s + rest_s)
    done_s = max(collective_s - rest_s, overlapped_s / _LARGEST_SLOWDOWN)
    return {
        "compute": min(_LARGEST_SLOWDOWN, max(1.0, busy_s / computed_s)),
        "collective": min(_LARGEST_SLOWDOWN, max(1.0, overlapped_s / done_s)),
    }


def monotone(table: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """A table of bytes and seconds in which no size takes longer than a larger one. The excess is noise."""
    seconds = itertools.accumulate((row[1] for row in reversed(table)), min)
    return [(row[0], least_s) for row, least_s in zip(table, [*seconds][::-1], strict=True)]


def parse_stages(value: Any, where: str) -> tuple[MeasuredStage, ...]:
    """The measured stages in a file.

    Raises:
        ConfigError: An entry is not a table of ascending bytes and positive seconds, or names no collective or link.
    """
    return tuple(_parse_stage(entry, f"`measured_stages[{n}]` of {where}") for n, entry in enumerate(_list(value)))


def _parse_stage(entry: Any, where: str) -> MeasuredStage:
    fields = _fields(entry, ("collective", "link", "size", "ranks_of_node", "seconds_by_bytes"), where)
    _check_word(fields["collective"], _COLLECTIVES, f"`collective` of {where}")
    _check_word(fields["link"], LINKS, f"`link` of {where}")
    size, ranks = fields["size"], fields["ranks_of_node"]
    if not (_is_count(size) and _is_count(ranks) and size % ranks == 0):
        raise ConfigError(
            f"`size={size!r}` and `ranks_of_node={ranks!r}` of {where} are not numbers of ranks, the second one a "
            "divisor of the first. Calibrate again."
        )
    rows = tuple(tuple(_list(row)) for row in _list(fields["seconds_by_bytes"]))
    are_numbers = all(len(row) == 2 and _is_count(row[0]) and _is_positive(row[1]) for row in rows)
    if not rows or not are_numbers or [row[0] for row in rows] != sorted({row[0] for row in rows}):
        raise ConfigError(
            f"`seconds_by_bytes` of {where} is no table of ascending bytes and of seconds above 0. Calibrate again."
        )
    return MeasuredStage(
        collective=fields["collective"],
        link=fields["link"],
        size=size,
        ranks_of_node=ranks,
        seconds_by_bytes=rows,
    )


def parse_overlaps(value: Any, where: str) -> tuple[MeasuredOverlap, ...]:
    """The measured overlaps in a file.

    Raises:
        ConfigError: An entry names no link, or states a slow-down below 1.
    """
    overlaps = []
    for number, entry in enumerate(_list(value)):
        name = f"`measured_overlaps[{number}]` of {where}"
        fields = _fields(entry, ("link", "compute", "collective"), name)
        _check_word(fields["link"], LINKS, f"`link` of {name}")
        for key in ("compute", "collective"):
            if not _is_positive(fields[key]) or fields[key] < 1:
                raise ConfigError(f"`{key}={fields[key]!r}` of {name} is no slow-down. Use 1 or more.")
        overlaps.append(MeasuredOverlap(**fields))
    return tuple(overlaps)


def parse_codecs(value: Any, where: str) -> tuple[MeasuredCodec, ...]:
    """The measured codecs in a file.

    Raises:
        ConfigError: An entry has other fields, or speeds that are not positive.
    """
    codecs = []
    for number, entry in enumerate(_list(value)):
        name = f"`measured_codecs[{number}]` of {where}"
        fields = _fields(entry, ("bits", "rotation", "encoded_per_s", "decoded_per_s"), name)
        if not (_is_count(fields["bits"]) and isinstance(fields["rotation"], bool)):
            raise ConfigError(
                f"`bits={fields['bits']!r}` and `rotation={fields['rotation']!r}` of {name} are no codec. Calibrate "
                "again."
            )
        for key in ("encoded_per_s", "decoded_per_s"):
            if not _is_positive(fields[key]):
                raise ConfigError(f"`{key}={fields[key]!r}` of {name} is no speed. Calibrate again.")
        codecs.append(MeasuredCodec(**fields))
    return tuple(codecs)


def parse_origin(value: Any, where: str) -> CalibrationOrigin:
    """The origin of a calibration in a file.

    Raises:
        ConfigError: The file was written by another version, whose fields have other meanings, or lacks a field.
    """
    where = f"`calibration` of {where}"
    if isinstance(value, Mapping) and value.get("format") != FORMAT:
        raise ConfigError(
            f"{where} has format {value.get('format')!r}, and this version reads {FORMAT}. Calibrate again with "
            "`mics calibrate`."
        )
    fields = _fields(value, _ORIGIN_FIELDS, where)
    try:
        datetime.date.fromisoformat(fields["date"])
    except (TypeError, ValueError) as error:
        raise ConfigError(f"`date={fields['date']!r}` of {where} is no day. Write it like 2026-01-31.") from error
    texts = (fields["torch_version"], fields["package_version"], fields["dtype"], *_list(fields["hosts"]))
    rates = fields["flop_per_s"]
    are_numbers = (
        isinstance(rates, Mapping) and _is_count(fields["world_size"]) and all(map(_is_positive, rates.values()))
    )
    if not are_numbers or not all(isinstance(text, str) for text in texts) or not _list(fields["hosts"]):
        raise ConfigError(
            f"{where} states hosts, ranks, versions or FLOP per second in another form than `mics calibrate` writes. "
            "Calibrate again."
        )
    return CalibrationOrigin(
        **{name: fields[name] for name in _ORIGIN_FIELDS[3:]}, date=fields["date"], hosts=tuple(_list(fields["hosts"]))
    )


def _fields(entry: Any, names: Sequence[str], where: str) -> dict[str, Any]:
    if not isinstance(entry, Mapping) or {*entry} != {*names}:
        found = ", ".join(map(str, entry)) if isinstance(entry, Mapping) else type(entry).__name__
        raise ConfigError(f"{where} has {found}, and must have {', '.join(names)}. Calibrate again.")
    return dict(entry)


def _check_word(value: Any, words: Sequence[str], where: str) -> None:
    if value not in words:
        raise ConfigError(f"{where} is {value!r}. Use {', '.join(words)}.")


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else [value]


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < LARGEST
