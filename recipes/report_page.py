"""The report of a run as one HTML file without references to others: `python -m recipes.report_page RUN_FOLDER`.

A run writes the page when it ends. The command makes it again from the files of the run, also while the run goes on.
Of two folders, it writes one page with both runs side by side.
"""

import difflib
import html
import importlib.util
import io
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment
from markupsafe import Markup

from mics_strategy.errors import MiCSError, command_error

from .environment import ENVIRONMENT, described
from .errors import RecipeError
from .metrics_files import JSONL, VALIDATION_LOSS, Row, read_rows

PAGE, COMPARISON, ENGINE = "report.html", "comparison.html", "engine.json"
_MAX_ROWS = 200
_PLOTS: tuple[tuple[str, ...], ...] = (  # columns of one plot
    ("loss", VALIDATION_LOSS),
    ("tokens_per_s",),
    ("samples_per_s",),
    ("mfu", "mfu_megatron"),
    ("lr",),
    ("grad_norm",),
    ("peak_memory_bytes", "peak_host_bytes"),
)
_FROM_ZERO = ("tokens_per_s", "samples_per_s", "mfu", "peak_memory_bytes")
_LABELS = {
    "loss": "loss, nats",
    VALIDATION_LOSS: "validation loss, nats",
    "tokens_per_s": "tokens/s",
    "tokens_per_s_per_rank": "tokens/s of a rank",
    "samples_per_s": "samples/s",
    "step_s": "time of a step, s",
    "model_tflop_per_s_per_rank": "TFLOP/s of a rank",
    "paper_tflop_per_s_per_rank": "TFLOP/s of a rank, as MiCS counts",
    "mfu": "share of the peak (MFU)",
    "mfu_megatron": "MFU by Megatron's formula",
    "lr": "learning rate",
    "grad_norm": "norm of the gradient",
    "peak_memory_bytes": "peak memory of the device, GB",
    "peak_host_bytes": "peak memory of the process, GB",
}
_STYLE = """
:root { color-scheme: light dark; --text: #222; --ground: #fff; --code: #f5f5f5; --line: #999; --alarm: #b00 }
@media (prefers-color-scheme: dark) {
  :root { --text: #ddd; --ground: #181818; --code: #262626; --line: #666; --alarm: #f77 }
  figure svg { filter: invert(1) hue-rotate(180deg) }
}
body { font: 15px/1.4 sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem }
body { color: var(--text); background: var(--ground); overflow-wrap: anywhere }
table { border-collapse: collapse } td, th { padding: .15rem .8rem .15rem 0; text-align: right; vertical-align: top }
.wide { overflow-x: auto } .wide td, .wide th { white-space: nowrap }
td:first-child, th:first-child, .facts * { text-align: left } th { border-bottom: 1px solid var(--line) }
.plots { display: flex; flex-wrap: wrap } .plots figure { margin: 0; flex: 1 1 min(28rem, 100%); max-width: 32rem }
svg { width: 100%; height: auto } pre { background: var(--code); padding: 1rem; overflow-x: auto }
.facts td:first-child { min-width: 6.5rem; overflow-wrap: normal } .different { color: var(--alarm) }
"""
_HEAD = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1"><title>{{ title }}</title>
<style>{{ style }}</style></head><body>
<h1>{{ title }}</h1>
"""
_COURSE = """<h2>Course</h2>
{% if has_plots %}<div class="plots">{% for plot in plots %}<figure>{{ plot }}</figure>{% endfor %}</div>
{% else %}<p>Plots need matplotlib, which is not installed: <code>pip install matplotlib</code>.</p>
{% endif %}"""
_RUN = """{% if run.is_incomplete %}<p class="different">
The run has taken {{ run.last_step }} of {{ run.max_steps }} steps.</p>
{% endif %}<table class="facts">{% for name, value in run.summary %}<tr><td>{{ name }}</td><td>{{ value }}</td></tr>
{% endfor %}</table>
"""
_TABLES = """<h2>Traffic</h2>
{% if run.traffic %}<p>Sent by the first rank in the last optimizer step.</p>
<div class="wide"><table><tr><th>axis</th><th>collective</th><th>calls</th><th>planned, B</th><th>sent, B</th>
<th></th></tr>
{% for row in run.traffic %}<tr><td>{{ row.axis }}</td><td>{{ row.collective }}</td><td>{{ row.count }}</td>
<td>{{ "{:,}".format(row.planned_bytes) }}</td><td>{{ "{:,}".format(row.sent_bytes) }}</td>
<td>{% if row.planned_bytes == row.sent_bytes %}equal{% else %}<b class="different">DIFFERENT</b>{% endif %}</td></tr>
{% endfor %}</table></div>
{% else %}<p>Not recorded: the run has not ended, sent nothing, or its strategy is not one of this project.</p>
{% endif %}<h2>Memory of the engine</h2>
{% if run.memory %}<p>Allocated by the first rank.</p>
<div class="wide"><table>{% for purpose, num_bytes in run.memory %}
<tr><td>{{ purpose }}</td><td>{{ "{:,}".format(num_bytes) }} B</td></tr>
{% endfor %}</table></div>
{% else %}<p>Not recorded: the run has not ended, or its strategy is not one of this project.</p>
{% endif %}<h2>Log</h2>
<p>{{ run.shown | length }} of {{ run.rows | length }} rows; metrics.csv and metrics.jsonl have all of them.</p>
<div class="wide"><table><tr>{% for name in run.columns %}<th>{{ label(name) }}</th>{% endfor %}</tr>
{% for row in run.shown %}<tr>{% for name in run.columns %}<td>{{ number(name, row[name]) if name in row }}</td>
{% endfor %}</tr>
{% endfor %}</table></div>
<h2>Resolved recipe</h2><pre>{{ run.recipe_text }}</pre>
</body></html>
"""
_BOTH = """<table class="facts"><tr><th></th>{% for run in runs %}<th>{{ run }}</th>{% endfor %}</tr>
{% for name, values in facts %}<tr><td>{{ name }}</td>{% for value in values %}<td>{{ value }}</td>{% endfor %}</tr>
{% endfor %}</table>
"""
_DIFFERENCES = """<h2>Recipes</h2>
{% if differences %}<pre>{{ differences }}</pre>{% else %}<p>Both are equal.</p>{% endif %}
</body></html>
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """What the files of a run say.

    Attributes:
        name: Name of the recipe.
        max_steps: Optimizer steps that the run was to take.
        rows: Rows of the log.
        traffic: Planned and sent bytes by axis and collective; empty where not recorded.
        memory: Purposes and bytes of the engine's allocations; empty where not recorded.
        environment: Date, duration, machines, versions; empty where not recorded.
        recipe_text: The resolved recipe.
    """

    name: str
    max_steps: int
    rows: list[Row]
    traffic: list[dict[str, Any]]
    memory: list[tuple[str, int]]
    environment: list[tuple[str, str]]
    recipe_text: str

    @property
    def last_step(self) -> int:
        """Last optimizer step in the log."""
        return int(max(row["step"] for row in self.rows))

    @property
    def is_incomplete(self) -> bool:
        """Whether the log ends before the last step of the recipe."""
        return self.last_step < self.max_steps

    @property
    def columns(self) -> list[str]:
        """Columns of all rows, in the order of their first row."""
        return list(dict.fromkeys(name for row in self.rows for name in row))

    @property
    def shown(self) -> list[Row]:
        """Rows that the page lists: all, or as many of them at equal distances as it has room for."""
        count = len(self.rows)
        if count <= _MAX_ROWS:
            return self.rows
        return [self.rows[index * (count - 1) // (_MAX_ROWS - 1)] for index in range(_MAX_ROWS)]

    @property
    def summary(self) -> list[tuple[str, str]]:
        """Names and values at the head of the page."""
        values = {name: [row[name] for row in self.rows if name in row] for name in self.columns}
        lines = [*self.environment, ("optimizer steps", f"{self.last_step:,} of {self.max_steps:,}")]
        for name in ("loss", VALIDATION_LOSS):
            if found := values.get(name):
                lines.append((label(name), f"{number(name, found[0])} -> {number(name, found[-1])}"))
        for name in ("tokens_per_s", "tokens_per_s_per_rank", "samples_per_s"):
            if found := values.get(name):
                text = f"{number(name, found[-1])} at the end, {number(name, max(found))} at best"
                lines.append((label(name), text))
        lines += [(label(name), f"{values[name][-1]:.1%}") for name in ("mfu", "mfu_megatron") if name in values]
        for name in ("peak_memory_bytes", "peak_host_bytes"):
            if found := values.get(name):
                lines.append((label(name), number(name, max(found))))
        return lines


def label(name: str) -> str:
    """Return the words for a column."""
    return _LABELS.get(name, name.replace("_", " "))


def number(name: str, value: float) -> str:
    """Return a value of a column: four significant digits, whole numbers as they are, bytes in GB."""
    if name.endswith("_bytes"):
        value /= 1e9
    if isinstance(value, int):
        return f"{value:,}"
    return f"{float(f'{value:.4g}'):,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"


def read_run(folder: Path) -> RunRecord:
    """Read the files of a run.

    Args:
        folder: Its output folder.

    Raises:
        RecipeError: A file is missing, empty or of another kind.
    """
    rows = read_rows(folder / JSONL)
    if not rows:
        raise RecipeError(
            f"{folder / JSONL} has no complete row, so there is nothing to report. Wait for the first logged step."
        )
    text, engine = _read(folder / "config.yaml"), "{}"
    if (folder / ENGINE).is_file():
        engine = _read(folder / ENGINE)
    facts = _read(folder / ENVIRONMENT) if (folder / ENVIRONMENT).is_file() else "{}"
    try:
        recipe, account = yaml.safe_load(text), json.loads(engine)
        return RunRecord(
            name=recipe["name"],
            max_steps=int(recipe["trainer"]["max_steps"]),
            rows=rows,
            traffic=list(account.get("traffic", ())),
            memory=list(account.get("memory_bytes", {}).items()),
            environment=described(json.loads(facts)),
            recipe_text=text,
        )
    except (yaml.YAMLError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise RecipeError(
            f"The report needs config.yaml, {ENGINE} and {ENVIRONMENT} as a run writes them to {folder}, but they "
            f"cannot be read ({type(error).__name__}: {error}). Restore them, or delete {ENGINE} and {ENVIRONMENT}, "
            "which are optional."
        ) from error


def write_page(folder: Path) -> Path:
    """Write `report.html` into the folder of a run and return its path.

    Raises:
        RecipeError: A file of the run is missing, empty or of another kind.
    """
    run = read_run(folder)
    return _write(folder / PAGE, _HEAD + _RUN + _COURSE + _TABLES, {"": run.rows}, title=run.name, run=run)


def write_comparison(folder: Path, other: Path) -> Path:
    """Write `comparison.html`, two runs side by side, into the folder of the first and return its path.

    Raises:
        RecipeError: A file of a run is missing, empty or of another kind.
    """
    runs = {str(name): read_run(name) for name in (folder, other)}
    summaries = [{**dict(run.summary), **_sent(run)} for run in runs.values()]
    names = dict.fromkeys(name for summary in summaries for name in summary)
    texts = [run.recipe_text.splitlines() for run in runs.values()]
    differences = "\n".join(difflib.unified_diff(*texts, *runs, n=0, lineterm=""))
    return _write(
        folder / COMPARISON,
        _HEAD + _BOTH + _COURSE + _DIFFERENCES,
        {name: run.rows for name, run in runs.items()},
        title="Two runs side by side",
        runs=[*runs],
        facts=[(name, [summary.get(name, "-") for summary in summaries]) for name in names],
        differences=differences,
    )


def _sent(run: RunRecord) -> dict[str, str]:
    """Bytes that the first rank sent in the last optimizer step, by axis and collective."""
    return {f"{row['axis']} {row['collective']}, B in a step": f"{row['sent_bytes']:,}" for row in run.traffic}


def _write(page: Path, template: str, rows: Mapping[str, Sequence[Row]], **values: object) -> Path:
    """Write a page with plots of the rows of each run; return its path."""
    has_plots = importlib.util.find_spec("matplotlib") is not None
    plots = [Markup(text) for text in _plots(rows)] if has_plots else []  # matplotlib escapes text
    words = {"style": Markup(_STYLE), "label": label, "number": number, "plots": plots, "has_plots": has_plots}
    draft = page.with_name(f"{page.name}.{os.getpid()}")
    draft.write_text(Environment(autoescape=True).from_string(template).render(**words, **values))
    draft.replace(page)
    return page


def _read(file: Path) -> str:
    if not file.is_file():
        raise RecipeError(f"{file} does not exist. Name the output folder of a run, which has it.")
    return file.read_text(errors="replace")


def _plots(runs: Mapping[str, Sequence[Row]]) -> list[str]:
    """Draw every group of columns that a log has, as SVG elements; a line for each column of each run."""
    import matplotlib
    from matplotlib.figure import Figure

    drawn = []
    has_tokens = any("tokens_per_s" in row for rows in runs.values() for row in rows)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "mics", "axes.grid": True, "font.size": 9}):
        for columns in _PLOTS:
            if columns == ("samples_per_s",) and has_tokens:
                continue  # the same curve
            divisor = 1e9 if columns[0].endswith("_bytes") else 1.0
            points = {
                (run, name): [(row["step"], row[name] / divisor) for row in rows if name in row]
                for run, rows in runs.items()
                for name in columns
            }
            points = {key: pairs for key, pairs in points.items() if pairs}
            if not points:
                continue
            figure = Figure(figsize=(5.2, 2.9))
            figure.subplots_adjust(left=0.14, right=0.97, bottom=0.16, top=0.9)  # an engine would draw twice
            names = list(dict.fromkeys(name for _, name in points))
            axes = figure.add_subplot(title=label(names[0]) if len(names) == 1 else "", xlabel="optimizer step")
            for (run, name), pairs in points.items():
                steps, values = zip(*pairs, strict=True)
                words = ", ".join(filter(None, [run, label(name) if len(names) > 1 else ""]))
                axes.plot(steps, values, label=words, marker="." if len(pairs) < 30 else None)
            if columns[0] in _FROM_ZERO:
                axes.set_ylim(bottom=0, top=1.1 * axes.get_ylim()[1])
            if len(points) > 1:
                axes.legend()
            text = io.StringIO()
            figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
            svg = text.getvalue()[text.getvalue().index("<svg") + len("<svg") :]
            words = html.escape(", ".join(map(label, names)))  # for screen readers
            drawn.append(f'<svg role="img" aria-label="{words} by optimizer step"{svg}')
    return drawn


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the page of a run, or of two; what a user can repair ends it with one line.

    Args:
        arguments: The folders of the runs; default: those of the process.
    """
    given = [*(sys.argv[1:] if arguments is None else arguments)]
    if len(given) not in (1, 2) or any(argument.startswith("-") for argument in given):
        sys.exit("usage: mics report RUN_FOLDER [OTHER_RUN_FOLDER]")
    try:
        print(write_page(Path(given[0])) if len(given) == 1 else write_comparison(*map(Path, given)))
    except (MiCSError, OSError) as error:
        sys.exit(command_error("report", error))


if __name__ == "__main__":
    main()
