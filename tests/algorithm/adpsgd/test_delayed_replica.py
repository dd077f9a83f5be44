"""The published model whose pushes arrive later: every order of training thread, gossip thread and device keeps the sum."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_gossip.algorithm.adpsgd.delayed_replica import Arrival, Copies, DelayedReplica
from lightning_gossip.algorithm.adpsgd.merges import Merges
from lightning_gossip.algorithm.adpsgd.replica import Follower, Replica, follow
from lightning_gossip.algorithm.compression.pairwise import half_difference
from lightning_gossip.algorithm.tensors.flat import chunk_slices, views_like
from lightning_gossip.errors import ProtocolError

NUMEL = 7
CHUNKS = chunk_slices(NUMEL, 3)


class Device(Copies):
    """A list of copies and kernels, done one by one when the test says so.

    Until a copy has ended its target is NaN and its source must not change.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.list: deque[Callable[[], None]] = deque()
        self.done = 0
        self.waits = 0
        self._numel = sum(tensor.numel() for tensor in tensors)
        self._views: Callable[[Tensor], list[Tensor]] = lambda flat: views_like(flat, tensors)

    def vectors(self, count: int) -> list[Tensor]:
        return [torch.full((self._numel,), float("nan"), dtype=torch.float64) for _ in range(count)]

    def launch(self, work: Callable[[], None]) -> Arrival:
        self.list.append(work)
        return End(self, self.done + len(self.list))

    def advance(self) -> bool:
        if not self.list:
            return False
        self.list.popleft()()
        self.done += 1
        return True

    def add(
        self,
        tensors: Sequence[Tensor],
        merges: Merges,
        faded: Sequence[tuple[slice, float]],
        followers: Sequence[Follower] = (),
    ) -> None:
        places, before = list(merges.places), merges.vector.clone()

        def run() -> None:
            assert all(torch.equal(merges.vector[place], before[place]) for place in places), "changed under a copy"
            flat = torch.zeros_like(merges.vector)
            for place in places:
                flat[place] = merges.vector[place]
            for place, factor in faded:
                flat[place] *= factor
            torch._foreach_add_(list(tensors), self._views(flat))
            for follower, factor in followers:
                follow(follower, self._views(flat), factor)

        self.launch(run)

    def write(self, tensors: Sequence[Tensor], model: Tensor) -> Arrival:
        before = model.clone()

        def run() -> None:
            assert torch.equal(model, before), "changed under a copy"
            torch._foreach_copy_(list(tensors), self._views(model))

        return self.launch(run)

    def read(self, tensors: Sequence[Tensor], into: Tensor) -> Arrival:
        into.fill_(float("nan"))
        return self.launch(lambda: torch._foreach_copy_(self._views(into), list(tensors)))


class End:
    def __init__(self, device: Device, number: int) -> None:
        self._device = device
        self._number = number

    def query(self) -> bool:
        return self._device.done >= self._number

    def synchronize(self) -> None:
        while not self.query():
            self._device.waits += 1
            assert self._device.advance()


class InterruptedLock:
    """Where it is given back another thread goes on."""

    def __init__(self, released: Callable[[], None]) -> None:
        self._released = released
        self._watch = NothingIsCopied()

    def __enter__(self) -> None:
        self._watch.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._watch.__exit__(*error)
        self._released()


class NothingIsCopied(TorchFunctionMode):
    """Where no tensor may be touched: under a lock, which is held to change names only."""

    def __torch_function__(self, func: Any, *args: Any) -> Any:
        raise AssertionError(f"{func} under the lock")


