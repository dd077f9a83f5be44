import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_gossip.algorithm.topology.generators import (
    bipartite_complete,
    complete,
    exponential,
    from_edges,
    hypercube,
    ring,
    star,
    torus,
)
from lightning_gossip.algorithm.topology.mixing import (
    ExchangeLaw,
    FloatArray,
    MixingWeights,
    check_doubly_stochastic,
    consensus_distance,
    expected_pair_matrix,
    mean_square_gap,
    mixing_matrix,
    pair_matrix,
    spectral_gap,
)
from lightning_gossip.algorithm.topology.topology import Topology
from lightning_gossip.errors import ConfigurationError

# papers.md §1: n, ring 1−ρ, exponential 1−ρ, degree of the exponential graph. Four digits are given.
TABLE = [
    (4, 0.250, 0.250, 2),
    (8, 3.661e-2, 0.125, 4),
    (16, 4.758e-3, 6.25e-2, 8),
    (32, 6.005e-4, 2.114e-2, 10),
    (128, 9.410e-6, 3.922e-3, 14),
]
REGULAR = [ring(5), ring(8), exponential(8), complete(6), bipartite_complete(6), torus(12), hypercube(8)]
PATH = from_edges(4, [(0, 1), (1, 2), (2, 3)])
IRREGULAR = [PATH, star(6), bipartite_complete(5), from_edges(5, [(0, 1), (1, 2), (2, 0), (2, 3), (3, 4)])]
LAWS: list[ExchangeLaw] = ["uniform_edge", "symmetric", "bipartite"]


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    n = draw(st.integers(1, 10))
    edges = [(draw(st.integers(0, child - 1)), child) for child in range(1, n)]
    if n > 1:
        pairs = st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)).filter(lambda pair: pair[0] != pair[1])
        edges += draw(st.lists(pairs, max_size=12))
    return from_edges(n, edges)


def law_of(topology: Topology, exchanges: ExchangeLaw) -> dict[tuple[int, int], float]:
    """Slow reference: the probability of each edge, by going through the callers and their neighbours."""
    if exchanges == "uniform_edge":
        return {edge: 1 / len(topology.edges) for edge in topology.edges}
    if exchanges == "symmetric":
        callers = list(range(topology.n))
    else:
        assert topology.bipartition is not None
        callers = sorted(topology.bipartition[0])
    law = dict.fromkeys(topology.edges, 0.0)
    for caller in callers:
        for peer in topology.neighbours(caller):
            law[min(caller, peer), max(caller, peer)] += 1 / len(callers) / topology.degree(caller)
    return law


def cases_with_laws() -> list[tuple[Topology, ExchangeLaw]]:
    return [
        (topology, law)
        for topology in REGULAR + IRREGULAR
        for law in LAWS
        if law != "bipartite" or topology.bipartition is not None
    ]


@pytest.mark.parametrize(("n", "ring_gap", "exponential_gap", "degree"), TABLE)
def test_spectral_gaps_are_those_of_the_table(n: int, ring_gap: float, exponential_gap: float, degree: int) -> None:
    assert spectral_gap(expected_pair_matrix(ring(n))) == pytest.approx(ring_gap, rel=2.5e-4)
    assert spectral_gap(expected_pair_matrix(exponential(n))) == pytest.approx(exponential_gap, rel=2.5e-4)
    assert exponential(n).degree(0) == degree


@pytest.mark.parametrize("n", [4, 8, 16, 32, 128])
def test_spectral_gaps_have_their_closed_forms(n: int) -> None:
    assert spectral_gap(expected_pair_matrix(ring(n))) == pytest.approx((1 - math.cos(2 * math.pi / n)) / n, rel=1e-9)
    assert spectral_gap(expected_pair_matrix(complete(n))) == pytest.approx(1 / (n - 1), rel=1e-9)
    assert spectral_gap(expected_pair_matrix(bipartite_complete(n))) == pytest.approx(1 / n, rel=1e-9)


@pytest.mark.parametrize(
    ("topology", "gap", "half_a_digit"),
    [
        (ring(8), 0.0670, 5e-5),
        (ring(16), 0.00942, 5e-6),
        (exponential(8), 0.1368, 5e-5),
        (exponential(16), 0.0653, 5e-5),
    ],
)
def test_mean_square_gaps_are_the_published_ones(topology: Topology, gap: float, half_a_digit: float) -> None:
    assert mean_square_gap(topology) == pytest.approx(gap, abs=half_a_digit)


