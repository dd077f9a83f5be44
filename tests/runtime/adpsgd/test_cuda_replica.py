"""The published model of tensors on a device: on an emulated one here, whose copies end later; on a GPU the same."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.emulated_device import EmulatedDevice, EmulatedStreams
from benchmarks.running_ahead import Trained, Worker
from lightning_gossip.algorithm.adpsgd.delayed_replica import DelayedReplica
from lightning_gossip.algorithm.adpsgd.replica import PublishedModel, Replica
from lightning_gossip.algorithm.compression.pairwise import half_difference
from lightning_gossip.algorithm.topology.generators import complete
from lightning_gossip.runtime.adpsgd.cuda_replica import StagedCopies, replica_of, staged_replica
from lightning_gossip.runtime.adpsgd.gossip import Gossip
from lightning_gossip.runtime.adpsgd.streams import vectors_of_one_arena
from tests.runtime.peers import PATIENCE_S, peers_of
from tests.transport.memory import MemoryNetwork
from tests.workers import run_threads


def tensors() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    conv = torch.randn(4, 3, 2, 2, generator=generator).to(memory_format=torch.channels_last)
    return [conv, torch.randn(5, generator=generator), torch.rand(4, generator=generator)]


@pytest.fixture
def device() -> Iterator[EmulatedDevice]:
    made = EmulatedDevice()
    yield made
    made.close()
    made.check()


def staged(model: list[Tensor], device: EmulatedDevice, **options: Any) -> DelayedReplica:
    for tensor in model:
        device.tensor(tensor)
    return staged_replica(model, StagedCopies(model, device.streams()), **options)


# -- the same as on the CPU ------------------------------------------------------------------------------------------------


def drive(replica: PublishedModel, model: list[Tensor], synchronize: Callable[[], object]) -> list[Any]:
    """Pushes with and without merges in between, as training and gossip interleave them."""
    seen: list[Any] = []
    generator = torch.Generator().manual_seed(1)
    for step in range(6):
        for _ in range(step % 3):
            chunk = slice(step, replica.numel - step)
            out = torch.empty(chunk.stop - chunk.start)
            replica.snapshot(chunk, out)
            seen.append(out)
            replica.merge(chunk, torch.randn(out.shape, generator=generator))
            replica.exchange_done()
        torch._foreach_add_(model, 0.1)
        if step == 4:
            replica.replace(torch.arange(float(replica.numel)))
        seen.append(replica.push_pull(model, forward_passes=1 + step % 2))
        seen.append(replica.settle().clone())
    replica.settle().mul_(0.5)
    replica.copy_out(model)
    synchronize()
    return [*seen, replica.replacements, *(tensor.cpu().clone() for tensor in model)]


def test_a_model_on_a_device_is_published_as_one_on_the_cpu(device: EmulatedDevice) -> None:
    retention = [1.0, 1.0, 0.9]
    plain_model, device_model = tensors(), tensors()
    plain = drive(Replica(plain_model, retention=retention), plain_model, lambda: None)
    with device:
        delayed = drive(staged(device_model, device, retention=retention), device_model, device.synchronize)
    for a, b in zip(plain, delayed, strict=True):
        assert a == b if isinstance(a, int) else torch.allclose(a, b, rtol=0, atol=1e-6)


def test_tensors_on_the_cpu_are_published_at_once() -> None:
    assert type(replica_of(tensors(), retention=[1.0] * 3)) is Replica


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_model_on_a_gpu_is_published_as_one_on_the_cpu() -> None:
    plain_model, gpu_model = tensors(), [tensor.cuda() for tensor in tensors()]
    plain = drive(Replica(plain_model), plain_model, lambda: None)
    delayed = drive(replica_of(gpu_model, retention=[1.0] * 3), gpu_model, torch.cuda.synchronize)
    for a, b in zip(plain, delayed, strict=True):
        assert a == b if isinstance(a, int) else torch.allclose(a, b, rtol=0, atol=1e-5)


# -- streams and events ----------------------------------------------------------------------------------------------------


class Pair:
    """Two workers with a device each, whose streams go on when a seed says so."""

    def __init__(self, seed: int, streams: Callable[[EmulatedDevice], EmulatedStreams]) -> None:
        self.chance = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.devices = [EmulatedDevice(threads=False) for _ in range(2)]
        self.x = [[device.tensor(self.draw()), device.tensor(self.draw())] for device in self.devices]
        self.expected = torch.stack([torch.cat(x) for x in self.x]).sum(0)
        self.replicas = []
        for x, device in zip(self.x, self.devices, strict=True):
            with device:
                self.replicas.append(staged_replica(x, StagedCopies(x, streams(device))))
        self.merges: list[tuple[int, Tensor]] = []

    def draw(self) -> Tensor:
        return torch.randn(3, generator=self.generator, dtype=torch.float64)

    def run(self) -> None:
        for _ in range(60):
            self.chance.choice([self.step, self.advance, self.advance, self.swap, self.merge])()
        while self.merges:
            self.merge()
        settled = []
        for x, device, replica in zip(self.x, self.devices, self.replicas, strict=True):
            with device:
                replica.push_pull(x, forward_passes=0)
                settled.append(replica.settle().clone())
                device.synchronize()
            assert torch.equal(settled[-1], torch.cat(x))
        assert torch.allclose(sum(settled), self.expected, rtol=0, atol=1e-12), "the sum has changed"

    def step(self) -> None:
        i = self.chance.randrange(2)
        update = [self.draw(), self.draw()]
        self.expected += torch.cat(update)
        waits = self.devices[i].host_waits
        with self.devices[i]:
            self.devices[i].launch(lambda: torch._foreach_add_(self.x[i], update))
            self.replicas[i].step(self.x[i])
        assert self.devices[i].host_waits == waits, "a step has waited for the device"

    def advance(self) -> None:
        device = self.chance.choice(self.devices)
        if waiting := device.waiting():
            device.advance(self.chance.choice(waiting))

    def swap(self) -> None:
        copies = [torch.empty(6, dtype=torch.float64) for _ in range(2)]
        for replica, copy in zip(self.replicas, copies, strict=True):
            replica.snapshot(slice(0, 6), copy)
            assert not copy.isnan().any(), "read before the copy had ended"
        self.merges += [(i, half_difference(copies[i], copies[1 - i].clone())) for i in range(2)]

    def merge(self) -> None:
        if self.merges:
            i, d = self.merges.pop(self.chance.randrange(len(self.merges)))
            self.replicas[i].merge(slice(0, 6), d)
            self.replicas[i].exchange_done()


def test_the_sum_is_kept_in_whatever_order_the_streams_go_on() -> None:
    for seed in range(40):
        Pair(seed, EmulatedDevice.streams).run()


class HasEnded:
    """An event that says so before it is so."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def record(self) -> None:
        self._event.record()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self._event.synchronize()

    def wait(self) -> None:
        self._event.wait()


