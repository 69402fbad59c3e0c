"""How is the state of all ranks written, at once or while training goes on?

Every rank writes its pieces into one file of the draft and tells rank 0, through the job's store, what is in it. Rank 0
adds what describes the whole and publishes it. No process group takes part: a save that is under way neither disturbs
training nor ends with it, and goes on when the process groups are gone.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import pickle
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from mics_strategy.checkpoint import atomic, rng, shard_report
from mics_strategy.checkpoint.manifest import Manifest
from mics_strategy.checkpoint.rank_local import class_name
from mics_strategy.checkpoint.save_planner import HostCopyPool, ShardedSavePlanner, check_replica_counts
from mics_strategy.checkpoint.shard_report import ShardReport
from mics_strategy.checkpoint.state import Optimizers, by_key, local_state
from mics_strategy.checkpoint.store_channel import StoreChannel
from mics_strategy.comm.consensus import check_same_keys_across_ranks, gather_objects, run_on_all_ranks
from mics_strategy.engine.handle import Sharded
from mics_strategy.errors import CheckpointError, MiCSError
from mics_strategy.version import package_version

T = TypeVar("T")
EXTRA = "meta.pt"  # by this name Lightning's consolidation finds it
_log = logging.getLogger(__name__)
_SEEN_WITHIN_S = 30.0  # until a folder that rank 0 has made is visible on another machine


class PendingSave:
    """A checkpoint that is being written. Its process does not end before it is.

    Attributes:
        path: Where it will be.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._failure: BaseException | None = None
        self._done = threading.Event()

    def run(self, write: Any) -> None:
        """Write, and remember how it went."""
        try:
            write()
        except BaseException as error:
            self._failure = error
            _log.error("The checkpoint `%s` was not saved. %s", self.path, error)  # the script may never wait for it
        self._done.set()

    def is_done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._done.is_set()

    def wait(self) -> None:
        """Block until the checkpoint is whole on the disk.

        Raises:
            CheckpointError: It could not be written; on every rank, naming the one that failed. An older checkpoint of
                that name is as it was.
        """
        self._done.wait()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure


_pending: weakref.WeakKeyDictionary[Sharded, PendingSave] = weakref.WeakKeyDictionary()
_host_memory: weakref.WeakKeyDictionary[Sharded, HostCopyPool] = weakref.WeakKeyDictionary()


def save_checkpoint(
    path: str | os.PathLike[str],
    sharded: Sharded,
    optimizers: Optimizers = (),
    extra: Mapping[str, Any] | None = None,
    *,
    model_state: Mapping[str, Any] | None = None,
    asynchronous: bool = False,
) -> PendingSave:
    """Write model, optimizers and, beside these, random states of all ranks as a sharded checkpoint. Collective.

    The folder `path` appears when everything is on the disk, and never otherwise. The save before this one is waited
    for first, and its failure raised. Gradients are not saved. After micro-steps that no optimizer step has used yet,
    the checkpoint is written all the same: rank 0 says so once, the manifest how many they are, loading says it again.

    Args:
        path: A folder on a file system that all ranks see; rank 0's counts. A checkpoint there is replaced.
        sharded: The model.
        optimizers: To be loaded in the same order; or by the names under which they shall be kept.
        extra: Anything else, of rank 0: schedulers, counters, the position in the data. Plain data and tensors load
            without running code.
        model_state: In place of the model's state dict, with the same names on all ranks: a part of it, say.
        asynchronous: Return when everything is copied, and write while training goes on.

    Returns:
        What is being written; done already unless `asynchronous`.

    Raises:
        CheckpointError: On every rank, naming the one that failed.

    Cost: Asynchronous, a copy in host memory of what this rank writes, about 1 / world_size of the state (of quantized
        states it has the values, too), which is kept for the next save.
    """
    finish_saves(sharded)
    if optimizers:
        sharded.warn_pending_gradients()
    sharded.synchronize_buffers()
    check_same_keys_across_ranks("The names in `model_state`", model_state or ())  # or one might be written by nobody
    planner = _on_all_ranks(lambda: _make_planner(sharded, optimizers, model_state, asynchronous))
    copied = _on_all_ranks(lambda: _copied(extra or {}, asynchronous))
    check_replica_counts(planner, sharded.index)
    draft, target = begin(path)
    job = _SaveJob(
        draft=draft,
        path=target,
        planner=planner,
        manifest=_manifest_of(sharded, optimizers),
        extra=copied if dist.get_rank() == 0 else {},
        channel=StoreChannel(dist.distributed_c10d._get_default_store(), draft.name, dist.get_rank()),
        rank=dist.get_rank(),
    )
    pending = PendingSave(target)
    if asynchronous:
        _pending[sharded] = pending
        threading.Thread(target=pending.run, args=(job.write,), name=f"save {target.name}").start()
    else:
        pending.run(job.write)
        pending.wait()
    return pending


def finish_saves(sharded: Sharded) -> None:
    """Wait for an asynchronous save of this model.

    Raises:
        CheckpointError: It failed.
    """
    pending = _pending.pop(sharded, None)
    if pending is not None:
        pending.wait()


