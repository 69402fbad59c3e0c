"""Detection of ranks that diverge: fingerprints of collectives, and a watchdog.

A rank that runs other units than its peers submits other collectives. Where the sizes agree, the transport does not
notice, and a unit receives the parameters of another unit. So each group keeps a fingerprint of its collectives. One
number per rank, sent along with a payload that is sent anyway, shows whether the fingerprints of all groups agree.

The watchdog finds ranks that wait for each other: a rank that waits long publishes what it waits for in the store of
the job, and compares it with the reports of its peers.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
import zlib
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch.distributed as dist

from mics_strategy.errors import LifecycleError

_logger = logging.getLogger(__name__)
STEPS = "optimizer steps"  # name of the fingerprint that counts them
_MODULUS = (1 << 18) - 5  # the digests of a thousand ranks fit into 32 bits


@dataclass(slots=True, kw_only=True)
class CollectiveFingerprint:
    """The collectives that one group has submitted, as this rank knows them.

    Attributes:
        ranks: Ranks of the group.
        index: Index of this rank among them.
        is_ordered: Whether ranks submit them in one order. Else they are what each rank does for itself, such as
            writes to its rows.
        count: Collectives so far.
        recent: Payloads of the last 256 collectives.
    """

    ranks: tuple[int, ...]
    index: int
    is_ordered: bool = True
    count: int = 0
    recent: deque[str] = field(default_factory=lambda: deque(maxlen=256))
    _hash: int = 0

    def update(self, label: str) -> None:
        """Add one collective, with the payload `label`."""
        self.count += 1
        self.recent.append(label)
        code = zlib.crc32(label.encode(), self._hash if self.is_ordered else 0)
        self._hash = code if self.is_ordered else self._hash + code

    @property
    def digest(self) -> int:
        """A number that adds up to 0 over ranks of the group whose fingerprints agree.

        If they differ, the sum is not 0, except for 1 case in 250,000.
        """
        return zero_sum(self._hash, self.index, len(self.ranks))

    def describe(self, number: int) -> str:
        """The payload of collective `number`, as text."""
        start = self.count - len(self.recent)
        if number >= self.count:
            return "nothing"
        return f"`{self.recent[number - start]}`" if number >= start else "an older payload, no longer recorded"


def zero_sum(value: int, index: int, size: int) -> int:
    """A number that adds up to 0 over ranks with the same value.

    Over ranks with other values it hardly ever does.

    Args:
        value: What the rank has, at least 0; taken modulo a prime near 250,000.
        index: Index of the rank.
        size: Number of ranks.
    """
    residue = value % _MODULUS
    return residue * (size - 1) if index == 0 else -residue


def first_mismatch(fingerprints: Mapping[int, dict[str, CollectiveFingerprint]]) -> str:
    """The first collective in which two ranks of a group differ, as text.

    Args:
        fingerprints: Fingerprints by rank, then by name.
    """
    counts = {rank: by_name[STEPS].count if STEPS in by_name else 0 for rank, by_name in fingerprints.items()}
    fewest, most = min(counts, key=counts.__getitem__), max(counts, key=counts.__getitem__)
    if counts[fewest] != counts[most]:
        return (
            f"rank {fewest} has run {counts[fewest]} optimizer steps, rank {most} {counts[most]}. A rank without a "
            "loss (an empty batch) must also run a backward, of a loss that is zero: `(outputs.sum() * 0).backward()`"
        )
    for rank, by_name in fingerprints.items():
        for name, fingerprint in by_name.items():
            nothing = CollectiveFingerprint(ranks=fingerprint.ranks, index=0, is_ordered=fingerprint.is_ordered)
            first = fingerprints[fingerprint.ranks[0]].get(name, nothing)
            start = max(0, first.count - len(first.recent), fingerprint.count - len(fingerprint.recent))
            if not first.is_ordered:
                local, others = Counter(fingerprint.recent), Counter(first.recent)
                if first._hash != fingerprint._hash and local != others:
                    texts = [next(iter(only), "nothing else") for only in (others - local, local - others)]
                    return f"{name}: `{texts[0]}` on rank {first.ranks[0]}, `{texts[1]}` on rank {rank}"
                continue
            for number in range(start, max(first.count, fingerprint.count)):
                if first.describe(number) != fingerprint.describe(number):
                    return (
                        f"in collective {number} of {name}, rank {first.ranks[0]} sent {first.describe(number)}, "
                        f"rank {rank} sent {fingerprint.describe(number)}"
                    )
    return "they diverged before the oldest recorded collective"


QueueKey = tuple[str, frozenset[int]]
STALL_GRACE_S = 2.5  # for the reports of ranks that began to wait later
_POLL_S = 0.1
_NUM_KEPT = 64  # collectives of one queue key that are remembered


@dataclass(frozen=True, slots=True)
class OpId:
    """One submitted collective. It has a number in its queue and group, a label, a size and ranks."""

    queue: str
    number: int
    label: str
    size: str
    ranks: frozenset[int]

    @property
    def queue_key(self) -> QueueKey:
        """The queue and ranks within which it is numbered. Ranks that share a key number its collectives equally."""
        return self.queue, self.ranks

    def __str__(self) -> str:
        return f"the {self.label[0].lower()}{self.label[1:]}"

    def size_beside(self, other: OpId) -> str:
        """The size as text; empty where the labels distinguish it from `other`."""
        return f" of {self.size}" if self.label == other.label else ""


@dataclass(frozen=True, slots=True)
class _Report:
    """The report of a waiting rank.

    It has the awaited collective, collectives submitted by queue key, and backwards begun.
    """

    op: OpId
    counts: dict[QueueKey, int]
    num_backwards: int


class DesyncWatchdog:
    """Finds ranks that wait for each other, in the collectives of all models of a job.

    Args:
        rank: Rank of this process.

    Attributes:
        rank: Rank of this process.
        num_models: Models of the job so far. Reports and errors of before the last one was made do not count.
        num_backwards: Backwards that have begun on this rank.
    """

    def __init__(self, rank: int) -> None:
        self.num_models = 0
        self.rank = rank
        self._bounded = BoundedStore()
        self._store = self._bounded.store
        self._counts: Counter[QueueKey] = Counter()
        self._ops: defaultdict[QueueKey, deque[OpId]] = defaultdict(lambda: deque(maxlen=_NUM_KEPT))
        self.num_backwards = 0
        self._reported: OpId | None = None
        self._silent: set[int] = set()  # ranks that waited for nothing when the reports were last read

    def record(self, queue: str, label: str, size: str, ranks: frozenset[int]) -> OpId:
        """Number a collective that is submitted to a queue."""
        op = OpId(queue, self._counts[queue, ranks], label.split(" over ")[0], size, ranks)
        self._counts[op.queue_key] += 1
        self._ops[op.queue_key].append(op)
        return op

    def check(self, op: OpId) -> None:
        """Publish what this rank waits for, and compare it with the reports of its peers.

        Args:
            op: Collective for which this rank waits.

        Raises:
            LifecycleError: It will never complete: ranks have submitted different collectives.
        """
        self._reported = op
        message = self._bounded.run_within(lambda: self._compare(op))
        if message:
            raise LifecycleError(message)

    def warn(self, op: OpId) -> None:
        """Log that this rank waits long, and which ranks wait for nothing that the engine knows."""
        if self._silent:
            names = ", ".join(f"rank {rank}" for rank in sorted(self._silent))
            _logger.warning(
                "Rank %d waits for %s, and not yet known to take part: %s. If it calls or reads this alone (`if rank "
                "== 0:`), let all ranks do so; it waits until the timeout of the group otherwise.",
                *(self.rank, op, names),
            )

    def withdraw_report(self) -> None:
        """Withdraw the report: the collective for which this rank waited has completed."""
        if self._reported is not None:
            self._reported = None
            self._bounded.run_within(lambda: self._store.set(self._key(self.rank), ""))

    def check_absent(self, problem: str, ranks: Iterable[int]) -> None:
        """Check that ranks may still come to where this rank waits without a collective.

        Args:
            problem: Meaning of their absence, for errors.
            ranks: Ranks for which this one waits.

        Raises:
            LifecycleError: One of them waits for a collective that this rank has not submitted.
        """
        reports = [report for rank in ranks if (report := self._report_of(rank)) is not None]
        for op in (report.op for report in reports):
            if self.rank in op.ranks and self._counts[op.queue_key] <= op.number:
                self._store.set(self._key("desync"), problem)
        if message := self._desync_message():
            raise LifecycleError(message)

    def _compare(self, op: OpId) -> str:
        self._publish_report(op)
        for rank in sorted(op.ranks - {self.rank}):
            report = self._report_of(rank)
            if report is None:
                continue
            other, counterpart = report.op, self._op_numbered(report.op.queue_key, report.op.number)
            is_deadlock = (
                self.rank in other.ranks
                and report.counts.get(op.queue_key, 0) <= op.number
                and self._counts[other.queue_key] <= other.number
            )
            if counterpart is not None and (counterpart.label, counterpart.size) != (other.label, other.size):
                self._store.set(self._key("desync"), self._describe_desync(counterpart, rank, report))
            elif is_deadlock:
                self._store.set(self._key("desync"), self._describe_desync(op, rank, report))
        self._silent = self._silent_now(op)
        return self._desync_message()

    def _op_numbered(self, queue_key: QueueKey, number: int) -> OpId | None:
        """The collective of that number on this rank.

        It is None where it is not submitted yet, or no longer recorded.
        """
        return next((op for op in self._ops[queue_key] if op.number == number), None)

    def _describe_desync(self, op: OpId, rank: int, report: _Report) -> str:
        """The error message: what this rank and a peer wait for, and what to do."""
        local_wait, peer_wait = (self.rank, op, self.num_backwards), (rank, report.op, report.num_backwards)
        first, second = sorted([local_wait, peer_wait], key=lambda wait: wait[0])
        problem = (
            f"Ranks diverged and wait for each other forever: rank {first[0]} for {first[1]}"
            f"{first[1].size_beside(second[1])} (collective {first[1].number} of its queue), rank {second[0]} for "
            f"{second[1]}{second[1].size_beside(first[1])} (collective {second[1].number}). "
        )
        if first[2] != second[2]:
            return (
                f"{problem}Rank {first[0]} has begun {first[2]} backward passes, rank {second[0]} {second[2]}. A rank "
                "without a loss (an empty batch) must also run the backward of its forward, of a loss that is zero: "
                "`(outputs.sum() * 0).backward()`; and no forward may run on some ranks alone (`if rank == 0:`). Where "
                "nodes run different numbers of backwards on purpose, declare "
                "the last one (`micro_step(index, of=...)`), or leave `second_hop` out of `overlap`."
            )
        return (
            f"{problem}Run the same units in the same order on all ranks while parameters are sharded. Remove any "
            "evaluation, `generate()`, other forward, norm, gradient or `full_tensor()` of a parameter that some ranks "
            "alone run or read (`if rank == 0:`). Use one seed for layers that are skipped at random (LayerDrop). "
            "Where the data of a rank chooses experts, make the layer around them a unit, not each expert. Or keep "
            "parameters whole with `params='replicate'`, where checkpoints of units that ranks skip must take "
            "`use_reentrant=False`."
        )

    def _publish_report(self, op: OpId) -> None:
        known = dict(self._counts)  # to which other threads may add meanwhile
        counts = [(queue, sorted(ranks), count) for (queue, ranks), count in known.items()]
        report = [op.queue, op.number, op.label, op.size, sorted(op.ranks), counts, self.num_backwards]
        self._store.set(self._key(self.rank), json.dumps(report))

    def _report_of(self, rank: int) -> _Report | None:
        """The report of a rank; None where it does not wait."""
        text = self._store.get(self._key(rank)) if self._store.check([self._key(rank)]) else b""
        if not text:
            return None
        queue, number, label, size, ranks, counts, num_backwards = json.loads(text)
        counts_by_key = {(queue, frozenset(ranks)): count for queue, ranks, count in counts}
        return _Report(OpId(queue, number, label, size, frozenset(ranks)), counts_by_key, num_backwards)

    def _desync_message(self) -> str:
        return self._store.get(self._key("desync")).decode() if self._store.check([self._key("desync")]) else ""

    def explain(self) -> str:
        """The known reason why a collective has failed, as sentences.

        It is empty where only the transport's reason is known.

        Cost:
            A few seconds where this rank has waited long: its peers may have begun to wait later.

        Raises:
            LifecycleError: Ranks have diverged, as this rank or a peer has found.
        """
        message = self._bounded.run_within(self._desync_message)
        if message:
            raise LifecycleError(message)
        op = self._reported
        if op is None:
            return ""
        self._bounded.run_within(lambda: self._read_until_all_wait(op), within_s=STALL_GRACE_S)
        if self._bounded.is_silent:
            return f"No answer from the store of the job either, which {self._bounded.holder} holds. "
        names = " and ".join(f"rank {rank}" for rank in sorted(self._silent))
        return f"No answer from {names}. " if names else ""

    def _read_until_all_wait(self, op: OpId) -> None:
        deadline_s = time.monotonic() + STALL_GRACE_S
        while True:
            self._silent = self._silent_now(op)
            if not self._silent or time.monotonic() > deadline_s:
                return
            time.sleep(_POLL_S)

    def _silent_now(self, op: OpId) -> set[int]:
        """Silent ranks for which this rank waits, directly or through its peers. A silent rank waits for nothing."""
        silent: set[int] = set()
        seen, pending = {self.rank}, [op]
        while pending:
            for rank in pending.pop().ranks - seen:
                seen.add(rank)
                report = self._report_of(rank)
                if report is None:
                    silent.add(rank)
                else:
                    pending.append(report.op)
        return silent

    def _key(self, suffix: int | str) -> str:
        return f"mics/waits/{self.num_models}/{suffix}"


T = TypeVar("T")
STORE_TIMEOUT_S = 2.0  # how long a working store may take to answer


class BoundedStore:
    """The default store of the job, with a time limit for each operation."""

    def __init__(self) -> None:
        self.store: Any = dist.distributed_c10d._get_default_store()
        self._thread: threading.Thread | None = None

    @property
    def is_silent(self) -> bool:
        """Whether the last operation has had no answer yet."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def holder(self) -> str:
        """The process that holds the store, as text."""
        is_of_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return "the launcher" if is_of_launcher else "rank 0"

    def run_within(self, operation: Callable[[], T], within_s: float = 0.0) -> T | None:
        """Run an operation that uses the store, within a time limit.

        Returns None where the store does not answer, or is gone.

        Args:
            operation: Function to run, in a thread of its own.
            within_s: Time that it may take when the store answers immediately, seconds.
        """
        if self.is_silent:
            return None
        pending: _StoreOperation[T] = _StoreOperation(operation)
        self._thread = threading.Thread(target=pending.run, name="mics store", daemon=True)
        self._thread.start()
        self._thread.join(within_s + STORE_TIMEOUT_S)
        return pending.value


class _StoreOperation(Generic[T]):
    """One operation on the store, and its result."""

    def __init__(self, operation: Callable[[], T]) -> None:
        self._operation = operation
        self.value: T | None = None

    def run(self) -> None:
        """Run the operation, and store its result. `value` stays None where the rank that held the store has exited."""
        try:
            self.value = self._operation()
        except dist.DistError:
            return
