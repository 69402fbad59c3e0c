"""A training that begins again, in the same processes, when a node is lost.

    left     train() -- a node dies | collectives end, agreement | who waits is let in, new groups | train()
    spare    waits ............................................................ is let in, groups | train()

Nothing of the interrupted training is used: `train` makes model, shards and optimizers anew, for the ranks that there
are, and continues from its newest snapshot or checkpoint. So it may use any preset, engine and framework.
"""

from __future__ import annotations

import functools
import gc
import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch.distributed as dist

from mics_strategy.checkpoint.save import abandon_saves
from mics_strategy.comm.consensus import check_equal, gather_objects, run_on_all_ranks
from mics_strategy.comm.resources import abandon_groups, backend_of_default_group
from mics_strategy.comm.transport import backend_of, timeout_of
from mics_strategy.engine.setup.resolve import node_name
from mics_strategy.errors import CommunicationError, ConfigError
from mics_strategy.recovery.entering import begin_job, join_job
from mics_strategy.recovery.joining import Terms, describe_block
from mics_strategy.recovery.membership import Agreement, LossPolicy, Membership, check_lost_after, is_member
from mics_strategy.snapshots import job_folder
from mics_strategy.snapshots.job import TrainingCounts
from mics_strategy.snapshots.memory import abandon_snapshots
from mics_strategy.topology import RankLocation, topology_from_locations

T = TypeVar("T")
_MAX_FAILURES = 2  # within that time, while nobody is lost
_FAILURES_WITHIN_S = 600.0
_POLL_S = 0.05


def restart_on_loss(
    train: Callable[[], T], *, join: str | None = None, wait_for_node_s: float = 0.0, lost_after_s: float = 5.0
) -> T:
    """Run a training, and run it again with the ranks that are left whenever a node is lost. Collective.

    A lost rank takes its node along; in a job of one node it is lost alone. `train` begins with a new default group,
    in which ranks have other numbers, and continues where it finds that it was: `MemorySnapshots.load`.

    Args:
        train: The training, with all that it makes: it must not use models, groups or snapshots from outside.
        join: Host and port of the store of a running job, such as ``"node-0:29500"``. The ranks of this one, a node,
            take the place of a node that is lost, or was; until then they wait as a spare. None to begin a job.
        wait_for_node_s: How long the others wait for such a node before they begin with fewer ranks, seconds.
        lost_after_s: Silence after which a process counts as lost, seconds. A process is silent while a call holds the
            interpreter's lock.

    Returns:
        What `train` has returned, when it has ended on all ranks.

    Raises:
        ConfigError: An option is invalid, or the backend is not gloo; or the running job refuses this node.
        CommunicationError: This process shares a node with one that was lost; or the job to join was lost.
        SystemExit: The job to join has ended.

    Cost:
        Two small requests to the job's store every 0.2 s; an idle connection to every other process. After a loss: new
        groups, and what `train` does until it is where it was.
    """
    policy, is_one_node = _policy_of(wait_for_node_s, lost_after_s, begins=join is None)
    name = getattr(train, "__qualname__", type(train).__qualname__)
    description = {**describe_block(policy.block), "function": f"{train.__module__}.{name}"}
    backend, counts = backend_of_default_group(), TrainingCounts.now()
    if join is None:
        job = _Job(begin_job(policy), description, backend, wait_for_node_s)
    else:
        admission = join_job(join, policy, description)
        job = _Job(admission.membership, description, backend, wait_for_node_s)
        job.admitted, is_one_node = (admission.generation, admission.agreement), admission.terms.is_one_node
    job.is_one_node = is_one_node
    try:
        job.regroup("at the beginning")
        while True:
            results: list[T] = []
            failure = job.run(functools.partial(_append, results, train))
            if failure is None or job.has_ended(failure):
                job.announce_end()
                return results[0]
            counts.restore()
    except BaseException:
        job.leave()
        raise
    finally:
        job.close()


def _append(results: list[T], train: Callable[[], T]) -> None:
    results.append(train())


