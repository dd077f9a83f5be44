from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_gossip.algorithm.adpsgd.replica import Replica
from lightning_gossip.algorithm.tensors.finite import all_finite

ANY = st.floats(width=32, allow_nan=True, allow_infinity=True)


@given(st.lists(ANY, max_size=40))
def test_it_says_what_a_look_at_each_element_says(values: list[float]) -> None:
    assert all_finite(torch.tensor(values)) == all(map(math.isfinite, values))


@given(st.lists(ANY, min_size=1, max_size=20), st.lists(ANY, min_size=1, max_size=20))
def test_both_ends_of_an_exchange_decide_the_same(ours: list[float], theirs: list[float]) -> None:
    n = min(len(ours), len(theirs))
    a, b = torch.tensor(ours[:n]), torch.tensor(theirs[:n])
    assert all_finite((b - a) * 0.5) == all_finite((a - b) * 0.5)


def test_a_sum_that_overflows_is_looked_into() -> None:
    assert all_finite(torch.full((10,), 3e38))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_every_type_is_understood(dtype: torch.dtype) -> None:
    vector = torch.ones(2000, dtype=dtype)
    assert all_finite(vector)
    vector[1234] = math.inf
    assert not all_finite(vector)


def test_a_replaced_model_is_taken_over_at_the_next_pull_with_what_was_merged_since() -> None:
    x = [torch.full((3,), math.nan)]
    replica = Replica(x)
    replica.replace(torch.tensor([1.0, 2.0, 3.0]))
    replica.merge(slice(0, 3), torch.ones(3))
    replica.push_pull(x)
    assert x[0].tolist() == replica.published.tolist() == [2.0, 3.0, 4.0]
    assert not replica._merges
    assert replica.replacements == 1
    x[0] += 1  # and the next update is an ordinary one
    replica.push_pull(x)
    assert replica.published.tolist() == [3.0, 4.0, 5.0]
    assert replica.replacements == 1
