"""How do scripts that never import mics_strategy come to train with it?

torch calls `install` at the end of `import torch` (entry point group `torch.backends`). It is a top-level module of its
own because torch is not complete at that moment and `mics_strategy` needs it: nothing is imported here but what Python
has loaded. Later, when Lightning is imported, its registries get the names of our strategies; and when Accelerate is,
in a job whose launcher read ``fsdp_version: mics``, the adapter is loaded.

An error in here would break `import torch`, so there is none. `TORCH_DEVICE_BACKEND_AUTOLOAD=0` switches it off.
"""

import os
import sys

REGISTRIES = (
    "lightning.pytorch.strategies",
    "pytorch_lightning.strategies",
    "lightning.fabric.strategies",
    "lightning_fabric.strategies",
)
# Accelerate imports torch when it is half imported itself. This module of it comes when `Accelerator` is there.
ACCELERATE = "accelerate.launchers"


def install() -> None:
    """Wait for Lightning and Accelerate. Idempotent; never raises."""
    try:
        if not any(isinstance(finder, PostImportHook) for finder in sys.meta_path):
            sys.meta_path.insert(0, PostImportHook())  # type: ignore[arg-type]
    except Exception:  # whatever it is, torch must load
        return


class PostImportHook:
    """A finder that finds nothing itself and acts when a module was imported that is waited for."""

    def __init__(self) -> None:
        self._searched: set[str] = set()  # two such finders ask each other

    def find_spec(self, name: str, path: object = None, target: object = None) -> object:
        """The spec that the other finders give, with a loader that also acts."""
        if (name not in REGISTRIES and name != ACCELERATE) or name in self._searched:
            return None
        self._searched.add(name)
        try:
            finders: list[object] = [finder for finder in sys.meta_path if finder is not self]  # type: ignore[comparison-overlap]
            others = [finder.find_spec for finder in finders if hasattr(finder, "find_spec")]
            spec = next((found for find in others if (found := find(name, path, target)) is not None), None)
        finally:
            self._searched.discard(name)
        try:
            _wrap_loader(spec.loader, _shard_if_asked if name == ACCELERATE else _register)  # type: ignore[union-attr]
        except AttributeError:  # no such module, or a loader that cannot be changed
            pass
        return spec


def _wrap_loader(loader: object, act: object) -> None:
    execute = loader.exec_module  # type: ignore[attr-defined]

    def execute_and_act(module: object) -> None:
        execute(module)
        act()  # type: ignore[operator]

    loader.exec_module = execute_and_act  # type: ignore[attr-defined]


def _register() -> None:
    try:
        from mics_strategy.lightning.registration import register

        register()
    except Exception as error:  # Lightning must load too
        print(f"mics_strategy could not be loaded, so its strategies are not available: {error!r}", file=sys.stderr)


def _shard_if_asked() -> None:
    if os.environ.get("FSDP_VERSION", "").lower() != "mics":
        return
    try:
        import mics_strategy.accelerate  # noqa: F401
    except Exception as error:  # Accelerate stops at the word "mics", which it does not know
        print(f"mics_strategy could not be loaded, so `fsdp_version: mics` cannot be read: {error!r}", file=sys.stderr)
