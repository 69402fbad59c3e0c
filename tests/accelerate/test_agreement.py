"""Does a rank that saves alone say who is missing, and does a meeting leave nothing in the job's store?"""

from pathlib import Path

import pytest
import torch
from torch.distributed.distributed_c10d import _get_default_store

from mics_strategy.accelerate.checkpoints import SaveRendezvous
from mics_strategy.errors import CheckpointError
from tests.accelerate.runs import accelerator, run
from tests.accelerate.test_training import adamw, loss_of, transformer
from tests.rank_report import RankError
from tests.ranks import RankContext, RankPool


def on_the_main_process_only(ctx: RankContext) -> None:
    """As a script might do that had plain tensors in mind."""
    acc = accelerator()
    acc.prepare(transformer())
    if acc.is_main_process:
        SaveRendezvous().require_every_rank("save_state", timeout_s=0.5)


def test_saving_on_the_main_process_only_says_who_is_missing(ranks: RankPool) -> None:
    with pytest.raises(RankError, match=r"Rank 1 did not call `save_state` within 0\.5 s of rank 0.*is_main_process"):
        run(ranks, 2, on_the_main_process_only)


def met(ctx: RankContext) -> list[bool]:
    meeting, store = SaveRendezvous(), _get_default_store()
    for _ in range(3):
        meeting.require_every_rank("save_state")
    return [store.check([f"mics_strategy/met/{occasion}/{ctx.rank}"]) for occasion in range(4)]


def test_only_the_last_meeting_is_left_in_the_store(ranks: RankPool) -> None:
    assert run(ranks, 4, met) == [[False, False, True, False]] * 4


class FailsToSave:
    """Raises on one rank when it is saved, after models and optimizers."""

    def __init__(self, fails: bool) -> None:
        self.fails = fails

    def state_dict(self) -> dict[str, int]:
        if self.fails:
            raise KeyError("mine")
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Nothing to restore."""


def mixed(ctx: RankContext, folder: str) -> tuple[str, str]:
    """A save among other things that stops in the middle; what saving and loading say."""
    acc, errors = accelerator(), []
    own = FailsToSave(fails=False)
    acc.prepare(transformer())
    acc.register_for_checkpointing(own)
    acc.load_state(acc.save_state(folder))
    own.fails = ctx.rank == 0
    for action in (acc.save_state, acc.load_state):
        with pytest.raises(CheckpointError) as error:
            action(folder)
        errors.append(str(error.value))
    return errors[0], errors[1]


def test_parts_of_different_saves_are_never_loaded_together(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text("loss 1.0")  # so that there is no draft
    for saving, loading in run(ranks, 2, mixed, str(tmp_path)):
        assert "KeyError: 'mine'" in saving
        assert "did not finish" in loading
    assert (tmp_path / "log.txt").exists()


def in_both_kinds(ctx: RankContext, folder: str, kinds: list[str]) -> int:
    """Two saves of different kinds into one folder; the step that the first kind then loads."""
    acc = accelerator("mics", state_dict_type=kinds[0])
    plugin, model = acc.state.fsdp_plugin, transformer()
    model, optimizer = acc.prepare(model, adamw(model))
    for kind in kinds:
        acc.backward(loss_of(model, torch.arange(12).reshape(2, 6)))
        optimizer.step()
        plugin.set_state_dict_type(kind)
        acc.save_state(folder)
    plugin.set_state_dict_type(kinds[0])
    acc.load_state(folder)
    return acc.sharded_of(model).steps_done


@pytest.mark.parametrize(
    "kinds", [["FULL_STATE_DICT", "SHARDED_STATE_DICT"], ["SHARDED_STATE_DICT", "FULL_STATE_DICT"]]
)
def test_the_later_save_is_loaded_whichever_kind_it_has(ranks: RankPool, tmp_path: Path, kinds: list[str]) -> None:
    (tmp_path / "log.txt").write_text("loss 1.0")
    assert run(ranks, 2, in_both_kinds, str(tmp_path), kinds) == [2, 2]
