from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_gossip.algorithm.apsgd.options import EventTrigger, ServerOptions
from lightning_gossip.algorithm.apsgd.server import ParameterServer, put_in
from lightning_gossip.algorithm.tensors.flat import Fading
from lightning_gossip.errors import ConfigurationError, ProtocolError

N = 4
D = 3


class Run:
    """Workers on a server, and the log of all that happens. A push is logged as "apply" or as "drop".

    Args:
        n: workers.
        options: of the server.
    """

    def __init__(self, n: int, **options: Any) -> None:
        self.n = n
        self.active = options.get("active_workers") or n
        self.bound: int = options.get("max_staleness", 10**9)
        self.server = ParameterServer(torch.zeros(D, dtype=torch.float64), workers=n, **options)
        self.asking: list[int] = []
        self.log: list[tuple[str, int]] = []
        self.told: list[tuple[int, int | None]] = []  # rank and what push returned

    def ask(self, rank: int) -> None:
        self.server.queue(rank)
        self.asking.append(rank)
        self.log.append(("queue", rank))

    def pull(self, rank: int) -> None:
        assert self.server.pull(rank) == self.server.version
        self.asking.remove(rank)
        self.log.append(("pull", rank))

    def push(self, rank: int, update: Tensor | None = None) -> int | None:
        staleness = self.server.push(rank, torch.ones(D, dtype=torch.float64) if update is None else update)
        self.told.append((rank, staleness))
        self.log.append(("drop" if staleness is None else "apply", rank))
        return staleness

    def leave(self, rank: int) -> None:
        self.server.leave(rank)
        if rank in self.asking:
            self.asking.remove(rank)
        self.log.append(("leave", rank))

    def serve(self) -> None:
        """Everybody whose turn it is pulls; whose that is, the server says, not the order here."""
        while turn := [rank for rank in reversed(self.asking) if self.server.may_pull(rank)]:
            self.pull(turn[0])

    def begin(self) -> None:
        for rank in range(self.n):
            self.ask(rank)
        self.serve()

    def push_and_ask(self, rank: int) -> int | None:
        """As in training: the next pull is asked for at once, and whoever's turn it is pulls at once."""
        staleness = self.push(rank)
        self.ask(rank)
        self.serve()
        return staleness

    def act(self, rank: int, action: str, update: Tensor | None = None) -> None:
        """What this worker can do next, if it can do anything.

        Args:
            rank: the worker's.
            action: "leave", "step" (push and ask at once), or "one thing": ask, pull or push, and others may come between.
            update: what it pushes, if it does.
        """
        if action == "leave":
            self.leave(rank)
        elif rank in self.server.in_flight:
            if self.server.may_push(rank):
                self.push(rank, update)
                if action == "step":
                    self.ask(rank)
                    self.serve()
        elif rank not in self.asking:
            self.ask(rank)
        elif self.server.may_pull(rank):
            self.pull(rank)

    # -- counted in the log, one event after the other ------------------------------------------------------------------

    def places(self, rank: int, *kinds: str) -> list[int]:
        return [place for place, (kind, other) in enumerate(self.log) if other == rank and kind in kinds]

    def others_applied(self, rank: int, start: int, stop: int) -> int:
        return sum(kind == "apply" and other != rank for kind, other in self.log[start:stop])

    def age(self, rank: int) -> int:
        """Updates of others since this worker's last pull."""
        return self.others_applied(rank, self.places(rank, "pull")[-1], len(self.log))


def mean(run: Run) -> float:
    told = [staleness for _, staleness in run.told if staleness is not None]
    return sum(told) / len(told)


# What happens. Lists are long at least, for their average length is near the least one, and the rules matter late.
ACTION = st.tuples(st.integers(0, N - 1), st.sampled_from(["step"] * 5 + ["one thing"] * 4 + ["leave"]))
ACTIONS = st.lists(ACTION, min_size=20, max_size=60)
ORDER = st.lists(st.integers(0, N - 1), min_size=10, max_size=60)
ACTIVE = st.one_of(st.none(), st.integers(1, N))


