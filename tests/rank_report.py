"""What does a job know about its rank, and how is a failing job told?

Shared by the two ways to run a job on many ranks: forked gloo processes (`ranks.py`) and simulated
ranks in one process (`simulated.py`).
"""

import pickle
import re
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mics_strategy.errors import MiCSError


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """First argument of every job.

    Attributes:
        rank: This rank, 0 ... world_size - 1.
        world_size: Ranks in the job.
        ranks_per_node: Ranks that share a (pretended) node; divides `world_size`.
        tmp_path: Directory shared by the ranks of this job, empty before and removed after it; gloo
            jobs run in it. What a test wants to keep goes to its own `tmp_path`.
    """

    rank: int
    world_size: int
    ranks_per_node: int
    tmp_path: Path

    @property
    def local_rank(self) -> int:
        """Position inside the node."""
        return self.rank % self.ranks_per_node

    @property
    def node(self) -> int:
        """Index of the node."""
        return self.rank // self.ranks_per_node

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return self.world_size // self.ranks_per_node


def node_environment(ctx: RankContext) -> dict[str, str]:
    """The environment variables by which a launcher such as torchrun tells a rank its place."""
    return {
        "RANK": str(ctx.rank),
        "WORLD_SIZE": str(ctx.world_size),
        "LOCAL_RANK": str(ctx.local_rank),
        "LOCAL_WORLD_SIZE": str(ctx.ranks_per_node),
        "GROUP_RANK": str(ctx.node),
    }


class RemoteError(Exception):
    """Stands for an exception that could not travel between processes; the message names its type."""


class LeakError(Exception):
    """A job ended but left a thread or a process group behind."""


@dataclass(frozen=True, slots=True)
class Failure:
    """One rank's exception and its traceback as text."""

    error: BaseException
    traceback: str

    @classmethod
    def of(cls, error: BaseException) -> "Failure":
        """Describe `error`."""
        return cls(error, "".join(traceback.format_exception(error)))

    def portable(self) -> "Failure":
        """The same, fit to be pickled."""
        return Failure(_portable(self.error), self.traceback)


def _portable(error: BaseException) -> BaseException:
    """`error` itself where it survives pickling with its type, else a `RemoteError`."""
    try:
        copy = pickle.loads(pickle.dumps(error))
        if type(copy) is type(error) and str(copy) == str(error):
            return error
    except Exception:  # whatever pickling raises, the answer is the same
        pass
    return RemoteError(f"{type(error).__name__}: {error}")


class RankError(Exception):
    """Some ranks of a job failed.

    Attributes:
        world_size: Ranks in the job.
        by_rank: The exception of every rank that failed, first failure first. A rank that did not
            answer in time has a `TimeoutError`, one whose process ended a `ChildProcessError`.
        tracebacks: Their tracebacks as text.
    """

    def __init__(self, world_size: int, failures: dict[int, Failure]) -> None:
        """Join the failures into one readable message."""
        self.world_size = world_size
        self.by_rank = {rank: failure.error for rank, failure in failures.items()}
        self.tracebacks = {rank: failure.traceback for rank, failure in failures.items()}
        lines = [f"{len(failures)} of {world_size} ranks failed"]
        for rank, failure in failures.items():
            lines.append(f"--- rank {rank}: {type(failure.error).__name__}: {failure.error}")
            lines.append(failure.traceback.rstrip())
        super().__init__("\n".join(lines))


def raises_on_every_rank(run: Callable[[], object], error_type: type[BaseException], match: str = "") -> RankError:
    """Check that `run`, a call of `ranks` or `simulate`, fails alike on every rank.

    Args:
        run: Called without arguments.
        error_type: Every rank must raise it or a subclass.
        match: Regular expression to be found in every rank's message.

    Returns:
        The error, for further checks.

    Raises:
        AssertionError: A rank raised nothing or something else.
    """
    try:
        run()
    except RankError as error:
        silent = sorted(set(range(error.world_size)) - set(error.by_rank))
        if silent:
            raise AssertionError(f"ranks {silent} did not raise {error_type.__name__}") from error
        for rank, raised in error.by_rank.items():
            if not isinstance(raised, error_type):
                expected = error_type.__name__
                raise AssertionError(f"rank {rank} raised {raised!r}, not {expected}") from error
            if not re.search(match, str(raised)):
                raise AssertionError(f"rank {rank}: {match!r} is not in {str(raised)!r}") from error
        return error
    raise AssertionError(f"no rank raised {error_type.__name__}")


def refusal(ctx: RankContext, job: Callable[..., object], *args: object) -> MiCSError | None:
    """Job: the error of the package that another job raises on this rank; None where it raises none.

    Unlike a job that fails, it costs the pool no ranks, and other jobs may follow in the same process group.
    """
    try:
        job(ctx, *args)
    except MiCSError as error:
        return error.with_traceback(None)
    return None


def assert_refused(errors: Sequence[MiCSError | None], error_type: type[MiCSError], match: str = "") -> None:
    """Check that all ranks raised an error.

    Args:
        errors: Result of `refusal` on every rank.
        error_type: Every rank must have raised it or a subclass.
        match: Regular expression to be found in every rank's message.
    """
    for rank, error in enumerate(errors):
        assert isinstance(error, error_type), f"rank {rank} raised {error!r}, not {error_type.__name__}"
        assert re.search(match, str(error)), f"rank {rank}: {match!r} is not in {str(error)!r}"
