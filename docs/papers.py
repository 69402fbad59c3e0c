"""Write the page of published results: `python -m docs.papers`.

The page has the medians of `benchmarks.papers.validate`, the rows that are missed, and three of the papers' claims as
plots.
"""

import statistics
import textwrap
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.papers.predict import Kind, predict
from benchmarks.papers.row import PublishedRow, read_rows
from benchmarks.papers.validate import ValidatedRow, median_errors, table_lines, validate
from mics_strategy.text_table import text_table

DOCS = Path(__file__).parent
PAGE = DOCS / "papers.md"
PLOTS = DOCS / "papers"
ROWS = PLOTS / "results.csv"
MISSED = 0.25  # error from which the page names a row

Series = Mapping[str, Sequence[float]]

P4D = {"paper": "MiCS", "gpu_type": "A100 40GB (p4d)", "gpus_per_node": "8", "interconnect_inter": "400Gbps"}
P3DN = {"paper": "MiCS", "gpu_type": "V100 32GB (p3dn.24xlarge)", "gpus_per_node": "8", "interconnect_inter": "100Gbps"}
DGX2 = {"paper": "ZeRO++", "gpu_type": "V100 SXM3 32GB (DGX-2)", "gpus_per_node": "16", "total_gpus": "384"}
MIXED = {"activation_ckpt": "y", "precision": "mixed"}
REASONS = (
    (
        "ZeRO-3 and ZeRO++ on 1024 GPUs (AMSP)",
        "Published are 4 to 5 % MFU: 33 to 56 ms for each gathered matrix, or 2 GB/s, whatever its size. A ring with "
        "NCCL's latencies takes 5 ms. The latency of a step would have to be ten times higher than NCCL's model says; "
        "nothing in the paper measures it, so it is not adjusted. For the same reason ZeRO-1 on 1024 GPUs is close: it "
        "sends few large messages.",
    ),
    (
        "ZeRO-3 of 100 B parameters on A100 (MiCS 5.1.5)",
        "The model's structure and length are not published. The row states 62 TFLOPS on 512 GPUs, 86 on 128: a larger "
        "share of communication than 512 tokens in each of 16 sequences leave with 44 GB/s between nodes. What "
        "follows, the ratio of 2.74 and the efficiency of 72 %, is missed with it; MiCS's own 99.4 % is not.",
    ),
    (
        "NIG and IIG of LLaMA-7B (PaRO), 20 and 24 % too low",
        "The published gains of 1.7 and 1.94 are larger than the bytes that they save, at more than 100 GB/s between "
        "nodes. PaRO's rings reach 3.5 GB/s in its own section 4.4; DeepSpeed with them would be as slow as published, "
        "but the paper does not say which of its figures use them.",
    ),
    (
        "Memory ratios and maxima (AMSP figure 13)",
        "States follow the formulas. Activations are of the fused kernels that this project knows; the published "
        "ratio of 2 needs fewer of them, the published 15 GB of ZeRO-3 on 1024 GPUs more.",
    ),
    (
        "ZeRO++ with 1K tokens on 384 GPUs (table 2: Z027, Z032)",
        "Table 2 of ZeRO++ states 18.1 and 31.5 % of the peak with one and with 8 adapters, as the least of several "
        "models; its figure 11 states 30 % and up to 45 % for 18 B parameters. The predictions are for 18 B "
        "parameters, and between the two.",
    ),
    (
        "ZeRO-3 of 18 B parameters with 8 adapters (ZeRO++ 5.2.3)",
        "Tokens and ranks are not stated; 1K tokens on each of 384 GPUs are assumed, as in section 5.2.1. With 2K, "
        "the prediction is close to the published share.",
    ),
    (
        "What ran out of memory, and fits by the formulas (M043, A026, P021, Z050)",
        "Rows that are near the limit depend on buffers and fragmentation that no paper states. ZeRO-1 of LLaMA-7B "
        "contradicts PaRO's own table 2 (31 of 80 GB); ZeRO++ of LLaMA-30B on 32 GPUs needs less than half of 80 GB by "
        "its formula.",
    ),
    (
        "WideResNet-3B in fp32 (MiCS 5.1.4)",
        "Convolutions are given the efficiency of matrix products on tensor cores; fp32 on V100 has none, and comes "
        "closer to its peak.",
    ),
)

TECHNIQUES_MISSED = """\
The gains come out too small, and that of the implementation too large, by one cause: at the 11 GB/s
that MiCS measured between nodes, gathers and reductions take about as long as the arithmetic that
hides them. A hierarchy gained 38 %, as much as its all-gather alone did in the paper's section
5.2.2 (72 % of the time, so 1.39), so that a published step waited for the links both with it and
without. Gradients of 32 bits on the wire would give that: 1.24, 1.22, 1.23, 1.09, 1.38 and 1.76, at
the same median over all rows of this page, but 18 instead of 9 % for scaling efficiencies. The
paper does not state them, and ZeRO-3 of that time reduces in 16 bits, so they are not assumed."""


