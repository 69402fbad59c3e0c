"""Version counters of unsharded parameters: autograd refuses a saved one whose content is gone.

Autograd saves the parameters that a backward will read, with their versions, and compares these when it reads them.
Units share slots, so a saved parameter may meanwhile be overwritten by another unit's. Its counter therefore stands at
a number of its own while the unit is resharded, and at the number that was saved while the unit is unsharded with the
same values.
"""

from __future__ import annotations

import itertools
import re
import weakref
from collections.abc import Sequence

import torch
from torch import nn

from mics_strategy.errors import LifecycleError

_RESHARDED = 2**31  # above every count of writes; torch's counters have 32 bits
_set_versions = torch._C._autograd._unsafe_set_version_counter
_numbers = itertools.count(_RESHARDED)
_owners: weakref.WeakValueDictionary[int, SavedVersions] = weakref.WeakValueDictionary()


class UnshardedParameter(nn.Parameter):
    """A parameter as a forward uses it; every way of writing into it is counted."""

    @property
    def data(self) -> torch.Tensor:
        """An alias that shares the version counter, so that writing through it is noticed."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if value.shape != self.shape or value.dtype != self.dtype:
            raise LifecycleError(
                f"A forward gave a parameter of shape {tuple(self.shape)} and {self.dtype} new `.data` of shape "
                f"{tuple(value.shape)} and {value.dtype}, for which there is no memory. Change the model before "
                "`shard()`; to change values, write into the parameter."
            )
        with torch.no_grad():
            self.copy_(value)


class SavedVersions:
    """The version counters of one bucket's unsharded parameters.

    Args:
        unit: Name of the unit, for errors.
        parameters: The unsharded parameters; none shares its counter with anything but its own views.
    """

    def __init__(self, unit: str, parameters: Sequence[nn.Parameter]) -> None:
        self.unit = unit
        self._parameters = tuple(parameters)
        self._valid = (0,) * len(self._parameters)
        self._content: int | None = None
        number = next(_numbers)
        self._resharded = (number,) * len(self._parameters)
        _owners[number] = self

    def unshard(self, content: int) -> None:
        """The parameters hold values again; graphs that saved other values stay invalid.

        Args:
            content: Version of the bucket whose values they are.
        """
        if content != self._content:
            self._content = content
            self._valid = (max(self._valid, default=0) + 1,) * len(self._parameters)
        _set_versions(self._parameters, self._valid)

    def reshard(self) -> None:
        """The memory of the parameters is about to hold something else."""
        _set_versions(self._parameters, self._resharded)

    def written(self) -> list[int]:
        """Positions of the parameters that were written to since `unshard`."""
        return [i for i, parameter in enumerate(self._parameters) if parameter._version != self._valid[i]]

    def accept_writes(self, content: int) -> None:
        """What was written is now the value of the bucket, at its version `content`."""
        self._valid = tuple(parameter._version for parameter in self._parameters)
        self._content = content


def resharded_unit(error: RuntimeError) -> str | None:
    """Name of the unit whose resharded parameters autograd has refused in `error`; None for any other error."""
    found = re.search(r"is at version (\d+); expected version", str(error))
    owner = _owners.get(int(found[1])) if found else None
    return None if owner is None else owner.unit
