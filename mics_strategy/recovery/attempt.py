"""Optimizer steps that are run again when a rank was lost, and in front of which newcomers join.

All ranks pass a barrier behind the reductions and the clipping of a step, right in front of the first optimizer's
update. A rank that has passed it knows that every rank has reached it, with final gradients; what follows, the update
of its own shards, needs no other rank. So when a rank dies, either some rank has passed the barrier, and all others
update as well, or none has, and all run the step again from its beginning. An attempt without an update has the barrier
at its end.

            forward  backward  second hop  clipping | barrier | update of shards, scheduler   next forward
    lost in  --------- run again without it --------|         |------ the step counts, continue without it -----

The barrier also tells all ranks whether the first one has invited newcomers. Then they end the generation together in
front of the next attempt, where all that a script has counted is counted on all ranks.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from mics_strategy.comm.consensus import run_on_all_ranks
from mics_strategy.comm.host_messages import has_open_messages
from mics_strategy.comm.process_groups import ProcessGroups
from mics_strategy.comm.resources import CommResources, abandon_groups, backend_of_default_group
from mics_strategy.comm.transport import GlooTransport, backend_of, timeout_of
from mics_strategy.engine.handle import Sharded
from mics_strategy.engine.module_buffers import LARGE_BYTES
from mics_strategy.engine.rebuild import rebuild
from mics_strategy.errors import CommunicationError, ConfigError, LifecycleError
from mics_strategy.recovery.entering import begin_job, join_job
from mics_strategy.recovery.joining import Terms, describe
from mics_strategy.recovery.membership import Agreement, LossPolicy, Membership, check_lost_after, is_member
from mics_strategy.recovery.states import RankStates, StateBytes, Stateful
from mics_strategy.recovery.survivors import block_size, check_recoverable, resize, sources

_BARRIER_TAG = 1
_MAX_FAILURES = 2  # to make process groups, while nobody is lost


@dataclass(slots=True)
class Attempt:
    """One attempt of an optimizer step, or of something else that talks to other ranks.

    Attributes:
        completed: Whether the step counts, known behind the attempt. If not, run it again.
    """

    completed: bool = False

    def micro_batches(self, count: int) -> list[tuple[int, float]]:
        """The micro-batches that this rank runs in this step, of `count` that the job has on any number of ranks.

        Ranks take turns. Where `count` is no multiple of the ranks, some run one of them with the weight 0, since all
        ranks must run as many backwards.

        Args:
            count: Micro-batches of all ranks together in a step.

        Returns:
            Number of each micro-batch, from 0, and the weight of its loss. With weighted losses, the gradient is the
            mean over all `count`.

        Raises:
            ConfigError: `count` is less than 1.
        """
        if count < 1:
            raise ConfigError(f"`micro_batches({count})` is no batch. Use 1 or more.")
        rank, world_size = dist.get_rank(), dist.get_world_size()
        weighted = [(number, world_size / count) for number in range(rank, count, world_size)]
        return weighted + [(rank % count, 0.0)] * (-(-count // world_size) - len(weighted))


class Recovery:
    """Lets training go on in the same processes when ranks die, or when others join. Collective.

    The ranks that are left have a copy of all states, in their memory, and continue with it. A lost rank takes its node
    along, and its partition group. The mean of gradients is over the ranks that there are: the global batch is another
    one then, unless `Attempt.micro_batches` deals it out.

    Args:
        sharded: Model, the only one of this process.
        optimizers: Its optimizers.
        state: Other objects of the training by name, whose state a newcomer gets: schedulers, counters, samplers. Their
            `state_dict` is plain data and dense tensors.
        join: Host and port of the store of a running job, such as ``"node-0:29500"``, which the ranks of this one join:
            a node, or a partition group. None to begin a job.
        allows_one_copy: Whether a job may begin with one copy of the states, since others will join. Until then a loss
            ends it.
        lost_after_s: Silence after which a process counts as lost, seconds. A process is silent while a call holds the
            interpreter's lock.

    Raises:
        ConfigError: The job has no second copy of the states, or uses something that cannot be recovered; or the
            running job refuses this one, which has sharded something else.
        CommunicationError: The job to join, or a rank of this one, was lost.
        SystemExit: The job to join has ended.

    Cost:
        A barrier per optimizer step; two small requests to the job's store every 0.2 s. A copy of the model's buffers.
        To join: the time until the running job begins its next attempt. A newcomer receives the states of its ranks.
    """

    def __init__(
        self,
        sharded: Sharded,
        optimizers: Iterable[Optimizer],
        *,
        state: Mapping[str, Stateful] | None = None,
        join: str | None = None,
        allows_one_copy: bool = False,
        lost_after_s: float = 5.0,
    ) -> None:
        optimizers, scopes = list(optimizers), sharded.scopes
        self._sharded = sharded
        self._states = RankStates(sharded, optimizers, dict(state or {}))
        run_on_all_ranks(lambda: self._check(optimizers, lost_after_s, allows_one_copy or join is not None))
        self._backend = backend_of_default_group()
        self._timeout = timeout_of(dist.group.WORLD, "cpu")
        self._is_one_node = block_size(scopes) < scopes.ranks_per_node
        self._agreement: Agreement | None = None  # on members of whom groups are to be made
        self._is_growing = False  # whether all ranks end the generation in front of the next attempt
        self._has_committed: bool | None = None  # in this attempt; None outside of attempts
        self._buffers = _BufferCopies(sharded.model)
        self._hooks: list[RemovableHandle] = []
        block = block_size(scopes) if join is None else scopes.world_size
        policy = LossPolicy(block=block, lost_after_s=lost_after_s, timeout=self._timeout)
        self._membership: Membership
        if join is None:
            self._membership = begin_job(policy)
        else:
            self._join(join, policy)
        weakref.finalize(self, self._membership.close)  # at the end of the process as well
        self._hooks += [optimizer.register_step_pre_hook(self._commit) for optimizer in optimizers]

    def _check(self, optimizers: list[Optimizer], lost_after_s: float, allows_one_copy: bool) -> None:
        _check(self._sharded, optimizers, lost_after_s, allows_one_copy)
        self._states.check_others()

    def _join(self, address: str, policy: LossPolicy) -> None:
        """Become a member of a running job, in front of one of its attempts."""
        admission = join_job(address, policy, describe(self._sharded, self._states, policy.block))
        self._membership = admission.membership
        self._agreement, self._is_one_node = admission.agreement, admission.terms.is_one_node
        self._membership.end_generation()
        try:
            abandon_groups()
            admission.terms.apply(self._sharded)
            self._regroup(admission.generation)
        except BaseException:
            self._membership.close()  # the other ranks wait for this one while it seems to live
            raise
        if self._membership.members.index(self._membership.number) % policy.block == 0:
            print(f"`Recovery`: this node has joined, in a job of {dist.get_world_size()} ranks now.", flush=True)

    @contextmanager
    def attempt(self) -> Iterator[Attempt]:
        """Run one optimizer step, of all its micro-steps, in this context; or an evaluation, a save.

        When a rank is lost, the context ends early, without an error, once the other ranks are ready to continue. Ranks
        have other numbers then. Random generators of torch and buffers of the model are as before, unless the step
        counts. Newcomers join in front of an attempt, when the context is entered.

        Yields:
            The attempt, which says behind the context whether the step counts.

        Raises:
            CommunicationError: No complete copy of the states is left, or this rank's node or partition group has lost
                a rank.
        """
        if self._is_growing:
            self._grow()
        attempt, steps, failure = Attempt(), self._membership.commits, "noticed in a step that needed them no more"
        random_state = torch.get_rng_state()
        self._buffers.save()
        self._has_committed = False
        try:
            yield attempt
            if not self._has_committed:
                self._pass_barrier()
            attempt.completed = True
        except Exception as error:
            if not (isinstance(error, CommunicationError) or self._membership.fails_soon()):
                raise
            agreement = self._agreement or self._agree()
            if not agreement.lost and not isinstance(error, CommunicationError):
                raise
            attempt.completed = self._membership.commits > steps
            failure = str(error).partition("[/")[0].partition(" over ")[0]  # without gloo's file and former ranks
        finally:
            self._has_committed = None
        if self._agreement is not None:
            members = self._membership.members
            if not attempt.completed:
                self._check_goes_on(self._agreement)
            self._regroup(self._membership.generation)
            step = "counts" if attempt.completed else "is run again"
            self._report(members, failure, f"the step {step}", None)
            if not attempt.completed:
                torch.set_rng_state(random_state)
                self._buffers.restore()

    def _grow(self) -> None:
        """End the generation together with all other ranks, and make groups with the newcomers."""
        members = self._membership.members
        self._agreement = self._membership.agree(for_newcomers=True)
        self._check_goes_on(self._agreement)
        abandon_groups()
        sent = self._regroup(self._membership.generation)
        self._report(members, "in front of a step, as others joined", "no step was interrupted", sent)

    def _report(self, before: list[int], failure: str, step: str, sent: StateBytes | None) -> None:
        """Print, on the first rank, who was lost, who has joined, and what follows."""
        if dist.get_rank():
            return
        gone = ", ".join(str(number) for number in before if number not in self._membership.members)
        new = ", ".join(str(number) for number in self._membership.members if number not in before)
        changes = [f"processes {gone} are gone ({failure})"] if gone else []
        if new and sent is not None:
            changes.append(
                f"processes {new} have joined, and got {sent.tensor_bytes} bytes of states (planned: "
                f"{sent.planned_bytes}) and {sent.text_bytes} bytes of names and numbers"
            )
        text = ", ".join(changes) or f"no process is gone ({failure})"
        print(f"`Recovery`: {text}. {dist.get_world_size()} ranks continue; {step}.", flush=True)

    def close(self) -> None:
        """End the watch over other processes. Call it when the training has ended.

        While an exception passes, as in ``finally``, this process leaves, and the others go on.
        """
        if sys.exc_info()[0] is None:
            self._membership.announce_end()
        self._leave()

    def _leave(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._membership.close()

    def _agree(self) -> Agreement:
        """End all collectives, and agree on who goes on, and from which step."""
        self._membership.fail(self._membership.generation)
        abandon_groups()
        self._agreement = self._membership.agree()
        if self._membership.number not in self._agreement.newcomers:
            self._membership.commits = self._agreement.commits
        return self._agreement

    def _commit(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Hook before an optimizer's step: pass the barrier behind which the step counts."""
        if self._has_committed is None:
            raise LifecycleError("An optimizer stepped outside of `Recovery.attempt()`. Step inside of it.")
        if len(args) > 1 or kwargs.get("closure") is not None:
            raise ConfigError(
                f"`{type(optimizer).__name__}.step` got a closure, which runs backwards in the middle of a step. "
                "`Recovery` needs steps without one."
            )
        is_next = self._sharded.internals.engine.finish_gradients()
        if self._has_committed:
            if is_next:
                raise LifecycleError(
                    "A second backward and optimizer step began in one `Recovery.attempt()`, of which only the first "
                    "would be kept when a rank is lost. Use an attempt for each."
                )
            return
        self._pass_barrier()

    def _pass_barrier(self) -> None:
        """Make the attempt count on all ranks, or on none.

        Raises:
            CommunicationError: A rank was lost, and the attempt does not count.
        """
        group, steps = self._sharded.internals.groups.world_group, self._membership.commits
        try:
            has_invited = self._membership.is_first and self._invite()
            if group is not None:
                has_invited = cast("GlooTransport", group.transport).any_of(has_invited, _BARRIER_TAG)
            self._membership.commits, self._is_growing = steps + 1, has_invited
        except RuntimeError as error:
            if self._agree().commits == steps:
                raise CommunicationError(f"A barrier over all ranks failed: {error}.") from error
        self._has_committed = True

    def _invite(self) -> bool:
        """Invite the newcomers that fit; refuse the others. Returns whether any fits."""
        membership = self._membership
        if not membership.applications.waiting:
            return False
        try:
            description = describe(self._sharded, self._states, membership.policy.block)
        except ConfigError as error:
            membership.applications.refuse(str(error))
            return False
        return membership.applications.invite(membership.generation, description)

    def _regroup(self, generation: int) -> StateBytes | None:
        """Make process groups of the members behind a generation. Another rank may be lost meanwhile.

        Returns:
            What newcomers have got; None where there are none.
        """
        sent, num_failures = None, 0
        while (agreement := self._agreement) is not None:
            self._agreement, self._is_growing = None, False
            self._check_stays(agreement)
            try:
                self._membership.begin(agreement.members, generation + 1)
                for index in agreement.invited:
                    terms = Terms.of(self._sharded, is_one_node=self._is_one_node)
                    self._membership.applications.accept(int(index), generation, terms)
                rebuild(self._sharded, self._membership.run_until_failure(self._make_groups))
                if agreement.newcomers:
                    sent = self._bring_states(agreement)
            except RuntimeError:
                generation = self._membership.generation
                num_failures += not self._agree().lost
                if num_failures == _MAX_FAILURES:
                    raise
        return sent

    def _bring_states(self, agreement: Agreement) -> StateBytes:
        """Send states to newcomers, or receive them."""
        membership = self._membership
        by_member = sources(agreement.members, agreement.newcomers, membership.policy.block)
        rank_of = {member: rank for rank, member in enumerate(agreement.members)}
        by_rank = {rank_of[target]: rank_of[source] for target, source in by_member.items()}
        sent = self._states.transfer(by_rank)
        membership.commits = agreement.commits
        return self._states.settle(sent, by_rank, membership.number)  # behind which no rank is without states

    def _make_groups(self) -> ProcessGroups:
        membership = self._membership
        rank, world_size = membership.members.index(membership.number), len(membership.members)
        dist.init_process_group(
            self._backend, store=membership.store, rank=rank, world_size=world_size, timeout=self._timeout
        )
        scopes = resize(self._sharded.scopes, world_size, is_one_node=self._is_one_node)
        return ProcessGroups(scopes, CommResources(world_size, self._sharded.device), seed=0)

    def _check_goes_on(self, agreement: Agreement) -> None:
        """Raise where others have not been lost, but have finished: this rank counts steps otherwise."""
        if agreement.lost and self._membership.has_ended:
            self._leave()
            raise CommunicationError(
                f"Processes {', '.join(map(str, agreement.lost))} have ended the training by `close()`, and process "
                f"{self._membership.number} has begun another attempt. Let all ranks run as many: count steps by "
                "`sharded.steps_done`, or put the counter into `state`, which newcomers get."
            )

    def _check_stays(self, agreement: Agreement) -> None:
        number, lost = self._membership.number, ", ".join(map(str, agreement.lost))
        complete = set(agreement.members).difference(agreement.newcomers)
        if number in agreement.members and complete:
            return
        self._leave()
        if not complete:
            raise CommunicationError(
                f"Processes {lost} were lost, and no complete copy of the states is left: every node, or group of "
                f"{self._sharded.scopes.optimizer} ranks that shard optimizer states, has lost one. Start the job "
                "again from its newest checkpoint."
            )
        raise CommunicationError(
            f"Processes {lost} were lost, and process {number} shares a node or a partition group with one of them. "
            f"The {len(agreement.members)} ranks of whole ones go on; this process leaves."
        )