def value(cells: Mapping[str, str], **changes: str) -> float:
    """The prediction of a row."""
    return predict(PublishedRow({**cells, **changes})).value


def weak_scaling() -> Series:
    """TFLOPS of a rank for 100 B parameters on 128 to 512 A100."""
    cells = {**P4D, **MIXED, "model": "proprietary 100B", "params": "100B", "micro_batch": "16"}
    cells |= {"grad_accum_steps": "4", "metric": "TFLOPS per GPU", "unit": "TFLOPS"}
    systems = {"MiCS, p = 128": ("MiCS", "p=128"), "ZeRO-3 of 2021": ("DeepSpeed ZeRO-3", "")}
    return {
        name: [value(cells, system=system, partition_config=p, total_gpus=str(n)) for n in (128, 256, 512)]
        for name, (system, p) in systems.items()
    }


def against_zero3() -> Series:
    """Throughput of MiCS over that of ZeRO-3 on p3dn.24xlarge, 100 Gb/s."""
    cells = {**P3DN, **MIXED, "system": "MiCS", "baseline": "DeepSpeed ZeRO-3", "micro_batch": "8"}
    cells |= {"global_batch": "8192", "seq_len": "512", "metric": "throughput ratio", "unit": "x", "value": "1"}
    models = {"BERT 10B": "p = 1 node", "BERT 15B": "p = 2 nodes", "BERT 20B": "p = 2 nodes"}
    return {
        model: [value(cells, model=model, partition_config=p, total_gpus=str(n)) for n in (16, 32, 64, 128)]
        for model, p in models.items()
    }


TECHNIQUES = (  # of MiCS: section, ranks, system, baseline, partition, micro-steps, model, published ratio
    ("partition of 8, not 64 (5.2.1)", 64, "MiCS", "MiCS", "p=8 vs p=64", 16, "BERT 10B", "1.6"),
    ("hierarchy (5.2.2)", 16, "MiCS", "MiCS without hierarchical communication", "p=16", 4, "BERT 15B", "1.31"),
    ("hierarchy (5.2.2)", 128, "MiCS", "MiCS without hierarchical communication", "p=16", 4, "BERT 15B", "1.38"),
    ("second hop (5.2.3)", 16, "MiCS", "MiCS without 2-hop", "p=8", 4, "BERT 10B", "1.11"),
    ("second hop (5.2.3)", 128, "MiCS", "MiCS without 2-hop", "p=8", 4, "BERT 10B", "1.25"),
    ("implementation (5.3)", 64, "MiCS (ZeRO-3)", "DeepSpeed ZeRO-3", "", 16, "BERT 10B", "1.54"),
)


def techniques() -> str:
    """Ratio of throughputs with and without each technique of MiCS, on p3dn.24xlarge."""
    rows = [("technique", "model", "GPUs", "published", "predicted")]
    for name, ranks, system, baseline, partition, steps, model, published in TECHNIQUES:
        cells = {**P3DN, **MIXED, "system": system, "baseline": baseline, "partition_config": partition, "model": model}
        cells |= {"micro_batch": "8", "grad_accum_steps": str(steps), "total_gpus": str(ranks), "seq_len": "512"}
        ratio = value(cells, metric="throughput ratio", unit="x", value="1")
        rows.append((name, model, str(ranks), published, f"{ratio:.2f}"))
    return block(rows, num_left=2)


def by_adapters() -> Series:
    """TFLOPS of a rank for 18 B parameters on 384 V100 with 1 to 8 adapters in each node."""
    cells = {**DGX2, "model": "GPT 18B", "params": "18B", "metric": "TFLOPS per GPU", "unit": "TFLOPS"}
    return {
        f"{system}, {tokens} tokens": [
            value(cells, system=system, micro_batch=f"{tokens} tokens/GPU", interconnect_inter=f"{n} IB ({n}00 Gbps)")
            for n in (1, 2, 4, 8)
        ]
        for system in ("ZeRO++", "ZeRO-3")
        for tokens in ("1K", "2K")
    }


