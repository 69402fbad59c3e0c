"""How does `Trainer(strategy="mics")` work in a script that never imports mics_strategy?

torch calls `install` at the end of `import torch` (entry point group `torch.backends`). It is a top-level module of its
own because torch is not complete at that moment and `mics_strategy` needs it: nothing is imported here but `sys`. When
Lightning is imported later, `mics_strategy` is imported too and registers its names.

An error in here would break `import torch`, so there is none. `TORCH_DEVICE_BACKEND_AUTOLOAD=0` switches it off.
"""

import sys

REGISTRIES = (
    "lightning.pytorch.strategies",
    "pytorch_lightning.strategies",
    "lightning.fabric.strategies",
    "lightning_fabric.strategies",
)


def install() -> None:
    """Wait for Lightning. Idempotent; never raises."""
    try:
        if not any(isinstance(finder, AfterImport) for finder in sys.meta_path):
            sys.meta_path.insert(0, AfterImport())  # type: ignore[arg-type]
    except Exception:  # whatever it is, torch must load
        return


class AfterImport:
    """A finder that finds nothing itself and registers the names when Lightning's registry was imported."""

    def __init__(self) -> None:
        self._searched: set[str] = set()  # two such finders ask each other

    def find_spec(self, name: str, path: object = None, target: object = None) -> object:
        """The spec that the other finders give, with a loader that also registers."""
        if name not in REGISTRIES or name in self._searched:
            return None
        self._searched.add(name)
        try:
            finders: list[object] = [finder for finder in sys.meta_path if finder is not self]  # type: ignore[comparison-overlap]
            others = [finder.find_spec for finder in finders if hasattr(finder, "find_spec")]
            spec = next((found for find in others if (found := find(name, path, target)) is not None), None)
        finally:
            self._searched.discard(name)
        try:
            _then_register(spec.loader)  # type: ignore[union-attr]
        except AttributeError:  # no such module, or a loader that cannot be changed
            pass
        return spec


def _then_register(loader: object) -> None:
    execute = loader.exec_module  # type: ignore[attr-defined]

    def execute_and_register(module: object) -> None:
        execute(module)
        _register()

    loader.exec_module = execute_and_register  # type: ignore[attr-defined]


def _register() -> None:
    try:
        from mics_strategy.lightning.registration import register

        register()
    except Exception as error:  # Lightning must load too
        print(f"mics_strategy could not be loaded, so its strategies are not available: {error!r}", file=sys.stderr)
