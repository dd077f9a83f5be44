from __future__ import annotations

import math

import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gossip.errors import ConfigurationError
from lightning_gossip.simulation import Links, RandomSlowdowns
from lightning_gossip.simulation.cluster.collective_costs import (
    all_reduce_bytes,
    all_reduce_s,
    in_cast_s,
    ring_all_gather_s,
    ring_all_reduce_s,
    transfer_s,
)
from lightning_gossip.simulation.cluster.events import then
from lightning_gossip.simulation.cluster.network import FairShare, Network

RESNET_BYTES = 4 * 25_600_000
GIGABIT = 1e9 / 8.0


def ends(capacity: float, transfers: list[tuple[float, float, float]]) -> list[float]:
    """When transfers (beginning, bytes, limit) over one shared capacity end."""
    environment = simpy.Environment()
    share = FairShare(environment, capacity)
    ended = [math.nan] * len(transfers)

    def note(number: int) -> None:
        ended[number] = environment.now

    def begin(number: int) -> None:
        then(share.transfer(transfers[number][1], transfers[number][2]), note, number)

    for number, (at_s, _, _) in enumerate(transfers):
        then(environment.timeout(at_s), begin, number)
    environment.run()
    return ended


def slow_reference(capacity: float, transfers: list[tuple[float, float, float]]) -> list[float]:
    """Max-min fair shares by filling up, from event to event."""
    left = [nbytes for _, nbytes, _ in transfers]
    ended = [math.nan] * len(transfers)
    now_s = 0.0
    while any(math.isnan(end_s) for end_s in ended):
        active = [k for k, (at_s, _, _) in enumerate(transfers) if at_s <= now_s and math.isnan(ended[k])]
        rates, free, open_ = {}, capacity, sorted(active, key=lambda k: transfers[k][2])
        for place, k in enumerate(open_):
            rates[k] = min(transfers[k][2], free / (len(open_) - place))
            free -= rates[k]
        next_s = min(
            [at_s for at_s, _, _ in transfers if at_s > now_s] + [now_s + left[k] / rates[k] for k in active], default=math.inf
        )
        for k in active:
            left[k] -= rates[k] * (next_s - now_s)
            if left[k] <= 1e-9 * transfers[k][1]:
                ended[k] = next_s
        now_s = next_s
    return ended


TRANSFERS = st.lists(
    st.tuples(st.integers(0, 6).map(float), st.integers(1, 50).map(float), st.sampled_from([1.0, 3.0, math.inf])),
    min_size=1,
    max_size=9,
)


@settings(max_examples=80)
@given(capacity=st.sampled_from([1.0, 4.0, 10.0]), transfers=TRANSFERS)
def test_a_capacity_is_shared_max_min_fairly(capacity: float, transfers: list[tuple[float, float, float]]) -> None:
    assert ends(capacity, transfers) == pytest.approx(slow_reference(capacity, transfers), rel=1e-6)


def test_equal_transfers_share_equally() -> None:
    assert ends(10.0, [(0.0, 10.0, math.inf)] * 4) == [4.0] * 4


def arrival_s(links: Links, sender: int, receiver: int, nbytes: float, *, server: int | None = None) -> float:
    environment = simpy.Environment()
    environment.run(Network(environment, links, seed=0, server=server).transfer(sender, receiver, nbytes))
    return float(environment.now)


def test_a_transfer_takes_the_latency_and_its_bytes_over_the_bandwidth() -> None:
    links = Links(latency_s=0.5, bandwidth=10.0, slow={(0, 1): 4.0, 3: 2.0})
    assert arrival_s(links, 0, 2, 20.0) == 0.5 + 2.0 == transfer_s(links, 0, 2, 20.0)
    assert arrival_s(links, 1, 0, 20.0) == 4 * 0.5 + 8.0 == transfer_s(links, 1, 0, 20.0)
    assert arrival_s(links, 2, 3, 20.0) == 2 * 0.5 + 4.0
    assert arrival_s(links, 2, 2, 20.0) == 0.0


def test_a_bottleneck_adds_its_latency_once() -> None:
    assert arrival_s(Links(latency_s=0.5, bandwidth=10.0, shared=5.0), 0, 1, 20.0) == pytest.approx(4.5)


