import math
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lightning_gossip.algorithm.effects import perform
from lightning_gossip.algorithm.work_sharing import (
    Advance,
    Claims,
    Consult,
    EpochPlan,
    Leave,
    Ledger,
    at_least_one_each,
    check_enough_batches,
    joint_finish_time,
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


def finish_by_simulation(remaining: int, step_times: list[float], held: list[float]) -> float:
    """Everybody works off what it holds, then each further batch goes to whoever would end it first."""
    if remaining <= 0:
        return 0.0
    done = [0] * len(step_times)
    ends = 0.0
    for _ in range(remaining):
        next_ends = [(h + k + 1) * p for p, h, k in zip(step_times, held, done, strict=True)]
        best = min(range(len(next_ends)), key=next_ends.__getitem__)
        done[best] += 1
        ends = max(ends, next_ends[best])
    return ends


@given(
    remaining=st.integers(0, 40),
    workers=st.lists(
        st.tuples(st.floats(0.01, 100.0), st.one_of(st.integers(0, 9), st.sampled_from([0.5, 1.5, 9.5]))),
        min_size=1,
        max_size=6,
    ),
)
def test_the_joint_finish_time_is_that_of_a_simulation(remaining: int, workers: list[tuple[float, float]]) -> None:
    step_times, held = [p for p, _ in workers], [h for _, h in workers]
    expected = finish_by_simulation(remaining, step_times, held)
    assert joint_finish_time(remaining, step_times, held) == pytest.approx(expected, rel=1e-9)


def test_workers_that_have_left_take_nothing() -> None:
    assert joint_finish_time(3, [1.0, math.inf], [0, 0]) == pytest.approx(3.0)
    assert joint_finish_time(3, [math.inf], [0]) == math.inf


def claims(**changes: object) -> bool:
    case: dict[str, object] = {
        "held": 1,
        "own_step": 1.0,
        "remaining": 10,
        "claimed": 100,
        "step_times": [1.0, 1.0, 1.0, 1.0],
        "rank": 0,
        "lookahead": 1,
    }
    return may_claim(**{**case, **changes})  # type: ignore[arg-type]


def test_nobody_claims_what_is_not_there() -> None:
    assert not claims(remaining=0)
    assert not claims(remaining=-3, own_step=None)


def test_equal_workers_claim_to_the_last_batch() -> None:
    assert claims(remaining=1)


def test_a_slow_worker_claims_only_while_the_others_are_busy_for_as_long() -> None:
    step_times = [10.0, 1.0, 1.0, 1.0]
    assert claims(own_step=10.0, step_times=step_times, remaining=60)
    assert not claims(own_step=10.0, step_times=step_times, remaining=50)


def test_prefetched_batches_count() -> None:
    assert claims(held=5, remaining=20)
    assert not claims(held=9, remaining=20)


@given(held=st.integers(0, 12), own=st.floats(0.1, 50.0), remaining=st.integers(1, 50), lookahead=st.integers(1, 9))
def test_the_last_one_left_always_claims(held: int, own: float, remaining: int, lookahead: int) -> None:
    times = [own, math.inf, math.inf]
    assert claims(held=held, own_step=own, step_times=times, remaining=remaining, lookahead=lookahead)


@given(
    speeds=st.lists(st.floats(0.1, 50.0), min_size=2, max_size=8),
    held=st.integers(0, 9),
    remaining=st.integers(1, 60),
    lookahead=st.integers(1, 9),
)
def test_more_left_to_do_never_turns_a_yes_into_a_no(speeds: list[float], held: int, remaining: int, lookahead: int) -> None:
    case = {"own_step": speeds[0], "step_times": speeds, "held": held, "lookahead": lookahead}
    if claims(**case, remaining=remaining):
        assert claims(**case, remaining=remaining + 1)
        assert held == 0 or claims(**{**case, "held": held - 1}, remaining=remaining)


def test_unknown_step_times_are_taken_as_typical() -> None:
    nan = math.nan
    assert claims(step_times=[nan, nan, nan, nan], remaining=1)
    assert not claims(own_step=10.0, step_times=[nan, 1.0, nan, nan], remaining=20)


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


def claims_in_full(
    *, held: int, own_step: float | None, remaining: int, claimed: int, step_times: list[float], rank: int, lookahead: int
) -> bool:
    """The rule as it is written, with T* by bisection over all workers each time."""
    if remaining <= 0:
        return False
    if own_step is None:
        return held + 1 <= math.ceil((remaining + claimed) / len(step_times))
    known = sorted(p for p in step_times if not math.isnan(p))
    typical = known[(len(known) - 1) // 2] if known else own_step
    times = [(typical if math.isfinite(typical) else own_step) if math.isnan(p) else p for p in step_times]
    times[rank] = own_step
    holding = [min(lookahead + 0.5, (claimed - held) / max(1, len(times) - 1))] * len(times)
    holding[rank] = held
    claiming = [(p, h) for p, h in zip(times, holding, strict=True) if math.isfinite(p)]
    low, high = 0.0, min((h + remaining) * p for p, h in claiming)
    for _ in range(60):
        middle = 0.5 * (low + high)
        done = sum(max(0, math.floor(middle / p * (1 + 1e-12) - h)) for p, h in claiming)
        low, high = (low, middle) if done >= remaining else (middle, high)
    return (held + 1) * own_step <= high * (1 + 1e-9)


STEP_TIMES = st.one_of(
    st.sampled_from([1.0, 1.0, 0.1, 2.0, 10.0, math.inf, math.nan]), st.floats(1e-12, 1e6), st.floats(0.9, 1.1)
)


@settings(max_examples=400)
@given(
    step_times=st.lists(STEP_TIMES, min_size=1, max_size=12),
    own=st.one_of(st.none(), st.sampled_from([0.1, 1.0, 2.0, 10.0]), st.floats(1e-12, 1e6), st.floats(0.9, 1.1)),
    held=st.integers(0, 12),
    remaining=st.integers(-1, 80),
    claimed=st.integers(0, 200),
    lookahead=st.integers(1, 9),
    place=st.integers(0, 11),
)
@example([1.0] * 8, 1.0, 1, 8, 100, 1, 0)  # ties
@example([3.0] * 3, 1.0 * (1 + 1e-9), 2, 1, 100, 2, 0)  # and as near as rounding to where a tie ends
def test_the_quick_bounds_decide_as_the_rule_in_full(
    step_times: list[float], own: float | None, held: int, remaining: int, claimed: int, lookahead: int, place: int
) -> None:
    case: dict[str, object] = {
        "held": held,
        "own_step": own,
        "remaining": remaining,
        "claimed": claimed + held,
        "step_times": step_times,
        "rank": place % len(step_times),
        "lookahead": lookahead,
    }
    assert claims(**case) == claims_in_full(**case)  # type: ignore[arg-type]


@given(k=st.integers(1, 9), held=st.integers(0, 5), off=st.integers(-40, 40), others=st.integers(1, 5))
def test_they_do_where_rounding_decides(k: int, held: int, off: int, others: int) -> None:
    """The own end at the very edge of what still counts as T*: there T* itself is reckoned."""
    p = (held + 1) / (1 + 1e-9) / (0.5 + k) * (1 + off * 2.0**-52)
    case: dict[str, object] = {"held": held, "remaining": others * k, "lookahead": 0, "claimed": 100, "rank": 0}
    case |= {"own_step": 1.0, "step_times": [1.0] + [p] * others}
    assert claims(**case) == claims_in_full(**case)  # type: ignore[arg-type]


@pytest.mark.parametrize(("held", "remaining"), [(9, 40_960), (9, 10_240), (1, 256)], ids=["far", "half", "near"])
def test_a_claim_of_a_thousand_workers_takes_little_time(held: int, remaining: int) -> None:
    """0.02 to 0.1 ms; a bisection for T* in Python took 14 ms. The fastest of many, since another job may hold up some."""
    step_times = np.random.default_rng(0).uniform(0.09, 0.11, 1024)
    case: dict[str, object] = {"held": held, "remaining": remaining, "claimed": 40_960, "lookahead": 9}
    case |= {"own_step": float(step_times[0]), "step_times": step_times}
    took_s = []
    for _ in range(200):
        began_s = time.perf_counter()
        claims(**case)
        took_s.append(time.perf_counter() - began_s)
    assert min(took_s) < 0.5e-3


def test_the_ledger_knows_the_batch_of_the_step_and_what_is_left() -> None:
    ledger = Ledger()
    for position in np.array([4, 9, 11]).tolist():
        ledger.claim(position)
    assert (ledger.held, ledger.stepped, ledger.current) == (3, 0, 4)
    ledger.step()
    assert (ledger.held, ledger.stepped, ledger.current) == (2, 1, 9)
    assert ledger.unstepped() == [9, 11]


# -- claims ----------------------------------------------------------------------------------------------------------------

CONSULT, LEAVE, ADVANCE = Consult(), Leave(), Advance()
SOON, LATE = (100, [1.0, 1.0]), (1, [10.0, 1.0])  # what is left, and step times by which worker 0 may claim, or may not
BEGUN = ([], [], 0)  # the position that it is sure of
CLAIMS = [
    # per claim: what each effect comes to; the effects; the result
    [BEGUN, ([SOON, 5], [CONSULT, ADVANCE], 5), ([SOON, 9], [CONSULT, ADVANCE], 9)],
    [BEGUN, ([LATE, False], [CONSULT, LEAVE], None), ([], [], None)],
    [BEGUN, ([LATE, True, 7], [CONSULT, LEAVE, ADVANCE], 7), ([8], [ADVANCE], 8), ([10], [ADVANCE], None), ([], [], None)],
    [BEGUN, ([SOON, 10], [CONSULT, ADVANCE], None), ([], [], None)],  # others were quicker since the look
    [BEGUN, ([(0, [1.0, 1.0]), False], [CONSULT, LEAVE], None)],
    [BEGUN, ([(0, [1.0, 1.0]), True, 12], [CONSULT, LEAVE, ADVANCE], None)],
]


@pytest.mark.parametrize("calls", CLAIMS)
def test_each_order_of_claims_has_its_effects(calls: list[tuple[list[Any], list[Any], int | None]]) -> None:
    claims = Claims(place=0, workers=2, batches=10, lookahead=1)
    for outcomes, effects, result in calls:
        coming, seen = iter(outcomes), []

        def do(effect: Any, coming: Any = coming, seen: list[Any] = seen) -> Any:
            seen.append(effect)
            return next(coming)

        step_s = 10.0 if LATE in outcomes else 1.0
        assert (perform(claims.next(step_s, held=1), do), seen) == (result, effects)
    assert claims.left_early == any(LATE in outcomes and result is None for outcomes, _, result in calls)


def test_a_worker_alone_asks_nobody() -> None:
    claims = Claims(place=0, workers=1, batches=3, lookahead=9)
    counter = iter(range(1, 9))
    positions = [perform(claims.next(None, held=k), lambda effect: next(counter)) for k in range(5)]
    assert positions == [0, 1, 2, None, None]


@given(
    step_times=st.lists(st.sampled_from([1.0, 1.1, 3.0, 100.0]), min_size=1, max_size=6),
    spare=st.integers(0, 40),
    order=st.randoms(use_true_random=False),
)
def test_in_any_order_of_claims_each_batch_is_claimed_once_and_one_worker_stays(
    step_times: list[float], spare: int, order: Any
) -> None:
    """Each effect is done at once, and another worker may come between any two."""
    n = len(step_times)
    batches = n + spare
    counter, left, claimed = n, 0, []
    known = list(step_times)

    def work(rank: int) -> Any:
        nonlocal counter, left
        claims = Claims(place=rank, workers=n, batches=batches, lookahead=1)
        held = 0
        while True:
            effects, outcome = claims.next(step_times[rank], held), None
            while True:
                try:
                    effect = effects.send(outcome)
                except StopIteration as end:
                    position = end.value
                    break
                yield
                if isinstance(effect, Consult):
                    outcome = max(0, batches - counter), known
                elif isinstance(effect, Leave):
                    left += 1
                    outcome = left >= n
                else:
                    outcome, counter = counter, counter + 1
            if position is None:
                known[rank] = math.inf
                return
            claimed.append(position)
            held = min(held + 1, 2)

    running = {rank: work(rank) for rank in range(n)}
    while running:
        rank = order.choice(sorted(running))
        if next(running[rank], "ended") == "ended":
            del running[rank]
    assert sorted(claimed) == list(range(batches))
