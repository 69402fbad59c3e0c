"""Saving of sharded checkpoints, synchronously or in the background.

Every rank writes its items into one file of the draft, and reports the file's contents to rank 0 through the job's
store. Rank 0 adds the metadata and commits the draft. No process group takes part: a pending save does not delay
training, and it completes even if the process groups are destroyed meanwhile.
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
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from mics_strategy.checkpoint import atomic, shard_report
from mics_strategy.checkpoint.delayed import add_delayed
from mics_strategy.checkpoint.feedback import add_feedback
from mics_strategy.checkpoint.islands import add_islands, check_same_step, with_islands
from mics_strategy.checkpoint.manifest import Manifest
from mics_strategy.checkpoint.random_states import RNG_KEY, save_rng
from mics_strategy.checkpoint.rank_local import class_name
from mics_strategy.checkpoint.references import references_of
from mics_strategy.checkpoint.save_planner import HostCopyPool, ShardedSavePlanner, check_replica_counts
from mics_strategy.checkpoint.shard_report import ShardReport, StoreChannel
from mics_strategy.checkpoint.state import SOLE, Optimizers, ReplicaId, by_key, local_state
from mics_strategy.checkpoint.whole_tensors import whole_tensors
from mics_strategy.comm.consensus import check_same_keys_across_ranks, gather_objects, run_on_all_ranks
from mics_strategy.engine.handle import Sharded
from mics_strategy.errors import CheckpointError, MiCSError
from mics_strategy.version import package_version

T = TypeVar("T")
EXTRA = "meta.pt"  # the name that Lightning's consolidation reads
_log = logging.getLogger(__name__)
_VISIBLE_WITHIN_S = 30.0  # until a folder of rank 0 is visible on another machine


def _reason(error: BaseException) -> str:
    """The text of an error, with that of the disk's, over which torch's writer raises another one."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, OSError):
        found = found.__context__
    return f"{error}" if found in (None, error) else f"{found} ({error})"


class PendingSave:
    """A checkpoint that is being written. The process does not exit before.

    Attributes:
        path: Final path of the checkpoint.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._failure: BaseException | None = None
        self._done = threading.Event()

    def run(self, write: Any) -> None:
        """Write the checkpoint, and record the failure if there is one."""
        try:
            write()
        except BaseException as error:
            self._failure = error
            _log.error("The checkpoint `%s` was not saved. %s", self.path, error)  # the script may never wait for it
        self._done.set()

    def is_done(self) -> bool:
        """Whether the save has ended, successfully or not."""
        return self._done.is_set()

    def wait(self) -> None:
        """Block until the checkpoint is completely on disk.

        Raises:
            CheckpointError: The checkpoint could not be written. Raised on every rank, with the rank that failed. An
                older checkpoint of that name is unchanged.
        """
        self._done.wait()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure


_pending: weakref.WeakKeyDictionary[Sharded, PendingSave] = weakref.WeakKeyDictionary()
_host_memory: weakref.WeakKeyDictionary[Sharded, HostCopyPool] = weakref.WeakKeyDictionary()
_channels: weakref.WeakKeyDictionary[Sharded, StoreChannel] = weakref.WeakKeyDictionary()  # of the last save


def abandon_saves() -> None:
    """Wait for all saves in the background, of which ranks were lost. Not collective. Whole checkpoints stay."""
    for pending in list(_pending.values()):
        with suppress(CheckpointError):  # logged; a rank is lost
            pending.wait()


def save_checkpoint(
    path: str | os.PathLike[str],
    sharded: Sharded,
    optimizers: Optimizers = (),
    extra: Mapping[str, Any] | None = None,
    *,
    model_state: Mapping[str, Any] | None = None,
    asynchronous: bool = False,
) -> PendingSave:
    """Write model, optimizers and random states as a checkpoint. Collective.

    The folder `path` appears only when everything is on disk. A previous pending save is waited for first, and its
    failure is raised. Gradients are not saved: if micro-steps are pending, rank 0 warns once, and loading warns.

    Args:
        path: Folder on a file system that all ranks share. Rank 0's path is used. A checkpoint there is replaced.
        sharded: Model.
        optimizers: Optimizers, in order or by key, as for loading. Random states are saved only with optimizers.
        extra: Other state of rank 0, such as schedulers, counters or the position in the data. Plain data and tensors
            load without running code. Sharded tensors, which all ranks must pass, become whole ones.
        model_state: State dict that replaces the model's own, such as a part of it, with equal names on all ranks.
        asynchronous: Return when everything is copied, and write in the background.

    Returns:
        The pending save. It is already done unless `asynchronous`.

    Raises:
        CheckpointError: A rank failed. Raised on every rank, with the rank that failed.

    Cost:
        Disk: with error feedback also every rank's residuals. If asynchronous, host memory for a copy of what this rank
        writes, which is used again: about 1 / world_size of the state, and the values of quantized states.
    """
    host = _host_memory.setdefault(sharded, HostCopyPool()) if asynchronous else None
    planner, whole = plan_save(sharded, optimizers, extra, model_state=model_state, host=host)
    draft, target = begin(path)
    job = _SaveJob(
        draft=draft,
        path=target,
        planner=planner,
        manifest=manifest_of(sharded, optimizers),
        extra=whole if dist.get_rank() == 0 else {},
        channel=StoreChannel(dist.distributed_c10d._get_default_store(), draft.name, dist.get_rank()),
        previous_channel=_channels.get(sharded),
        rank=dist.get_rank(),
    )
    _channels[sharded], pending = job.channel, PendingSave(target)
    if asynchronous:
        _pending[sharded] = pending
        threading.Thread(target=pending.run, args=(job.write,), name=f"save {target.name}").start()
    else:
        pending.run(job.write)
        pending.wait()
    return pending


def plan_save(
    sharded: Sharded,
    optimizers: Optimizers,
    extra: Mapping[str, Any] | None,
    *,
    model_state: Mapping[str, Any] | None,
    host: HostCopyPool | None,
    writers: Callable[[ReplicaId], ReplicaId] = lambda replica: replica,
) -> tuple[ShardedSavePlanner, Mapping[str, Any]]:
    """Agree on what is saved, and copy it if `host` is given. Collective; a pending save is waited for first.

    Args:
        sharded: Model.
        optimizers: See `save_checkpoint`.
        extra: See `save_checkpoint`.
        model_state: See `save_checkpoint`.
        host: See `ShardedSavePlanner`.
        writers: See `ShardedSavePlanner`.

    Returns:
        What this rank writes, and the extra state of rank 0 with whole tensors.
    """
    finish_saves(sharded)
    check_same_step(sharded)
    sharded.buffers.synchronize()
    check_same_keys_across_ranks("The names in `model_state`", model_state or ())  # otherwise a name may have no writer
    planner = _on_all_ranks(lambda: _make_planner(sharded, optimizers, model_state, host, writers))
    whole = whole_tensors(lambda: dict(extra or {}))
    whole = _on_all_ranks(lambda: _copy_extra(whole, host is not None))
    check_replica_counts(planner, sharded.internals)
    return planner, whole


def finish_saves(sharded: Sharded) -> None:
    """Wait for an asynchronous save of this model.

    Raises:
        CheckpointError: The save failed, or `sharded` is not what `shard()` returned.
    """
    if not isinstance(sharded, Sharded):
        raise CheckpointError(f"`sharded` is a {type(sharded).__name__}. Pass what `shard()` returned, after the path.")
    pending = _pending.pop(sharded, None)
    if pending is not None:
        pending.wait()


def remove_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Delete a sharded checkpoint. Call it on one rank.

    Under its name the checkpoint is complete or absent, even if the process is killed meanwhile. An older checkpoint
    can be removed as soon as the save of the newer one is done; see `PendingSave.wait`.

    Returns:
        Whether `path` was a checkpoint. Anything else is left unchanged.

    Raises:
        CheckpointError: The checkpoint cannot be removed.
    """
    return atomic.remove(Path(path))


