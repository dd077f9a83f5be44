import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gossip.algorithm.effects import perform
from lightning_gossip.algorithm.work_sharing import (
    Advance,
    Claims,
    Consult,
    EpochPlan,
    Leave,
    Ledger,
    Others,
    OwnRate,
    RateSum,
    Seen,
    Tell,
    at_least_one_each,
    check_enough_batches,
    may_claim,
)
from lightning_gossip.errors import ConfigurationError


@given(samples=st.integers(0, 200), batch_size=st.integers(1, 17), shuffle=st.booleans(), epoch=st.integers(0, 5))
def test_the_batches_of_an_epoch_hold_each_index_exactly_once(samples: int, batch_size: int, shuffle: bool, epoch: int) -> None:
    plan = EpochPlan(samples, batch_size, shuffle, drop_last=False, seed=3)
    batches = plan.batches(epoch)
    assert len(batches) == len(plan)
    assert sorted(index for batch in batches for index in batch) == list(range(samples))
    assert all(len(batch) == batch_size for batch in batches[:-1])


@given(samples=st.integers(0, 200), batch_size=st.integers(1, 17), shuffle=st.booleans())
def test_drop_last_leaves_out_less_than_a_batch_and_repeats_nothing(samples: int, batch_size: int, shuffle: bool) -> None:
    plan = EpochPlan(samples, batch_size, shuffle, drop_last=True, seed=3)
    taken = [index for batch in plan.batches(0) for index in batch]
    assert all(len(batch) == batch_size for batch in plan.batches(0))
    assert len(plan.batches(0)) == len(plan)
    assert len(set(taken)) == len(taken) > samples - batch_size
    assert set(taken) <= set(range(samples))


def test_the_permutation_depends_on_seed_and_epoch_alone() -> None:
    plan = EpochPlan(64, 4, shuffle=True, drop_last=False, seed=1)
    assert plan.batches(2) == plan.batches(2)
    assert plan.batches(2) != plan.batches(3)
    assert plan.batches(2) != EpochPlan(64, 4, shuffle=True, drop_last=False, seed=2).batches(2)
    assert EpochPlan(6, 4, shuffle=False, drop_last=False, seed=1).batches(9) == [[0, 1, 2, 3], [4, 5]]


def test_fewer_batches_than_workers_are_refused_with_what_to_do() -> None:
    check_enough_batches(4, 4)
    with pytest.raises(ConfigurationError, match=r"3 batches for 4 workers.*smaller batch_size or at most 3 workers"):
        check_enough_batches(3, 4)


BATCHES = st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=6), max_size=8)


@given(pending=BATCHES, workers=st.integers(1, 9))
def test_at_least_one_each_gives_everybody_a_batch_and_loses_no_sample(pending: list[list[int]], workers: int) -> None:
    cut = at_least_one_each(pending, workers)
    samples = [sample for batch in pending for sample in batch]
    if not samples:
        assert cut == []
        return
    assert len(cut) >= workers
    assert all(cut)
    flat = [sample for batch in cut for sample in batch]
    assert flat[: len(samples)] == samples
    least = 1 if all(len(batch) == 1 for batch in pending) else 2  # BatchNorm refuses a batch of one sample
    if len(pending) < workers:
        assert min(map(len, cut)) >= least
        assert len(flat) == max(len(samples), least * workers)  # padded only if there are too few samples


def test_enough_pending_batches_stay_as_they_are_but_are_copies() -> None:
    pending = [[1, 2], [3]]
    cut = at_least_one_each(pending, 2)
    assert cut == pending
    assert all(mine is not theirs for mine, theirs in zip(cut, pending, strict=True))


# -- the claim rule ----------------------------------------------------------------------------------------------------------


def claims(**changes: object) -> bool:
    case: dict[str, object] = {
        "held": 1,
        "own_step": 1.0,
        "remaining": 10,
        "claimed": 100,
        "workers": 4,
        "others": others_of([1.0, 1.0, 1.0]),
        "lookahead": 1,
    }
    return may_claim(**{**case, **changes})  # type: ignore[arg-type]