@st.composite
def bounded(draw: st.DrawFn, on_stale: str | None = None) -> dict[str, Any]:
    mode = draw(st.sampled_from(["drop", "wait"])) if on_stale is None else on_stale
    active = draw(ACTIVE)
    least = (active or N) - 1 if mode == "wait" else 0
    return {"on_stale": mode, "active_workers": active, "max_staleness": draw(st.integers(least, least + 5))}


ANY_OPTIONS = st.one_of(st.builds(lambda active: {"active_workers": active}, ACTIVE), bounded())


# -- staleness -------------------------------------------------------------------------------------------------------------


@given(ANY_OPTIONS, ACTIONS)
def test_the_staleness_told_is_the_number_of_others_updates_since_the_pull(
    options: dict[str, Any], actions: list[tuple[int, str]]
) -> None:
    run = Run(N, **options)
    run.begin()
    for rank, action in actions:
        pushes, age = len(run.told), run.age(rank) if rank in run.server.in_flight else None
        run.act(rank, action)
        if len(run.told) > pushes:
            assert run.told[-1][1] in (age, None)
    assert run.server.version == sum(kind == "apply" for kind, _ in run.log)


@given(ACTIVE, ACTIONS)
def test_stalenesses_and_gaps_of_a_worker_add_up_to_the_others_updates(
    active: int | None, actions: list[tuple[int, str]]
) -> None:
    """Σ τ = others' updates from the first pull to the last push, less those in the gaps: after a push, before the next pull.

    The intervals in flight and the gaps between them are the whole time, whatever the schedule.
    """
    run = Run(N, active_workers=active)
    run.begin()
    for rank, action in actions:
        if action != "leave":
            run.act(rank, action)
    for rank in range(N):
        pulls, pushes = run.places(rank, "pull"), run.places(rank, "apply")
        if not pushes:
            continue
        gaps = sum(run.others_applied(rank, push, pull) for push, pull in zip(pushes[:-1], pulls[1:], strict=False))
        staleness = sum(s for other, s in run.told if other == rank and s is not None)
        assert staleness + gaps == run.others_applied(rank, pulls[0], pushes[-1])


@given(ORDER)
def test_where_each_pull_follows_the_own_push_the_identity_has_no_gaps(order: list[int]) -> None:
    """Σ τ = Σ_i others' updates between i's first pull and its last push; all workers pull version 0 first."""
    run = Run(N)
    run.begin()
    for rank in order:
        run.push_and_ask(rank)
    identity = 0
    for rank in set(order):
        last = max(place for place, other in enumerate(order) if other == rank)
        identity += sum(other != rank for other in order[:last])
    assert sum(s for _, s in run.told if s is not None) == identity


def test_an_update_dropped_makes_nobody_older() -> None:
    run = Run(3, max_staleness=0)
    run.begin()
    assert run.push_and_ask(0) == 0
    assert run.push_and_ask(1) is None
    assert run.age(2) == 1
    assert run.push_and_ask(1) == 0
    assert run.server.version == 2


@pytest.mark.parametrize("n", [1, 2, 5])
def test_in_turn_all_updates_after_the_first_round_have_staleness_n_minus_1(n: int) -> None:
    run = Run(n)
    run.begin()
    told = [run.push_and_ask(rank) for _ in range(10) for rank in range(n)]
    assert told[:n] == list(range(n))
    assert told[n:] == [n - 1] * (9 * n)


