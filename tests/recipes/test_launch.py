"""Every file that starts a cluster renders for every size, is valid in its language, and has the fields it needs.

Nothing here reaches a service. The required fields are those of the reference of each service:

* `TrainJob`: `pkg/apis/trainer/v1alpha1/trainjob_types.go` of kubeflow/trainer;
* SkyPilot: the page "SkyPilot YAML" of its documentation;
* AWS ParallelCluster: the page "Cluster configuration file" of its user guide;
* SageMaker: `ModelTrainer` and `training/configs.py` of sagemaker-python-sdk 3.
"""

import ast
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from mics_strategy import cli
from recipes import launch
from recipes.launch import KINDS, main
from tests.interpreters import python_path
from tests.recipes.short_runs import check_run

SIZES = [("llama-7b", 16, 8), ("bert-base", 1, 8), ("roberta-20b", 4, 8)]


def rendered(capsys: pytest.CaptureFixture[str], kind: str, *arguments: str) -> str:
    container = ["--container=registry/mics:1"] if KINDS[kind].container == "always" else []
    assert main([kind, *arguments, *container]) == 0
    return capsys.readouterr().out


def script_of(kind: str, text: str) -> str:
    """The shell script in a file."""
    if kind == "sagemaker":
        (script,) = (
            node.value.value
            for node in ast.parse(text).body
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
            if getattr(node.targets[0], "id", "") == "SCRIPT"
        )
        return str(script)
    if kind == "skypilot":
        return str(yaml.safe_load(text)["run"])
    if kind == "trainjob":
        return str(yaml.safe_load(text)["spec"]["trainer"]["command"][2])
    return text


def lint(script: str) -> None:
    subprocess.run(["bash", "-n"], input=script, text=True, check=True, capture_output=True)
    if shutil.which("shellcheck"):
        options = ("--shell=bash", "--exclude=SC1091,SC2317")  # activate is not here; functions run by `declare -f`
        subprocess.run(["shellcheck", *options, "-"], input=script, text=True, check=True, capture_output=True)


SCRIPTS = [kind for kind in KINDS if kind != "parallelcluster-config"]
CASES = [  # every kind and every size in the fast tier, their product in the slow one
    pytest.param(kind, *size, marks=() if (row + column) % 3 == 0 else pytest.mark.slow, id=f"{kind}-{size[0]}")
    for row, kind in enumerate(SCRIPTS)
    for column, size in enumerate(SIZES)
]


@pytest.mark.parametrize(("kind", "recipe", "nodes", "ranks"), CASES)
def test_every_script_starts_the_recipe_on_all_ranks(
    kind: str, recipe: str, nodes: int, ranks: int, capsys: pytest.CaptureFixture[str]
):
    script = script_of(kind, rendered(capsys, kind, recipe, f"--nodes={nodes}", "--data.sequence_length=256"))
    lint(script)
    assert f"--nnodes={nodes} --nproc-per-node={ranks} " in script
    (command,) = re.findall(r"-m (mics_strategy.*)", script)
    program, name, *options = command.split()
    assert (program, name) == ("mics_strategy.recipes.pretrain", recipe)
    fields = dict(option.removeprefix("--").split("=", 1) for option in options)
    assert (fields["trainer.num_nodes"], fields["trainer.devices"]) == (str(nodes), str(ranks))
    assert (fields["trainer.resume"], fields["data.sequence_length"]) == ("auto", "256")
    for field in ("trainer.output_dir", "data.cache_dir"):
        assert fields[field].startswith(f"{KINDS[kind].shared}/")
    assert "--rdzv-backend=c10d" in script
    assert ("FI_EFA_USE_HUGE_PAGE=0" in script) == KINDS[kind].has_efa
    assert not re.search(r"FI_PROVIDER|FI_EFA_USE_DEVICE_RDMA|NCCL_PROTO|FI_EFA_FORK_SAFE", script)  # harmful by now