@pytest.mark.parametrize("n", [2, 3, 8, 16, 17, 32, 64])
def test_on_the_complete_graph_the_mean_square_gap_is_the_spectral_gap(n: int) -> None:
    assert mean_square_gap(complete(n)) == pytest.approx(1 / (n - 1), rel=1e-9)


@pytest.mark.parametrize(("topology", "law"), [*cases_with_laws(), *((t, "uniform_edge") for t in (ring(18), star(17)))])
def test_the_mean_square_gap_is_that_of_the_kronecker_matrix(topology: Topology, law: ExchangeLaw) -> None:
    n = topology.n
    kronecker = np.zeros((n * n, n * n))
    for (i, j), probability in law_of(topology, law).items():
        w = pair_matrix(n, i, j)
        kronecker += probability * np.kron(w, w)
    off_consensus = np.eye(n) - 1 / n
    both = np.kron(off_consensus, off_consensus)
    reference = 1 - np.linalg.eigvalsh(both @ kronecker @ both)[-1]
    assert mean_square_gap(topology, exchanges=law) == pytest.approx(reference, rel=1e-7)


@pytest.mark.parametrize("topology", [t for t in REGULAR + IRREGULAR if t.n > 2])
def test_the_mean_square_gap_lies_between_one_and_two_spectral_gaps(topology: Topology) -> None:
    gap = spectral_gap(expected_pair_matrix(topology))
    assert gap * (1 - 1e-9) <= mean_square_gap(topology) <= 2 * gap


@pytest.mark.parametrize("topology", REGULAR + IRREGULAR)
def test_independent_models_contract_by_one_over_n_minus_1_on_every_graph(topology: Topology) -> None:
    n = topology.n
    covariance = np.eye(n) - 1 / n
    after = [
        np.trace(pair_matrix(n, i, j) @ covariance @ pair_matrix(n, i, j)) / np.trace(covariance) for i, j in topology.edges
    ]
    assert after == pytest.approx([1 - 1 / (n - 1)] * len(after))


def test_repeated_mean_square_gaps_are_bit_identical() -> None:
    assert mean_square_gap(ring(24)) == mean_square_gap(ring(24))


@given(topologies(), st.sampled_from(["metropolis", "uniform"]))
def test_mixing_matrices_are_symmetric_and_doubly_stochastic(topology: Topology, weights: MixingWeights) -> None:
    w = mixing_matrix(topology, weights)
    check_doubly_stochastic(w, atol=1e-12)
    assert np.array_equal(w, w.T)
    assert w.dtype == np.float64
    assert w.shape == (topology.n, topology.n)


@given(topologies(), st.sampled_from(["metropolis", "uniform"]))
def test_mixing_matrices_follow_the_edges_and_keep_a_part(topology: Topology, weights: MixingWeights) -> None:
    w = mixing_matrix(topology, weights)
    off_diagonal = w - np.diag(np.diag(w))
    assert {(int(i), int(j)) for i, j in np.argwhere(off_diagonal) if i < j} == set(topology.edges)
    assert np.diag(w).min() > 0


@given(topologies(), st.sampled_from(["metropolis", "uniform"]), st.integers(0, 2**32 - 1))
def test_rows_receive_and_the_mean_stays(topology: Topology, weights: MixingWeights, seed: int) -> None:
    w = mixing_matrix(topology, weights)
    x = np.random.default_rng(seed).normal(size=topology.n)
    received = [sum(w[i, j] * x[j] for j in (i, *topology.neighbours(i))) for i in range(topology.n)]
    assert w @ x == pytest.approx(np.array(received), abs=1e-12)
    assert (w @ x).mean() == pytest.approx(x.mean(), abs=1e-12)


@given(topologies(), st.sampled_from(["metropolis", "uniform"]), st.integers(0, 2**32 - 1))
def test_mixing_contracts_the_consensus_distance_by_the_gap(topology: Topology, weights: MixingWeights, seed: int) -> None:
    w = mixing_matrix(topology, weights)
    x = np.random.default_rng(seed).normal(size=(topology.n, 3))
    rho = 1 - spectral_gap(w)
    assert consensus_distance(w @ x) <= rho**2 * consensus_distance(x) + 1e-12


@given(topologies())
def test_the_expected_pair_matrix_is_doubly_stochastic_and_positive_semidefinite(topology: Topology) -> None:
    for law in LAWS:
        if law == "bipartite" and topology.bipartition is None:
            continue
        w = expected_pair_matrix(topology, exchanges=law)
        check_doubly_stochastic(w, atol=1e-12)
        assert np.array_equal(w, w.T)
        assert np.linalg.eigvalsh(w)[0] > -1e-12