def others_of(step_times: Sequence[float]) -> Others:
    return Others(len(step_times), sum(1.0 / p for p in step_times))


def test_nobody_claims_what_is_not_there() -> None:
    assert not claims(remaining=0)
    assert not claims(remaining=-3, own_step=None)


def test_equal_workers_claim_to_the_last_batch() -> None:
    assert claims(remaining=1)
    assert claims(remaining=1, held=9, lookahead=9)


def test_a_slow_worker_claims_only_while_the_others_are_busy_for_as_long() -> None:
    assert claims(own_step=10.0, remaining=60)
    assert not claims(own_step=10.0, remaining=50)


def test_prefetched_batches_count() -> None:
    assert claims(held=5, remaining=20)
    assert not claims(held=9, remaining=20)


@given(held=st.integers(0, 12), own=st.floats(0.1, 50.0), remaining=st.integers(1, 50), lookahead=st.integers(1, 9))
def test_the_last_one_left_always_claims(held: int, own: float, remaining: int, lookahead: int) -> None:
    assert claims(held=held, own_step=own, others=Others(0, 0.0), remaining=remaining, lookahead=lookahead)


@given(
    speeds=st.lists(st.floats(0.1, 50.0), min_size=2, max_size=8),
    held=st.integers(0, 9),
    remaining=st.integers(1, 60),
    lookahead=st.integers(1, 9),
)
def test_more_left_to_do_never_turns_a_yes_into_a_no(speeds: list[float], held: int, remaining: int, lookahead: int) -> None:
    case = {"own_step": speeds[0], "others": others_of(speeds[1:]), "workers": len(speeds), "lookahead": lookahead}
    if claims(**case, held=held, remaining=remaining):
        assert claims(**case, held=held, remaining=remaining + 1)
        assert held == 0 or claims(**case, held=held - 1, remaining=remaining)


def test_before_the_first_step_a_worker_claims_its_fair_share_of_the_epoch() -> None:
    """However many of them others have claimed meanwhile."""
    for remaining in (1, 10, 28):
        case = {"own_step": None, "remaining": remaining, "claimed": 32 - remaining}
        assert claims(**case, held=7)
        assert not claims(**case, held=8)


def test_where_shares_do_not_come_out_even_some_workers_claim_one_more() -> None:
    """Otherwise what is left over, up to a batch a worker, would be the last worker's alone."""
    assert claims(own_step=None, held=8, remaining=2, claimed=32)
    assert not claims(own_step=None, held=9, remaining=2, claimed=32)


def done_by_others(time_s: float, step_times: Sequence[float], holding: float) -> int:
    """Whole batches beyond those that they hold, with each worker's step time known."""
    return sum(max(0, math.floor(time_s / p - holding)) for p in step_times)


@settings(max_examples=400)
@given(
    step_times=st.lists(st.one_of(st.sampled_from([0.1, 1.0, 2.0, 10.0]), st.floats(0.01, 100.0)), max_size=12),
    own=st.one_of(st.sampled_from([0.1, 1.0, 2.0, 10.0]), st.floats(0.01, 100.0)),
    held=st.integers(0, 12),
    remaining=st.integers(1, 200),
    claimed=st.integers(0, 200),
    lookahead=st.integers(1, 9),
)
def test_it_differs_from_the_rule_that_knows_each_step_time_by_half_a_batch_a_worker(
    step_times: list[float], own: float, held: int, remaining: int, claimed: int, lookahead: int
) -> None:
    """That one is: whether the others could be done with all that remains, counted worker by worker, in whole batches."""
    n = len(step_times) + 1
    time_s, holding = (held + 1) * own, min(lookahead + 0.5, claimed / max(1, n - 1))
    done = done_by_others(time_s, step_times, holding)
    slower = sum(max(0.0, holding + 0.5 - time_s / p) for p in step_times)  # those that do nothing by then, and count for less
    ruled = claims(
        own_step=own,
        held=held,
        remaining=remaining,
        claimed=claimed + held,
        workers=n,
        others=others_of(step_times),
        lookahead=lookahead,
    )
    half = 0.5 * (n - 1) + 1e-6
    if done >= remaining + half + slower:
        assert not ruled
    if done < remaining - half:
        assert ruled


