from __future__ import annotations

import math
from collections.abc import Sequence
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_gossip.algorithm.compression.moniqua import BUCKET, ModularCode
from lightning_gossip.algorithm.compression.pairwise import Codec, exchange_bytes, make_codec
from lightning_gossip.algorithm.compression.wires import Wire
from lightning_gossip.errors import ConfigurationError

WIRES = get_args(Wire)
MODULAR = ("int8", "int16")
FLOATS = (torch.float32, torch.float64)


def gaussian(numel: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def two(wire: Wire, models: Sequence[Tensor]) -> list[Codec]:
    return [make_codec(wire, model) for model in models]


def exchanged(codecs: Sequence[Codec], models: Sequence[Tensor], chunk: int = 2 * BUCKET) -> list[Tensor]:
    """d of both ends, all chunks of it."""
    greetings = [codec.greeting() for codec in codecs]
    if greetings[0] is not None and greetings[1] is not None:
        mine, theirs = greetings[0].clone(), greetings[1].clone()
        codecs[0].agree(theirs)
        codecs[1].agree(mine)
    differences = [torch.empty_like(model) for model in models]
    for start in range(0, models[0].numel(), chunk):
        place = slice(start, min(start + chunk, models[0].numel()))
        payloads = [written(codec, model, place) for codec, model in zip(codecs, models, strict=True)]
        for end, codec in enumerate(codecs):
            differences[end][place] = codec.half_difference(place, payloads[end].clone(), payloads[1 - end].clone())
    return differences


def written(codec: Codec, model: Tensor, place: slice) -> Tensor:
    numel = place.stop - place.start
    payload = torch.empty(codec.payload_numel(numel), dtype=codec.payload_dtype)
    codec.room(payload, numel).copy_(model[place])
    codec.encode(place, payload)
    return payload


def average(codecs: Sequence[Codec], models: list[Tensor]) -> float:
    """One exchange; returns the largest difference that is left."""
    for model, difference in zip(models, exchanged(codecs, models), strict=True):
        model += difference
    return float((models[0] - models[1]).abs().max())


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("dtype", FLOATS)
@given(
    numel=st.integers(1, 3 * BUCKET + 5),
    apart=st.sampled_from([0.0, 1e-30, 1e-6, 1e-3, 1.0, 1e6, 1e30]),
    size=st.sampled_from([0.0, 1e-20, 1.0, 1e10]),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_one_end_adds_what_the_other_subtracts_whatever_the_models(
    wire: Wire, dtype: torch.dtype, numel: int, apart: float, size: float, seed: int
) -> None:
    base = size * gaussian(numel, seed, dtype)
    models = [base + apart * gaussian(numel, seed + end, dtype) for end in (1, 2)]
    codecs = two(wire, models)
    for _ in range(3):
        mine, theirs = exchanged(codecs, models)
        assert torch.equal(mine, -theirs)
        assert bool(torch.isfinite(mine).all())
        models = [models[0] + mine, models[1] + theirs]


@pytest.mark.parametrize("wire", WIRES)
def test_the_half_difference_is_that_of_the_models_as_far_as_the_wire_tells(wire: Wire) -> None:
    models = [gaussian(4 * BUCKET + 7, 0)]
    models.append(models[0] + 0.01 * gaussian(models[0].numel(), 1))
    codecs = two(wire, models)
    exchanged(codecs, models)  # the first range is a guess
    found = exchanged(codecs, models)[0]
    error = (found - (models[1] - models[0]) / 2).abs().max()
    # of differences up to 0.04 · ½, and of elements up to 4
    assert error <= {"float32": 1e-7, "bfloat16": 4 * 2**-8, "int16": 0.16 / 2**15, "int8": 0.16 / 2**7}[wire]


@pytest.mark.parametrize("wire", ["float32", *MODULAR])
def test_two_models_meet_as_far_as_float32_resolves(wire: Wire) -> None:
    models = [gaussian(2 * BUCKET, 0)]
    models.append(models[0] + 0.01 * gaussian(2 * BUCKET, 1))
    codecs = two(wire, models)
    assert min(average(codecs, models) for _ in range(30)) < 1e-5


def test_two_models_in_bfloat16_meet_as_far_as_bfloat16_resolves_and_no_further() -> None:
    models = [gaussian(2 * BUCKET, 0)]
    models.append(models[0] + 1e-4 * gaussian(2 * BUCKET, 1))
    left = [average(two("bfloat16", models), models) for _ in range(30)]
    assert min(left) > 1e-4
    assert max(left) < 4 * 2**-7


@pytest.mark.parametrize("wire", MODULAR)
def test_a_difference_out_of_range_leaves_its_bucket_out_at_both_ends_until_the_range_has_grown(wire: Wire) -> None:
    models = [gaussian(2 * BUCKET, 0), gaussian(2 * BUCKET, 0)]
    codecs = two(wire, models)
    for _ in range(20):
        exchanged(codecs, models)  # equal models: the ranges shrink
    models[1][5] += 0.5  # one element of the first bucket
    models[1][BUCKET:] += 1e-7
    before = [model.clone() for model in models]
    first = exchanged(codecs, models)
    assert not first[0][:BUCKET].any()
    assert not first[1][:BUCKET].any()
    assert all(isinstance(codec, ModularCode) and codec.left_out == 1 for codec in codecs)
    for _ in range(12):
        average(codecs, models)
    assert models[0][5] == pytest.approx(before[0][5].item() + 0.25, abs=0.01)


@pytest.mark.parametrize("wire", MODULAR)
@pytest.mark.parametrize("span", [3.0, 100.0, 1e4])
def test_wraps_that_cancel_in_a_plain_sum_are_seen(wire: Wire, span: float) -> None:
    steps = 127 if wire == "int8" else 32767
    for seed in range(50):
        base = gaussian(BUCKET, seed)
        models = [base, base.clone()]
        codecs = two(wire, models)
        range_now = float(codecs[0].greeting()[0])  # type: ignore[index]
        beyond = 2 * (steps + 1) / steps * range_now  # wraps to no difference at all
        beyond *= max(1, round(span)) if span < 10 else 1
        models[1][seed] += beyond
        models[1][-1 - seed] -= beyond
        assert not exchanged(codecs, models)[0].any()
        assert codecs[0].left_out == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_model_that_is_not_finite_is_seen_at_both_ends(wire: Wire, value: float) -> None:
    models = [gaussian(3 * BUCKET, 0), gaussian(3 * BUCKET, 1)]
    models[1][BUCKET + 3] = value
    codecs = two(wire, [models[0], models[0]])
    mine, theirs = exchanged(codecs, models)
    assert not bool(torch.isfinite(mine[BUCKET : 2 * BUCKET]).all())
    assert torch.equal(torch.isfinite(mine), torch.isfinite(theirs))
    payloads = [written(codec, model, slice(0, 3 * BUCKET)) for codec, model in zip(codecs, models, strict=True)]
    assert [codec.is_finite(payload) for codec, payload in zip(codecs, payloads, strict=True)] == [True, False]
    models[1][BUCKET + 3] = 0.0
    assert bool(torch.isfinite(exchanged(codecs, models)[0]).all())  # and it is forgotten


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("numel", [0, 1, BUCKET, BUCKET + 1, 10 * BUCKET])
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_bytes_are_those_that_are_promised(wire: Wire, numel: int, dtype: torch.dtype) -> None:
    codec = make_codec(wire, torch.zeros(numel, dtype=dtype))
    greeting = codec.greeting()
    sent = codec.payload_numel(numel) * codec.payload_dtype.itemsize + (0 if greeting is None else greeting.nbytes)
    assert sent == exchange_bytes(wire, numel, dtype)
    if numel == 10 * BUCKET and dtype is torch.float32:
        assert sent / (4 * numel) == pytest.approx({"float32": 1, "bfloat16": 0.5, "int16": 0.5, "int8": 0.25}[wire], rel=0.01)


@pytest.mark.parametrize("wire", MODULAR)
@pytest.mark.parametrize("greeting", [math.nan, math.inf, -math.inf, -1.0, 0.0, 1e-38, 3e38])
def test_no_greeting_makes_a_step_that_is_none(wire: Wire, greeting: float) -> None:
    models = [gaussian(BUCKET, 0), gaussian(BUCKET, 1)]
    codecs = two(wire, models)
    for codec in codecs:
        codec.agree(torch.full((1,), greeting))
    payloads = [written(codec, model, slice(0, BUCKET)) for codec, model in zip(codecs, models, strict=True)]
    mine = codecs[0].half_difference(slice(0, BUCKET), payloads[0], payloads[1])
    assert bool(torch.isfinite(mine).all())
    assert bool(torch.isfinite(codecs[0].greeting()).all())  # type: ignore[arg-type]


def test_an_unknown_wire_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match="wire='int4' is not one of 'float32'"):
        make_codec("int4", torch.zeros(1))  # type: ignore[arg-type]