LAWS: dict[str, Callable[[random.Random], float]] = {
    "memoryless": lambda draw: draw.expovariate(1.0),
    "uniform": lambda draw: draw.uniform(0.5, 1.5),
    "now and then very long": lambda draw: draw.choice([0.1] * 9 + [9.1]),
}


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("active", [1, 3, 8])
def test_the_mean_staleness_is_one_less_than_the_active_workers(law: str, active: int) -> None:
    """Whatever the law of the compute times, and with one worker ten times slower. The ends cost about K / updates of it."""
    n, updates, draw = 8, 200 * 8, random.Random(0)
    run = Run(n, active_workers=active)
    run.begin()
    finish = [(LAWS[law](draw), rank) for rank in run.server.in_flight]
    heapq.heapify(finish)
    for _ in range(updates):
        now, rank = heapq.heappop(finish)
        before = set(run.server.in_flight) - {rank}
        run.push_and_ask(rank)
        assert len(run.server.in_flight) == active
        (pulled,) = set(run.server.in_flight) - before
        heapq.heappush(finish, (now + LAWS[law](draw) * (10.0 if pulled == 0 else 1.0), pulled))
    assert mean(run) == pytest.approx(active - 1, rel=0.05)


# -- who may pull ----------------------------------------------------------------------------------------------------------


@given(ANY_OPTIONS, ACTIONS)
def test_the_first_that_asked_may_pull_if_fewer_than_the_active_workers_are_in_flight(
    options: dict[str, Any], actions: list[tuple[int, str]]
) -> None:
    run = Run(N, **options)
    run.begin()
    for rank, action in actions:
        run.act(rank, action)
        in_flight = run.server.in_flight
        assert len(in_flight) <= run.active
        turn = set(run.asking[:1]) if len(in_flight) < run.active else set()
        assert {r for r in range(N) if run.server.may_pull(r)} == turn
        assert list(in_flight) == sorted(in_flight, key=lambda r: run.places(r, "pull")[-1])  # oldest first


@given(st.integers(1, N), ORDER)
def test_nobody_is_overtaken_while_it_asks(active: int, order: list[int]) -> None:
    """One that waits for its turn sees no other pull twice, however fast the others are."""
    run = Run(N, active_workers=active)
    run.begin()
    for rank in order:
        if rank in run.server.in_flight:
            run.push_and_ask(rank)
    for rank in range(N):
        for asked, pulled in zip(run.places(rank, "queue"), run.places(rank, "pull"), strict=False):
            pulls = [other for kind, other in run.log[asked:pulled] if kind == "pull"]
            assert len(pulls) == len(set(pulls))


def test_one_that_leaves_frees_its_slot() -> None:
    run = Run(N, active_workers=2)
    run.begin()
    assert dict(run.server.in_flight) == {0: 0, 1: 0}
    assert not run.server.may_pull(2)
    run.leave(0)
    assert run.server.may_pull(2)
    assert dict(run.server.in_flight) == {1: 0}


def test_one_that_leaves_while_it_asks_makes_nobody_wait() -> None:
    run = Run(N, active_workers=2)
    run.begin()
    run.leave(2)
    run.push(0)
    assert not run.server.may_pull(2)
    assert run.server.may_pull(3)


def test_leaving_twice_is_leaving_and_one_that_left_may_return() -> None:
    run = Run(N)
    run.begin()
    run.push(1)
    run.leave(0)
    run.leave(0)
    run.ask(0)
    run.pull(0)
    assert run.server.in_flight[0] == 1


def test_in_flight_is_not_for_others_to_change() -> None:
    with pytest.raises(TypeError):
        ParameterServer(torch.zeros(D), workers=N).in_flight[0] = 1  # type: ignore[index]


# -- the bound -------------------------------------------------------------------------------------------------------------


@given(bounded(), ACTIONS)
def test_no_update_that_is_applied_exceeds_the_bound(options: dict[str, Any], actions: list[tuple[int, str]]) -> None:
    run = Run(N, **options)
    run.begin()
    for rank, action in actions:
        run.act(rank, action)
    for rank in range(N):
        for push in run.places(rank, "apply"):
            pull = max(place for place in run.places(rank, "pull") if place < push)
            assert run.others_applied(rank, pull, push) <= run.bound


