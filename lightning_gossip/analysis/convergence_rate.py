r"""AD-PSGD's convergence on non-convex losses: 1/√K, from which K on, with which step size (arXiv 1710.06952).

Lian et al. (2018). K updates of all n workers together; gradients with Lipschitz constant L, of which a batch's has the
variance σ² (of all coordinates together), while workers whose data differ have gradients ς² from the mean's. With

    γ = n / (10 L + √((σ² + 6ς²) K))                                                                               (rate)

    (1/K) Σ_k E‖∇f(x̄_k)‖²  ≤  20 (f₀ − f*) L / K + 2 (f₀ − f* + L) √((σ² + 6ς²)/K)                                  (bound)

for large K: 1/√K, and n does not stand in it. So n workers need 1/n of the steps each: a linear speed-up. How large K must be
depends on how well the graph mixes, through ρ of E[W] = E[WᵀW],

    ρ̄ = (n − 1)/n · (1/(1 − ρ) + 2√ρ/(1 − √ρ)²)

and on how stale a gradient is at most, T updates of all workers (:func:`least_updates`).

**How sure.** ρ̄ and the form of γ and of the bound are recalled with confidence, the constants of :func:`least_updates` with
little; none of it was checked against the paper's text. That γ's parts and f + L add quantities of different units is theirs:
lengths are measured in units of the model. The paper sums a batch's gradients; here γ multiplies their mean, and σ² is that
of the mean, so that the batch size is in neither. `docs/reproduction.md` has what was measured: the slope is there a long way
before the theorem's K.
"""

from __future__ import annotations

import math

from lightning_gossip.algorithm.checks import check_integer, check_not_negative, check_positive
from lightning_gossip.algorithm.topology.mixing import ExchangeLaw, expected_pair_matrix, spectral_gap
from lightning_gossip.algorithm.topology.topology import Topology


def rho_bar(topology: Topology, *, exchanges: ExchangeLaw = "uniform_edge") -> float:
    """ρ̄: how long a difference between the models lasts, in exchanges.

    Args:
        topology: who averages with whom.
        exchanges: see :func:`~lightning_gossip.algorithm.expected_pair_matrix`.

    >>> from lightning_gossip.algorithm import complete, ring
    >>> round(rho_bar(complete(4)), 2), round(rho_bar(ring(16)))
    (38.62, 329980)
    """
    n, gap = topology.n, spectral_gap(expected_pair_matrix(topology, exchanges=exchanges))
    root = math.sqrt(1.0 - gap)
    return (n - 1) / n * (1.0 / gap + 2.0 * root / (1.0 - root) ** 2)


def step_size(workers: int, updates: int, lipschitz: float, variance: float, *, heterogeneity: float = 0.0) -> float:
    """γ of the theorem, each worker's learning rate: that of the global batch, as everywhere in this package.

    Args:
        workers: n.
        updates: K, of all workers together.
        lipschitz: L of the gradient: the largest curvature.
        variance: σ², of one batch's gradient, over all coordinates.
        heterogeneity: ς², mean squared distance of the workers' own gradients to their mean.

    >>> round(step_size(4, 10_000, 1.0, 1.0), 4)
    0.0364
    """
    check_integer("workers", workers, example=4)
    check_integer("updates", updates, example=10_000)
    return workers / (10.0 * lipschitz + math.sqrt(_noise(lipschitz, variance, heterogeneity) * updates))


def gradient_bound(updates: int, gap: float, lipschitz: float, variance: float, *, heterogeneity: float = 0.0) -> float:
    """The bound on the mean of E‖∇f(x̄_k)‖² over K updates with :func:`step_size`, where K is large enough.

    Args:
        updates: K.
        gap: f₀ − f*, of the loss at the beginning.
        lipschitz, variance, heterogeneity: see :func:`step_size`.
    """
    check_integer("updates", updates, example=10_000)
    check_not_negative("gap", gap)
    noise = _noise(lipschitz, variance, heterogeneity)
    return 20.0 * gap * lipschitz / updates + 2.0 * (gap + lipschitz) * math.sqrt(noise / updates)


def least_updates(
    topology: Topology,
    lipschitz: float,
    variance: float,
    *,
    heterogeneity: float = 0.0,
    staleness: int | None = None,
    exchanges: ExchangeLaw = "uniform_edge",
) -> float:
    """The smallest K of which the theorem speaks: L²n²/(σ² + 6ς²) times the largest of four terms, one of them 1024 n² ρ̄².

    Recalled, not verified; the growth with n⁴ρ̄² and T² too. It is a sufficient K, and far from a necessary one.

    Args:
        topology: who averages with whom.
        lipschitz, variance, heterogeneity: see :func:`step_size`; without noise, variance 0 and heterogeneity 0, it is
            infinite.
        staleness: T, the most updates of all workers between a gradient's read and its push; default: n − 1.
        exchanges: see :func:`~lightning_gossip.algorithm.expected_pair_matrix`.

    >>> from lightning_gossip.algorithm import complete
    >>> f"{least_updates(complete(4), 1.0, 1.0):.1e}"
    '3.9e+08'
    """
    n, noise = topology.n, _noise(lipschitz, variance, heterogeneity)
    t = n - 1 if staleness is None else staleness
    check_integer("staleness", t, at_least=0, example=n - 1)
    if noise == 0.0:
        return math.inf
    if n == 1:
        return lipschitz**2 / noise
    mixing = rho_bar(topology, exchanges=exchanges)
    terms = (
        192.0 * (t * (n - 1) / n + mixing),
        1024.0 * n**2 * mixing**2,
        64.0 * t**2 / n**2,
        math.sqrt(n - 1)
        / n ** (1.0 / 6.0)
        * (8.0 * math.sqrt(6.0) * t ** (2.0 / 3.0) + 8.0) ** 2
        * (t + mixing * n / (n - 1)) ** (2.0 / 3.0),
    )
    return float(lipschitz**2 * n**2 / noise * max(terms))


def _noise(lipschitz: float, variance: float, heterogeneity: float) -> float:
    """σ² + 6ς²."""
    check_positive("lipschitz", lipschitz)
    check_not_negative("variance", variance)
    check_not_negative("heterogeneity", heterogeneity)
    return variance + 6.0 * heterogeneity
