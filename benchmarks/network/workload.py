"""What all contenders train, and the emulated device that they train it on."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from recipes.digits import CLASSES, DigitsData, convolution
from recipes.optimizers import parameter_groups
from recipes.text.data import TextData
from recipes.text.transformer import Transformer

BATCH_SIZE, MOMENTUM = 32, 0.9
COMPUTE_S = 0.100
"""Of an emulated step: forward, backward and optimizer."""

RESNET50 = 102.2e6 / 0.250  # bytes a second: 25.6 M float32 values for a step of 250 ms
GPT2 = 4 * 124_439_808 / 1.8  # the same of GPT-2 as in benchmarks.time_to_loss
_CALIBRATION_STEPS = 9


Data = tuple[TensorDataset, list[Tensor]]


def digits() -> Data:
    """Images to train on; those to test on, and their classes."""
    data = DigitsData()
    return data.train, list(data.test.tensors)


def sequences(length: int = 64, characters: int = 1_000_000, tested: int = 128) -> Data:
    """Of the text that char_gpt learns: to train on; some to test on, and what follows each byte."""
    data = TextData(max_characters=characters, sequence_length=length)
    train, test = (
        [part[index] for index in range(count)] for part, count in ((data.train, len(data.train)), (data.test, tested))
    )
    return TensorDataset(*map(torch.stack, zip(*train, strict=True))), list(map(torch.stack, zip(*test, strict=True)))


def momentum(net: nn.Module, parameters: list[nn.Parameter], lr: float) -> Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=MOMENTUM)


def adamw(net: nn.Module, parameters: list[nn.Parameter], lr: float) -> Optimizer:
    """As the recipe char_gpt has it, of these parameters."""
    chosen = set(map(id, parameters))
    groups = [
        {**group, "params": kept}
        for group in parameter_groups(net, weight_decay=0.1)
        if (kept := [parameter for parameter in group["params"] if id(parameter) in chosen])
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))


@dataclass(frozen=True)
class Work:
    """A model, its data, its optimizer and its learning rate.

    Args:
        build: the model, with the initial values that the global seed says.
        lr: peak of the one-cycle schedule, for the batches of all workers together; of 0.02 and 0.05 the one with which DDP
            ends at the lower test loss. For the perceptron both do alike, and with 0.05 models that are trained apart have no
            useful mean, so that a run shows whether they are kept together.
        stands_for: bytes that are sent for a second of computing, of the model that this one stands for; links are scaled,
            so that sending the model takes as many steps as sending that one would on a link of the nominal rate. None for the
            links as they are.
        data: to train on, and a batch to test on.
        batch_size: samples of a worker's step.
        optimizer: of some parameters of a model, with a learning rate.
    """

    build: Callable[[], nn.Module]
    lr: float
    stands_for: float | None = None
    data: Callable[[], Data] = digits
    batch_size: int = BATCH_SIZE
    optimizer: Callable[[nn.Module, list[nn.Parameter], float], Optimizer] = momentum

    @property
    def nbytes(self) -> int:
        """Of the float32 parameters."""
        return sum(parameter.numel() for parameter in self.build().parameters()) * 4

    def link_scale(self, compute_s: float = COMPUTE_S) -> float:
        """What a link has of its nominal rate.

        Args:
            compute_s: of an emulated step.
        """
        return 1.0 if self.stands_for is None else self.nbytes / compute_s / self.stands_for


def mlp(width: int = 1032, hidden: int = 5) -> nn.Sequential:
    """4.34 M parameters, 0.139 Gbit. Four matrices of one size, so that DDP's buckets can overlap the backward pass."""
    sizes = [64, *[width] * hidden, CLASSES]
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in pairwise(sizes):
        linear = nn.Linear(inputs, outputs)
        nn.init.kaiming_normal_(linear.weight, nonlinearity="relu")
        nn.init.zeros_(linear.bias)
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def conv_net() -> nn.Sequential:
    """1.14 M parameters, with BatchNorm."""
    pool = nn.MaxPool2d(2)
    first, second = [*convolution(1, 32), *convolution(32, 64), pool], [*convolution(64, 128), *convolution(128, 128), pool]
    return nn.Sequential(
        *first, *second, *convolution(128, 256), *convolution(256, 256), nn.Flatten(), nn.Linear(1024, CLASSES)
    )


def char_gpt() -> Transformer:
    """120,576 parameters: the model that learns in benchmarks.time_to_loss."""
    return Transformer(vocabulary=256, sequence_length=64, layers=2, heads=4, width=64)


WORKS = {
    "mlp": Work(mlp, lr=0.05),
    "conv": Work(conv_net, lr=0.02, stands_for=RESNET50),
    "char_gpt": Work(char_gpt, lr=4e-3, stands_for=GPT2, data=sequences, batch_size=4, optimizer=adamw),
}


def loss_of(net: nn.Module, batch: list[Tensor]) -> Tensor:
    """Cross-entropy of classes, one for each sample or each position of it."""
    return nn.functional.cross_entropy(net(batch[0]).flatten(0, -2), batch[1].flatten())


def shared_values(net: nn.Module) -> list[Tensor]:
    """What the mean model is the mean of: parameters, and buffers of floating point."""
    return [value.detach() for value in net.state_dict().values() if value.is_floating_point()]


class Device:
    """Makes forward, backward and optimizer last as long as on an accelerator, by a sleep before the backward pass.

    What the sleep leaves is the processor time of backward and optimizer, measured before training with nobody to talk to. So
    the time that a strategy takes beside them is never hidden in the sleep, whether it waits, copies or computes.

    Args:
        work: that is done.
        net: is measured as a copy.
        compute_s: from :meth:`begin` to the end of the optimizer's step.
        in_backward: share of the sleep that is spread over the backward pass, before the gradients of each layer are there.
    """

    def __init__(self, work: Work, net: nn.Module, compute_s: float, *, in_backward: float = 0.0) -> None:
        self._compute_s = compute_s
        self._tail_s = _backward_and_optimizer_s(work, net)
        self._began_s = 0.0
        layers = [module for module in net.modules() if isinstance(module, (nn.Linear, nn.Conv2d))]
        self._in_backward_s = in_backward * (compute_s - self._tail_s)
        for layer in layers if in_backward else ():
            layer.register_full_backward_pre_hook(partial(_sleep, self._in_backward_s / len(layers)))

    def begin(self) -> None:
        """The forward pass begins."""
        self._began_s = time.monotonic()

    def wait(self) -> None:
        """Sleep. Call it between forward and backward."""
        sleep_until(self._began_s + self._compute_s - self._tail_s - self._in_backward_s)


def _sleep(seconds: float, *_: object) -> None:
    sleep_until(time.monotonic() + seconds)


def sleep_until(due_s: float) -> None:
    while (left_s := due_s - time.monotonic()) > 0:
        time.sleep(left_s)


def _backward_and_optimizer_s(work: Work, net: nn.Module) -> float:
    """Processor seconds of this thread, the median of a few: other processes on the machine do not count."""
    copy = deepcopy(net)
    optimizer = work.optimizer(copy, list(copy.parameters()), 0.0)
    batch = [tensor[: work.batch_size] for tensor in work.data()[1]]
    times = []
    for _ in range(_CALIBRATION_STEPS):
        loss = loss_of(copy, batch)
        began_s = time.thread_time()
        loss.backward()
        optimizer.step()
        times.append(time.thread_time() - began_s)
        optimizer.zero_grad()
    return statistics.median(times)