@given(bounded("drop"), ACTIONS)
def test_what_is_dropped_is_what_exceeds_the_bound(options: dict[str, Any], actions: list[tuple[int, str]]) -> None:
    run = Run(N, **options)
    run.begin()
    for rank, action in actions:
        pushes, age = len(run.told), run.age(rank) if rank in run.server.in_flight else 0
        assert run.server.may_push(rank)
        run.act(rank, action)
        if len(run.told) > pushes:
            assert (run.told[-1][1] is None) == (age > run.bound)
            assert run.server.in_flight.get(rank, run.server.version) == run.server.version  # what it holds now is fresh


@given(bounded("wait"), ACTIONS)
def test_oldest_first_always_keeps_everybody_within_the_bound(options: dict[str, Any], actions: list[tuple[int, str]]) -> None:
    """(∗), after every pull, push and leave."""
    run = Run(N, **options)
    run.begin()
    for rank, action in actions:
        run.act(rank, action)
        pulled = list(run.server.in_flight.values())
        assert all(run.server.version - v + k <= run.bound for k, v in enumerate(pulled))
        assert not pulled or run.server.may_push(next(iter(run.server.in_flight)))


@given(bounded("wait"), ACTIONS)
def test_an_update_waits_only_if_no_order_of_the_others_could_keep_the_bound(
    options: dict[str, Any], actions: list[tuple[int, str]]
) -> None:
    """The rule against all orders in which the others could push after it."""
    run = Run(N, **options)
    run.begin()
    for rank, action in actions:
        run.act(rank, action)
        for candidate in run.server.in_flight:
            others = [pulled for other, pulled in run.server.in_flight.items() if other != candidate]
            possible = any(
                all(run.server.version + 1 + k - pulled <= run.bound for k, pulled in enumerate(order))
                for order in itertools.permutations(others)
            )
            assert run.server.may_push(candidate) == possible


@given(bounded("wait"), st.data())
def test_waiting_never_locks_up_and_every_update_is_applied(options: dict[str, Any], data: st.DataObject) -> None:
    """In whatever order the workers finish, and whichever of those allowed pushes first."""
    each = 4
    run = Run(N, **options)
    run.begin()
    left, finished = dict.fromkeys(range(N), each), set[int]()
    while any(left.values()):
        allowed = [rank for rank in sorted(finished) if run.server.may_push(rank)]
        computing = sorted(set(run.server.in_flight) - finished)
        assert allowed or computing, "locked up"
        rank = data.draw(st.sampled_from(allowed + computing))
        if rank in computing:
            finished.add(rank)
            continue
        finished.remove(rank)
        assert run.push(rank) is not None
        left[rank] -= 1
        if left[rank]:
            run.ask(rank)
        run.serve()
    assert run.server.version == each * N
    assert not run.server.in_flight


@given(ORDER)
def test_the_tightest_bound_makes_the_first_round_repeat(order: list[int]) -> None:
    """S = N − 1: everybody pushes once in the first round, in any order, and then in that order for ever."""
    run = Run(N, max_staleness=N - 1, on_stale="wait")
    run.begin()
    for rank in [*order, *(rank for _ in range(3 * N) for rank in range(N))]:
        if run.server.may_push(rank):
            run.push_and_ask(rank)
    pushed = [rank for rank, _ in run.told]
    assert len(pushed) > 2 * N
    assert sorted(pushed[:N]) == list(range(N))
    assert all(rank == pushed[place % N] for place, rank in enumerate(pushed))
    assert {staleness for _, staleness in run.told[N:]} == {N - 1}


@pytest.mark.parametrize("slack", [0, 1, 2, 5])
def test_a_looser_bound_lets_a_fast_worker_go_ahead_by_as_much(slack: int) -> None:
    run = Run(N, max_staleness=N - 1 + slack, on_stale="wait")
    run.begin()
    pushes = 0
    while run.server.may_push(N - 1):
        run.push_and_ask(N - 1)
        pushes += 1
    assert pushes == 1 + slack


