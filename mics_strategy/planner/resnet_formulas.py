"""Descriptions of wide residual networks by formula.

The network is torchvision's `ResNet` of bottleneck blocks whose inner 3x3 convolution is wider, as the recipes build
it. Units are those of the engine under ``units="auto"``: every block, and the root with stem and classifier. Activation
functions are not in place. A trace of the modules gives the same numbers, which a test compares.

Pure.

Source:
    Wide residual networks (arXiv:1605.07146); MiCS (arXiv:2205.00119), section 5.1.4.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mics_strategy.errors import ConfigError
from mics_strategy.planner.model import ModelDescription, ParameterShape, UnitModel

IMAGE_SIZE = 224  # pixels along the edge of ImageNet's crops

_EXPANSION = 4  # output channels of a block over channels of its stage
_STRIDES = (1, 2, 2, 2)
_INDEX = 8  # bytes of a pooling's choice, and of a label
_FP32 = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ResnetShape:
    """Numbers of a wide residual network.

    Attributes:
        name: Name of the model.
        stage_blocks: Blocks of each of the four stages.
        width_factor: Factor on the channels of the inner 3x3 convolutions.
        base_width: Channels of the stem and of the first stage; each later stage has twice as many.
        num_classes: Classes.
    """

    name: str
    stage_blocks: tuple[int, ...]
    width_factor: int
    base_width: int
    num_classes: int

    def __post_init__(self) -> None:
        numbers = (*self.stage_blocks, self.width_factor, self.base_width, self.num_classes)
        if len(self.stage_blocks) != len(_STRIDES) or min(numbers) < 1:
            raise ConfigError(
                f"`stage_blocks={self.stage_blocks}` and widths of {self.name} are no network. Use four stages, and "
                "numbers of 1 or more."
            )


def describe_resnet(shape: ResnetShape, image_size: int, dtype_bytes: int = 4) -> ModelDescription:
    """Describe a wide residual network.

    Args:
        shape: Numbers of the network.
        image_size: Pixels along the edge of a square image, a multiple of 32.
        dtype_bytes: Bytes of one element of activations: 2 or 4.

    Raises:
        ConfigError: The size is not a multiple of 32.
    """
    if image_size < 32 or image_size % 32:
        raise ConfigError(f"`image_size={image_size}` is not divided evenly by the five strides. Use a multiple of 32.")
    blocks = [*_blocks(shape, image_size // 4)]
    units = [_root_unit(shape, image_size, dtype_bytes)]
    units += [_block_unit(block, dtype_bytes, is_first=block is blocks[0]) for block in blocks]
    return ModelDescription(
        name=shape.name,
        units=tuple(units),
        tokens_per_sample=1,
        model_flop_per_sample=3 * sum(unit.forward_flop for unit in units),
        activation_dtype_bytes=dtype_bytes,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """One bottleneck block: its channels, and the pixels of its input and output."""

    name: str
    kind: str
    channels: int
    inner: int
    out: int
    pixels_in: int
    pixels_out: int

    @property
    def has_projection(self) -> bool:
        """Whether the residual connection has a convolution."""
        return self.channels != self.out or self.pixels_in != self.pixels_out


def _blocks(shape: ResnetShape, edge: int) -> Iterator[_Block]:
    channels = shape.base_width
    for stage, (num_blocks, stride) in enumerate(zip(shape.stage_blocks, _STRIDES, strict=True)):
        width = shape.base_width * 2**stage
        for index in range(num_blocks):
            before, edge = edge, edge // (stride if index == 0 else 1)
            yield _Block(
                name=f"stages.{stage}.{index}",
                kind=f"block-{stage}-{'first' if index == 0 else 'rest'}",
                channels=channels,
                inner=width * shape.width_factor,
                out=width * _EXPANSION,
                pixels_in=before**2,
                pixels_out=edge**2,
            )
            channels = width * _EXPANSION


def _conv(name: str, channels: int, out: int, size: int) -> dict[str, tuple[int, ...]]:
    """A convolution without bias, and its BatchNorm."""
    return {f"{name}.0.weight": (out, channels, size, size), f"{name}.1.weight": (out,), f"{name}.1.bias": (out,)}


def _parameters(prefix: str, shapes: dict[str, tuple[int, ...]]) -> tuple[ParameterShape, ...]:
    return tuple(ParameterShape(name=f"{prefix}{name}", shape=shape) for name, shape in shapes.items())


def _block_unit(block: _Block, b: int, *, is_first: bool) -> UnitModel:
    """The unit of a block.

    Each convolution's input is the output of the activation before it, which is kept once; BatchNorms keep their
    inputs. The first block also keeps the pooled stem.
    """
    c, inner, out, before, after = block.channels, block.inner, block.out, block.pixels_in, block.pixels_out
    shapes = _conv("reduce", c, inner, 1) | _conv("conv", inner, inner, 3) | _conv("expand", inner, out, 1)
    flop = 2.0 * (c * inner * before + 9 * inner * inner * after + inner * out * after)
    kept = 2 * inner * before + 2 * inner * after + 2 * out * after + (c * before if is_first else 0)
    if block.has_projection:
        shapes |= _conv("residual", c, out, 1)
        flop += 2.0 * c * out * after
        kept += out * after
    return UnitModel(
        name=block.name,
        kind=block.kind,
        parameters=_parameters(f"{block.name}.", shapes),
        forward_flop=flop,
        saved_bytes=b * kept,
        input_bytes=b * c * before,
        working_bytes=b * _working_numel(block),
    )


def _working_numel(block: _Block) -> int:
    """Most elements of temporary gradients in the backward of a block.

    Elements of kept tensors that it has freed are subtracted.

    The candidates are the backwards of three activation functions, each with the gradients of its output and input: the
    last one, the one behind the 3x3 convolution, and the one before it.
    """
    out, after = block.out * block.pixels_out, block.inner * block.pixels_out
    if not block.has_projection:
        return max(2 * out, 2 * after - out)
    before, residual = block.inner * block.pixels_in, block.channels * block.pixels_in
    return max(2 * out, 2 * after + residual - 3 * out, 2 * before + residual - 3 * out - 2 * after)


def _root_unit(shape: ResnetShape, image_size: int, b: int) -> UnitModel:
    """The unit of stem, pooling and classifier."""
    width, features = shape.base_width, shape.base_width * 8 * _EXPANSION
    stem, pooled = (image_size // 2) ** 2, (image_size // 4) ** 2
    shapes = _conv("stem", 3, width, 7)
    shapes |= {"classifier.weight": (shape.num_classes, features), "classifier.bias": (shape.num_classes,)}
    freed_bytes = _FP32 * shape.num_classes + _INDEX
    return UnitModel(
        name="",
        kind="root",
        parameters=_parameters("", shapes),
        forward_flop=2.0 * (3 * 49 * width * stem + features * shape.num_classes),
        saved_bytes=b * (3 * image_size**2 + 2 * width * stem + features)
        + _INDEX * width * pooled
        + b * shape.num_classes
        + freed_bytes,
        input_bytes=b * 3 * image_size**2,
        working_bytes=max(
            2 * _FP32 * shape.num_classes, b * features * (image_size // 32) ** 2 - _FP32 * shape.num_classes - _INDEX
        ),
        freed_bytes=freed_bytes + b * features,
        depth=0,
        is_layer=False,
    )
