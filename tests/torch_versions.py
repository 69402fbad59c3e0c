"""What do the oldest versions of torch that are supported not do?"""

import pytest
import torch

kinds_of_dtensors = pytest.mark.skipif(
    torch.__version__ < "2.12", reason="torch 2.11 does not tell a kind of DTensor of the operations on it"
)