def test_a_ring_mixes_a_third_each() -> None:
    for weights in ("metropolis", "uniform"):
        row = mixing_matrix(ring(5), weights)[0]
        assert row == pytest.approx([1 / 3, 1 / 3, 0, 0, 1 / 3])


def test_metropolis_and_uniform_weights_differ_on_an_irregular_graph() -> None:
    graph = from_edges(4, [(0, 1), (0, 2), (0, 3), (1, 2)])  # degrees 3, 2, 2, 1
    assert mixing_matrix(graph, "metropolis")[1] == pytest.approx([1 / 4, 5 / 12, 1 / 3, 0])
    assert mixing_matrix(graph, "uniform")[1] == pytest.approx([1 / 4, 1 / 2, 1 / 4, 0])


@pytest.mark.parametrize(("topology", "law"), cases_with_laws())
def test_the_expected_pair_matrix_is_the_mean_of_the_pair_matrices(topology: Topology, law: ExchangeLaw) -> None:
    reference = sum(p * pair_matrix(topology.n, i, j) for (i, j), p in law_of(topology, law).items())
    assert expected_pair_matrix(topology, exchanges=law) == pytest.approx(reference, abs=1e-14)


@pytest.mark.parametrize("topology", REGULAR)
def test_on_regular_graphs_it_does_not_matter_who_calls(topology: Topology) -> None:
    n, degree = topology.n, topology.degree(0)
    laplacian = degree * np.eye(n)
    for i, j in topology.edges:
        laplacian[i, j] = laplacian[j, i] = -1
    for law in LAWS:
        if law != "bipartite" or topology.bipartition is not None:
            expected = np.eye(n) - laplacian / (n * degree)
            assert expected_pair_matrix(topology, exchanges=law) == pytest.approx(expected, abs=1e-14)


def test_on_a_path_it_matters_who_calls() -> None:
    off_diagonals = [np.diag(expected_pair_matrix(PATH, exchanges=law), 1).tolist() for law in LAWS]
    assert off_diagonals[0] == pytest.approx([1 / 6, 1 / 6, 1 / 6])
    assert off_diagonals[1] == pytest.approx([3 / 16, 1 / 8, 3 / 16])
    assert off_diagonals[2] == pytest.approx([1 / 4, 1 / 8, 1 / 8])  # initiators 0 and 2


def test_a_single_worker_has_nothing_to_mix() -> None:
    alone = ring(1)
    assert mixing_matrix(alone).tolist() == [[1.0]]
    for law in LAWS:
        assert expected_pair_matrix(alone, exchanges=law).tolist() == [[1.0]]
        assert mean_square_gap(alone, exchanges=law) == 1.0
    assert spectral_gap(mixing_matrix(alone)) == 1.0


def test_two_workers_agree_after_one_exchange() -> None:
    assert spectral_gap(expected_pair_matrix(ring(2))) == pytest.approx(1.0)
    assert mean_square_gap(ring(2)) == pytest.approx(1.0)


@given(st.integers(2, 9), st.data())
def test_a_pair_matrix_is_the_published_projection(n: int, data: st.DataObject) -> None:
    i, j = data.draw(st.permutations(range(n)))[:2]
    difference = np.eye(n)[i] - np.eye(n)[j]
    w = pair_matrix(n, i, j)
    assert np.array_equal(w, np.eye(n) - np.outer(difference, difference) / 2)
    assert np.array_equal(w @ w, w)
    check_doubly_stochastic(w, atol=0.0)


def test_the_gap_of_a_matrix_that_is_not_symmetric_takes_moduli() -> None:
    shift = np.roll(np.eye(4), 1, axis=0)  # eigenvalues (1 + i^k)/2: second largest modulus cos(π/4)
    assert spectral_gap((np.eye(4) + shift) / 2) == pytest.approx(1 - math.cos(math.pi / 4))


def test_an_eigenvalue_of_minus_one_leaves_no_gap() -> None:
    neighbours_only = np.array([[0, 0.5, 0, 0.5], [0.5, 0, 0.5, 0], [0, 0.5, 0, 0.5], [0.5, 0, 0.5, 0]])
    assert spectral_gap(neighbours_only) == pytest.approx(0.0, abs=1e-12)


