from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_gossip.algorithm.compression import qsgd as quantize_module
from lightning_gossip.algorithm.compression.qsgd import Quantizer
from lightning_gossip.errors import ConfigurationError

BITS = range(2, 9)
NORMS = ("max", "l2")
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def gaussian(numel: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(numel, generator=seeded(seed), dtype=torch.float64).to(dtype)


def round_trip(quantizer: Quantizer, x: Tensor, seed: int = 0) -> Tensor:
    return quantizer.decode(quantizer.encode(x, seeded(seed)), x.numel(), x.dtype)


def buckets(quantizer: Quantizer, x: Tensor) -> list[Tensor]:
    return list(torch.split(x, quantizer.bucket_size)) if x.numel() else []


def scales_of(quantizer: Quantizer, payload: Tensor, numel: int) -> list[float]:
    """The scale of each bucket, as sent."""
    row = quantizer.nbytes(quantizer.bucket_size)
    data = bytes(payload.tolist())
    return [struct.unpack_from("<f", data, i // quantizer.bucket_size * row)[0] for i in range(0, numel, quantizer.bucket_size)]


def reference_encode(quantizer: Quantizer, x: Tensor, u: Tensor) -> bytes:
    """The module docstring, one element after the other."""
    real: Any = np.float64 if x.dtype == torch.float64 else np.float32
    s, payload = quantizer.magnitudes, b""
    for bucket, draws in zip(buckets(quantizer, x), buckets(quantizer, u), strict=True):
        magnitudes = [abs(value) for value in bucket.tolist()]
        norm = max(magnitudes)
        if quantizer.norm == "l2":
            norm = max(norm, float(np.sqrt(sum(value * value for value in magnitudes))))
        scale = np.float32(norm)
        if float(scale) < norm:
            scale = np.nextafter(scale, np.float32(np.inf))
        number = 0
        for i, (value, draw) in enumerate(zip(bucket.tolist(), draws.tolist(), strict=True)):
            y = real(abs(value)) / real(scale) * real(s) if scale > 0 else real(0)
            level = int(np.floor(y)) + bool(draw < y - np.floor(y))
            code = (level if value >= 0 else -level) + s
            number |= code << (i * quantizer.bits)
        payload += struct.pack("<f", scale) + number.to_bytes(-(-len(bucket) * quantizer.bits // 8), "little")
    return payload


def reference_decode(quantizer: Quantizer, payload: bytes, numel: int) -> list[float]:
    s, values, offset = np.float32(quantizer.magnitudes), [], 0
    for start in range(0, numel, quantizer.bucket_size):
        length = min(quantizer.bucket_size, numel - start)
        nbytes = -(-length * quantizer.bits // 8)
        (scale,) = struct.unpack_from("<f", payload, offset)
        number = int.from_bytes(payload[offset + 4 : offset + 4 + nbytes], "little")
        offset += 4 + nbytes
        codes = [(number >> (i * quantizer.bits)) % 2**quantizer.bits for i in range(length)]
        values += [float((np.float32(code) - s) / s * np.float32(scale)) for code in codes]
    return values


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_the_errors_have_mean_zero_and_the_variance_of_the_formula(bits: int, norm: Any) -> None:
    """z = (Q(x) − x)/σ with σ² = Δ² f(1 − f): E z = 0 and E z² = 1 for every element.

    z takes two values, so Var z² = 1/(f(1 − f)) − 4: 0 at f = ½, that of a normal z, 2, at f(1 − f) = 1/6, without bound at
    the ends. The bound of five deviations on the mean of z² is therefore asked of the elements, known before any draw, with
    f(1 − f) >= 1/6; that on the sum of z, whose variance is 1 for any f, of all.
    """
    quantizer = Quantizer(bits=bits, bucket_size=16, norm=norm)  # in long buckets the L2 norm leaves no f(1 − f) >= 1/6
    x = gaussian(40_000)
    payload = quantizer.encode(x, seeded(1))
    scale = torch.tensor(scales_of(quantizer, payload, x.numel()), dtype=torch.float64).repeat_interleave(16)
    delta = scale / quantizer.magnitudes
    f = (x.double().abs() / delta).frac()
    error = quantizer.decode(payload, x.numel()).double() - x.double()

    random = f * (1 - f) > 0
    z = error[random] / (delta * (f * (1 - f)).sqrt())[random]
    assert abs(z.sum()) / len(z) ** 0.5 < 5

    middle = (f * (1 - f) >= 1 / 6)[random]
    d = int(middle.sum())
    assert d > 2000
    assert abs((z[middle] ** 2).mean() - 1) < 5 * (2 / d) ** 0.5


@given(
    st.lists(st.floats(-1e30, 1e30), max_size=40),
    st.sampled_from(BITS),
    st.integers(1, 20),
    st.sampled_from(NORMS),
    st.integers(0, 100),
)
def test_each_element_goes_to_one_of_the_two_levels_around_it(
    values: list[float], bits: int, bucket_size: int, norm: Any, seed: int
) -> None:
    quantizer = Quantizer(bits=bits, bucket_size=bucket_size, norm=norm)
    x = torch.tensor(values, dtype=torch.float32)
    payload = quantizer.encode(x, seeded(seed))
    decoded = quantizer.decode(payload, len(x))
    scales = scales_of(quantizer, payload, len(x))
    for bucket, result, scale in zip(buckets(quantizer, x), buckets(quantizer, decoded), scales, strict=True):
        assert (result.abs() <= scale).all()
        assert ((result - bucket).double().abs() <= scale / quantizer.magnitudes * (1 + 1e-5) + 1e-44).all()
        assert (result * bucket >= 0).all()


@given(st.sampled_from(BITS), st.integers(0, 400), st.integers(1, 130), st.sampled_from(NORMS))
def test_a_payload_has_a_scale_and_its_codes_per_bucket_and_nothing_else(
    bits: int, numel: int, bucket_size: int, norm: Any
) -> None:
    quantizer = Quantizer(bits=bits, bucket_size=bucket_size, norm=norm)
    lengths = [min(bucket_size, numel - start) for start in range(0, numel, bucket_size)]
    expected = sum(4 + -(-length * bits // 8) for length in lengths)
    payload = quantizer.encode(gaussian(numel), seeded())
    assert payload.dtype == torch.uint8
    assert payload.shape == (expected,)
    assert quantizer.nbytes(numel) == expected
    assert quantizer.decode(payload, numel).shape == (numel,)


@given(
    st.sampled_from(BITS),
    st.integers(0, 60),
    st.integers(1, 40),
    st.sampled_from(NORMS),
    st.sampled_from(FLOATS),
    st.integers(0, 100),
    st.data(),
)
def test_the_payload_is_that_of_the_slow_reference(
    bits: int, numel: int, bucket_size: int, norm: Any, dtype: torch.dtype, seed: int, data: st.DataObject
) -> None:
    levels = data.draw(st.none() | st.integers(1, 2 ** (bits - 1) - 1))
    quantizer = Quantizer(bits=bits, levels=levels, bucket_size=bucket_size, norm=norm)
    x = gaussian(numel, seed, dtype)
    payload = quantizer.encode(x, seeded(seed))
    expected = reference_encode(quantizer, x, torch.rand(numel, generator=seeded(seed)))
    assert bytes(payload.tolist()) == expected
    assert quantizer.decode(payload, numel).tolist() == reference_decode(quantizer, expected, numel)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("bits", BITS)
def test_the_reference_agrees_on_whole_buckets_and_a_rest(bits: int, norm: Any) -> None:
    quantizer, x = Quantizer(bits=bits, norm=norm), gaussian(3 * 512 + 77)
    payload = quantizer.encode(x, seeded(3))
    assert bytes(payload.tolist()) == reference_encode(quantizer, x, torch.rand(x.numel(), generator=seeded(3)))


def test_the_bytes_are_those_of_the_documented_layout() -> None:
    payload = Quantizer(bits=4, bucket_size=4).encode(torch.tensor([7.0, -3.0, 0.0, 1.0, -2.0]), seeded())
    assert bytes(payload.tolist()).hex(" ") == "00 00 e0 40 4e 87 00 00 00 40 00"
    payload = Quantizer(bits=3, bucket_size=8).encode(torch.tensor([3.0, -3.0, 1.0]), seeded())
    assert int.from_bytes(bytes(payload[4:].tolist()), "little") == 6 + (0 << 3) + (4 << 6)


@pytest.mark.parametrize("bits", BITS)
def test_values_on_the_levels_come_back_exactly(bits: int) -> None:
    s = 2 ** (bits - 1) - 1
    for exponent in (-20, 0, 20):
        x = torch.arange(-s, s + 1, dtype=torch.float32) * 2.0**exponent
        assert torch.equal(round_trip(Quantizer(bits=bits), x, seed=exponent + 20), x)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("bits", [4, 8])
def test_a_norm_that_float32_does_not_hold_is_rounded_up(bits: int, norm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where every draw rounds up: at |x|/‖x‖ > 1 the code would be one beyond s."""
    monkeypatch.setattr(torch, "rand", lambda shape, *, generator, device: torch.zeros(shape, device=device))
    for value in (1 + 2**-40, 1 + 2**-52, 0.1, 1 / 3, 1e-300, 3e-40):
        x = torch.tensor([0.0, -value], dtype=torch.float64)  # the square of 1e-300 is 0
        quantizer = Quantizer(bits=bits, norm=norm)
        payload = quantizer.encode(x, seeded())
        scale = scales_of(quantizer, payload, 1)[0]
        assert scale >= value > float(np.nextafter(np.float32(scale), np.float32(0)))
        assert (quantizer.decode(payload, len(x)).abs() <= scale).all()


def test_a_norm_that_float32_holds_is_kept() -> None:
    quantizer = Quantizer(bucket_size=2)
    x = torch.tensor([3.0, 0.1, 0.1, -0.05])
    assert scales_of(quantizer, quantizer.encode(x, seeded()), 4) == [3.0, float(np.float32(0.1))]
    l2 = Quantizer(bucket_size=2, norm="l2")
    assert scales_of(l2, l2.encode(torch.tensor([3.0, -4.0]), seeded()), 2) == [5.0]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("bits", [4, 5, 8])
@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
def test_a_bucket_that_is_not_finite_comes_out_so_and_leaves_the_others_alone(bad: float, bits: int, norm: Any) -> None:
    quantizer, x = Quantizer(bits=bits, bucket_size=10, norm=norm), gaussian(35)
    for place in (3, 17, 34):
        broken = x.clone()
        broken[place] = bad
        decoded, good = round_trip(quantizer, broken), round_trip(quantizer, x)
        inside = torch.arange(35) // 10 == place // 10
        assert not decoded[inside].isfinite().any()
        assert torch.equal(decoded[~inside], good[~inside])
        out = torch.zeros(35)
        quantizer.decode_add(quantizer.encode(broken, seeded()), out)
        assert torch.equal(out.isfinite(), ~inside)


@pytest.mark.parametrize("bits", [4, 8])
def test_the_bytes_of_a_bucket_that_is_not_finite_do_not_show_where_it_is_not(bits: int) -> None:
    """What a NaN is as an integer is up to the machine, so none is converted into a code."""
    payloads = []
    for place in (0, 5):
        x = gaussian(10)
        x[place] = float("inf")
        payloads.append(Quantizer(bits=bits).encode(x, seeded()))
    assert torch.equal(*payloads)


@pytest.mark.parametrize("norm", NORMS)
def test_what_float32_cannot_hold_comes_out_not_finite(norm: Any) -> None:
    decoded = round_trip(Quantizer(norm=norm), torch.tensor([1e300, 1.0], dtype=torch.float64))
    assert not decoded.isfinite().any()


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_largest_and_the_smallest_magnitudes_stay_finite(dtype: torch.dtype, norm: Any) -> None:
    largest = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
    for value in (largest, torch.finfo(dtype).tiny, torch.finfo(dtype).smallest_normal / 4):
        x = torch.tensor([value, 0.0, 0.0], dtype=dtype)
        decoded = round_trip(Quantizer(norm=norm), x)
        assert decoded.isfinite().all()
        assert (decoded[1:] == 0).all()
    assert float(round_trip(Quantizer(norm=norm), torch.tensor([-largest], dtype=dtype))) == -largest


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("bits", BITS)
def test_zeros_come_back_as_zeros(bits: int, norm: Any) -> None:
    quantizer = Quantizer(bits=bits, bucket_size=8, norm=norm)
    x = torch.cat([torch.zeros(8), -torch.zeros(8), torch.ones(8), torch.zeros(3)])
    decoded = round_trip(quantizer, x)
    assert (decoded[x == 0] == 0).all()
    assert (decoded[x == 1] != 0).any()


@pytest.mark.parametrize("bits", BITS)
def test_an_empty_vector_has_an_empty_payload(bits: int) -> None:
    quantizer = Quantizer(bits=bits)
    payload = quantizer.encode(torch.empty(0), seeded())
    assert payload.shape == (0,)
    assert quantizer.nbytes(0) == 0
    assert quantizer.decode(payload, 0, torch.float64).shape == (0,)


def test_the_draws_alone_decide() -> None:
    quantizer, x = Quantizer(), gaussian(1000)
    assert torch.equal(quantizer.encode(x, seeded(1)), quantizer.encode(x, seeded(1)))
    assert not torch.equal(quantizer.encode(x, seeded(1)), quantizer.encode(x, seeded(2)))
    generator = seeded(1)
    assert not torch.equal(quantizer.encode(x, generator), quantizer.encode(x, generator))


def test_the_global_random_state_is_left_alone() -> None:
    before = torch.get_rng_state()
    Quantizer().encode(gaussian(1000), seeded())
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_the_blocks_that_are_worked_on_at_once_do_not_show(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    quantizer, x = Quantizer(bits=bits, bucket_size=50), gaussian(1234)
    payload = quantizer.encode(x, seeded())
    decoded = quantizer.decode(payload, 1234)
    for block in (1, 120, 1000):
        monkeypatch.setattr(quantize_module, "_CPU_BLOCK", block)
        assert torch.equal(quantizer.encode(x, seeded()), payload)
        assert torch.equal(quantizer.decode(payload, 1234), decoded)


@pytest.mark.parametrize("dtype", FLOATS)
def test_decode_add_adds_what_decode_returns(dtype: torch.dtype) -> None:
    quantizer, x, base = Quantizer(bucket_size=100), gaussian(777), gaussian(777, seed=1, dtype=dtype)
    payload = quantizer.encode(x, seeded())
    out = base.clone()
    quantizer.decode_add(payload, out)
    assert out.dtype == dtype
    assert torch.equal(out, base.clone().add_(quantizer.decode(payload, 777)))


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_result_has_the_type_asked_for(dtype: torch.dtype) -> None:
    quantizer = Quantizer()
    payload = quantizer.encode(gaussian(600, dtype=dtype), seeded())
    assert torch.equal(quantizer.decode(payload, 600, dtype), quantizer.decode(payload, 600).to(dtype))


def test_a_view_with_gaps_or_a_parameter_is_quantized_as_its_values_are() -> None:
    quantizer, x = Quantizer(bucket_size=30), gaussian(200)
    payload = quantizer.encode(x[1::2].clone(), seeded())
    assert torch.equal(quantizer.encode(x[1::2], seeded()), payload)
    assert torch.equal(quantizer.encode(torch.nn.Parameter(x)[1::2], seeded()), payload)
    shifted = torch.cat([torch.zeros(1, dtype=torch.uint8), payload])[1:]  # off the alignment of a float32
    assert torch.equal(quantizer.decode(shifted, 100), quantizer.decode(payload, 100))
    out = torch.zeros(200)
    quantizer.decode_add(payload, out[1::2])
    assert torch.equal(out[1::2], quantizer.decode(payload, 100))


def test_encoding_leaves_its_argument_alone() -> None:
    for dtype in FLOATS:
        x = gaussian(1000, dtype=dtype)
        before = x.clone()
        Quantizer().encode(x, seeded())
        assert torch.equal(x, before)


@pytest.mark.parametrize(
    ("distribution", "least", "most"),
    [(torch.distributions.Normal(0.0, 1.0), 35, 50), (torch.distributions.Laplace(0.0, 1.0), 13, 21)],
    ids=["normal", "laplace"],
)
def test_in_buckets_of_512_the_l2_norm_has_tens_of_times_the_variance_of_the_maximum(
    distribution: torch.distributions.Distribution, least: float, most: float
) -> None:
    x = distribution.sample((512 * 64,))
    by_max, by_l2 = (float((round_trip(Quantizer(norm=norm), x) - x).square().sum()) for norm in ("max", "l2"))
    assert least < by_l2 / by_max < most


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 1}, r"bits=1; it must be an integer in \[2, 8\]. Write"),
        ({"bits": 9}, "bits=9"),
        ({"bits": 4.0}, "bits=4.0"),
        ({"bits": "4"}, "bits='4'"),
        ({"levels": 8}, r"levels that do not fit: levels=8 with bits=4; .* 2\^bits = 16, .* in \[1, 7\]. Write levels=7"),
        ({"bits": 8, "levels": 128}, r"levels that do not fit: levels=128 .* in \[1, 127\]"),
        ({"levels": 0}, "levels=0"),
        ({"levels": True}, "levels=True"),
        ({"levels": 2.5}, "levels=2.5"),
        ({"bucket_size": 0}, "bucket_size=0; it must be an integer >= 1. Write for example bucket_size=512"),
        ({"bucket_size": 5.5}, "bucket_size=5.5"),
        ({"norm": "l1"}, "norm='l1'; it is 'max' or 'l2'. Write 'max'"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Quantizer(**options)


@pytest.mark.parametrize("x", [torch.zeros(3, 2), torch.tensor(1.0), torch.zeros(3, dtype=torch.int64)])
def test_only_a_floating_point_vector_is_quantized(x: Tensor) -> None:
    with pytest.raises(ValueError, match="must be a floating-point vector"):
        Quantizer().encode(x, seeded())
    with pytest.raises(ValueError, match="got out of type"):
        Quantizer().decode_add(torch.zeros(0, dtype=torch.uint8), x)


def test_a_payload_of_another_length_or_type_is_refused() -> None:
    quantizer = Quantizer()
    payload = quantizer.encode(gaussian(100), seeded())
    for wrong in (payload[:-1], torch.cat([payload, payload[:1]]), payload.view(1, -1), payload.to(torch.int32)):
        with pytest.raises(ValueError, match=r"100 elements at Quantizer\(bits=4, .*\) are \(54,\) of torch.uint8"):
            quantizer.decode(wrong, 100)
        with pytest.raises(ValueError, match="payload"):
            quantizer.decode_add(wrong, torch.zeros(100))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("bits", BITS)
def test_a_payload_from_a_gpu_is_decoded_alike_on_both(bits: int) -> None:
    quantizer, x = Quantizer(bits=bits), gaussian(5000)
    payload = quantizer.encode(x.cuda(), torch.Generator("cuda").manual_seed(0))
    decoded = quantizer.decode(payload.cpu(), 5000)
    assert torch.allclose(quantizer.decode(payload, 5000).cpu(), decoded, rtol=1e-6)
    assert (decoded - x).abs().max() <= x.abs().max() / quantizer.magnitudes * (1 + 1e-5)
