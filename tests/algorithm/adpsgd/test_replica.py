import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_gossip.algorithm.adpsgd.replica import Replica
from lightning_gossip.algorithm.compression.pairwise import half_difference
from lightning_gossip.algorithm.tensors.flat import chunk_slices, common_dtype, views_like
from lightning_gossip.algorithm.topology.mixing import pair_matrix

N = 3
CHUNKS = chunk_slices(7, 3)


class Workers:
    """Replicas with their x, and exchanges whose halves happen when told to."""

    def __init__(self, seed: int, n: int = N) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.x = [[self.draw(2, 2), self.draw(3)] for _ in range(n)]
        self.replicas = [Replica(x) for x in self.x]
        self.expected = self.total()  # what the sum of all models should be
        self.in_flight: list[tuple[int, slice, Tensor]] = []  # worker, chunk and d of merges still to come

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def total(self) -> Tensor:
        return torch.stack([replica.published for replica in self.replicas]).sum(0)

    def push(self, i: int) -> None:
        update = [self.draw(2, 2), self.draw(3)]
        for x, u in zip(self.x[i], update, strict=True):
            x += u
        self.expected += torch.cat([u.flatten() for u in update])
        self.replicas[i].push_pull(self.x[i])

    def swap(self, i: int, j: int, chunk: slice) -> None:
        """Both snapshots, at this moment; the merges come later, each end at its own time."""
        s_i, s_j = (torch.empty(chunk.stop - chunk.start, dtype=torch.float64) for _ in range(2))
        self.replicas[i].snapshot(chunk, s_i)
        self.replicas[j].snapshot(chunk, s_j)
        d_i = half_difference(s_i, s_j.clone())
        d_j = half_difference(s_j, s_i.clone())
        assert torch.equal(d_i, -d_j)
        self.in_flight += [(i, chunk, d_i), (j, chunk, d_j)]

    def merge(self, number: int) -> None:
        if self.in_flight:
            i, chunk, d = self.in_flight.pop(number % len(self.in_flight))
            self.replicas[i].merge(chunk, d)

    def settle(self) -> None:
        while self.in_flight:
            self.merge(0)


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.integers(0, N - 1), st.just(0), st.just(0)),
        st.tuples(st.just("swap"), st.integers(0, N - 1), st.integers(1, N - 1), st.integers(0, len(CHUNKS) - 1)),
        st.tuples(st.just("merge"), st.integers(0, 20), st.just(0), st.just(0)),
    ),
    max_size=60,
)


@given(events=EVENTS, seed=st.integers(0, 1000))
def test_sum_is_preserved_whatever_happens_in_between(events: list[tuple[str, int, int, int]], seed: int) -> None:
    workers = Workers(seed)
    for kind, first, second, chunk in events:
        if kind == "push":
            workers.push(first)
        elif kind == "swap":
            workers.swap(first, (first + second) % N, CHUNKS[chunk])
        else:
            workers.merge(first)
    workers.settle()
    scale = 1 + max(float(replica.published.abs().max()) for replica in workers.replicas)
    assert torch.allclose(workers.total(), workers.expected, rtol=0, atol=1e-12 * scale)
    for x, replica in zip(workers.x, workers.replicas, strict=True):
        replica.push_pull(x)
        assert torch.equal(replica.published, torch.cat([t.flatten() for t in x]))
    assert torch.allclose(workers.total(), workers.expected, rtol=0, atol=1e-12 * scale)


def test_a_sequence_of_drained_exchanges_is_w_applied_to_the_stacked_models() -> None:
    n, d = 5, 7
    workers = Workers(1, n=n)
    dense = np.stack([replica.published.numpy() for replica in workers.replicas])
    generator = np.random.default_rng(2)
    for _ in range(200):
        i, j = generator.choice(n, size=2, replace=False).tolist()
        gradient = generator.normal(size=d)
        for x, u in zip(workers.x[i], np.split(gradient, [4]), strict=True):
            x += torch.from_numpy(u).reshape(x.shape)
        workers.replicas[i].push_pull(workers.x[i])
        dense[i] += gradient
        for chunk in CHUNKS:
            workers.swap(i, j, chunk)
        workers.settle()
        dense = pair_matrix(n, i, j) @ dense
        for k in (i, j):
            workers.replicas[k].push_pull(workers.x[k])
    ours = np.stack([replica.published.numpy() for replica in workers.replicas])
    assert np.abs(ours - dense).max() <= 1e-12 * np.abs(dense).max()


