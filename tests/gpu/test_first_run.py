"""Does the first run on a GPU run everything, and is what it has found there at any moment?"""

import contextlib
import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import PARTS
from tests.gpu import first_run
from tests.gpu.first_run import ALONE, SIDE_BY_SIDE, FirstRun, Part

ROOT = Path(__file__).parents[2]
CHECKS = [part for lane in SIDE_BY_SIDE for part in lane]
TESTS = [part for part in CHECKS if "pytest" in part.command]


def is_chosen(test: str, path: str, _k: str = "-k", expression: str = "") -> bool:
    """Whether pytest's arguments choose a test."""
    words = re.sub(
        r"\w+", lambda word: word[0] if word[0] in ("and", "or", "not") else str(word[0] in test), expression
    )
    return test.startswith(path) and bool(eval(words or "True"))


@pytest.mark.slow
def test_every_test_of_a_gpu_is_in_one_part() -> None:
    files = [str(file) for file in (ROOT / "tests").rglob("test_*.py") if re.search(r"mark\.gpu\b", file.read_text())]
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "--collect-only", "-q", *files]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    tests = re.findall(r"^tests/.*::.*$", listed, flags=re.MULTILINE)
    chosen = [part.command[part.command.index("--tb=short") + 1 :] for part in TESTS]
    assert {test: sum(is_chosen(test, *each) for each in chosen) for test in tests} == dict.fromkeys(tests, 1)
    assert all(any(is_chosen(test, *each) for test in tests) for each in chosen)


def test_every_part_of_the_benchmark_is_measured() -> None:
    measured = [part.command[part.command.index("--parts") + 1] for part in ALONE if "--parts" in part.command]
    assert {name for names in measured for name in names.split(",")} == set(PARTS)
    names = [part.name for part in (*CHECKS, *ALONE)]
    assert len(names) == len(set(names))


def python(code: str) -> tuple[str, ...]:
    return ("{python}", "-c", code)


def states(out: Path) -> dict[str, str]:
    return dict(
        re.findall(r"^\| ([\w-]+) \| (?!state|---)(.*) \|$", (out / "report.md").read_text(), flags=re.MULTILINE)
    )


@pytest.mark.interpreter
def test_a_part_that_fails_leaves_the_others_their_turn_and_can_be_run_again(tmp_path: Path) -> None:
    figures = "import pathlib; path = pathlib.Path('{logs}/speed'); path.mkdir(); "
    figures += "(path / 'gpu.json').write_text('{\"fast\": 1}')"
    run = FirstRun(tmp_path)
    failed = run.run(
        [[Part("wrong", 60, python("print('asked for'); raise SystemExit(3)")), Part("right", 60, python(""))]],
        [Part("absent", 60, ("no-such-program",)), Part("speed", 60, python(figures))],
    )
    found, text = states(tmp_path), (tmp_path / "report.md").read_text()
    assert failed == ["wrong", "absent"]
    assert found["wrong"].startswith("exit 3")
    assert "asked for" in text
    assert found["absent"] == "left out: no-such-program is not installed"
    assert found["right"].startswith("exit 0")
    assert "PARTS='wrong absent'" in text
    assert json.loads((tmp_path / "figures.json").read_text()) == {"speed": {"fast": 1}}
    assert {path.name for path in tmp_path.iterdir()} == {"report.md", "figures.json", "logs.tgz"}


