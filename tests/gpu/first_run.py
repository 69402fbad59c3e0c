"""The first eight minutes on a GPU, most important first: ``make gpu``, or ``make gpu PARTS='engine codecs'``.

Right before fast: while streams race, no time means anything. What is about right results mostly compiles and imports,
so it runs side by side; what is timed has the device to itself. A lent machine may be taken away at any second, so the
report is written every few seconds, and what it holds stays; no part outlives this process. Few files are left behind:
`report.md`, `logs.tgz`, `figures.json`, `trace.json.gz`.

Parts that failed are run alone, each kernel waited for, by the command that stands in the report.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
REPORT_S = 5.0
GRACE_S = 10.0  # from the interrupt, upon which Python prints what it has, to the end
BUDGET_S = 500.0
_LINES, _COLUMNS = 30, 240  # of each log in the report


@dataclass(frozen=True, slots=True)
class Part:
    """A command with a log of its own.

    Attributes:
        name: Name of the part and of its log.
        limit_s: Seconds after which it is interrupted.
        command: Program and arguments; `{python}` and `{logs}` are filled in.
    """

    name: str
    limit_s: float
    command: tuple[str, ...]


def _benchmark(name: str, limit_s: float, *options: str) -> Part:
    return Part(name, limit_s, ("{python}", "-m", "benchmarks.gpu", *options, "--output", "{logs}/" + name))


def _tests(name: str, limit_s: float, path: str, chosen: str = "") -> Part:
    options = ("-m", "gpu", "-q", "-o", "timeout=0", "-W", "default", "-p", "no:cacheprovider", "--tb=short")
    return Part(name, limit_s, ("{python}", "-m", "pytest", *options, path, *(("-k", chosen) if chosen else ())))


MACHINE = """
import os, torch, triton
print(torch.cuda.get_device_name(), torch.cuda.mem_get_info(), os.cpu_count(), "cores")
print("torch", torch.__version__, "triton", triton.__version__, "NCCL", torch.cuda.nccl.version())
"""
_LATE, _SHARE, _KERNELS = "late_streams", "share_a_gpu and ", "tests/comm/test_triton_codec.py"
_SANITIZER = ("compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9")
_OF_KERNELS = {"encode": "encode", "decode": "decode and not sum", "sums": "decode_sum", "coder": "coder"}
_OF_KERNELS |= {name: name for name in ("tables", "stochastic")}
SIDE_BY_SIDE: tuple[tuple[Part, ...], ...] = (  # parts of one line run one after the other
    (Part("machine", 60, ("{python}", "-c", MACHINE)),),
    (_benchmark("smoke", 150, "--smoke", "--parts", "engine,pretended,overlap,memory,trace"),),
    (_tests("late-1", 150, "tests/gpu", f"{_LATE} and (mics or int8 or hpz)"),),
    (_tests("late-2", 150, "tests/gpu", f"{_LATE} and (iig or coalesced)"),),
    (_tests("late-3", 150, "tests/gpu", f"{_LATE} and (zero1 or ahead)"),),
    (_tests("sums-1", 200, "tests/gpu", f"{_SHARE}(mics or zeropp)"),),
    (_tests("sums-2", 200, "tests/gpu", f"{_SHARE}(zero or ddp) and not zeropp"),),
    (_tests("sums-3", 200, "tests/gpu", f"{_SHARE}paro"),),
    (_tests("frameworks-1", 150, "tests/gpu", "frameworks and (scaler or compiled or checkpoint)"),),
    (_tests("frameworks-2", 150, "tests/gpu", "frameworks and (lightning or accelerate or transformers)"),),
    (_tests("plain", 150, "tests/test_gpu.py"),),
    (_tests("capturable", 150, "tests/engine/optimizer/test_capturable.py"),),
    *((_tests(f"bits-{name}", 150, _KERNELS, f"on_a_gpu and {chosen}"),) for name, chosen in _OF_KERNELS.items()),
)
ALONE: tuple[Part, ...] = (
    _benchmark("pretended", 120, "--parts", "pretended", "--rounds", "3", "--steps", "6"),
    _benchmark("engine", 190, "--parts", "engine", "--compile", "--rounds", "1", "--steps", "6"),
    _benchmark("memory", 80, "--parts", "overlap,memory,trace"),
    _benchmark("codecs", 110, "--parts", "codecs", "--rounds", "2"),
    Part("sanitizer", 90, (*_SANITIZER, *_tests("", 0, _KERNELS, "coder and 256").command)),
    _benchmark("ranks", 150, "--parts", "ranks", "--rounds", "1", "--steps", "4"),
)

# Becomes the part's program, which the kernel then kills when the process that started it is gone, also by SIGKILL. Not
# a `preexec_fn`: Python code in a fork of a process with threads, as this one is, may wait for a lock that no thread
# will release. The signal comes at the end of the thread that started the part, and that one waits for the part.
_LAUNCHER = """
import ctypes, os, signal, sys
pr_set_pdeathsig = 1  # <linux/prctl.h>
ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
if os.getppid() == int(sys.argv[1]):  # else it was gone before the kernel knew
    os.execvp(sys.argv[2], sys.argv[2:])
