"""FSDP2's scenarios of clipping: torch's own function scales by the norm of all ranks."""

import math
from functools import partial

from torch import nn

from tests.fsdp2_parity import models
from tests.fsdp2_parity.runner import Scenario, Tokens, Vectors
from tests.models import VOCABULARY, Block

ORDERS = {"two": 2.0, "one": 1.0, "three": 3.0, "infinity": math.inf}
SCENARIOS = {
    **{
        f"order {name}": Scenario(
            build=models.transformer, inputs=Tokens(VOCABULARY), units=(Block,), clip=(1e-3, order)
        )
        for name, order in ORDERS.items()
    },
    "a norm below the limit": Scenario(
        build=models.transformer, inputs=Tokens(VOCABULARY), units=(Block,), clip=(1e6, 2.0)
    ),
    "rows that no rank divides": Scenario(
        build=partial(models.two_linears, (7, 17), (17, 3)),
        inputs=Vectors((4, 7)),
        units=(nn.Linear,),
        clip=(1e-3, 2.0),
    ),
}
