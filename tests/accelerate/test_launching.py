"""Do the ways of starting ranks work, and are jobs that cannot work refused on every rank?

Launchers are started as users start them only where that shows something: each costs seconds. What workers make of
their environment is seen on the ranks of the pool, with what the unmodified launcher would put there.
"""

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, ParallelismConfig, PartialState, debug_launcher, notebook_launcher
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import nn

from mics_strategy import ConfigError
from mics_strategy.accelerate import MiCSAccelerator, MiCSPlugin
from mics_strategy.launch_file import LaunchAnswers, launch_line, write_launch_file
from tests.accelerate import script
from tests.accelerate.launchers import BIN, ON_CPU, ended, launched, sent, started, written
from tests.accelerate.runs import PLAIN, accelerator, assert_same, forget, run
from tests.ranks import RankContext, RankPool, raises_on_every_rank

STRATEGY = "  fsdp_sharding_strategy: "
SCRIPT = Path(script.__file__).read_text()


def train_script(folder: Path, first: str = "", text: str = SCRIPT) -> Path:
    """The script, which knows nothing of us, with some lines before it."""
    file = folder / "train.py"
    file.write_text(first + text)
    return file


def seen(folder: Path, world_size: int) -> list[dict[str, Any]]:
    return [json.loads((folder / f"seen-{rank}.json").read_text()) for rank in range(world_size)]


# -- launchers -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_launcher_with_our_file_trains_what_one_process_trains(tmp_path: Path) -> None:
    answers = LaunchAnswers(device="cpu", processes_per_machine=2, precision="no", preset="zero3", layer_class="Linear")
    file, train = tmp_path / "mics.yaml", train_script(tmp_path)
    write_launch_file(file, answers)
    setting, *command, _ = launch_line(file, answers).split()
    name, _, value = setting.partition("=")
    code, text = launched(tmp_path, *command, train, tmp_path, **{name: value})
    assert code == 0, text
    for each in seen(tmp_path, 2):
        assert each["class"] == ["MiCSAccelerator", "MiCSAccelerator"]
        assert (each["processes"], each["precision"], each["device"]) == (2, "no", "cpu")
        assert ["all_gather", "intra_node", 2] in each["collectives"]
    assert_same(torch.load(tmp_path / "model.pt"), script.trained_alone(4))


@pytest.mark.slow
def test_an_unchanged_script_runs_with_flags_that_outrank_the_file(tmp_path: Path) -> None:
    file = written(tmp_path, f"{STRATEGY}{{preset: zero3}}")
    flags = ("--fsdp_sharding_strategy", "{'preset': 'zero1', 'prefetch': 2}", "--mixed_precision", "bf16")
    code, text = launched(
        tmp_path,
        *("accelerate", "launch", "--config_file", file, *flags, "-m", "mics_strategy.run"),
        *(train_script(tmp_path), tmp_path, "--num_processes", "7", "-m", "fast"),
    )
    assert code == 0, text
    for each in seen(tmp_path, 2):
        assert each["class"] == ["MiCSAccelerator", "MiCSAccelerator"]
        assert (each["processes"], each["precision"]) == (2, "bf16")
        assert (each["config"]["optimizer"], each["config"]["params"], each["config"]["prefetch"]) == (
            "world",
            "replicate",
            "2",
        )
        assert each["arguments"] == [str(tmp_path), "--num_processes", "7", "-m", "fast"]


