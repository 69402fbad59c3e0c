"""A rank without torch: it says that it is ready, notes SIGUSR1, and ends as it is told: FOLDER [RANK CODE]."""

import os
import signal
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    folder, rank = Path(sys.argv[1]), os.environ["RANK"]
    signal.signal(signal.SIGUSR1, lambda *_: (folder / f"{rank}.noted").touch())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    places = [os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT")]
    (folder / f"{rank}.draft").write_text(" ".join(places))
    (folder / f"{rank}.draft").rename(folder / f"{rank}.ready")
    if sys.argv[2:3] == [rank]:
        sys.exit(int(sys.argv[3]))
    time.sleep(60)
