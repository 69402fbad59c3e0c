"""Construction of a recipe's network, with checkpointing and compilation of its layers.

A new text family is a builder in `transformer.py`, its options in `config.py` and its arithmetic in `cost.py`.
"""

from typing import Any

import torch
from torch import nn

from .config import CompileBackend, ModelConfig
from .transformer import build_transformer, layers_of
from .wide_resnet import WideResNet


def build_model(config: ModelConfig, sequence_length: int) -> nn.Module:
    """Build a model on torch's current default device.

    Args:
        config: Numbers of the model.
        sequence_length: Longest sequence of the run; not used for images.

    Returns:
        For text, a model whose forward takes `input_ids` [B, S] and returns an object with `logits` [B, S, V]; for
        images, one whose forward takes `images` [B, 3, H, W] and returns logits [B, C].

    Raises:
        RecipeError: The table of positions is shorter than the sequences.
    """
    if config.reads_images:
        network = WideResNet(
            tuple(config.stage_blocks),
            width_factor=config.width_factor,
            base_width=config.base_width,
            num_classes=config.num_classes,
        )
        _compile_layers(network.blocks(), config.compile)
        return network
    model = build_transformer(config, sequence_length)
    if config.activation_checkpointing:
        _checkpoint_activations(model)
    _compile_layers(layers_of(model), config.compile)
    return model


def num_parameters(config: ModelConfig, sequence_length: int) -> int:
    """Count parameters without allocating any; tied ones count once."""
    with torch.device("meta"):
        model = build_model(config, sequence_length)
    return sum(parameter.numel() for parameter in model.parameters())


def _checkpoint_activations(model: Any) -> None:
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable({"use_reentrant": False})
    else:  # the name in older releases of transformers 5
        model.gradient_checkpointing_enable({"use_reentrant": False})


def _compile_layers(layers: Any, backend: CompileBackend) -> None:
    """Compile the forward of each layer; equal layers share one graph, and hooks of the engine stay outside of it."""
    if backend == "none":
        return
    for layer in layers:
        layer.forward = torch.compile(layer.forward, backend=backend)
