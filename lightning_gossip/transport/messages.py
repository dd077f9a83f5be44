"""A message as integers on the wire, and what is asked of such integers before anything is done for them.

| word | what | accepted |
|---|---|---|
| 0 | "lgos" and the version of this format | equal |
| 1 | the run, drawn anew for each transport of a job | equal |
| 2 | kind | one of those of the lane that it came on |
| 3 | session | −1 and up |
| 4 | layout | 0 and up |
| 5 | step time in µs | up to ten years |
| 6 | value | 0 and up |
| 7 | staleness | −2 and up |
| 8 | adopts | 0, 1 |
| 9 | wait in µs | up to ten years |
| 10, 11 | room | 0 |

Nothing on the wire is unpickled, and no word says how much to allocate: sizes are those of the receiver's own model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import IntEnum

WORDS = 12
NAME = 0x6C676F73  # "lgos"
VERSION = 4
_VERSION_BITS = 16
_LONGEST_US = 10 * 365 * 86_400 * 10**6
_LARGEST = 2**63 - 1


class Kind(IntEnum):
    """Kind of a message."""

    EXCHANGE = 1  # "average with me"
    ACCEPT = 2  # answer: start sending
    REFUSE = 3  # answer: not now
    SYNC = 4  # everybody comes to a synchronisation point after the current step
    STOP = 5  # the listener may end
    PULL = 6  # to a parameter server: "send me the model"; an update comes first if the value, its forward passes, is not 0
    LEAVE = 7  # to a parameter server: "I come to a synchronisation point"; the same
    FAILED = 8  # to a parameter server, or its answer: the sender has failed, and sends nothing more
    QUEUED = 9  # answer: in an exchange with somebody else; ACCEPT or REFUSE follows when it is your turn


INBOX = frozenset({Kind.EXCHANGE, Kind.SYNC, Kind.STOP, Kind.PULL, Kind.LEAVE, Kind.FAILED})
REPLY = frozenset({Kind.ACCEPT, Kind.REFUSE, Kind.SYNC, Kind.QUEUED, Kind.FAILED})


@dataclass(frozen=True)
class Message:
    """A short message: plain integers, so that nothing on the wire is ever unpickled.

    Args:
        kind: what it is about.
        session: number of the gossip session (the stretch between two synchronisation points) that the sender is in.
        layout: fingerprint of the sender's published tensors; exchanges need equal ones.
        step_us: the sender's step time in microseconds, 0 if unknown.
        value: depends on the kind; of the answer to an EXCHANGE it is the request's.
        staleness: of the update that the receiver pushed last, from a parameter server; -1 if it was dropped as too stale or
            there is none to report, -2 if it was refused because it was not finite.
        adopts: 1 if the sender's model is not finite and it wants the receiver's in place of it.
        wait_us: of QUEUED: until the receiver's turn, in microseconds, at the longest.
    """

    kind: Kind
    session: int = 0
    layout: int = 0
    step_us: int = 0
    value: int = 0
    staleness: int = 0
    adopts: int = 0
    wait_us: int = 0

    def words(self, run: int = 0) -> list[int]:
        """The message as ``WORDS`` integers for the wire.

        Args:
            run: in [0, 2^63).
        """
        body = [int(getattr(self, field.name)) for field in fields(self)]
        return [NAME << _VERSION_BITS | VERSION, run, *body] + [0] * (WORDS - 2 - len(body))

    @classmethod
    def from_words(cls, words: Sequence[int], run: int = 0, kinds: frozenset[Kind] = INBOX | REPLY) -> Message:
        """The message that was received as integers.

        Args:
            words: 64 bits each.
            run: that this process takes part in.
            kinds: that are accepted.

        Raises:
            ValueError: with the reason to refuse it.
        """
        _check_header(words, run)
        kind = words[2]
        if kind not in kinds:
            raise ValueError(f"kind {kind} is not accepted here")
        message = cls(Kind(kind), *words[3 : 2 + len(fields(cls))])
        message._check()
        if any(words[2 + len(fields(cls)) :]):
            raise ValueError("the words that say nothing are not 0")
        return message

    def _check(self) -> None:
        limits = {
            "session": (-1, _LARGEST),
            "layout": (0, _LARGEST),
            "step_us": (0, _LONGEST_US),
            "value": (0, _LARGEST),
            "staleness": (-2, _LARGEST),
            "adopts": (0, 1),
            "wait_us": (0, _LONGEST_US),
        }
        for name, (lowest, highest) in limits.items():
            value = getattr(self, name)
            if not lowest <= value <= highest:
                raise ValueError(f"{name}={value} is not in [{lowest}, {highest}]")


def _check_header(words: Sequence[int], run: int) -> None:
    if len(words) != WORDS:
        raise ValueError(f"{len(words)} words instead of {WORDS}")
    name, version = words[0] >> _VERSION_BITS, words[0] & (1 << _VERSION_BITS) - 1
    if name != NAME:
        raise ValueError("it is not a message of lightning_gossip")
    if version != VERSION:
        raise ValueError(f"version {version} of the message format instead of {VERSION}: another version of lightning_gossip")
    if words[1] != run:
        raise ValueError("it is of another run")
