"""The networks that the papers train, by name.

``resnet50`` and ``alexnet`` are torchvision's. Of the others each class cites its source; where a convolution is followed by
BatchNorm it has no bias, which BatchNorm would take away again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional
from torchvision.models import alexnet, resnet50
from typing_extensions import override

from lightning_gossip import ConfigurationError

Norm = Callable[[int], nn.Module]  # of so many channels


def group_norm(channels: int) -> nn.Module:
    """Normalises each image by itself, 8 channels together (Wu & He 2018, arXiv 1803.08494): no statistics to be averaged."""
    return nn.GroupNorm(channels // 8, channels)


def convolution(inputs: int, outputs: int, size: int, stride: int = 1, norm: Norm = nn.BatchNorm2d) -> list[nn.Module]:
    """A convolution that keeps height and width (but for its stride), BatchNorm or another norm, ReLU."""
    conv = nn.Conv2d(inputs, outputs, size, stride=stride, padding=size // 2, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return [conv, norm(outputs), nn.ReLU(inplace=True)]


class BasicBlock(nn.Module):
    """Two 3×3 convolutions and a shortcut without parameters (He et al. 2016, option A of §3.3).

    Where the block halves the height and width the shortcut takes every second pixel and fills the new channels with zeros.
    """

    def __init__(self, inputs: int, outputs: int, stride: int, norm: Norm = nn.BatchNorm2d) -> None:
        super().__init__()
        self.stride = stride
        self.added = outputs - inputs
        self.body = nn.Sequential(
            *convolution(inputs, outputs, 3, stride, norm),
            *convolution(outputs, outputs, 3, norm=norm)[:-1],
        )

    @override
    def forward(self, x: Tensor) -> Tensor:
        shortcut = x[:, :, :: self.stride, :: self.stride]
        if self.added:
            shortcut = functional.pad(shortcut, (0, 0, 0, 0, self.added // 2, self.added - self.added // 2))
        return functional.relu(self.body(x) + shortcut)


class CifarResNet(nn.Sequential):
    """ResNet of 6n + 2 layers for 32×32 pixels: He et al. 2016 (arXiv 1512.03385) §4.2. n = 3 is ResNet-20, 0.27 M parameters.

    Args:
        classes: outputs.
        n: blocks in each of the three stages, of 16, 32 and 64 channels.
        colours: channels of an image.
        norm: of so many channels, after each convolution.
    """

    def __init__(self, classes: int, n: int = 3, colours: int = 3, norm: Norm = nn.BatchNorm2d) -> None:
        layers = convolution(colours, 16, 3, norm=norm)
        inputs = 16
        for outputs in (16, 32, 64):
            for block in range(n):
                layers.append(BasicBlock(inputs, outputs, 2 if block == 0 and outputs > 16 else 1, norm))
                inputs = outputs
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes))


class CifarVGG(nn.Sequential):
    """VGG-16 for 32×32 pixels, with BatchNorm and one linear layer instead of three: 14.7 M parameters.

    Simonyan & Zisserman 2015 (arXiv 1409.1556), configuration D; cut down for CIFAR as is usual (kuangliu/pytorch-cifar).

    Args:
        classes: outputs.
    """

    STAGES = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))

    def __init__(self, classes: int) -> None:
        layers: list[nn.Module] = []
        inputs = 3
        for stage in self.STAGES:
            for outputs in stage:
                layers += convolution(inputs, outputs, 3)
                inputs = outputs
            layers.append(nn.MaxPool2d(2))
        super().__init__(*layers, nn.Flatten(), nn.Linear(inputs, classes))


class Inception(nn.Module):
    """Four branches side by side, their channels concatenated: 1×1; 3×3; 5×5 as two 3×3; pooling (Szegedy et al. 2015).

    Args:
        inputs: channels.
        one: channels of the 1×1 branch.
        three: of the 3×3 branch, before and after.
        five: of the 5×5 branch, before and after.
        pooled: of the pooling branch.
    """

    def __init__(self, inputs: int, one: int, three: tuple[int, int], five: tuple[int, int], pooled: int) -> None:
        super().__init__()
        self.outputs = one + three[1] + five[1] + pooled
        self.branches = nn.ModuleList(
            nn.Sequential(*layers)
            for layers in (
                convolution(inputs, one, 1),
                convolution(inputs, three[0], 1) + convolution(three[0], three[1], 3),
                convolution(inputs, five[0], 1) + convolution(five[0], five[1], 3) + convolution(five[1], five[1], 3),
                [nn.MaxPool2d(3, stride=1, padding=1), *convolution(inputs, pooled, 1)],
            )
        )

    @override
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], dim=1)


class CifarGoogLeNet(nn.Sequential):
    """GoogLeNet for 32×32 pixels: 6.2 M parameters.

    Szegedy et al. 2015 (arXiv 1409.4842), table 1 from inception (3a) on. The stem that divides height and width by 8 is one
    3×3 convolution here, there are no auxiliary outputs, and two 3×3 convolutions stand for the 5×5 (kuangliu/pytorch-cifar).

    Args:
        classes: outputs.
    """

    # a stage a row, a maximum over 3×3 pixels between them: channels of each block's branches
    STAGES = (
        ((64, (96, 128), (16, 32), 32), (128, (128, 192), (32, 96), 64)),
        (
            (192, (96, 208), (16, 48), 64),
            (160, (112, 224), (24, 64), 64),
            (128, (128, 256), (24, 64), 64),
            (112, (144, 288), (32, 64), 64),
            (256, (160, 320), (32, 128), 128),
        ),
        ((256, (160, 320), (32, 128), 128), (384, (192, 384), (48, 128), 128)),
    )

    def __init__(self, classes: int) -> None:
        inputs = 192
        layers = convolution(3, inputs, 3)
        for number, stage in enumerate(self.STAGES):
            if number > 0:
                layers.append(nn.MaxPool2d(3, stride=2, padding=1))
            for channels in stage:
                block = Inception(inputs, *channels)
                layers.append(block)
                inputs = block.outputs
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


def mnist_mlp(classes: int) -> nn.Module:
    """784 – 256 – 128 – classes with ReLU."""
    return nn.Sequential(
        nn.Flatten(),
        *(nn.Linear(28 * 28, 256), nn.ReLU()),
        *(nn.Linear(256, 128), nn.ReLU()),
        nn.Linear(128, classes),
    )


def _resnet50(classes: int) -> nn.Module:
    """Each residual branch begins as zero: the last BatchNorm's gamma is 0 (Goyal et al. 2017, arXiv 1706.02677, §5.1)."""
    network: nn.Module = resnet50(weights=None, num_classes=classes, zero_init_residual=True)
    return network


def _alexnet(classes: int) -> nn.Module:
    network: nn.Module = alexnet(weights=None, num_classes=classes)
    return network


MODELS: dict[str, Callable[[int], nn.Module]] = {
    "alexnet": _alexnet,
    "cifar_googlenet": CifarGoogLeNet,
    "cifar_resnet20": CifarResNet,
    "cifar_vgg16": CifarVGG,
    "fashion_resnet8": partial(CifarResNet, n=1, colours=1),
    "fashion_resnet8_groupnorm": partial(CifarResNet, n=1, colours=1, norm=group_norm),
    "mnist_mlp": mnist_mlp,
    "resnet50": _resnet50,
}


def build(name: str, classes: int) -> nn.Module:
    """A freshly initialised network: images, batch × channels × height × width, to logits, batch × classes.

    Raises:
        ConfigurationError: for a name that is not in ``MODELS``, or fewer than two classes.
    """
    if name not in MODELS:
        raise ConfigurationError(f"unknown model {name!r}. Models: {', '.join(MODELS)}.")
    if classes < 2:
        raise ConfigurationError(f"classes={classes!r}: a classifier needs at least 2.")
    return MODELS[name](classes)
