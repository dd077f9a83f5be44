"""Shares of time on slow links."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gossip.algorithm.adpsgd.link_shares import LinkShares


def measured(*times_s: float) -> LinkShares:
    """Links whose times are known, at 0 s."""
    links = LinkShares(range(len(times_s)))
    for peer, seconds in enumerate(times_s):
        links.took(peer, seconds, at_s=0.0)
    return links


def affords(links: LinkShares, peer: int, *, at_s: float) -> bool:
    """Whether an exchange with a peer may begin."""
    return links.missing_s(peer, at_s=at_s) == 0.0


@pytest.mark.parametrize(
    ("times_s", "slow"),
    [
        ((1.0, 1.0), []),
        ((1.0, 1.9), []),
        ((1.0, 2.1), [1]),
        ((5.0, 50.0, 5.0), [1]),
        ((50.0, 50.0, 5.0), []),  # the median is that of the slow ones
        ((50.0,), []),
        ((1.0, 1.0, 1.0, 9.0, 9.0), [3, 4]),
    ],
)
def test_slow_is_what_takes_more_than_twice_the_median(times_s: tuple[float, ...], slow: list[int]) -> None:
    assert [peer for peer in range(len(times_s)) if measured(*times_s).is_slow(peer)] == slow


def test_a_link_that_was_never_measured_is_not_slow() -> None:
    links = LinkShares([1, 2, 3])
    assert affords(links, 1, at_s=0.0)
    links.took(1, 1.0, at_s=0.0)
    assert affords(links, 2, at_s=0.0)


@given(
    slower=st.floats(2.5, 200.0),
    degree=st.integers(2, 8),
    waits=st.lists(st.floats(0.0, 3.0), min_size=1, max_size=20),
    pauses=st.lists(st.floats(0.0, 0.5), min_size=1, max_size=20),
)
@settings(max_examples=40, deadline=None)
def test_a_worker_that_always_prefers_the_slow_link_spends_a_quarter_of_its_exchange_time_on_it(
    slower: float, degree: int, waits: list[float], pauses: list[float]
) -> None:
    links = LinkShares(range(degree))
    spent, at_s, idle_s, slowest = {True: 0.0, False: 0.0}, 0.0, 0.0, 0.0
    for number in range(1000):
        at_s += pauses[number % len(pauses)]
        idle_s += pauses[number % len(pauses)]
        peer = degree - 1 if number >= degree and affords(links, degree - 1, at_s=at_s) else number % (degree - 1)
        seconds = slower if peer == degree - 1 else 1.0
        waited_s = waits[number % len(waits)] if peer == degree - 1 else 0.0
        at_s += waited_s + seconds
        links.took(peer, seconds, at_s=at_s, waited_s=waited_s)
        spent[peer == degree - 1] += waited_s + seconds
        slowest = max(slowest, waited_s + seconds)
    assert spent[True] <= spent[False] / 3 + idle_s / 16 + 2 * slowest
    assert spent[True] > 0.0


def test_what_was_spent_before_a_link_was_known_to_be_slow_is_owed() -> None:
    links = LinkShares([0, 1])
    links.took(1, 10.0, at_s=10.0)
    links.took(0, 1.0, at_s=11.0)
    assert links.missing_s(1, at_s=11.0) == pytest.approx(3 * 20.0, abs=2.0)  # that one, and the next


def test_more_than_one_slow_exchange_cannot_be_saved_up() -> None:
    links = measured(1.0, 1.0, 10.0)
    assert affords(links, 2, at_s=1e6)
    links.took(2, 10.0, at_s=1e6 + 10.0)
    assert not affords(links, 2, at_s=1e6 + 10.0)


def test_where_nobody_else_is_there_a_slow_link_is_used_again_after_sixteen_times_its_time() -> None:
    links = measured(1.0, 1.0, 10.0)
    links.took(2, 10.0, at_s=1000.0)
    first = next(at_s for at_s in range(1000, 2000) if affords(links, 2, at_s=float(at_s)))
    links.took(2, 10.0, at_s=first + 10.0)
    again = next(at_s for at_s in range(first + 10, 3000) if affords(links, 2, at_s=float(at_s)))
    assert again - first - 10 == pytest.approx(160, abs=2)


def test_a_link_that_is_fast_again_is_soon_used_as_before() -> None:
    links, at_s = measured(1.0, 1.0, 10.0), 0.0
    for number in range(200):
        at_s += 1.0
        links.took(2 if affords(links, 2, at_s=at_s) else number % 2, 1.0, at_s=at_s)
    assert not links.is_slow(2)


def test_what_is_missing_is_the_time_of_other_exchanges_that_earns_it() -> None:
    links = measured(1.0, 1.0, 10.0)
    missing_s = links.missing_s(2, at_s=0.0)
    at_s = 0.0
    while not affords(links, 2, at_s=at_s):
        at_s += 1.0
        links.took(0, 1.0, at_s=at_s)
    assert at_s == pytest.approx(missing_s, abs=1.0)
