"""QSGD's step alone: who counts for the mean, and what everybody concludes from what all say."""

from __future__ import annotations

import pytest
import torch

from lightning_gossip.algorithm.compression.qsgd import Quantizer
from lightning_gossip.algorithm.compression.quantized_mean import QuantizedMean, Said, Status, message_bytes
from lightning_gossip.errors import ConfigurationError

QUANTIZER = Quantizer(bits=4, bucket_size=8)
STEPS, ARRIVED, CALLING, ANNOUNCES = Status.IN_STEP, Status.ARRIVED, Status.CALLING, Status.ANNOUNCES


def workers(number: int, seed: int = 0) -> list[QuantizedMean]:
    return [QuantizedMean(QUANTIZER, seed=seed, rank=rank) for rank in range(number)]


def gradients(number: int) -> torch.Tensor:
    return torch.randn(number, 21, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


@pytest.mark.parametrize(
    ("statuses", "counted"),
    [
        ([STEPS, STEPS, STEPS], [0, 1, 2]),
        ([STEPS, ARRIVED, STEPS], [0, 2]),
        ([ARRIVED | CALLING, ARRIVED, CALLING], [2]),
        ([ARRIVED, ARRIVED, ARRIVED], []),
    ],
)
def test_the_mean_is_that_of_the_workers_that_make_the_step(statuses: list[Status], counted: list[int]) -> None:
    g, quantized = gradients(3), []
    for rank in range(3):
        generator = torch.Generator().manual_seed(5 + 1_000_003 * rank)
        quantized.append(QUANTIZER.decode(QUANTIZER.encode(g[rank], generator), 21, torch.float64))
    expected = torch.stack([quantized[rank] for rank in counted]).mean(0) if counted else torch.zeros(21, dtype=torch.float64)
    parties = workers(3, seed=5)
    messages = [party.message(vector, status) for party, vector, status in zip(parties, g, statuses, strict=True)]
    means = [torch.full((21,), torch.nan, dtype=torch.float64) for _ in parties]
    said = [party.mean(messages, out=mean) for party, mean in zip(parties, means, strict=True)]
    assert said == [Said(tuple(statuses))] * 3
    assert all(torch.equal(mean, means[0]) for mean in means)
    assert torch.allclose(means[0], expected, rtol=1e-15)
    assert {message.numel() for message in messages} == {message_bytes(QUANTIZER, 21)}


@pytest.mark.parametrize(
    ("statuses", "ended", "called", "announces"),
    [
        ([STEPS, STEPS], False, False, False),
        ([ARRIVED, STEPS], False, False, False),
        ([ARRIVED, ARRIVED], True, False, False),
        ([ARRIVED | CALLING, STEPS], False, True, False),
        ([ANNOUNCES, ANNOUNCES], False, False, True),
        ([ARRIVED, ANNOUNCES], False, False, True),
        ([ARRIVED | CALLING, ANNOUNCES], False, True, True),
    ],
)
def test_all_conclude_the_same(statuses: list[Status], ended: bool, called: bool, announces: bool) -> None:
    said = Said(tuple(statuses))
    assert (said.ended, said.any(CALLING), said.announces) == (ended, called, announces)


def test_workers_of_which_some_gather_in_a_step_are_told() -> None:
    with pytest.raises(ConfigurationError, match="all_gather"):
        Said((ANNOUNCES, STEPS, ARRIVED)).announces  # noqa: B018


def test_a_worker_s_rounding_is_its_own_and_goes_on_from_a_checkpoint() -> None:
    g = gradients(1)[0]
    first, second = workers(2)
    assert not torch.equal(first.message(g), second.message(g))
    resumed = QuantizedMean(QUANTIZER, seed=9, rank=0)
    resumed.generator.set_state(first.generator.get_state())
    assert torch.equal(resumed.message(g), first.message(g))
