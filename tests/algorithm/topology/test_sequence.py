"""Sequences of mixing matrices, and those whose product is the exact mean."""

from __future__ import annotations

import copy
import math
import pickle

import numpy as np
import pytest

from lightning_gossip.algorithm.adpsgd.options import GossipOptions
from lightning_gossip.algorithm.topology.exact_graphs import (
    SEQUENCES,
    base,
    one_peer_exponential,
    one_peer_hypercube,
    simple_base,
)
from lightning_gossip.algorithm.topology.generators import TOPOLOGIES, make_sequence, make_topology, ring
from lightning_gossip.algorithm.topology.mixing import check_doubly_stochastic, mixing_matrix
from lightning_gossip.algorithm.topology.sequence import TopologySequence
from lightning_gossip.errors import ConfigurationError

SIZES = range(1, 65)
POWERS = [2**exponent for exponent in range(8)]


def deviation(sequence: TopologySequence) -> float:
    """The largest entry of the product of a cycle minus 11ᵀ/n."""
    return float(np.abs(sequence.product() - 1.0 / sequence.n).max())


def check(sequence: TopologySequence, degree: int) -> None:
    for number in range(len(sequence)):
        w = sequence.matrix(number)
        check_doubly_stochastic(w, atol=1e-15)
        assert ((w > 0).sum(1) <= degree + 1).all()
        assert ((w > 0).sum(0) <= degree + 1).all()
        assert (np.diagonal(w) > 0).all()


@pytest.mark.parametrize("peers", [1, 2])
def test_base_graphs_make_the_exact_mean_of_any_number_of_workers(peers: int) -> None:
    for n in SIZES:
        for make in (base, simple_base):
            sequence = make(n, peers)
            assert deviation(sequence) <= 1e-15, sequence
            assert sequence.is_exact
            assert sequence.is_symmetric
            check(sequence, peers)
        assert len(base(n, peers)) <= len(simple_base(n, peers))
        assert n == 1 or len(simple_base(n, peers)) <= 2.0 * math.log(n, peers + 1) + 2.0 + 1e-9


@pytest.mark.parametrize("peers", [3, 4, 7])
@pytest.mark.parametrize("n", [1, 2, 5, 7, 9, 13, 24, 35, 50, 100, 127])
def test_so_they_do_with_more_peers(n: int, peers: int) -> None:
    sequence = base(n, peers)
    assert deviation(sequence) <= 1e-15
    check(sequence, peers)


@pytest.mark.parametrize(("n", "simple", "shorter"), [(6, 5, 4), (12, 7, 5), (25, 9, 9), (5, 5, 5), (32, 5, 5)])
def test_they_are_as_long_as_published(n: int, simple: int, shorter: int) -> None:
    assert (len(simple_base(n)), len(base(n))) == (simple, shorter)


@pytest.mark.parametrize("n", POWERS)
def test_one_peer_graphs_are_exact_after_the_logarithm_of_the_workers(n: int) -> None:
    for make in (one_peer_hypercube, one_peer_exponential):
        sequence = make(n)
        assert len(sequence) == max(1, n.bit_length() - 1)
        assert deviation(sequence) == 0.0
        assert sequence.degree == (n > 1)
        check(sequence, 1)
    assert one_peer_exponential(n).is_symmetric == (n <= 2)
    assert one_peer_exponential(n).spread == n.bit_length() - 1


def test_a_one_peer_exponential_graph_of_another_size_is_not_exact() -> None:
    assert not one_peer_exponential(6).is_exact
    assert one_peer_exponential(6).spread == 3
    with pytest.raises(ConfigurationError, match=r"n=6; it needs a power of two\. Use 4 or 8 workers, or 'base_2'"):
        one_peer_hypercube(6)


