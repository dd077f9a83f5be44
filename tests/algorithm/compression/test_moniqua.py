"""The codec, which works on many buckets at once, against its equations, bucket by bucket and without haste."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lightning_gossip.algorithm.compression import moniqua
from lightning_gossip.algorithm.compression.moniqua import BUCKET, ModularCode

WEIGHTS = moniqua._WEIGHTS.to(torch.int64)
NOT_FINITE = -(2**31)


class Reference:
    """One end of an exchange; ``ranges`` as :class:`ModularCode` has them."""

    def __init__(self, ranges: Tensor, bits: int) -> None:
        self.ranges, self.agreed, self.bits, self.steps = ranges.clone(), ranges.clone(), bits, 2 ** (bits - 1) - 1
        self.left_out = 0

    def agree(self, theirs: Tensor) -> None:
        self.agreed = torch.maximum(self.ranges, theirs)

    def encode(self, first: int, s: Tensor) -> tuple[Tensor, Tensor]:
        """S of each bucket and c of each element, of a chunk whose first bucket is said."""
        sums, codes = [], []
        for number, bucket in enumerate(s.split(BUCKET), start=first):
            peak, agreed = bucket.abs().max(), self.agreed[number]
            q = (bucket * (self.steps / agreed)).round().nan_to_num(0.0).clamp(-(2.0**30), 2.0**30).to(torch.int64)
            total = int(wrapped((q * WEIGHTS[: len(q)]).sum(), 32))
            total += total == NOT_FINITE
            sums.append(total if bool(peak < math.inf) else NOT_FINITE)
            codes.append(wrapped(q, self.bits))
            finest = torch.nan_to_num(peak * (self.steps * 2.0**-22), 0.0, 0.0, 0.0)
            self.ranges[number] = torch.maximum(agreed * 0.5, finest)
        return torch.tensor(sums), torch.cat(codes)

    def half_difference(self, first: int, mine: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor]) -> Tensor:
        found = []
        buckets = zip(mine[0].tolist(), theirs[0].tolist(), mine[1].split(BUCKET), theirs[1].split(BUCKET), strict=True)
        for number, (s_i, s_j, c_i, c_j) in enumerate(buckets, start=first):
            k = wrapped(c_j - c_i, self.bits)
            largest, finite = int(k.abs().max()), NOT_FINITE not in (s_i, s_j)
            agrees = (int((k * WEIGHTS[: len(k)]).sum()) - s_j + s_i) % 2**32 == 0
            in_range, agreed = agrees and largest <= 7 / 8 * self.steps, self.agreed[number]
            step = agreed / self.steps
            factor = torch.tensor(math.nan) if not finite else 0.5 * step if in_range else torch.tensor(0.0)
            found.append(k.to(torch.float32) * factor)
            self.left_out += finite and not in_range
            seen = 2.0 * torch.tensor(largest) * step if in_range or not finite else 8.0 * agreed
            self.ranges[number] = torch.maximum(self.ranges[number], seen).clamp(2.0**-100, 2.0**100)
        return torch.cat(found)


def wrapped(value: Tensor, bits: int) -> Tensor:
    return (value + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1)


def parts(code: ModularCode, payload: Tensor, numel: int) -> tuple[Tensor, Tensor]:
    sums, codes = code._parts(payload, numel)
    return sums.to(torch.int64), codes.to(torch.int64)


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("trouble", ["none", "far", "huge", "nan"])
def test_each_bit_is_that_of_the_equations(bits: int, trouble: str) -> None:
    numel, chunk = 131 * BUCKET + 77, 130 * BUCKET  # more buckets than are worked on at once, and a short one
    generator = torch.Generator().manual_seed(bits)
    models = [0.05 * torch.randn(numel, generator=generator)]
    models.append(models[0] + 5e-5 * torch.randn(numel, generator=generator))
    codes = [ModularCode(model, bits) for model in models]  # type: ignore[arg-type]
    references = [Reference(code.greeting(), bits) for code in codes]  # type: ignore[arg-type]
    for number in range(3):
        if trouble != "none" and number == 1:
            models[1][3 * BUCKET + 5] = {"far": 7.0, "huge": 3e30, "nan": math.nan}[trouble]
        greetings = [code.greeting().clone() for code in codes]  # type: ignore[union-attr]
        for end, (code, reference) in enumerate(zip(codes, references, strict=True)):
            code.agree(greetings[1 - end])
            reference.agree(greetings[1 - end])
        for place in (slice(0, chunk), slice(chunk, numel)):
            payloads, expected = [], []
            for code, reference, model in zip(codes, references, models, strict=True):
                payloads.append(torch.empty(code.payload_numel(place.stop - place.start), dtype=torch.uint8))
                code.room(payloads[-1], place.stop - place.start).copy_(model[place])
                code.encode(place, payloads[-1])
                expected.append(reference.encode(place.start // BUCKET, model[place]))
                for found, wanted in zip(parts(code, payloads[-1], place.stop - place.start), expected[-1], strict=True):
                    assert torch.equal(found, wanted)
            for end, (code, reference) in enumerate(zip(codes, references, strict=True)):
                found = code.half_difference(place, payloads[end].clone(), payloads[1 - end].clone())
                wanted = reference.half_difference(place.start // BUCKET, expected[end], expected[1 - end])
                assert torch.equal(found.nan_to_num(9.0), wanted.nan_to_num(9.0))
        for code, reference in zip(codes, references, strict=True):
            assert torch.equal(code.greeting(), reference.ranges)  # type: ignore[arg-type]
            assert code.left_out == reference.left_out
    assert (codes[0].left_out > 0) == (trouble in ("far", "huge"))
