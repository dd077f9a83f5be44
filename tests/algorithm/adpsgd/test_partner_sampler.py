import io
import json
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import stats

from lightning_gossip.algorithm.adpsgd.partner_sampler import PartnerPicker, Roles, resolve_roles
from lightning_gossip.algorithm.topology.generators import (
    TOPOLOGIES,
    bipartite_complete,
    complete,
    exponential,
    from_edges,
    ring,
    star,
)
from lightning_gossip.algorithm.topology.mixing import (
    FloatArray,
    consensus_distance,
    expected_pair_matrix,
    mean_square_gap,
    pair_matrix,
    spectral_gap,
)
from lightning_gossip.algorithm.topology.topology import Topology
from lightning_gossip.errors import ConfigurationError, ProtocolError

MEASURED = [pytest.param(make(n), id=f"{make.__name__}-{n}") for make in (ring, exponential, complete) for n in (8, 16)]


class Draws:
    """The real pickers of all ranks, and a caller uniform among those that initiate."""

    def __init__(self, topology: Topology, *, roles: Roles = "auto", seed: int = 0) -> None:
        self.pickers = [PartnerPicker(topology, rank, roles=roles, seed=seed) for rank in range(topology.n)]
        self.callers = [picker for picker in self.pickers if picker.initiates]
        self.generator = np.random.default_rng(seed)

    def take(self, count: int) -> "np.typing.NDArray[np.intp]":
        """Shape (count, 2): caller and partner of each exchange, one after the other."""
        callers = self.generator.integers(len(self.callers), size=count)
        return np.array([(self.callers[k].rank, self.callers[k].pick()) for k in callers], dtype=np.intp)


def second_eigenspace(topology: Topology) -> tuple[float, FloatArray]:
    """ρ, and a unit vector of its eigenspace in a direction without symmetry, so that no edge matters by accident."""
    w = expected_pair_matrix(topology)
    eigenvalues, vectors = np.linalg.eigh(w)
    rho = 1 - spectral_gap(w)
    space = vectors[:, np.abs(eigenvalues - rho) < 1e-9]
    v = space @ (space.T @ np.random.default_rng(5).normal(size=topology.n))
    return rho, v / np.linalg.norm(v)


def trajectories(topology: Topology, models: FloatArray, *, runs: int, exchanges: int, seed: int = 0) -> FloatArray:
    """‖X_k − X̄‖² (summed over the ranks) of drained runs with learning rate 0, shape (runs, exchanges + 1)."""
    draws = Draws(topology, seed=seed).take(runs * exchanges).reshape(runs, exchanges, 2)
    x = np.repeat(models[None], runs, axis=0)
    everyone = np.arange(runs)
    distances = [np.full(runs, topology.n * consensus_distance(models))]
    for k in range(exchanges):
        i, j = draws[:, k, 0], draws[:, k, 1]
        x[everyone, i] = x[everyone, j] = (x[everyone, i] + x[everyone, j]) / 2
        distances.append(((x - x.mean(axis=1, keepdims=True)) ** 2).sum(axis=(1, 2)))
    return np.stack(distances, axis=1)


def exact_recursion(topology: Topology, models: FloatArray, exchanges: int) -> FloatArray:
    """E‖X_k − X̄‖² = tr C_k with C ← mean_e W_e C W_e, shape (exchanges + 1,)."""
    centred = models - models.mean(axis=0)
    covariance = centred @ centred.T
    traces = [np.trace(covariance)]
    pairs = [pair_matrix(topology.n, i, j) for i, j in topology.edges]
    for _ in range(exchanges):
        covariance = sum(w @ covariance @ w for w in pairs) / len(pairs)
        traces.append(np.trace(covariance))
    return np.array(traces)


@pytest.mark.parametrize("topology", MEASURED)
def test_one_exchange_contracts_the_second_eigenspace_by_exactly_rho(topology: Topology) -> None:
    rho, v = second_eigenspace(topology)
    callers = Draws(topology).callers
    mean = sum(
        float(np.sum((pair_matrix(topology.n, picker.rank, peer) @ v) ** 2)) / len(picker.neighbours) / len(callers)
        for picker in callers
        for peer in picker.neighbours
    )
    assert mean == pytest.approx(rho, abs=1e-12)