def begin(path: str | os.PathLike[str]) -> tuple[Path, Path]:
    """Make a draft that every rank sees. Collective.

    Args:
        path: Path of the checkpoint. Rank 0's path is used.

    Returns:
        The draft, and the final path: the target if `path` is a symbolic link.

    Raises:
        CheckpointError: Nothing can be saved there. Raised on every rank.
    """
    rank = dist.get_rank()

    def on_rank_0() -> tuple[Path, Path]:
        final_path = atomic.real(path)
        return atomic.begin_draft(final_path), final_path

    made = gather_objects(_on_all_ranks(lambda: on_rank_0() if rank == 0 else None))[0]
    if made is None:
        raise CheckpointError("Rank 0 made no draft. This is a bug in mics_strategy; please report it.")

    draft, target = made

    def wait_until_visible() -> None:
        deadline_s = time.monotonic() + _VISIBLE_WITHIN_S
        while not draft.is_dir():
            if time.monotonic() > deadline_s:
                raise CheckpointError(
                    f"`{draft.parent}` is not the folder that rank 0 sees under this path: the draft that rank 0 made "
                    f"there is missing after {_VISIBLE_WITHIN_S:.0f} s. Save to a file system that all nodes share."
                )
            time.sleep(0.05)

    try:
        run_on_all_ranks(wait_until_visible)
    except BaseException:
        if rank == 0:
            atomic.abort(draft)
        raise
    return draft, target


def _on_all_ranks(action: Callable[[], T]) -> T:
    """`run_on_all_ranks`, with every failure converted to a `CheckpointError`."""

    def attempt() -> T:
        try:
            return action()
        except CheckpointError:
            raise
        except (OSError, RuntimeError, TypeError, ValueError, AttributeError, pickle.PicklingError) as error:
            raise CheckpointError(f"Nothing was saved: {type(error).__name__}: {error}") from error

    return run_on_all_ranks(attempt)