@pytest.mark.interpreter
def test_threads_of_the_environment_do_not_reach_a_part(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Tests that fork ranks refuse where OpenBLAS has threads."""
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    code = "import os; print(os.environ['OMP_NUM_THREADS'], os.environ['CUDA_LAUNCH_BLOCKING'])"
    FirstRun(tmp_path).run([], [Part("threads", 60, python(code))])
    assert "\n1 1\n" in (tmp_path / "report.md").read_text()


TWO_TESTS = """
def test_left(): print("left ran")
def test_right(): print("right ran")
def test_neither(): print("neither ran")
"""


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("own", "expression", "expected"),
    [
        ("", "left", {"left"}),
        ("left or right", "not right or neither", {"left"}),
        ("left or right", "", {"left", "right"}),
    ],
)
def test_an_expression_chooses_among_the_tests_of_a_part(
    tmp_path: Path, own: str, expression: str, expected: set[str]
) -> None:
    (tmp_path / "test_two.py").write_text(TWO_TESTS)
    command = ("{python}", "-m", "pytest", "-q", "-s", "--rootdir", str(tmp_path), str(tmp_path / "test_two.py"))
    tests = Part("tests", 120, (*command, *(("-k", own) if own else ())))
    run = FirstRun(tmp_path / "out", expression=expression)
    assert run.run([], [tests, Part("other", 60, python("print('other ran')"))]) == []
    text = (tmp_path / "out" / "report.md").read_text()
    assert set(re.findall(r"(\w+) ran", text)) == {*expected, "other"}


@pytest.mark.interpreter
def test_what_failed_is_run_again_by_the_command_of_the_report(tmp_path: Path) -> None:
    out, expression = tmp_path / "a folder", "mics and not (late or int8)"
    FirstRun(out, budget_s=0, expression=expression).run([[Part("one", 60, ()), Part("other", 60, ())]], [])
    again = re.findall(r"^Again, in (.*): `(.*)`$", (out / "report.md").read_text(), flags=re.MULTILINE)
    [(folder, command)] = again
    # As from a shell: a make that runs these tests passes its own flags on, and what it prints differs by version.
    plain = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    shown = subprocess.run(
        command + " --dry-run", shell=True, cwd=folder, env=plain, capture_output=True, text=True, check=True
    )
    program = [sys.executable, "-m", "tests.gpu.first_run", "one", "other", "-k", expression]
    assert shlex.split(shown.stdout.splitlines()[0]) == [f"OUT={out / 'again'}", *program]


@pytest.mark.interpreter
def test_what_does_not_begin_in_the_budget_is_left_out_and_named(tmp_path: Path) -> None:
    failed = FirstRun(tmp_path, budget_s=0).run([[Part("early", 60, python(""))]], [Part("late", 60, python(""))])
    assert failed == ["early", "late"]
    assert set(states(tmp_path).values()) == {"left out: the time is used"}


@pytest.mark.interpreter
def test_a_part_that_takes_too_long_is_interrupted_and_says_what_it_has(tmp_path: Path) -> None:
    code = "import time\ntry:\n    time.sleep(600)\nexcept KeyboardInterrupt:\n    print('half of it')\n    raise"
    assert FirstRun(tmp_path).run([], [Part("long", 10, python(code))]) == ["long"]
    assert "half of it" in (tmp_path / "report.md").read_text()


@pytest.mark.interpreter
def test_parts_side_by_side_run_at_the_same_time(tmp_path: Path) -> None:
    """Each waits for a file that the other one writes."""
    code = "import pathlib, time\npathlib.Path('{logs}/%s').touch()\n"
    code += "while not pathlib.Path('{logs}/%s').exists(): time.sleep(0.01)"
    lanes = [[Part("one", 60, python(code % ("a", "b")))], [Part("other", 60, python(code % ("b", "a")))]]
    assert FirstRun(tmp_path).run(lanes, []) == []


ENDLESS = """
import sys, types
from tests.gpu import first_run
from tests.gpu.first_run import Part
sys.modules["torch"] = types.SimpleNamespace(cuda=types.SimpleNamespace(is_available=lambda: True))
first_run.REPORT_S = float(sys.argv[1])
word = "import time\\nfor _ in range(60000): print('word', flush=True); time.sleep(0.01)"
first_run.SIDE_BY_SIDE = [[Part(name, 60, ("{python}", "-c", word))] for name in "ab"]
first_run.ALONE = []
first_run.main([])
"""


def start_endless(out: Path, report_s: float) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OUT": str(out), "TMPDIR": str(out.parent)}  # a run that is killed leaves its logs
    return subprocess.Popen(
        [sys.executable, "-c", ENDLESS, str(report_s)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def processes_of(out: Path) -> list[int]:
    """The run into a folder, and its parts."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended, or is not ours
            found += [int(path.parent.name)] if f"OUT={out}\0".encode() in path.read_bytes() else []
    return found


def assert_that_all_end(out: Path) -> None:
    end = time.monotonic() + 30
    while (left := processes_of(out)) and time.monotonic() < end:
        time.sleep(0.02)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("sent", "status"),
    [(signal.SIGKILL, -9), (signal.SIGINT, -2), (signal.SIGTERM, 128 + 15)],
    ids=["KILL", "INT", "TERM"],
)
def test_a_run_that_is_killed_leaves_what_it_has_found_and_no_part(
    tmp_path: Path, sent: signal.Signals, status: int
) -> None:
    for turn in range(3):
        out = tmp_path / str(turn)
        process = start_endless(out, report_s=0.05)
        while not ((out / "logs.tgz").exists() and "word" in (out / "report.md").read_text()):  # all files of a report
            time.sleep(0.02)
        time.sleep(random.uniform(0, 0.5))
        process.send_signal(sent)
        assert process.wait() == status
        assert set(states(out)) == {"a", "b"}
        assert all(re.match("not begun|running|exit -9 after", state) for state in states(out).values())
        assert json.loads((out / "figures.json").read_text()) == {}
        with tarfile.open(out / "logs.tgz") as tar:
            assert set(tar.getnames()) <= {"a.log", "b.log"}
        assert_that_all_end(out)