@pytest.mark.parametrize("topology", MEASURED)
def test_drawn_exchanges_contract_the_second_eigenspace_by_the_gap(topology: Topology) -> None:
    rho, v = second_eigenspace(topology)
    u = np.array([1.0, -2.0, 0.5])
    start = np.outer(v, u)
    lost = np.empty(10_000)
    for k, (i, j) in enumerate(Draws(topology, seed=1).take(len(lost))):
        x = start.copy()  # reset before each exchange: only then is ρ the expected contraction
        x[i] = x[j] = (x[i] + x[j]) / 2
        lost[k] = 1 - (x**2).sum() / (start**2).sum()
    # 10 % is the bound of papers.md; that it is at least five standard errors makes a false failure rarer than 1e-6.
    assert 0.1 * (1 - rho) > 5 * lost.std() / math.sqrt(len(lost))
    assert lost.mean() == pytest.approx(1 - rho, rel=0.1)


@pytest.mark.parametrize(
    "topology", [pytest.param(*case.values, id=case.id, marks=pytest.mark.slow if "16" in case.id else []) for case in MEASURED]
)
def test_the_mean_trajectory_follows_the_exact_recursion(topology: Topology) -> None:
    models = np.random.default_rng(2).normal(size=(topology.n, 4))
    exchanges = 3 * topology.n
    distances = trajectories(topology, models, runs=8_000, exchanges=exchanges, seed=3)
    exact = exact_recursion(topology, models, exchanges)
    error = distances.std(axis=0) / math.sqrt(len(distances))
    assert distances[:, 0] == pytest.approx(exact[0])
    # Six standard errors at each of at most 48 points: a false failure is rarer than 1e-6. The widest is below 8 %.
    assert (6 * error < 0.08 * exact)[1:].all()
    assert (np.abs(distances.mean(axis=0) - exact) < 6 * error)[1:].all()


def test_the_naive_slope_on_a_ring_of_8_is_twice_the_spectral_gap() -> None:
    topology = ring(8)
    models = np.random.default_rng(4).normal(size=(8, 4))
    distances = trajectories(topology, models, runs=2_000, exchanges=60, seed=5).mean(axis=0)
    naive = 1 - (distances[60] / distances[20]) ** (1 / 40)
    assert naive == pytest.approx(mean_square_gap(topology), rel=0.1)
    assert 1.6 < naive / spectral_gap(expected_pair_matrix(topology)) < 2.1


@pytest.mark.parametrize("roles", ["auto", "symmetric"])
@pytest.mark.parametrize("name", TOPOLOGIES)
def test_partners_are_neighbours_and_the_one_called_answers(name: str, roles: Roles) -> None:
    topology = TOPOLOGIES[name](16)
    draws = Draws(topology, roles=roles)
    for caller, partner in draws.take(500):
        assert partner in topology.neighbours(caller)
        assert draws.pickers[partner].answers


@pytest.mark.parametrize("make", [complete, bipartite_complete, exponential])
def test_the_draw_is_uniform_among_all_neighbours(make: Callable[[int], Topology]) -> None:
    picker = PartnerPicker(make(8), 2, seed=3)
    counts = dict.fromkeys(picker.neighbours, 0)
    for _ in range(7_000):
        counts[picker.pick()] += 1
    assert stats.chisquare(list(counts.values())).pvalue > 1e-6


def test_streams_of_two_ranks_are_independent() -> None:
    first, second = (PartnerPicker(complete(5), rank, seed=0) for rank in (0, 1))
    table = np.zeros((5, 5))
    for _ in range(8_000):
        table[first.pick(), second.pick()] += 1
    table = table[np.ix_(first.neighbours, second.neighbours)]
    assert stats.chi2_contingency(table).pvalue > 1e-6


def test_every_rank_and_every_seed_has_its_own_stream() -> None:
    streams = {
        tuple(picker.neighbours.index(picker.pick()) for _ in range(20))
        for seed in range(4)
        for picker in (PartnerPicker(complete(32), rank, seed=seed) for rank in range(32))
    }
    assert len(streams) == 4 * 32


def test_the_same_seed_repeats_the_stream() -> None:
    first, second = (PartnerPicker(exponential(16), 4, seed=7) for _ in range(2))
    assert [first.pick() for _ in range(50)] == [second.pick() for _ in range(50)]


def test_auto_is_bipartite_where_the_graph_is() -> None:
    assert resolve_roles(ring(8)) == "bipartite"
    assert resolve_roles(ring(7)) == "symmetric"
    assert resolve_roles(complete(4)) == "symmetric"
    assert resolve_roles(ring(8), "symmetric") == "symmetric"
    assert resolve_roles(ring(8), "bipartite") == "bipartite"


