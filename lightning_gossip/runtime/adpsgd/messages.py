"""Requests and answers of the gossip protocol as messages on the wire, and back. Times are whole microseconds there."""

from __future__ import annotations

from lightning_gossip.algorithm.adpsgd.protocol import Answer, Request, Verdict
from lightning_gossip.transport.messages import Kind, Message

_KINDS = {Verdict.ACCEPTED: Kind.ACCEPT, Verdict.REFUSED: Kind.REFUSE, Verdict.QUEUED: Kind.QUEUED}
_VERDICTS = {kind: verdict for verdict, kind in _KINDS.items()}


def request_to_wire(request: Request) -> Message:
    """A request as a message."""
    return Message(
        Kind.EXCHANGE,
        request.session,
        request.layout,
        _us(request.step_s),
        value=request.ticket,
        adopts=int(request.adopts),
    )


def request_of(message: Message) -> Request:
    """The request that a message of the kind EXCHANGE is."""
    return Request(message.session, message.layout, message.step_us * 1e-6, bool(message.adopts), message.value)


def answer_to_wire(answer: Answer) -> Message:
    """An answer as a message."""
    return Message(
        _KINDS[answer.verdict],
        answer.session,
        answer.layout,
        _us(answer.step_s),
        value=answer.ticket,
        adopts=int(answer.adopts),
        wait_us=_us(answer.wait_s),
    )


def answer_of(message: Message) -> Answer:
    """The answer that a message of the lane of replies is."""
    return Answer(
        _VERDICTS.get(message.kind, Verdict.REFUSED),
        message.session,
        message.layout,
        message.step_us * 1e-6,
        bool(message.adopts),
        message.value,
        message.wait_us * 1e-6,
    )


def _us(seconds: float) -> int:
    return int(seconds * 1e6)