def remove_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Delete a sharded checkpoint, on one rank. Under its name it is whole or gone, whenever the process is killed.

    An older one is safe to remove when the save of the newer one is done: `PendingSave.wait`.

    Returns:
        Whether it was one; anything else is left alone.

    Raises:
        CheckpointError: It cannot be removed.
    """
    return atomic.remove(Path(path))


def begin(path: str | os.PathLike[str]) -> tuple[Path, Path]:
    """Make a draft that every rank sees. Collective.

    Args:
        path: Path of the checkpoint; that of rank 0 is used.

    Returns:
        The draft, and the final place: the target where `path` is a link.

    Raises:
        CheckpointError: On every rank: nothing can be saved there.
    """
    rank = dist.get_rank()

    def on_rank_0() -> tuple[Path, Path]:
        place = atomic.real(path)
        return atomic.begin_draft(place), place

    made = gather_objects(_on_all_ranks(lambda: on_rank_0() if rank == 0 else None))[0]
    if made is None:
        raise CheckpointError("Rank 0 made no draft. This is a defect; please report it.")

    draft, target = made

    def see() -> None:
        deadline_s = time.monotonic() + _SEEN_WITHIN_S
        while not draft.is_dir():
            if time.monotonic() > deadline_s:
                raise CheckpointError(
                    f"`{draft.parent}` is not the same folder here as on rank 0: what is made there does not appear. "
                    "Save to a file system that all nodes share."
                )
            time.sleep(0.05)

    try:
        run_on_all_ranks(see)
    except BaseException:
        if rank == 0:
            atomic.abort(draft)
        raise
    return draft, target


def _on_all_ranks(action: Callable[[], T]) -> T:
    """`run_on_all_ranks`, with every failure of one rank as a `CheckpointError`."""

    def attempt() -> T:
        try:
            return action()
        except CheckpointError:
            raise
        except (OSError, RuntimeError, TypeError, ValueError, AttributeError, pickle.PicklingError) as error:
            raise CheckpointError(f"Nothing was saved: {type(error).__name__}: {error}") from error

    return run_on_all_ranks(attempt)


def _make_planner(
    sharded: Sharded, optimizers: Optimizers, model_state: Mapping[str, Any] | None, is_copied: bool
) -> ShardedSavePlanner:
    found = local_state(sharded, optimizers, None if model_state is None else dict(model_state))
    if optimizers:  # weights alone resume no training
        found.values[rng.KEY], copies = rng.save_rng(dist.get_rank(), sharded.generators)
        found.copies.update(copies)
    return ShardedSavePlanner(found, host=_host_memory.setdefault(sharded, HostCopyPool()) if is_copied else None)


def _manifest_of(sharded: Sharded, optimizers: Optimizers) -> Manifest:
    scopes = sharded.scopes
    return Manifest(
        step=sharded.steps_done,
        world_size=scopes.world_size,
        scopes={"params": scopes.params, "grads": scopes.grads, "optimizer": scopes.optimizer},
        package_version=package_version(),
        torch_version=str(torch.__version__),
        files={},
        pending_micro_steps=sharded.pending_micro_steps,
        optimizer_classes=[class_name(type(optimizer)) for optimizer in by_key(optimizers).values()],
    )


def _copied(extra: Mapping[str, Any], is_copied: bool) -> Mapping[str, Any]:
    return pickle.loads(pickle.dumps(extra)) if is_copied else extra


@dataclass(frozen=True, slots=True, kw_only=True)
class _SaveJob:
    """What one rank does for a save.

    It asks nothing of the default process group, which may be gone when a thread gets to it.
    """

    draft: Path
    path: Path
    planner: ShardedSavePlanner
    manifest: Manifest
    extra: Mapping[str, Any]
    channel: StoreChannel
    rank: int

    def write(self) -> None:
        """Write this rank's share; on rank 0, publish the whole. Ends when it is whole, or never will be."""
        try:
            outcome = self._written()
        finally:
            if self.rank == 0:
                atomic.abort(self.draft)  # where it was not published
        if outcome:
            raise CheckpointError(outcome)

    def _written(self) -> str:
        """Write; what went wrong, in words."""
        telling, rank = self.channel, self.rank
        with telling.heartbeat():
            try:
                told = self._write_shard(rank).to_json()
            except BaseException as error:
                told = shard_report.failed(f"Rank {rank} could not write `{self.path}`: {error}")
            telling.send(f"share {rank}", told.encode())
            if rank == 0:
                telling.send("outcome", self._finalize().encode())
            return telling.recv("outcome", 0).decode()

    def _write_shard(self, rank: int) -> ShardReport:
        if not self.planner.plan.items:
            return ShardReport(self.planner.plan, [], {})
        writer = FileSystemWriter(self.draft)
        writer.set_up_storage_writer(rank == 0, rank=rank, use_collectives=False)
        results = writer.write_data(writer.prepare_local_plan(self.planner.plan), self.planner).value()
        names = sorted({result.storage_data.relative_path for result in results})
        return ShardReport(self.planner.plan, results, {name: atomic.entry_of(self.draft / name) for name in names})

    def _finalize(self) -> str:
        """Publish when all ranks have written; what went wrong, in words, else."""
        try:
            found = []
            for rank in range(self.manifest.world_size):
                told = self.channel.recv(f"share {rank}", rank)
                self.channel.delete(f"share {rank}")
                found.append(shard_report.shard_report_from(told.decode(errors="replace"), rank))
            self._write_metadata(found)
            atomic.commit(self.draft, self.path)
        except BaseException as error:
            is_told = isinstance(error, MiCSError)
            return str(error) if is_told else f"Rank 0 could not finish `{self.path}`: {error!r}"
        return ""

    def _write_metadata(self, found: Sequence[ShardReport]) -> None:
        """Write what describes the whole: torch's metadata, everything else, the manifest."""
        files = {name: entry for share in found for name, entry in share.files.items()}
        _, metadata = self.planner.create_global_plan([share.plan for share in found])
        FileSystemWriter(self.draft).finish(metadata, [list(share.results) for share in found])
        torch.save(dict(self.extra), self.draft / EXTRA)
        atomic.sync(self.draft / EXTRA)
        for name in (".metadata", EXTRA):
            files[name] = atomic.entry_of(self.draft / name)
        atomic.write_manifest(self.draft, dataclasses.replace(self.manifest, files=files))