def test_one_that_leaves_lets_those_push_that_waited_for_it() -> None:
    run = Run(3, max_staleness=2, on_stale="wait")
    run.begin()
    run.push_and_ask(1)
    run.push_and_ask(2)
    assert not run.server.may_push(1)
    run.leave(0)
    assert run.server.may_push(1)


# -- the model -------------------------------------------------------------------------------------------------------------


@given(bounded(), ACTIONS, st.sampled_from([None, 0.5, 1.0]))
def test_the_model_is_the_start_and_the_scaled_sum_of_what_was_applied(
    options: dict[str, Any], actions: list[tuple[int, str]], scale: float | None
) -> None:
    """Whole numbers and powers of two: to the bit."""
    generator = torch.Generator().manual_seed(0)
    run = Run(N, **options, scale=scale)
    run.begin()
    start = run.server.model.copy_(torch.arange(D)).clone()
    applied = torch.zeros_like(start)
    for rank, action in actions:
        before, version = run.server.model.clone(), run.server.version
        update = torch.randint(-50, 50, (D,), generator=generator).double()
        run.act(rank, action, update)
        if run.server.version == version:
            assert torch.equal(run.server.model, before)  # a dropped update leaves it as it was, to the bit
        else:
            applied += update
    assert torch.equal(run.server.model, start + (1 / N if scale is None else scale) * applied)


def test_in_single_precision_the_model_strays_from_the_sum_by_rounding_only() -> None:
    n, dim, pushes = 3, 100, 300
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(dim, generator=generator)
    exact = start.double()
    server = ParameterServer(start.clone(), workers=n)
    for number in range(pushes):
        server.queue(number % n)
        server.pull(number % n)
        update = torch.randn(dim, generator=generator)
        server.push(number % n, update)
        exact += update.double() / n
    eps = torch.finfo(torch.float32).eps
    assert float((server.model - exact).abs().max()) < pushes * eps * float(exact.abs().max())


def test_with_the_default_scale_a_round_moves_the_model_by_the_mean_update() -> None:
    updates = torch.randn(N, D, dtype=torch.float64)
    run = Run(N)
    run.begin()
    for rank in range(N):
        run.push(rank, updates[rank])
    torch.testing.assert_close(run.server.model, updates.mean(0))


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down what torch does."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_push_is_one_addition_in_place_and_the_rest_touches_no_tensor() -> None:
    model, update = torch.zeros(D), torch.ones(D)
    with Operations() as operations:
        server = ParameterServer(model, workers=N, max_staleness=N, on_stale="wait")
        server.queue(0)
        server.pull(0)
        server.push(0, update)
        server.leave(0)
    assert operations.names == ["aten.add_.Tensor"]
    assert server.model is model
    assert torch.equal(update, torch.ones(D))


def test_a_push_is_not_for_autograd() -> None:
    server = ParameterServer(torch.zeros(D), workers=1)
    server.queue(0)
    server.pull(0)
    server.push(0, torch.ones(D, requires_grad=True))
    assert not server.model.requires_grad


# -- running statistics ----------------------------------------------------------------------------------------------------

MOMENTUM = 0.1
STATISTIC = [Fading(slice(1, 2), 1.0 - MOMENTUM)]  # one weight and one running statistic


def forward(model: Tensor, batches: list[float]) -> Tensor:
    """What training makes of the model: the weight moves by 1, the statistic averages one value a forward pass."""
    trained = model.clone()
    trained[0] += 1.0
    for value in batches:
        trained[1] = (1.0 - MOMENTUM) * trained[1] + MOMENTUM * value
    return trained


def push_trained(server: ParameterServer, rank: int, pulled: Tensor, batches: list[float]) -> int | None:
    update = forward(pulled, batches) - pulled
    put_in(update, pulled, STATISTIC, len(batches))
    return server.push(rank, update, forward_passes=len(batches))


