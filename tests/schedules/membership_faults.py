"""Faults put back into the protocols of membership, as small as a mistake would be; the tester has to find them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from typing_extensions import override

from lightning_gossip.algorithm.membership.monitor import Monitor
from lightning_gossip.algorithm.membership.news import Aborted, News
from lightning_gossip.algorithm.membership.rounds import LOOK, Rounds, _word
from lightning_gossip.algorithm.membership.store import Append, Count, Decide, Delete, Steps, Swap, Write
from lightning_gossip.algorithm.membership.worker_id import WorkerId

_SKIP = object()


def _with(steps: Steps[Any], change: Callable[[Any], Any]) -> Steps[Any]:
    """A protocol whose effects are changed on their way out; those that are skipped have no result."""
    result = None
    while True:
        try:
            effect = change(steps.send(result))
        except StopIteration as end:
            return end.value
        result = None if effect is _SKIP else (yield effect)


class GivesUp(Monitor):
    """Who waits to be admitted counts the time although members are there (an epoch may be long)."""

    @override
    def hears_a_member(self) -> bool:
        super().hears_a_member()
        return False


class WakesNobody(Monitor):
    """Who waits for a round is not told that there is news."""

    @override
    def tick(self) -> Steps[None]:
        return _with(super().tick(), lambda effect: _SKIP if isinstance(effect, Decide) and effect.value == LOOK else effect)


class OverwritesNews(Monitor):
    """News are written without a look at what others have written meanwhile."""

    @override
    def publish(self) -> Steps[None]:
        wanted = self._wanted()
        if self._read is not None and wanted != self.news:
            value = News(self.news.number + 1, wanted.failed, wanted.lost, wanted.aborted, wanted.joining).encode()
            yield Write(self._news_key, value)
            self._take(value)


class AbortsAllUses(Monitor):
    """An exception that has ended one use ends those after it, too."""

    @property
    @override
    def _aborted_by(self) -> Aborted | None:
        told = self.news.aborted[-1] if self.news.aborted else None
        return told if told is not None and told.by != self.me else None


class WaitsForTheLast(Rounds):
    """Only who arrives last ends a round."""

    @override
    def _conclude(self, *args: Any, **options: Any) -> Steps[bytes | None]:
        failed = any(map(self._health.has_failed, args[-1]))
        return None if failed else (yield from super()._conclude(*args, **options))


class WritesResultsTwice(Rounds):
    """A result is written over another one."""

    @override
    def _conclude(self, *args: Any, **options: Any) -> Steps[bytes | None]:
        steps, result = super()._conclude(*args, **options), None
        while True:
            try:
                effect = steps.send(result)
            except StopIteration as end:
                return end.value
            if isinstance(effect, Decide) and "/result/" in effect.key:
                yield Write(effect.key, effect.value)
                result = effect.value
            else:
                result = yield effect


class EndsByCount(Rounds):
    """A round is over when so many have come, whoever they are."""

    @override
    def hold(self, members: Sequence[WorkerId], value: bytes, payload: bytes | None = None) -> Steps[Any]:
        def change(effect: Any) -> Any:
            absent = (
                isinstance(effect, Append) and effect.value.endswith(b"-") and not effect.value.startswith(_word(self.me, b"-"))
            )
            return Count(f"{self._key(self.number - 1)}/arrived") if absent else effect

        return _with(super().hold(members, value, payload), change)


class ForgetsNothing(Rounds):
    """The keys of rounds stay."""

    @override
    def hold(self, members: Sequence[WorkerId], value: bytes, payload: bytes | None = None) -> Steps[Any]:
        return _with(super().hold(members, value, payload), lambda effect: _SKIP if isinstance(effect, Delete) else effect)


class ForgetsTooSoon(Rounds):
    """The keys of a round are deleted by who has read it, though others have not."""

    @override
    def hold(self, members: Sequence[WorkerId], value: bytes, payload: bytes | None = None) -> Steps[Any]:
        result = yield from super().hold(members, value, payload)
        for key in self._shared:
            yield Delete(key)
        return result


class PublishesOnce(Monitor):
    """Who was slower than another with its news does not try again."""

    @override
    def publish(self) -> Steps[None]:
        for effect in super().publish():
            assert isinstance(effect, Swap)
            yield effect
            self._found, self._abort = set(), None
            return


FAULTS: dict[str, dict[str, Any]] = {
    "gives up although a member is there": {"monitor": GivesUp},
    "wakes nobody who waits": {"monitor": WakesNobody},
    "writes news over others'": {"monitor": OverwritesNews},
    "publishes once": {"monitor": PublishesOnce},
    "ends all uses by one exception": {"monitor": AbortsAllUses},
    "waits for the last to arrive": {"rounds": WaitsForTheLast},
    "writes a result over another": {"rounds": WritesResultsTwice},
    "ends a round by the count alone": {"rounds": EndsByCount},
    "forgets nothing": {"rounds": ForgetsNothing},
    "forgets too soon": {"rounds": ForgetsTooSoon},
}
