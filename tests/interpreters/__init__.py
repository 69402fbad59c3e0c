"""How do tests start interpreters that collect no garbage while they import?

Lightning, transformers and torch are half a million objects: walking them again and again is a quarter of the time of
their imports, and tests start hundreds of interpreters. `sitecustomize.py` beside this file is what they start with.
"""

import os
from pathlib import Path


def python_path(*folders: Path | str) -> str:
    """Return the value of PYTHONPATH for an interpreter that imports from `folders`."""
    return os.pathsep.join(str(folder) for folder in (Path(__file__).parent, *folders))
