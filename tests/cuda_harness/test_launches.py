"""How many collectives and kernels does a unit launch? A change is to be seen, not judged.

Each launch costs the host time, whatever it moves.
"""

import re
from pathlib import Path
from unittest import mock

import pytest
import torch

from mics_strategy.config import ShardConfig
from mics_strategy.engine.bucket import UnshardedParams
from mics_strategy.engine.bucket_specs import BucketRules, ParamSpec, make_buckets
from tests.cuda_harness.counting import chains, table, totals
from tests.cuda_harness.launch_table import ENGINES, HEADER, NODES, Engine, Row, columns_of, fsdp2, log_of
from tests.cuda_harness.runs import DEPTH, config_of, one_of_many, start
from tests.cuda_harness.streams import Stream

DOCS = Path(__file__).parents[2] / "docs"
PAGE, LAB_BOOK, MEMORY_PAGE = (
    (DOCS / name).read_text() for name in ("benchmarks.md", "lab-book.md", "design/memory.md")
)
PER_NODE = 4
NARROW = 16  # a row for every second rank: parameters are copied one by one
Rows = dict[str, tuple[int, int, int]]

# Preset and codec of gradients, on 16 nodes of 4 ranks: by roles the chains of a step of one micro-step over 5 units,
# and of one chain the calls of collectives and the kernels.
LAUNCHES: dict[tuple[str, str], Rows] = {
    ("ddp", "none"): {"second_hop_all_reduce": (5, 3, 4)},
    ("zero1", "none"): {"param_sync": (5, 2, 4), "second_hop_reduce_scatter": (5, 2, 1)},
    ("zero2", "none"): {"param_sync": (5, 2, 4), "grad_reduce_scatter": (5, 2, 3)},
    ("zero3", "none"): {"param_all_gather": (7, 2, 4), "grad_reduce_scatter": (5, 2, 3)},
    ("zero3", "int8"): {"param_all_gather": (7, 2, 4), "grad_reduce_scatter": (5, 2, 3)},
    ("zeropp-hpz", "none"): {"param_all_gather": (7, 2, 5), "grad_reduce_scatter": (5, 2, 3)},
    ("mics", "none"): {
        "param_all_gather": (7, 1, 1),
        "grad_reduce_scatter": (5, 1, 1),
        "second_hop_all_reduce": (5, 1, 1),
    },
    ("mics", "int8"): {
        "param_all_gather": (7, 1, 1),
        "grad_reduce_scatter": (5, 1, 2),
        "second_hop_all_reduce": (5, 2, 9),
    },
    ("paro-iig", "none"): {
        "param_sync+param_all_gather": (5, 2, 4),
        "grad_reduce_scatter": (5, 1, 3),
        "param_all_gather": (2, 1, 3),
        "second_hop_reduce_scatter": (5, 1, 1),
    },
    ("paro-nii", "none"): {
        "param_sync": (5, 1, 1),
        "grad_reduce_scatter": (5, 1, 1),
        "second_hop_all_reduce": (5, 1, 1),
    },
}
# The same where all parameters of a unit are sent in one launch: gathers then copy nothing, and sums what they add up.
COALESCED: dict[str, Rows] = {
    "mics": {
        "param_all_gather": (7, 1, 0),
        "grad_reduce_scatter": (5, 1, 1),
        "second_hop_all_reduce": (5, 1, 1),
    },
    "zero3": {"param_all_gather": (7, 2, 0), "grad_reduce_scatter": (5, 2, 1)},
}
# A step on one node of 8 ranks, the model's and the optimizer's kernels included: collectives, kernels.
ZERO3_TOTALS = (13, 94)
FSDP2_TOTALS = (14, 82)
FAMILIES = ("param_all_gather", "grad_reduce_scatter", "second_hop")  # of streams: each overlaps with the others
counts_of_torch = pytest.mark.skipif(
    torch.__version__ < "2.13", reason="older versions of torch launch other kernels in a step"
)


@pytest.mark.parametrize("preset", ["mics", "zero3", "paro-iig"])
def test_gathers_first_hops_and_second_hops_have_streams_of_their_own(preset: str) -> None:
    with one_of_many(8) as machine:
        training = start(machine, config_of(preset))
        training.step()
        machine.log.clear()
        training.step()
    streams: dict[str, set[int]] = {family: set() for family in FAMILIES}
    for kind, stream, name in machine.log:
        role = name.removeprefix("mics.") if kind == "collective" else ""
        for family in FAMILIES:
            if role.startswith(family):
                streams[family].add(stream)
    used = [found for found in streams.values() if found]
    assert len(used) == (2 if preset == "zero3" else 3)
    assert len(set().union(*used)) == sum(map(len, used)), streams