def test_models_become_the_mean_round_by_round() -> None:
    """x of six workers under Base-2, next to the dense recursion."""
    sequence, x = base(6), np.arange(6.0)
    spreads = []
    for number in range(4):
        x = sequence.matrix(number) @ x
        spreads.append(float(np.ptp(x)))
    assert spreads[-1] <= 1e-15
    assert min(spreads[:-1]) > 0.1


@pytest.mark.parametrize("name", SEQUENCES)
def test_a_sequence_has_its_name_and_can_be_copied_and_sent(name: str) -> None:
    sequence = make_sequence(name, 8)
    assert (sequence.name, sequence.n) == (name, 8)
    for twin in (pickle.loads(pickle.dumps(sequence)), copy.deepcopy(sequence), SEQUENCES[name](8)):
        assert twin == sequence
        assert hash(twin) == hash(sequence)
    assert make_sequence(sequence, 8) is sequence
    for rank in range(8):
        sends = {(number, to) for number in range(len(sequence)) for to in sequence.receivers(number, rank)}
        received = {(number, i) for number in range(len(sequence)) for i in range(8) if rank in dict(sequence.row(number, i))}
        assert sends == received
        assert set(sequence.peers(rank)) >= {peer for _, peer in sends}


def test_a_graph_that_stays_the_same_is_a_sequence_of_one() -> None:
    sequence = TopologySequence.fixed(ring(5))
    assert (len(sequence), sequence.spread, sequence.is_exact, sequence.sends_per_round) == (1, 2, False, 2.0)
    assert (sequence.matrix(7) == mixing_matrix(ring(5))).all()
    assert sequence.peers(0) == (1, 4)


def test_own_matrices() -> None:
    pairs = np.array([[0.5, 0.5, 0, 0], [0.5, 0.5, 0, 0], [0, 0, 0.5, 0.5], [0, 0, 0.5, 0.5]])
    across = pairs[[0, 2, 1, 3]][:, [0, 2, 1, 3]]
    sequence = TopologySequence.from_matrices("mine", [pairs, across])
    assert sequence.is_exact
    assert sequence.peers(0) == (1, 2)
    assert sequence == TopologySequence.from_matrices("mine", [pairs.tolist(), across.tolist()])


@pytest.mark.parametrize(
    ("matrices", "message"),
    [
        ([], "at least one round"),
        ([[[1.0]], [[0.5, 0.5], [0.5, 0.5]]], "of the same workers"),
        ([[[0.5, 0.5], [0.4, 0.6]]], "round 0: column 1 of the mixing matrix sums to 1.1"),
        ([[[0.5, 0.5], [0.5, 0.5]], [[1.5, -0.5], [-0.5, 1.5]]], "round 1: the mixing matrix has -0.5"),
        ([[[1.0, 0.0], [0.0, 1.0]]], "2 parts that never hear of each other"),
    ],
)
def test_matrices_that_would_not_do_are_refused_with_their_round(matrices: list[list[list[float]]], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        TopologySequence.from_matrices("mine", matrices)


@pytest.mark.parametrize(("make", "n"), [(base, 0), (base, 2.5), (simple_base, -1), (one_peer_exponential, True)])
def test_what_is_no_number_of_workers_is_refused(make, n: object) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigurationError, match=r"the number of workers=.*it must be an integer >= 1"):
        make(n)


@pytest.mark.parametrize("spec", [*SEQUENCES, base(4)], ids=str)
def test_a_strategy_without_rounds_refuses_a_graph_that_changes(spec: str | TopologySequence) -> None:
    for refuse in (lambda: make_topology(spec, 4), lambda: GossipOptions(topology=spec)):
        with pytest.raises(ConfigurationError, match="is another graph in each round, and only dpsgd makes rounds together"):
            refuse()


def test_a_slip_in_the_name_is_seen() -> None:
    with pytest.raises(ConfigurationError, match="Did you mean 'base_2'"):
        make_sequence("base2", 8)
    assert not set(SEQUENCES) & set(TOPOLOGIES)
