"""A residual network for images whose inner 3x3 convolutions are wider.

The structure is torchvision's `ResNet` of `Bottleneck` blocks with `width_per_group = 64 * width_factor`: only the 3x3
convolution inside a block is widened, so the input and output of a block keep four times the channels of its stage.

BatchNorm's running statistics are buffers: they are not sharded.

Source:
    Wide residual networks (arXiv:1605.07146); MiCS (arXiv:2205.00119), section 5.1.4, with stages of 6, 8, 46 and 6
    blocks and a width factor of 8.
"""

from collections.abc import Iterator

import torch
from torch import nn

_EXPANSION = 4  # output channels of a block over channels of its stage
_STRIDES = (1, 2, 2, 2)


class WideResNet(nn.Module):
    """Stem, four stages of bottleneck blocks, mean over the pixels, linear classifier.

    Args:
        stage_blocks: Number of blocks in each stage.
        width_factor: Factor on the channels of the inner 3x3 convolutions.
        base_width: Channels of the stem and of the first stage; each later stage has twice as many.
        num_classes: Number of classes.
    """

    def __init__(
        self, stage_blocks: tuple[int, int, int, int], *, width_factor: int, base_width: int, num_classes: int
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(_Conv(3, base_width, 7, stride=2), nn.BatchNorm2d(base_width), nn.ReLU())
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)
        self.stages = nn.ModuleList()
        channels = base_width
        for index, num_blocks in enumerate(stage_blocks):
            out, inner = base_width * 2**index * _EXPANSION, base_width * 2**index * width_factor
            blocks = [Bottleneck(channels, inner, out, stride=_STRIDES[index])]
            blocks += [Bottleneck(out, inner, out, stride=1) for _ in range(num_blocks - 1)]
            self.stages.append(nn.Sequential(*blocks))
            channels = out
        self.classifier = nn.Linear(channels, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits [B, num_classes] for images [B, 3, H, W]."""
        features = self.pool(self.stem(images))
        for stage in self.stages:
            features = stage(features)
        return self.classifier(features.mean((2, 3)))

    def blocks(self) -> Iterator["Bottleneck"]:
        """Yield the blocks of all stages in order."""
        for stage in self.stages:
            yield from stage


class Bottleneck(nn.Module):
    """Convolutions 1x1, 3x3 and 1x1 beside a residual connection.

    Args:
        channels: Input channels.
        inner: Channels of the 3x3 convolution.
        out: Output channels.
        stride: Stride of the 3x3 convolution, and of the residual's 1x1 convolution where the shape changes.
    """

    def __init__(self, channels: int, inner: int, out: int, *, stride: int) -> None:
        super().__init__()
        self.reduce = nn.Sequential(_Conv(channels, inner, 1), nn.BatchNorm2d(inner), nn.ReLU())
        self.conv = nn.Sequential(_Conv(inner, inner, 3, stride=stride), nn.BatchNorm2d(inner), nn.ReLU())
        self.expand = nn.Sequential(_Conv(inner, out, 1), nn.BatchNorm2d(out))
        has_same_shape = stride == 1 and channels == out
        self.residual = (
            nn.Identity()
            if has_same_shape
            else nn.Sequential(_Conv(channels, out, 1, stride=stride), nn.BatchNorm2d(out))
        )
        self.activation = nn.ReLU()

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Return features [B, out, H / stride, W / stride] for features [B, channels, H, W]."""
        return self.activation(self.expand(self.conv(self.reduce(features))) + self.residual(features))


class _Conv(nn.Conv2d):
    """A convolution without bias, initialized for ReLU also when it starts on the meta device."""

    def __init__(self, channels: int, out: int, size: int, *, stride: int = 1) -> None:
        super().__init__(channels, out, size, stride=stride, padding=size // 2, bias=False)

    def reset_parameters(self) -> None:
        nn.init.kaiming_normal_(self.weight, mode="fan_out", nonlinearity="relu")
