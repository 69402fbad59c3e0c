"""Model for the planner: parameters, arithmetic and activations of each unit.

Pure data: whoever builds a description (a table of published models, a configuration of transformers, a traced module)
and whoever reads it (memory, simulator, solver) meet here.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterShape:
    """One parameter.

    Attributes:
        name: Name in the model.
        shape: Shape of the whole parameter.
        is_trained: Whether it has a gradient.
        dtype: Dtype in which the optimizer updates it; ``"auto"`` where the reader of the description states one for
            all parameters.
    """

    name: str
    shape: tuple[int, ...]
    is_trained: bool = True
    dtype: torch.dtype | str = "auto"

    @property
    def numel(self) -> int:
        """Elements of the parameter."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class FusedAttention:
    """Attention of one unit and one sample, with the matrix products in front of it.

    Attributes:
        saved_bytes: Bytes that it keeps for the backward: query, key, value, output and sums of rows.
        inputs_flop: FLOP of the matrix products.
        speed: Share of its best speed at which it runs with this length and head size; see `attention_speed`.
    """

    saved_bytes: int = 0
    inputs_flop: float = 0.0
    speed: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitModel:
    """One unit of a model: parameters, and what one sample costs in it.

    Attributes:
        name: Name of the unit in the model; empty for the root.
        kind: Name of its class of units. Units of one kind have equal parameters and costs.
        parameters: Parameters, in the order of the engine.
        forward_flop: FLOP of matrix products that the forward of one sample executes. A fused kernel computes half of
            the scores of causal attention.
        attention_flop: FLOP of fused attention among `forward_flop`.
        attention: Its speed, and what recomputing attention alone frees and costs.
        tail_flop: FLOP of the last matrix product among `forward_flop`, which recomputation leaves out: nothing behind
            it is kept.
        width: Elements of a token in its matrix products, 0 where that is not known.
        saved_bytes: Bytes that autograd keeps for the backward of one sample, without recomputation. Those of the loss
            and of the model's output belong to the unit that computes the output.
        input_bytes: Bytes of the unit's input for one sample, which is all that recomputation keeps.
        working_bytes: Most bytes of temporary tensors of one sample during its backward, beyond those kept.
        freed_bytes: Bytes of `saved_bytes` that are freed before the backward reaches the layers: those of the loss,
            the head and the last norm. 0 for layers.
        depth: Units around it; the root has 0.
        is_layer: Whether recomputation applies: to the layers that a model repeats, not to embeddings, head and root.
        has_backward: Whether a backward runs through it: not where it and all before it are frozen.
    """

    name: str
    kind: str
    parameters: tuple[ParameterShape, ...]
    forward_flop: float
    saved_bytes: int
    input_bytes: int
    working_bytes: int
    freed_bytes: int = 0
    depth: int = 1
    is_layer: bool = True
    has_backward: bool = True
    attention_flop: float = 0.0
    attention: FusedAttention = FusedAttention()
    tail_flop: float = 0.0
    width: int = 0

    @property
    def numel(self) -> int:
        """Elements of its parameters."""
        return sum(parameter.numel for parameter in self.parameters)

    @property
    def weight_grad_share(self) -> float:
        """Share of its matrix products whose weights need a gradient, by their elements: 1 if all are trained."""
        matrices = [parameter for parameter in self.parameters if len(parameter.shape) > 1]
        trained = sum(parameter.numel for parameter in matrices if parameter.is_trained)
        return trained / sum(parameter.numel for parameter in matrices) if matrices else 1.0

    @property
    def model_flop(self) -> float:
        """FLOP of the forward and backward of one sample, nothing recomputed."""
        if not self.has_backward:
            return self.forward_flop
        products = self.forward_flop - self.attention_flop
        return 3 * self.attention_flop + (2 + self.weight_grad_share) * products


def attention_speed(num_tokens: int, head_size: int) -> float:
    """Speed of fused attention over that of long sequences and heads of 128 elements.

    Short sequences fill the device badly and compute more of the masked half; small heads have more exponentials for
    each product.

    Args:
        num_tokens: Tokens of a sequence.
        head_size: Elements of a head.

    Source:
        FlashAttention-2 (arXiv:2307.08691), figure 4, causal forward and backward on A100: 102, 143, 165, 178, 186 and
        189 TFLOP/s for 512 to 16k tokens and heads of 128; 171 for heads of 64.
    """
    return num_tokens / (num_tokens + 370) * min(1.0, 1.117 * head_size / (head_size + 15))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    """A model at one length of samples.

    Attributes:
        name: Name of the model.
        units: Units in the order of the forward; the root is the first.
        tokens_per_sample: Tokens of a sequence; 1 for an image.
        model_flop_per_sample: FLOP of forward and backward by the mathematics: causal attention halved, nothing
            recomputed.
        activation_dtype_bytes: Bytes of one element of activations, for which the units' bytes were counted.
    """

    name: str
    units: tuple[UnitModel, ...]
    tokens_per_sample: int
    model_flop_per_sample: float
    activation_dtype_bytes: int

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(unit.numel for unit in self.units)

    @property
    def trained_share(self) -> float:
        """Share of the elements that are trained."""
        trained = sum(parameter.numel for unit in self.units for parameter in unit.parameters if parameter.is_trained)
        return trained / self.numel

    def without_activations(self) -> ModelDescription:
        """The same parameters in units whose activations take no memory."""
        units = (
            dataclasses.replace(unit, saved_bytes=0, input_bytes=0, working_bytes=0, freed_bytes=0)
            for unit in self.units
        )
        return dataclasses.replace(self, units=tuple(units))
