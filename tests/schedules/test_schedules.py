"""Schedules in `make test`: the first seeds, those that once broke an invariant, and proof that the tester can fail."""

from __future__ import annotations

import json

import pytest

from lightning_gossip.algorithm.membership.membership import OwnFailureError, Run
from lightning_gossip.errors import another_aborted
from tests.schedules import adpsgd, failover, membership
from tests.schedules.__main__ import FAULTS, KEPT, RUN, shrink, violation_of
from tests.schedules.choices import Choices
from tests.schedules.shrink import shrunk

KEPT_SCHEDULES = json.loads(KEPT.read_text())
AT_ONCE = 25


SCHEDULES = {
    "adpsgd": 700,
    "membership": 700,
    "failover": 150,
    "failover-in-rounds": 75,
    "failover-as-one-acts": 50,
    "failover-of-many": 50,
    "failover-of-islands": 200,
    "failover-of-islands-in-rounds": 75,
}
ONCE_BROKEN = {  # seeds
    "failover": (
        94,
        225,
        460,
        914,
        974,
        1327,
        1884,
        1917,
        2796,
        3182,
        3229,
        3414,
        21311,
        100478,
        301905,
        402361,
        402946,
        507749,
        91,
        326,
        3000250,
        21055,
        6000350,
        8000765,
        10007459,
    ),
    "failover-in-rounds": (
        25,
        40,
        205,
        424,
        3004,
        3053,
        3414,
        4538,
        4706,
        102340,
        200571,
        300632,
        1021,
        3182,
        7002541,
        9300820,
        10006901,
    ),
    "failover-of-islands": (10, 190, 317, 498, 20176, 3000199, 6000827, 9401964),
    "failover-of-islands-in-rounds": (450, 474, 590, 979, 40149, 2006558, 3000533, 3000737, 10008979),
}


@pytest.mark.parametrize(
    ("protocol", "first"), [(protocol, first) for protocol in RUN for first in range(0, SCHEDULES[protocol], AT_ONCE)]
)
def test_no_schedule_breaks_an_invariant(protocol: str, first: int) -> None:
    broken = {seed: violation_of(protocol, Choices(seed)) for seed in range(first, first + AT_ONCE)}
    assert not {seed: violation for seed, violation in broken.items() if violation is not None}


@pytest.mark.parametrize(("protocol", "seed"), [(protocol, seed) for protocol, seeds in ONCE_BROKEN.items() for seed in seeds])
def test_a_seed_that_once_broke_an_invariant_holds(protocol: str, seed: int) -> None:
    assert violation_of(protocol, Choices(seed)) is None


@pytest.mark.parametrize("kept", KEPT_SCHEDULES, ids=[kept["violation"][:40] for kept in KEPT_SCHEDULES])
def test_what_once_broke_an_invariant_holds(kept: dict[str, object]) -> None:
    assert violation_of(str(kept["protocol"]), Choices(recorded=kept["choices"])) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("protocol", "fault"),
    [
        ("adpsgd", "accepts while it asks"),
        ("adpsgd", "is not woken by a request"),
        ("adpsgd", "closes a session while it is busy"),
        ("membership", "wakes nobody who waits"),
        ("membership", "gives up although a member is there"),
        ("membership", "waits for the last to arrive"),
        ("failover", "registers for nobody that rests"),
        ("failover-as-one-acts", "acts by a result that others may not know"),
        ("failover-as-one-acts", "acts by a result that half of the members know"),
        ("failover-of-many", "takes those for alive that it does not watch"),
    ],
)
def test_a_fault_is_found_within_a_few_schedules(protocol: str, fault: str) -> None:
    assert any(violation_of(protocol, Choices(seed), fault) for seed in range(30))


def test_a_seed_is_one_schedule_of_adpsgd() -> None:
    first, again = adpsgd.run(Choices(7)), adpsgd.run(Choices(7))
    assert first.choices.made == again.choices.made
    assert (first.now_s, first.events, first.exchanges) == (again.now_s, again.events, again.exchanges)
    written = adpsgd.run(Choices(recorded=first.choices.made))
    assert (written.now_s, written.events) == (first.now_s, first.events)
    assert first.exchanges > 0


def test_a_seed_is_one_schedule_of_membership() -> None:
    first, again = membership.run(Choices(7)), membership.run(Choices(7))
    assert (first.choices.made, first.store) == (again.choices.made, again.store)
    written = membership.run(Choices(recorded=first.choices.made))
    assert (written.now_s, written.events, written.store) == (first.now_s, first.events, first.store)


def test_the_judge_allows_that_two_silences_break_an_attempt_and_its_repeat_and_nothing_else() -> None:
    world = failover.Hosted(Choices(0))
    one, other = (0.0, 5.0), (5.0, 17.0)

    def allows(first: set[tuple[float, float]], second: set[tuple[float, float]], error: Exception, use: int = 0) -> bool:
        world.broken = {(0, 1): {"p/group/0/run/1": first, "p/group/1/run/1": second}}
        return world._has_repeated_in_vain(use, error)

    fails = OwnFailureError(Run)
    assert allows({one}, {other}, fails)
    assert allows({one, other}, {other}, another_aborted(2, "RuntimeError: a connection broke", "a collective"))
    assert not allows({one}, {one}, fails)
    assert not allows({one}, set(), fails)
    assert not allows({one}, {other}, fails, use=1)
    assert not allows({one}, {other}, another_aborted(2, "ValueError: a bug", "a collective"))


def test_a_failing_schedule_is_shrunk_to_one_that_still_fails() -> None:
    fault = "closes a session while it is busy"
    seed = next(seed for seed in range(30) if violation_of("adpsgd", Choices(seed), fault))
    whole = Choices(seed)
    violation_of("adpsgd", whole, fault)
    made = shrink("adpsgd", seed, fault)
    assert len(made) < len(whole.made) / 4
    assert violation_of("adpsgd", Choices(recorded=made), fault) is not None


def test_numbers_are_cut_and_made_smaller_as_long_as_it_fails() -> None:
    assert shrunk([5, 9, 3, 7, 7, 1], lambda made: sum(made) >= 8) in ([8], [1, 7], [7, 1])
    assert shrunk([1] * 50, lambda made: len(made) >= 3 and made[2] == 1)[2] == 1


def test_each_fault_says_what_it_is() -> None:
    kinds = [
        kind for faults in FAULTS.values() for fault in faults.values() for kind in fault.values() if isinstance(kind, type)
    ]
    assert all(kind.__doc__ for kind in kinds)
