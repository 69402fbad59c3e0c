"""Do ranks start as a launcher starts them, and end together?"""

import sys
import time

import pytest

from benchmarks.launch import Launch, RankFailedError, launch
from benchmarks.testbed import make_testbed
from tests.benchmarks.needs import needs_testbed

pytestmark = pytest.mark.slow

SHOW = "import os; print(*(os.environ[name] for name in os.environ['SHOWN'].split()))"
NAMES = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK MASTER_PORT GLOO_SOCKET_IFNAME OMP_NUM_THREADS"
ONE_FAILS = """
import os, sys, time
print("rank", os.environ["RANK"], "starts", flush=True)
if os.environ["RANK"] == "1":
    sys.exit("the disk is full")
time.sleep(300)
"""


def job(code: str, *, timeout_s: float = 30.0) -> Launch:
    return Launch(
        command=[sys.executable, "-c", code],
        ranks_per_node=2,
        timeout_s=timeout_s,
        env={"SHOWN": NAMES},
        port=29777,
    )


@needs_testbed
def test_every_rank_has_the_variables_of_a_launcher() -> None:
    with make_testbed(nodes=2, rate_mbit=400) as bed:
        outputs = launch(bed, job(SHOW))
    assert [output.split() for output in outputs] == [
        [str(rank), str(rank % 2), "4", "2", str(rank // 2), "29777", "uplink", "1"] for rank in range(4)
    ]


@needs_testbed
def test_a_rank_that_fails_ends_the_others_and_is_shown() -> None:
    with make_testbed(nodes=2, rate_mbit=400) as bed:
        start = time.monotonic()
        with pytest.raises(RankFailedError, match=r"Rank 1 ended with 1[\s\S]*rank 1 starts\nthe disk is full"):
            launch(bed, job(ONE_FAILS))
        assert time.monotonic() - start < 30
        assert bed.processes() == []


@needs_testbed
def test_ranks_that_do_not_end_are_ended() -> None:
    with make_testbed(nodes=2, rate_mbit=400) as bed:
        with pytest.raises(RankFailedError, match=r"Rank 0 has not ended after 0\.5 s"):
            launch(bed, job("import time; time.sleep(300)", timeout_s=0.5))
        assert bed.processes() == []