@pytest.mark.parametrize("topology", [ring(8), exponential(16), star(5), bipartite_complete(5)])
def test_with_bipartite_roles_each_rank_either_starts_or_answers(topology: Topology) -> None:
    assert topology.bipartition is not None
    for picker in Draws(topology).pickers:
        assert picker.initiates == (picker.rank in topology.bipartition[0])
        assert picker.answers != picker.initiates
        assert picker.start_share == (1.0 if picker.initiates else 0.0)


@pytest.mark.parametrize("topology", [ring(7), complete(4)])
def test_with_symmetric_roles_each_rank_starts_every_other_step_and_answers(topology: Topology) -> None:
    for picker in Draws(topology).pickers:
        assert picker.initiates
        assert picker.answers
        assert picker.start_share == 0.5


@pytest.mark.parametrize("topology", [ring(8), exponential(16), ring(7), complete(4)])
def test_on_regular_graphs_start_shares_make_one_exchange_per_worker_and_step(topology: Topology) -> None:
    pickers = Draws(topology).pickers
    taken = [picker.start_share for picker in pickers]
    for picker in pickers:
        for peer in picker.neighbours:
            taken[peer] += picker.start_share / len(picker.neighbours)
    assert taken == pytest.approx([1.0] * topology.n)


def test_a_single_worker_neither_starts_nor_answers() -> None:
    picker = PartnerPicker(ring(1), 0)
    assert (picker.initiates, picker.answers, picker.start_share) == (False, False, 0.0)
    with pytest.raises(ProtocolError, match="0 neighbours"):
        picker.pick()


def test_a_responder_must_not_start() -> None:
    with pytest.raises(ProtocolError, match="rank 1 was asked to start"):
        PartnerPicker(ring(4), 1).pick()


def through_torch(state: object) -> object:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize("passage", [through_torch, lambda state: json.loads(json.dumps(state))], ids=["torch", "json"])
@pytest.mark.parametrize("taken", [0, 1, 7])
def test_a_loaded_picker_continues_the_stream(passage: Callable[[object], dict[str, object]], taken: int) -> None:
    picker = PartnerPicker(complete(7), 3, seed=11)
    for _ in range(taken):
        picker.pick()
    resumed = PartnerPicker(complete(7), 3, seed=99)
    resumed.load_state_dict(passage(picker.state_dict()))
    assert [resumed.pick() for _ in range(40)] == [picker.pick() for _ in range(40)]


def test_a_state_does_not_change_when_the_picker_goes_on() -> None:
    picker = PartnerPicker(complete(7), 3)
    state = picker.state_dict()
    expected = [picker.pick() for _ in range(10)]
    picker.load_state_dict(state)
    assert [picker.pick() for _ in range(10)] == expected


def test_the_state_of_another_rank_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="rank 0 for rank 2"):
        PartnerPicker(ring(4), 2).load_state_dict(PartnerPicker(ring(4), 0).state_dict())


@pytest.mark.parametrize("generator", [None, {}, {"bit_generator": "MT19937", "state": {}}, 3])
def test_a_state_that_cannot_be_read_is_refused_and_changes_nothing(generator: object) -> None:
    picker, untouched = PartnerPicker(ring(4), 2), PartnerPicker(ring(4), 2)
    for state in ({"rank": 2, "generator": generator}, {"rank": 2}):
        with pytest.raises(ConfigurationError, match="cannot be read"):
            picker.load_state_dict(state)
    assert [picker.pick() for _ in range(20)] == [untouched.pick() for _ in range(20)]


def test_bipartite_roles_on_an_odd_cycle_are_refused() -> None:
    triangle = from_edges(3, [(0, 1), (1, 2), (2, 0)])
    with pytest.raises(ConfigurationError, match=r"odd cycle.*Write roles='auto'"):
        PartnerPicker(triangle, 0, roles="bipartite")


def test_unknown_roles_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="got roles='active'; write one of 'auto', 'bipartite', 'symmetric'"):
        resolve_roles(ring(4), "active")  # type: ignore[arg-type]


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_outside_the_graph_is_refused(rank: int) -> None:
    with pytest.raises(ConfigurationError, match=r"\[0, 4\)"):
        PartnerPicker(ring(4), rank)


@pytest.mark.parametrize("seed", [-1, 0.5, None, "0"])
def test_what_is_no_seed_is_refused(seed: object) -> None:
    with pytest.raises(ConfigurationError, match="integer >= 0"):
        PartnerPicker(ring(4), 0, seed=seed)  # type: ignore[arg-type]
