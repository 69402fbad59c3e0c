"""Can a testbed be made where the tests run?"""

import os
import shutil
import subprocess

import pytest


def _why_not() -> str:
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc", "setpriv", "unshare") if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} is not installed"
    done = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True, check=False)
    return f"no network namespaces: {done.stderr.strip()}" if done.returncode else ""


WHY_NOT = _why_not()
needs_testbed = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
