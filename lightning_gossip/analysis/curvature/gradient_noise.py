"""How noisy the gradients of single batches are, and how curved the loss is along the noise.

    g_b = ∂ℓ_b/∂w,   ξ_b = g_b − ḡ,   tr Σ ≈ Σ_b ‖ξ_b‖² / (B − 1),   h_ξ = Σ_b ξ_bᵀ H ξ_b / Σ_b ‖ξ_b‖² ≈ tr(HΣ)/tr Σ

tr Σ is the variance of a worker's gradient, and with McCandlish et al. (2018, arXiv 1812.06162) tr Σ/‖g‖² over the batch size
their simple noise scale. h_ξ says what it costs that models part by noise: after a step γξ the loss is ½γ² tr(HΣ) higher.

    ‖∇F‖² ≈ ‖ḡ‖² − tr Σ/B (1 − B/N),   h_F = ‖∇F‖²/(2F) = Σ h_k F_k/F on a quadratic with the parts F_k

of N batches in an epoch. h_F says where the loss is: a gradient flow lowers it at the rate 2 h_F. What is left of a network's
loss is in flat directions, so h_F is far below the curvatures that a Hessian's largest eigenvalues show. It takes many batches
to see so flat a slope through the noise; fewer show that it is at most so steep.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn

from lightning_gossip.algorithm.checks import check_integer
from lightning_gossip.analysis.curvature.hessian import Hessian
from lightning_gossip.errors import ConfigurationError

_CURVED = 16  # batches: products cost four gradients of each


@dataclass(frozen=True)
class GradientNoise:
    """The noise of one batch's gradient.

    Args:
        loss: mean over the batches.
        variance: tr Σ, unbiased.
        curvature: h_ξ, the mean curvature that the noise sees; negative where the loss curves downwards along it.
        batches: on which it was measured.
        slope: ‖∇F‖², unbiased; at most 0 where the noise hides it.
        hidden: tr Σ/B (1 − B/N), what noise alone makes of it: about as steep a slope may be there unseen.
    """

    loss: float
    variance: float
    curvature: float
    batches: int
    slope: float = 0.0
    hidden: float = 0.0

    @property
    def along_loss(self) -> float | None:
        """h_F, the mean curvature of the directions that the loss is in, if it can fall to 0; where noise hides it, the largest
        that it hides; None for a loss or a slope of 0."""
        steepest = max(self.slope, self.hidden)
        return steepest / (2.0 * self.loss) if steepest > 0.0 and self.loss > 0.0 else None


def gradient_noise(
    loss: Callable[[Any], Tensor],
    parameters: Iterable[Tensor],
    batches: Iterable[Any],
    *,
    products: int = 4,
    epoch: int | None = None,
    module: nn.Module | None = None,
    seed: int = 0,
) -> GradientNoise:
    """The variance of the gradient over batches of the size that one worker trains on.

    The relative error of the variance is about √(2/(B − 1)) over the square root of the number of directions that the noise
    has. Memory: three vectors of d float64.

    Args:
        loss, parameters, batches, module, seed: see :class:`~lightning_gossip.analysis.curvature.hessian.Hessian`; at least
            two batches.
        products: Hessian-vector products for the curvature, over the first 16 of the batches and at most as many.
        epoch: N, of which these batches were drawn, each at most once; None for many more.

    Raises:
        ConfigurationError: for fewer than two batches, and for what the Hessian refuses.

    Example::

        >>> import torch
        >>> w = torch.ones(2, requires_grad=True)
        >>> found = gradient_noise(lambda b: (w * torch.tensor([b, 1.0]) * w).sum(), [w], [1.0, 2.0, 3.0])
        >>> round(found.variance, 6), round(found.curvature, 6)  # 2 b w_0; the mean Hessian is diag(4, 2)
        (4.0, 4.0)
    """
    check_integer("products", products, example=4)
    parameters, batches = list(parameters), list(batches)
    hessian = Hessian(loss, parameters, batches, module=module, seed=seed)
    number = hessian.batches
    if number < 2:
        raise ConfigurationError("Noise is what differs between batches, and there is only one. Pass at least two.")
    mean, squares, losses = np.zeros(hessian.size), 0.0, []
    for index in range(number):
        value, gradient = hessian.gradient(index)
        losses.append(value)
        mean += gradient / number
        squares += float(gradient @ gradient)
    variance = max(0.0, squares - number * float(mean @ mean)) / (number - 1)
    curved = Hessian(loss, parameters, batches[:_CURVED], module=module, seed=seed)
    along, length = 0.0, 0.0
    for index in range(min(products, curved.batches)):
        noise = hessian.gradient(index)[1] - mean
        along += float(noise @ curved.product(noise))
        length += float(noise @ noise)
    unseen = 1.0 if epoch is None else max(0.0, 1.0 - number / epoch)  # of the epoch
    hidden = unseen * variance / number
    return GradientNoise(
        loss=float(np.mean(losses)),
        variance=variance,
        curvature=along / length if length else 0.0,
        batches=number,
        slope=float(mean @ mean) - hidden,
        hidden=hidden,
    )
