"""What every test gets: ranks, seeds, and a check that it leaves nothing behind."""

import gc
import os
import threading
from collections.abc import Iterator

# Before torch is imported, for the sake of forking: no pool of compute threads, and
# torch.cuda.is_available() in a test module must not start the CUDA runtime.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
# Before pyarrow is imported, by transformers where `datasets` is installed: no thread that tidies its memory.
os.environ.setdefault("JE_ARROW_MALLOC_CONF", "background_thread:false")
# Before huggingface_hub is imported: TRL would tell it of every Trainer.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankPool
from tests.seeds import seed_generators

_pool = pytest.StashKey[RankPool]()

# Set by libraries on first use, for the rest of the process, without consequence for other tests.
ENVIRONMENT_OF_OTHERS = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "KMP_")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Fork the fork server: every test module is imported and no test has started a thread yet."""
    if not session.config.option.collectonly:
        torch.set_num_threads(1)
        try:
            session.config.stash[_pool] = RankPool()
        except RuntimeError as error:  # other threads run
            raise pytest.UsageError(str(error)) from error


def pytest_sessionfinish(session: pytest.Session) -> None:
    """End the ranks and the fork server."""
    if _pool in session.config.stash:
        session.config.stash[_pool].close()


@pytest.fixture
def ranks(pytestconfig: pytest.Config) -> RankPool:
    """`ranks(4, fn, *args, ranks_per_node=2)`: see `RankPool.__call__`."""
    return pytestconfig.stash[_pool]


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
    left = [t.name for t in threading.enumerate() if t not in before and not t.daemon]
    if left:
        pytest.fail(f"the test left threads running: {left}")


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
