from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gossip.algorithm.exact_evaluation import batches_each, deal, why_repeated

SIZES = st.integers(1, 200), st.integers(1, 16), st.integers(1, 9)


@given(*SIZES, st.randoms(use_true_random=False))
def test_each_sample_once_and_equally_many_batches_for_each_worker(
    samples: int, size: int, workers: int, random: st.DataObject
) -> None:
    order = list(range(samples))
    random.shuffle(order)  # type: ignore[attr-defined]
    shares = [deal(order, size, rank=rank, workers=workers) for rank in range(workers)]
    assert sorted(sample for share in shares for batch in share for sample in batch) == sorted(order)
    assert all(0 < len(batch) <= size for share in shares for batch in share)
    if why_repeated(samples, size, workers) is None:
        assert {len(share) for share in shares} == {batches_each(samples, size, workers)}
    else:
        assert samples < workers or size == 1


@given(*SIZES)
def test_a_workers_samples_are_those_of_a_distributed_sampler_in_its_order(samples: int, size: int, workers: int) -> None:
    for rank in range(workers):
        share = deal(range(samples), size, rank=rank, workers=workers)
        assert [sample for batch in share for sample in batch] == list(range(rank, samples, workers))
        whole = [batch for batch in share if len(batch) == size]
        assert len(whole) >= len(share) - 2  # the user's batch size, but for the end


@given(*SIZES)
def test_dropping_the_last_leaves_full_batches_only(samples: int, size: int, workers: int) -> None:
    shares = [deal(range(samples), size, rank=rank, workers=workers, drop_last=True) for rank in range(workers)]
    taken = [sample for share in shares for batch in share for sample in batch]
    assert len(taken) == len(set(taken)) == samples // workers // size * size * workers
    assert all(len(batch) == size for share in shares for batch in share)
    assert (why_repeated(samples, size, workers, drop_last=True) is None) == bool(taken)


@pytest.mark.parametrize(
    ("samples", "size", "workers", "reason"),
    [
        (3, 8, 4, "3 samples for 4 workers"),
        (101, 1, 4, "101 batches of one sample"),
        (100, 1, 4, None),
        (101, 2, 4, None),
        (4, 8, 4, None),
        (5, 2, 4, None),
    ],
)
def test_what_cannot_be_dealt_out_once_is_told(samples: int, size: int, workers: int, reason: str | None) -> None:
    told = why_repeated(samples, size, workers)
    assert told is None if reason is None else reason in str(told)
