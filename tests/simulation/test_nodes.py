"""Nodes: shared cards, racks, links inside; what collectives cost there; islands."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import simpy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.reproduction import nodes as headline
from lightning_gossip.errors import ConfigurationError
from lightning_gossip.simulation import (
    ADPSGD,
    APSGD,
    DPSGD,
    QSGD,
    SGD,
    AllReduce,
    Cluster,
    Constant,
    Epochs,
    Links,
    Nodes,
    PeriodicAveraging,
    Quadratic,
    RandomSlowdowns,
    Recording,
    Steps,
    Strategy,
    Uniform,
    simulate,
)
from lightning_gossip.simulation.cluster.collective_costs import all_reduce_s, in_cast_s, ring_all_reduce_s
from lightning_gossip.simulation.cluster.events import then
from lightning_gossip.simulation.cluster.max_min import MaxMin
from lightning_gossip.simulation.cluster.network import Network
from lightning_gossip.simulation.cluster.node_collectives import double_binary_tree

RESNET_BYTES = 4 * 25_600_000
GBIT = 1e9 / 8

Transfer = tuple[float, float, tuple[int, ...], float]  # when, bytes, over, limit


def ends(capacities: Sequence[float], transfers: Sequence[Transfer]) -> list[float]:
    environment = simpy.Environment()
    shares = MaxMin(environment, capacities)
    ended = [math.nan] * len(transfers)

    def note(number: int) -> None:
        ended[number] = environment.now

    def begin(number: int) -> None:
        _, nbytes, over, limit = transfers[number]
        then(shares.transfer(nbytes, over, limit), note, number)

    for number, (at_s, *_) in enumerate(transfers):
        then(environment.timeout(at_s), begin, number)
    environment.run()
    return ended


def fair_rates(capacities: Sequence[float], open_: Sequence[Transfer]) -> list[float]:
    """Max-min fair, found by letting all grow alike in small steps until each is held by something that is full."""
    rates, held = [0.0] * len(open_), [False] * len(open_)
    while not all(held):
        growing = [k for k, is_held in enumerate(held) if not is_held]
        room = [open_[k][3] - rates[k] for k in growing]
        for number, capacity in enumerate(capacities):
            on = [k for k in growing if number in open_[k][2]]
            used = sum(rates[k] for k, one in enumerate(open_) if number in one[2])
            room += [(capacity - used) / len(on)] if on else []
        for k in growing:
            rates[k] += min(room)
        for k in growing:
            full = any(
                sum(rates[j] for j, other in enumerate(open_) if number in other[2]) >= capacities[number] * (1 - 1e-9)
                for number in open_[k][2]
            )
            held[k] = full or rates[k] >= open_[k][3] * (1 - 1e-9)
    return rates


def slow_reference(capacities: Sequence[float], transfers: Sequence[Transfer]) -> list[float]:
    left, ended, now_s = [t[1] for t in transfers], [math.nan] * len(transfers), 0.0
    while any(math.isnan(end_s) for end_s in ended):
        active = [k for k, t in enumerate(transfers) if t[0] <= now_s and math.isnan(ended[k])]
        rates = dict(zip(active, fair_rates(capacities, [transfers[k] for k in active]), strict=True))
        later = [t[0] for t in transfers if t[0] > now_s]
        next_s = min([*later, *(now_s + left[k] / rates[k] for k in active)])
        for k in active:
            left[k] -= rates[k] * (next_s - now_s)
            if left[k] <= 1e-9 * transfers[k][1]:
                ended[k] = next_s
        now_s = next_s
    return ended


TRANSFERS = st.lists(
    st.tuples(
        st.integers(0, 5).map(float),
        st.integers(1, 40).map(float),
        st.sampled_from([(0,), (1,), (0, 2), (1, 2), (0, 3), (1, 3), (0, 2, 3)]),
        st.sampled_from([1.0, 4.0, math.inf]),
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=60, deadline=None)
@given(capacities=st.sampled_from([(1.0, 2.0, 3.0, 5.0), (8.0, 4.0, 2.0, 1.0)]), transfers=TRANSFERS)
def test_capacities_are_shared_max_min_fairly(capacities: tuple[float, ...], transfers: list[Transfer]) -> None:
    assert ends(capacities, transfers) == pytest.approx(slow_reference(capacities, transfers), rel=1e-6)


def test_what_one_card_leaves_goes_to_the_others() -> None:
    """One of three that leave card 0 meets three others at card 2 and gets a quarter of that; the rest is for the two."""
    transfers: list[Transfer] = [(0.0, 1e9, over, math.inf) for over in ((0, 1), (0, 1), (0, 2), (3, 2), (3, 2), (3, 2))]
    rates = fair_rates((12.0, 12.0, 4.0, 12.0), transfers)
    assert rates == pytest.approx([5.5, 5.5, 1.0, 1.0, 1.0, 1.0])


def arrival_s(links: Links, *transfers: tuple[int, int, float]) -> list[float]:
    environment = simpy.Environment()
    network, came = Network(environment, links, seed=0), [math.nan] * len(transfers)

    def note(number: int) -> None:
        came[number] = environment.now

    for number, transfer in enumerate(transfers):
        then(network.transfer(*transfer), note, number)
    environment.run()
    return came


def test_ranks_of_a_node_share_its_card_in_each_direction_and_not_the_links_inside() -> None:
    links = Links(latency_s=1.0, bandwidth=10.0, nodes=Nodes.equal(3, 4, latency_s=0.5, bandwidth=40.0))
    assert arrival_s(links, (0, 4, 100.0)) == [11.0]
    assert arrival_s(links, (0, 4, 100.0), (1, 8, 100.0)) == [21.0, 21.0]  # both leave node 0
    assert arrival_s(links, (0, 4, 100.0), (5, 1, 100.0)) == [11.0, 11.0]  # there and back
    assert arrival_s(links, (0, 1, 100.0), (2, 3, 100.0), (0, 4, 100.0)) == [3.0, 3.0, 11.0]


def test_racks_share_an_uplink_that_is_oversubscribed() -> None:
    nodes = Nodes.equal(4, 1, racks=2, oversubscription=4.0)
    links = Links(bandwidth=10.0, nodes=nodes)
    assert arrival_s(links, (0, 1, 100.0)) == [10.0]
    assert arrival_s(links, (0, 2, 100.0)) == [20.0]  # 2 cards over 4
    assert arrival_s(links, (0, 2, 100.0), (1, 3, 100.0)) == [40.0, 40.0]
    named = Links(bandwidth=10.0, nodes=Nodes(sizes=[1] * 4, racks=[0, 0, 1, 1], uplinks=[5.0, 2.0]))
    assert arrival_s(named, (0, 2, 100.0)) == [50.0]


def test_several_pairs_of_nodes_and_ranks_are_slow() -> None:
    nodes = Nodes(sizes=[2] * 4, slow={(3, 0): 10.0, 2: 4.0}, pair_latency_s=[[0.25] * 4] * 4)
    links = Links(bandwidth=10.0, slow={(0, 3): 2.0}, nodes=nodes)
    times_s = [arrival_s(links, pair)[0] for pair in ((0, 6, 100.0), (0, 4, 100.0), (0, 3, 100.0), (1, 3, 100.0))]
    assert times_s == pytest.approx([100.0 + 2.5, 40.0 + 1.0, 20.0 + 0.5, 10.0 + 0.25])
    slowdowns = RandomSlowdowns(probability=1.0, factor=3.0, period_s=1.0)
    random = Links(bandwidth=10.0, slowdowns=slowdowns, nodes=Nodes.equal(2, 2, bandwidth=10.0))
    assert [arrival_s(random, pair)[0] for pair in ((0, 1, 100.0), (0, 2, 100.0))] == [10.0, 30.0]


# -- collectives ---------------------------------------------------------------------------------------------------------


def test_a_ring_crosses_each_card_once_whatever_is_behind_it() -> None:
    for ranks in (1, 4, 8):
        links, n = Links(bandwidth=10 * GBIT, nodes=Nodes.equal(16, ranks)), 16 * ranks
        assert all_reduce_s(links, range(n), RESNET_BYTES) == pytest.approx(2 * (n - 1) / n * RESNET_BYTES / (10 * GBIT))


def test_nodes_of_one_rank_are_ports() -> None:
    ports = Links(latency_s=1e-4, bandwidth=1e9, slow={(0, 1): 3.0})
    nodes = Links(latency_s=1e-4, bandwidth=1e9, slow={(0, 1): 3.0}, nodes=Nodes.equal(8, 1), all_reduce="ring")
    assert all_reduce_s(nodes, range(8), 1e8) == pytest.approx(ring_all_reduce_s(ports, 8, 1e8))
    assert in_cast_s(nodes, 7, 1e8) == pytest.approx(in_cast_s(Links(latency_s=3e-4, bandwidth=1e9), 7, 1e8))


def test_a_tree_has_less_latency_and_a_ring_more_of_the_bandwidth() -> None:
    def of(algorithm: str, nbytes: float) -> float:
        links = Links(latency_s=5e-5, bandwidth=1e9, nodes=Nodes.equal(16, 8, latency_s=5e-6), all_reduce=algorithm)  # type: ignore[arg-type]
        return all_reduce_s(links, range(128), nbytes)

    assert of("tree", 1e3) == pytest.approx(2 * (7 * 5e-6 + 4 * 5e-5), rel=0.02)
    assert of("ring", 1e3) == pytest.approx(2 * (112 * 5e-6 + 15 * 5e-5), rel=0.01)
    assert of("tree", 1e9) == pytest.approx(2.0 / 0.9, rel=0.01)
    assert of("ring", 1e9) == pytest.approx(2.0 * 127 / 128, rel=0.01)
    assert of("hierarchical", 1e9) == pytest.approx(2.0 * 15 / 16, rel=0.01)
    for nbytes in (1e3, 1e9):
        assert of("auto", nbytes) == min(of("ring", nbytes), of("tree", nbytes))


@pytest.mark.parametrize("number", range(2, 20))
def test_both_trees_span_all_nodes_and_none_is_in_the_middle_of_both(number: int) -> None:
    edges = double_binary_tree(number)
    inner = []
    for half in (edges[: number - 1], edges[number - 1 :]):
        children = [child for child, _ in half]
        (root,) = set(range(number)) - set(children)
        assert len(set(children)) == number - 1
        parents = dict(half)
        for node in range(number):
            for _ in range(number):
                node = parents.get(node, node)
            assert node == root
        inner.append({parent for _, parent in half} - {root})
        assert max([0, *(sum(one == parent for _, one in half) for parent in range(number))]) <= 2
    assert number < 4 or number % 2 or not inner[0] & inner[1]


def test_an_uplink_that_a_ring_crosses_once_costs_a_tree_no_more_than_its_edges() -> None:
    nodes = Nodes.equal(8, 4, racks=2, oversubscription=8.0)
    ring = Links(bandwidth=1e9, nodes=nodes, all_reduce="ring")
    assert all_reduce_s(ring, range(32), 1e9) == pytest.approx(2 * 31 / 32 * 1e9 / 0.5e9)
    tree = Links(bandwidth=1e9, nodes=nodes, all_reduce="tree")
    assert all_reduce_s(tree, range(32), 1e9) > all_reduce_s(ring, range(32), 1e9)


# -- runs ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("gbits", "ddp_s", "exchanges"), [(25.0, 6.59, 0.66), (10.0, 8.75, 0.27), (5.0, 15.2, 0.137)])
def test_sixteen_nodes_of_eight_gpus(gbits: float, ddp_s: float, exchanges: float) -> None:
    """Seconds are those of a simulation written apart from this one; it has .63, .25, .13 exchanges: its cards are divided in
    equal parts, of which what a transfer cannot use is lost."""
    assert headline.trained(AllReduce(), gbits).seconds == pytest.approx(ddp_s, rel=0.01)
    gossip = headline.trained(ADPSGD(topology="exponential"), gbits)
    assert gossip.seconds == pytest.approx(6.09, rel=0.015)
    assert gossip.exchanges == pytest.approx(exchanges, rel=0.05)


def test_islands_exchange_each_element_eight_times_as_often_over_the_same_cards() -> None:
    """Between nodes: of a flat graph's exchanges three in ten are inside a node."""
    islands = headline.trained(ADPSGD(topology="exponential", island="node", exchanges_per_step=8.0), 5.0, steps=20)
    flat = headline.trained(ADPSGD(topology="bipartite_complete", exchanges_per_step=8.0), 5.0, steps=20)
    assert islands.exchanges / flat.exchanges == pytest.approx(8.0 * (15 / 16), rel=0.15)


