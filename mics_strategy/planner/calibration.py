"""Whether a calibration fits what is asked for: refusals and warnings.

Pure.
"""

from __future__ import annotations

import datetime

from mics_strategy.errors import ConfigError
from mics_strategy.planner.cluster import Cluster

_STALE_DAYS = 180  # drivers, firmware and cabling of a cluster change in half a year


def check_calibration(cluster: Cluster, *, ranks_per_node: int | None = None, backend: str | None = None) -> None:
    """Refuse a calibration that was made on something else than what is asked for.

    Args:
        cluster: Cluster, calibrated or not.
        ranks_per_node: Ranks of a node that are asked for; None for any.
        backend: Backend that is asked for; None for any.

    Raises:
        ConfigError: The cluster was calibrated with other ranks of a node, or another backend.
    """
    if cluster.origin is None:
        return
    for name, asked in (("ranks_per_node", ranks_per_node), ("backend", backend)):
        measured = getattr(cluster, name)
        if asked is not None and asked != measured:
            raise ConfigError(
                f"`{name}={asked!r}` was asked for, and cluster {cluster.name} was calibrated with {measured!r} on "
                f"{', '.join(cluster.origin.hosts)}. Run `mics calibrate` there as the job will run."
            )


def calibration_warnings(cluster: Cluster, today: datetime.date, torch_version: str) -> list[str]:
    """Reasons to trust a calibration less, a sentence each.

    There is none for a cluster that is not calibrated.

    Args:
        cluster: Cluster, with the nodes that are asked for.
        today: Present day.
        torch_version: Version of torch that will run.
    """
    origin = cluster.origin
    if origin is None:
        return []
    warnings = []
    days = (today - datetime.date.fromisoformat(origin.date)).days
    if days > _STALE_DAYS:
        warnings.append(f"The calibration of {cluster.name} is {days} days old. Run `mics calibrate` again.")
    if cluster.world_size != origin.world_size:
        warnings.append(
            f"{cluster.name} was calibrated on {origin.world_size} ranks, and {cluster.world_size} are asked for: "
            "collectives over other numbers of ranks are extrapolated."
        )
    if torch_version.partition("+")[0] != origin.torch_version.partition("+")[0]:
        warnings.append(
            f"{cluster.name} was calibrated with torch {origin.torch_version}, and {torch_version} runs here: its "
            "kernels and its NCCL may be faster or slower."
        )
    return warnings
