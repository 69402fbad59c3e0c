"""Version of the package that runs."""

from __future__ import annotations

import importlib.metadata


def package_version() -> str:
    """As installed; ``"unknown"`` in a checkout that is not."""
    try:
        return importlib.metadata.version("mics_strategy")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
