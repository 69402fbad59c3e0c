"""Descriptions of transformers by formula: parameters, FLOP and activations.

The models are those of transformers: `LlamaForCausalLM`, `GPT2LMHeadModel`, `BertForMaskedLM`, `RobertaForMaskedLM` and
the pre-LN variant of the last two. Units, and parameters with their order, are those that the engine makes of them
under ``units="auto"``. Attention is a fused kernel, dropout saves one byte for each element, and the loss is a
cross-entropy in fp32. A trace of the modules (`model_trace`) gives the same numbers, which a test compares.

Symbols: s tokens in a sequence, L layers, h hidden size, f hidden size of the feed-forward network, k size of all
key-value heads, V vocabulary, b bytes of one element.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from mics_strategy.engine.units import LARGE_NUMEL, MIN_SHARE
from mics_strategy.errors import ConfigError
from mics_strategy.planner.model import FusedAttention, ModelDescription, ParameterShape, UnitModel, attention_speed

CAUSAL_FAMILIES = ("llama", "gpt2")
FAMILIES = (*CAUSAL_FAMILIES, "bert", "roberta")

_Shapes = dict[str, tuple[int, ...]]

_FP32 = 4
_INDEX = 8  # bytes of a token's number, and of its label
_STATISTICS = 8  # bytes of LayerNorm's mean and deviation of a token


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerShape:
    """Numbers of a transformer.

    Attributes:
        name: Name of the model.
        family: llama, gpt2, bert or roberta.
        num_layers: Layers.
        hidden_size: Width.
        intermediate_size: Width inside the feed-forward network.
        num_heads: Attention heads.
        vocab_size: Rows of the embedding.
        num_kv_heads: Key-value heads; 0 for `num_heads`. Only llama has fewer.
        num_positions: Rows of the table of positions; 0 for the length of the samples. Llama has none.
        tie_embeddings: Whether one matrix is both the embedding and the output projection.
        dropout: Whether training drops activations. Llama does not.
        is_pre_norm: Whether the LayerNorms of bert and roberta precede their blocks.
        is_fused: Whether kernels of one operation keep less: the activation only its input, norms and loss no copies in
            fp32, and the loss writes its gradient over the logits.
    """

    name: str
    family: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    vocab_size: int
    num_kv_heads: int = 0
    num_positions: int = 0
    tie_embeddings: bool = True
    dropout: bool = True
    is_pre_norm: bool = False
    is_fused: bool = False

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ConfigError(
                f"`family={self.family!r}` has no formulas. Use {', '.join(FAMILIES)}, or trace the model."
            )
        sizes = ("num_layers", "hidden_size", "intermediate_size", "num_heads", "vocab_size")
        for name in sizes:
            if getattr(self, name) < 1:
                raise ConfigError(f"`{name}={getattr(self, name)}` of {self.name} is not a size. Use 1 or more.")
        if self.num_kv_heads and (self.family != "llama" or self.num_heads % self.num_kv_heads):
            raise ConfigError(
                f"`num_kv_heads={self.num_kv_heads}` of {self.name} does not divide its {self.num_heads} heads, or its "
                f"family {self.family} has no such option. Use a divisor, and the family llama."
            )
        if self.family in ("bert", "roberta") and not self.tie_embeddings:
            raise ConfigError(
                f"`tie_embeddings=False` of {self.name}: {self.family} has no formulas with two matrices. Tie them, or "
                "trace the model."
            )

    @property
    def kv_size(self) -> int:
        """Elements of a token's key, and of its value."""
        return self.hidden_size * (self.num_kv_heads or self.num_heads) // self.num_heads

    @property
    def is_causal(self) -> bool:
        """Whether a token attends to those before it only."""
        return self.family in CAUSAL_FAMILIES

    @property
    def drops(self) -> bool:
        """Whether activations are dropped, with a mask that the backward needs."""
        return self.dropout and self.family != "llama"

    @property
    def layer_weights(self) -> int:
        """Weights of one layer that multiply every token."""
        h, f = self.hidden_size, self.intermediate_size
        return 2 * h * h + 2 * h * self.kv_size + (3 if self.family == "llama" else 2) * h * f


