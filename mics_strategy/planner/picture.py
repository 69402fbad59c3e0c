"""Picture of a planned step. One row shows the device, and one each stream of collectives. It needs matplotlib."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mics_strategy.errors import ConfigError
from mics_strategy.planner.step_tasks import COMPUTE, FIRST_HOP, GATHER, SECOND_HOP
from mics_strategy.timeline import Category, Interval, Timeline

_ROWS = (COMPUTE, GATHER, FIRST_HOP, SECOND_HOP)  # from the top; the control group's is too small to see
_COLOURS = {"forward": "#4c78a8", "recompute": "#9ecae9", "backward": "#1f4e79", "step": "#54a24b", "wait": "#e45756"}
_LINKS = {"intra_node": "#f2cf5b", "inter_node": "#f58518", "inter_switch": "#b8470f"}  # the slowest of a collective


def draw(timeline: Timeline, lines: Iterable[str], path: Path) -> None:
    """Draw the rows of rank 0 into a file.

    Args:
        timeline: Planned timeline.
        lines: Text above the picture; the first lines of a report.
        path: File of a format that matplotlib knows.

    Raises:
        ConfigError: Matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(f"`--picture {path}` needs matplotlib, which is not installed. Run `pip install matplotlib`.")
    figures: Any = importlib.import_module("matplotlib.figure")
    patches: Any = importlib.import_module("matplotlib.patches")
    figure = figures.Figure(figsize=(14, 4.2), layout="constrained")
    axes = figure.subplots()
    scale, unit = (1.0, "s") if timeline.step_s(0) >= 1 else (1e3, "ms")
    used: dict[str, str] = {}
    for row in (row for row in timeline.rows_of(0) if row.resource in _ROWS):
        bars: dict[str, list[tuple[float, float]]] = {}
        for interval in row.intervals:
            label, colour = _style(interval)
            used[label] = colour
            bars.setdefault(colour, []).append((interval.start_s * scale, interval.seconds * scale))
        height = _ROWS.index(row.resource)
        for colour, spans in bars.items():
            axes.broken_barh(spans, (height - 0.38, 0.76), facecolors=colour, linewidth=0)
    axes.set_yticks(range(len(_ROWS)), [name.replace("_", " ") for name in _ROWS])
    axes.set_ylim(len(_ROWS) - 0.5, -0.5)
    axes.set_xlim(0, timeline.step_s(0) * scale)
    axes.set_xlabel(f"time in the step, {unit}")
    axes.set_title("\n".join([*lines][:4]), loc="left", fontsize=9)
    handles = [patches.Patch(color=colour, label=label) for label, colour in used.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)


def _style(interval: Interval) -> tuple[str, str]:
    """Label and colour of an interval."""
    key = interval.key
    if key.category is Category.COLLECTIVE:
        link = max((name for name in _LINKS if name in key.axis), key=[*_LINKS].index)
        return f"sends over {link.replace('_', '-')} links", _LINKS[link]
    if key.category is Category.WAIT:
        return "waits", _COLOURS["wait"]
    return "optimizer step" if key.name == "step" else key.name, _COLOURS[key.name]
