"""Hessian-vector products of a fixed function: the mean loss over given batches.

    H v = ∂/∂w (vᵀ ∂L/∂w),   L(w) = (1/B) Σ_b ℓ_b(w)     (Pearlmutter 1994, Neural Computation 6(1))

Two reverse passes, no Hessian in memory. For Lanczos iterations H must be the same matrix in every product, so each evaluation
of ℓ_b sees the same random numbers (dropout, augmentation inside the loss) and the same buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lightning_gossip.algorithm.checks import check_integer
from lightning_gossip.analysis.curvature.unchanged import (
    seed_everything,
    twice_differentiable,
    unchanged_module,
    unchanged_random_state,
)
from lightning_gossip.errors import ConfigurationError

Vector = NDArray[np.float64]

# how torch words it that an operation has no second derivative
_NO_SECOND_DERIVATIVE = ("is not implemented", "double backward", "once_differentiable", "Checkpointing is not compatible")
# nodes of a graph behind which torch.autograd.grad does not find the parameters
_HIDING = {
    "CheckpointFunctionBackward": "a reentrant checkpoint",
    "torch::autograd::Error": "a once_differentiable Function",
}
_ADVICE = (
    " Use operations that can be differentiated twice while you measure: outside of this package's own handling that is, for"
    " example, `with torch.backends.cudnn.flags(enabled=False)` for a recurrent network on CUDA (or pass it as module=),"
    " `with sdpa_kernel(SDPBackend.MATH)` for a fused attention, checkpoint(..., use_reentrant=False), an autograd Function"
    " without once_differentiable, the original of a compiled module."
)


class NotFiniteError(ConfigurationError):
    """The loss, or a product, is infinite or not a number: training diverges, or a derivative does not exist."""


class Hessian:
    """The Hessian of the mean loss, as a symmetric operator on flat vectors.

    Nothing of the caller's is changed by a product, also when the loss raises: not the parameters, their ``grad`` and
    ``requires_grad``, not the buffers of ``module`` (BatchNorm's statistics) and its modules' train or eval mode, not the
    state of the global random generators (torch on the CPU and on the parameters' devices, numpy, ``random``).

    Inside, autocast is off, attention is computed by the math kernel and recurrent layers of ``module`` without cuDNN (the
    fused kernels have no second derivative), and compiled code runs as it was written. What torch cannot tell: the output of a
    ``once_differentiable`` Function that enters the loss linearly counts as linear in the parameters.

    Args:
        loss: of one batch: a scalar, by a graph that reaches the parameters.
        parameters: with respect to which; those that do not require a gradient are left out, duplicates count once. The
            loss need not use all of them: those that it does not use have zero rows.
        batches: what ``loss`` is given, one after the other; all are kept. Each has the same weight in the mean.
        module: whose buffers, modes and recurrent layers the loss uses; the mode that it is in is the one that is measured.
        seed: of the random numbers that the loss of batch b sees, seed + b.

    Attributes:
        size: d, elements of all parameters together; the order is theirs.
        batches: how many.
        samples: of all batches, by the first dimension of the first tensor in each; None where there is no tensor.
        products: made so far. Each costs about four gradients of all batches.

    Raises:
        ConfigurationError: without a batch or a parameter, for parameters of 16 bits or complex ones, a negative seed.
    """

    def __init__(
        self,
        loss: Callable[[Any], Tensor],
        parameters: Iterable[Tensor],
        batches: Iterable[Any],
        *,
        module: nn.Module | None = None,
        seed: int = 0,
    ) -> None:
        check_integer("seed", seed, at_least=0, example=0)
        self._loss = loss
        self._parameters = differentiable(parameters)
        self._batches = list(batches)
        if not self._batches:
            raise ConfigurationError("There is no batch to measure the curvature on. Pass at least one.")
        self._module = module
        self._seed = seed
        self._devices = sorted({p.device for p in self._parameters if p.device.type != "cpu"}, key=str)
        self.size = sum(parameter.numel() for parameter in self._parameters)
        self.batches = len(self._batches)
        counts = [_samples(batch) for batch in self._batches]
        self.samples = None if None in counts else sum(count for count in counts if count is not None)
        self.products = 0

    def product(self, vector: Vector) -> Vector:
        """H v.

        Args:
            vector: v, shape (d,).

        Returns:
            Shape (d,), summed over the batches in float64.

        Raises:
            ConfigurationError: if the loss is not a scalar, is not finite, does not depend on the parameters, or cannot be
                differentiated twice; whatever the loss raises is passed on.
        """
        flat = torch.from_numpy(np.array(vector, dtype=np.float64))
        pieces = torch.split(flat, [parameter.numel() for parameter in self._parameters])
        directions = [piece.view(p.shape).to(p) for piece, p in zip(pieces, self._parameters, strict=True)]
        total = np.zeros(self.size)
        for index, batch in enumerate(self._batches):
            with self._fixed(index):
                total += self._of_batch(batch, directions).numpy()
        self.products += 1
        if not np.isfinite(total).all():
            raise NotFiniteError(
                "A Hessian-vector product is not finite: the loss has no second derivative here (a root or a norm at 0?),"
                " or training has diverged. Add a small constant inside the root, or measure at another point."
            )
        product: Vector = total / self.batches
        return product

    def gradient(self, index: int) -> tuple[float, Vector]:
        """The loss and the gradient of one batch alone, in the circumstances of the products.

        Args:
            index: of the batch.

        Returns:
            The loss, and ∂ℓ/∂w, shape (d,), in float64.

        Raises:
            ConfigurationError: as for :meth:`product`.
        """
        with self._fixed(index):
            loss = _checked(self._loss(self._batches[index]))
            gradients = torch.autograd.grad(loss, self._parameters, allow_unused=True)
        gradient: Vector = self._flat(gradients).numpy()
        if not np.isfinite(gradient).all():
            raise NotFiniteError("The gradient of a batch is not finite: training has diverged. Measure at another point.")
        return float(loss.detach()), gradient

    def _of_batch(self, batch: Any, directions: Sequence[Tensor]) -> Tensor:
        loss = _checked(self._loss(batch))
        thorough = self.products == 0
        if thorough:
            _refuse_silent_zeros(loss.grad_fn)
        with _explained():
            gradients = torch.autograd.grad(loss, self._parameters, create_graph=True, allow_unused=True)
        if all(gradient is None for gradient in gradients):
            raise ConfigurationError(
                "The loss does not depend on any of the parameters. Pass those of the module that computes it, and do not"
                " detach its output."
            )
        # a gradient without a graph is constant in the parameters
        curved = [(g, v) for g, v in zip(gradients, directions, strict=True) if g is not None and g.requires_grad]
        if thorough:
            _refuse_silent_zeros(*(gradient.grad_fn for gradient, _ in curved))
        if not curved:
            return torch.zeros(self.size, dtype=torch.float64, device="cpu")
        with _explained():
            rows = torch.autograd.grad(
                [gradient for gradient, _ in curved], self._parameters, [v for _, v in curved], allow_unused=True
            )
        return self._flat(rows)

    def _flat(self, rows: Sequence[Tensor | None]) -> Tensor:
        """One vector in float64; zeros for parameters without one."""
        return torch.cat(
            [
                torch.zeros(p.numel(), dtype=torch.float64, device="cpu")
                if row is None
                else row.detach().reshape(-1).cpu().double()
                for row, p in zip(rows, self._parameters, strict=True)
            ]
        )

    @contextmanager
    def _fixed(self, index: int) -> Iterator[None]:
        """The circumstances in which the loss of a batch is always evaluated."""
        with ExitStack() as stack:
            stack.enter_context(unchanged_random_state(self._devices))
            stack.enter_context(unchanged_module(self._module))
            stack.enter_context(twice_differentiable(self._module, self._devices))
            seed_everything(self._seed + index, self._devices)
            yield


def differentiable(parameters: Iterable[Tensor]) -> list[Tensor]:
    """The parameters that require a gradient, each once.

    Raises:
        ConfigurationError: if there is none, and for types in which products would be too coarse.
    """
    chosen = list({id(parameter): parameter for parameter in parameters if parameter.requires_grad}.values())
    if not chosen:
        raise ConfigurationError(
            "No parameter requires a gradient. Pass module.parameters() of a module that is built and not frozen."
        )
    for parameter in chosen:
        if parameter.dtype not in (torch.float32, torch.float64):
            raise ConfigurationError(
                f"The curvature with respect to a parameter of {parameter.dtype} is not measured: its products would be too"
                " coarse, or complex. Use float32 or float64 parameters; with Lightning precision='bf16-mixed' or '16-mixed'"
                " keeps them in float32."
            )
    return chosen


@contextmanager
def _explained() -> Iterator[None]:
    """Say what to do where torch has no second derivative."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        if any(words in str(error) for words in _NO_SECOND_DERIVATIVE):
            raise ConfigurationError(f"The loss cannot be differentiated twice: {error}.{_ADVICE}") from error
        raise


def _checked(loss: object) -> Tensor:
    """The loss of a batch, if it can be differentiated."""
    if not isinstance(loss, Tensor) or loss.numel() != 1 or loss.is_complex():
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise ConfigurationError(f"The loss of a batch is {what}; it must be one real number. Return its mean, loss.mean().")
    if not loss.requires_grad:
        raise ConfigurationError(
            "The loss of a batch has no graph. Compute it from the parameters, outside of torch.no_grad() and without detach()."
        )
    if not bool(loss.detach().isfinite()):
        raise NotFiniteError(
            f"The loss of a batch is {float(loss.detach())}: training has diverged, or the batch is faulty. Measure at another"
            " point."
        )
    return loss.reshape(())


def _refuse_silent_zeros(*graph: Any) -> None:
    """Refuse what hides parameters from torch.autograd.grad: it would take them for unused, and say nothing."""
    seen: set[Any] = set()
    nodes = [node for node in graph if node is not None]
    while nodes:
        node = nodes.pop()
        if node not in seen:
            seen.add(node)
            what = _HIDING.get(node.name())
            if what is not None:
                raise ConfigurationError(f"The loss cannot be differentiated twice: it uses {what}.{_ADVICE}")
            nodes += [following for following, _ in node.next_functions if following is not None]


def _samples(batch: Any) -> int | None:
    """The first dimension of the first tensor in a batch."""
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.ndim else 1
    parts: Iterable[Any] = ()
    if isinstance(batch, Mapping):
        parts = batch.values()
    elif isinstance(batch, Sequence) and not isinstance(batch, str):
        parts = batch
    return next((count for part in parts if (count := _samples(part)) is not None), None)