@pytest.mark.parametrize("preset", ["mics", "paro-iig"])
def test_a_second_hop_follows_its_own_first_hop_and_waits_for_no_computation(preset: str) -> None:
    with one_of_many(8) as machine:
        training = start(machine, config_of(preset))
        training.micro_steps = 1
        training.step()
        machine.log.clear()
        training.step()
        streams = training.sharded.internals.engine.reducer.streams
        hop, compute = streams.second_hop._stream, machine.default_stream(0)
    assert hop is not None
    names = [name for kind, _, name in machine.log if kind == "collective"]
    reductions = [name.split(".")[1].split("_")[0] for name in names if ".grad_" in name or ".second_" in name]
    assert reductions == ["grad", "second"] * (DEPTH + 1)
    assert ("wait", hop.number, str(compute.number)) not in machine.log


@pytest.mark.parametrize("coalesce", [False, True])
@pytest.mark.parametrize("preset", ["mics", "zero3", "zeropp", "paro-iig"])
def test_kernels_of_nccl_are_on_the_streams_of_the_engine(preset: str, coalesce: bool) -> None:
    """NCCL's own streams, whose kernels go behind those of the computation, are left to small messages."""
    with one_of_many(8) as machine:
        training = start(machine, config_of(preset, coalesce=coalesce and preset != "zeropp"))
        training.step()
    own = {name.partition(" of ")[2] for name in machine.orders.names if name.startswith("NCCL's stream of ")}
    assert {name.split(".")[1] for name in own if name.startswith("mics.")} <= {"shard", "replicate"}
    assert len(own) >= 1  # the default group's
    streams = training.sharded.internals.engine.reducer.streams
    priorities = [stream._stream.priority for stream in (streams.all_gather, streams.reduce_scatter) if stream._stream]
    assert priorities == [-1, -1]


@pytest.mark.parametrize(("preset", "stages"), [("zero3", 2), ("mics", 1)])
@pytest.mark.parametrize("prefetch", [1, 2, 3])
def test_the_last_blocks_are_not_gathered_again_one_more_than_are_prefetched(
    preset: str, stages: int, prefetch: int
) -> None:
    """As by FSDP2 with `reshard_after_forward=False` for the last k blocks: `prefetch=k - 1`."""
    with one_of_many(8) as machine:
        training = start(machine, config_of(preset, prefetch=prefetch))
        training.micro_steps = 1
        training.step()
        machine.log.clear()
        training.step()
    gathers = [name for kind, _, name in machine.log if kind == "collective" and "param_all_gather" in name]
    in_forward, in_backward = DEPTH + 1, DEPTH - (prefetch + 1)
    assert len(gathers) == stages * (in_forward + in_backward)


@counts_of_torch
@pytest.mark.parametrize(("preset", "codec"), LAUNCHES)
def test_a_unit_launches_as_many_as_before(preset: str, codec: str) -> None:
    log = log_of(preset, 16, PER_NODE, grad_codec=codec, width=NARROW)
    assert table(log) == LAUNCHES[preset, codec]


@counts_of_torch
@pytest.mark.parametrize("preset", COALESCED)
def test_a_coalesced_unit_launches_as_many_as_before(preset: str) -> None:
    log = log_of(preset, 16, PER_NODE, coalesce=True)
    assert table(log) == COALESCED[preset]
    names = [name for kind, _, name in log if kind == "collective" and name.startswith(("mics.param", "mics.grad"))]
    assert all("_coalesced_" in name for name in names)


def test_a_copy_inside_nodes_is_gathered_by_one_call() -> None:
    log = log_of("zeropp-hpz", 16, PER_NODE, width=NARROW)
    gathers = [chain.collectives for chain in chains(log) if chain.name == "param_all_gather"]
    assert sorted(gathers) == [1, 1, 2, 2, 2, 2, 2]


@pytest.mark.parametrize(
    ("shapes", "kernels"),
    [
        ([(16, 3), (8,), (8, 8, 2)], ["split_with_sizes_copy"]),
        ([(16, 16), (8, 64)], ["split_with_sizes_copy"]),
        ([(16, 3), (5,)], ["_foreach_copy_"] * 2),
        ([(16, 3), ()], ["_foreach_copy_"] * 2),
        ([(1, 64), (3, 64)], ["_foreach_copy_"] * 2),
    ],
    ids=["with gaps", "without", "uneven", "scalar", "second dimension"],
)
def test_parameters_are_copied_out_in_one_launch_where_parts_are_equal(
    shapes: list[tuple[int, ...]], kernels: list[str]
) -> None:
    config = ShardConfig.preset("mics")
    params = [ParamSpec.of(str(s), torch.Size(s), torch.float32, config, trainable=False) for s in shapes]
    rules = BucketRules(degrees=(8, 8), block_numels=(1, 1), chunks_first_hops=False)
    (spec,) = make_buckets(params, rules)
    layout = spec.layout
    flat = torch.randn(layout.full_numel)
    expected = UnshardedParams(spec, torch.zeros(layout.unpadded_numel))
    expected.copy_from(flat)
    with one_of_many() as machine:
        unsharded = UnshardedParams(spec, torch.zeros(layout.unpadded_numel).to(machine.device))
        on_device = flat.to(machine.device)
        machine.log.clear()
        unsharded.copy_from(on_device)
        assert [name for _, _, name in machine.log] == kernels
        assert torch.equal(unsharded.buffer.cpu(), expected.buffer)


