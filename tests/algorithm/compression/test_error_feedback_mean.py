from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_gossip.algorithm.compression.error_feedback_mean import CompressedMean, mean_bytes
from lightning_gossip.algorithm.compression.wires import MeanWire
from lightning_gossip.errors import ConfigurationError

WIRES: list[MeanWire] = ["bfloat16", "int8"]


def gaussian(n: int, d: int, seed: int = 0) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def codes_of(wire: MeanWire, reference: Tensor, n: int) -> list[CompressedMean]:
    return [CompressedMean(reference.clone(), workers=n, rank=rank, wire=wire) for rank in range(n)]


def averaged(codes: Sequence[CompressedMean], vectors: Tensor) -> list[Tensor]:
    """w̄ on each worker."""
    n = len(codes)
    sent = [code.begin(vector) for code, vector in zip(codes, vectors, strict=True)]
    assert all(len(payloads) == n for payloads in sent)
    reduced = torch.stack([code.reduce(torch.stack([theirs[owner] for theirs in sent])) for owner, code in enumerate(codes)])
    return [code.end(reduced).clone() for code in codes]


def kept_back(codes: Sequence[CompressedMean], d: int) -> Tensor:
    """Σ e_i + n E."""
    owned = torch.cat([code._owned_error for code in codes])[:d]
    return torch.stack([code._error[:d] for code in codes]).sum(0) + len(codes) * owned


@pytest.mark.parametrize("wire", WIRES)
@given(n=st.integers(1, 5), d=st.integers(1, 4000), apart=st.sampled_from([0.0, 1e-6, 1.0, 1e4]), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_nothing_is_lost_and_all_get_the_same_bits(wire: MeanWire, n: int, d: int, apart: float, seed: int) -> None:
    vectors = gaussian(1, d, seed) + apart * gaussian(n, d, seed + 1)
    codes = codes_of(wire, vectors[0], n)
    for number in range(3):
        before = vectors.sum(0) + kept_back(codes, d)
        means = averaged(codes, vectors)
        assert all(torch.equal(mean, means[0]) for mean in means)
        after = n * means[0] + kept_back(codes, d)
        assert torch.allclose(after, before, rtol=0.0, atol=1e-12 * n * (1.0 + apart) * 10)
        vectors = means[0] + apart * gaussian(n, d, seed + 2 + number)


@pytest.mark.parametrize("wire", WIRES)
def test_vectors_that_stand_still_are_averaged_exactly_in_the_end(wire: MeanWire) -> None:
    vectors = gaussian(4, 3000)
    codes = codes_of(wire, vectors[0], 4)
    # each keeps its own: what a rounding keeps back comes with the next difference, so the mean of the means is exact
    means = torch.stack([averaged(codes, vectors)[0] for _ in range(64)])
    errors = (means.mean(0) - vectors.mean(0)).abs().max(), (means[0] - vectors.mean(0)).abs().max()
    assert errors[0] < errors[1] / 8


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("d", [1, 3, 1000])
def test_settled_the_mean_is_exact_and_nothing_is_left(wire: MeanWire, d: int) -> None:
    n = 4
    vectors = gaussian(n, d)
    codes = codes_of(wire, gaussian(1, d, 9)[0], n)
    total = vectors.sum(0)
    mean = averaged(codes, vectors)[0]
    settled = mean.expand(n, d).clone()
    for code, vector in zip(codes, settled, strict=True):
        code.settle(vector)
    assert torch.allclose(settled.sum(0), total, rtol=0.0, atol=1e-12)
    assert not kept_back(codes, d).any()


@pytest.mark.parametrize(("wire", "share"), [("bfloat16", 0.5), ("int8", 0.25)])
def test_the_bytes_are_those_that_are_promised(wire: MeanWire, share: float) -> None:
    d, n = 40_000, 4
    code = CompressedMean(torch.zeros(d), workers=n, rank=0, wire=wire)
    assert code.begin(torch.zeros(d)).nbytes == mean_bytes(wire, d, n)
    assert mean_bytes(wire, d, n) / mean_bytes("float32", d, n) == pytest.approx(share, rel=0.005)


def test_there_is_no_code_for_what_is_sent_as_it_is() -> None:
    with pytest.raises(ConfigurationError, match="wire='float32'"):
        CompressedMean(torch.zeros(1), workers=1, rank=0, wire="float32")
