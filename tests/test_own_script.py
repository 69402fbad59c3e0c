"""The commands of docs/own-script.md start a script on two nodes."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.interpreters import python_path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "own-script.md").read_text()


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


@pytest.mark.slow
def test_two_boxes_that_are_one_machine_train(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(blocks((ROOT / "README.md").read_text(), "python")[0])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    here = {"10.0.0.1": "127.0.0.1", "29500": str(port), "--nproc-per-node 4": "--nproc-per-node 2"}
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": python_path(ROOT), "OMP_NUM_THREADS": "1"}
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]])
    boxes = []
    for command in blocks(PAGE, "bash")[:2]:
        for stated, found in here.items():
            assert stated in command
            command = command.replace(stated, found)
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        boxes.append(subprocess.Popen(command.replace("\\\n", "").split(), cwd=tmp_path, env=environment, **pipes))
    outputs = [box.communicate(timeout=200)[0] for box in boxes]
    assert [box.returncode for box in boxes] == [0, 0], outputs
    assert "all_gather" in outputs[0]


def test_the_batch_script_is_one_of_bash(tmp_path: Path) -> None:
    script = blocks(PAGE, "bash")[2]
    assert script.startswith("#!/bin/bash\n#SBATCH --nodes=2")
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
