"""The numbers of a network, validated for its family.

One flat dataclass serves all families, so that a YAML file stays a plain list. A field that a family has takes the
family's default where the recipe says nothing; a field that it does not have stays ``"auto"``, and any other value is
refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import RecipeError, require

Family = Literal["llama", "gpt2", "bert", "roberta", "wide_resnet"]
CompileBackend = Literal["none", "inductor", "aot_eager", "eager"]
CAUSAL_FAMILIES = ("llama", "gpt2")  # predict the next token, so they can write text
MASKED_FAMILIES = ("bert", "roberta")  # predict the tokens that the batch hides
IMAGE_FAMILIES = ("wide_resnet",)

_TEXT = {"vocab_size": 1024, "hidden_size": 128, "intermediate_size": 512, "num_layers": 4, "num_heads": 4}
_LEARNED_POSITIONS = {**_TEXT, "tie_embeddings": True, "dropout": 0.1, "max_positions": "auto"}
_IMAGES = {"stage_blocks": (1, 1, 1, 1), "width_factor": 1, "base_width": 16, "num_classes": 10}
DEFAULTS: Mapping[Family, Mapping[str, Any]] = {
    "llama": {**_TEXT, "intermediate_size": 344, "num_kv_heads": "auto", "tie_embeddings": False},
    "gpt2": _LEARNED_POSITIONS,
    "bert": {**_LEARNED_POSITIONS, "norm_position": "post"},
    "roberta": {**_LEARNED_POSITIONS, "norm_position": "post"},
    "wide_resnet": _IMAGES,
}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Numbers of a network, as far as its family has them; ``"auto"`` elsewhere.

    Args:
        vocab_size: Rows of the embedding, and the largest vocabulary of the tokenizer; text families.
        hidden_size: Width; text families.
        intermediate_size: Width inside the feed-forward network; text families.
        num_layers: Number of transformer layers; text families.
        num_heads: Number of attention heads, a divisor of the width; text families.
        num_kv_heads: Number of key-value heads, a divisor of the heads; llama. ``"auto"`` is `num_heads`.
        tie_embeddings: Whether one matrix is both the embedding and the output projection; text families.
        dropout: Share of activations and attention weights that training drops; gpt2, bert, roberta.
        max_positions: Longest sequence that the table of positions holds; gpt2, bert, roberta. ``"auto"`` is
            `data.sequence_length`.
        norm_position: Whether LayerNorm follows a residual block (``"post"``, as published) or precedes it (``"pre"``,
            which trains at any depth); bert, roberta.
        stage_blocks: Number of bottleneck blocks in each of the four stages; wide_resnet.
        width_factor: Factor on the channels of every inner 3x3 convolution; wide_resnet.
        base_width: Channels of the stem; wide_resnet.
        num_classes: Number of classes; wide_resnet.
    """

    vocab_size: int | Literal["auto"] = "auto"
    hidden_size: int | Literal["auto"] = "auto"
    intermediate_size: int | Literal["auto"] = "auto"
    num_layers: int | Literal["auto"] = "auto"
    num_heads: int | Literal["auto"] = "auto"
    num_kv_heads: int | Literal["auto"] = "auto"
    tie_embeddings: bool | Literal["auto"] = "auto"
    dropout: float | Literal["auto"] = "auto"
    max_positions: int | Literal["auto"] = "auto"
    norm_position: Literal["post", "pre", "auto"] = "auto"
    stage_blocks: tuple[int, int, int, int] | Literal["auto"] = "auto"
    width_factor: int | Literal["auto"] = "auto"
    base_width: int | Literal["auto"] = "auto"
    num_classes: int | Literal["auto"] = "auto"


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Shape):
    """A network with random weights, built from these numbers.

    Args:
        family: Architecture.
        activation_checkpointing: Whether only the inputs of layers are kept, and the rest is recomputed in the
            backward; text families.
        compile: Backend of `torch.compile` for the forward of each layer, or ``"none"``.
        meta_start: Whether the model is built without memory and every layer initialized when it is sharded, so that no
            rank ever holds the whole model; strategies of this project only.
    """

    family: Family = "llama"
    activation_checkpointing: bool = False
    compile: CompileBackend = "none"
    meta_start: bool = False

    def __post_init__(self) -> None:
        """Resolve the family's defaults; refuse its absent options and shapes that no model has."""
        defaults = DEFAULTS[self.family]
        absent = [name for name in Shape.__dataclass_fields__ if name not in defaults and getattr(self, name) != "auto"]
        if absent:
            raise RecipeError(
                f"`model.{absent[0]}={getattr(self, absent[0])}` cannot be used: `model.family={self.family}` has no "
                f"such option. Remove it. The options of {self.family}: {', '.join(defaults)}."
            )
        for name, value in defaults.items():
            if getattr(self, name) == "auto":
                object.__setattr__(self, name, value)
        if self.family in IMAGE_FAMILIES:
            self._check_images()
        else:
            self._check_text()

    @property
    def is_masked(self) -> bool:
        """Whether the model predicts tokens that the batch hides."""
        return self.family in MASKED_FAMILIES

    @property
    def reads_images(self) -> bool:
        """Whether the model classifies images."""
        return self.family in IMAGE_FAMILIES

    @property
    def vocab_rows(self) -> int:
        """Rows of the embedding; 0 for images."""
        return 0 if self.vocab_size == "auto" else self.vocab_size

    @property
    def kv_heads(self) -> int:
        """Number of key-value heads."""
        return int(self.num_heads if self.num_kv_heads == "auto" else self.num_kv_heads)

    def positions(self, sequence_length: int) -> int:
        """Return the positions that the table holds.

        Raises:
            RecipeError: The sequences are longer.
        """
        if self.max_positions == "auto":
            return sequence_length
        require(
            self.max_positions >= sequence_length,
            "model.max_positions",
            self.max_positions,
            f"at least `data.sequence_length={sequence_length}`",
        )
        return self.max_positions

    def _check_text(self) -> None:
        require(self.vocab_size >= 257, "model.vocab_size", self.vocab_size, "at least 257 (256 bytes and end of text)")
        for name in ("hidden_size", "intermediate_size", "num_layers"):
            require(getattr(self, name) >= 1, f"model.{name}", getattr(self, name), "at least 1")
        heads = self.num_heads
        is_rotary = self.family == "llama"
        size = f"`model.hidden_size={self.hidden_size}`"
        require(
            heads >= 1 and self.hidden_size % ((2 if is_rotary else 1) * heads) == 0,
            "model.num_heads",
            heads,
            f"a divisor of {size} that leaves heads of an even size" if is_rotary else f"a divisor of {size}",
        )
        require(
            self.kv_heads >= 1 and heads % self.kv_heads == 0,
            "model.num_kv_heads",
            self.kv_heads,
            f"a divisor of `model.num_heads={heads}`",
        )
        if self.dropout != "auto":
            require(0 <= self.dropout < 1, "model.dropout", self.dropout, "at least 0 and below 1")

    def _check_images(self) -> None:
        require(min(self.stage_blocks) >= 1, "model.stage_blocks", self.stage_blocks, "four numbers of at least 1")
        for name in ("width_factor", "base_width", "num_classes"):
            require(getattr(self, name) >= 1, f"model.{name}", getattr(self, name), "at least 1")
        require(
            not self.activation_checkpointing,
            "model.activation_checkpointing",
            self.activation_checkpointing,
            "false for wide_resnet, because the recomputation would update BatchNorm's running statistics again",
        )