def describe(shape: TransformerShape, tokens: int, dtype_bytes: int = 2) -> ModelDescription:
    """Describe a transformer at one length of samples.

    Args:
        shape: Numbers of the transformer.
        tokens: Tokens of a sample.
        dtype_bytes: Bytes of one element of activations: 2 for parameters gathered in 16 bits, 4 for fp32.

    Raises:
        ConfigError: Samples are longer than the table of positions; the sizes are not those of a dtype; or ``"auto"``
            would make no units of the layers, as with a single layer.
    """
    if tokens < 1 or (shape.family != "llama" and 0 < shape.num_positions < tokens):
        raise ConfigError(
            f"{tokens} tokens do not fit {shape.name}, whose table holds {shape.num_positions or 'as many'} positions. "
            "Use 1 or more tokens, and at most so many."
        )
    if dtype_bytes not in (2, 4):
        raise ConfigError(f"`dtype_bytes={dtype_bytes}` is not the size of a dtype of activations. Use 2 or 4.")
    outer = [*_outer_modules(shape, shape.num_positions or tokens)]
    layers_numel = shape.num_layers * _numel(_layer_parameters(shape))
    total = layers_numel + sum(_numel(module.parameters) for module in outer)
    if shape.num_layers < 2 or layers_numel < MIN_SHARE * total:
        raise ConfigError(
            f"{shape.name} has {shape.num_layers} layers with {layers_numel / total:.1%} of its parameters, too few "
            "for units of their own. Trace the model instead."
        )
    units = tuple(_units(shape, outer, tokens, dtype_bytes))
    return ModelDescription(
        name=shape.name,
        units=units,
        tokens_per_sample=tokens,
        model_flop_per_sample=3 * sum(unit.forward_flop for unit in units),
        activation_dtype_bytes=dtype_bytes,
    )


def _units(shape: TransformerShape, outer: Sequence[_Module], s: int, b: int) -> Iterator[UnitModel]:
    """Units in the order of the modules: root, embeddings, layers, head."""
    unit_roles = [module.role for module in outer if module.is_unit]
    root = tuple(parameter for module in outer if not module.is_unit for parameter in module.parameters)
    yield _unit("", "root", root, _root_cost(shape, s, b, unit_roles))
    for module in outer:
        if module.is_unit and not module.follows_layers:
            yield _unit(module.name, module.role, module.parameters, _role_cost(module.role, shape, s, b))
    cost = _layer_cost(shape, s, b)
    for index in range(shape.num_layers):
        name = f"{_layers_name(shape)}.{index}"
        yield _unit(name, "layer", _layer_parameters(shape, name), cost, is_layer=True)
    for module in outer:
        if module.is_unit and module.follows_layers:
            yield _unit(module.name, module.role, module.parameters, _role_cost(module.role, shape, s, b))


