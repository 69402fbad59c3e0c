"""A generated script hands every value on as it is, or the value is refused: none becomes a command or a field."""

import ast
import os
import subprocess
from pathlib import Path

import pytest
import yaml

from recipes.launch import KINDS, main
from tests.recipes.test_launch import SCRIPTS, lint, programs, script_of

ROOT = Path(__file__).resolve().parents[2] / "recipes"
RUNS = "touch PWNED"
VALUES = {
    "substitution": f"$({RUNS})",
    "backticks": f"`{RUNS}`",
    "a single quote": f"'; {RUNS}; '",
    "a double quote": f'"; {RUNS}; "',
    "separators": f"a; {RUNS} && b | c & d > PWNED",
    "a variable": "$HOME ${PATH}",
    "a glob": "* ? [a] ~",
    "a comment": "a #b",
    "YAML": "a: {b: [c], *d, &e, !!f, '-'}",
    "a template": "{{ 7 * 7 }} {% raw %}",
    "an option": "-x --nnodes=7",
    "letters": "é 漢字",
    "quotes": "''\"\"''\"",
}
RECORD = '#!/usr/bin/env bash\nprintf "%s\\0" "$@" > "$RECORD"\n'
SRUN = """#!/usr/bin/env bash
printf "%s\\0" "$@" > "$RECORD.srun"
while [[ $1 == --* ]]; do shift; done
SLURM_NODEID=0 "$@"
"""
SCONTROL = "#!/usr/bin/env bash\necho localhost\n"
SHELL = {"SM_MASTER_ADDR": "a", "SM_MASTER_PORT": "1", "TRAINING_JOB_NAME": "a", "SM_CURRENT_HOST_RANK": "0"}
SHELL |= {"SKYPILOT_NODE_IPS": "a", "SKYPILOT_TASK_ID": "a", "SKYPILOT_NODE_RANK": "0"}
SHELL |= {"PET_MASTER_ADDR": "a", "PET_MASTER_PORT": "1", "PET_NODE_RANK": "0"}


def needed(kind: str) -> list[str]:
    return ["--container=registry/mics:1"] if KINDS[kind].container == "always" else []