# -- what the others know --------------------------------------------------------------------------------------------------


@given(workers=st.sampled_from([1, 2, 7, 64, 1024]), data=st.data())
def test_a_sum_of_rates_tells_how_many_and_how_fast(workers: int, data: st.DataObject) -> None:
    step_times = data.draw(st.lists(st.floats(1e-3, 1e3), max_size=min(workers, 20)))
    rates = RateSum(workers)
    known, rate = rates.read(sum(map(rates.term, step_times)))
    assert known == len(step_times)
    assert rate == pytest.approx(sum(1.0 / p for p in step_times), rel=1e-3)


@pytest.mark.parametrize("workers", [1, 2, 1000, 10**6])
@pytest.mark.parametrize("step_s", [0.0, 1e-300, 1e-9, 1.0, 1e9, None])
def test_a_sum_of_rates_fits_a_counter_whatever_the_step_times(workers: int, step_s: float | None) -> None:
    rates = RateSum(workers)
    total = workers * rates.term(step_s)
    assert 0 < total < 2**63
    assert rates.read(total)[0] == workers


def test_what_a_worker_takes_back_is_what_it_has_added() -> None:
    rates, own = RateSum(3), OwnRate(3)
    total = others = rates.term(0.3) + rates.term(None)
    for step_s in (1.0, 1.05, 1.2, 0.2, None, 0.2):
        if step_s is not None and (tell := own.tell(step_s)) is not None:
            total += tell.change
            assert tell.term == own.term == rates.term(step_s)
    assert total - own.term == others


def test_a_step_time_is_told_again_when_it_has_changed_by_a_tenth() -> None:
    own = OwnRate(2)
    told = [own.tell(step_s) is not None for step_s in (1.0, 1.09, 0.91, 1.11, 1.02, 0.99, 0.99)]
    assert told == [True, False, False, True, False, True, False]


def test_and_by_a_fiftieth_where_the_claim_looks() -> None:
    claims = Claims(place=0, workers=2, batches=10_000, lookahead=1)
    told = []
    outcomes = {Consult: Seen(9000, 0, 0), Advance: 1000}
    for step_s in (1.0, 1.03, 1.06, 1.03, 1.0):  # the first claim does not look, and the second does
        effects: list[Any] = []

        def do(effect: Any, effects: list[Any] = effects) -> Any:
            effects.append(effect)
            return outcomes.get(type(effect))

        perform(claims.next(step_s, held=1), do)
        told.append(any(isinstance(effect, Tell) for effect in effects))
    assert told == [True, True, False, False, False]


def test_the_ledger_knows_the_batch_of_the_step_and_what_is_left() -> None:
    ledger = Ledger()
    for position in np.array([4, 9, 11]).tolist():
        ledger.claim(position)
    assert (ledger.held, ledger.stepped, ledger.current) == (3, 0, 4)
    ledger.step()
    assert (ledger.held, ledger.stepped, ledger.current) == (2, 1, 9)
    assert ledger.unstepped() == [9, 11]


# -- claims ----------------------------------------------------------------------------------------------------------------

