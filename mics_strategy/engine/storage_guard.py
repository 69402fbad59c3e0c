"""A guard of memory that holds other values than its tensors stand for.

Units take turns in a slot, and a user may keep a tensor of one of them: a parameter, a view or an alias of it, in a
closure, an attribute, a cache, a saved-tensor hook. A read of it would return the values of another unit. So every
parameter has a storage of its own on the memory of the slot, and torch refuses every access to the data of that storage
while it is closed. Tensors may be kept, viewed and saved by autograd meanwhile; they can be used again when the unit is
unsharded. The storage begins and ends with the parameter, so that `as_strided` reaches no other one.

Not refused are accesses that torch does not see: through a NumPy array or an address that was taken before.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

from mics_strategy.errors import ConfigError

_REMEDY = (
    "A parameter was read while its unit was not unsharded. Something had kept it (a closure, a cache, an attribute, "
    "`ctx` of a Function, a saved-tensor hook), and its memory holds other values now. Read it inside of the forward "
    "of the layer that owns it, return or keep a copy (`weight.clone()`), make one unit of the layers that share it "
    "(`shard(units=...)`), or keep parameters unsharded with `params='replicate'`."
)
_REFUSED = "Cannot access data pointer of Storage that is invalid"  # torch's words
_HEADER_BYTES = 64  # of torch's `StorageImpl`, up to its flags and no further
_READ, _ALL = 2, 0  # positions in the flags: refuses every access; whether a flag is set at all


class StorageGuard:
    """A guard of the memory of tensors.

    Args:
        views: Contiguous tensors whose memory is guarded. They can be accessed at any time themselves.

    Attributes:
        tensors: Each on the same memory in a storage of its own, which the guard closes and opens.
        is_closed: Whether accesses are refused.

    Cost:
        No memory. 0.2 us to close or open a tensor (AMD EPYC, Linux 6.18, torch 2.13).
    """

    def __init__(self, views: list[torch.Tensor]) -> None:
        self.tensors = [with_own_storage(view) for view in views]
        self._storages = {storage._cdata: storage for storage in map(torch.Tensor.untyped_storage, self.tensors)}
        self._flags = [_flags_of(storage) for storage in self._storages.values()]
        self.is_closed = False

    def close(self) -> None:
        """Refuse accesses to the memory through `tensors` and tensors made of them."""
        self.is_closed = True
        for flags in self._flags:
            flags[_READ] = flags[_ALL] = True

    def open(self) -> None:
        """Allow accesses again."""
        self.is_closed = False
        for flags in self._flags:
            flags[_READ] = flags[_ALL] = False

    def guards(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor, which has a storage, is stored in a guarded one."""
        return tensor.untyped_storage()._cdata in self._storages


def explain_refusal(error: BaseException | None) -> str | None:
    """What to do about torch's refusal of an access; None for another error."""
    return _REMEDY if isinstance(error, RuntimeError) and _REFUSED in str(error) else None


def with_own_storage(view: torch.Tensor) -> torch.Tensor:
    """A tensor on the memory of a contiguous one, whose storage holds nothing else and keeps the first one alive.

    torch saves and deep-copies whole storages, so a view of an arena would bring the whole arena along, and counts the
    offset of `as_strided` from the beginning of the storage. A DTensor also takes over the storage offset of its local
    part, which is meaningless for it.
    """
    if view.is_meta:
        return view.view_as(view)
    start = view.storage_offset() * view.itemsize
    storage: Any = view.untyped_storage()[start : start + view.numel() * view.itemsize]
    return torch.empty(0, dtype=view.dtype, device=view.device).set_(storage, 0, view.shape, view.stride())


def _flags_of(storage: torch.UntypedStorage) -> ctypes.Array[ctypes.c_bool]:
    """The flags of a storage, valid as long as the storage.

    Source:
        torch 2.11 to 2.15, ``c10/core/StorageImpl.h``: `has_mutable_data_ptr_check_`, `throw_on_mutable_data_ptr_`,
        `throw_on_immutable_data_ptr_`. Python can set the second one only.
    """
    return (ctypes.c_bool * 3).from_address(storage._cdata + _flags_offset())


@functools.cache
def _flags_offset() -> int:
    """Offset of the flags in a storage, found by setting one and tried.

    Raises:
        ConfigError: They are elsewhere in this version of torch.
    """
    probe = torch.zeros(1)
    storage = probe.untyped_storage()
    header = (ctypes.c_ubyte * _HEADER_BYTES).from_address(storage._cdata)
    before = bytes(header)
    torch._C._set_throw_on_mutable_data_ptr(probe)
    changed = [offset for offset, (old, new) in enumerate(zip(before, bytes(header), strict=True)) if old != new]
    if changed != [changed[0], changed[0] + 1] or changed[0] + _READ >= _HEADER_BYTES:
        raise ConfigError(_unknown_layout())
    header[changed[0] + 1] = header[changed[0]] = False
    flags = (ctypes.c_bool * 3).from_address(storage._cdata + changed[0])
    flags[_READ] = flags[_ALL] = True
    try:
        probe.item()
    except RuntimeError as error:
        is_refused = explain_refusal(error) is not None
    else:
        is_refused = False
    flags[_READ] = flags[_ALL] = False
    if not is_refused or probe.item() != 0:
        raise ConfigError(_unknown_layout())
    return changed[0]


def _unknown_layout() -> str:
    return (
        f"Resharded parameters cannot be guarded against reads with torch {torch.__version__}, whose storages have "
        "another layout. Install a version of torch that this package supports (2.11 to 2.15)."
    )