def rendered(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main([*arguments, "--nodes=1"]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def words_of(file: Path) -> list[str]:
    return file.read_text().split("\0")[:-1]


def run(script: str, folder: Path) -> list[str]:
    """The arguments of torchrun, when the script runs with programs that only write down their own."""
    lint(script)
    (folder / "run").mkdir(exist_ok=True)
    environment = programs(folder, torchrun=RECORD, srun=SRUN, scontrol=SCONTROL) | SHELL
    environment["RECORD"] = str(folder / "argv")
    done = subprocess.run(
        ["bash", "-c", script], cwd=folder / "run", env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert [*(folder / "run").iterdir()] == []
    return words_of(folder / "argv")


@pytest.mark.parametrize("kind", SCRIPTS)
def test_an_option_of_the_recipe_reaches_the_program_unchanged(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    prompts = [value for value in VALUES.values() if not (kind == "trainjob" and "$" in value)]
    for prompt in prompts:
        text = rendered(capsys, kind, "llama-7b", *needed(kind), f"--sample.prompt={prompt}")
        script = script_of(kind, text)
        for line in ("source ~/mics/bin/activate", "ulimit -n 65536"):  # of a machine of SkyPilot
            script = script.replace(line, "")
        assert run(script, tmp_path)[-1] == f"--sample.prompt={prompt}"


@pytest.mark.parametrize("kind", [kind for kind in SCRIPTS if KINDS[kind].has_files])
@pytest.mark.parametrize("value", VALUES)
def test_the_name_of_a_recipe_and_its_file_are_no_commands(
    kind: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    name = f"a{VALUES[value]}"
    folder = tmp_path / name.replace("/", " ")
    folder.mkdir()
    recipe = yaml.safe_load((ROOT / "llama" / "debug.yaml").read_text()) | {"name": name}
    (folder / "own.yaml").write_text(yaml.safe_dump(recipe))
    arguments = run(rendered(capsys, kind, str(folder / "own.yaml")), tmp_path)
    assert str(folder / "own.yaml") in arguments
    assert f"--trainer.output_dir={KINDS[kind].shared}/runs/{name}" in arguments


@pytest.mark.parametrize("kind", [kind for kind in SCRIPTS if KINDS[kind].has_files])
def test_a_line_break_in_the_name_of_a_recipe_is_refused(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    recipe = yaml.safe_load((ROOT / "llama" / "debug.yaml").read_text()) | {"name": f"a\n{RUNS}"}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(recipe))
    assert main([kind, str(tmp_path / "own.yaml")]) == 1
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("value", VALUES)
def test_paths_reach_shell_and_srun_unchanged(value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    venv = tmp_path / VALUES[value].replace("/", " ")
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "activate").write_text(f"touch '{tmp_path}/activated'\n")
    shared = f"/shared/{VALUES[value].translate(str.maketrans(':,', '  '))}"
    arguments = run(rendered(capsys, "slurm", "llama-7b", f"--venv={venv}", f"--shared={shared}"), tmp_path)
    assert (tmp_path / "activated").exists()
    assert f"--data.cache_dir={shared}/tokens" in arguments
    run(rendered(capsys, "slurm", "llama-7b", f"--container={VALUES[value]}", f"--shared={shared}"), tmp_path)
    assert words_of(tmp_path / "argv.srun")[1:3] == [
        f"--container-image={VALUES[value]}",
        f"--container-mounts={shared}:{shared}",
    ]


@pytest.mark.parametrize("value", VALUES)
def test_values_stay_values_in_yaml_and_python(value: str, capsys: pytest.CaptureFixture[str]):
    text = VALUES[value]
    shared = f"/shared {text.translate(str.maketrans(':,', '  '))}"
    options = (f"--container={text}", f"--shared={shared}")
    task = yaml.safe_load(rendered(capsys, "skypilot", "gpt2-xl", *options, f"--accelerator={text}"))
    assert task["resources"]["accelerators"] == f"{text}:8"
    assert (task["resources"]["image_id"], task["volumes"]) == (f"docker:{text}", {shared: "mics-shared"})
    if "$" not in text:
        job = yaml.safe_load(rendered(capsys, "trainjob", "gpt2-xl", *options))
        (node,) = job["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
        mounts = node["template"]["spec"]["template"]["spec"]["containers"][0]["volumeMounts"]
        assert (job["spec"]["trainer"]["image"], mounts[0]["mountPath"]) == (text, shared)
    options = (f"--partition={text}", f"--instance-type={text}", f"--shared={shared}")
    cluster = yaml.safe_load(rendered(capsys, "parallelcluster-config", "gpt2-xl", *options))
    (queue,) = cluster["Scheduling"]["SlurmQueues"]
    assert (queue["Name"], queue["ComputeResources"][0]["InstanceType"]) == (text, text)
    program = rendered(capsys, "sagemaker", "gpt2-xl", f"--container={text}", f"--instance-type={text}")
    strings = {node.value for node in ast.walk(ast.parse(program)) if isinstance(node, ast.Constant)}
    assert {text, f"ml.{text}"} <= strings


@pytest.mark.parametrize("mark", ["\n", "\r", "\x85", "\u2028", "\x00", "\x1b", "\\", '"""'], ids=repr)
def test_what_would_end_a_line_or_a_string_is_refused_everywhere(mark: str, capsys: pytest.CaptureFixture[str]):
    for kind, facts in KINDS.items():
        given = {"shared": f"/a{mark}b", **{name: f"a{mark}b" for name in facts.reads - {"port", "efa"}}}
        for name, value in given.items():
            container = needed(kind) if name != "container" else []
            refused = main([kind, "llama-7b", *container, f"--{name.replace('_', '-')}={value}"])
            is_unread = kind == "sagemaker" and name == "shared"
            assert refused == 1 or is_unread, (kind, name)
            assert capsys.readouterr().out == "" or is_unread
        if kind != "parallelcluster-config":
            assert main([kind, "llama-7b", *needed(kind), f"--sample.prompt=a{mark}b"]) == 1
            assert capsys.readouterr().out == ""


@pytest.mark.parametrize("kind", ["slurm", "parallelcluster", "hyperpod"])
@pytest.mark.parametrize("value", ["a b", "a --wrap=x", "'a'", '"a"', "a#b", "$(a)"])
def test_a_partition_is_one_word(kind: str, value: str, capsys: pytest.CaptureFixture[str]):
    assert main([kind, "llama-7b", f"--partition={value}"]) == 1
    assert "a line of #SBATCH" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "job"),
    [("7B, again!", "mics-7b-again"), ("a" * 39 + " b", "a" * 39), ("漢字x", "x"), ("Ünder_score", "nder-score")],
)
def test_a_job_has_a_name_that_every_cluster_takes(
    name: str, job: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    recipe = yaml.safe_load((ROOT / "llama" / "debug.yaml").read_text()) | {"name": name}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(recipe))
    assert f"#SBATCH --job-name={job}\n" in rendered(capsys, "slurm", str(tmp_path / "own.yaml"))


def test_a_dollar_is_refused_where_kubernetes_expands_it(capsys: pytest.CaptureFixture[str]):
    assert main(["trainjob", "llama-7b", *needed("trainjob"), "--sample.prompt=$(HOME)"]) == 1
    assert "which Kubernetes expands" in capsys.readouterr().err
    assert os.environ["HOME"] not in capsys.readouterr().out
