"""What every test gets: ranks, seeds, and a check that it leaves nothing behind."""

import ctypes
import gc
import os
import sys
import threading
import time
from collections.abc import Iterator

# Before torch is imported, for the sake of forking: no pool of compute threads, and
# torch.cuda.is_available() in a test module must not start the CUDA runtime.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
try:
    ctypes.CDLL("libnvidia-ml.so.1")  # of the driver, which that check asks
except OSError:  # it would ask the CUDA runtime, after which no process may be forked
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
# Before pyarrow is imported, by transformers where `datasets` is installed: no thread that tidies its memory.
os.environ.setdefault("JE_ARROW_MALLOC_CONF", "background_thread:false")
# Before huggingface_hub is imported: TRL would tell it of every Trainer.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
import torch.distributed as dist

from tests.interpreters import python_path
from tests.ranks import RankPool
from tests.seeds import seed_generators
from tests.shared_jobs import Batches, SharedJobs, siblings
from tests.tiers import is_interpreter, left_out

# Ranks wake one another all the time, more of them than there are cores. In this class of the scheduler the one that
# wakes up waits for its turn: tests with ranks take a tenth less time beside others, and a quarter less alone.
# Forked and started processes inherit it.
if sys.platform == "linux" and os.sched_getscheduler(0) == os.SCHED_OTHER:
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

# For interpreters that tests start with this environment.
os.environ["PYTHONPATH"] = python_path(*filter(None, [os.environ.get("PYTHONPATH")]))

_pool = pytest.StashKey[RankPool]()
_batches = pytest.StashKey[dict[tuple[str, str], Batches]]()

# Set by libraries on first use, for the rest of the process, without consequence for other tests.
ENVIRONMENT_OF_OTHERS = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "KMP_")
THREADS_END_S = 2.0  # for threads that a library has told to end and not waited for

_interpreters: list[str] = []  # started by this process since the present test began


def _note_interpreters(event: str, args: tuple[object, ...]) -> None:
    if event == "subprocess.Popen" and is_interpreter(args[1]):
        _interpreters.append(str(args[1]))


sys.addaudithook(_note_interpreters)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option of the weekly workflow."""
    parser.addoption("--every-case", action="store_true", help="run also what no tier runs")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what is in no tier."""
    if not config.option.every_case:
        deselected = left_out(items)
        skipped = {*deselected}
        items[:] = [item for item in items if item not in skipped]
        config.hook.pytest_deselected(items=deselected)


@pytest.hookimpl(tryfirst=True)  # before fixtures of a module or a session start interpreters
def pytest_runtest_setup() -> None:
    """Forget the interpreters of the test before."""
    _interpreters.clear()


def pytest_sessionstart() -> None:
    """Collect no garbage until all modules are imported: what they make stays, and walking it takes a sixth longer."""
    gc.disable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Fork the fork server, where a test asks for it: all modules are imported, and no test has started a thread yet.

    Tests of a GPU ask for none, and drivers start threads.
    """
    torch.set_num_threads(1)
    gc.freeze()
    gc.enable()
    if not session.config.option.collectonly and any("ranks" in item.fixturenames for item in session.items):
        try:
            session.config.stash[_pool] = RankPool()
        except RuntimeError as error:  # other threads run
            raise pytest.UsageError(str(error)) from error


def pytest_sessionfinish(session: pytest.Session) -> None:
    """End the ranks and the fork server."""
    if _pool in session.config.stash:
        session.config.stash[_pool].close()


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> RankPool | SharedJobs:
    """`ranks(4, fn, *args, ranks_per_node=2)`: see `RankPool.__call__`; cases of a test marked `one_job` share jobs."""
    item, stash = request.node, request.config.stash
    if not (item.get_closest_marker("one_job") and hasattr(item, "callspec")):
        return stash[_pool]
    batches = stash.setdefault(_batches, {})
    of_test = item.parent.nodeid, item.originalname
    if of_test not in batches:
        batches[of_test] = Batches(stash[_pool], siblings(item))
    return SharedJobs(stash[_pool], batches[of_test], item)


@pytest.fixture(autouse=True)
def _seeds() -> None:
    seed_generators()


def _environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith(ENVIRONMENT_OF_OTHERS)}


@pytest.fixture(autouse=True)
def _leaves_the_environment_alone() -> Iterator[None]:
    before = _environment()
    yield
    after = _environment()
    os.environ.update(before)
    for name in after.keys() - before.keys():
        del os.environ[name]
    changed = sorted(k for k in before.keys() | after.keys() if before.get(k) != after.get(k))
    if changed:
        pytest.fail(f"the test changed the environment variables {changed}: use monkeypatch")


@pytest.fixture(autouse=True)
def _leaves_no_threads() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    left = [t for t in threading.enumerate() if t not in before and not t.daemon]
    deadline_s = time.monotonic() + THREADS_END_S
    for thread in left:
        thread.join(max(0.0, deadline_s - time.monotonic()))
    names = [thread.name for thread in left if thread.is_alive()]
    if names:
        pytest.fail(f"the test left threads running: {names}")


@pytest.fixture(autouse=True)
def _starts_no_interpreter_in_the_fast_tier(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    marks = {mark.name for mark in request.node.iter_markers()}
    if _interpreters and not marks & {"slow", "weekly", "interpreter"}:
        pytest.fail(f"the test starts interpreters, so it is slow: mark it. Started: {_interpreters}")


@pytest.fixture(autouse=True)
def _leaves_no_process_group() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
        gc.collect()
        pytest.fail("the test left a default process group: call destroy_process_group()")


@pytest.fixture(autouse=True)
def _leaves_torch_settings_alone() -> Iterator[None]:
    before = (torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled())
    yield
    after = (torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled())
    torch.set_default_dtype(before[0])
    torch.set_num_threads(before[1])
    torch.set_grad_enabled(before[2])
    if after != before:
        pytest.fail(f"the test changed torch's dtype, threads or grad mode: {before} to {after}")
