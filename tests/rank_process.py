"""What happens on one rank of the pool?

A rank (forked in `ranks.py`) serves jobs, one after the other. Each gets a fresh default process
group, its own environment variables, working directory and seeds. After a failure the rank ends:
that breaks its connections and so frees the ranks that wait for it.
"""

import copyreg
import faulthandler
import gc
import io
import os
import pickle
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor._redistribute import _gen_transform_infos, clear_redistribute_planner_cache
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from mics_strategy import api
from tests.rank_report import Failure, LeakError, RankContext
from tests.seeds import seed_generators


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What one rank is asked to do; `call` is the pickled pair (function, arguments).

    Unless it `calibrates`, collectives over several nodes go in two stages where `hierarchical="auto"` would measure:
    what most tests say of bytes and bits must not depend on how busy the machine is.
    """

    ctx: RankContext
    call: bytes
    env: dict[str, str]
    timeout_s: float
    default_group: bool
    calibrates: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A rank's answer: what the job returned, and why it or the cleaning up after it failed."""

    value: object = None
    failure: Failure | None = None
    cleanup_failure: Failure | None = None


def serve_jobs(connection: Connection, stack_path: Path) -> None:
    """Serve jobs until the pool closes the connection or a job fails.

    Args:
        connection: Jobs come and replies go here, pickled.
        stack_path: On SIGUSR1 the stacks of all threads are written to this file.
    """
    gc.freeze()  # what was there before the fork: collecting it takes long and copies its pages
    gc.set_threshold(10_000, 10, 10)  # collecting takes a twelfth of a job otherwise; below once a job
    with stack_path.open("w") as stack_file:
        faulthandler.register(signal.SIGUSR1, file=stack_file)
        while True:
            try:
                job = pickle.loads(connection.recv_bytes())
            except EOFError:
                return
            reply = _run(job)
            sys.stdout.flush()
            sys.stderr.flush()
            if "coverage" in sys.modules:  # `make coverage`; the pool will kill this rank
                sys.modules["coverage"].Coverage.current().save()
            sent, is_last = _pickled(reply), bool(reply.failure or reply.cleanup_failure)
            del reply  # an error in it may hold, by the traceback of its cause, the model of the job
            gc.collect()
            gc.freeze()  # what is left lives on: modules and caches
            connection.send_bytes(sent)
            if is_last:
                return


def _pickled(reply: Reply) -> bytes:
    """Pickle by value: multiprocessing's pickle would share the memory of tensors."""
    try:
        return pickled_by_value(reply)
    except Exception as error:  # whatever pickling raises: the value cannot travel
        return pickle.dumps(Reply(failure=Failure.of(error).portable()))


def pickled_by_value(value: object) -> bytes:
    """As `pickle.dumps`, which spends ten times as long on a small tensor: it saves a file for each."""
    file = io.BytesIO()
    pickler = pickle.Pickler(file, protocol=pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = copyreg.dispatch_table | {Tensor: _reduce_tensor}
    pickler.dump(value)
    return file.getvalue()


def _reduce_tensor(tensor: Tensor) -> Any:
    """Bytes, type and shape of a plain tensor; anything else as torch pickles it."""
    is_plain = (
        (tensor.device.type, tensor.layout) == ("cpu", torch.strided)
        and tensor.is_contiguous()
        and tensor.numel() > 0
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or tensor.__dict__)
    )
    if not is_plain:
        return tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    values = bytearray(tensor.detach().view(-1).view(torch.uint8).numpy())
    return _rebuild_tensor, (values, tensor.dtype, tensor.shape)


def _rebuild_tensor(values: bytearray, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    return torch.frombuffer(values, dtype=dtype).view(shape)


def _run(job: Job) -> Reply:
    threads = set(threading.enumerate())
    with _fresh_process_state(job):
        try:
            fn, args = pickle.loads(job.call)
            if job.default_group:
                _init_group(job)
            with nullcontext() if job.calibrates else mock.patch.object(api, "autotune", _undecided):
                value = fn(job.ctx, *args)
        except BaseException as error:  # reported to the test, SystemExit too
            return Reply(failure=Failure.of(error).portable())
        try:
            if job.default_group:
                dist.barrier()
                dist.destroy_process_group()
                forget_meshes()
            _check_nothing_left(threads)
        except Exception as error:  # reported to the test
            return Reply(value=value, cleanup_failure=Failure.of(error).portable())
    return Reply(value=value)


def _undecided(_scopes: object, _site: object) -> list[object]:
    """Stands in for a calibration: finds nothing, which leaves two stages."""
    return []


def _init_group(job: Job) -> None:
    """Make the default group and wait, by files, until every rank is connected to every other.

    Else a rank that fails at once would break the connections that others are making, and they
    would report that instead of what the job does on them.
    """
    ctx, timeout = job.ctx, timedelta(seconds=job.timeout_s)
    path = str(ctx.tmp_path.with_name("store"))
    store = dist.FileStore(path, ctx.world_size)
    dist.init_process_group("gloo", store=store, rank=ctx.rank, world_size=ctx.world_size, timeout=timeout)
    dist.barrier()
    ready = dist.PrefixStore("ready", store)
    ready.set(str(ctx.rank), "")
    ready.wait([str(rank) for rank in range(ctx.world_size)], timeout)


def forget_meshes() -> None:
    """Empty DTensor's caches, which know meshes by their ranks and would give the next job groups that are gone.

    `shard()` does so itself. This is for jobs of FSDP2 alone.
    """
    _clear_sharding_prop_cache()
    _gen_transform_infos.cache_clear()
    clear_redistribute_planner_cache()


def _check_nothing_left(threads_before: set[threading.Thread]) -> None:
    if dist.is_initialized():
        raise LeakError("the job left a default process group: call destroy_process_group()")
    left = [t.name for t in threading.enumerate() if t not in threads_before and not t.daemon]
    if left:
        raise LeakError(f"the job left threads running: {left}. Join them or make them daemons.")


@contextmanager
def _fresh_process_state(job: Job) -> Iterator[None]:
    """Environment, working directory, seeds and torch's process-wide settings of one job."""
    env, cwd = dict(os.environ), Path.cwd()
    os.environ.update(job.env)
    os.chdir(job.ctx.tmp_path)
    seed_generators()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    try:
        yield
    finally:
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(env)