def test_a_row_sum_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"row 1 .*sums to 0\.75.*equal models would not stay equal"):
        check_doubly_stochastic([[1.0, 0.0], [0.25, 0.5]])


def test_a_column_sum_is_named_if_the_rows_are_right() -> None:
    with pytest.raises(ConfigurationError, match=r"column 1 .*sums to 1\.6.*the mean of the models would not be kept"):
        check_doubly_stochastic([[0.4, 0.6], [0.0, 1.0]])


def test_a_negative_weight_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"-0\.5 at row 1, column 0"):
        check_doubly_stochastic([[1.5, -0.5, 0.0], [-0.5, 1.0, 0.5], [0.0, 0.5, 0.5]][::-1])


def test_the_tolerance_is_what_is_asked_for() -> None:
    nearly = mixing_matrix(ring(4)) * (1 + 1e-6)
    check_doubly_stochastic(nearly, atol=1e-5)
    with pytest.raises(ConfigurationError, match="within 1e-07"):
        check_doubly_stochastic(nearly, atol=1e-7)


@pytest.mark.parametrize("matrix", [np.eye(3)[:2], np.ones(3), np.empty((0, 0)), [[float("nan")]]])
def test_what_is_no_square_matrix_is_refused(matrix: FloatArray) -> None:
    with pytest.raises(ConfigurationError, match="must be square"):
        check_doubly_stochastic(matrix)
    with pytest.raises(ConfigurationError, match="must be square"):
        spectral_gap(matrix)


@pytest.mark.parametrize("pair", [(0, 0), (-1, 2), (0, 4)])
def test_what_is_no_pair_is_refused(pair: tuple[int, int]) -> None:
    with pytest.raises(ConfigurationError, match=r"two different ranks in \[0, 4\)"):
        pair_matrix(4, *pair)


def test_unknown_weights_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="got weights='max'; write 'metropolis' or 'uniform'"):
        mixing_matrix(ring(4), "max")  # type: ignore[arg-type]


def test_an_unknown_law_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="got exchanges='auto'"):
        expected_pair_matrix(ring(4), exchanges="auto")  # type: ignore[arg-type]


def test_bipartite_exchanges_on_an_odd_cycle_are_refused() -> None:
    for function in (expected_pair_matrix, mean_square_gap):
        with pytest.raises(ConfigurationError, match="has no bipartition"):
            function(ring(5), exchanges="bipartite")


@given(st.integers(1, 6), st.integers(0, 5), st.integers(0, 2**32 - 1))
def test_the_consensus_distance_is_the_mean_squared_distance_from_the_mean(n: int, d: int, seed: int) -> None:
    models = np.random.default_rng(seed).normal(size=(n, d))
    reference = sum(float(np.linalg.norm(row - models.mean(axis=0)) ** 2) for row in models) / n
    assert consensus_distance(models) == pytest.approx(reference, abs=1e-12)
    assert consensus_distance(torch.from_numpy(models)) == consensus_distance(models)


def test_the_consensus_distance_of_close_models_does_not_cancel() -> None:
    models = torch.full((2, 1000), 1000.0)
    models[1] += 2.0**-13  # one unit in the last place of float32
    exact = 1000 * 2.0**-28
    assert consensus_distance(models) == pytest.approx(exact, rel=1e-9)
    cancelled = models.square().sum(dim=1).mean() - models.mean(dim=0).square().sum()
    assert abs(float(cancelled) - exact) > exact  # the formula that must not be used loses every digit


@pytest.mark.parametrize("n", [1, 3, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equal_models_are_at_distance_zero(n: int, dtype: torch.dtype) -> None:
    model = torch.randn(50, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert consensus_distance(model.expand(n, -1)) == 0.0


def test_the_consensus_distance_leaves_the_graph_of_autograd_alone() -> None:
    models = torch.ones(2, 3, requires_grad=True)
    assert consensus_distance(models * torch.tensor([[1.0], [3.0]])) == 3.0
    assert models.grad is None


def test_a_diverged_model_shows_in_the_consensus_distance() -> None:
    assert math.isnan(consensus_distance(torch.tensor([[1.0], [math.nan]])))


@pytest.mark.parametrize("models", [torch.ones(3), torch.ones(0, 3), torch.ones(2, 2, 2), np.ones((2, 2)) * 1j])
def test_what_is_no_stack_of_models_is_refused(models: torch.Tensor) -> None:
    with pytest.raises(ConfigurationError, match="one real, flat model a row"):
        consensus_distance(models)
