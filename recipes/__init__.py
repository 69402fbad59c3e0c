"""What does a complete pretraining run look like? Typed configs, data, models, one program for all."""

import logging

# Where torchao is installed, transformers imports it, and it tells of each CUDA kernel that a CPU build cannot load.
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)