RATES = RateSum(2)
FAST, SLOW = RATES.term(1.0), RATES.term(10.0)
TOLD = FAST + FAST  # the rates of this worker and another like it
LOOK, LOOK_FOR_DEAD, LEAVE, ADVANCE = Consult(), Consult(dead=True), Leave(FAST), Advance()
BEGUN = ([None], [Tell(FAST, FAST)], 0)  # the position that it is sure of
MANY, LAST, NOTHING = Seen(100, 0, TOLD), Seen(1, 0, TOLD), Seen(0, 0, TOLD)
LATE = Seen(1, 0, FAST + RATES.term(0.1))  # the other one is so much faster that this one leaves it the last batch
DIED = Seen(1, RATES.term(0.1), FAST + RATES.term(0.1))
CLAIMS = [
    # per claim: what each effect comes to; the effects; the result
    [BEGUN, ([MANY, 1900], [LOOK, ADVANCE], 1900), ([1902], [ADVANCE], 1902)],  # far from the end
    [BEGUN, ([LAST, 1999], [LOOK, ADVANCE], 1999), ([NOTHING], [LOOK], None), ([], [], None)],
    [BEGUN, ([LAST, 2000], [LOOK, ADVANCE], None), ([], [], None)],  # the other was quicker since the look
    [BEGUN, ([LATE, LATE, False], [LOOK, LOOK_FOR_DEAD, LEAVE], None), ([], [], None)],
    [BEGUN, ([LATE, NOTHING], [LOOK, LOOK_FOR_DEAD], None)],
    [BEGUN, ([LATE, DIED, 1999], [LOOK, LOOK_FOR_DEAD, ADVANCE], 1999)],
    [
        BEGUN,
        ([LATE, LATE, True, 7], [LOOK, LOOK_FOR_DEAD, LEAVE, ADVANCE], 7),
        ([8], [ADVANCE], 8),
        ([2000], [ADVANCE], None),
        ([], [], None),
    ],
]


def perform_seen(effects: Any, outcomes: list[Any]) -> tuple[int | None, list[Any]]:
    coming, seen = iter(outcomes), []

    def do(effect: Any) -> Any:
        seen.append(effect)
        return next(coming)

    return perform(effects, do), seen


@pytest.mark.parametrize("calls", CLAIMS)
def test_each_order_of_claims_has_its_effects(calls: list[tuple[list[Any], list[Any], int | None]]) -> None:
    claims = Claims(place=0, workers=2, batches=2000, lookahead=1)
    for outcomes, effects, result in calls:
        assert perform_seen(claims.next(1.0, held=1), outcomes) == (result, effects)
    assert claims.left_early == any(LEAVE in effects and result is None for _, effects, result in calls)


def test_far_from_the_end_each_sixteenth_claim_looks() -> None:
    claims = Claims(place=0, workers=2, batches=10_000, lookahead=1)
    perform_seen(claims.next(1.0, held=0), [None])
    looks = []
    for position in range(2, 60):
        outcomes = iter([Seen(9000, 0, TOLD), position])
        seen: list[Any] = []

        def do(effect: Any, outcomes: Any = outcomes, seen: list[Any] = seen, position: int = position) -> Any:
            seen.append(effect)
            return Seen(9000, 0, TOLD) if effect == LOOK else position

        perform(claims.next(1.0, held=1), do)
        looks.append(LOOK in seen)
    assert [index for index, looked in enumerate(looks) if looked] == [0, 16, 32, 48]


def test_before_its_first_step_a_worker_asks_nobody_and_leaves_with_its_fair_share() -> None:
    claims = Claims(place=1, workers=2, batches=6, lookahead=9)
    assert perform_seen(claims.next(None, held=0), []) == (1, [])
    assert perform_seen(claims.next(None, held=1), [2]) == (2, [ADVANCE])
    assert perform_seen(claims.next(None, held=2), [3]) == (3, [ADVANCE])
    left = perform_seen(claims.next(None, held=3), [Seen(2, 0, 0), False])
    assert left == (None, [LOOK_FOR_DEAD, Leave(RATES.term(None))])


@pytest.mark.parametrize(
    ("told", "left", "remaining", "claims_it"),
    [
        ([], [], 1, True),  # all like this one
        ([1.0], [], 53, False),  # all like the one that is known: they do 3 · (20 − 2)
        ([1.0], [], 55, True),
        ([1.0, 20.0], [], 25, False),  # as fast as the mean of those: 20 · 1.575 − 3 · 2
        ([1.0, 20.0], [], 26, True),
        ([1.0, 20.0], [20.0], 35, False),  # as the one that is known and claims: 2 · (20 − 2)
        ([1.0, 20.0], [20.0], 37, True),
    ],
)
def test_a_worker_whose_step_time_is_not_known_counts_as_the_mean_of_the_others(
    told: list[float], left: list[float], remaining: int, claims_it: bool
) -> None:
    rates = RateSum(4)
    own = rates.term(10.0)
    claims = Claims(place=0, workers=4, batches=100, lookahead=1)
    perform_seen(claims.next(10.0, held=0), [None])
    seen = Seen(remaining, sum(map(rates.term, left)), own + sum(map(rates.term, told)))
    outcomes = [seen, 50] if claims_it else [seen, seen, False]
    assert (perform_seen(claims.next(10.0, held=1), outcomes)[0] is not None) == claims_it