@pytest.mark.parametrize("kind", ["slurm", "hyperpod"])
def test_slurm_scripts_have_what_a_job_needs(kind: str, capsys: pytest.CaptureFixture[str]):
    limits = ("--time=2-00:00:00", "--partition=gpu", "--grace-s=600")
    text = rendered(capsys, kind, "llama-7b", "--nodes=4", *limits, "--container=/fsx/mics.sqsh")
    pragmas = set(re.findall(r"^#SBATCH --(.*)$", text, flags=re.MULTILINE))
    needed = {"nodes=4", "ntasks-per-node=1", "gpus-per-node=8", "exclusive", "requeue", "open-mode=append"}
    assert pragmas > needed | {"time=2-00:00:00", "partition=gpu", "signal=B:USR1@600"}
    assert text.splitlines()[0] == "#!/usr/bin/env bash"
    assert ("--auto-resume=1" in text) == (kind == "hyperpod")
    assert "--container-image=/fsx/mics.sqsh --container-mounts=" in text
    assert "source" not in text
    assert "source /fsx/venv/bin/activate" in rendered(capsys, kind, "llama-7b", "--venv=/fsx/venv")


def test_a_trainjob_has_its_required_fields(capsys: pytest.CaptureFixture[str]):
    job: dict[str, Any] = yaml.safe_load(rendered(capsys, "trainjob", "bert-1.5b-fidelity", "--nodes=2", "--efa=32"))
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", job["metadata"]["name"])
    spec = job["spec"]
    assert spec.keys() == {"runtimeRef", "trainer", "runtimePatches"}
    assert spec["runtimeRef"]["name"] == "torch-distributed"
    trainer = spec["trainer"]
    assert trainer.keys() <= {"image", "command", "args", "env", "numNodes", "resourcesPerNode", "numProcPerNode"}
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 8)  # int32, as the reference says
    assert trainer["resourcesPerNode"]["limits"] == {"nvidia.com/gpu": 8, "vpc.amazonaws.com/efa": 32}
    (patch,) = spec["runtimePatches"]
    (node,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = node["template"]["spec"]["template"]["spec"]
    allowed = {
        "serviceAccountName",
        "volumes",
        "initContainers",
        "containers",
        "nodeSelector",
        "affinity",
        "tolerations",
    }
    assert (patch["manager"] != "", node["name"], pod.keys() <= allowed) == (True, "node", True)
    (container,) = pod["containers"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert (container["name"], mounts) == ("node", {"shared": "/mnt/shared", "shm": "/dev/shm"})
    assert {volume["name"] for volume in pod["volumes"]} == mounts.keys()
    assert "amazonaws" not in rendered(capsys, "trainjob", "bert-base")


@pytest.mark.parametrize("container", [(), ("--container=registry/mics:1",)], ids=["venv", "container"])
def test_a_skypilot_task_has_its_fields(container: tuple[str, ...], capsys: pytest.CaptureFixture[str]):
    task: dict[str, Any] = yaml.safe_load(rendered(capsys, "skypilot", "gpt2-xl", "--nodes=2", *container))
    assert task.keys() - {"setup", "workdir"} == {"name", "num_nodes", "resources", "volumes", "run"}
    assert (task["num_nodes"], task["resources"]["accelerators"]) == (2, "H100:8")
    assert task["resources"]["network_tier"] == "best"
    assert task["resources"]["job_recovery"] == {"max_restarts_on_errors": 3}
    assert task["volumes"] == {"/mnt/shared": "mics-shared"}
    assert ("setup" in task, task["resources"].get("image_id")) == (
        (False, "docker:registry/mics:1") if container else (True, None)
    )


def test_a_parallelcluster_has_its_required_fields(capsys: pytest.CaptureFixture[str]):
    text = rendered(capsys, "parallelcluster-config", "llama-7b", "--instance-type=p5en.48xlarge", "--shared=/data/x")
    cluster: dict[str, Any] = yaml.safe_load(text)
    assert cluster.keys() == {"Region", "Image", "HeadNode", "Scheduling", "SharedStorage"}
    assert cluster["HeadNode"].keys() >= {"InstanceType", "Networking"}
    (queue,) = cluster["Scheduling"]["SlurmQueues"]
    assert (cluster["Scheduling"]["Scheduler"], queue["Networking"]["PlacementGroup"]) == ("slurm", {"Enabled": True})
    (resource,) = queue["ComputeResources"]
    assert (resource["InstanceType"], resource["MaxCount"], resource["Efa"]) == ("p5en.48xlarge", 16, {"Enabled": True})
    (storage,) = cluster["SharedStorage"]
    assert (storage["MountDir"], storage["StorageType"]) == ("/data", "FsxLustre")


def test_a_sagemaker_program_has_its_fields(capsys: pytest.CaptureFixture[str]):
    text = rendered(capsys, "sagemaker", "gpt2-xl", "--nodes=2", "--time=1:00:00")
    compile(text, "sagemaker.py", "exec")
    calls = {
        call.func.id: {keyword.arg: keyword.value for keyword in call.keywords}
        for call in ast.walk(ast.parse(text))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
    }
    needed = {"role", "training_image", "source_code", "compute", "networking", "stopping_condition"}
    assert calls["ModelTrainer"].keys() >= needed
    assert {name: ast.literal_eval(value) for name, value in calls["Compute"].items()} == {
        "instance_type": "ml.p5.48xlarge",
        "instance_count": 2,
    }
    assert ast.literal_eval(calls["StoppingCondition"]["max_runtime_in_seconds"]) == 3600
    assert calls["FileSystemDataSource"].keys() == {
        *("file_system_id", "file_system_type", "directory_path", "file_system_access_mode")
    }
    imported = {
        name.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom) for name in node.names
    }
    assert imported <= calls.keys()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["slurm", "llama-9b"], "`llama-9b` is neither a file nor a recipe"),
        (["slurm", "llama-7b", "--nodes=3"], "cannot be shared evenly: 24 ranks"),
        (["slurm", "llama-7b", "--nodes=0"], "`nodes=0` cannot be used"),
        (["slurm", "llama-7b", "--time=tomorrow"], "`time=tomorrow` cannot be used"),
        (["slurm", "llama-7b", "--shared=runs"], "`shared=runs` cannot be used: it must be an absolute path"),
        (["slurm", "llama-7b", "--venv=/v", "--container=i"], "`--container` and `--venv` were given"),
        (["slurm", "llama-7b", "--efa=4"], "`--efa` has no effect on `slurm`. It is read by trainjob"),
        (["torchrun", "llama-7b", "--partition=x"], "read by slurm, parallelcluster, parallelcluster-config, hyperpod"),
        (["trainjob", "llama-7b"], "`trainjob` starts containers, but no image was given"),
        (["slurm", "llama-7b", "--trainer.devices=4"], "Use `--nodes` and `--gpus-per-node`"),
        (["slurm", "llama-7b", "--node=4"], "`--node=4` is no option"),
        (["slurm", "llama-7b", '--sample.prompt="""'], "without line breaks, backslashes and triple quotes"),
        (["skypilot", "recipes/llama/7b.yaml"], "nodes of `skypilot` do not see"),
    ],
)
def test_what_cannot_work_is_refused(
    arguments: list[str],
    message: str,
    repository: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(repository)
    assert main(arguments) == 1
    output = capsys.readouterr()
    assert message in output.err
    assert output.out == ""


def test_a_recipe_without_checkpoints_gets_a_note(capsys: pytest.CaptureFixture[str]):
    assert main(["slurm", "llama-debug"]) == 0
    assert "it writes no checkpoints" in capsys.readouterr().err


def test_mics_launch_is_the_same_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setitem(sys.modules, "mics_strategy.recipes.launch", launch)  # also where another tree is installed
    assert cli.main(["launch", "slurm", "llama-7b", f"--out={tmp_path / 'job.sbatch'}"]) == 0
    assert (tmp_path / "job.sbatch").read_text() == rendered(capsys, "slurm", "llama-7b")


def test_the_command_of_the_guide_renders(repository: Path, capsys: pytest.CaptureFixture[str]):
    guide = (repository / "docs" / "clusters.md").read_text()
    (command,) = re.findall(r"^mics launch (.*?) > \S+$", guide, flags=re.MULTILINE)
    text = rendered(capsys, *shlex.split(command))
    assert "#SBATCH --nodes=16" in text
    assert all(f"| `{kind}` | " in guide for kind in KINDS)


TORCHRUN = """#!/usr/bin/env bash
bash -c 'trap "touch $RANKS.$SLURM_NODEID; exit 0" TERM; touch $RANKS.up; while :; do sleep 0.05; done' &
wait
echo "torchrun was not spared"
"""
SRUN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do shift; done
trap 'kill -USR1 $nodes' USR1
nodes=
for SLURM_NODEID in 0 1; do export SLURM_NODEID; "$@" & nodes+=" $!"; done
code=0
for node in $nodes; do
  while :; do wait "$node"; got=$?; kill -0 "$node" 2> /dev/null || break; done
  ((got)) && code=$got
done
exit $code
"""
SCONTROL = """#!/usr/bin/env bash
if [[ $1 == requeue ]]; then echo "requeued $2"; else echo localhost; echo other; fi
"""


def programs(folder: Path, **texts: str) -> dict[str, str]:
    """Put programs in front of the path; return the environment."""
    for name, text in texts.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-2]", "OMP_NUM_THREADS": "1"}
    return kept | job | {"PATH": f"{folder}:{os.environ['PATH']}", "RANKS": str(folder / "rank")}


@pytest.mark.parametrize("kind", ["slurm", "torchrun"])
def test_a_signal_reaches_the_ranks_and_not_torchrun(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    environment = programs(tmp_path, srun=SRUN, scontrol=SCONTROL, torchrun=TORCHRUN)
    nodes = 2 if kind == "slurm" else 1
    (tmp_path / "file").write_text(rendered(capsys, kind, "llama-7b", f"--nodes={nodes}"))
    command = ["bash", str(tmp_path / "file")]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as job:
        deadline = time.monotonic() + 20
        while not (tmp_path / "rank.up").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(0.3)
        job.send_signal(signal.SIGUSR1)
        output, _ = job.communicate()
    assert job.returncode == 0, output
    assert output.count("torchrun was not spared") == nodes  # it ended by itself, after its ranks
    assert (f"requeued {environment['SLURM_JOB_ID']}" in output) == (kind == "slurm")
    if kind == "slurm":
        assert {file.name for file in tmp_path.glob("rank.[0-9]")} == {"rank.0", "rank.1"}


@pytest.mark.wide
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "recipe"), [("torchrun", "bert-base"), ("slurm", "gpt2-small")])
def test_a_file_really_trains(
    kind: str, recipe: str, repository: Path, cache_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    torchrun = f'#!/usr/bin/env bash\nexec {sys.executable} -m torch.distributed.run "$@"\n'
    environment = programs(tmp_path, srun=SRUN, scontrol=SCONTROL, torchrun=torchrun)
    environment |= {"PYTHONPATH": python_path(repository)}
    size = ("--nodes=1", "--gpus-per-node=2") if kind == "torchrun" else ("--nodes=2", "--gpus-per-node=1")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    fields = (f"--data.cache_dir={cache_dir}", *(["--strategy.shard={partition_size: 1}"] if kind == "slurm" else []))
    options = (
        "--ci",
        *size,
        f"--port={port - 7 * (kind == 'slurm')}",
        "--module=recipes.pretrain",
        f"--shared={tmp_path}",
    )
    (tmp_path / "file").write_text(rendered(capsys, kind, recipe, *options, *fields))
    result = subprocess.run(
        ["bash", str(tmp_path / "file")],
        cwd=repository,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count(f"{recipe}: {recipe.partition('-')[0]}") == 1
    assert "2 ranks" in result.stdout
    assert ("bits per byte" in result.stdout) == (recipe == "gpt2-small")  # hidden tokens have no code length
    check_run(tmp_path / "runs" / recipe)
