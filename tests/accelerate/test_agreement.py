"""Does a rank that saves alone say who is missing, and does a meeting leave nothing in the job's store?"""

import pytest
from torch.distributed.distributed_c10d import _get_default_store

from mics_strategy.accelerate.agreement import Meeting
from tests.accelerate.runs import accelerator, run
from tests.accelerate.test_training import transformer
from tests.rank_report import RankError
from tests.ranks import RankContext, RankPool


def on_the_main_process_only(ctx: RankContext) -> None:
    """As a script might do that had plain tensors in mind."""
    acc = accelerator()
    acc.prepare(transformer())
    if acc.is_main_process:
        Meeting().require_every_rank("save_state", patience_s=0.5)


def test_saving_on_the_main_process_only_says_who_is_missing(ranks: RankPool) -> None:
    with pytest.raises(RankError, match=r"Rank 1 did not call `save_state` within 0\.5 s of rank 0.*is_main_process"):
        run(ranks, 2, on_the_main_process_only)


def met(ctx: RankContext) -> list[bool]:
    meeting, store = Meeting(), _get_default_store()
    for _ in range(3):
        meeting.require_every_rank("save_state")
    return [store.check([f"mics_strategy/met/{occasion}/{ctx.rank}"]) for occasion in range(4)]


def test_only_the_last_meeting_is_left_in_the_store(ranks: RankPool) -> None:
    assert run(ranks, 4, met) == [[False, False, True, False]] * 4