def plot(title: str, places: Sequence[object], axis: str, series: Series) -> str:
    """A plot of lines as SVG."""
    width, height, left, top, bottom = 640, 340, 60, 40, 50
    most = max(max(values) for values in series.values()) * 1.1
    xs = [left + index * (width - left - 190) / (len(places) - 1) for index in range(len(places))]
    scale = (height - top - bottom) / most
    colors = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd")
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
        'font-size="13">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{left}" y="22" font-size="15">{title}</text>',
        f'<text x="{left}" y="{height - 12}">{axis}</text>',
    ]
    for tick in range(5):
        number = most * tick / 4
        y = height - bottom - number * scale
        lines.append(f'<line x1="{left}" y1="{y:.1f}" x2="{xs[-1]:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        lines.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{number:.3g}</text>')
    for x, place in zip(xs, places, strict=True):
        lines.append(f'<text x="{x:.1f}" y="{height - bottom + 18}" text-anchor="middle">{place}</text>')
    for (name, values), color in zip(series.items(), colors, strict=False):
        points = [(x, height - bottom - number * scale) for x, number in zip(xs, values, strict=True)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        lines.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        lines += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in points]
        lines.append(f'<text x="{xs[-1] + 10:.1f}" y="{points[-1][1] + 4:.1f}" fill="{color}">{name}</text>')
    return "\n".join([*lines, "</svg>", ""])


def table(first: str, places: Sequence[object], series: Series) -> str:
    """The values of a plot."""
    rows = [f"| {first} | " + " | ".join(map(str, places)) + " |", "|---" * (len(places) + 1) + "|"]
    rows += [
        f"| {name} | " + " | ".join(f"{number:.3g}" for number in values) + " |" for name, values in series.items()
    ]
    return "\n".join(rows)


def block(rows: Sequence[Sequence[str]], num_left: int) -> str:
    """A table as plain text, for wide ones."""
    return "\n".join(["```text", *text_table(rows, num_left=num_left), "```"])


def medians(rows: list[ValidatedRow]) -> str:
    """Medians of absolute errors by paper and kind of result."""
    by_paper: dict[str, list[ValidatedRow]] = defaultdict(list)
    for row in rows:
        by_paper[row.row.text("paper").removesuffix("-blog")].append(row)
    papers = {**by_paper, "all": rows}
    lines = [("kind of result", *papers)]
    found = {paper: median_errors(group) for paper, group in papers.items()}
    for kind in Kind:
        cells = [f"{found[p][kind][0]:.1%} of {found[p][kind][1]}" if kind in found[p] else "" for p in papers]
        lines.append((kind.value, *cells))
    return block(lines, num_left=1)


def missed(rows: list[ValidatedRow]) -> str:
    """Rows with large errors."""
    lines = [("row", "system", "model", "GPUs", "metric", "published", "predicted", "error")]
    for row in rows:
        if row.predicted is None or row.error is None or abs(row.error) <= MISSED:
            continue
        cells = [row.row.text(name) for name in ("id", "system", "model", "total_gpus", "metric", "value")]
        cells = [cell[:32] for cell in cells]
        lines.append((*cells, f"{row.predicted.value:.3g}", f"{row.error:+.0%}"))
    return block(lines, num_left=5)


def wrapped(text: str, indent: str = "") -> str:
    """Text in lines of at most 100 columns."""
    return textwrap.fill(text, width=100, subsequent_indent=indent)


