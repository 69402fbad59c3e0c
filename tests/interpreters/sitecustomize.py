"""Start-up of an interpreter that has this folder on its path: nothing is collected while it imports."""

import gc

gc.set_threshold(1_000_000, 10, 10)  # more objects than all imports make together