@pytest.mark.interpreter
def test_a_run_that_is_killed_while_its_first_parts_start_leaves_a_report_and_no_part(tmp_path: Path) -> None:
    for turn in range(3):
        out = tmp_path / str(turn)
        process = start_endless(out, report_s=600)
        while len(processes_of(out)) < 2:
            time.sleep(0.002)
        process.kill()
        process.wait()
        assert set(states(out)) == {"a", "b"}
        assert_that_all_end(out)


PRETENDED_GPU = """
import importlib.abc, importlib.util, sys


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "torch.cuda":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            module.is_available = lambda: True
            module.get_device_name = lambda *_: "pretended"
            module.device_count = lambda: 1

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Finder())
"""


@pytest.mark.slow
@pytest.mark.interpreter
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_parts_find_their_tests_on_a_pretended_gpu(tmp_path: Path) -> None:
    """They fail without a driver, but they begin: not one is refused because OpenBLAS has threads."""
    (tmp_path / "sitecustomize.py").write_text(PRETENDED_GPU)
    out, names = tmp_path / "out", ("machine", "bits-coder", "capturable")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "4"}
    command = ["make", "gpu", f"PYTHON={sys.executable}", f"OUT={out}", f"PARTS={' '.join(names)}"]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    text = (out / "report.md").read_text()
    assert "threads run already" not in text
    assert "no tests ran" not in text
    assert {states(out)[name].split(" after")[0] for name in names} == {"exit 1"}, ran.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_without_a_gpu_it_says_so_and_succeeds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ran = subprocess.run(
        ["make", "gpu", f"PYTHON={sys.executable}", f"OUT={tmp_path / 'out'}"], cwd=ROOT, capture_output=True, text=True
    )
    assert (ran.returncode, "nothing was run on a GPU" in ran.stdout) == (0, True)
    assert not (tmp_path / "out").exists()


def test_an_unknown_part_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert first_run.main(["engine", "speed"]) == 2
    assert "There is no part `speed`" in capsys.readouterr().err


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("torch_package", "error"),
    [
        (None, ""),
        ("import no_such_dependency", "ModuleNotFoundError: No module named 'no_such_dependency'"),
        ("raise ImportError('libcudart.so: cannot open')", "ImportError: libcudart.so: cannot open"),
    ],
    ids=["no torch", "a torch without a dependency", "a broken torch"],
)
def test_a_python_without_torch_is_no_error_and_a_broken_torch_is_shown(
    tmp_path: Path, torch_package: str | None, error: str
) -> None:
    if torch_package is not None:
        (tmp_path / "torch.py").write_text(torch_package)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "OUT": str(tmp_path / "out")}
    command = [sys.executable, "-S", "-m", "tests.gpu.first_run"]  # nothing that is installed
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (ran.returncode == 0, "nothing was run on a GPU" in ran.stdout) == (not error, not error)
    assert ran.stderr.splitlines()[-1:] == ([error] if error else [])