class World:
    """Workers, each with a training thread, a gossip thread and a device, under the choices of a seed.

    Attributes:
        models: per worker x + m, as if nothing were under way.
    """

    def __init__(
        self, seed: int, kind: type[DelayedReplica] = DelayedReplica, *, n: int = 3, interrupted: bool = True, **options: Any
    ) -> None:
        self.chance = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.n = n
        self.trains, self.gossips = set[int](), set[int]()  # in the middle of a call
        self.x = [[self.draw(2, 2), self.draw(3)] for _ in range(n)]
        self.models = [flat(x) for x in self.x]
        self.updates: list[list[Tensor]] = [[] for _ in range(n)]  # the latest first
        self.devices = [Device(x) for x in self.x]
        self.replicas: list[DelayedReplica] = []
        self.given = [0] * n  # models in place of their own
        self.in_flight: list[tuple[int, slice, Tensor]] = []  # worker, chunk and d of merges still to come
        options = {"ahead": self.chance.choice([1, 2, 3]), "push_every": self.chance.choice([1, 1, 3]), **options}
        self.ahead = options["ahead"]
        for i in range(n):
            lock = InterruptedLock(lambda i=i: self.interrupt(i)) if interrupted else None  # type: ignore[misc]
            self.replicas.append(kind(self.x[i], copies=self.devices[i], dtype=torch.float64, lock=lock, **options))

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def interrupt(self, i: int) -> None:
        """In the middle of a call of one thread of a worker: its device or its other thread goes on."""
        if len(self.replicas) <= i or self.chance.random() < 0.4:
            return
        for _ in range(self.chance.randrange(4)):
            self.devices[i].advance()
        if i in self.gossips and i not in self.trains:
            self.step(i)
        elif i in self.trains and i not in self.gossips:
            self.chance.choice([self.swap, self.merge, self.replace])(i)

    def step(self, i: int) -> None:
        update = [self.draw(2, 2), self.draw(3)]
        device, replica = self.devices[i], self.replicas[i]
        self.trains.add(i)
        self.updates[i].insert(0, flat(update))
        self.models[i] += flat(update)
        device.launch(lambda: torch._foreach_add_(self.x[i], update))
        waits, replacements, given = device.waits, replica.replacements, self.given[i]
        replica.step(self.x[i])
        assert device.waits == waits, "a step has waited for the device"
        if self.given[i] == given and (replica._replaced or replica.replacements > replacements):
            self.models[i] -= self.updates[i].pop(0)  # lost: x is another model's now
        self.trains.discard(i)

    def swap(self, i: int) -> None:
        """Both snapshots; the merges come later, each end at its own time."""
        j = self.chance.choice([j for j in range(self.n) if j != i])
        if j in self.gossips or j in self.trains:
            return
        chunk = self.chance.choice(CHUNKS)
        s_i, s_j = self.snapshot(i, chunk), self.snapshot(j, chunk)
        self.in_flight += [(i, chunk, half_difference(s_i, s_j.clone())), (j, chunk, half_difference(s_j, s_i.clone()))]

    def snapshot(self, i: int, chunk: slice) -> Tensor:
        out = torch.empty(chunk.stop - chunk.start, dtype=torch.float64)
        self.gossips.add(i)
        self.replicas[i].snapshot(chunk, out)
        self.gossips.discard(i)
        # y is this worker's model without its last updates, whose push is under way or still to come
        y = self.models[i][chunk].clone()
        candidates = [y.clone()] + [y.sub_(update[chunk]).clone() for update in self.updates[i][:20]]
        assert any(torch.allclose(out, candidate, rtol=0, atol=1e-9) for candidate in candidates), "y is not what it should be"
        return out

    def merge(self, i: int) -> None:
        mine = [number for number, (worker, *_) in enumerate(self.in_flight) if worker == i]
        if mine:
            _, chunk, d = self.in_flight.pop(self.chance.choice(mine))
            self.gossips.add(i)
            self.replicas[i].merge(chunk, d)
            self.replicas[i].exchange_done()
            self.models[i][chunk] += d
            self.gossips.discard(i)

    def replace(self, i: int) -> None:
        if self.chance.random() < 0.05:
            self.models[i], self.updates[i] = self.draw(NUMEL), []
            self.given[i] += 1
            self.gossips.add(i)
            self.replicas[i].replace(self.models[i].clone())
            self.gossips.discard(i)

    def arrive(self, i: int) -> None:
        """The device works until a push has arrived."""
        under_way = self.replicas[i]._under_way
        while self.devices[i].advance():
            if under_way and under_way[0].has_arrived:
                return

    def run(self, events: int) -> None:
        for _ in range(events):
            i = self.chance.randrange(self.n)
            self.chance.choice([self.step, self.swap, self.merge, self.replace, lambda i: self.devices[i].advance()])(i)
        self.drain()

    def drain(self) -> None:
        """Nothing is under way any more: each model is what it began with, all updates and all merges; and so is the sum."""
        while self.in_flight:
            self.merge(self.in_flight[0][0])
        settled = []
        for x, replica in zip(self.x, self.replicas, strict=True):
            replica.push_pull(x, forward_passes=0)
            settled.append(replica.settle())
            assert torch.equal(settled[-1], flat(x))
            assert (len(replica._spare), len(replica._spare_merges), replica.under_way) == (self.ahead, self.ahead, 0)
        total, expected = torch.stack(settled).sum(0), torch.stack(self.models).sum(0)
        scale = 1 + max(float(model.abs().max()) for model in settled)
        assert torch.allclose(total, expected, rtol=0, atol=1e-12 * scale), "the sum has changed"


def flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def test_the_sum_is_kept_in_whatever_order_things_happen() -> None:
    for seed in range(150):
        World(seed).run(80)


@pytest.mark.parametrize("ahead", [1, 2])
def test_the_sum_is_kept_in_each_order_of_three_steps_two_exchanges_and_a_device(ahead: int) -> None:
    """All 1,260 orders; what is left of the device's work comes at the end."""
    for order in orders({"step": 3, "gossip": 4, "device": 2}):
        world = World(0, n=2, interrupted=False, ahead=ahead, push_every=1)
        gossip = iter([world.swap, world.merge] * 2)
        for what in order:
            if what == "step":
                world.step(0)
            elif what == "gossip":
                next(gossip)(0)
            else:
                world.arrive(0)
        world.drain()


def orders(left: dict[str, int]) -> Iterator[list[str]]:
    """All orders of so many of each."""
    if not any(left.values()):
        yield []
    for what, number in left.items():
        if number:
            yield from ([what, *rest] for rest in orders({**left, what: number - 1}))


# -- one after the other ---------------------------------------------------------------------------------------------------


class Alone:
    """One worker with one tensor, and its device."""

    def __init__(self, **options: Any) -> None:
        self.x = [torch.zeros(2, dtype=torch.float64)]
        self.device = Device(self.x)
        self.replica = DelayedReplica(self.x, copies=self.device, **options)

    def step(self, update: float, **options: Any) -> None:
        self.device.launch(lambda: self.x[0].add_(update))
        self.replica.step(self.x, **options)

    def merge(self, d: float) -> None:
        self.replica.merge(slice(0, 2), torch.full((2,), d, dtype=torch.float64))
        self.replica.exchange_done()

    def arrive(self) -> None:
        while self.device.advance():
            pass

    @property
    def y(self) -> float:
        out = torch.empty(2, dtype=torch.float64)
        self.replica.snapshot(slice(0, 2), out)
        return float(out[0])


def test_until_a_push_has_arrived_the_older_model_is_averaged() -> None:
    worker = Alone()
    worker.step(1.0)
    worker.merge(10.0)
    assert worker.y == 10.0
    worker.step(2.0)
    worker.merge(100.0)
    assert worker.y == 110.0
    assert worker.replica.take_staleness() == []
    worker.arrive()
    assert worker.y == 113.0
    worker.step(0.0)
    worker.arrive()
    assert worker.y == float(worker.x[0][0]) == 113.0


def test_a_step_that_finds_no_buffer_is_published_by_the_next() -> None:
    worker = Alone(ahead=1)
    for _ in range(3):
        worker.step(1.0)
        worker.merge(10.0)
    assert worker.replica.under_way == 1
    worker.arrive()
    assert worker.y == 31.0
    worker.step(1.0)
    worker.arrive()
    assert worker.y == 34.0
    assert float(worker.x[0][0]) == 34.0


def test_staleness_counts_the_exchanges_until_the_push_has_arrived() -> None:
    worker = Alone(ahead=1)
    worker.step(1.0)  # pushed at once, arrives after two exchanges
    worker.merge(1.0)
    worker.merge(1.0)
    worker.step(1.0)  # finds no buffer
    worker.arrive()
    worker.merge(1.0)
    worker.step(1.0)  # notices the arrival, and publishes two steps that began when the first had been handed over
    assert worker.replica.take_staleness() == [3]
    worker.merge(1.0)
    worker.arrive()
    assert worker.y == 7.0
    assert worker.replica.take_staleness() == [4, 4]
    assert worker.replica.take_staleness() == []


