"""How a process becomes a member of a job: as one that begins it, or as a newcomer that waits until it is let in."""

from __future__ import annotations

import dataclasses
import json
import os
import time
import uuid
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from mics_strategy.comm.consensus import gather_objects, run_on_all_ranks
from mics_strategy.errors import CommunicationError, ConfigError
from mics_strategy.recovery.generation_store import own_client
from mics_strategy.recovery.joining import JOB, Terms, answer_to, apply, store_of_job
from mics_strategy.recovery.membership import BEAT_S, Agreement, LossPolicy, Membership, Silence
from mics_strategy.recovery.peer_sockets import PeerSockets

T = TypeVar("T")
_CONNECT_S = 30.0  # to the store of a job
_NUM_LOSSES = 3  # times in which the first member of a job would have been replaced, if any other lived


@dataclasses.dataclass(frozen=True, slots=True)
class Admission:
    """What a newcomer needs to become a member.

    Attributes:
        membership: Its view of the job, before the generation in which it is a member.
        agreement: Agreement of the job, which invites it.
        generation: Generation of the job that this agreement has ended.
        terms: Properties of the job that it takes over before process groups are made.
    """

    membership: Membership
    agreement: Agreement
    generation: int
    terms: Terms


def begin_job(policy: LossPolicy) -> Membership:
    """Begin a job of all ranks of the default group. Collective."""
    rank = dist.get_rank()
    launched_with = dist.distributed_c10d._get_default_store()
    client = own_client(launched_with)
    sockets = PeerSockets(rank, client)
    greetings = gather_objects((uuid.uuid4().hex, sockets.address), "Recovery")
    name, addresses = greetings[0][0], {number: address for number, (_, address) in enumerate(greetings)}
    store = store_of_job(client, name)
    sockets.connect(addresses, name)
    membership = Membership(rank, list(addresses), 0, store, sockets, policy)
    membership.launched_with = launched_with
    if rank == 0:
        for number, address in addresses.items():
            store.set(f"address/{number}", json.dumps(address))
        store.add("numbers", len(addresses))
        store.set("full size", str(policy.full_size))
        store.set("running", json.dumps(list(addresses)))
        client.set(JOB, name)  # from now on newcomers find it
        if isinstance(client, TCPStore) and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            print(f"`{policy.caller}`: rank 0 holds the store of this job, which ends with it.", flush=True)
    return membership


def join_job(address: str, policy: LossPolicy, description: Mapping[str, str]) -> Admission:
    """Ask a running job to let in all ranks of the default group, and wait for its answer. Collective.

    Args:
        address: Host and port of the store of the running job.
        policy: How the job loses processes.
        description: See `joining.describe`.

    Raises:
        ConfigError: No job with `Recovery` is found there, or it refuses this block. Raised on every rank.
        CommunicationError: A rank of this block was lost, or the job.
        SystemExit: The job has ended; a line says so.
    """
    client = run_on_all_ranks(lambda: _connect(address))
    name = gather_objects(run_on_all_ranks(lambda: _name_of_job(client, address)), "Recovery")[0]
    store = store_of_job(client, name)
    rank, size = dist.get_rank(), dist.get_world_size()
    first = gather_objects(int(store.add("numbers", size)) - size if rank == 0 else 0, "Recovery")[0]
    sockets = PeerSockets(first + rank, client)
    addresses = {first + other: found for other, found in enumerate(gather_objects(sockets.address, "Recovery"))}
    store.set(f"address/{first + rank}", json.dumps(sockets.address))
    running = json.loads(store.get("running"))
    known = {number: _parsed(store.get(f"address/{number}")) for number in running}
    sockets.connect(known | addresses, name)
    policy = dataclasses.replace(policy, full_size=int(store.get("full size")))
    membership = Membership(first + rank, list(addresses), -first, store, sockets, policy)
    index = -1
    if rank == 0:
        print(f"`{policy.caller}`: {size} ranks wait to join the job of {len(running)} ranks at {address}.", flush=True)
    gather_objects(None, "Recovery")  # now all ranks can be members
    if rank == 0:
        index = apply(store, list(addresses), description)
    return _wait_for_answer(membership, store, gather_objects(index, "Recovery")[0])


def _wait_for_answer(membership: Membership, store: Any, index: int) -> Admission:
    try:
        return _run_on_store(lambda: _poll_for_answer(membership, store, index), membership)
    except BaseException:
        membership.close()
        raise


def _poll_for_answer(membership: Membership, store: Any, index: int) -> Admission:
    silence, longest_s = Silence(store), _NUM_LOSSES * membership.policy.lost_after_s
    while (answer := answer_to(store, index)) is None:
        if store.check(["ended"]):
            _end_as_well()
        if membership.lacks_members:
            raise CommunicationError(
                "A rank of this node was lost while it waited to join a job. The job goes on; start the node again."
            )
        if silence.of(json.loads(store.get("running"))[0]) > longest_s:
            raise CommunicationError(
                f"The job that this node waits to join has been silent for {longest_s:.0f} s. Start it again from its "
                "newest checkpoint, with all nodes."
            )
        time.sleep(BEAT_S)
    generation, terms = answer
    return Admission(membership, membership.agreement_behind(generation), generation, terms)


def _run_on_store(action: Callable[[], T], membership: Membership) -> T:
    """Run an action that uses the store of a job, which may end meanwhile.

    Raises:
        CommunicationError: A member of the job has died, and the store is gone.
        SystemExit: The store is gone, and no member had died.
    """
    try:
        return action()
    except dist.DistError as error:
        time.sleep(2 * BEAT_S)  # by then connections that have ended are known
        if membership.has_seen_death:
            raise CommunicationError(
                f"The store of the job that this node waits to join is gone, and ranks of the job have died ({error}). "
                "Start the job again from its newest checkpoint, with all nodes."
            ) from error
        _end_as_well()


def _end_as_well() -> NoReturn:
    if dist.get_rank() == 0:
        print("The job to join has ended before it let this node in, which ends as well.", flush=True)
    raise SystemExit(0)


def _connect(address: str) -> TCPStore:
    host, _, port = address.rpartition(":")
    if not (host and port.isdigit()):
        raise ConfigError(f"`join={address!r}` is no address. Use host and port of a store, such as 'node-0:29500'.")
    try:
        return TCPStore(host, int(port), None, False, timedelta(seconds=_CONNECT_S), False)
    except dist.DistError as error:
        raise ConfigError(
            f"`join={address!r}`: no store answers there ({error}). Use MASTER_ADDR and MASTER_PORT of the running job."
        ) from error


def _name_of_job(client: TCPStore, address: str) -> str:
    if not client.check([JOB]):
        raise ConfigError(
            f"`join={address!r}`: the store there is used by no job with `Recovery`. Start that job first, without "
            "`join`, or look for its MASTER_ADDR and MASTER_PORT."
        )
    return client.get(JOB).decode()


def _parsed(text: bytes) -> tuple[str, int]:
    host, port = json.loads(text)
    return host, port