def on_the_page() -> dict[tuple[str, str, int], Row]:
    """The columns of the table of the documentation, by engine, codecs and nodes."""
    lines = PAGE.partition("| " + " | ".join(HEADER) + " |\n")[2].partition("\n\n")[0].splitlines()[1:]
    rows = [line.strip("| ").split(" | ") for line in lines]
    return {
        (name, codecs, int(nodes)): tuple(columns)
        for name, codecs, listed, *columns in rows
        for nodes in listed.split(",")
    }


def _check_page(engine: Engine, nodes: int) -> None:
    columns = on_the_page()[engine.name, engine.codecs, nodes]
    if engine.name == "FSDP2" and torch.__version__ >= "2.15":
        columns = columns[0], "1 + 0", *columns[2:]  # a kernel less in the chain of its sums
    assert columns_of(engine, nodes) == columns


@pytest.mark.wide(every=2)
@counts_of_torch
@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_the_page_says_what_is_launched_on_many_nodes(engine: Engine) -> None:
    _check_page(engine, NODES[-1])


@pytest.mark.wide(every=3)
@pytest.mark.slow
@counts_of_torch
@pytest.mark.parametrize("nodes", NODES[:-1])
@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_the_page_says_what_is_launched_on_fewer_nodes(engine: Engine, nodes: int) -> None:
    _check_page(engine, nodes)


def test_nothing_on_the_page_depends_on_the_number_of_nodes() -> None:
    page = on_the_page()
    assert page.keys() == {(engine.name, engine.codecs, nodes) for engine in ENGINES for nodes in NODES}
    for engine in ENGINES:
        by_pass = [page[engine.name, engine.codecs, nodes][:-1] for nodes in NODES]
        launched = [{column for column in columns if column != "-"} for columns in zip(*by_pass, strict=True)]
        assert all(len(counts) <= 1 for counts in launched), engine


def test_what_stands_beside_the_review_is_what_the_tables_say() -> None:
    section = LAB_BOOK.partition("## Before the work for GPUs\n")[2].partition("\n## ")[0]
    now = {name: last for name, _, last in re.findall(r"^\| (.+) \| (.+) \| (.+) \|$", section, flags=re.MULTILINE)}
    launches, memory = on_the_page(), buffers_on_the_page()
    assert now["launches of an all-gather in two stages, 64 nodes"] == launches["zero3", "-", 64][0]
    quantized = launches["mics, partitions of 2 nodes", "INT8, INT4", 64]
    assert now["launches of a quantized second hop, 64 nodes"] == quantized[2]
    for name in ("LLaMA 7B", "LLaMA 3 70B"):
        assert now[f"buffers of {name}, GB"] == memory[name]["**all buffers**"]
    held = "({} and {} GB)".format(*(memory[name]["gradients of autograd"] for name in ("LLaMA 7B", "LLaMA 3 70B")))
    assert held in " ".join(section.split())


def buffers_on_the_page() -> dict[str, dict[str, str]]:
    """The table of buffers by model and purpose."""
    table = MEMORY_PAGE.partition("| GB per rank")[2].partition("\n\n")[0].splitlines()
    (_, *names), _, *rows = [line.strip("| ").split(" | ") for line in ["| GB per rank" + table[0], *table[1:]]]
    return {name: {row[0]: row[index] for row in rows} for index, name in enumerate(names, 1)}


@counts_of_torch
def test_a_step_launches_as_many_as_before_beside_fsdp2() -> None:
    zero3 = log_of("zero3", 1, 8)
    assert (totals(zero3), totals(fsdp2().log)) == (ZERO3_TOTALS, FSDP2_TOTALS)


def test_fsdp2_is_found_without_fault() -> None:
    """An engine that thousands use on GPUs: a race or a wait that is found in it would be one of the harness."""
    machine = fsdp2()
    assert machine.launches
    assert (machine.races, machine.waits) == ([], [])


def test_fsdp2_is_found_faulty_without_its_events() -> None:
    with mock.patch.object(Stream, "wait_event", return_value=None):
        assert fsdp2().races != []


@pytest.mark.parametrize("preset", ["mics", "zero3", "zero1"])
def test_parameters_without_gradients_are_zeroed_in_one_launch_for_each_buffer(preset: str) -> None:
    with one_of_many(8) as machine:
        training = start(machine, config_of(preset))
        training.step()
        machine.log.clear()
        training.options = {"unused": (1, 2)}
        training.step()
    names = [name for _, _, name in machine.log if "zero_" in name]
    assert 0 < names.count("_foreach_zero_") <= 4  # two units, each with a flat buffer and an accumulator
    assert names.count("zero_") <= 2