def test_a_worker_begins_an_epoch_with_what_it_has_told_in_the_last_one() -> None:
    own = OwnRate(2)
    for _ in range(2):
        claims = Claims(place=0, workers=2, batches=10, lookahead=1, own_rate=own)
        told = perform_seen(claims.next(1.0, held=0), [None])[1]
    assert told == []


@pytest.mark.parametrize("n", [16, 1024])
@pytest.mark.parametrize("remaining", [10, 1000, 10**6], ids=["near", "half", "far"])
def test_a_claim_takes_little_time_however_many_the_workers(n: int, remaining: int) -> None:
    """At most 0.2 ms of the thread that loads data; it takes about 5 µs. The fastest of many, since others may be running."""
    rates = RateSum(n)
    step_times = np.random.default_rng(0).uniform(0.09, 0.11, n).tolist()
    seen = Seen(remaining, 0, sum(map(rates.term, step_times)))
    claims = Claims(place=0, workers=n, batches=2 * 10**6, lookahead=9)
    perform(claims.next(step_times[0], 0), lambda effect: None)
    took_s = []
    for _ in range(100):
        began_s = time.thread_time()
        position = perform(claims.next(step_times[0], 9), lambda e: 10**6 if e == ADVANCE else seen)
        took_s.append(time.thread_time() - began_s)
        assert position == 10**6
    assert min(took_s) < 0.2e-3


def test_a_worker_alone_asks_nobody() -> None:
    claims = Claims(place=0, workers=1, batches=3, lookahead=9)
    counter = iter(range(1, 9))
    positions = [perform(claims.next(1.0, held=k), lambda effect: next(counter)) for k in range(5)]
    assert positions == [0, 1, 2, None, None]


@given(
    step_times=st.lists(st.sampled_from([1.0, 1.1, 3.0, 100.0]), min_size=1, max_size=6),
    spare=st.integers(0, 40),
    known=st.booleans(),
    order=st.randoms(use_true_random=False),
)
def test_in_any_order_of_claims_each_batch_is_claimed_once_and_one_worker_stays(
    step_times: list[float], spare: int, known: bool, order: Any
) -> None:
    """Each effect is done at once, and another worker may come between any two."""
    n = len(step_times)
    batches = n + spare
    counter, left, rates, claimed = n, 0, 0, []

    def work(rank: int) -> Any:
        nonlocal counter, left, rates
        claims = Claims(place=rank, workers=n, batches=batches, lookahead=1)
        held = steps = 0
        while True:
            effects, outcome = claims.next(step_times[rank] if known or steps else None, held), None
            while True:
                try:
                    effect = effects.send(outcome)
                except StopIteration as end:
                    position = end.value
                    break
                yield
                outcome = None
                match effect:
                    case Tell():
                        rates += effect.change
                    case Consult():
                        outcome = Seen(max(0, batches - counter), left, rates)
                    case Leave():
                        left += effect.term
                        outcome = RateSum(n).read(left)[0] >= n
                    case Advance():
                        outcome, counter = counter, counter + 1
            if position is None and (claims.done or not held):
                return
            if position is not None:
                claimed.append(position)
            held, steps = min(held + 1, 2), steps + (held == 2)

    running = {rank: work(rank) for rank in range(n)}
    while running:
        rank = order.choice(sorted(running))
        if next(running[rank], "ended") == "ended":
            del running[rank]
    assert sorted(claimed) == list(range(batches))
