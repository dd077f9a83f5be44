r"""Eight or sixteen bits an element for the difference of two models, neither of which the other end knows beforehand.

Lu, De Sa: Moniqua (ICML 2020, arXiv 2002.11787). Two workers whose models differ little need not send the models: the last
digits will do. With b bits, h = 2ᵇ⁻¹ − 1, and a step Δ that is the same on both ends,

    q = ⌊s/Δ⌉ ;   c = q mod 2ᵇ  (sent) ;   k = c_j − c_i mod 2ᵇ, in [−h − 1, h] ;   d = ½ Δ k

and k = q_j − q_i wherever the models differ by less than h steps. Both ends reckon k from the same two codes, so one gets d
and the other −d, whether that is so or not: the sum of the models stays. Beside the models nothing is kept of one exchange for
the next but the step, and |Δk − (s_j − s_i)| ≤ Δ.

Departure from the paper, which wants a bound of all differences beforehand: here the step follows what was seen. A bucket of
``BUCKET`` elements has one range R (Δ = R/h), the larger of the two that both ends name before the exchange; afterwards

    R ← max(2 Δ max|k|, R/2)

A bucket in which a difference was out of range is left out at both ends, and its R grows eightfold. Both see it by the same
equation of what both have: each sends with the codes of a bucket the sum S = Σ_e w_e q_e mod 2³², with fixed odd weights, and

    S_j − S_i = Σ_e w_e k_e  mod 2³²

fails if a k is wrong by a multiple of 2ᵇ (of such buckets one in 2³²⁻ᵇ goes unseen, and still what is added to one model is
subtracted from the other).

| on the wire, for each bucket | bytes |
|---|---|
| R, before the first chunk | 4 |
| S; −2³¹ says that an element is not finite | 4 |
| c | b/8 an element |
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

BUCKET = 1024
_BLOCK = 128  # buckets that are worked on at once: what is reckoned of them stays in a core's cache
_SURE = 7 / 8  # of the range: a difference near its end may be one beyond it
_FIRST_RANGE = 2.0**-6  # of the largest element of a bucket: coarse, and halved with each exchange
_FINEST_STEP = 2.0**-22  # of the same: about what float32 resolves there, and q fits in 32 bits
_SMALLEST_RANGE, _LARGEST_RANGE = 2.0**-100, 2.0**100
_LARGEST_Q = float(2**30)
_NOT_FINITE = -(2**31)


class ModularCode:
    """Modular quantization of a model for one partner; a codec as in :mod:`lightning_gossip.algorithm.compression.pairwise`.

    Args:
        model: shape (d,), float32 or float64: what the ranges begin from.
        bits: of a code, 8 or 16.

    Attributes:
        left_out: buckets so far that were left out of an exchange because a difference was out of range.
    """

    granule = BUCKET
    payload_dtype = torch.uint8

    def __init__(self, model: Tensor, bits: Literal[8, 16]) -> None:
        self.left_out = 0
        buckets = torch.split(model, BUCKET) if model.numel() else ()
        peaks = torch.tensor([float(bucket.abs().max()) for bucket in buckets], device="cpu").nan_to_num_(0.0, 0.0, 0.0)
        typical = float(model.square().mean().sqrt()) if model.numel() else 0.0  # for a bucket of zeros
        first = peaks.clamp(min=typical if typical < torch.inf else 0.0) * _FIRST_RANGE
        self._ranges = first.clamp_(_SMALLEST_RANGE, _LARGEST_RANGE)
        self._agreed = self._ranges.clone()
        self._code = torch.int8 if bits == 8 else torch.int16
        self._steps = torch.iinfo(self._code).max
        self._copy, self._difference = model.new_empty(0), model.new_empty(0)
        self._floats = torch.empty(_BLOCK * BUCKET, dtype=model.dtype, device="cpu")
        self._integers = torch.empty(_BLOCK * BUCKET, dtype=torch.int32, device="cpu")

    def greeting(self) -> Tensor | None:
        """The ranges R of this end's buckets, which both ends send before the first chunk."""
        return self._ranges

    def agree(self, theirs: Tensor) -> None:
        """Agree on the larger of both ends' ranges, bucket by bucket."""
        # whatever has come, both ends go on with the same numbers, and none that a step could not be made of
        torch.maximum(self._ranges, theirs, out=self._agreed).nan_to_num_(nan=_LARGEST_RANGE)
        self._agreed.clamp_(_SMALLEST_RANGE, _LARGEST_RANGE)

    def payload_numel(self, length: int) -> int:
        """Bytes of the payload of a chunk of so many elements."""
        return length * self._code.itemsize + 4 * -(-length // BUCKET)

    def room(self, payload: Tensor, length: int) -> Tensor:
        """Where a chunk is to be copied to before :meth:`encode`, shape (length,); valid until then."""
        if self._copy.numel() < length:
            self._copy, self._difference = self._copy.new_empty(length), self._copy.new_empty(length)
        return self._copy[:length]

    @torch.no_grad()
    def encode(self, chunk: slice, payload: Tensor) -> None:
        """Write the codes and checks of what is in the room into the payload."""
        numel, buckets = chunk.stop - chunk.start, _buckets(chunk)
        agreed = self._agreed[buckets]
        per_step = self._steps / agreed
        peaks = self._write(payload, numel, per_step, clamp=False)
        if not bool((peaks * per_step <= _LARGEST_Q).all()):
            self._write(payload, numel, per_step, clamp=True)
        checks = self._parts(payload, numel)[0]
        checks[checks == _NOT_FINITE] += 1  # costs this bucket one exchange
        checks.masked_fill_(~(peaks < torch.inf), _NOT_FINITE)
        finest = (peaks * (self._steps * _FINEST_STEP)).nan_to_num_(0.0, 0.0)
        torch.maximum(agreed * 0.5, finest, out=self._ranges[buckets])

    @torch.no_grad()
    def half_difference(self, chunk: slice, mine: Tensor, theirs: Tensor) -> Tensor:
        """d = ½ (Q(theirs) − Q(mine)); the other end gets exactly −d. 0 in a bucket whose difference is out of range."""
        numel, buckets = chunk.stop - chunk.start, _buckets(chunk)
        self.room(mine, numel)
        (s_i, my_codes), (s_j, their_codes) = self._parts(mine, numel), self._parts(theirs, numel)
        finite = (s_i != _NOT_FINITE) & (s_j != _NOT_FINITE)
        s_k, high, low = torch.empty_like(s_i), their_codes.new_empty(s_i.shape), their_codes.new_empty(s_i.shape)
        for rows, elements, length in _blocks(numel):
            k = their_codes[elements]  # in place of the codes
            k = torch.sub(k, my_codes[elements], out=k).view(-1, length)
            torch.amax(k, 1, out=high[rows])
            torch.amin(k, 1, out=low[rows])
            integers = self._integers[: k.numel()].view(-1, length)
            _weighed(integers.copy_(k), s_k[rows])
        largest = torch.maximum(high.to(torch.int32), -low.to(torch.int32))
        in_range = (s_k == s_j - s_i) & (largest <= _SURE * self._steps)
        agreed = self._agreed[buckets]
        step = agreed / self._steps
        factor = torch.where(in_range, 0.5 * step, 0.0).masked_fill_(~finite, torch.nan).to(self._difference.dtype)
        for rows, elements, length in _blocks(numel):
            self._difference[elements].copy_(their_codes[elements]).view(-1, length).mul_(factor[rows, None])
        self.left_out += int((finite & ~in_range).sum())
        seen = torch.where(in_range | ~finite, 2.0 * largest * step, 8.0 * agreed)
        ranges = self._ranges[buckets]
        torch.maximum(ranges, seen, out=ranges).clamp_(_SMALLEST_RANGE, _LARGEST_RANGE)
        return self._difference[:numel]

    def is_finite(self, payload: Tensor) -> bool:
        """Whether the elements that a payload was made of are finite."""
        buckets = -(-payload.numel() // (BUCKET * self._code.itemsize + 4))
        return not bool((payload[: 4 * buckets].view(torch.int32) == _NOT_FINITE).any())

    def _write(self, payload: Tensor, numel: int, per_step: Tensor, *, clamp: bool) -> Tensor:
        """Write c and S, and return max|s|, by bucket. Without ``clamp`` they are right where no |q| is above the largest."""
        checks, codes = self._parts(payload, numel)
        high, low = self._copy.new_empty(per_step.shape), self._copy.new_empty(per_step.shape)
        for rows, elements, length in _blocks(numel):
            s = self._copy[elements].view(-1, length)
            torch.amax(s, 1, out=high[rows])
            torch.amin(s, 1, out=low[rows])
            q = torch.mul(s, per_step[rows, None], out=self._floats[: s.numel()].view(s.shape)).round_()
            if clamp:
                q.nan_to_num_(0.0).clamp_(-_LARGEST_Q, _LARGEST_Q)
            integers = self._integers[: s.numel()].view(s.shape).copy_(q)
            codes[elements].view(s.shape).copy_(integers)
            _weighed(integers, checks[rows])
        return torch.maximum(high, -low)

    def _parts(self, payload: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """S of each bucket, int32, and c of each element: views of a payload."""
        sums = 4 * -(-numel // BUCKET)
        return payload[:sums].view(torch.int32), payload[sums:].view(self._code)


def modular_bytes(numel: int, bits: Literal[8, 16]) -> int:
    """What each end sends in an exchange, in bytes: R, S and the codes."""
    return numel * bits // 8 + 8 * -(-numel // BUCKET)


def _buckets(chunk: slice) -> slice:
    """The buckets of the model that a chunk consists of."""
    return slice(chunk.start // BUCKET, -(-chunk.stop // BUCKET))


def _blocks(numel: int) -> Iterator[tuple[slice, slice, int]]:
    """Buckets of one length, their elements in the chunk, and that length; the shorter last bucket comes alone."""
    full = numel // BUCKET
    for start in range(0, full, _BLOCK):
        stop = min(start + _BLOCK, full)
        yield slice(start, stop), slice(start * BUCKET, stop * BUCKET), BUCKET
    if full * BUCKET < numel:
        yield slice(full, full + 1), slice(full * BUCKET, numel), numel % BUCKET


_WEIGHTS = torch.tensor([zlib.crc32(e.to_bytes(2, "little")) | 1 for e in range(BUCKET)], device="cpu").to(torch.int32)


def _weighed(q: Tensor, out: Tensor) -> None:
    """``out`` ← Σ_e w_e q_e mod 2³² of each row, int32: integer arithmetic wraps. Overwrites q."""
    torch.sum(q.mul_(_WEIGHTS[: q.shape[1]]), 1, dtype=torch.int32, out=out)
