"""Classifiers on a data set, with gradients of many workers at once: softmax regression and a network of one hidden layer.

The gradients are written out, as batched matrix products over the workers (``torch.bmm``):

    P = softmax(A V + c),  D = (P − Y)/b,    ∂V = Aᵀ D,  ∂c = Σ D                 (A = X, or relu(X W + a) with a hidden layer)
    E = (D Vᵀ) ∘ [A > 0],                    ∂W = Xᵀ E,  ∂a = Σ E

``tests/simulation/test_objectives.py`` compares them with autograd's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from lightning_gossip.algorithm.checks import check_integer
from lightning_gossip.arguments import clear_arguments
from lightning_gossip.errors import ConfigurationError
from lightning_gossip.simulation.problems.objectives import Batch, Objective


@clear_arguments
@dataclass(frozen=True)
class Classes:
    """A classification data set.

    Args:
        x: training inputs, shape (samples, features), floating.
        y: their classes, int64, shape (samples,).
        test_x, test_y: the same for the accuracy; None for none.
    """

    x: Tensor
    y: Tensor
    test_x: Tensor | None = None
    test_y: Tensor | None = None

    def __post_init__(self) -> None:
        if self.x.dim() != 2 or self.y.shape != self.x.shape[:1] or not len(self.y) or not self.x.is_floating_point():
            raise ConfigurationError(
                f"x of shape {tuple(self.x.shape)} and y of shape {tuple(self.y.shape)} are no data set: x is floating,"
                " (samples, features), and y (samples,)."
            )


def digits() -> Classes:
    """Scikit-learn's 1,797 handwritten digits: 1,277 to train on, 360 to test, the parts that the recipes use.

    Raises:
        ConfigurationError: if scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError as error:
        raise ConfigurationError("The digits come with scikit-learn: pip install scikit-learn.") from error
    images, labels = load_digits(return_X_y=True)
    rest, test = train_test_split(range(len(images)), test_size=360, stratify=labels, random_state=0)
    train, _ = train_test_split(rest, test_size=160, stratify=labels[rest], random_state=0)
    x, y = torch.from_numpy(images).float() / 16.0, torch.from_numpy(labels).long()
    return Classes(x[train], y[train], x[test], y[test])


@clear_arguments
class Classifier(Objective):
    """Softmax regression, or a network of one hidden layer of rectified units, under the mean cross-entropy.

    Args:
        data: to train on.
        hidden: units of the hidden layer; 0 for softmax regression.
        dtype: of the models.

    Raises:
        ConfigurationError: naming the key.
    """

    def __init__(self, data: Classes, *, hidden: int = 0, dtype: torch.dtype = torch.float32) -> None:
        check_integer("hidden", hidden, at_least=0, example=64)
        if not dtype.is_floating_point:
            raise ConfigurationError(f"dtype={dtype} is not a floating-point type.")
        self.dtype = dtype
        self.samples = len(data.y)
        self.labels = data.y.tolist()
        self.hidden = hidden
        self._x, self._y = data.x.to(dtype), data.y
        self._test_x = None if data.test_x is None else data.test_x.to(dtype)
        self._test_y = data.test_y
        self._features = self._x.shape[1]
        self._classes = int(self._y.max()) + 1
        inner = hidden or self._features
        self._shapes = [(self._features, hidden), (1, hidden)] if hidden else []
        self._shapes += [(inner, self._classes), (1, self._classes)]
        self.numel = sum(rows * columns for rows, columns in self._shapes)

    def start(self, generator: torch.Generator) -> Tensor:
        """Uniform in ±1/√(inputs of the layer), as ``torch.nn.Linear`` begins."""
        parts = []
        for weight, bias in zip(self._shapes[::2], self._shapes[1::2], strict=True):
            bound = 1.0 / math.sqrt(weight[0])
            for rows, columns in (weight, bias):
                parts.append(
                    (2.0 * torch.rand(rows * columns, generator=generator, dtype=self.dtype, device="cpu") - 1.0) * bound
                )
        return torch.cat(parts)

    @torch.no_grad()
    @override
    def gradients(
        self, models: Tensor, ranks: Sequence[int], batches: Sequence[Batch], generators: Sequence[np.random.Generator]
    ) -> Tensor:
        index, weight = _padded(batches)
        x = self._x[index]
        *hidden, v, c = self._parts(models)
        a = torch.baddbmm(hidden[1], x, hidden[0]).clamp_(min=0.0) if hidden else x
        d = torch.softmax(torch.baddbmm(c, a, v), dim=2)
        d.scatter_add_(2, self._y[index].unsqueeze(2), d.new_full((*index.shape, 1), -1.0))
        d.mul_(weight.to(self.dtype).unsqueeze(2))
        out = torch.empty_like(models)
        *to_hidden, to_v, to_c = self._parts(out)
        to_v.copy_(torch.bmm(a.transpose(1, 2), d))
        to_c.copy_(d.sum(1, keepdim=True))
        if hidden:
            e = torch.bmm(d, v.transpose(1, 2)).mul_(a > 0.0)
            to_hidden[0].copy_(torch.bmm(x.transpose(1, 2), e))
            to_hidden[1].copy_(e.sum(1, keepdim=True))
        return out

    @torch.no_grad()
    def loss(self, model: Tensor) -> float:
        """Mean cross-entropy on all training samples."""
        return float(torch.nn.functional.cross_entropy(self._logits(model, self._x), self._y))

    @torch.no_grad()
    @override
    def accuracy(self, model: Tensor) -> float | None:
        if self._test_x is None or self._test_y is None:
            return None
        return float((self._logits(model, self._test_x).argmax(1) == self._test_y).double().mean())

    def _logits(self, model: Tensor, x: Tensor) -> Tensor:
        *hidden, v, c = (part[0] for part in self._parts(model.unsqueeze(0)))
        return ((x @ hidden[0] + hidden[1]).clamp_(min=0.0) if hidden else x) @ v + c

    def _parts(self, models: Tensor) -> list[Tensor]:
        """Views of stacked flat models, shape (k, d): the weights and biases in turn, shape (k, rows, columns)."""
        parts, start = [], 0
        for rows, columns in self._shapes:
            parts.append(models[:, start : start + rows * columns].view(len(models), rows, columns))
            start += rows * columns
        return parts


def _padded(batches: Sequence[Batch]) -> tuple[Tensor, Tensor]:
    """Batches of any lengths as indices and weights, both shape (k, longest); weight 1/length, 0 where padded."""
    lengths = [len(batch) if batch else 0 for batch in batches]
    if min(lengths) == 0:
        raise ConfigurationError("batch_size: a classifier's gradient needs at least one sample of its data set.")
    longest = max(lengths)
    rows = [[*batch, *[0] * (longest - len(batch))] for batch in batches if batch]
    weights = [[1.0 / length] * length + [0.0] * (longest - length) for length in lengths]
    return torch.tensor(rows, device="cpu"), torch.tensor(weights, dtype=torch.float64, device="cpu")


def softmax_regression(data: Classes, *, dtype: torch.dtype = torch.float32) -> Classifier:
    """A linear classifier: convex."""
    return Classifier(data, hidden=0, dtype=dtype)


def mlp(data: Classes, *, hidden: int = 64, dtype: torch.dtype = torch.float32) -> Classifier:
    """A network of one hidden layer."""
    check_integer("hidden", hidden, example=64)
    return Classifier(data, hidden=hidden, dtype=dtype)