def _policy_of(wait_for_node_s: float, lost_after_s: float, *, begins: bool) -> tuple[LossPolicy, bool]:
    """How the job loses processes, and whether it is one node, after a check of the options on all ranks.

    Raises:
        ConfigError: An option is invalid, or the job is none that can begin again. On every rank.
    """
    timeout = timeout_of(dist.group.WORLD, "cpu")

    def check() -> tuple[str, dict[str, str]]:
        if backend_of(dist.group.WORLD, "cpu") != "gloo" or "nccl" in dist.get_backend_config():
            raise ConfigError(
                f"`restart_on_loss` needs gloo, and this job has `{dist.get_backend_config()}`. Use `MemorySnapshots` "
                "and `torchrun --max-restarts`, which start the processes again."
            )
        check_lost_after(lost_after_s)
        if not 0 <= wait_for_node_s < timeout.total_seconds():
            raise ConfigError(
                f"`wait_for_node_s={wait_for_node_s}` must be 0 or more, and less than the timeout of the default "
                f"group, {timeout.total_seconds():.0f} s."
            )
        if is_member():
            raise ConfigError("This process already uses `Recovery` or `restart_on_loss`. Use one of them.")
        return node_name(), {"wait_for_node_s": str(wait_for_node_s), "lost_after_s": str(lost_after_s)}

    nodes, options = zip(*gather_objects(run_on_all_ranks(check), "restart_on_loss"), strict=True)
    check_equal(options)
    per_node = topology_from_locations([RankLocation(node=node) for node in nodes]).ranks_per_node
    is_one_node = per_node == len(nodes)
    block = (1 if is_one_node else per_node) if begins else len(nodes)
    return LossPolicy(block=block, lost_after_s=lost_after_s, timeout=timeout, full_size=len(nodes)), is_one_node


def _tell_frameworks(ranks_per_node: int) -> None:
    """Let frameworks know the places in the new default group, as a launcher would."""
    rank, size = dist.get_rank(), dist.get_world_size()
    (node, local), num_nodes = divmod(rank, ranks_per_node), size // ranks_per_node
    places = {
        **{"RANK": rank, "WORLD_SIZE": size, "GROUP_RANK": node, "GROUP_WORLD_SIZE": num_nodes},
        **{"LOCAL_RANK": local, "LOCAL_WORLD_SIZE": ranks_per_node},
    }
    os.environ.update({name: str(place) for name, place in places.items() if name in os.environ})
    if (states := sys.modules.get("accelerate.state")) is not None:  # one of the process, with its rank
        states.AcceleratorState._reset_state(reset_partial_state=True)
        states.GradientState._reset_state()


def _shortened(error: Exception) -> str:
    """What failed, without gloo's files, former ranks, details and advice."""
    text = re.sub(r"\[/\S*\] ?", "", str(error))
    return re.split(r" over | \(|\. ", text)[0].rstrip(": .") or type(error).__name__