def test_push_pull_publishes_the_update_and_takes_over_the_merges() -> None:
    x = [torch.tensor([1.0, 2.0])]
    replica = Replica(x)
    x[0] += 10.0
    replica.merge(slice(0, 2), torch.tensor([0.5, -0.5]))
    replica.push_pull(x)
    assert x[0].tolist() == [11.5, 11.5]
    assert replica.published.tolist() == [11.5, 11.5]
    assert not replica._merges


def test_staleness_is_the_exchanges_merged_between_pull_and_push() -> None:
    x = [torch.zeros(2)]
    replica = Replica(x)
    assert replica.push_pull(x) == 0
    for _ in range(3):
        replica.merge(slice(0, 2), torch.ones(2))
        replica.exchange_done()
    assert replica.push_pull(x) == 3
    assert replica.push_pull(x) == 0
    assert replica.version == 6  # three exchanges and three pushes


def test_copy_out_gives_the_published_model() -> None:
    replica = Replica([torch.arange(6.0).reshape(2, 3)])
    out = [torch.zeros(2, 3)]
    replica.copy_out(out)
    assert torch.equal(out[0], torch.arange(6.0).reshape(2, 3))


TENSORS: dict[str, Callable[[], list[Tensor]]] = {
    "plain": lambda: [torch.randn(3, 4), torch.randn(5)],
    "0-dim": lambda: [torch.tensor(1.5), torch.randn(2)],
    "empty": lambda: [torch.randn(0, 3), torch.randn(2)],
    "channels_last": lambda: [torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)],
    "transposed": lambda: [torch.randn(3, 4).t()],
    "every other column": lambda: [torch.randn(3, 8)[:, ::2], torch.randn(2)],
    "bfloat16": lambda: [torch.randn(3, 4).bfloat16()],
    "mixed": lambda: [torch.randn(3).bfloat16(), torch.randn(2, 2), torch.randn(4, dtype=torch.float64)],
    "parameters": lambda: list(nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last).parameters()),
}


@pytest.mark.parametrize("name", TENSORS)
def test_shapes_strides_types_and_memory_stay(name: str) -> None:
    x = TENSORS[name]()
    before = [(t.shape, t.stride(), t.dtype, t.data_ptr()) for t in x]
    values = [t.detach().clone() for t in x]
    replica = Replica(x)
    published = replica.published.data_ptr()
    replica.merge(slice(0, replica.numel), torch.ones(replica.numel, dtype=replica.dtype))
    replica.push_pull(x)
    assert [(t.shape, t.stride(), t.dtype, t.data_ptr()) for t in x] == before
    assert replica.published.data_ptr() == published
    for t, value in zip(x, values, strict=True):
        assert torch.equal(t.detach(), value + 1)
    out = [torch.zeros_like(t) for t in x]
    replica.copy_out(out)
    assert all(torch.equal(a, b) for a, b in zip(out, x, strict=True))


@pytest.mark.parametrize("name", TENSORS)
def test_dense_tensors_are_published_in_their_own_memory_order(name: str) -> None:
    x = TENSORS[name]()
    replica = Replica(x)
    for view, t in zip(views_like(replica.published, x), x, strict=True):
        assert torch.equal(view.to(t.dtype), t)
        if name != "every other column":
            assert view.stride() == t.stride()


def test_a_worker_may_own_nothing() -> None:
    """As a tensor-parallel rank whose mate owns all that is trained."""
    replica = Replica([])
    replica.push_pull([])
    replica.snapshot(slice(0, 0), torch.empty(0))
    replica.merge(slice(0, 0), torch.empty(0))
    replica.exchange_done()
    assert replica.push_pull([]) == 1
    replica.replace(torch.empty(0))
    replica.push_pull([])
    assert replica.replacements == 1
    replica.copy_out([])
    assert replica.settle().shape == (0,)


def test_views_do_not_overlap_and_cover_the_vector() -> None:
    x = TENSORS["mixed"]() + TENSORS["channels_last"]() + TENSORS["every other column"]()
    flat = torch.zeros(sum(t.numel() for t in x))
    for view in views_like(flat, x):
        view += 1
    assert torch.equal(flat, torch.ones_like(flat))