class IsNotWaitedFor(HasEnded):
    """An event that no stream waits for."""

    def query(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        """Goes on."""


@pytest.mark.parametrize("event", [HasEnded, IsNotWaitedFor])
def test_a_read_before_a_copy_has_ended_is_found(event: type[HasEnded]) -> None:
    class Streams(EmulatedStreams):
        def event(self) -> Any:
            return event(super().event())

    def hundred_schedules() -> None:
        for seed in range(100):
            Pair(seed, Streams).run()

    with pytest.raises((AssertionError, RuntimeError), match=r"read before|sum has changed|changed between|equal"):
        hundred_schedules()


def test_what_a_push_takes_over_is_on_the_device_before_its_step_has_ended() -> None:
    device = EmulatedDevice(threads=False)
    x = [torch.zeros(4)]
    with device:
        replica = staged(x, device)
        replica.merge(slice(0, 4), torch.ones(4))
        device.launch(lambda: x[0].add_(10.0))
        replica.step(x)
    default, side = device._streams
    while device.advance(side):
        pass
    assert replica._copies._staging.tolist() == [1.0] * 4  # type: ignore[attr-defined]
    assert x[0].tolist() == [0.0] * 4
    while device.advance(default):
        pass
    assert x[0].tolist() == [11.0] * 4  # without the copy back, which the next step's work does not wait for
    assert replica.under_way == 1


# -- the host runs ahead ---------------------------------------------------------------------------------------------------


def race(*, chunks: int, ahead: int, step_s: float, steps: int) -> list[Trained]:
    network = MemoryNetwork(2)
    gossips = [Gossip(network.transport(r), peers_of(complete(2), r), chunk_bytes=8 * 1000) for r in range(2)]
    workers = [Worker(gossips[r], rank=r, chunks=chunks, ahead=ahead, step_s=step_s) for r in range(2)]
    try:
        for gossip in gossips:
            gossip.start()
        trained = run_threads([lambda w=w: w.train(steps) for w in workers], PATIENCE_S)  # type: ignore[misc]
        models = run_threads([worker.drain for worker in workers], PATIENCE_S)
    finally:
        run_threads([gossip.close for gossip in gossips], PATIENCE_S)
    total, expected = models[0] + models[1], workers[0].expected + workers[1].expected
    assert float((total - expected).abs().max()) <= 1e-12
    return trained


@pytest.mark.alone
@pytest.mark.parametrize("ahead", [1, 2, 8])
def test_a_host_that_runs_ahead_exchanges_once_a_step(ahead: int) -> None:
    for trained in race(chunks=25, ahead=ahead, step_s=0.02, steps=40):
        assert trained.exchanges_per_step >= 0.9
        assert trained.waits == 0
        assert ahead <= trained.staleness[0] <= 2 * ahead + 4  # in exchanges, of which there is one a step


@pytest.mark.alone
def test_an_exchange_of_hundreds_of_chunks_fits_into_a_step() -> None:
    for trained in race(chunks=500, ahead=2, step_s=0.15, steps=14):
        assert trained.exchanges_per_step >= 0.8
        assert trained.waits == 0


# -- memory ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("numel", [0, 1, 1001])
def test_pinned_memory_is_one_arena_of_just_its_size(numel: int) -> None:
    pinned: list[tuple[int, int]] = []
    unpinned: list[int] = []
    vectors = vectors_of_one_arena(6, numel, torch.float64, pin=lambda *place: pinned.append(place), unpin=unpinned.append)
    assert [vector.shape for vector in vectors] == [(numel,)] * 6
    [(address, nbytes)] = pinned
    assert nbytes <= max(6 * (8 * numel + 256), 256)
    for number, vector in enumerate(vectors):
        assert not vector.any()
        vector.fill_(number)
        if numel:
            assert address <= vector.data_ptr() <= vector.data_ptr() + vector.nbytes <= address + nbytes
    assert all(bool((vector == number).all()) for number, vector in enumerate(vectors))
    kept = vectors.pop()[:1]
    del vectors, vector
    assert not unpinned  # a view of one of them is left
    del kept
    assert unpinned == [address]


def test_a_large_model_has_one_push_under_way(monkeypatch: pytest.MonkeyPatch, device: EmulatedDevice) -> None:
    monkeypatch.setattr("lightning_gossip.runtime.adpsgd.cuda_replica._LARGE_BYTES", 1000)
    with device:
        for numel, pushes in ((250, 2), (251, 1)):
            assert len(staged([torch.zeros(numel)], device)._spare) == pushes
