"""Autoload of mics_strategy in scripts that never import it.

torch calls `install` at the end of `import torch` (entry point group `torch.backends`). This is a separate top-level
module, because torch is not complete at that moment and `mics_strategy` needs it: only modules that Python has already
loaded are imported here. When Lightning is imported later, the strategies are added to its registries. When Accelerate
is imported in a job whose launcher read ``fsdp_version: mics``, the adapter is loaded.

An exception in this module would break `import torch`, so none is raised. `TORCH_DEVICE_BACKEND_AUTOLOAD=0` disables
the module.
"""

import os
import sys

REGISTRIES = (
    "lightning.pytorch.strategies",
    "pytorch_lightning.strategies",
    "lightning.fabric.strategies",
    "lightning_fabric.strategies",
)
# Accelerate imports torch while it is itself incomplete. This module of it is imported after `Accelerator` is defined.
ACCELERATE = "accelerate.launchers"


def install() -> None:
    """Install the import hook for Lightning and Accelerate. Idempotent; never raises."""
    try:
        if not any(isinstance(finder, PostImportHook) for finder in sys.meta_path):
            sys.meta_path.insert(0, PostImportHook())  # type: ignore[arg-type]
    except Exception:  # torch must load in any case
        return


class PostImportHook:
    """Import hook that acts after the import of one of the awaited modules."""

    def __init__(self) -> None:
        self._searched: set[str] = set()  # two such finders would call each other

    def find_spec(self, name: str, path: object = None, target: object = None) -> object:
        """Return the spec of the other finders, with a loader that also acts."""
        if (name not in REGISTRIES and name != ACCELERATE) or name in self._searched:
            return None
        self._searched.add(name)
        try:
            finders: list[object] = [finder for finder in sys.meta_path if finder is not self]  # type: ignore[comparison-overlap]
            find_functions = [finder.find_spec for finder in finders if hasattr(finder, "find_spec")]
            spec = next(
                (candidate for find in find_functions if (candidate := find(name, path, target)) is not None), None
            )
        finally:
            self._searched.discard(name)
        try:
            _wrap_loader(spec.loader, _enable_if_requested if name == ACCELERATE else _register)  # type: ignore[union-attr]
        except AttributeError:  # no such module, or a loader that cannot be changed
            pass
        return spec


def _wrap_loader(loader: object, action: object) -> None:
    execute = loader.exec_module  # type: ignore[attr-defined]

    def execute_and_act(module: object) -> None:
        execute(module)
        action()  # type: ignore[operator]

    loader.exec_module = execute_and_act  # type: ignore[attr-defined]


def _register() -> None:
    try:
        from mics_strategy.lightning.registration import register

        register()
    except Exception as error:  # Lightning must also load
        print(f"mics_strategy could not be loaded, so its strategies are not available: {error!r}", file=sys.stderr)


def _enable_if_requested() -> None:
    if os.environ.get("FSDP_VERSION", "").lower() != "mics":
        return
    try:
        import mics_strategy.accelerate  # noqa: F401
    except Exception as error:  # Accelerate then stops at the value "mics", which it does not support
        print(f"mics_strategy could not be loaded, so `fsdp_version: mics` cannot be read: {error!r}", file=sys.stderr)