STRATEGIES: list[Callable[[], Strategy]] = [
    AllReduce,
    lambda: ADPSGD(topology="exponential"),
    lambda: ADPSGD(island="node"),
    lambda: ADPSGD(island=2, exchanges_per_step=0.25, work_sharing=False),
    APSGD,
    DPSGD,
    QSGD,
    PeriodicAveraging,
]


@pytest.mark.parametrize("make", STRATEGIES)
def test_every_strategy_runs_on_nodes_and_trains_on_each_sample_once(make: Callable[[], Strategy]) -> None:
    links = Links(latency_s=1e-4, bandwidth=1e5, nodes=Nodes.equal(4, 2, latency_s=1e-5, bandwidth=1e6, racks=2))
    result = simulate(
        make(), Cluster(8, Uniform(0.1, 0.2)), work=Epochs(number=2, batches=96, batch_size=4), links=links, model_bytes=400
    )
    assert result.ended == "done"
    assert sum(worker.samples for worker in result.workers) == 2 * 96 * 4
    assert result.steps == 2 * 96


def test_an_island_steps_with_its_slowest_rank_and_its_all_reduce() -> None:
    nodes = Nodes.equal(2, 2, bandwidth=100.0)
    cluster = Cluster(4, Constant(1.0), slowdown={1: 3.0}, backward_share=0.5)
    work, links = Steps(number=10), Links(bandwidth=math.inf, nodes=nodes)
    free = simulate(ADPSGD(island="node", exchanges_per_step=0.0), cluster, work=work, links=links)
    assert [worker.steps for worker in free.workers] == [10] * 4
    assert free.time_s == pytest.approx(30.0)
    assert free.workers[0].wait_s == pytest.approx(20.0)
    assert free.workers[2].busy_s == pytest.approx(10.0)
    # 2 (k − 1)/k B/b = 5 s, of which 1.5 s are behind the backward pass, and 2.5 s of hand-round
    reduced = simulate(ADPSGD(island="node", exchanges_per_step=0.0), cluster, work=work, links=links, model_bytes=500)
    assert reduced.time_s == pytest.approx(10 * (1.5 + 5.0 + 2.5) + 2.5)


