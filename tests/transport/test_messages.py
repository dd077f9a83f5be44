import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gossip.errors import PeerError
from lightning_gossip.transport import Kind, Message
from lightning_gossip.transport.messages import NAME, REPLY, VERSION, WORDS
from tests.transport.memory import MemoryNetwork

INT64 = st.integers(-(2**63), 2**63 - 1)
COUNT = st.integers(0, 2**63 - 1)
GOOD = Message(Kind.EXCHANGE, session=3, layout=5, step_us=7, value=1).words(run=11)


@given(kind=st.sampled_from(Kind), session=COUNT, layout=COUNT, step_us=st.integers(0, 10**14), value=COUNT, run=COUNT)
def test_a_message_survives_the_wire(kind: Kind, session: int, layout: int, step_us: int, value: int, run: int) -> None:
    message = Message(kind, session, layout, step_us, value, staleness=-2, adopts=1)
    words = message.words(run)
    assert len(words) == WORDS
    assert all(type(word) is int for word in words)
    assert Message.from_words(words, run) == message


def changed(place: int, word: int) -> list[int]:
    return [*GOOD[:place], word, *GOOD[place + 1 :]]


REASONS = {
    "nothing": ([], "0 words instead of 12"),
    "too few": (GOOD[:-1], "11 words"),
    "too many": ([*GOOD, 0], "13 words"),
    "zeros": ([0] * WORDS, "not a message of lightning_gossip"),
    "another version": (
        changed(0, NAME << 16 | VERSION + 1),
        f"version {VERSION + 1} of the message format instead of {VERSION}",
    ),
    "another run": (changed(1, 12), "of another run"),
    "no kind": (changed(2, 0), "kind 0 is not accepted"),
    "unknown kind": (changed(2, 99), "kind 99 is not accepted"),
    "negative session": (changed(3, -2), "session=-2 is not in"),
    "negative layout": (changed(4, -1), "layout=-1"),
    "a step of centuries": (changed(5, 10**18), "step_us=1000000000000000000"),
    "negative value": (changed(6, -1), "value=-1"),
    "staleness": (changed(7, -3), "staleness=-3"),
    "adopts": (changed(8, 2), "adopts=2"),
    "wait": (changed(9, -1), "wait_us=-1"),
    "room": (changed(11, 1), "the words that say nothing"),
}


@pytest.mark.parametrize("name", REASONS)
def test_malformed_words_are_refused_with_the_reason(name: str) -> None:
    words, reason = REASONS[name]
    with pytest.raises(ValueError, match=reason):
        Message.from_words(words, 11)


def test_an_answer_is_no_request_and_a_request_no_answer() -> None:
    with pytest.raises(ValueError, match="kind 1 is not accepted"):
        Message.from_words(GOOD, 11, REPLY)


@given(words=st.lists(INT64, min_size=WORDS - 1, max_size=WORDS + 1))
def test_random_words_are_no_message(words: list[int]) -> None:
    with pytest.raises(ValueError, match=r"words instead of|not a message|version"):
        Message.from_words(words)


def test_a_transport_refuses_counts_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    network = MemoryNetwork(3)
    transport = network.transport(0)
    wrong: list[tuple[int, Any]] = [(1, GOOD), (7, Message(Kind.SYNC).words()), (0, Message(Kind.SYNC).words()), (2, [1, 2, 3])]
    for letter in wrong:
        network.inbox[0].put(letter)
    network.inbox[0].put((2, Message(Kind.SYNC, 4).words()))
    assert transport.next_message() == (2, Message(Kind.SYNC, 4))
    assert transport.refused == 4
    for reason in ("of another run", "there are 3 workers", "that is this worker itself", "3 words instead of 12"):
        assert reason in caplog.text


def test_a_wrong_answer_is_no_answer() -> None:
    network = MemoryNetwork(2)
    transport = network.transport(0)
    network.replies[1, 0].put([5] * WORDS)
    network.replies[1, 0].put(Message(Kind.ACCEPT).words())
    assert transport.await_reply(1, 5.0) == Message(Kind.ACCEPT)
    network.replies[1, 0].put([5] * WORDS)
    with pytest.raises(PeerError, match="did not answer"):
        transport.await_reply(1, 0.05)


def test_refusals_are_logged_ever_more_rarely(caplog: pytest.LogCaptureFixture) -> None:
    transport = MemoryNetwork(2).transport(0)
    for _ in range(1000):
        transport.refuse(1, "it is wrong")
    assert transport.refused == 1000
    assert len(caplog.records) == 12  # five, and then 8, 16 … 512


def test_a_peer_error_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(PeerError("gone", rank=3, phase="reply", seconds=1.5)))
    assert (str(error), error.rank, error.phase, error.seconds) == ("gone", 3, "reply", 1.5)
