"""How long the synchronous strategies take, against closed forms."""

from __future__ import annotations

import pytest

from lightning_gossip.algorithm import Quantizer
from lightning_gossip.simulation import (
    ADPSGD,
    DPSGD,
    QSGD,
    AllReduce,
    Cluster,
    Constant,
    Epochs,
    Links,
    PeriodicAveraging,
    Recording,
    Samples,
    Steps,
    simulate,
)


def test_a_round_of_all_reduce_waits_for_the_slowest_and_the_ring() -> None:
    links = Links(latency_s=0.5, bandwidth=10.0)
    cluster = Cluster(4, [Constant(time_s) for time_s in (1.0, 2.0, 3.0, 1.0)])
    ring_s = 2 * 3 * (0.5 + 5.0 / 10.0)
    result = simulate(AllReduce(overlap=False), cluster, work=Steps(number=10), links=links, model_bytes=20)
    assert result.time_s == pytest.approx(10 * (3.0 + ring_s))
    assert result.workers[1].wait_s == pytest.approx(10 * (1.0 + ring_s))
    overlapped = simulate(AllReduce(), cluster, work=Steps(number=10), links=links, model_bytes=20)
    assert overlapped.time_s == pytest.approx(10 * max(3.0, 1.0 + ring_s))


@pytest.mark.parametrize(("overlap", "cap"), [(False, 2.98), (True, 2.32)])
def test_gossip_s_gain_at_one_exchange_a_step_stays_below_its_cap_on_uniform_links(overlap: bool, cap: float) -> None:
    """ResNet-50 on 128 workers, where an exchange takes as long as a step: the ratio is the cap (derived), and the exchanges
    are fewer than one a step even so, since callers wait for a partner that is in an exchange."""
    nbytes, compute_s = 4 * 25_600_000, 0.15
    cluster, links = Cluster(128, Constant(compute_s)), Links(bandwidth=nbytes / compute_s)
    work = Epochs(batches=128 * 20)
    all_reduce = simulate(AllReduce(overlap=overlap), cluster, work=work, links=links, model_bytes=nbytes)
    gossip = simulate(ADPSGD(topology="exponential"), cluster, work=work, links=links, model_bytes=nbytes)
    computed_s = gossip.workers[0].busy_s
    assert all_reduce.time_s / computed_s == pytest.approx(cap, rel=0.03)
    assert computed_s == pytest.approx(20 * compute_s)
    assert gossip.exchanges_per_step is not None
    assert 0.5 < gossip.exchanges_per_step < 1.0


def test_a_delay_spreads_by_one_edge_a_round() -> None:
    """Without overlap and communication time: one long step on rank 0 of a ring of 8."""
    laws = [Samples([9.0, *[1.0] * 99], order="given"), *[Constant(1.0)] * 7]
    result = simulate(DPSGD(overlap=False), Cluster(8, laws), work=Steps(number=6), recording=Recording(trace=True))
    assert result.trace is not None
    ends = {
        rank: [event.time_s for event in result.trace if event == (event.time_s, "step", rank, -1)] for rank in (0, 1, 2, 4)
    }
    assert ends[0][:2] == [9.0, 10.0]
    assert ends[1][:2] == [9.0, 10.0]
    assert ends[2][:3] == [1.0, 10.0, 11.0]
    assert ends[4][:4] == [1.0, 2.0, 3.0, 12.0]


def test_overlapped_neighbours_hide_what_a_step_can_hide() -> None:
    links = Links(bandwidth=100.0)
    fast, slow = 60, 200  # bytes: half of the port each, with the status 1.36 and 4.16 s
    for nbytes, step_s in ((fast, 2.0), (slow, 2 * 208 / 100)):
        result = simulate(DPSGD(), Cluster(8, Constant(2.0)), work=Steps(number=10), links=links, model_bytes=nbytes)
        rendezvous_s = 2 * 7 / 8 * nbytes / 100.0
        assert result.time_s == pytest.approx(10 * step_s + rendezvous_s)


def test_a_round_of_one_peer_takes_the_whole_port() -> None:
    """Twice as fast as a ring, whose two models share it; without communication that computing would hide."""
    links = Links(latency_s=0.5, bandwidth=100.0)
    times_s = {
        topology: simulate(
            DPSGD(topology=topology, overlap=False, at_rendezvous="evaluate"),
            Cluster(8, Constant(1.0)),
            work=Steps(number=9),
            links=links,
            model_bytes=392,
        ).time_s
        for topology in ("ring", "one_peer_hypercube", "base_2", "one_peer_exponential")
    }
    rendezvous_s = 14 * (0.5 + 392 / 8 / 100.0)
    assert times_s["ring"] == pytest.approx(9 * (1.0 + 0.5 + 2 * 4.0) + rendezvous_s)
    assert times_s["one_peer_hypercube"] == times_s["base_2"] == pytest.approx(9 * (1.0 + 0.5 + 4.0) + rendezvous_s)
    until_all_know_s = 3 * (0.5 + 4.0)
    assert times_s["one_peer_exponential"] == pytest.approx(times_s["base_2"] + until_all_know_s)


def test_the_time_of_local_steps_follows_from_computing_and_averaging() -> None:
    """(c + m/p) a step, and the last rendezvous."""
    for period in (1, 5):
        strategy = PeriodicAveraging(period=period)
        result = simulate(strategy, Cluster(4, Constant(1.0)), work=Steps(number=20), links=Links(bandwidth=3.0), model_bytes=4)
        assert result.time_s == pytest.approx(20 * (1.0 + 2.0 / period) + 2.0)
        assert result.workers[0].bytes_sent == 6 * (20 // period + 1)


def test_an_overlapped_averaging_is_hidden_behind_the_local_steps() -> None:
    strategy = PeriodicAveraging(period=5, overlap=2, at_rendezvous="evaluate")
    result = simulate(strategy, Cluster(4, Constant(1.0)), work=Steps(number=20), links=Links(bandwidth=3.0), model_bytes=4)
    assert result.time_s == pytest.approx(20.0 + 2.0 + 2.0)  # the last one, and the rendezvous


def test_quantized_gradients_go_round_in_the_bytes_that_the_quantizer_needs() -> None:
    result = simulate(QSGD(), Cluster(4, Constant(1.0)), work=Steps(number=1), links=Links(bandwidth=10.0), model_bytes=4096)
    payload = Quantizer().nbytes(1024) + 1
    assert result.workers[2].bytes_sent == 3 * payload
    assert result.time_s == pytest.approx(1.0 + 3 * payload / 10.0)