def test_without_learning_the_mean_of_the_islands_stays_and_they_come_together() -> None:
    result = simulate(
        ADPSGD(island=2, at_rendezvous="evaluate"),
        Cluster(8, Uniform(1.0, 0.2)),
        work=Steps(number=40),
        links=Links(latency_s=0.01),
        objective=Quadratic([0.0] * 7, noise=1.0),
        optimizer=SGD(lr=1e-3),
        seed=2,
    )
    assert result.models is not None
    for rank in range(0, 8, 2):
        assert torch.equal(result.models[rank], result.models[rank + 1])
    alone = simulate(
        ADPSGD(island=2, at_rendezvous="evaluate", exchanges_per_step=0.0),
        Cluster(8, Uniform(1.0, 0.2)),
        work=Steps(number=40),
        objective=Quadratic([0.0] * 7, noise=1.0),
        optimizer=SGD(lr=1e-3),
        seed=2,
    )
    assert alone.mean is not None
    assert result.mean is not None
    assert torch.allclose(result.mean, alone.mean, atol=1e-6)  # merges keep it; the same noise in the same order
    assert result.epochs[-1].consensus_distance < 0.3 * alone.epochs[-1].consensus_distance  # type: ignore[operator]


def test_one_island_is_ddp() -> None:
    def models(strategy: Strategy) -> torch.Tensor:
        result = simulate(
            strategy,
            Cluster(4, Constant(1.0)),
            work=Steps(number=12),
            objective=Quadratic([1.0, 0.5, 0.1], noise=0.5),
            optimizer=SGD(lr=0.1, momentum=0.9),
        )
        assert result.models is not None
        return result.models

    assert torch.allclose(models(ADPSGD(island=4)), models(AllReduce()), atol=1e-6)