def _make_planner(
    sharded: Sharded,
    optimizers: Optimizers,
    model_state: Mapping[str, Any] | None,
    host: HostCopyPool | None,
    writers: Callable[[ReplicaId], ReplicaId],
) -> ShardedSavePlanner:
    sharded.internals.target.show_committed()
    local = local_state(sharded, optimizers, None if model_state is None else dict(model_state))
    if optimizers:  # without optimizers, no training is resumed
        sharded.internals.warn_pending_gradients()
        states = local.values[RNG_KEY] = save_rng(dist.get_rank(), sharded.internals.generators)
        local.copies.update({f"{RNG_KEY}.{name}": SOLE for name in states})
        add_feedback(local, sharded, dist.get_rank())
        local.values.update(references_of(sharded))
        add_delayed(local, sharded)
    add_islands(local, sharded, has_optimizers=bool(optimizers))
    return ShardedSavePlanner(local, host=host, writers=writers)


def manifest_of(sharded: Sharded, optimizers: Optimizers) -> Manifest:
    """Describe the run, without files."""
    scopes = sharded.scopes
    manifest = Manifest(
        step=sharded.steps_done,
        world_size=scopes.job_size,
        scopes=scopes.degrees,
        package_version=package_version(),
        torch_version=str(torch.__version__),
        files={},
        pending_micro_steps=sharded.internals.pending_micro_steps,
        optimizer_classes=[class_name(type(optimizer)) for optimizer in by_key(optimizers).values()],
    )
    return with_islands(manifest, sharded) if optimizers else manifest


def _copy_extra(extra: Mapping[str, Any], is_copied: bool) -> Mapping[str, Any]:
    return pickle.loads(pickle.dumps(extra)) if is_copied else extra


@dataclass(frozen=True, slots=True, kw_only=True)
class _SaveJob:
    """One rank's work in a save.

    It does not use the default process group, which may be destroyed before a background thread runs.
    """

    draft: Path
    path: Path
    planner: ShardedSavePlanner
    manifest: Manifest
    extra: Mapping[str, Any]
    channel: StoreChannel
    previous_channel: StoreChannel | None  # of a save that every rank has left
    rank: int

    def write(self) -> None:
        """Write this rank's shard; rank 0 also commits. Ends with the whole save."""
        try:
            outcome = self._write_and_report()
        finally:
            if self.rank == 0:
                atomic.abort(self.draft)  # unless it was committed
        if outcome:
            raise CheckpointError(outcome)

    def _write_and_report(self) -> str:
        """Write and exchange reports; return an error text, empty on success."""
        channel, rank = self.channel, self.rank
        with channel.heartbeat():
            try:
                report = self._write_shard(rank).to_json()
            except BaseException as error:
                report = shard_report.failed(f"Rank {rank} could not write `{self.path}`: {_reason(error)}")
            channel.send(f"share {rank}", report.encode())
            if rank == 0:
                channel.send("outcome", self._finalize().encode())
            return channel.recv("outcome", 0).decode()

    def _write_shard(self, rank: int) -> ShardReport:
        if not self.planner.plan.items:
            return ShardReport(self.planner.plan, [], {})
        writer = FileSystemWriter(self.draft)
        writer.set_up_storage_writer(rank == 0, rank=rank, use_collectives=False)
        results = writer.write_data(writer.prepare_local_plan(self.planner.plan), self.planner).value()
        names = sorted({result.storage_data.relative_path for result in results})
        return ShardReport(self.planner.plan, results, {name: atomic.entry_of(self.draft / name) for name in names})

    def _finalize(self) -> str:
        """Commit when all ranks have written; return an error text, empty on success."""
        try:
            if self.previous_channel is not None:
                self.previous_channel.delete("outcome")  # not earlier, because no rank knows when the last one reads it
            messages = []  # of all ranks before any is read: one that still writes would make a removed draft anew
            for rank in range(self.manifest.world_size):
                messages.append(self.channel.recv(f"share {rank}", rank).decode(errors="replace"))
                self.channel.delete(f"share {rank}")
            self._write_metadata([shard_report.shard_report_from(text, rank) for rank, text in enumerate(messages)])
            atomic.commit(self.draft, self.path)
        except BaseException as error:
            is_explained = isinstance(error, MiCSError)
            return str(error) if is_explained else f"Rank 0 could not commit `{self.path}`: {error!r}"
        return ""

    def _write_metadata(self, reports: Sequence[ShardReport]) -> None:
        """Write torch's metadata, the extra state and the manifest."""
        files = {name: entry for report in reports for name, entry in report.files.items()}
        _, metadata = self.planner.create_global_plan([report.plan for report in reports])
        FileSystemWriter(self.draft).finish(metadata, [list(report.results) for report in reports])
        torch.save(dict(self.extra), self.draft / EXTRA)
        atomic.sync(self.draft / EXTRA)
        for name in (".metadata", EXTRA):
            files[name] = atomic.entry_of(self.draft / name)
        atomic.write_manifest(self.draft, dataclasses.replace(self.manifest, files=files))
