"""Run recipes one after the other in the same ranks: NAME... -- OPTION...

Lightning starts the second rank with the first recipe; for Accelerate, the caller starts both. Each recipe has a
process group of its own, on the next port of the list `PORTS` in the environment, because the store of an earlier group
lives as long as the process and holds its old keys.
"""

import os
import sys

from accelerate.state import AcceleratorState

from recipes.pretrain import main

if __name__ == "__main__":
    end = sys.argv.index("--")
    for name, port in zip(sys.argv[1:end], os.environ["PORTS"].split(","), strict=True):
        os.environ["MASTER_PORT"] = port
        main([name, "--ci", *(option.replace("{name}", name) for option in sys.argv[end + 1 :])])
        AcceleratorState._reset_state(reset_partial_state=True)
