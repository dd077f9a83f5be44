"""m in memory that nobody clears is the m of a vector that was cleared."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_gossip.algorithm.adpsgd.merges import Merges

NUMEL = 12
CHUNK = st.tuples(st.integers(0, NUMEL), st.integers(0, NUMEL)).map(lambda ends: slice(min(ends), max(ends)))


@given(chunks=st.lists(CHUNK, max_size=12), read=CHUNK, cleared_after=st.integers(0, 12))
def test_the_first_that_comes_is_copied_and_others_are_added(chunks: list[slice], read: slice, cleared_after: int) -> None:
    merges, dense = Merges(torch.full((NUMEL,), float("nan"), dtype=torch.float64)), torch.zeros(NUMEL, dtype=torch.float64)
    for number, chunk in enumerate(chunks):
        if number == cleared_after:
            merges.clear()
            dense.zero_()
        d = torch.arange(1.0, 1.0 + chunk.stop - chunk.start, dtype=torch.float64) + number
        merges.add(chunk, d)
        dense[chunk] += d
    out = torch.zeros(read.stop - read.start, dtype=torch.float64)
    merges.add_to(read, out)
    assert torch.equal(out, dense[read])
    assert bool(merges) == bool(dense.any())
    whole = Merges(merges.vector.clone())
    whole.places = list(merges.places)
    assert not merges or torch.equal(whole.dense(), dense)
    ends = [end for place in merges.places for end in (place.start, place.stop)]
    assert ends == sorted(set(ends))
