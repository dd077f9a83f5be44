"""What every transport promises, as scripts that each of three ranks runs at the same time."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable

import pytest
import torch

from lightning_gossip.errors import PeerError
from lightning_gossip.transport import Kind, Message, Transport

WORLD = 3
PATIENCE_S = 20.0  # far beyond what anything here takes: a machine may be busy
DEADLINE_S = 1.0

Property = Callable[[Transport], None]


def others(transport: Transport) -> list[int]:
    return [rank for rank in range(transport.world_size) if rank != transport.rank]


def vector(rank: int, number: int, length: int) -> torch.Tensor:
    return torch.arange(length, dtype=torch.float64) + 1000.0 * rank + 0.001 * number


def messages_arrive_intact_and_in_order_with_their_sender(transport: Transport) -> None:
    count = 5
    for number in range(count):
        for peer in others(transport):
            transport.post(peer, Message(Kind.SYNC, number, 2**62 + transport.rank, 10**9, number))
    received = defaultdict(list)
    for _ in range(count * len(others(transport))):
        sender, message = transport.next_message()
        received[sender].append(message)
    assert sorted(received) == others(transport)
    for sender, messages in received.items():
        expected = [Message(Kind.SYNC, number, 2**62 + sender, 10**9, number) for number in range(count)]
        assert messages == expected


def replies_of_different_peers_do_not_mix(transport: Transport) -> None:
    for asking in range(WORLD):
        if transport.rank == asking:
            for peer in ((asking + 2) % WORLD, (asking + 1) % WORLD):
                assert transport.await_reply(peer, PATIENCE_S) == Message(Kind.ACCEPT, 10 * asking + peer)
        else:
            transport.reply(asking, Message(Kind.ACCEPT, 10 * asking + transport.rank))


def two_vectors_swap_when_both_ends_start_at_once(transport: Transport) -> None:
    for low, high in ((0, 1), (1, 2), (0, 2)):
        if transport.rank in (low, high):
            peer = low + high - transport.rank
            mine, theirs = vector(transport.rank, 0, 1000), torch.zeros(1000, dtype=torch.float64)
            transport.swap(peer, mine, theirs).wait(PATIENCE_S)
            assert torch.equal(theirs, vector(peer, 0, 1000))
            assert torch.equal(mine, vector(transport.rank, 0, 1000))


def several_swaps_in_flight_keep_their_order(transport: Transport) -> None:
    lengths = (5, 100_000, 1, 300_000)
    for low, high in ((0, 1), (1, 2), (0, 2)):
        if transport.rank in (low, high):
            peer = low + high - transport.rank
            flying = []
            for number, length in enumerate(lengths):
                mine, theirs = vector(transport.rank, number, length), torch.zeros(length, dtype=torch.float64)
                flying.append((transport.swap(peer, mine, theirs), mine, theirs))
            for number, (pending, _, theirs) in enumerate(flying):
                pending.wait(PATIENCE_S)
                assert torch.equal(theirs, vector(peer, number, lengths[number]))


def a_swap_waits_for_the_end_that_starts_later(transport: Transport) -> None:
    if transport.rank == 2:
        return
    peer = 1 - transport.rank
    mine, theirs = vector(transport.rank, 3, 10), torch.zeros(10, dtype=torch.float64)
    if transport.rank == 0:
        pending = transport.swap(peer, mine, theirs)
        transport.reply(peer, Message(Kind.ACCEPT))
    else:
        transport.await_reply(peer, PATIENCE_S)
        pending = transport.swap(peer, mine, theirs)
    pending.wait(PATIENCE_S)
    assert torch.equal(theirs, vector(peer, 3, 10))


def a_vector_travels_one_way_and_keeps_its_order(transport: Transport) -> None:
    """Ranks 1 and 2 send two each to rank 0, which answers one."""
    if transport.rank == 0:
        for peer in (2, 1):
            for number in range(2):
                received = torch.zeros(50_000, dtype=torch.float64)
                transport.receive(peer, received).wait(PATIENCE_S)
                assert torch.equal(received, vector(peer, number, 50_000))
        answers = {peer: vector(0, peer, 7) for peer in (1, 2)}
        for pending in [transport.send(peer, answer) for peer, answer in answers.items()]:
            pending.wait(PATIENCE_S)
    else:
        sent = [vector(transport.rank, number, 50_000) for number in range(2)]
        pending = [transport.send(0, each) for each in sent]
        answer = torch.zeros(7, dtype=torch.float64)
        transport.receive(0, answer).wait(PATIENCE_S)
        assert torch.equal(answer, vector(0, transport.rank, 7))
        for each in pending:
            each.wait(PATIENCE_S)


def posting_does_not_wait_for_the_reader(transport: Transport) -> None:
    """Rank 1 reads only after the reply that rank 0 sends after posting."""
    if transport.rank == 0:
        for session in (4, 5):
            transport.post(1, Message(Kind.SYNC, session))
        transport.reply(1, Message(Kind.ACCEPT))
    elif transport.rank == 1:
        transport.await_reply(0, PATIENCE_S)
        assert [transport.next_message() for _ in range(2)] == [(0, Message(Kind.SYNC, s)) for s in (4, 5)]


def a_request_is_answered_by_the_peer_that_was_asked(transport: Transport) -> None:
    if transport.rank == 0:
        for peer in (1, 2, 1, 2):
            answer = transport.request(peer, Message(Kind.EXCHANGE, 3, step_us=peer), PATIENCE_S)
            assert answer == Message(Kind.REFUSE, 3, value=peer)
    else:
        for _ in range(2):
            assert transport.next_message() == (0, Message(Kind.EXCHANGE, 3, step_us=transport.rank))
            transport.reply(0, Message(Kind.REFUSE, 3, value=transport.rank))


def a_missing_reply_is_an_error_in_time_and_the_inbox_goes_on(transport: Transport) -> None:
    """The last one: over Gloo a time-out ends the lanes of the vectors and replies."""
    if transport.rank == 0:
        start_s = time.monotonic()
        with pytest.raises(PeerError) as caught:
            transport.await_reply(1, DEADLINE_S)
        waited_s = time.monotonic() - start_s
        assert DEADLINE_S * 0.9 <= waited_s <= 2 * DEADLINE_S
        assert (caught.value.rank, caught.value.phase) == (1, "reply")
        assert caught.value.seconds == pytest.approx(waited_s, abs=0.5)
        assert "ank 1" in str(caught.value)
        transport.post(1, Message(Kind.SYNC, 1))
        assert transport.next_message() == (1, Message(Kind.SYNC, 2))
    elif transport.rank == 1:
        assert transport.next_message() == (0, Message(Kind.SYNC, 1))  # waits across the time-out
        transport.post(0, Message(Kind.SYNC, 2))


def a_swap_that_nobody_answers_is_an_error_in_time(transport: Transport) -> None:
    if transport.rank == 0:
        start_s = time.monotonic()
        with pytest.raises(PeerError) as caught:
            transport.swap(2, torch.zeros(4), torch.zeros(4)).wait(DEADLINE_S)
        assert time.monotonic() - start_s <= 2 * DEADLINE_S
        assert (caught.value.rank, caught.value.phase) == (2, "exchange")
        assert caught.value.seconds is not None


PROPERTIES: tuple[Property, ...] = (
    messages_arrive_intact_and_in_order_with_their_sender,
    replies_of_different_peers_do_not_mix,
    two_vectors_swap_when_both_ends_start_at_once,
    several_swaps_in_flight_keep_their_order,
    a_swap_waits_for_the_end_that_starts_later,
    a_vector_travels_one_way_and_keeps_its_order,
    posting_does_not_wait_for_the_reader,
    a_request_is_answered_by_the_peer_that_was_asked,
)
DEADLINES: tuple[Property, ...] = (
    a_missing_reply_is_an_error_in_time_and_the_inbox_goes_on,
    a_swap_that_nobody_answers_is_an_error_in_time,
)
