"""Faults put back into the protocol of AD-PSGD, as small as it would be written by mistake; the tester has to find them."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from lightning_gossip.algorithm.adpsgd.protocol import (
    Answer,
    AwaitAnswer,
    GossipProtocol,
    Phase,
    Reply,
    Request,
    Steps,
    Verdict,
    Wait,
)
from lightning_gossip.errors import PeerError


def _with(steps: Steps, change: Any) -> Steps:
    """A generator whose effects are changed on their way out."""
    result = None
    while True:
        try:
            effect = steps.send(result)
        except StopIteration:
            return
        result = yield change(effect)


class AcceptsWhileBusy(GossipProtocol):
    """A worker that is asking answers as if it were free: two exchanges at a time."""

    @override
    def _answer(self, peer: int, request: Request) -> Steps:
        was_busy, self.busy = self.busy, False
        yield from super()._answer(peer, request)
        self.busy = self.busy or was_busy


class AnswersInSilence(GossipProtocol):
    """Who is queued is not told, so that its deadline runs while others are served."""

    @override
    def receive(self, peer: int, request: Request) -> Steps:
        for effect in super().receive(peer, request):
            if isinstance(effect, Reply) and effect.answer.verdict is not Verdict.QUEUED:
                yield effect


class QueueHasNoTime(GossipProtocol):
    """The deadline of who is queued is that of an answer, without the turns before it."""

    @override
    def initiate(self) -> Steps:
        def change(effect: Any) -> Any:
            return AwaitAnswer(effect.peer, self._peers.answer_s / 40) if isinstance(effect, AwaitAnswer) else effect

        return _with(super().initiate(), change)


class ClosesWhileBusy(GossipProtocol):
    """A session ends although an exchange is under way."""

    @override
    def drain(self) -> Steps:
        self.phase = Phase.CLOSED
        return
        yield


class StaysBusyAfterALoss(GossipProtocol):
    """Who loses an initiator stays busy with it."""

    @override
    def _answer(self, peer: int, request: Request) -> Steps:
        steps, result, lost = super()._answer(peer, request), None, False
        while True:
            try:
                effect = steps.send(result)
            except StopIteration:
                self.busy = self.busy or lost
                return
            result = yield effect
            lost = lost or isinstance(result, PeerError)


class WakesNobody(GossipProtocol):
    """Who waits for a request is not woken by one."""

    @override
    def respond(self) -> Steps:
        def change(effect: Any) -> Any:
            return Wait(effect.until_s, lambda: not self._hears) if isinstance(effect, Wait) else effect

        return _with(super().respond(), change)


class DrainsWithoutRefusing(GossipProtocol):
    """A worker that ends its session still accepts: its exchange ends after its drain."""

    @override
    def _answer(self, peer: int, request: Request) -> Steps:
        phase = self.phase
        if phase in (Phase.DRAINING, Phase.CLOSED):
            self.phase = Phase.OPEN
        steps = super()._answer(peer, request)
        effect = next(steps)
        self.phase = phase
        while True:
            result = yield effect
            try:
                effect = steps.send(result)
            except StopIteration:
                return


class TakesQueuedForRefused(GossipProtocol):
    """An initiator that is told to wait goes away, and the responder accepts it later."""

    @override
    def initiate(self) -> Steps:
        steps, result = super().initiate(), None
        while True:
            try:
                effect = steps.send(result)
            except StopIteration:
                return
            result = yield effect
            if isinstance(result, Answer) and result.verdict is Verdict.QUEUED:
                result = Answer(Verdict.REFUSED, result.session, result.layout)


FAULTS: dict[str, dict[str, Any]] = {
    "accepts while it asks": {"protocol": AcceptsWhileBusy},
    "does not tell who is queued": {"protocol": AnswersInSilence},
    "gives the queued the deadline of an answer": {"protocol": QueueHasNoTime},
    "closes a session while it is busy": {"protocol": ClosesWhileBusy},
    "accepts while it drains": {"protocol": DrainsWithoutRefusing},
    "stays busy when an initiator is lost": {"protocol": StaysBusyAfterALoss},
    "is not woken by a request": {"protocol": WakesNobody},
    "takes queued for refused": {"protocol": TakesQueuedForRefused},
    "takes an earlier connection's answer for the present one's": {"protocol": GossipProtocol, "numbered": False},
}
