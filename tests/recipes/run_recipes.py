"""Run recipes one after the other in the ranks that Lightning started for the first: NAME... -- OPTION...

Each has a process group of its own, on the next port of the list `PORTS` in the environment: the store of an earlier
group lives as long as the process and holds its old keys.
"""

import os
import sys

from recipes.pretrain import main

if __name__ == "__main__":
    end = sys.argv.index("--")
    for name, port in zip(sys.argv[1:end], os.environ["PORTS"].split(","), strict=True):
        os.environ["MASTER_PORT"] = port
        main([name, "--ci", *(option.replace("{name}", name) for option in sys.argv[end + 1 :])])
