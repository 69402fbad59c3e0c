"""The ranks that the command starts: places, signals, failures."""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from recipes import ranks
from recipes.ranks import start_ranks

pytestmark = pytest.mark.interpreter
SCRIPT = "tests.recipes.rank_script"


def send_when_ready(folder: Path, last: int) -> None:
    """Send SIGUSR1 to this process when all ranks are ready, and `last` when all have noted it."""

    def wait(is_done: Callable[[], bool]) -> None:
        while not is_done():
            time.sleep(0.01)

    wait(lambda: len([*folder.glob("*.ready")]) == 2)
    os.kill(os.getpid(), signal.SIGUSR1)
    wait(lambda: len([*folder.glob("*.noted")]) == 2)
    os.kill(os.getpid(), last)


@pytest.mark.parametrize(("last", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)], ids=["term", "interrupt"])
def test_every_rank_has_its_place_and_receives_signals(last: int, code: int, tmp_path: Path):
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)]
    sender = threading.Thread(target=send_when_ready, args=(tmp_path, last), daemon=True)
    sender.start()
    assert start_ranks(2, SCRIPT, [str(tmp_path)]) == code
    sender.join()
    places = [(tmp_path / f"{rank}.ready").read_text().split() for rank in (0, 1)]
    assert [place[:4] for place in places] == [["0", "0", "2", "2"], ["1", "1", "2", "2"]]
    assert places[0][4] == places[1][4]
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)] == before


def test_a_failing_rank_ends_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ranks, "GRACE_S", 0.1)
    start_s = time.monotonic()
    assert start_ranks(2, SCRIPT, [str(tmp_path), "1", "3"]) == 3
    assert time.monotonic() - start_s < 30  # the other one sleeps for 60 s