def page() -> tuple[str, dict[str, str]]:
    """The text of the page, and its plots by file name."""
    rows = validate(read_rows(ROWS))
    predicted = [row for row in rows if row.predicted is not None]
    scaling, ratios, adapters = weak_scaling(), against_zero3(), by_adapters()
    efficiency = {name: values[-1] / values[0] for name, values in scaling.items()}
    gains = [z / b for z, b in zip(adapters["ZeRO++, 1K tokens"], adapters["ZeRO-3, 1K tokens"], strict=True)]
    plots = {
        "weak-scaling.svg": plot("100 B parameters on A100, TFLOPS of a rank", (128, 256, 512), "GPUs", scaling),
        "zero3.svg": plot("MiCS over ZeRO-3, 100 Gb/s", (16, 32, 64, 128), "GPUs", ratios),
        "adapters.svg": plot("18 B parameters on 384 V100, TFLOPS of a rank", (1, 2, 4, 8), "adapters", adapters),
    }
    typical = statistics.median(abs(row.error) for row in predicted if row.error is not None)
    counts = (
        f"{len(rows)} rows: {len(predicted)} are predicted, {len(rows) - len(predicted)} have a reason why they cannot "
        f"be. Median of all absolute errors: {typical:.1%}. By paper and kind of result, each with the number of rows:"
    )
    scaled = (
        f"Predicted efficiency: MiCS {efficiency['MiCS, p = 128']:.1%}, ZeRO-3 {efficiency['ZeRO-3 of 2021']:.1%}. "
        "Published: 99.4 % and 72 %. The structure of the model is not published; a GPT with 512 tokens is assumed."
    )
    gained = (
        f"Predicted gain with 1K tokens: {gains[0]:.2f} with one adapter, {gains[-1]:.2f} with eight. Published: 2.4 "
        "and 1.29."
    )
    text = f"""# The planner beside published results

Written by `python -m docs.papers`; the numbers in tables and plots are from the code as it is. The
rows are in `docs/papers/results.csv`: a value of a paper, with the configuration as far as the
paper states it.

```bash
# prediction, error, assumptions or reason, by row
python -m benchmarks.papers.validate --rows docs/papers/results.csv
python -m benchmarks.papers.validate --rows docs/papers/results.csv --json
```

{wrapped(counts)}

{medians(rows)}

More than a third of the rows that are predicted are from one table. By table or section:

{chr(10).join(["```text", *table_lines(rows), "```"])}

## What is assumed

All constants are in `benchmarks/papers/published.toml` and `mics_strategy/planner/clusters.toml`,
with their sources. None belongs to a row, and none was adjusted to one.

- **Links**: datasheets, with the efficiency that MiCS measured (128 of 150 and 11 of 12.5 GB/s).
  The two rows that state these measurements are not counted. Latencies are those of NCCL's own
  model.
- **Arithmetic**: the simulator's layers, slower by one factor for each generation of devices and
  software. The factors are from benchmarks of other groups on at most 8 GPUs.
- **Overlap**: 18.9 % more time for arithmetic while a collective runs (arXiv:2507.03114).
- **Systems**: each is a configuration of this engine, with assumptions about its implementation.
  Collectives are NCCL's: a tensor passes each stage in one piece. DeepSpeed's engines are taken to
  overlap nothing, and to gather matrix by matrix.

## What is missed, and why

Rows with an error above {MISSED:.0%}:

{missed(rows)}

{chr(10).join(wrapped(f"- {name}: {reason}", "  ") for name, reason in REASONS)}

## AMSP's choices

AMSP's planner adds up the times of all collectives, for factors that fit into memory (formulas A7
to A13). With these formulas and the test-bed's datasheet (`benchmarks/papers/amsp.py`), for 4
micro-steps on 64 GPUs, and the least memory where costs are equal within 1 %:

- LLaMA-7B: 1x1, 1x1, 8x1, as published. Optimizer states over 4 ranks cost the same and need more
  memory.
- LLaMA-13B: 2x1, 2x1, 8x8, not as published. The published 4x1, 4x1, 8x1 is the cheapest whose
  optimizer states stay in a node, at 11 % more communication.
- LLaMA-30B: 2x1, 2x1, 8x8, not as published. The published 8x1, 8x1, 8x4 fits and costs 37 % more
  communication. The formulas prefer parameters over fewer ranks, and nothing in them prefers
  optimizer states over 4 nodes to 1 or 2.

Slow broadcasts between nodes would explain the choice for 13B, but the paper's own table V excludes
them. Overlapping the broadcasts of LLaMA-30B shortens a step of one micro-step by 0.43 s (759 and
825 tokens/s of a rank), and one of four by 0.55 s (847 and 872). Three quarters of 55 GB enter each
node, which takes 0.41 s at the 100 GB/s of its adapters: the broadcasts are about at line rate.

No rule of what the paper states was found that gives all three choices. One choice for each model
was sought for 64 ranks with 1, 4 or 1 to 8 micro-steps, for 128, 512 or 1,024 ranks, and for 32 or
8 to 1,024 ranks with 4M tokens a step; by the sum or the worst of the costs; with the least memory
where costs are equal within 0 to 20 %; and with 20 to 84 GB for states and activations, for twice
the activations, for none, or with gradients in fp32 in addition. Of these 10,560 rules none gives
three published choices, and 48 give two. What AMSP reserves for activations and buffers is not
published, and would decide.

In simulated steps (all overlaps), the three published choices are 0.4, 0.4 and less than 0.1 %
slower than the fastest factors that fit by AMSP's formula of memory.

## MiCS: weak scaling from 128 to 512 GPUs

![TFLOPS of a rank by GPUs](papers/weak-scaling.svg)

{table("TFLOPS of a rank, GPUs:", (128, 256, 512), scaling)}

{wrapped(scaled)}

## MiCS and ZeRO-3 on 100 Gb/s

![Ratio of throughputs by GPUs](papers/zero3.svg)

{table("ratio, GPUs:", (16, 32, 64, 128), ratios)}

Published: up to 2.82 for BERT 15B, and 2.23 for BERT 10B if "223 % faster" is read as a ratio.

## MiCS: what each technique gains

{techniques()}

{TECHNIQUES_MISSED}

## ZeRO++ with 1 to 8 adapters

![TFLOPS of a rank by adapters](papers/adapters.svg)

{table("TFLOPS of a rank, adapters:", (1, 2, 4, 8), adapters)}

{wrapped(gained)}
"""
    return text, plots


if __name__ == "__main__":
    written, files = page()
    PAGE.write_text(written)
    PLOTS.mkdir(exist_ok=True)
    for file_name, svg in files.items():
        (PLOTS / file_name).write_text(svg)