def _unit(
    name: str, kind: str, parameters: tuple[ParameterShape, ...], cost: _Cost, *, is_layer: bool = False
) -> UnitModel:
    return UnitModel(
        name=name,
        kind=kind,
        parameters=parameters,
        forward_flop=cost.forward_flop,
        attention_flop=cost.attention_flop,
        attention=cost.attention,
        tail_flop=cost.tail_flop,
        width=cost.width,
        saved_bytes=cost.saved_bytes,
        input_bytes=cost.input_bytes,
        working_bytes=cost.working_bytes,
        freed_bytes=cost.freed_bytes,
        depth=1 if name else 0,
        is_layer=is_layer,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Module:
    """A module outside of the layers, with parameters of its own.

    Attributes:
        name: Name in the model.
        role: Kind of cost: "embedding", "positions", "head", "dense", or "" for nothing of its own.
        parameters: Parameters that belong to it.
        follows_layers: Whether it stands behind the layers in the model.
    """

    name: str
    role: str
    parameters: tuple[ParameterShape, ...]
    follows_layers: bool = False

    @property
    def is_unit(self) -> bool:
        """Whether it is a unit: a large layer whose parameters no other module shares."""
        return bool(self.role) and _numel(self.parameters) >= LARGE_NUMEL


def _numel(parameters: Sequence[ParameterShape]) -> int:
    return sum(parameter.numel for parameter in parameters)


def _parameters(prefix: str, shapes: _Shapes) -> tuple[ParameterShape, ...]:
    return tuple(ParameterShape(name=f"{prefix}.{name}", shape=shape) for name, shape in shapes.items())


def _norm(name: str, h: int) -> _Shapes:
    return {f"{name}.weight": (h,), f"{name}.bias": (h,)}


def _linear(name: str, rows: int, columns: int) -> _Shapes:
    return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}


def _prefix(shape: TransformerShape) -> str:
    """Name of the model without its head."""
    names = {"llama": "model", "gpt2": "transformer"}
    return names.get(shape.family, "roberta_prelayernorm" if shape.is_pre_norm else shape.family)


def _layers_name(shape: TransformerShape) -> str:
    name = {"llama": "layers", "gpt2": "h"}.get(shape.family, "encoder.layer")
    return f"{_prefix(shape)}.{name}"


def _layer_parameters(shape: TransformerShape, prefix: str = "") -> tuple[ParameterShape, ...]:
    """Parameters of one layer, in the order of the modules."""
    h, f, k = shape.hidden_size, shape.intermediate_size, shape.kv_size
    if shape.family == "llama":
        attention = {"q_proj": (h, h), "k_proj": (k, h), "v_proj": (k, h), "o_proj": (h, h)}
        mlp = {"gate_proj": (f, h), "up_proj": (f, h), "down_proj": (h, f)}
        shapes: _Shapes = {f"self_attn.{name}.weight": size for name, size in attention.items()}
        shapes |= {f"mlp.{name}.weight": size for name, size in mlp.items()}
        shapes |= {"input_layernorm.weight": (h,), "post_attention_layernorm.weight": (h,)}
    elif shape.family == "gpt2":  # its matrices are transposed
        shapes = _norm("ln_1", h)
        shapes |= {"attn.c_attn.weight": (h, 3 * h), "attn.c_attn.bias": (3 * h,)}
        shapes |= {"attn.c_proj.weight": (h, h), "attn.c_proj.bias": (h,)} | _norm("ln_2", h)
        shapes |= {
            "mlp.c_fc.weight": (h, f),
            "mlp.c_fc.bias": (f,),
            "mlp.c_proj.weight": (f, h),
            "mlp.c_proj.bias": (h,),
        }
    else:
        shapes = {}
        for name in ("query", "key", "value"):
            shapes |= _linear(f"attention.self.{name}", h, h)
        shapes |= _linear("attention.output.dense", h, h)
        first, second = ("attention", "intermediate") if shape.is_pre_norm else ("attention.output", "output")
        shapes |= _norm(f"{first}.LayerNorm", h) | (_norm(f"{second}.LayerNorm", h) if shape.is_pre_norm else {})
        shapes |= _linear("intermediate.dense", f, h) | _linear("output.dense", h, f)
        shapes |= {} if shape.is_pre_norm else _norm(f"{second}.LayerNorm", h)
    return _parameters(prefix, shapes)