@pytest.mark.parametrize("kind", ["replica", "delayed"])
def test_between_two_pushes_a_step_costs_nothing(kind: str) -> None:
    x = [torch.zeros(1, dtype=torch.float64)]
    options: dict[str, Any] = {"retention": [0.5], "push_every": 3}
    device = Device(x)
    replica = Replica(x, **options) if kind == "replica" else DelayedReplica(x, copies=device, **options)
    replica.merge(slice(0, 1), torch.tensor([8.0], dtype=torch.float64))
    replica.exchange_done()
    out = torch.empty(1, dtype=torch.float64)
    for _ in range(2):
        x[0] += 1.0
        replica.step(x)
        assert not device.list
        assert replica.take_staleness() == []
        replica.snapshot(slice(0, 1), out)
        assert float(out) == 8.0
    x[0] += 1.0
    replica.step(x)
    while device.advance():
        pass
    assert float(x[0]) == 4.0  # three forward passes leave an eighth of the merge
    replica.snapshot(slice(0, 1), out)
    assert float(out) == 4.0
    assert replica.take_staleness() == [1, 1, 1]


def test_another_model_takes_the_place_of_what_is_under_way() -> None:
    worker = Alone()
    worker.step(1.0)
    worker.merge(5.0)
    worker.step(1.0)
    worker.replica.replace(torch.full((2,), 70.0, dtype=torch.float64))
    assert worker.y == 70.0
    worker.arrive()
    assert worker.y == 70.0  # what arrives was made of the model before
    worker.merge(0.5)
    assert worker.y == 70.5
    worker.step(1.0)  # lost
    worker.step(2.0)
    worker.arrive()
    assert worker.y == float(worker.x[0][0]) == 72.5
    assert worker.replica.replacements == 1


def test_merges_must_be_taken_over_before_the_average() -> None:
    worker = Alone()
    worker.merge(1.0)
    with pytest.raises(ProtocolError, match="Push before"):
        worker.replica.settle()
    worker.replica.push_pull(worker.x, forward_passes=0)
    published = worker.replica.settle()
    published.mul_(3.0)
    worker.replica.copy_out(worker.x)
    assert worker.replica.settle() is published  # after the device has read it
    assert float(worker.x[0][0]) == 3.0


# -- and the test sees what would break it ---------------------------------------------------------------------------------


class DoesNotAsk(DelayedReplica):
    """Reads a buffer before the copy into it has ended."""

    def _note_arrivals(self) -> None:
        for push in self._under_way:
            push.arrival = Always() if push.arrival is not None else None
        super()._note_arrivals()


class Always:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Never waits."""


class ForgetsWhatIsUnderWay(DelayedReplica):
    """y without the merges that pushes have taken over which have not arrived."""

    def snapshot(self, chunk: slice, out: Tensor) -> None:
        kept = [push.merges for push in self._under_way]
        for push in self._under_way:
            push.merges = None
        super().snapshot(chunk, out)
        for push, merges in zip(self._under_way, kept, strict=False):
            push.merges = merges


class GivesAwayWhatIsRead(DelayedReplica):
    """Lets the device write into the buffer that a gossip thread reads."""

    def _note_arrivals(self) -> None:
        self._reading = False
        super()._note_arrivals()


class TakesWhatIsAdded(DelayedReplica):
    """Lets the device read half a merge."""

    @property
    def _merging(self) -> bool:
        return False

    @_merging.setter
    def _merging(self, value: bool) -> None:
        """Nobody looks."""


class ForgetsMerges(DelayedReplica):
    """m ← 0 when a push has arrived, and not when it begins."""

    def _renew_base(self, model: Tensor, *, ours: bool) -> None:
        super()._renew_base(model, ours=ours)
        self._merges.clear()


class CopiesUnderTheLock(DelayedReplica):
    """Makes the training thread wait for a copy of the host."""

    def merge(self, chunk: slice, half_difference: Tensor) -> None:
        with self._lock:
            self._merges.add(chunk, half_difference)


FAULTS = [CopiesUnderTheLock, DoesNotAsk, ForgetsWhatIsUnderWay, GivesAwayWhatIsRead, TakesWhatIsAdded, ForgetsMerges]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_found(fault: type[DelayedReplica]) -> None:
    def hundred_schedules() -> None:
        for seed in range(100):
            World(seed, fault).run(80)

    with pytest.raises((AssertionError, ProtocolError)):
        hundred_schedules()
