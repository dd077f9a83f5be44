"""Mixing matrices of a topology, and how fast they bring the models together.

Convention, everywhere in this package: W is *row-receives*, (W x)_i = Σ_j W_ij x_j: row i says what rank i receives.
Rows that sum to one keep equal models equal; columns that sum to one keep the mean of the models. (The papers write
X W, models as columns; all matrices built here are symmetric, so the two agree.)

- D-PSGD (Lian et al. 2017, arXiv 1705.09056): x ← W x with one fixed W for all ranks in a step, see `mixing_matrix`.
- AD-PSGD (Lian et al. 2018, arXiv 1710.06952): one random edge per exchange, W_e = I − b_e b_eᵀ/2 with
  b_e = e_i − e_j, see `pair_matrix`. With p_e the probability of edge e, the mean is E[W] = I − ½ Σ_e p_e b_e b_eᵀ,
  see `expected_pair_matrix`.

letter → name: ρ → second largest eigenvalue, 1−ρ → `spectral_gap`, L → the graph's Laplacian, C → covariance of the
models over the ranks, n × n.

Two rates, and only one of them is the slope that an experiment shows. ρ of E[W] is the contraction of E‖X − X̄‖² by
*one* exchange that starts in the second eigenspace. Over many of them the covariance follows C ← Σ_e p_e W_e C W_e,
whose rate is 1 − λ_max(E[W⊗W]), see `mean_square_gap`: about twice 1−ρ on a ring of 8.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from lightning_gossip.algorithm.topology.topology import Topology
from lightning_gossip.errors import ConfigurationError

if TYPE_CHECKING:
    import torch

FloatArray = npt.NDArray[np.float64]
MixingWeights = Literal["metropolis", "uniform"]
ExchangeLaw = Literal["uniform_edge", "symmetric", "bipartite"]

# Up to here the n² × n² matrix (at most 256²) takes milliseconds, and Lanczos needs more room than the smallest of
# them have.
_DENSE_UP_TO = 16


def mixing_matrix(topology: Topology, weights: MixingWeights = "metropolis") -> FloatArray:
    """The symmetric, doubly stochastic W of one synchronous averaging with all neighbours (D-PSGD).

    Args:
        topology: the graph; W_ij > 0 only along its edges and on the diagonal.
        weights: ``"metropolis"``: W_ij = 1/(1 + max(d_i, d_j)), which needs only the degrees of the two ends;
            ``"uniform"``: W_ij = 1/(1 + max degree of all). The rest stays with the rank itself. They are equal on
            regular graphs: on a ring ⅓ each, as in D-PSGD.

    Returns:
        float64, shape (n, n).

    Raises:
        ConfigurationError: for other `weights`.

    >>> from lightning_gossip.algorithm.topology.generators import ring
    >>> mixing_matrix(ring(4))[0].round(3).tolist()
    [0.333, 0.333, 0.0, 0.333]
    """
    degrees = np.array([topology.degree(rank) for rank in range(topology.n)], dtype=np.float64)
    i, j = _ends(topology)
    if weights == "metropolis":
        edge_weights = 1.0 / (1.0 + np.maximum(degrees[i], degrees[j]))
    elif weights == "uniform":
        edge_weights = np.full(len(i), 1.0 / (1.0 + degrees.max()))
    else:
        raise ConfigurationError(f"got weights={weights!r}; write 'metropolis' or 'uniform'.")
    return np.eye(topology.n) - _laplacian(topology.n, i, j, edge_weights)


def pair_matrix(n: int, i: int, j: int) -> FloatArray:
    """W = I − (e_i − e_j)(e_i − e_j)ᵀ/2: one exchange sets the models of ranks i and j to their mean (AD-PSGD).

    Args:
        n: workers.
        i: a rank in [0, n).
        j: its peer, another rank in [0, n).

    Returns:
        float64, shape (n, n); symmetric, doubly stochastic, and a projection: a second exchange changes nothing.

    Raises:
        ConfigurationError: if i = j or one of them is not a rank.

    >>> pair_matrix(3, 0, 2).tolist()
    [[0.5, 0.0, 0.5], [0.0, 1.0, 0.0], [0.5, 0.0, 0.5]]
    """
    if not (0 <= i < n and 0 <= j < n) or i == j:
        raise ConfigurationError(f"got the pair ({i}, {j}) of {n} workers; pass two different ranks in [0, {n}).")
    matrix = np.eye(n)
    matrix[[i, i, j, j], [i, j, i, j]] = 0.5
    return matrix


def expected_pair_matrix(topology: Topology, *, exchanges: ExchangeLaw = "uniform_edge") -> FloatArray:
    """E[W] over one exchange of AD-PSGD; positive semidefinite, since each pair matrix is a projection.

    Args:
        topology: the graph.
        exchanges: how an exchange comes by its edge. ``"uniform_edge"``: each with probability 1/|E|, so
            E[W] = I − L/(2|E|).
            ``"symmetric"``: the initiator is uniform among all ranks, its partner uniform among its neighbours;
            ``"bipartite"``: the same, the initiator uniform among one side of the graph. All three are I − L/(n·degree) on
            regular graphs; on the others they differ.

    Returns:
        float64, shape (n, n). For n = 1, where no exchange happens, the identity.

    Raises:
        ConfigurationError: for other `exchanges`, or ``"bipartite"`` on a graph without a bipartition.
    """
    i, j = _ends(topology)
    return np.eye(topology.n) - 0.5 * _laplacian(topology.n, i, j, _edge_probabilities(topology, exchanges))


def check_doubly_stochastic(matrix: npt.ArrayLike, *, atol: float = 1e-9) -> None:
    """Raise unless W is square, non-negative, and each row and column sums to one.

    Args:
        matrix: W, shape (n, n), row-receives.
        atol: how far an entry may be below zero, and a sum from one.

    Raises:
        ConfigurationError: naming the entry, or the row or column whose sum is furthest from one.
    """
    w = _square(matrix)
    row, column = np.unravel_index(int(w.argmin()), w.shape)
    if w[row, column] < -atol:
        raise ConfigurationError(
            f"the mixing matrix has {w[row, column]:.6g} at row {row}, column {column}; weights must be >= 0. "
            "Move weight from the diagonal to the edges, as mixing_matrix() does."
        )
    effects = ("row", 1, "equal models would not stay equal"), ("column", 0, "the mean of the models would not be kept")
    for kind, axis, effect in effects:
        sums = w.sum(axis=axis)
        worst = int(np.abs(sums - 1.0).argmax())
        if abs(sums[worst] - 1.0) > atol:
            raise ConfigurationError(
                f"{kind} {worst} of the mixing matrix sums to {sums[worst]:.6g}; each must sum to 1 (within {atol:g}), "
                f"or {effect}. Put what is missing on the diagonal, or use mixing_matrix(), which is doubly stochastic "
                "on every topology."
            )


def spectral_gap(matrix: npt.ArrayLike) -> float:
    """1 − the second largest eigenvalue modulus of W (1 − ρ): 0 is no mixing, 1 is the exact mean at once.

    Args:
        matrix: W, shape (n, n), a stochastic matrix, so that its largest modulus is 1. It need not be symmetric.

    Returns:
        In [0, 1]. For n = 1, where there is nothing to mix, 1.

    Raises:
        ConfigurationError: if W is not square and finite.

    >>> from lightning_gossip.algorithm.topology.generators import ring
    >>> round(spectral_gap(expected_pair_matrix(ring(4))), 6)
    0.25
    """
    w = _square(matrix)
    if len(w) == 1:
        return 1.0
    # eigvalsh is exact to rounding also for repeated eigenvalues; the general solver is not.
    eigenvalues = np.linalg.eigvalsh(w) if np.array_equal(w, w.T) else np.linalg.eigvals(w)
    return float(1.0 - np.sort(np.abs(eigenvalues))[-2])


def mean_square_gap(topology: Topology, *, exchanges: ExchangeLaw = "uniform_edge") -> float:
    """1 − λ_max(E[W⊗W]) off the consensus space: the long-run contraction of E‖X − X̄‖² by one exchange.

    This is the slope that a drained run with learning rate 0 shows; `spectral_gap` of E[W] is not (see the module's
    docstring).

    Args:
        topology: the graph.
        exchanges: as in `expected_pair_matrix`.

    Returns:
        In (0, 1]. For n = 1, where there is nothing to mix, 1.

    Raises:
        ConfigurationError: as `expected_pair_matrix`.

    >>> from lightning_gossip.algorithm.topology.generators import complete
    >>> round(mean_square_gap(complete(5)), 6)  # 1/(n-1), as the spectral gap
    0.25
    """
    n = topology.n
    if n == 1:
        return 1.0
    i, j = _ends(topology)
    probabilities = _edge_probabilities(topology, exchanges)
    laplacian = _laplacian(n, i, j, probabilities)
    projection = np.eye(n) - 1.0 / n

    def exchange(flat: FloatArray) -> FloatArray:
        """C ↦ Σ_e p_e W_e C W_e = C − ½(LC + CL) + ¼ Σ_e p_e (b_eᵀ C b_e) b_e b_eᵀ, with L weighted by p."""
        c = projection @ flat.reshape(n, n) @ projection  # the operator maps this space to itself; the rest becomes 0
        spread = c[i, i] + c[j, j] - c[i, j] - c[j, i]
        image = c - 0.5 * (laplacian @ c + c @ laplacian) + 0.25 * _laplacian(n, i, j, probabilities * spread)
        return image.ravel()

    if n <= _DENSE_UP_TO:
        dense = np.stack([exchange(row) for row in np.eye(n * n)])
        return float(1.0 - np.linalg.eigvalsh((dense + dense.T) / 2)[-1])
    from scipy.sparse.linalg import LinearOperator, eigsh  # here alone

    operator = LinearOperator((n * n, n * n), matvec=exchange, dtype=np.float64)
    # From the projection, the covariance of independent models: the leading eigenvector can be chosen positive
    # semidefinite (the operator keeps that cone), so it is never orthogonal to this start. Given, and not random, so
    # that the result is repeatable.
    largest = eigsh(operator, k=1, which="LA", v0=projection.ravel(), return_eigenvectors=False)
    return float(1.0 - largest[0])


def consensus_distance(stacked: torch.Tensor | npt.ArrayLike) -> float:
    """(1/n) Σ_i ‖x_i − x̄‖²: how far the models are from their mean, squared. 0 if they are equal.

    Computed in float64 from the differences, never as mean‖x‖² − ‖x̄‖²: that subtracts two numbers of the size of the
    weights and loses the answer, or makes it negative, once the models are close.

    Args:
        stacked: one flat model a row, shape (n, d), n >= 1; a tensor (on any device) or an array.

    Returns:
        A number >= 0; nan or inf if a model holds such values.

    Raises:
        ConfigurationError: if it is not a real matrix with at least one row.

    >>> consensus_distance(np.array([[0.0, 0.0], [2.0, 0.0]]))
    1.0
    """
    import torch  # here alone: commands look at the names of graphs without it

    models = stacked.detach() if isinstance(stacked, torch.Tensor) else torch.as_tensor(np.asarray(stacked), device="cpu")
    if models.dim() != 2 or models.shape[0] == 0 or models.is_complex():
        raise ConfigurationError(
            f"got models of shape {tuple(models.shape)} and {models.dtype}; one real, flat model a row is needed, "
            "shape (n, d). Use torch.stack([flat_0, flat_1, ...])."
        )
    models = models.to(torch.float64)
    differences = models - models.mean(dim=0)
    return float(differences.square().sum() / models.shape[0])


def _ends(topology: Topology) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    edges = np.array(topology.edges, dtype=np.intp).reshape(-1, 2)
    return edges[:, 0], edges[:, 1]


def _laplacian(n: int, i: npt.NDArray[np.intp], j: npt.NDArray[np.intp], weights: FloatArray) -> FloatArray:
    """Σ_e w_e b_e b_eᵀ over the edges e = (i, j); each pair of ends comes once."""
    matrix = np.zeros((n, n))
    matrix[i, j] = matrix[j, i] = -weights
    np.fill_diagonal(matrix, -matrix.sum(axis=1))
    return matrix


def _edge_probabilities(topology: Topology, exchanges: ExchangeLaw) -> FloatArray:
    """p_e for each of `topology.edges`."""
    edges = topology.edges
    if exchanges == "uniform_edge":
        return np.full(len(edges), 1.0 / max(1, len(edges)))
    if exchanges == "symmetric":
        initiators = frozenset(range(topology.n))
    elif exchanges == "bipartite":
        if topology.bipartition is None:
            raise ConfigurationError(
                f"got exchanges='bipartite' for the topology {topology.name!r} of {topology.n} ranks, which has no "
                "bipartition. Write exchanges='symmetric', or use an even ring, 'exponential' or 'bipartite_complete'."
            )
        initiators = topology.bipartition[0]
    else:
        raise ConfigurationError(f"got exchanges={exchanges!r}; write 'uniform_edge', 'symmetric' or 'bipartite'.")
    started_by = [1.0 / topology.degree(rank) if rank in initiators and topology.n > 1 else 0.0 for rank in range(topology.n)]
    return np.array([started_by[i] + started_by[j] for i, j in edges], dtype=np.float64) / len(initiators)


def _square(matrix: npt.ArrayLike) -> FloatArray:
    w = np.asarray(matrix, dtype=np.float64)
    if w.ndim != 2 or w.shape[0] != w.shape[1] or w.size == 0 or not np.isfinite(w).all():
        raise ConfigurationError(
            f"got a mixing matrix of shape {w.shape}; it must be square, (n, n) with n >= 1, and finite. "
            "Build it with mixing_matrix(topology)."
        )
    return w
