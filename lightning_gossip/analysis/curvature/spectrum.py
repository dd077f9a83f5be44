"""How curved the loss is: the largest eigenvalues of its Hessian, and its spectral density.

    h_max = max eig H,   H = ∂²L/∂w²,   L = mean loss over some batches

The stability of (stale) gradient descent is decided at h_max: lr · h_max < 2 without delay. The eigenvalues come from scipy's
``eigsh`` (ARPACK's implicitly restarted Lanczos) on Hessian-vector products. The library of the field, PyHessian, has
had no release since 2020, finds eigenvalues by power iteration, which converges to the largest |λ|, and keeps neither random
numbers nor BatchNorm statistics; it is not used.

The density is stochastic Lanczos quadrature (Ghorbani, Krishnan, Xiao 2019, arXiv 1901.10159, alg. 1 and 2): from a random
start z/‖z‖, m Lanczos steps give a tridiagonal T = U Θ Uᵀ, whose θ_l are nodes and (U_1l)² weights of a Gauss quadrature of
the density seen by z; averaged over several z ∈ {−1, 1}^d it estimates (1/d) Σ_i δ(λ − λ_i). scipy has no such thing, and its
``eigsh`` does not give T away, so the recursion is written out here, with full re-orthogonalization.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.linalg import eigh, eigh_tridiagonal
from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh
from torch import Tensor, nn

from lightning_gossip.algorithm.checks import check_integer, check_positive
from lightning_gossip.analysis.curvature.hessian import Hessian, Vector
from lightning_gossip.analysis.curvature.unchanged import unchanged_random_state
from lightning_gossip.errors import ConfigurationError

# Lanczos vectors beyond two per eigenvalue. ARPACK looks whether it has converged once they are full: 14 and 18 cost up to
# twice the products on networks for digits, 4 saves nothing
_BASIS = 8
_BREAKDOWN = 1e-6  # of ‖H‖: a Lanczos residual this small is rounding, and the quadrature is exact


@dataclass(frozen=True)
class Curvature:
    """The leading eigenvalues of a Hessian.

    Args:
        eigenvalues: the algebraically largest ones, descending; all negative ones are possible, at a maximum of the loss.
        residuals: ‖H u − λ u‖ of each, for unit u: there is an eigenvalue of H within so much of λ.
        converged: whether all of them are as exact as was asked for.
        products: Hessian-vector products made, of about four gradients of all batches each.
        parameters: d, elements of all parameters.
        batches, samples: on which; samples are None where a batch holds no tensor.
    """

    eigenvalues: tuple[float, ...]
    residuals: tuple[float, ...]
    converged: bool
    products: int
    parameters: int
    batches: int
    samples: int | None

    @property
    def largest(self) -> float:
        """h_max."""
        return self.eigenvalues[0]


@dataclass(frozen=True, eq=False)
class Spectrum:
    """A spectral density, as a quadrature: (1/d) Σ_i f(λ_i) ≈ Σ_l w_l f(θ_l).

    Args:
        nodes: θ, ascending.
        weights: w ≥ 0 of each, of sum 1.
        products: Hessian-vector products made.
        parameters: d.
    """

    nodes: Vector
    weights: Vector
    products: int
    parameters: int

    @property
    def trace(self) -> float:
        """Hutchinson's estimate of Σ λ_i; its variance over one probe is 2 Σ_{i≠j} H_ij²."""
        return self.parameters * float(self.weights @ self.nodes)

    def density(self, at: ArrayLike, *, width: float) -> NDArray[np.float64]:
        """The density smoothed by a Gaussian.

        Args:
            at: eigenvalues, any shape.
            width: σ > 0 of the Gaussian.

        Returns:
            Per unit of eigenvalue, of the shape of ``at``; its integral is 1.
        """
        check_positive("width", width)
        distances = (np.asarray(at, dtype=np.float64)[..., None] - self.nodes) / width
        values: NDArray[np.float64] = np.exp(-0.5 * distances**2) @ self.weights / (width * math.sqrt(2.0 * math.pi))
        return values


def curvature(
    loss: Callable[[Any], Tensor],
    parameters: Iterable[Tensor],
    batches: Iterable[Any],
    *,
    leading: int = 1,
    tolerance: float = 1e-3,
    max_products: int = 300,
    module: nn.Module | None = None,
    seed: int = 0,
) -> Curvature:
    """The largest eigenvalues of the Hessian of the mean loss.

    BatchNorm is measured in the mode that ``module`` is in: in training mode the Hessian is that of the loss that is trained,
    with each batch's own statistics. Memory: (2·leading + 12) vectors of d float64, and the graph of two passes over one batch.

    Args:
        loss, parameters, batches, module, seed: see :class:`~lightning_gossip.analysis.curvature.hessian.Hessian`.
        leading: how many eigenvalues, in [1, d].
        tolerance: of each, relative to it.
        max_products: about how many Hessian-vector products may be made. If they do not suffice the result says
            ``converged=False`` and holds estimates from below.

    Raises:
        ConfigurationError: for a value out of range, and for what :class:`~lightning_gossip.analysis.curvature.hessian.Hessian`
            refuses.

    Example::

        >>> import torch
        >>> w = torch.ones(3, requires_grad=True)
        >>> h = torch.tensor([4.0, 1.0, -2.0])
        >>> curvature(lambda scale: 0.5 * scale * (h * w * w).sum(), [w], [1.0], leading=2).eigenvalues
        (4.0, 1.0)
    """
    check_integer("leading", leading, example=1)
    check_integer("max_products", max_products, at_least=_least_products(leading), example=300)
    check_positive("tolerance", tolerance)
    hessian = Hessian(loss, parameters, batches, module=module, seed=seed)
    if leading > hessian.size:
        raise ConfigurationError(f"leading={leading} eigenvalues of {hessian.size} parameters: there are no more than those.")
    with unchanged_random_state():  # scipy may draw when a Krylov space is exhausted
        if hessian.size <= _basis(leading):
            values, vectors, converged = *_dense(hessian), True
        else:
            values, vectors, converged = _lanczos(hessian, leading, tolerance, max_products, seed)
        order = np.argsort(values)[::-1][:leading]
        eigenvalues = tuple(float(values[i]) for i in order)
        residuals = tuple(_residual(hessian, values[i], vectors[:, i]) for i in order)
    return Curvature(
        eigenvalues,
        residuals,
        converged or all(r <= tolerance * abs(value) for value, r in zip(eigenvalues, residuals, strict=True)),
        hessian.products,
        hessian.size,
        hessian.batches,
        hessian.samples,
    )