@pytest.mark.slow
def test_what_accelerate_test_runs_passes_as_it_is(tmp_path: Path) -> None:
    env = {"ACCELERATE_USE_CPU": "true", "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}  # it looks for its launcher
    code, text = ended(started(tmp_path, "accelerate", "test", "--config_file", written(tmp_path), **env))
    assert code == 0, text
    assert "Training yielded the same results on one CPU or distributed setup with batch split." in text
    assert "Test is a success!" in text


@pytest.mark.slow
def test_two_machines_keep_a_partition_inside_each(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    text = ON_CPU.replace("num_machines: 1\nnum_processes: 2\nmain_process_port: 0\n", "") + (
        "num_machines: 2\nnum_processes: 4\nmain_process_ip: 127.0.0.1\n"
        f"main_process_port: {port}\nsame_network: true\n"
    )
    file = written(tmp_path, text=text)
    command = ("accelerate", "launch", "--config_file", file)
    train = train_script(tmp_path)
    machines = [started(tmp_path, *command, "--machine_rank", rank, train, tmp_path) for rank in (0, 1)]
    for code, text in [ended(machine) for machine in machines]:
        assert code == 0, text
    found = seen(tmp_path, 4)
    assert [each["node"] for each in found] == [0, 0, 1, 1]
    for each in found:
        assert ["all_gather", "intra_node", 2] in each["collectives"]
        assert ["all_reduce", "inter_node", 2] in each["collectives"]
        assert not [axis for kind, axis, _ in each["collectives"] if kind == "all_gather" and axis != "intra_node"]
    assert_same(torch.load(tmp_path / "model.pt"), script.trained_alone(8))


@pytest.mark.slow
def test_torchrun_needs_no_file(tmp_path: Path) -> None:
    first = "from mics_strategy.accelerate import MiCSPlugin\n"
    text = SCRIPT.replace("Accelerator()\n", "Accelerator(fsdp_plugin=MiCSPlugin('mics', prefetch=2))\n", 1)
    file = train_script(tmp_path, first, text)
    code, text = launched(tmp_path, "torchrun", "--standalone", "--nproc-per-node", 2, file, tmp_path)
    assert code == 0, text
    assert [each["class"][0] for each in seen(tmp_path, 2)] == ["MiCSAccelerator"] * 2
    assert seen(tmp_path, 2)[0]["config"]["prefetch"] == "2"
    assert_same(torch.load(tmp_path / "model.pt"), script.trained_alone(4))


ALONE = """
import accelerate
from accelerate import Accelerator
from accelerate.utils import save_fsdp_model as imported_before
import transformers.trainer
import torch
import mics_strategy.accelerate
from mics_strategy.accelerate import MiCSAccelerator, MiCSPlugin
from mics_strategy.launch_file import LaunchAnswers, launch_line, write_launch_file

for place in (accelerate.utils, accelerate.utils.fsdp_utils, accelerate.accelerator, transformers.trainer):
    for name in ("save_fsdp_model", "load_fsdp_model", "save_fsdp_optimizer", "load_fsdp_optimizer"):
        assert hasattr(getattr(place, name), "mics_stock") or place is accelerate.accelerator, (place, name)
assert hasattr(transformers.trainer.Accelerator(fsdp_plugin=MiCSPlugin()), "handles")
accelerator = Accelerator()
assert isinstance(accelerator, MiCSAccelerator)
assert torch.distributed.get_world_size() == accelerator.num_processes == 1
model = torch.nn.Linear(4, 2)
before = model.weight.detach().clone()
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
accelerator.backward(model(torch.ones(3, 4)).sum())
optimizer.step()
assert torch.equal(accelerator.get_state_dict(model)["weight"], before - 3.0)
accelerator.end_training()
print("trained")
"""


@pytest.mark.slow
def test_a_script_without_a_launcher_trains_whatever_it_imports_first(tmp_path: Path) -> None:
    file = train_script(tmp_path, text=ALONE)
    code, text = launched(tmp_path, "python", file)
    assert (code, text.strip().splitlines()[-1]) == (0, "trained"), text


def _in_a_function(folder: Path) -> None:
    acc = accelerator("zero3")
    model = acc.prepare(nn.Linear(4, 2, bias=False))
    acc.backward(model(torch.full((1, 4), 1.0 + acc.process_index)).sum())
    norm = acc.clip_grad_norm_(model.parameters(), 1.0)
    ranks = {each.size for each in acc.sharded_of(model).plan.collectives}
    mark = [type(acc).__name__, acc.num_processes, sorted(ranks), round(norm.item(), 4)]
    (folder / f"fn-{acc.process_index}.json").write_text(json.dumps(mark))
    acc.end_training()


def _from_a_notebook(ctx: RankContext, starts: str) -> list[Any]:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ACCELERATE_USE_CPU"):
        os.environ.pop(name, None)
    if starts == "debug":
        debug_launcher(_in_a_function, (ctx.tmp_path,), num_processes=2)
    else:
        notebook_launcher(_in_a_function, (ctx.tmp_path,), num_processes=2, use_port=os.environ["MASTER_PORT"])
    return [json.loads((ctx.tmp_path / f"fn-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("starts", ["debug", "notebook"])
def test_a_function_starts_its_ranks(ranks: RankPool, starts: str) -> None:
    (marks,) = run(ranks, 1, _from_a_notebook, starts, default_group=False)
    norm = round((1.5**2 * 8) ** 0.5, 4)
    assert marks == [["MiCSAccelerator", 2, [2], norm]] * 2


# -- ranks that do not know of each other ----------------------------------------------------------------------


def _made_late(ctx: RankContext, first: str) -> int:
    """A rank without a group, on a machine without a GPU, that nobody has told to use the CPU."""
    if first == "TrainingArguments":
        from transformers import TrainingArguments

        assert TrainingArguments("out", report_to=[]).world_size == 1
    elif first == "PartialState":
        PartialState()
    try:
        return accelerator().num_processes
    finally:
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()


@pytest.mark.parametrize("first", ["PartialState", "TrainingArguments"])
def test_ranks_that_do_not_know_of_each_other_are_refused(ranks: RankPool, first: str) -> None:
    env = {"ACCELERATE_USE_CPU": "false"}
    raises_on_every_rank(
        lambda: run(ranks, 2, _made_late, first, env=env, default_group=False),
        ConfigError,
        "has 2 processes, but Accelerate sees 1.*ACCELERATE_USE_CPU=true",
    )


def _with_a_group_of_its_own(ctx: RankContext) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK"):
        os.environ.pop(name, None)
    accelerator()


def test_a_group_that_accelerate_does_not_see_is_refused(ranks: RankPool) -> None:
    raises_on_every_rank(
        lambda: run(ranks, 2, _with_a_group_of_its_own), ConfigError, "has 2 processes, but Accelerate sees 1.*RANK"
    )


def _told_differently(ctx: RankContext) -> None:
    os.environ["FSDP_SHARDING_STRATEGY"] = str({"partition_size": 2 + 2 * ctx.node})
    Accelerator().prepare(nn.Linear(4, 4))


def test_machines_with_different_files_are_refused(ranks: RankPool, tmp_path: Path) -> None:
    env = sent("--config_file", written(tmp_path))
    raises_on_every_rank(
        lambda: run(ranks, 4, _told_differently, env=env, ranks_per_node=2), ConfigError, "partition_size"
    )


def test_a_plain_script_needs_not_be_told_to_use_the_cpu(ranks: RankPool) -> None:
    assert run(ranks, 2, _made_late, "nothing", env={"ACCELERATE_USE_CPU": "false"}, default_group=False) == [2, 2]


# -- what arrives on ranks -------------------------------------------------------------------------------------


def _as_launched(ctx: RankContext, parallelism: dict[str, int] | None = None) -> list[Any]:
    """The stock constructor, with nothing said to it: what is planned."""
    config = ParallelismConfig(**parallelism) if parallelism else None
    acc = Accelerator(parallelism_config=config)
    assert isinstance(acc, MiCSAccelerator)
    model = acc.prepare(nn.Linear(4, 4))
    model(torch.ones(1, 4)).sum().backward()
    return [Accelerator().state.fsdp_plugin.config.partition_size, *_planned(acc, model)]


def _planned(acc: Any, model: nn.Module) -> list[tuple[str, int]]:
    """The axes over which a forward gathers."""
    collectives = acc.sharded_of(model).plan.collectives
    return sorted({(each.axis, each.size) for each in collectives if each.phase == "forward"})


def launched_on(ranks: RankPool, folder: Path, more: str, *args: object) -> Callable[[], list[Any]]:
    """A job of 4 ranks on 2 nodes with the environment that the launcher makes of a file."""
    env = sent("--config_file", written(folder, more))
    return lambda: run(ranks, 4, _as_launched, *args, env=env, ranks_per_node=2)


def parallel(**sizes: int) -> str:
    return "\nparallelism_config:\n" + "".join(f"  parallelism_config_{n}: {size}\n" for n, size in sizes.items())


def test_sizes_of_parallelism_are_another_word_for_the_partition(ranks: RankPool, tmp_path: Path) -> None:
    inside, across = ("intra_node", 2), ("inter_node", 2)
    assert launched_on(ranks, tmp_path, "")() == [["auto", inside]] * 4
    assert launched_on(ranks, tmp_path, parallel(dp_shard_size=2, dp_replicate_size=2))() == [[2, inside]] * 4
    assert launched_on(ranks, tmp_path, parallel(dp_shard_size=1, dp_replicate_size=4))() == [[1]] * 4
    assert launched_on(ranks, tmp_path, "", {"dp_shard_size": 4})() == [[4, across, inside]] * 4
    more = f"{STRATEGY}{{partition_size: 2}}" + parallel(dp_shard_size=2, dp_replicate_size=2)
    assert launched_on(ranks, tmp_path, more)() == [[2, inside]] * 4
    more = f"{STRATEGY}zero3" + parallel(dp_shard_size=4)
    assert launched_on(ranks, tmp_path, more)() == [[4, across, inside]] * 4


REFUSED = {
    "unknown option": (f"{STRATEGY}{{partition_sise: 2}}", "Unknown option 'partition_sise'.*mean partition_size"),
    "odd partition": (f"{STRATEGY}{{partition_size: 3}}", "partition_size=3.*does not divide the 4 ranks.*1, 2, 4"),
    "two sizes": (
        f"{STRATEGY}{{partition_size: 4}}" + parallel(dp_shard_size=2, dp_replicate_size=2),
        "partition_size=4.*contradicts.*dp_shard_size=2",
    ),
    "no partition": (
        f"{STRATEGY}zero3" + parallel(dp_shard_size=2, dp_replicate_size=2),
        "dp_shard_size=2 sets the size of a partition, but no scope",
    ),
    "tensor parallel": (parallel(dp_shard_size=2, tp_size=2), "tp_size=2.*Only data parallelism"),
    "offload": ("  fsdp_offload_params: true", "fsdp_offload_params: true"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_the_job_is_refused_on_every_rank(ranks: RankPool, tmp_path: Path, name: str) -> None:
    more, match = REFUSED[name]
    raises_on_every_rank(launched_on(ranks, tmp_path, more), ConfigError, match)


def _of_trainer(ctx: RankContext, fsdp: object, config: dict[str, Any]) -> tuple[Any, ...]:
    """What becomes of the plugin that `transformers.Trainer` makes of its own arguments."""
    from transformers import TrainingArguments

    args = TrainingArguments("out", report_to=[], fsdp=fsdp, fsdp_config=config)
    acc = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(**args.fsdp_plugin_args))
    plugin = acc.state.fsdp_plugin
    return type(acc).__name__, plugin.config.params, plugin.units_for(nn.Linear(2, 2)), plugin.state_dict_type.name


def test_fsdp_arguments_of_the_trainer_keep_what_both_share(ranks: RankPool, tmp_path: Path) -> None:
    env = sent("--config_file", written(tmp_path, f"{STRATEGY}zero3"))
    config = {"transformer_layer_cls_to_wrap": ["Block", "Head"], "state_dict_type": "SHARDED_STATE_DICT"}
    found = run(ranks, 2, _of_trainer, True, config, env=env)
    assert found == [("MiCSAccelerator", "world", ("Block", "Head"), "SHARDED_STATE_DICT")] * 2


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"cpu_offload": True}, "cpu_offload=CPUOffloadPolicy"),
        ({"reshard_after_forward": False}, "reshard_after_forward=F"),
    ],
    ids=["offload", "kept parameters"],
)
def test_fsdp_arguments_of_the_trainer_that_mean_more_are_refused(
    ranks: RankPool, tmp_path: Path, config: dict[str, Any], match: str
) -> None:
    env = sent("--config_file", written(tmp_path))
    raises_on_every_rank(lambda: run(ranks, 2, _of_trainer, True, config, env=env), ConfigError, match)


# -- several Accelerators in one process -----------------------------------------------------------------------


class Foreign(Accelerator):
    """Somebody's own, derived from the stock class."""


class InnerPlugin(Accelerator):
    """Another, that makes the plugin itself."""

    def __init__(self) -> None:
        super().__init__(fsdp_plugin=MiCSPlugin())


class Own(MiCSAccelerator):
    """Derived as it is said."""


def _several(ctx: RankContext) -> None:
    for make in (lambda: Foreign(fsdp_plugin=MiCSPlugin()), InnerPlugin):
        with pytest.raises(ConfigError, match=r"derived from `accelerate.Accelerator`.*MiCSAccelerator"):
            make()
    assert type(Own(fsdp_plugin=MiCSPlugin("zero3"))) is Own
    first = Accelerator()
    assert type(first) is MiCSAccelerator
    assert first.state.fsdp_plugin.config.params == "world"
    with pytest.raises(ConfigError, match="an Accelerator without this `MiCSPlugin`"):
        Accelerator(fsdp_plugin=MiCSPlugin("zero1"))
    forget()
    assert type(accelerator(PLAIN)) is Accelerator
    assert type(Foreign()) is Foreign
    with pytest.raises(ConfigError, match="an Accelerator without this `MiCSPlugin`"):
        accelerator()
    with pytest.raises(ConfigError, match="an Accelerator that trains with FSDP"):
        MiCSPlugin().set_auto_wrap_policy(nn.Linear(2, 2))


def test_accelerators_of_a_process_agree_or_are_refused(ranks: RankPool) -> None:
    run(ranks, 2, _several)
