"""What was decided before, on these links?

A decision is a number in a small JSON file in the user's cache, named by a digest of all that it depends on. Sums made
in one stage and in two round differently, so what was measured once is kept: the same job on the same nodes then
repeats bit by bit.
A cache that cannot be used costs a measurement and a line in the log, never the job.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mics_strategy.topology import Span
from mics_strategy.version import package_version

_log = logging.getLogger(__name__)
CACHE_DIR = "$XDG_CACHE_HOME (or ~/.cache)/mics_strategy/decisions"
_FORMAT = 2  # grows when collectives change so that what was measured before says nothing any more
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE", "NCCL_IB_HCA", "NCCL_NET")


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningKey:
    """All that a decision depends on.

    Attributes:
        hosts: Names of the nodes, in order.
        ranks_per_node: Of the job.
        collective: What was measured.
        span: Sizes and strides of the axes over which.
        backend_key: Backend and device.
        interfaces: What the environment says of the ways between nodes.
        version: Of torch, of this package, and of what is kept.
    """

    hosts: tuple[str, ...]
    ranks_per_node: int
    collective: str
    span: str
    backend_key: str
    interfaces: str
    version: str

    @classmethod
    def for_this_job(
        cls, collective: str, span: Span, hosts: Sequence[str], ranks_per_node: int, moved_by: str
    ) -> TuningKey:
        """The links of one collective over one span in this process."""
        return cls(
            hosts=tuple(hosts),
            ranks_per_node=ranks_per_node,
            collective=collective,
            span=" ".join(f"{axis.name}:{axis.size}x{axis.stride}" for axis in span.axes),
            backend_key=moved_by,
            interfaces=" ".join(f"{name}={os.environ[name]}" for name in _INTERFACES if name in os.environ),
            version=f"torch {torch.__version__}, mics_strategy {package_version()}, format {_FORMAT}",
        )

    def describe(self) -> dict[str, Any]:
        """As it is kept in JSON."""
        return {**dataclasses.asdict(self), "hosts": [*self.hosts]}

    @property
    def file_name(self) -> str:
        """Of the decision: the same for equal links only."""
        text = json.dumps(self.describe(), sort_keys=True)
        return f"{hashlib.blake2b(text.encode(), digest_size=12).hexdigest()}.json"


def cache_folder() -> Path:
    """`CACHE_DIR`, for this user."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mics_strategy" / "decisions"


def load(key: TuningKey) -> int | None:
    """What was decided for these links; None where nothing usable is known."""
    try:
        kept = json.loads((cache_folder() / key.file_name).read_text())
        decision = kept["decision"]
        if kept["links"] == key.describe() and type(decision) is int and decision >= 0:
            return decision
        reason = "it says something else"
    except FileNotFoundError:
        return None
    except (OSError, RuntimeError, ValueError, KeyError, TypeError) as error:  # RuntimeError: there is no home
        reason = repr(error)
    _log.warning("The cache of what 'auto' has found cannot be read, so it is measured anew: %s", reason)
    return None


def store(key: TuningKey, decision: int, timings: Sequence[Any]) -> None:
    """Keep a decision for later jobs, whole or not at all, with the dataclasses that say what was measured."""
    text = json.dumps(
        {
            "decision": decision,
            "links": key.describe(),
            "timings": [dataclasses.asdict(each) for each in timings],
        },
        indent=1,
    )
    try:
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        beside = folder / f"{key.file_name}.{os.getpid()}.partial"
        beside.write_text(text)
        beside.replace(folder / key.file_name)
    except (OSError, RuntimeError) as error:
        _log.warning(
            "The cache of what 'auto' has found cannot be written, so the next job measures anew and its sums may "
            "round differently: %r. Pin what rank 0 prints, or set XDG_CACHE_HOME.",
            error,
        )
