"""A script with `transformers.Trainer` that knows nothing of MiCS. In its first life all ranks are killed in a step."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from tests.accelerate.trainer_runs import arguments, llama, logs, trainer


class Killed(TrainerCallback):
    """By itself, as by the system, when all ranks are in that step."""

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 4 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            torch.distributed.barrier()
            os.kill(os.getpid(), signal.SIGKILL)


def main(folder: Path) -> None:
    """Train, and write what was logged and the weights."""
    made = trainer(llama(), arguments(folder), callbacks=[Killed()] if sys.argv[2] == "killed" else [])
    made.train()
    state = made.accelerator.get_state_dict(made.model)
    if made.accelerator.is_main_process:
        torch.save((logs(made)[:-1], state), folder / "trained.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