def spectrum(
    loss: Callable[[Any], Tensor],
    parameters: Iterable[Tensor],
    batches: Iterable[Any],
    *,
    probes: int = 4,
    steps: int = 30,
    module: nn.Module | None = None,
    seed: int = 0,
) -> Spectrum:
    """The spectral density of the Hessian of the mean loss, by ``probes · steps`` Hessian-vector products.

    Args:
        loss, parameters, batches, module, seed: see :class:`~lightning_gossip.analysis.curvature.hessian.Hessian`.
        probes: random vectors; the error of the trace falls with their square root.
        steps: of Lanczos from each, m, at most d: moments up to 2m − 1 are exact for the probe. Memory: m vectors of d float64.

    Raises:
        ConfigurationError: for a value out of range, and for what :class:`~lightning_gossip.analysis.curvature.hessian.Hessian`
            refuses.
    """
    check_integer("probes", probes, example=4)
    check_integer("steps", steps, example=30)
    hessian = Hessian(loss, parameters, batches, module=module, seed=seed)
    signs = np.random.default_rng(seed)
    quadratures = [
        _quadrature(hessian, signs.choice([-1.0, 1.0], size=hessian.size), min(steps, hessian.size)) for _ in range(probes)
    ]
    nodes = np.concatenate([theta for theta, _ in quadratures])
    weights = np.concatenate([weight for _, weight in quadratures]) / probes
    order = np.argsort(nodes)
    return Spectrum(nodes[order], weights[order], hessian.products, hessian.size)


def _basis(leading: int) -> int:
    """Lanczos vectors that ARPACK keeps."""
    return 2 * leading + _BASIS


def _least_products(leading: int) -> int:
    """For an estimate without restarts: the start, the basis and its last residual, the residuals of the result."""
    return 1 + _basis(leading) + 1 + leading


def _dense(hessian: Hessian) -> tuple[Vector, Vector]:
    """All eigenvalues and eigenvectors of a Hessian of a few parameters."""
    matrix = np.stack([hessian.product(unit) for unit in np.eye(hessian.size)])
    values, vectors = eigh((matrix + matrix.T) / 2.0)
    return values, vectors


def _lanczos(hessian: Hessian, leading: int, tolerance: float, max_products: int, seed: int) -> tuple[Vector, Vector, bool]:
    """The leading eigenvalues and eigenvectors, in any order, and whether ARPACK says that they have converged."""
    size, basis = hessian.size, _basis(leading)
    start = hessian.product(np.random.default_rng(seed).standard_normal(size))  # a power step: without the null space
    if not start.any():
        return np.zeros(leading), np.eye(size, leading), True
    operator = LinearOperator((size, size), matvec=hessian.product, dtype=np.float64)
    # what is left after one cycle for an estimate in any case; a restart makes at most so many products
    restarts = (max_products - _least_products(leading) - basis) // (basis - leading)
    options = {"k": leading, "which": "LA", "v0": start, "ncv": basis}
    try:
        if restarts > 0:
            return *eigsh(operator, tol=tolerance, maxiter=restarts, **options), True
    except ArpackNoConvergence as error:
        if len(error.eigenvalues) == leading:
            return error.eigenvalues, error.eigenvectors, True
    return *eigsh(operator, tol=np.inf, maxiter=1, **options), False


def _residual(hessian: Hessian, value: float, vector: Vector) -> float:
    return float(np.linalg.norm(hessian.product(vector) - value * vector))


def _quadrature(hessian: Hessian, probe: Vector, steps: int) -> tuple[Vector, Vector]:
    """Nodes and weights of the density that one probe sees; fewer than ``steps`` once its Krylov space is exhausted."""
    basis = np.zeros((steps, hessian.size))
    diagonal, beside = np.zeros(steps), np.zeros(steps)
    basis[0] = probe / np.linalg.norm(probe)
    scale = 0.0
    for step in range(steps):
        image = hessian.product(basis[step])
        scale = max(scale, float(np.linalg.norm(image)))
        diagonal[step] = basis[step] @ image
        done = basis[: step + 1]
        for _ in range(2):  # once leaves rounding errors that grow (Parlett: twice is enough)
            image = image - done.T @ (done @ image)
        beside[step] = np.linalg.norm(image)
        if step + 1 == steps or beside[step] <= _BREAKDOWN * scale:
            break
        basis[step + 1] = image / beside[step]
    nodes, vectors = eigh_tridiagonal(diagonal[: step + 1], beside[:step])
    return nodes, vectors[0] ** 2