def test_in_cast_is_n_vectors_over_the_server_s_port() -> None:
    links, environment = Links(latency_s=0.25, bandwidth=10.0), simpy.Environment()
    network = Network(environment, links, seed=0, server=0)
    environment.run(simpy.AllOf(environment, [network.transfer(rank, 0, 20.0) for rank in range(1, 6)]))
    assert environment.now == pytest.approx(0.25 + 5 * 2.0)
    assert environment.now == pytest.approx(in_cast_s(links, 5, 20.0))


def test_a_ring_moves_what_the_book_says() -> None:
    """2 (n − 1)/n of 0.819 Gbit for ResNet-50: 1.626 Gbit on 128 workers."""
    assert all_reduce_bytes(128, RESNET_BYTES) * 8 / 1e9 == pytest.approx(1.626, abs=1e-3)
    links = Links(bandwidth=GIGABIT)
    assert ring_all_reduce_s(links, 128, RESNET_BYTES) == pytest.approx(1.626, abs=1e-3)
    assert ring_all_gather_s(links, 4, 100.0) == pytest.approx(300.0 / GIGABIT)
    assert ring_all_reduce_s(links, 1, RESNET_BYTES) == 0.0


def test_a_ring_waits_for_its_slowest_link_and_for_no_other() -> None:
    def seconds(slow: dict[int | tuple[int, int], float]) -> float:
        return ring_all_reduce_s(Links(bandwidth=1.0, slow=slow), 4, 8.0)

    assert seconds({(1, 2): 9.0}) == 9.0 * seconds({})
    assert seconds({(0, 2): 9.0}) == seconds({})
    slow = Links(bandwidth=1.0, slow={3: 10.0})  # the port of rank 3: it counts while that worker lives
    assert all_reduce_s(slow, [0, 2, 3], 9.0) == pytest.approx(10 * all_reduce_s(slow, [0, 1, 2], 9.0))


def test_on_a_bottleneck_a_ring_s_transfers_share() -> None:
    assert ring_all_reduce_s(Links(shared=10.0), 4, 40.0) == pytest.approx(2 * 3 * 40.0 / 10.0)


def test_links_are_slow_as_often_as_asked_and_stay_so_for_a_period() -> None:
    links = Links(slowdowns=RandomSlowdowns(probability=0.1, factor=10.0, period_s=2.0))
    slow = [links.factor(i, j, at_s, 3) == 10.0 for i in range(20) for j in range(i + 1, 20) for at_s in range(0, 100, 2)]
    assert sum(slow) / len(slow) == pytest.approx(0.1, abs=0.01)
    assert all(links.factor(0, 1, at_s, 3) == links.factor(1, 0, at_s + 1.0, 3) for at_s in range(0, 200, 2))
    assert [links.factor(0, 1, 2.0 * k, 3) for k in range(99)] != [links.factor(0, 1, 2.0 * k, 4) for k in range(99)]


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda: Links(latency_s=-1.0), "latency_s"),
        (lambda: Links(bandwidth=0.0), "bandwidth"),
        (lambda: Links(shared=-2.0), "shared"),
        (lambda: Links(slow={(0, 1): 0.5}), "slow"),
        (lambda: Links(slow={(1, 1): 2.0}), "slow"),
        (lambda: Links(slow={(0, 1, 2): 2.0}), "slow"),  # type: ignore[dict-item]
        (lambda: Links(slow=[(0, 1)]), "slow"),  # type: ignore[arg-type]
        (lambda: Links(slow={"0": 2.0}), "slow"),  # type: ignore[dict-item]
        (lambda: Links.one_slow(0, 9, 2.0).check(4), "slow"),
        (lambda: RandomSlowdowns(probability=2.0, factor=2.0, period_s=1.0), "probability"),
        (lambda: RandomSlowdowns(probability=0.1, factor=0.0, period_s=1.0), "factor"),
        (lambda: RandomSlowdowns(probability=0.1, factor=2.0, period_s=0.0), "period_s"),
    ],
)
def test_what_cannot_be_is_refused_by_name(make, key: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigurationError, match=key):
        make()
