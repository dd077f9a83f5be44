"""One worker's side of AD-PSGD's conversation: events in, effects out, in orders that real runs hardly show."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest

from lightning_gossip.algorithm.adpsgd.protocol import (
    Announce,
    Answer,
    Ask,
    Average,
    Averaged,
    AwaitAnswer,
    Effect,
    GossipProtocol,
    Phase,
    Probe,
    Reply,
    Request,
    Steps,
    Verdict,
    Wait,
)
from lightning_gossip.errors import ConfigurationError, PeerError, ProtocolError

ACCEPTED, REFUSED, QUEUED = Verdict.ACCEPTED, Verdict.REFUSED, Verdict.QUEUED
CLOSED = PeerError("closed", rank=1, closed=True)


class Peers:
    """Draws rank 1, or whom the test says; remembers what it is told."""

    start_share = 1.0
    deadline_s, answer_s, turn_s, longest_turn_s, drain_s, looks_again_s = 2.0, 4.0, 7.0, 10.0, 30.0, 1.0

    def __init__(self) -> None:
        self.drawn: int | None = 1
        self.told: list[tuple[str, int]] = []
        self.suspects: list[int] = []
        self.missing: dict[int, float] = {}

    def missing_s(self, peer: int) -> float:
        return self.missing.get(peer, 0.0)

    def put_off(self, peer: int, seconds: float) -> None:
        self.told.append((f"put off {seconds:g}", peer))

    def pick(self) -> int | None:
        return self.drawn

    def suspected(self) -> list[int]:
        return self.suspects

    def took(self, peer: int, seconds: float, *, waited_s: float = 0.0) -> None:
        self.told.append(("took", peer) if not waited_s else (f"took {seconds:g} after {waited_s:g}", peer))

    def gave_up(self, peer: int, seconds: float) -> None:
        self.told.append((f"gave up after {seconds:g}", peer))

    def exchange_failed(self, peer: int, error: PeerError) -> None:
        self.told.append(("lost", peer))


class Counts:
    refused = 0


class Worker:
    """Rank 0 of four, with a clock that the test moves."""

    def __init__(self, *, opens: bool = True) -> None:
        self.at_s = 0.0
        self.peers, self.counts = Peers(), Counts()
        self.protocol = GossipProtocol(0, 4, self.peers, self.counts, now_s=lambda: self.at_s, generator=random.Random(0))
        if opens:
            self.protocol.open(1, layout=5)

    def answer(self, verdict: Verdict, **options: Any) -> Answer:
        return Answer(verdict, **{"session": 1, "layout": 5, **options})

    def receive(self, peer: int, **options: Any) -> list[Effect]:
        """Which effects a request has; each succeeds."""
        return list(self.protocol.receive(peer, Request(**{"session": 1, "layout": 5, **options})))


def resumed(steps: Steps, result: Any = None) -> Effect | None:
    try:
        return steps.send(result)
    except StopIteration:
        return None


def verdict_of(effect: Effect | None) -> Verdict:
    assert isinstance(effect, Reply)
    return effect.answer.verdict


# -- the initiator ---------------------------------------------------------------------------------------------------------


def test_an_exchange_from_its_start_to_its_end() -> None:
    worker = Worker()
    steps = worker.protocol.initiate()
    assert resumed(steps) == Ask(1, Request(session=1, layout=5), 4.0)
    assert worker.protocol.busy
    assert resumed(steps, worker.answer(ACCEPTED)) == Average(1, False, 2.0)
    waits = resumed(steps, Averaged())
    assert isinstance(waits, Wait)
    assert not worker.protocol.busy
    assert worker.peers.told == [("took", 1)]
    assert not waits.ready()  # one exchange a session while no step time is known
    worker.protocol.stepped(0.5)
    assert waits.ready()
    again = resumed(steps)
    assert isinstance(again, Wait)
    assert again.until_s == 0.5
    worker.at_s = 0.5
    assert isinstance(resumed(steps), Ask)


@pytest.mark.parametrize("share", [1.0, 0.5], ids=["the others answer", "the others start as many"])
@pytest.mark.parametrize("rate", [1.0, 2.0, 0.5])
def test_exchanges_start_at_the_pace_of_the_steps(rate: float, share: float) -> None:
    """Also when exchanges take time, and one that was refused is made up for without moving the others."""
    worker = Worker()
    worker.protocol.exchanges_per_step, worker.peers.start_share = rate, share
    worker.protocol.stepped(0.25)
    steps, starts_s = worker.protocol.initiate(), []
    effect = resumed(steps)
    for number in range(60):
        assert isinstance(effect, Ask)
        starts_s.append(worker.at_s)
        worker.at_s += 0.03 * (number % 4)
        assert isinstance(resumed(steps, worker.answer(ACCEPTED)), Average)
        worker.at_s += 0.01
        waits = resumed(steps, Averaged())
        while isinstance(waits, Wait):
            assert waits.until_s > worker.at_s
            worker.at_s = waits.until_s
            waits = resumed(steps)
        effect = waits
    intervals = {round(later - earlier, 9) for earlier, later in itertools.pairwise(starts_s)}
    assert intervals == {0.25 / (rate * share)}


def test_the_deadline_of_who_is_queued_begins_when_it_is_its_turn_and_is_bounded() -> None:
    for told_s, waits_s in ((3.0, 3.0), (1e9, 4 * 10.0)):
        worker = Worker()
        steps = worker.protocol.initiate()
        resumed(steps)
        assert resumed(steps, worker.answer(QUEUED, wait_s=told_s)) == AwaitAnswer(1, waits_s + 4.0)
        assert resumed(steps, worker.answer(QUEUED, wait_s=told_s)) == AwaitAnswer(1, waits_s + 4.0)
        assert isinstance(resumed(steps, worker.answer(ACCEPTED)), Average)


def test_who_is_refused_draws_again_after_a_wait_that_grows() -> None:
    worker = Worker()
    steps = worker.protocol.initiate()
    assert isinstance(resumed(steps), Ask)
    waits_s = []
    for refusals in range(1, 41):
        effect = resumed(steps, worker.answer(REFUSED))
        assert isinstance(effect, Wait)
        assert (worker.protocol.busy, worker.counts.refused) == (False, refusals)
        waits_s.append(effect.until_s - worker.at_s)
        worker.at_s = effect.until_s
        assert isinstance(resumed(steps), Ask)
    assert all(0.0 <= wait_s <= min(0.05, 0.0005 * 2**number) for number, wait_s in enumerate(waits_s, 1))
    assert max(waits_s) > 0.03
    resumed(steps, worker.answer(ACCEPTED))
    resumed(steps, Averaged())
    worker.protocol.stepped(1.0)
    worker.at_s += 1.0
    resumed(steps)
    effect = resumed(steps, worker.answer(REFUSED))
    assert isinstance(effect, Wait)
    assert effect.until_s - worker.at_s <= 0.001  # the first in a row again


@pytest.mark.parametrize("before", [[], [QUEUED]])
def test_a_peer_that_is_lost_while_it_is_asked_leaves_the_worker_free(before: list[Verdict]) -> None:
    worker = Worker()
    steps = worker.protocol.initiate()
    resumed(steps)
    for verdict in before:
        resumed(steps, worker.answer(verdict))
    assert isinstance(resumed(steps, CLOSED), Ask)  # of the next exchange, due at once
    assert worker.peers.told == [("lost", 1)]
    worker.peers.drawn = None
    assert isinstance(resumed(steps, CLOSED), Wait)
    assert not worker.protocol.busy


def test_an_exchange_that_is_lost_leaves_the_worker_free() -> None:
    worker = Worker()
    steps = worker.protocol.initiate()
    resumed(steps)
    resumed(steps, worker.answer(ACCEPTED))
    assert isinstance(resumed(steps, CLOSED), Wait)
    assert (worker.peers.told, worker.protocol.busy) == ([("lost", 1)], False)


def test_an_error_in_an_effect_comes_out_and_leaves_the_worker_free() -> None:
    for results in ([], ["accepted"]):
        worker = Worker()
        steps = worker.protocol.initiate()
        resumed(steps)
        for _ in results:
            resumed(steps, worker.answer(ACCEPTED))
        with pytest.raises(MemoryError):
            steps.throw(MemoryError())
        assert not worker.protocol.busy


def test_nobody_to_exchange_with_is_looked_for_again_and_suspects_are_probed_now_and_then() -> None:
    worker = Worker()
    worker.peers.drawn, worker.peers.suspects = None, [2, 3]
    steps, probes, effect = worker.protocol.initiate(), 0, None
    for _ in range(100):
        effect = resumed(steps)
        if isinstance(effect, Probe):
            probes += 1
        else:
            assert isinstance(effect, Wait)
            worker.protocol.stepped(1.0)  # each step wakes it
            worker.at_s += 0.05
    assert 2 * 7 <= probes <= 2 * 10  # of two peers, each half second
    assert not worker.protocol.busy


def test_a_connection_that_a_probe_finds_closed_is_told() -> None:
    worker = Worker()
    worker.peers.drawn, worker.peers.suspects = None, [2]
    steps = worker.protocol.initiate()
    assert resumed(steps) == Probe(2)
    resumed(steps, CLOSED)
    assert worker.peers.told == [("lost", 2)]


def test_no_exchange_is_due_at_rate_0_or_for_one_that_only_answers() -> None:
    for attribute, owner in (("exchanges_per_step", "protocol"), ("start_share", "peers")):
        worker = Worker()
        setattr(getattr(worker, owner), attribute, 0.0)
        worker.protocol.stepped(0.1)
        worker.at_s = 100.0
        effect = resumed(worker.protocol.initiate())
        assert isinstance(effect, Wait)
        assert not effect.ready()


# -- the responder ---------------------------------------------------------------------------------------------------------


def test_requests_are_answered_in_their_order_and_who_waits_is_told_how_long() -> None:
    worker = Worker()
    steps = worker.protocol.respond()
    waits = resumed(steps)
    assert isinstance(waits, Wait)
    assert waits.until_s == math.inf
    assert worker.receive(3) == []  # nobody is ahead
    assert waits.ready()
    first = resumed(steps)
    assert isinstance(first, Reply)
    assert (first.peer, first.answer.verdict) == (3, ACCEPTED)
    told = [worker.receive(peer, ticket=peer) for peer in (1, 2)]
    assert [(effect.answer.verdict, effect.answer.wait_s, effect.answer.ticket) for (effect,) in told] == [  # type: ignore[union-attr]
        (QUEUED, 7.0, 1),
        (QUEUED, 14.0, 2),
    ]
    (again,) = worker.receive(1, ticket=9)  # a later one takes the place
    assert again.answer.wait_s == 7.0  # type: ignore[union-attr]
    assert resumed(steps) == Average(3, False, 2.0)
    assert isinstance(resumed(steps, Averaged()), Wait)
    second = resumed(steps)
    assert isinstance(second, Reply)
    assert (second.peer, second.answer.ticket) == (1, 9)


def test_a_worker_that_asks_refuses_at_once_so_waits_form_no_cycle() -> None:
    worker = Worker()
    asks, answers = worker.protocol.initiate(), worker.protocol.respond()
    resumed(answers)
    assert isinstance(resumed(asks), Ask)
    worker.receive(2)
    assert verdict_of(resumed(answers)) is REFUSED
    assert isinstance(resumed(answers), Wait)
    assert worker.protocol.busy  # with its own


@pytest.mark.parametrize(
    ("phase", "request_"),
    [("closed", {}), ("open", {"session": 2}), ("draining", {}), ("stopped", {}), ("failed", {})],
)
def test_what_is_refused(phase: str, request_: dict[str, int]) -> None:
    worker = Worker(opens=phase != "closed")
    if phase == "draining":
        resumed(worker.protocol.drain())
    elif phase == "stopped":
        worker.protocol.stop()
    elif phase == "failed":
        worker.protocol.fail(MemoryError())
    steps = worker.protocol.respond()
    resumed(steps)
    worker.receive(2, **request_)
    assert verdict_of(resumed(steps)) is REFUSED
    assert not worker.protocol.busy


def test_who_asks_over_a_slow_link_for_which_there_is_no_time_is_told_how_long() -> None:
    worker = Worker()
    worker.peers.missing[2] = 7.0
    steps = worker.protocol.respond()
    resumed(steps)
    worker.receive(2)
    reply = resumed(steps)
    assert isinstance(reply, Reply)
    assert (reply.answer.verdict, reply.answer.wait_s) == (REFUSED, 7.0)
    resumed(steps)
    worker.receive(2, adopts=True)  # it has no model to go on with
    assert verdict_of(resumed(steps)) is ACCEPTED


def test_who_was_told_how_long_draws_another_and_the_wait_for_an_answer_is_part_of_an_exchange() -> None:
    worker = Worker()
    steps = worker.protocol.initiate()
    assert isinstance(resumed(steps), Ask)
    resumed(steps, worker.answer(REFUSED, wait_s=7.0))
    assert worker.peers.told == [("put off 7", 1)]
    worker.at_s, worker.peers.drawn = 1.0, 3
    assert resumed(steps) == Ask(3, Request(session=1, layout=5), 4.0)
    worker.at_s = 3.0
    resumed(steps, worker.answer(ACCEPTED))
    worker.at_s = 4.5
    resumed(steps, Averaged())
    assert worker.peers.told[1:] == [("took 1.5 after 2", 3)]


def test_the_time_of_an_exchange_that_is_given_up_counts() -> None:
    worker = Worker()
    steps = worker.protocol.initiate()
    resumed(steps)
    worker.at_s = 1.0
    resumed(steps, worker.answer(ACCEPTED))
    worker.at_s = 3.0
    resumed(steps, PeerError("slow", rank=1, phase="exchange", timed_out=True))
    assert worker.peers.told == [("gave up after 3", 1), ("lost", 1)]


def test_what_waits_is_answered_and_what_comes_later_refused_when_no_request_will_come() -> None:
    worker = Worker()
    steps = worker.protocol.respond()
    waits = resumed(steps)
    worker.receive(1)
    worker.protocol.hears_no_more()
    assert isinstance(waits, Wait)
    assert waits.ready()
    assert verdict_of(resumed(steps)) is ACCEPTED
    resumed(steps)
    assert isinstance(resumed(steps, Averaged()), Wait)
    assert resumed(steps) is None
    worker.protocol.stop()
    assert [verdict_of(effect) for effect in worker.receive(2)] == [REFUSED]  # by the listener itself


@pytest.mark.parametrize("results", [[CLOSED], [None, CLOSED]])
def test_an_initiator_that_is_lost_leaves_the_responder_free_for_the_next(results: list[Any]) -> None:
    worker = Worker()
    steps = worker.protocol.respond()
    resumed(steps)
    worker.receive(1)
    resumed(steps)
    for result in results:
        effect = resumed(steps, result)
    assert isinstance(effect, Wait)
    assert (worker.protocol.busy, worker.peers.told) == (False, [("lost", 1)])
    worker.receive(2)
    assert verdict_of(resumed(steps)) is ACCEPTED


def test_who_cannot_be_told_to_wait_does_not_wait() -> None:
    worker = Worker()
    steps = worker.protocol.respond()
    resumed(steps)
    worker.receive(1)
    resumed(steps)
    told = worker.protocol.receive(2, Request(1, 5))
    assert verdict_of(resumed(told)) is QUEUED
    assert resumed(told, CLOSED) is None
    resumed(steps)
    waits = resumed(steps, Averaged())
    assert isinstance(waits, Wait)
    assert not waits.ready()


# -- models that are not finite --------------------------------------------------------------------------------------------


def test_an_ill_worker_says_so_and_a_healthy_one_gives_its_model() -> None:
    worker = Worker()
    steps = worker.protocol.initiate()
    resumed(steps)
    resumed(steps, worker.answer(ACCEPTED))
    resumed(steps, Averaged(adopts=True))
    worker.protocol.stepped(1.0)
    worker.at_s = 1.0
    asks = resumed(steps)
    assert isinstance(asks, Ask)
    assert asks.request.adopts
    answers = worker.protocol.respond()
    resumed(answers)
    resumed(steps, worker.answer(REFUSED))
    worker.receive(2, adopts=True)
    assert verdict_of(resumed(answers)) is REFUSED  # nobody has a model to give
    worker.protocol.adopts = False
    resumed(answers)
    worker.receive(2, adopts=True)
    assert verdict_of(resumed(answers)) is ACCEPTED
    assert resumed(answers) == Average(2, True, 2.0)


# -- sessions --------------------------------------------------------------------------------------------------------------


def test_other_tensors_are_an_error_at_both_ends_and_only_in_one_session() -> None:
    worker = Worker()
    steps = worker.protocol.initiate()
    resumed(steps)
    resumed(steps, worker.answer(REFUSED, session=0, layout=9))  # has not opened yet
    worker.at_s = 1.0
    resumed(steps)
    with pytest.raises(ConfigurationError, match="Rank 1 publishes other tensors than rank 0"):
        steps.send(worker.answer(REFUSED, layout=9))
    answers = worker.protocol.respond()
    resumed(answers)
    worker.receive(2, layout=9)
    assert verdict_of(resumed(answers)) is REFUSED
    with pytest.raises(ConfigurationError, match="Rank 2 publishes other tensors than rank 0"):
        answers.send(None)


def test_a_drain_waits_for_the_exchange_under_way() -> None:
    worker = Worker()
    steps, drain = worker.protocol.initiate(), worker.protocol.drain()
    resumed(steps)
    waits = resumed(drain)
    assert isinstance(waits, Wait)
    assert (waits.ready(), waits.until_s) == (False, 1.0)
    resumed(steps, worker.answer(ACCEPTED))
    assert not waits.ready()
    resumed(steps, Averaged())
    assert waits.ready()
    assert resumed(drain) is None
    assert worker.protocol.phase is Phase.CLOSED
    worker.protocol.open(2, layout=5)


def test_a_drain_in_vain_is_an_error_and_one_after_a_failure_is_over() -> None:
    worker = Worker()
    steps, drain = worker.protocol.initiate(), worker.protocol.drain()
    resumed(steps)
    for second in range(34):
        worker.at_s = float(second)
        assert isinstance(resumed(drain), Wait)
    with pytest.raises(PeerError, match="did not end within 34 s"):  # the deadline of the answer, and then that of the drain
        drain.send(None)
    worker.protocol.fail(MemoryError())
    assert resumed(worker.protocol.drain()) is None


def test_a_worker_that_was_stopped_while_it_drained_waits_for_what_has_come_meanwhile() -> None:
    worker = Worker()
    steps, drain = worker.protocol.initiate(), worker.protocol.drain()
    resumed(steps)
    resumed(drain)
    worker.at_s = 100.0
    assert isinstance(resumed(drain), Wait)
    resumed(steps, CLOSED)
    assert resumed(drain) is None


def test_a_drain_waits_as_long_as_a_request_may_be_queued() -> None:
    worker = Worker()
    steps, drain = worker.protocol.initiate(), worker.protocol.drain()
    resumed(steps)
    resumed(drain)
    resumed(steps, worker.answer(QUEUED, wait_s=35.0))
    for second in range(1, 35 + 4 + 30):
        worker.at_s = float(second)
        assert isinstance(resumed(drain), Wait)
    resumed(steps, worker.answer(REFUSED))
    assert resumed(drain) is None


def test_a_session_opens_only_when_the_last_one_is_closed() -> None:
    worker = Worker()
    with pytest.raises(ProtocolError, match="while the gossip is open"):
        worker.protocol.open(2, layout=5)
    assert worker.protocol.stop()
    assert not worker.protocol.stop()
    with pytest.raises(ProtocolError, match="while the gossip is stopped"):
        worker.protocol.open(2, layout=5)


def test_a_sync_request_counts_in_its_session_also_before_that_begins() -> None:
    worker = Worker()
    assert [effect for effect in worker.protocol.request_sync()] == [Announce(peer, 1) for peer in (1, 2, 3)]  # noqa: C416
    assert worker.protocol.is_sync_requested
    worker.protocol.sync_requested(2)
    worker.protocol.sync_requested(0)
    for session, expected in ((2, True), (3, False)):
        list(itertools.chain(worker.protocol.drain()))
        worker.protocol.open(session, layout=5)
        assert worker.protocol.is_sync_requested is expected
    for number in range(100):
        worker.protocol.sync_requested(10 + number)
    assert len(worker.protocol._sync_requests) <= 8  # whatever is sent


def test_only_the_first_failure_is_kept_and_none_after_the_end() -> None:
    worker = Worker()
    first = MemoryError()
    worker.protocol.fail(first)
    worker.protocol.fail(KeyError())
    assert worker.protocol.failure is first
    assert worker.protocol.has_ended
    stopped = Worker()
    stopped.protocol.stop()
    stopped.protocol.fail(first)
    assert stopped.protocol.failure is None
