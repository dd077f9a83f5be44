r"""What workers do when the store of the job is lost: they agree on the next one, and bring what they know there.

Each worker keeps a store in reserve. On the loss of the job's store its workers meet at the first of these that they reach, in
the order of their initial ranks, and go on with it if they are enough (:mod:`.quorum`). This is the change of views of
Viewstamped Replication (Oki and Liskov, PODC 1988; Liskov and Cowling, MIT-CSAIL-TR-2012-021), with a store in the place of a
primary: a *view* is the time of one store, rounds are the operations, and the result that was read last is the log.

Views are numbered: 0 is that of the store which the job begins with, and view c · 2²⁰ + r + 1 that of the c-th time in which
workers go to the store of initial rank r. A worker that has registered for a view never takes part in an earlier one. So of two
stores that believe to be the job's, one misses so many of its workers that it ends no round any more.

| key in the store that a worker keeps | written by | says |
|---|---|---|
| ``where`` | its owner | the view that the owner is in, and where its store is |
| ``seeks`` | its owner | the view that the owner waits for, and where |
| ``rests`` | its owner, and whoever calls it | that it rests, the k-th time, and which view it is bound to; or is awake |
| ``rests/<k>``, ``rests/<k>/result`` | its owner | what it knows, and the result of its last round |
| ``<view>/…`` | all that meet there (:mod:`.view_change`) | what they know, and how the view begins |

| event | effects | then |
|---|---|---|
| an operation of the store fails | Leave | to the next worker's store |
| so many are silent that the others may not exclude them | Leave | ″: the network is cut, perhaps |
| nobody listens at a worker's store, its host answers | | that worker's process has ended |
| nothing answers | | to the next one |
| its owner is in a later view than this worker was | Enter, Adopt | goes on there, or learns that it was excluded |
| its owner is in a later view, whose store is lost, too | | to the owner's, for a view after that one |
| none of these | | meets the others there, for a view of its own (:mod:`.view_change`) |
| the view has opened | Adopt, and bring news, members and incarnations | goes on; excluded if it was too late |
| it has not, and nobody comes any more | | to the next one; after a while the end |
| it has not, and others have excluded this worker in the view that it has left | Adopt | as another one, under a new identity |
| the time is over, and some worker still is in an earlier view | Adopt | ″ |

A worker that **rests** between two uses of a Trainer runs no thread here, and notices no loss. The others may need it: perhaps
it has acted by a result that they have not read, and without it they may be too few. So before it rests it writes what it would
say at a meeting into the store that it keeps, and others register for it. By the same operation that finds it resting they bind
it to their view: when it wakes it takes part in no earlier one. In the next store it rests, too, until it comes.

Where ranks are **islands** each rank is a member, and goes from store to store for itself, since each says its own values in
rounds. But only the first rank of each keeps a store that may become the job's: a store that is lost takes its island with it,
so the next one is another island's. Islands are counted whole (:mod:`.quorum`), and a rank whose island has lost one, or that
was excluded, looks no further: it ends, and its island comes back whole.

What a view begins with: the members by the latest result that somebody of the quorum has read; all who have not registered have
failed; that result. If somebody has acted by it, it is settled; else those that wait for it settle it anew. A round without a
result is held once more.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from typing import ClassVar

from lightning_gossip.algorithm.islands.places import Islands
from lightning_gossip.algorithm.membership.joining import admitters_lost
from lightning_gossip.algorithm.membership.monitor import Monitor, hosts_key
from lightning_gossip.algorithm.membership.news import News
from lightning_gossip.algorithm.membership.quorum import has_quorum, with_mates
from lightning_gossip.algorithm.membership.rounds import Known, Rounds, no_quorum
from lightning_gossip.algorithm.membership.store import (
    Adopt,
    AtOwn,
    Decide,
    Encode,
    Enter,
    Leave,
    Pause,
    Publish,
    Reached,
    Read,
    Restore,
    Seek,
    Steps,
    StoreLostError,
    Swap,
    Write,
)
from lightning_gossip.algorithm.membership.view_change import LOOK_S, Contact, ViewChange
from lightning_gossip.algorithm.membership.whereabouts import AWAKE, RESTS, Rest
from lightning_gossip.algorithm.membership.worker_id import WorkerId

_VIEWS = 1 << 20  # more than there are workers
_PATIENCE = 4  # times the silence after which a worker has failed: then one without a quorum ends


class Failover:
    """The stores of one worker, one after the other. :meth:`tick` is a protocol of the monitor's thread.

    Args:
        prefix: of the job's keys.
        monitor: of this worker.
        rounds: of this worker.
        now_s: the clock, in seconds.
        silent_s: how long a worker may be silent before it has failed, in seconds.
        least: how many workers are enough, if the user has said so.
        islands: how ranks are islands; None where each is a worker.
        view: that this worker begins in.
    """

    view_change: ClassVar[type[ViewChange]] = ViewChange  # what this worker does where workers meet

    def __init__(
        self,
        prefix: str,
        monitor: Monitor,
        rounds: Rounds,
        now_s: Callable[[], float],
        *,
        silent_s: float,
        least: int | None = None,
        islands: Islands | None = None,
        view: int = 0,
    ) -> None:
        self._prefix = prefix
        self._monitor = monitor
        self._rounds = rounds
        self._now_s = now_s
        self._silent_s = silent_s
        self._least = least
        self._islands = islands
        self._contact = Contact(monitor, now_s)
        self._change = self.view_change(
            prefix, monitor, rounds, self._contact, now_s, silent_s=silent_s, least=least, islands=islands, view=view
        )
        self._lost = False  # as the training thread has found out, or while this worker looks for the next store
        self._rests = 0  # how often it has rested
        self._called_to: tuple[int, str] | None = None  # where it is registered, and has rested since
        self._lies_down = False
        self._has_looked = False
        self._give_up_s = 0.0  # when this worker looks no further
        self._left_alone_in: set[int] = set()  # views in which it was outside, and has heard no member since the last one

    @property
    def view(self) -> int:
        """The view that this worker is in."""
        return self._change.view

    @property
    def promised(self) -> int:
        """The first view that this worker may still take part in, under its present identity."""
        return self._change.promised

    @property
    def stopped(self) -> bool:
        """Whether no heartbeats are to be sent any more; set by the driver."""
        return self._change.stopped

    @stopped.setter
    def stopped(self, stopped: bool) -> None:
        self._change.stopped = stopped

    def lose(self, moves: int) -> None:
        """Note that another thread has lost the store that this worker had after so many moves."""
        self._lost |= moves == self._rounds.moves

    def tick(self) -> Steps[None]:
        """A tick of the monitor; if the store is lost, all the way to the next one.

        Raises:
            PeerError: if there is none with a quorum.
            StoreLostError: if the workers have not met yet, and so do not know each other.
        """
        try:
            if self._lost:
                raise StoreLostError
            began_s, was_outside = self._now_s(), self._monitor.is_outside
            if not self._has_looked and was_outside:
                self._contact.last_s = began_s  # it may have taken long from its first answer to here
            self._has_looked = True
            yield from self._monitor.tick(self._may_go_on, self.view)
            if not was_outside or self._monitor.hears_a_member():
                self._contact.last_s = began_s
                self._left_alone_in.clear()
            self._contact.keep()
            if self._monitor.is_abandoned:
                yield from self._find()  # perhaps they go on elsewhere
        except StoreLostError:
            if not self._rounds.agreed and not self._monitor.is_outside:
                raise
            yield from self._find()

    def _may_go_on(self, present: Collection[WorkerId]) -> bool:
        """Whether these may exclude the other members."""
        agreed = self._rounds.agreed
        ended = self._monitor.ended()
        return not agreed or has_quorum(present, agreed, ended, at_store=True, least=self._least, islands=self._islands)

    # -- between two uses of a Trainer -------------------------------------------------------------------------------

    def lie_down(self) -> Steps[None]:
        """Say that this worker rests, and in the store that it keeps what it knows: others register for it then."""
        if not self._lost:
            try:
                yield from self._monitor.send()
                yield from self._monitor.publish()
            except StoreLostError:
                self._lost = True
        if self._lost:
            yield from self._contact.probe(self._rounds.agreed)  # of later ends nobody knows whether they had gone on
        if self._lies_down or not self._rounds.agreed or self._monitor.is_outside or self._monitor.has_lost_island:
            return
        self._rests += 1
        rests_here = not self._lost and self._monitor.says_in_time_that_it_rests(self._contact.last_s)
        mine = self._change.registration()._replace(heartbeat=self._monitor.said_last(), rests_here=rests_here)
        if result := self._rounds.known.result:
            yield AtOwn(Write(f"rests/{self._rests}/result", result))
        yield AtOwn(Write(f"rests/{self._rests}", (yield Encode(mine))))
        if not self.stopped:
            return  # it has woken meanwhile
        yield AtOwn(Write(RESTS, Rest(self._rests, self._change.promised, self._change.waits_at).encode()))
        self._lies_down = True

    def wake(self) -> Steps[None]:
        """Say there that this worker is awake, before it says anything else; if others have called it, it leaves the store."""
        if not self._lies_down:
            return
        self._lies_down = False
        told: bytes = yield AtOwn(Read(RESTS))
        while (stands := (yield AtOwn(Swap(RESTS, told, AWAKE)))) != AWAKE:
            told = stands
        _, view, address = Rest.decode(told)
        self._contact.note_in_time()
        if view > self.view:
            self._change.promised, self._called_to, self._lost = view, (view, address), True
            yield Leave()

    # -- from store to store -----------------------------------------------------------------------------------------

    def _find(self) -> Steps[None]:
        self._lost = True
        if self._monitor.is_outside:
            self._left_alone_in.add(self.view)
        self._change.begin()
        yield Leave()
        yield from self._contact.probe(self._rounds.agreed)  # at once
        called_to, self._called_to = self._called_to, None
        if called_to is not None and (yield from self._answer(*called_to)):
            return
        self._give_up_s = (self._contact.last_s if self._monitor.is_outside else self._now_s()) + _PATIENCE * self._silent_s
        while not self._have_all_ended():
            if (yield from self._look_everywhere()):
                return
            if self._is_late:
                break
            yield Pause(LOOK_S)
        if not self._change.is_over:
            yield from self._give_up()

    def _look_everywhere(self) -> Steps[bool]:
        """Go from store to store; whether this worker has found the job's, or looks no further."""
        for view, worker in self._candidates():
            if self._change.is_over or (yield from self._try(view, worker)) or (yield from self._go_back()):
                return True
            while not self._is_late and (ahead := self._change.take_ahead()) is not None:
                next_view = self._next_view(ahead)
                if self._change.is_over or (yield from self._try(next_view, ahead)) or (yield from self._go_back()):
                    return True
            if self._is_late and not self._monitor.is_outside:  # who is outside looks everywhere, however late it is
                break
        return self._change.is_over

    @property
    def _is_late(self) -> bool:
        """Whether this worker has looked, or from outside waited, for as long as it may."""
        return self._now_s() >= self._give_up_s

    def _have_all_ended(self) -> bool:
        return (bool(self._monitor.hosts) and not self._candidates()) or self._is_left_alone_at_admission()

    def _has_lost_admitters(self) -> bool:
        """Whether this worker has been admitted, but has acted by no result yet, and the members of before have ended."""
        agreed, monitor = self._rounds.agreed, self._monitor
        return bool(agreed) and not monitor.is_outside and monitor.me not in agreed and monitor.ended().issuperset(agreed)

    def _is_left_alone_at_admission(self) -> bool:
        """Whether nobody is left with whom a worker that has just been admitted could go on."""
        taking_part = self._rounds.taking_part
        others = {*taking_part} - with_mates([self._monitor.me], taking_part, self._islands)
        return self._has_lost_admitters() and self._monitor.ended() >= others

    def _candidates(self) -> list[tuple[int, WorkerId]]:
        """The stores that workers keep, by the views that come next."""
        monitor = self._monitor
        if monitor.is_outside:  # what it has heard last may be of a store that the others have left
            failed = monitor.ended() | {monitor.me}
        else:
            failed = (monitor.news.failed | monitor.ended()) - {monitor.me}
        failed = with_mates(failed, self._rounds.agreed, self._islands)
        views = {worker: self._next_view(worker) for worker in monitor.hosts if worker not in failed and self._may_keep(worker)}
        return sorted((view, worker) for worker, view in views.items())

    def _may_keep(self, worker: WorkerId) -> bool:
        """Whether the job's store may be the one that a worker keeps: of an island, that of its first rank."""
        return self._islands is None or self._islands.place(worker.initial_rank).index == 0

    def _next_view(self, worker: WorkerId, *, after: int = 0) -> int:
        own, last = worker.initial_rank + 1, max(self.view, self._change.promised, after)
        return last + ((own - last) % _VIEWS or _VIEWS)

    def _try(self, view: int, worker: WorkerId) -> Steps[bool]:
        """Go to the store that a worker keeps; whether it is the job's now."""
        address = self._monitor.hosts[worker]
        reached = yield Enter(address)
        if reached is Reached.REFUSED:
            self._contact.note_ended(worker, self._now_s())
        if reached is not Reached.OPEN:
            return False
        try:
            here, sought, _ = yield from self._change.ask(worker)
            if here is not None and self._may_adopt(here[0]):
                later, there = here
                if there == address or (yield Enter(there)) is Reached.OPEN:
                    return (yield from self._adopt(later, there))
                if (yield Enter(address)) is not Reached.OPEN:
                    return False
                view = self._next_view(worker, after=later)  # that store is lost, too: those that were there go to the next one
            if self._monitor.is_outside:
                return False
            if sought is not None and sought[0] > max(self._change.promised, self.view) and sought[1] != address:
                if (yield Enter(sought[1])) is Reached.OPEN:
                    return (yield from self._meet_at(*sought))
                if (yield Enter(address)) is not Reached.OPEN:
                    return False
            return self._may_keep(worker) and (yield from self._meet_at(view, address))
        except StoreLostError:
            return False

    def _meet_at(self, view: int, address: str) -> Steps[bool]:
        """Meet the others at a store, and go on there; whether it is the job's now."""
        opened = yield from self._change.meet(view, address)
        return opened is not None and (yield from self._adopt(opened, address))

    def _may_adopt(self, view: int) -> bool:
        """Whether to go on in a view that others are in.

        A worker outside has promised nothing under its next identity, and may have left while they were frozen. But others
        outside may wait where no member is left, and say that the job is there: when its time is over it goes to no view again.
        """
        if self._monitor.is_outside:
            return view >= self.view and not (self._is_late and view in self._left_alone_in)
        return view > self.view and view >= self._change.promised

    def _give_up(self) -> Steps[None]:
        """Nobody is there with whom this worker may go on under its identity."""
        elsewhere = self._change.elsewhere.values()
        if elsewhere and not self._monitor.is_outside and (yield from self._renounce(*max(elsewhere))):
            return
        if self._monitor.is_outside:
            raise self._monitor.left_alone()
        if self._has_lost_admitters():
            raise admitters_lost(self._monitor.me)
        me = self._monitor.me
        members = sorted({*self._rounds.agreed, *self._rounds.proposed}) or [me]
        raise no_quorum(me, self._change.here or (me,), members)

    def _go_back(self) -> Steps[bool]:
        """Go to those that have excluded this worker, as another one; whether it has."""
        found, self._change.excluded_in = self._change.excluded_in, None
        return found is not None and (yield from self._renounce(*found))

    def _renounce(self, view: int, address: str) -> Steps[bool]:
        """Go on in a view that others are in, under another identity; False if its store is lost, too."""
        try:
            return (yield Enter(address)) is Reached.OPEN and (yield from self._adopt(view, address, renounces=True))
        except StoreLostError:
            return False

    def _answer(self, view: int, address: str) -> Steps[bool]:
        """Go where others have registered for this worker while it rested; whether the job's store is there now."""
        try:
            if (yield Enter(address)) is not Reached.OPEN:
                return False
            yield Seek(view, address)
            has_opened = yield from self._change.await_opened(view, address, self._now_s())
            return has_opened and (yield from self._adopt(view, address))
        except StoreLostError:
            return False

    def _adopt(self, view: int, address: str, *, renounces: bool = False) -> Steps[bool]:
        """Go on with a store that has opened, and bring what every store of the job has."""
        monitor, prefix = self._monitor, self._prefix
        if view > 0:
            (opened,) = yield Restore(((yield Read(f"{view}/opened")),))
        else:  # the first store never was opened
            opened = None
        yield Adopt(view, address)
        if opened is not None:
            news: bytes = yield Decide(f"{prefix}/news", opened.news)
            yield Decide(hosts_key(prefix), monitor.told_hosts(opened.present))
            yield Decide(f"{prefix}/members", json.dumps(opened.present).encode())
            for rank, incarnation in opened.incarnations.items():
                yield Decide(f"{prefix}/incarnation/{rank}", str(incarnation).encode())
            yield from monitor.say_for(opened.resting)
            self._rounds.move(opened.known)
        else:
            news = yield Decide(f"{prefix}/news", News().encode())
            self._rounds.move(Known())
        if renounces:
            monitor.renounce()
        monitor.holds_store = address == monitor.address
        monitor.move(news)
        self._change.adopt(view, renounces=renounces)
        self._lost = False
        yield from monitor.send()
        yield Publish(view, address)
        return True