class _Job:
    """The job of this process, from one default group to the next.

    Args:
        membership: Its processes.
        description: Description that a node must have to join; see `describe_block`.
        backend: Backend of the default group.
        wait_s: How long to wait for a node in place of a lost one, seconds.

    Attributes:
        admitted: Generation of the running job that has ended for a node that joins, and the agreement that ended it.
        is_one_node: Whether the job is one node, of any number of ranks.
    """

    def __init__(self, membership: Membership, description: Mapping[str, str], backend: str, wait_s: float) -> None:
        self.admitted: tuple[int, Agreement] | None = None
        self.is_one_node = False
        self._membership = membership
        self._description = description
        self._backend = backend
        self._wait_s = wait_s
        self._members = membership.members  # of the next generation
        self._known = list(membership.members)  # who is reported to be there
        self._failed_at_s: list[float] = []  # while nobody was lost
        self._has_begun = False
        self._own_error = ""  # of the script, in the training before
        membership.applications.description = description
        membership.commits = 0  # of trainings to their end
        membership.end_generation()
        abandon_groups()

    def run(self, train: Callable[[], None]) -> str | None:
        """Run the training to the end of all ranks. Returns what failed, if a rank was lost or a node waits."""
        try:
            train()
            self._membership.end_together()
        except CommunicationError as error:
            return _shortened(error)
        except Exception as error:
            if not self._membership.fails_soon():
                raise
            own_error = f"{type(error).__name__}: {error}"
            if own_error == self._own_error and not self._membership.has_lost_members:
                raise  # another rank has raised it, too, and has left just before
            self._own_error = own_error
            return _shortened(error)
        return None

    def has_ended(self, failure: str) -> bool:
        """Whether the training has ended on all ranks, behind a failure. If not, groups are made to begin it again.

        Raises:
            CommunicationError: This process leaves the job; or no process is lost, and it has failed several times.
        """
        before = self._membership.members
        agreement = self._agree()
        if agreement.commits:
            return True
        self._follow(agreement)
        gc.collect()  # models and optimizers of the training that has failed
        self.regroup(failure)
        now_s = time.monotonic()
        recent = [failed_s for failed_s in self._failed_at_s if now_s - failed_s < _FAILURES_WITHIN_S]
        self._failed_at_s = [*recent, now_s] if self._membership.members == before else []
        if len(self._failed_at_s) > _MAX_FAILURES:
            raise CommunicationError(
                f"The training has failed {len(self._failed_at_s)} times within {_FAILURES_WITHIN_S / 60:.0f} minutes, "
                f"while no process was lost: {failure}."
            )
        return False

    def _report(self, failure: str) -> None:
        """Print, on the first rank, who was lost, and who has joined."""
        members, known, self._known = self._membership.members, self._known, list(self._membership.members)
        gone, new = ({*known} - {*members}, {*members} - {*known})
        if dist.get_rank() or (members == known and not self._has_begun):
            return
        changes = [
            f"processes {', '.join(map(str, sorted(numbers)))} {what}"
            for numbers, what in ((gone, "are gone"), (new, "have joined"))
            if numbers
        ]
        print(
            f"`restart_on_loss`: {', '.join(changes) or 'no process is gone'} ({failure}). {len(members)} ranks begin "
            "the training again.",
            flush=True,
        )

    def _agree(self) -> Agreement:
        """End all that sends, and agree on who is left."""
        self._membership.fail(self._membership.generation)
        abandon_snapshots()
        abandon_saves()
        abandon_groups()
        return self._membership.agree()

    def regroup(self, failure: str) -> None:
        """Make a default group of the members that are left, and of nodes that wait to join. More may be lost.

        Args:
            failure: Failure before it, for a line.

        Raises:
            CommunicationError: This process leaves the job.
        """
        membership, num_failures = self._membership, 0
        terms = Terms.without_model(is_one_node=self.is_one_node)
        while True:
            ended, agreement = self.admitted or self._let_in()
            self.admitted = None
            self._follow(agreement)
            if agreement.lost:
                continue
            membership.begin(self._members, ended + 1)
            for index in agreement.invited:
                membership.applications.accept(int(index), ended, terms)
            try:
                membership.run_until_failure(self._make_group)
                break
            except RuntimeError:
                agreement = self._agree()
                num_failures += not agreement.lost
                if num_failures > _MAX_FAILURES:
                    raise
                self._follow(agreement)
        _tell_frameworks(dist.get_world_size() if self.is_one_node else membership.policy.block)
        self._report(failure)
        self._has_begun = True

    def _let_in(self) -> tuple[int, Agreement]:
        """Let in nodes that wait, in a generation without groups. Returns it, and the agreement that has ended it."""
        membership = self._membership
        membership.begin(self._members, membership.generation + 1)
        if membership.is_first:
            applications, deadline_s = membership.applications, time.monotonic() + self._wait_s
            num_missing = membership.policy.full_size - len(membership.members)
            applications.poll()  # it may have become the first one just now
            while (
                num_missing > sum(len(application.numbers) for application in applications.waiting)
                and time.monotonic() < deadline_s
                and not membership.lacks_members
            ):
                time.sleep(_POLL_S)
            applications.invite(membership.generation, self._description, num_missing)
        return membership.generation, membership.agree(for_newcomers=True)

    def _make_group(self) -> None:
        membership = self._membership
        rank, size = membership.members.index(membership.number), len(membership.members)
        timeout = membership.policy.timeout
        dist.init_process_group(self._backend, store=membership.store, rank=rank, world_size=size, timeout=timeout)

    def _follow(self, agreement: Agreement) -> None:
        """Go on with the members of an agreement.

        Raises:
            CommunicationError: This process is none of them.
        """
        self._members = agreement.members
        number = self._membership.number
        if number not in self._members:
            raise CommunicationError(
                f"Processes {', '.join(map(str, agreement.lost))} were lost, and process {number} shares a node with "
                f"one of them. The {len(self._members)} ranks of whole nodes go on; this process leaves."
            )

    def announce_end(self) -> None:
        """Let nodes that wait to join know that the training has ended, and remove its snapshots."""
        self._membership.announce_end()
        job_folder.remove_ended()

    def leave(self) -> None:
        """Let the others go on at once, though this process may live on, and hold its snapshots."""
        self._membership.fail(self._membership.generation)
        abandon_snapshots()

    def close(self) -> None:
        """End the watch over other processes."""
        self._membership.close()
