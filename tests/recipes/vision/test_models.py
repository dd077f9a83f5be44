from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_gossip import ConfigurationError
from recipes.vision.models import MODELS, build

# kuangliu/pytorch-cifar's VGG16 and GoogLeNet have 14,728,266 and 6,166,250 parameters: a bias more for each channel of a
# convolution. ResNet-20: 0.27 M in He et al. 2016, table 6; ResNet-8, counted by hand: convolutions of 144, 2 · 2,304, 4,608,
# 9,216, 18,432 and 36,864, two numbers for each of their channels, 650 at the end. The others:
# torchvision's documentation, 25.6 M and 61.1 M.
PARAMETERS = {
    "alexnet": (1000, 61_100_840),
    "cifar_googlenet": (10, 6_166_250 - 7_904),
    "cifar_resnet20": (10, 269_722),
    "cifar_vgg16": (10, 14_728_266 - 4_224),
    "fashion_resnet8": (10, 75_002),
    "fashion_resnet8_groupnorm": (10, 75_002),
    "mnist_mlp": (10, 784 * 256 + 256 + 256 * 128 + 128 + 128 * 10 + 10),
    "resnet50": (1000, 25_557_032),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_the_published_number_of_parameters(name: str) -> None:
    classes, expected = PARAMETERS[name]
    with torch.device("meta"):
        assert sum(parameter.numel() for parameter in build(name, classes).parameters()) == expected


@pytest.mark.parametrize("name", ["cifar_googlenet", "cifar_vgg16"])
def test_what_is_missing_from_the_published_number_is_the_biases_before_batchnorm(name: str) -> None:
    with torch.device("meta"):
        convolutions = [module for module in build(name, 10).modules() if isinstance(module, nn.Conv2d)]
    assert all(convolution.bias is None for convolution in convolutions)
    missing = {"cifar_googlenet": 7_904, "cifar_vgg16": 4_224}[name]
    assert sum(convolution.out_channels for convolution in convolutions) == missing


@pytest.mark.parametrize(("name", "shape"), [("alexnet", (3, 64, 64)), ("mnist_mlp", (1, 28, 28)), ("resnet50", (3, 64, 64))])
def test_a_model_maps_images_to_logits(name: str, shape: tuple[int, int, int]) -> None:
    with torch.no_grad():
        assert build(name, 7).eval()(torch.randn(2, *shape)).shape == (2, 7)


@pytest.mark.parametrize("name", ["cifar_googlenet", "cifar_resnet20", "cifar_vgg16"])
def test_a_model_for_cifar_maps_images_to_logits(name: str) -> None:
    with torch.no_grad():
        assert build(name, 10).eval()(torch.randn(2, 3, 32, 32)).shape == (2, 10)


def test_resnet20_has_twenty_layers_with_weights_and_halves_the_image_twice() -> None:
    network = build("cifar_resnet20", 10)
    assert sum(isinstance(module, nn.Conv2d | nn.Linear) for module in network.modules()) == 20
    with torch.no_grad():
        assert nn.Sequential(*list(network)[:-3]).eval()(torch.randn(1, 3, 32, 32)).shape == (1, 64, 8, 8)


@pytest.mark.parametrize("name", ["fashion_resnet8", "fashion_resnet8_groupnorm"])
def test_the_networks_for_fashion_mnist_differ_in_their_norms_alone(name: str) -> None:
    network = build(name, 10)
    with torch.no_grad():
        assert network.eval()(torch.randn(2, 1, 28, 28)).shape == (2, 10)
    norms = [module for module in network.modules() if isinstance(module, nn.BatchNorm2d | nn.GroupNorm)]
    assert len(norms) == 7
    assert {type(norm) for norm in norms} == {nn.GroupNorm if name.endswith("groupnorm") else nn.BatchNorm2d}
    assert bool(list(network.buffers())) != name.endswith("groupnorm")


def test_with_groupnorm_an_image_s_logits_do_not_depend_on_the_others_of_its_batch() -> None:
    torch.manual_seed(0)
    images = torch.randn(4, 1, 28, 28)
    network = build("fashion_resnet8_groupnorm", 10).train()
    with torch.no_grad():
        torch.testing.assert_close(network(images)[:1], network(images[:1]))


def test_every_residual_branch_of_resnet50_begins_as_zero() -> None:
    from torchvision.models.resnet import Bottleneck

    blocks = [module for module in build("resnet50", 3).modules() if isinstance(module, Bottleneck)]
    assert len(blocks) == 16
    assert all(block.bn3.weight.abs().max() == 0 for block in blocks)


def test_resnet50_runs_forward_and_backward_at_64_pixels() -> None:
    network = build("resnet50", 10).to(memory_format=torch.channels_last)
    loss = nn.functional.cross_entropy(network(torch.randn(2, 3, 64, 64)), torch.tensor([1, 2]))
    loss.backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in network.parameters())


def test_an_unknown_model_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match=r"'resnet5'.*resnet50"):
        build("resnet5", 10)
    with pytest.raises(ConfigurationError, match="classes=1"):
        build("resnet50", 1)