@given(st.lists(st.lists(st.floats(0.0, 100.0), min_size=1, max_size=3), max_size=8))
def test_one_worker_alone_has_the_statistics_of_training_without_a_server(steps: list[list[float]]) -> None:
    server = ParameterServer(torch.tensor([0.0, 1.0], dtype=torch.float64), workers=1, fading=STATISTIC)
    alone = server.model.clone()
    for batches in steps:
        server.queue(0)
        server.pull(0)
        push_trained(server, 0, server.model.clone(), batches)
        alone = forward(alone, batches)
    torch.testing.assert_close(server.model, alone)


@given(
    order=ORDER,
    scale=st.sampled_from([None, 1.0]),
    batches=st.lists(st.floats(0.5, 2.0), min_size=1, max_size=30),
)
def test_a_statistic_stays_among_the_values_it_averages_however_stale(
    order: list[int], scale: float | None, batches: list[float]
) -> None:
    """Added up like a weight, a stale variance could turn negative."""
    server = ParameterServer(torch.tensor([0.0, 1.0], dtype=torch.float64), workers=N, fading=STATISTIC, scale=scale)
    pulled: dict[int, Tensor] = {}
    for rank in order:
        if rank in pulled:
            push_trained(server, rank, pulled.pop(rank), batches)
        else:
            server.queue(rank)
            server.pull(rank)
            pulled[rank] = server.model.clone()
        assert 0.5 - 1e-9 <= float(server.model[1]) <= 2.0 + 1e-9


def test_a_dropped_update_does_not_fade_the_statistics_either() -> None:
    server = ParameterServer(torch.tensor([0.0, 1.0]), workers=2, fading=STATISTIC, max_staleness=0)
    for rank in range(2):
        server.queue(rank)
        server.pull(rank)
    start = server.model.clone()
    assert push_trained(server, 0, start, [3.0]) == 0
    before = server.model.clone()
    assert push_trained(server, 1, start, [3.0]) is None
    assert torch.equal(server.model, before)


def test_only_statistics_are_put_in_differently() -> None:
    pulled, update = torch.tensor([5.0, 2.0, 5.0]), torch.tensor([1.0, -1.0, 1.0])
    put_in(update, pulled, STATISTIC, 2)
    torch.testing.assert_close(update, torch.tensor([1.0, -1.0 + (1.0 - 0.9**2) * 2.0, 1.0]))


# -- the event trigger -----------------------------------------------------------------------------------------------------

ALONG = [torch.eye(16)[0]] * 16  # ‖u‖ after k steps that were held back: k
ACROSS = list(torch.eye(16))  # √k


@pytest.mark.parametrize(
    ("trigger", "steps", "every"),
    [
        (EventTrigger(threshold=0.0), ALONG, 1),
        (EventTrigger(threshold=1.0), ALONG, 1),  # at the threshold it fires
        (EventTrigger(threshold=1.5), ALONG, 2),
        (EventTrigger(threshold=4.0), ALONG, 4),
        (EventTrigger(threshold=2.0), ACROSS, 4),
        (EventTrigger(threshold=100.0), ALONG, 17),
    ],
)
def test_a_threshold_sends_the_share_of_steps_that_norms_say(trigger: EventTrigger, steps: list[Tensor], every: int) -> None:
    """A worker that keeps what it does not send: none of it is lost."""
    server = ParameterServer(torch.zeros(16), workers=1)
    sent, update = [], torch.zeros(16)
    for number, step in enumerate(steps, start=1):
        if 0 not in server.in_flight:
            server.queue(0)
            server.pull(0)
            pulled = float(server.model.norm())
        update = update + step
        if trigger.fires(float(update.norm()), pulled):
            server.push(0, update)
            sent.append(number)
            update = torch.zeros(16)
    assert sent == list(range(every, 17, every))
    assert torch.equal(server.model + update, torch.stack(steps).sum(0))