def _check(sharded: Sharded, optimizers: list[Optimizer], lost_after_s: float, allows_one_copy: bool) -> None:
    check_recoverable(sharded.config, sharded.scopes, allows_one_copy=allows_one_copy)
    check_lost_after(lost_after_s)
    if not optimizers or not all(isinstance(optimizer, Optimizer) for optimizer in optimizers):
        raise ConfigError(f"`optimizers={optimizers}` are no optimizers. Pass a list of those of the model.")
    stepped = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    missing = [p.mics_name for p in sharded.internals.parameters if p.requires_grad and id(p) not in stepped]
    if missing:
        raise ConfigError(
            f"`optimizers` lack the trained parameter `{missing[0]}`. An optimizer that `Recovery` does not know would "
            "update twice when a step is run again: pass all of them."
        )
    if sharded.device.type != "cpu" or backend_of(dist.group.WORLD, "cpu") != "gloo":
        raise ConfigError(f"`Recovery` needs a model on the CPU and gloo; this one is on {sharded.device}. Restart.")
    if is_member():
        raise ConfigError(
            "This process is already a member of a job that goes on without lost ranks: by `restart_on_loss`, or by "
            "another `Recovery`. Use one of them."
        )
    if has_open_messages():
        raise ConfigError(
            "`Recovery` ends all process groups when a rank is lost, and `MemorySnapshots`, which this process uses, "
            "has one of its own. Use one of them, or `close()` the other first."
        )
    if sharded.internals.groups.resources.watchdog.num_models > 1:
        raise ConfigError("`Recovery` needs one sharded model in a process, and this one has several.")


class _BufferCopies:
    """Copies of the buffers of a model, of before an attempt.

    Torch does not count the writes of all kernels (those of BatchNorm), so small buffers are copied each time.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._copies: dict[str, tuple[int, torch.Tensor]] = {}

    def save(self) -> None:
        """Copy the buffers, large ones only if they were written to since they were copied."""
        for name, buffer in self._model.named_buffers():
            version, copy = self._copies.get(name, (-1, buffer))
            is_large = buffer.numel() * buffer.itemsize >= LARGE_BYTES
            if not is_large or version != buffer._version or copy.shape != buffer.shape:
                self._copies[name] = buffer._version, buffer.detach().clone()

    def restore(self) -> None:
        """Bring back what was written to since."""
        with torch.no_grad():
            for name, buffer in self._model.named_buffers():
                version, copy = self._copies[name]
                if version != buffer._version or copy.numel() * copy.itemsize < LARGE_BYTES:
                    buffer.copy_(copy)
                    self._copies[name] = buffer._version, copy