def test_the_published_type_holds_all_and_is_at_least_float32() -> None:
    assert common_dtype([torch.zeros(1, dtype=torch.bfloat16)]) == torch.float32
    assert common_dtype([torch.zeros(1), torch.zeros(1, dtype=torch.float64)]) == torch.float64
    assert Replica([torch.zeros(1)], dtype=torch.float64).dtype == torch.float64


def test_half_precision_loses_at_most_the_rounding_of_x() -> None:
    """y is float32, but what x pulls and pushes again is rounded to its own type."""
    x = [[torch.randn(64).bfloat16()] for _ in range(2)]
    replicas = [Replica(t) for t in x]
    total = sum(replica.published.double() for replica in replicas)
    s = [replica.published.clone() for replica in replicas]
    for i in range(2):
        replicas[i].merge(slice(0, 64), half_difference(s[i], s[1 - i].clone()))
        replicas[i].push_pull(x[i])
    drift = (sum(replica.published.double() for replica in replicas) - total).abs()
    assert float(drift.max()) <= 2 * 2.0**-8 * max(float(t[0].abs().max()) for t in x)


MOMENTUM = 0.1


def variance_after(*, retention: float, merges: int, forward_passes: int, batch: float = 0.0) -> float:
    """A running variance whose neighbours are all at 0, while the own statistics lag behind."""
    x = [torch.tensor([4.0], dtype=torch.float64)]
    replica = Replica(x, retention=[retention])
    for _ in range(merges):
        s = replica.published.clone()
        replica.merge(slice(0, 1), half_difference(s, torch.zeros(1, dtype=torch.float64)))
    for _ in range(forward_passes):
        x[0].mul_(1 - MOMENTUM).add_(MOMENTUM * batch)
    replica.push_pull(x, forward_passes=forward_passes)
    return float(x[0])


@pytest.mark.parametrize(("merges", "forward_passes"), itertools.product([1, 3, 30], [0, 1, 4, 20]))
def test_retention_keeps_a_running_variance_positive(merges: int, forward_passes: int) -> None:
    variance = variance_after(retention=1 - MOMENTUM, merges=merges, forward_passes=forward_passes)
    expected = 4.0 * 0.5**merges * (1 - MOMENTUM) ** forward_passes  # as if the merges had come before the forward passes
    assert variance == pytest.approx(expected, abs=1e-12)
    assert variance >= -1e-12


def test_plain_addition_would_make_it_negative() -> None:
    assert variance_after(retention=1.0, merges=30, forward_passes=1) < -0.3


def test_pushes_during_one_exchange_keep_it_positive_while_they_leave_half_of_it() -> None:
    """d is half of the snapshot at most; six forward passes at momentum 0.1 leave 0.53."""
    x = [torch.tensor([4.0], dtype=torch.float64)]
    replica = Replica(x, retention=[1 - MOMENTUM])
    s = replica.published.clone()
    for _ in range(6):
        x[0].mul_(1 - MOMENTUM)
        replica.push_pull(x)
    replica.merge(slice(0, 1), half_difference(s, torch.zeros(1, dtype=torch.float64)))
    assert float(replica.published) > 0
    replica.push_pull(x)
    assert float(x[0]) > 0


def test_a_batch_norm_layer_ends_where_its_merged_statistics_would_have_gone() -> None:
    torch.manual_seed(0)
    ours, reference = nn.BatchNorm1d(3).double(), nn.BatchNorm1d(3).double()
    batch = torch.randn(8, 3, dtype=torch.float64)
    d = torch.tensor([-0.3, 0.2, 0.5], dtype=torch.float64)
    replica = Replica([ours.running_var], retention=[1 - MOMENTUM])
    replica.merge(slice(0, 3), d)
    ours(batch)
    replica.push_pull([ours.running_var])
    reference.running_var += d
    reference(batch)
    assert torch.allclose(ours.running_var, reference.running_var, rtol=0, atol=1e-14)


def test_chunks_cover_the_vector_once() -> None:
    assert chunk_slices(7, 3) == [slice(0, 3), slice(3, 6), slice(6, 7)]
    assert chunk_slices(0, 3) == []
    assert chunk_slices(3, 3) == [slice(0, 3)]
