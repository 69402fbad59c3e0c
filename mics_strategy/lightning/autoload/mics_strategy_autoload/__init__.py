"""How does `Trainer(strategy="mics")` work in a script that never imports mics_strategy?

torch calls `install` at the end of `import torch` (entry point group `torch.backends`). It is a top-level module of its own
because torch is not complete at that moment and `mics_strategy` needs it: nothing is imported here but `sys`. When Lightning
is imported later, this imports `mics_strategy`, which registers its names.

An error in here would break `import torch`, so there is none. `TORCH_DEVICE_BACKEND_AUTOLOAD=0` switches it off.
"""

import sys

REGISTRIES = ("lightning.pytorch.strategies", "pytorch_lightning.strategies")


def install() -> None:
    """Wait for Lightning. Idempotent; never raises."""
    try:
        if any(name in sys.modules for name in REGISTRIES):
            _import_mics_strategy()
        elif not any(isinstance(finder, AfterImport) for finder in sys.meta_path):
            sys.meta_path.insert(0, AfterImport())
    except Exception:  # whatever it is, torch must load
        return


def _import_mics_strategy() -> None:
    try:
        import mics_strategy  # noqa: F401
    except Exception as error:  # Lightning must load too
        print(f"mics_strategy could not be loaded and its strategies are not available: {error!r}", file=sys.stderr)


class AfterImport:
    """A finder that finds nothing itself and imports mics_strategy when Lightning's registry was imported."""

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
        """The spec that the other finders give, with a loader that also imports mics_strategy."""
        if name not in REGISTRIES:
            return None
        others = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        spec = next((found for finder in others if (found := finder.find_spec(name, path, target)) is not None), None)
        try:
            execute = spec.loader.exec_module

            def execute_and_import(module):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
                execute(module)
                _import_mics_strategy()

            spec.loader.exec_module = execute_and_import
        except AttributeError:  # no such module, or a loader that cannot be changed
            pass
        return spec
