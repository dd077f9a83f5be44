import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gossip.errors import PeerError
from lightning_gossip.transport import Kind, Message
from lightning_gossip.transport.base import MAGIC, WORDS

INT64 = st.integers(-(2**63), 2**63 - 1)


@given(kind=st.sampled_from(Kind), session=INT64, layout=INT64, step_us=INT64, value=INT64)
def test_a_message_survives_the_wire(kind: Kind, session: int, layout: int, step_us: int, value: int) -> None:
    message = Message(kind, session, layout, step_us, value)
    words = message.words()
    assert len(words) == WORDS
    assert all(type(word) is int for word in words)
    assert Message.from_words(words) == message


@pytest.mark.parametrize(
    "words",
    [
        [],
        [0] * WORDS,
        [MAGIC] * (WORDS - 1),
        [MAGIC, 1] + [0] * (WORDS - 1),
        [MAGIC + 1, 1] + [0] * (WORDS - 2),
        [MAGIC, 99] + [0] * (WORDS - 2),
        [MAGIC, 0] + [0] * (WORDS - 2),
    ],
)
def test_malformed_words_are_refused(words: list[int]) -> None:
    with pytest.raises(ValueError, match=r"not a message|not a valid Kind"):
        Message.from_words(words)


def test_a_peer_error_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(PeerError("gone", rank=3, phase="reply", seconds=1.5)))
    assert (str(error), error.rank, error.phase, error.seconds) == ("gone", 3, "reply", 1.5)