def test_each_rank_of_an_island_sends_its_part() -> None:
    result = simulate(
        ADPSGD(island=4), Cluster(16, Constant(1.0)), work=Steps(number=20), links=Links(latency_s=0.01), model_bytes=1_000
    )
    for worker in result.workers:
        assert worker.bytes_sent == 250 * worker.exchanges
        assert worker.exchanges == pytest.approx(20, abs=6)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Nodes(sizes=[]), "sizes"),
        (lambda: Nodes(sizes=[0]), "sizes"),
        (lambda: Nodes(sizes=3), "sizes"),  # type: ignore[arg-type]
        (lambda: Nodes(sizes=[1, 1], bandwidth=0.0), "bandwidth"),
        (lambda: Nodes(sizes=[1, 1], cards=[1.0]), "cards"),
        (lambda: Nodes(sizes=[1, 1], cards=[1.0, -1.0]), "cards"),
        (lambda: Nodes(sizes=[1, 1], slow={2: 4.0}), "slow"),
        (lambda: Nodes(sizes=[1, 1], slow={(0, 1): 0.5}), "slow"),
        (lambda: Nodes(sizes=[1, 1], racks=[0]), "racks"),
        (lambda: Nodes(sizes=[1, 1], racks=[0, 2]), "racks"),
        (lambda: Nodes(sizes=[1, 1], oversubscription=2.0), "racks"),
        (lambda: Nodes(sizes=[1, 1], racks=[0, 1], uplinks=[1.0]), "uplinks"),
        (lambda: Nodes(sizes=[1, 1], pair_latency_s=[[0.0, 1.0]]), "pair_latency_s"),
        (lambda: Nodes(sizes=[1, 1], pair_bandwidth=[[0.0, 0.0], [1.0, 0.0]]), r"pair_bandwidth\[0\]\[1\]"),
        (lambda: Nodes.equal(16, 8, racks=3), "racks=3"),
        (lambda: Links(nodes=[8, 8]), "nodes"),  # type: ignore[arg-type]
        (lambda: Links(nodes=Nodes(sizes=[8, 8])).check(12), "16 ranks.*12 workers"),
        (lambda: Links(all_reduce="star"), "all_reduce"),  # type: ignore[arg-type]
        (lambda: Links(nodes=Nodes(sizes=[8, 4]), all_reduce="hierarchical"), "hierarchical"),
        (lambda: ADPSGD(island=0), "island=0"),
        (lambda: ADPSGD(island="rack"), "island='rack'"),  # type: ignore[arg-type]
        (lambda: ADPSGD(island="node").check_on(8, Links()), "island='node' needs nodes"),
        (lambda: ADPSGD(island=3).check_on(8, Links()), "island=3 does not divide"),
        (lambda: simulate(ADPSGD(island=2), Cluster(4, Constant(1.0), failures={1: 1.0}), work=Steps(number=2)), "failures"),
    ],
)
def test_bad_nodes_and_islands_are_refused_by_name(make: Callable[[], object], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        make()


def test_nodes_of_another_number_of_workers_are_like_these() -> None:
    nodes = Nodes(
        sizes=[8, 8],
        cards=[1.0, 2.0],
        racks=[0, 1],
        uplinks=[3.0, 4.0],
        slow={1: 2.0, (0, 1): 3.0},
        pair_latency_s=[[0.0, 1.0], [2.0, 0.0]],
    )
    fewer, more = nodes.for_workers(5), nodes.for_workers(28)
    assert (fewer.sizes, fewer.cards, fewer.racks, fewer.uplinks, fewer.slow) == ((5,), (1.0,), (0,), (3.0,), {})
    assert (more.sizes, more.cards, more.racks) == ((8, 8, 8, 4), (1.0, 2.0, 1.0, 2.0), (0, 1, 2, 3))
    assert more.uplinks == (3.0, 4.0, 3.0, 4.0)
    assert nodes.for_workers(16) == nodes


def test_the_last_steps_of_a_run_on_nodes_are_recorded_like_any() -> None:
    links = Links(bandwidth=1e3, nodes=Nodes.equal(2, 2))
    result = simulate(
        ADPSGD(island=2),
        Cluster(4, Constant(1.0)),
        work=Steps(number=3),
        links=links,
        model_bytes=10,
        recording=Recording(spans=True),
    )
    assert result.spans is not None
    assert [span.activity for span in result.spans[0]].count("compute") == 3
