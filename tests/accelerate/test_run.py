"""Does a script that `mics_strategy.run` starts find what it would find if Python had started it?"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mics_strategy import ConfigError
from mics_strategy.accelerate import launch
from mics_strategy.run import main

SEEN = """
import json, os, sys
import beside
if __name__ == "__main__":
    seen = [sys.argv, sys.path[0], __file__, __package__, sys.modules["__main__"].__dict__ is globals(), beside.X]
    print(json.dumps(seen))
    sys.exit(len(sys.argv))
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a script in a package, as the current one; what `run` changes in this process is put back."""
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "train.py").write_text(SEEN)
    (folder / "module.py").write_text(SEEN.replace("import beside", "from package import beside"))
    (folder / "__main__.py").write_text(SEEN)
    (folder / "beside.py").write_text("X = 7")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["run.py"])
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path[1:]])
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    for name in ("ACCELERATE_USE_FSDP", "FSDP_VERSION"):
        monkeypatch.setenv(name, "")
    for name in ("beside", "package", "package.beside"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("what", [["package/train.py"], ["-m", "package.module"], ["package"]], ids=str)
def test_a_script_finds_what_it_finds_without_us(
    here: Path, capsys: pytest.CaptureFixture[str], what: list[str]
) -> None:
    plain = subprocess.run([sys.executable, *what, "--lr", "-m", "1"], capture_output=True, text=True, check=False)
    assert plain.returncode == 4, plain.stderr
    with pytest.raises(SystemExit) as ended:
        main([*what, "--lr", "-m", "1"])
    found, expected = json.loads(capsys.readouterr().out), json.loads(plain.stdout)
    assert [os.path.realpath(found[1]), *found[2:]] == [os.path.realpath(expected[1]), *expected[2:]]
    assert found[0] == expected[0]
    assert ended.value.code == 4
    assert launch.is_enabled()
    for name in ("beside", "package", "package.beside", "package.module"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("what", "match"),
    [
        ([], "usage"),
        (["--lr", "1"], "usage"),
        (["-m"], "usage"),
        (["trian.py"], "there is no script `trian.py` in "),
        (["package.module"], "there is no script `package.module`.*`-m package.module`"),
        (["-m", "package.absent"], "there is no module `package.absent`"),
        (["-m", "absent.module"], "there is no module `absent.module`"),
    ],
    ids=str,
)
def test_what_is_not_there_is_told(here: Path, capsys: pytest.CaptureFixture[str], what: list[str], match: str) -> None:
    assert main(what) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert re.search(match, printed.err)


@pytest.mark.parametrize("other", ["FSDP", "DEEPSPEED", "MEGATRON_LM"])
def test_a_launcher_that_asks_for_something_else_is_refused(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    monkeypatch.setenv(f"ACCELERATE_USE_{other}", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    with pytest.raises(ConfigError, match="fsdp_version: mics"):
        launch.enable()
    assert main(["package/train.py"]) == 2
    assert "configuration requests" in capsys.readouterr().err