def _outer_modules(shape: TransformerShape, num_positions: int) -> Iterator[_Module]:
    """Modules outside of the layers, in the order of the model.

    Tied embeddings are no unit of their own: the head, which is outside, has the same matrix.
    """
    h, vocab, prefix = shape.hidden_size, shape.vocab_size, _prefix(shape)
    embedding_role = "" if shape.tie_embeddings else "embedding"

    def module(name: str, shapes: _Shapes, role: str = "", follows_layers: bool = False) -> _Module:
        return _Module(name=name, role=role, parameters=_parameters(name, shapes), follows_layers=follows_layers)

    if shape.is_causal:
        is_llama = shape.family == "llama"
        yield module(f"{prefix}.{'embed_tokens' if is_llama else 'wte'}", {"weight": (vocab, h)}, embedding_role)
        if not is_llama:
            yield module(f"{prefix}.wpe", {"weight": (num_positions, h)}, "positions")
        norm: _Shapes = {"weight": (h,)} if is_llama else {"weight": (h,), "bias": (h,)}
        yield module(f"{prefix}.{'norm' if is_llama else 'ln_f'}", norm, follows_layers=True)
        if not shape.tie_embeddings:
            yield module("lm_head", {"weight": (vocab, h)}, "head", follows_layers=True)
        return
    is_bert = shape.family == "bert" and not shape.is_pre_norm
    rows = num_positions if is_bert else num_positions + 2  # RoBERTa's positions begin behind that of the padding
    embeddings, types = f"{prefix}.embeddings", 2 if shape.family == "bert" else 1
    yield module(f"{embeddings}.word_embeddings", {"weight": (vocab, h)}, embedding_role)
    positions = module(f"{embeddings}.position_embeddings", {"weight": (rows, h)}, "positions")
    yield from [positions] if is_bert else []
    yield module(f"{embeddings}.token_type_embeddings", {"weight": (types, h)})
    yield module(f"{embeddings}.LayerNorm", {"weight": (h,), "bias": (h,)})
    yield from [] if is_bert else [positions]
    if shape.is_pre_norm:
        yield module(f"{prefix}.LayerNorm", {"weight": (h,), "bias": (h,)}, follows_layers=True)
    head = "cls.predictions" if is_bert else "lm_head"
    transform, norm_name = (f"{head}.transform", "LayerNorm") if is_bert else (head, "layer_norm")
    yield module(head, {"bias": (vocab,)}, follows_layers=True)
    yield module(f"{transform}.dense", {"weight": (h, h), "bias": (h,)}, "dense", follows_layers=True)
    yield module(f"{transform}.{norm_name}", {"weight": (h,), "bias": (h,)}, follows_layers=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cost:
    """What one sample costs in one unit; the fields are those of `UnitModel`."""

    forward_flop: float = 0.0
    attention_flop: float = 0.0
    attention: FusedAttention = field(default_factory=FusedAttention)
    tail_flop: float = 0.0
    width: int = 0
    saved_bytes: int = 0
    input_bytes: int = 0
    working_bytes: int = 0
    freed_bytes: int = 0


def _layer_cost(shape: TransformerShape, s: int, b: int) -> _Cost:
    """Cost of one layer.

    The backward needs most where it goes through the feed-forward network's activation.

    Source:
        With attention fused, 34 s h bytes for f = 4h and b = 2, as in Korthikanti et al. (arXiv:2205.05198), section
        4.1. GPT-2's activation is five operations (tanh); LLaMA's norms compute in fp32.
    """
    h, f, k = shape.hidden_size, shape.intermediate_size, shape.kv_size
    scores = 4 * s * h / (2 if shape.is_causal else 1)
    mask = h if shape.drops else 0
    attention = b * (2 * h + 2 * k) + _FP32 * shape.num_heads  # query, key, value, output, sums of rows
    if shape.family == "llama":
        norm, gated = (b * h, 3) if shape.is_fused else (_FP32 * h + b * h, 4)
        saved = 2 * (norm + _FP32 + b * h) + attention + gated * b * f
        working = 2 * b * f + b * h
    else:
        activation = 5 if shape.family == "gpt2" and not shape.is_fused else 2
        saved = 4 * b * h + attention + activation * b * f + 2 * mask + 2 * _STATISTICS
        if shape.family == "gpt2":
            working = 2 * b * f + b * h - mask
        else:  # post-LN has freed the input of its last LayerNorm
            freed = mask - (b * h if mask else 0) + (0 if shape.is_pre_norm else b * h + _STATISTICS)
            working = max(b * f + b * h - freed, 2 * b * h)
    return _Cost(
        forward_flop=s * (2.0 * shape.layer_weights + scores),
        attention_flop=float(s * scores),
        attention=FusedAttention(s * attention, 2.0 * s * h * (h + 2 * k), attention_speed(s, h // shape.num_heads)),
        tail_flop=2.0 * s * h * f,
        width=h,
        saved_bytes=s * saved,
        input_bytes=s * b * h,
        working_bytes=s * working,
    )


def _logits_cost(shape: TransformerShape, s: int, b: int) -> _Cost:
    """Cost of the logits and of their loss.

    Kept are the logits, and their logarithms in fp32; the gradients of both in fp32 are temporary.
    """
    h, vocab = shape.hidden_size, shape.vocab_size
    if shape.is_fused:
        kept = b * vocab + _FP32 + _INDEX + b * h
        flop = 2.0 * s * h * vocab
        freed = s * (_INDEX + b * h)
        return _Cost(forward_flop=flop, width=h, saved_bytes=s * kept, input_bytes=s * b * h, freed_bytes=freed)
    return _Cost(
        forward_flop=2.0 * s * h * vocab,
        width=h,
        saved_bytes=s * ((b + _FP32) * vocab + _INDEX + b * h),
        input_bytes=s * b * h,
        working_bytes=s * (2 * _FP32 * vocab - _INDEX),
        freed_bytes=s * (_FP32 * vocab + _INDEX + b * h),
    )


def _role_cost(role: str, shape: TransformerShape, s: int, b: int) -> _Cost:
    """Cost of a module outside of the layers that may be a unit."""
    h = shape.hidden_size
    if role == "embedding":
        return _Cost(saved_bytes=s * _INDEX, input_bytes=s * _INDEX, working_bytes=s * b * h)
    if role == "head":
        return _logits_cost(shape, s, b)
    if role == "dense":
        return _Cost(
            forward_flop=2.0 * s * h * h,
            saved_bytes=s * b * h,
            input_bytes=s * b * h,
            working_bytes=2 * s * b * h,
            freed_bytes=s * b * h,
        )
    return _Cost(working_bytes=s * b * h)  # of positions: all samples read the same rows


def _root_cost(shape: TransformerShape, s: int, b: int, unit_roles: Sequence[str]) -> _Cost:
    """Cost of all that is outside of the layers and of the units with `unit_roles`."""
    h = shape.hidden_size
    roles = ("embedding", "head") if shape.is_causal else ("embedding", "head", "dense")
    parts = [_role_cost(role, shape, s, b) for role in roles if role not in unit_roles]
    mask, norm = h if shape.drops else 0, b * h + _STATISTICS
    before = freed = 0  # kept in front of the layers and behind them
    if shape.family == "llama":
        freed, working = _FP32 * h + _FP32 + b * h, 4 * _FP32 * h + (b * h if b < _FP32 else 0) - _FP32
    elif shape.family == "gpt2":
        before, freed, working = mask, norm, 2 * b * h
    else:  # LayerNorms of the embeddings and of the head; the activation
        before, freed, working = norm + mask, norm + b * h + (norm if shape.is_pre_norm else 0), b * h
    return _Cost(
        forward_flop=sum(part.forward_flop for part in parts),
        width=h,
        saved_bytes=s * (before + freed) + sum(part.saved_bytes for part in parts),
        input_bytes=s * _INDEX,
        working_bytes=max(s * working, *(part.working_bytes for part in parts), 0),
        freed_bytes=s * freed + sum(part.freed_bytes for part in parts),
    )