"""


class FirstRun:
    """Runs parts within a budget, and keeps a report of what they have found so far.

    Args:
        out: Folder of the report.
        budget_s: Seconds for all parts; what does not begin in them is left out and named.
        python: Interpreter of the parts.
        expression: Value of pytest's `-k`, which chooses among the tests of each part that has some; "" chooses all.
    """

    def __init__(
        self, out: Path, budget_s: float = BUDGET_S, python: str = sys.executable, expression: str = ""
    ) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self._out = out
        self._logs = Path(tempfile.mkdtemp(prefix="first-run-"))
        self._python = python
        self._expression = expression
        self._end = time.monotonic() + budget_s
        self._states: dict[str, str] = {}
        self._running: set[subprocess.Popen[bytes]] = set()
        self._is_over = threading.Event()
        self._writing = threading.Lock()

    def run(self, side_by_side: Sequence[Sequence[Part]], alone: Sequence[Part]) -> list[str]:
        """Run all parts; the names of those that failed."""
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in the background: parts would inherit it
            signal.signal(signal.SIGINT, signal.default_int_handler)
        for part in (*(part for lane in side_by_side for part in lane), *alone):
            self._states[part.name] = "not begun"
        self.report()
        reporter = threading.Thread(target=self._keep_reporting)
        try:
            reporter.start()
            lanes = [threading.Thread(target=self._run_lane, args=(lane,)) for lane in side_by_side]
            for thread in lanes:
                thread.start()
            for thread in lanes:
                thread.join()
            self._run_lane(alone)
        finally:
            self._end = 0.0
            for process in list(self._running):
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    os.killpg(process.pid, signal.SIGKILL)
            self._is_over.set()
            reporter.join()
            self.report()
            shutil.rmtree(self._logs)
        return self.failed

    @property
    def failed(self) -> list[str]:
        """Parts that have ended, and not well, in their order."""
        return [name for name, state in self._states.items() if re.match(r"exit (?!0 )|left out", state)]

    def _run_lane(self, parts: Iterable[Part]) -> None:
        for part in parts:
            if time.monotonic() >= self._end:
                self._states[part.name] = "left out: the time is used"
            else:
                self._run_part(part)

    def _run_part(self, part: Part) -> None:
        begin = time.monotonic()
        command = [word.replace("{python}", self._python).replace("{logs}", str(self._logs)) for word in part.command]
        if shutil.which(command[0]) is None:
            self._states[part.name] = f"left out: {command[0]} is not installed"
            return
        if self._expression and "pytest" in command:
            chosen = f"({command[-1]}) and ({self._expression})" if "-k" in command else self._expression
            command += ["-k", chosen]  # the last one counts
        command = [sys.executable, "-S", "-c", _LAUNCHER, str(os.getpid()), *command]
        self._states[part.name] = "running"
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
        environment |= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        with self._log_of(part.name).open("w") as log:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
            self._running.add(process)
            limit_s = min(part.limit_s, self._end - time.monotonic())  # none, where all of it has just ended
            for sent, wait_s in ((signal.SIGINT, limit_s), (signal.SIGKILL, GRACE_S)):
                try:
                    process.wait(wait_s)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, sent)
            code = process.wait()
            self._running.discard(process)
        self._states[part.name] = f"exit {code} after {time.monotonic() - begin:.0f} s"

    def _log_of(self, name: str) -> Path:
        return self._logs / f"{name}.log"

    def _keep_reporting(self) -> None:
        while not self._is_over.wait(REPORT_S):
            self.report()

    def report(self) -> None:
        """Write what there is. Each file is whole at any time: it replaces the one before."""
        with self._writing:
            _replace(self._out / "report.md", self._text())
            figures = {path.parent.name: json.loads(path.read_text()) for path in self._logs.glob("*/gpu.json")}
            _replace(self._out / "figures.json", json.dumps(figures, indent=1))
            packed = self._out / "logs.tgz.new"
            with tarfile.open(packed, "w:gz", compresslevel=1) as tar:
                for log in sorted(self._logs.glob("*.log")):
                    tar.add(log, log.name)
            packed.replace(self._out / "logs.tgz")
            for trace in self._logs.glob("memory/trace.json.gz"):
                shutil.copy(trace, self._out)

    def _text(self) -> str:
        lines = ["| part | state |", "| --- | --- |"]
        lines += [f"| {name} | {state} |" for name, state in self._states.items()]
        if self.failed:
            lines += ["", f"Again, in {ROOT}: `{self._again()}`"]
        for name in self._states:
            log = self._log_of(name)
            if log.exists():
                text = log.read_text(errors="replace").splitlines()[-_LINES:]
                lines += ["", f"# {name}", "```", *(line[:_COLUMNS] for line in text), "```"]
        return "\n".join(lines) + "\n"

    def _again(self) -> str:
        """The command that runs what failed, with a folder of its own."""
        values = {"PYTHON": self._python, "OUT": str(self._out / "again"), "PARTS": " ".join(self.failed)}
        values |= {"K": self._expression} if self._expression else {}
        return " ".join(
            ["CUDA_LAUNCH_BLOCKING=1 make gpu", *(f"{name}={shlex.quote(value)}" for name, value in values.items())]
        )


def _replace(path: Path, text: str) -> None:
    new = path.with_name(path.name + ".new")
    new.write_text(text)
    new.replace(path)


def main(arguments: Sequence[str]) -> int:
    """Run the named parts, or all; the number of those that failed."""
    parser = argparse.ArgumentParser(prog="make gpu", description=__doc__)
    parser.add_argument("parts", nargs="*", help="names of parts; without any, all")
    parser.add_argument("-k", default="", dest="expression", help="choose among the tests of each part, as in pytest")
    options = parser.parse_args(arguments)
    names = options.parts
    known = [part.name for part in (*(part for lane in SIDE_BY_SIDE for part in lane), *ALONE)]
    unknown = [name for name in names if name not in known]
    if unknown:
        print(f"There is no part `{unknown[0]}`. Name some of: {' '.join(known)}.", file=sys.stderr)
        return 2
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # this process keeps off the device
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        has_device = False
    else:
        has_device = torch.cuda.is_available()
    if not has_device:
        print(f"No CUDA device is there, or {sys.executable} has no torch for one: nothing was run on a GPU.")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that no part outlives this process
    out, budget_s = Path(os.environ.get("OUT", "gpu-results")).absolute(), float(os.environ.get("BUDGET", BUDGET_S))
    chosen = names or known
    lanes = [[part for part in lane if part.name in chosen] for lane in SIDE_BY_SIDE]
    run = FirstRun(out, budget_s, expression=options.expression)
    failed = run.run(lanes, [part for part in ALONE if part.name in chosen])
    print((out / "report.md").read_text()[-11_000:])
    print(f"{len(failed)} parts failed: {' '.join(failed) or 'none'}. All of it is in {out}.")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