def test_a_relative_threshold_grows_with_the_model() -> None:
    trigger = EventTrigger(threshold=0.25, relative=True)
    assert trigger.fires(1.0, 4.0)
    assert not trigger.fires(1.0, 4.5)
    assert trigger.fires(0.0, 0.0)
    assert EventTrigger(threshold=0.25).fires(1.0, 4.5)


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_fires(relative: bool, wrong: float) -> None:
    trigger = EventTrigger(threshold=10.0, relative=relative)
    assert trigger.fires(wrong, 1.0)
    assert trigger.fires(1.0, wrong)
    assert trigger.fires(wrong, wrong)


@given(st.floats(0.0, 1e6), st.floats(0.0, 1e6), st.floats(0.0, 1e6), st.booleans())
def test_a_larger_update_is_never_held_back_where_a_smaller_one_is_sent(
    threshold: float, norm: float, more: float, relative: bool
) -> None:
    trigger = EventTrigger(threshold=threshold, relative=relative)
    assert trigger.fires(norm + more, 3.0) or not trigger.fires(norm, 3.0)


@pytest.mark.parametrize("threshold", [-1.0, math.nan, math.inf, None, "1", True])
def test_what_is_no_threshold_is_refused(threshold: object) -> None:
    with pytest.raises(ConfigurationError, match="number of at least 0"):
        EventTrigger(threshold=threshold)  # type: ignore[arg-type]


# -- bad input -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"active_workers": 5}, "active_workers=5 of 4 workers: at most 4"),
        ({"active_workers": 0}, "active_workers=0; it must be an integer >= 1, or None"),
        ({"active_workers": 1.5}, r"active_workers=1\.5"),
        ({"max_staleness": -1}, "max_staleness=-1; it must be an integer >= 0, or None"),
        ({"max_staleness": True}, "max_staleness=True"),
        ({"on_stale": "wait"}, "needs max_staleness"),
        ({"on_stale": "hold"}, "'hold' is not one of 'drop', 'wait'"),
        ({"on_stale": "wait", "max_staleness": 2}, r"max_staleness=3 or more, active_workers=3 or fewer, or on_stale='drop'"),
        ({"on_stale": "wait", "max_staleness": 1, "active_workers": 3}, "max_staleness=2 or more, active_workers=2 or fewer"),
        ({"scale": 0.0}, r"scale=0\.0"),
        ({"scale": -1.0}, r"scale=-1\.0"),
        ({"scale": math.nan}, "scale=nan"),
        ({"scale": math.inf}, "scale=inf"),
        ({"scale": "1/n"}, "scale='1/n'"),
    ],
)
def test_options_that_cannot_work_are_refused_by_the_options_and_by_the_server(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ServerOptions(**options).check(N)
    with pytest.raises(ConfigurationError, match=message):
        ParameterServer(torch.zeros(D), workers=N, **options)


@pytest.mark.parametrize("active", range(1, N + 1))
def test_the_least_bound_that_the_message_proposes_is_accepted(active: int) -> None:
    ServerOptions(on_stale="wait", max_staleness=active - 1, active_workers=active).check(N)


def test_misuse_is_our_fault_and_changes_nothing() -> None:
    run = Run(3, active_workers=2, max_staleness=1, on_stale="wait")
    run.begin()
    run.push_and_ask(1)  # 2 pulls; 0 has one update to go, and 1 asks
    server = run.server
    before = (dict(server.in_flight), server.version, server.model.clone())
    assert not server.may_push(2)
    one = torch.ones(D, dtype=torch.float64)
    with pytest.raises(ProtocolError, match="Rank 1 pushes an update to a model that it has not pulled"):
        server.push(1, one)
    with pytest.raises(ProtocolError, match="Rank 2 pushes while an older update waits"):
        server.push(2, one)
    with pytest.raises(ProtocolError, match="Rank 1 pulls out of turn"):
        server.pull(1)
    for rank in range(3):
        with pytest.raises(ProtocolError, match=f"Rank {rank} asks the parameter server for a model twice"):
            server.queue(rank)
    assert (dict(server.in_flight), server.version) == before[:2]
    assert torch.equal(server.model, before[2])
