"""Cache of tuning results on disk, keyed by the links on which they were measured.

A result is a number in a small JSON file in the user's cache folder, named by a digest of all that it depends on. Sums
in one and in two stages round differently, so results are kept: the same job on the same nodes is then bitwise
reproducible.
A cache that cannot be used costs a measurement and a warning, never the job.
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
from typing import TYPE_CHECKING, Any

import torch

from mics_strategy.version import package_version

if TYPE_CHECKING:
    from mics_strategy.topology import Span

_log = logging.getLogger(__name__)
CACHE_DIR = "$XDG_CACHE_HOME (or ~/.cache)/mics_strategy/tuning"
_FORMAT = 2  # raised when collectives change so much that earlier measurements are void
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE", "NCCL_IB_HCA", "NCCL_NET")


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningKey:
    """All that a tuning result depends on.

    Attributes:
        hosts: Names of the nodes, in order.
        ranks_per_node: Ranks of a node.
        collective: Collective that was measured.
        span: Sizes and strides of the axes that it spans.
        backend_key: Backend and device.
        interfaces: Environment variables that choose network interfaces.
        version: Versions of torch, of this package, and of the cache format.
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
        cls, collective: str, span: Span, hosts: Sequence[str], ranks_per_node: int, backend_key: str
    ) -> TuningKey:
        """The key of one collective over one span in this process."""
        return cls(
            hosts=tuple(hosts),
            ranks_per_node=ranks_per_node,
            collective=collective,
            span=" ".join(f"{axis.name}:{axis.size}x{axis.stride}" for axis in span.axes),
            backend_key=backend_key,
            interfaces=" ".join(f"{name}={os.environ[name]}" for name in _INTERFACES if name in os.environ),
            version=f"torch {torch.__version__}, mics_strategy {package_version()}, format {_FORMAT}",
        )

    def describe(self) -> dict[str, Any]:
        """The fields as stored in JSON."""
        return {**dataclasses.asdict(self), "hosts": [*self.hosts]}

    @property
    def file_name(self) -> str:
        """Name of the cache file: equal for equal keys only."""
        text = json.dumps(self.describe(), sort_keys=True)
        return f"{hashlib.blake2b(text.encode(), digest_size=12).hexdigest()}.json"


def cache_folder() -> Path:
    """`CACHE_DIR`, for this user."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mics_strategy" / "tuning"


def load(key: TuningKey) -> int | None:
    """The cached result for a key; None where there is no usable one."""
    try:
        entry = json.loads((cache_folder() / key.file_name).read_text())
        decision = entry["decision"]
        if entry["links"] == key.describe() and type(decision) is int and decision >= 0:
            return decision
        reason = "its contents do not match its name"
    except FileNotFoundError:
        return None
    except (OSError, RuntimeError, ValueError, KeyError, TypeError) as error:  # RuntimeError: there is no home
        reason = repr(error)
    _log.warning("The cache of measurements for 'auto' cannot be read, so they are repeated: %s", reason)
    return None


def store(key: TuningKey, decision: int, timings: Sequence[Any]) -> None:
    """Store a result and its measurements for later jobs, atomically."""
    text = json.dumps(
        {
            "decision": decision,
            "links": key.describe(),
            "timings": [dataclasses.asdict(timing) for timing in timings],
        },
        indent=1,
    )
    try:
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f"{key.file_name}.{os.getpid()}.partial"
        partial.write_text(text)
        partial.replace(folder / key.file_name)
    except (OSError, RuntimeError) as error:
        _log.warning(
            "The cache of measurements for 'auto' cannot be written, so the next job measures again and its sums may "
            "round differently: %r. Pin the values that rank 0 prints, or set XDG_CACHE_HOME to a writable folder.",
            error,
        )
