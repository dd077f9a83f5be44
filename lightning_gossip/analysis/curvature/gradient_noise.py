"""How noisy the gradients of single batches are, and how curved the loss is along the noise.

    g_b = ∂ℓ_b/∂w,   ξ_b = g_b − ḡ,   tr Σ ≈ Σ_b ‖ξ_b‖² / (B − 1),   h_ξ = Σ_b ξ_bᵀ H ξ_b / Σ_b ‖ξ_b‖² ≈ tr(HΣ)/tr Σ

tr Σ is the variance of a worker's gradient, and with McCandlish et al. (2018, arXiv 1812.06162) tr Σ/‖g‖² over the batch size
their simple noise scale. h_ξ says what it costs that models part by noise: after a step γξ the loss is ½γ² tr(HΣ) higher.

    ‖∇F‖² ≈ ‖ḡ‖² − tr Σ/B,   h_F = ‖∇F‖²/(2F) = Σ h_k F_k/F on a quadratic with the parts F_k

h_F says where the loss is: a gradient flow lowers it at the rate 2 h_F. What is left of a network's loss is in flat directions,
so h_F is far below the curvatures that a Hessian's largest eigenvalues show.
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


@dataclass(frozen=True)
class GradientNoise:
    """The noise of one batch's gradient.

    Args:
        loss: mean over the batches.
        variance: tr Σ, unbiased.
        curvature: h_ξ, the mean curvature that the noise sees; negative where the loss curves downwards along it.
        batches: on which it was measured.
        slope: ‖∇F‖², unbiased; at most 0 where the noise hides it.
    """

    loss: float
    variance: float
    curvature: float
    batches: int
    slope: float = 0.0

    @property
    def along_loss(self) -> float | None:
        """h_F, the mean curvature of the directions that the loss is in, if it can fall to 0; None if noise hides it."""
        return self.slope / (2.0 * self.loss) if self.slope > 0.0 and self.loss > 0.0 else None


def gradient_noise(
    loss: Callable[[Any], Tensor],
    parameters: Iterable[Tensor],
    batches: Iterable[Any],
    *,
    products: int = 4,
    module: nn.Module | None = None,
    seed: int = 0,
) -> GradientNoise:
    """The variance of the gradient over batches of the size that one worker trains on.

    The relative error of the variance is about √(2/(B − 1)) over the square root of the number of directions that the noise
    has. Memory: three vectors of d float64.

    Args:
        loss, parameters, batches, module, seed: see :class:`~lightning_gossip.analysis.curvature.hessian.Hessian`; at least
            two batches.
        products: Hessian-vector products for the curvature, at most as many as there are batches.

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
    hessian = Hessian(loss, parameters, batches, module=module, seed=seed)
    if hessian.batches < 2:
        raise ConfigurationError("Noise is what differs between batches, and there is only one. Pass at least two.")
    mean, squares, losses = np.zeros(hessian.size), 0.0, []
    for index in range(hessian.batches):
        value, gradient = hessian.gradient(index)
        losses.append(value)
        mean += gradient / hessian.batches
        squares += float(gradient @ gradient)
    variance = max(0.0, squares - hessian.batches * float(mean @ mean)) / (hessian.batches - 1)
    along, length = 0.0, 0.0
    for index in range(min(products, hessian.batches)):
        noise = hessian.gradient(index)[1] - mean
        along += float(noise @ hessian.product(noise))
        length += float(noise @ noise)
    slope = float(mean @ mean) - variance / hessian.batches
    return GradientNoise(float(np.mean(losses)), variance, along / length if length else 0.0, hessian.batches, slope)
