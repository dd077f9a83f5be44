"""Hessian eigenvalues and spectra against dense Hessians, and that nothing is changed by measuring them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy.integrate import trapezoid
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from lightning_gossip.analysis.curvature.gradient_noise import gradient_noise
from lightning_gossip.analysis.curvature.hessian import Hessian, NotFiniteError
from lightning_gossip.analysis.curvature.spectrum import curvature, spectrum
from lightning_gossip.errors import ConfigurationError

Batch = tuple[Tensor, Tensor]


def quadratic(eigenvalues: Any) -> tuple[Callable[[float], Tensor], list[Tensor]]:
    """½ · batch · wᵀ Q Λ Qᵀ w, and w."""
    values = torch.as_tensor(np.array(eigenvalues, dtype=np.float64))
    rotation = torch.linalg.qr(torch.randn(len(values), len(values), dtype=torch.float64)).Q
    matrix = rotation @ torch.diag(values) @ rotation.T
    w = torch.randn(len(values), dtype=torch.float64, requires_grad=True)
    return lambda factor: 0.5 * factor * w @ matrix @ w, [w]


def mlp(*middle: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 8), *middle, nn.Tanh(), nn.Linear(8, 3))


def batches(count: int = 2) -> list[Batch]:
    return [(torch.randn(16, 5), torch.randint(0, 3, (16,))) for _ in range(count)]


def loss_of(model: nn.Module) -> Callable[[Batch], Tensor]:
    return lambda batch: functional.cross_entropy(model(batch[0]), batch[1])


def dense(model: nn.Module, data: list[Batch], loss: Callable[[Tensor, Tensor], Tensor] = functional.cross_entropy) -> Tensor:
    """The Hessian of the mean loss by torch.func, with dropout's random numbers of batch b from the seed b."""
    shapes = {name: p.shape for name, p in model.named_parameters()}

    def mean(flat: Tensor) -> Tensor:
        pieces = flat.split([shape.numel() for shape in shapes.values()])
        parameters = {name: piece.view(shape) for (name, shape), piece in zip(shapes.items(), pieces, strict=True)}
        total = torch.zeros(())
        for number, (x, y) in enumerate(data):
            torch.manual_seed(number)
            total = total + loss(torch.func.functional_call(model, parameters, (x,)), y)
        return total / len(data)

    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    with torch.random.fork_rng():
        return torch.autograd.functional.hessian(mean, flat).double()


def top(matrix: Tensor, count: int) -> list[float]:
    values: list[float] = torch.linalg.eigvalsh(matrix).flip(0)[:count].tolist()
    return values


# -- exact values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 6, 120])
def test_a_quadratic_has_its_eigenvalues(size: int) -> None:
    eigenvalues = np.linspace(-3.0, 5.0, size)
    loss, parameters = quadratic(eigenvalues)
    found = curvature(loss, parameters, [1.0, 3.0], tolerance=1e-4)
    assert found.largest == pytest.approx(2.0 * eigenvalues.max(), rel=1e-3)
    assert found.converged
    assert found.residuals[0] <= 2e-4 * abs(found.largest)
    assert (found.parameters, found.batches, found.samples) == (size, 2, None)


def test_the_leading_eigenvalues_descend() -> None:
    loss, parameters = quadratic([7.0, -40.0, 3.0, 5.0, *np.linspace(-1.0, 1.0, 60)])
    assert curvature(loss, parameters, [1.0], leading=3).eigenvalues == pytest.approx([7.0, 5.0, 3.0], rel=1e-3)


def test_it_is_the_largest_by_value_and_not_by_modulus() -> None:
    loss, parameters = quadratic([-100.0, 2.0, *np.linspace(-1.0, 1.0, 60)])
    assert curvature(loss, parameters, [1.0]).largest == pytest.approx(2.0, rel=1e-2)


def test_negative_eigenvalues_are_returned_as_they_are() -> None:
    loss, parameters = quadratic(-np.arange(1.0, 31.0))
    assert curvature(loss, parameters, [1.0]).largest == pytest.approx(-1.0, rel=1e-2)


@pytest.mark.parametrize("size", [4, 40])
def test_a_linear_loss_has_no_curvature(size: int) -> None:
    w = torch.zeros(size, requires_grad=True)
    found = curvature(lambda _: w.sum(), [w], [None], leading=2)
    assert found.eigenvalues == (0.0, 0.0)
    assert found.converged


def test_a_hessian_of_low_rank_has_its_eigenvalues() -> None:
    loss, parameters = quadratic([3.0, 1.0, *[0.0] * 48])
    assert curvature(loss, parameters, [1.0], leading=2).eigenvalues == pytest.approx([3.0, 1.0], rel=1e-6)


@pytest.mark.parametrize(
    "middle",
    [[], [nn.BatchNorm1d(8)], [nn.Dropout(0.3)], [nn.BatchNorm1d(8), nn.Dropout(0.3)], [nn.LayerNorm(8), nn.GELU()]],
    ids=["plain", "BatchNorm", "Dropout", "both", "LayerNorm"],
)
@pytest.mark.parametrize("training", [True, False])
def test_a_network_has_the_eigenvalues_of_its_dense_hessian(middle: list[nn.Module], training: bool) -> None:
    model = mlp(*middle).train(training)
    data = batches()
    found = curvature(loss_of(model), model.parameters(), data, leading=3, module=model)
    assert found.eigenvalues == pytest.approx(top(dense(model, data), 3), rel=1e-2)
    assert found.samples == 32


def test_unused_and_frozen_parameters_do_not_count() -> None:
    model = mlp()
    data = batches()
    unused = nn.Parameter(torch.ones(4))
    model[0].requires_grad_(False)
    head, hidden = model[2], [(torch.tanh(model[0](x)), y) for x, y in data]
    found = curvature(loss_of(model), [unused, *model.parameters(), *model.parameters()], data)
    assert found.largest == pytest.approx(top(dense(head, hidden), 1)[0], rel=1e-2)
    assert found.parameters == 4 + sum(p.numel() for p in head.parameters())


def test_the_same_seed_gives_the_same_bits() -> None:
    model, data = mlp(nn.Dropout(0.5)), batches()
    first, second = (curvature(loss_of(model), model.parameters(), data, seed=3) for _ in range(2))
    assert first == second


@pytest.mark.parametrize("products", [20, 60])
def test_too_few_products_are_said(products: int) -> None:
    loss, parameters = quadratic(np.linspace(-5.0, 1.0, 400))
    found = curvature(loss, parameters, [1.0], max_products=products, tolerance=1e-6)
    assert not found.converged
    assert found.products <= products
    assert 0.5 < found.largest < 1.0


# -- fused kernels ---------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0].mean(1)


def test_fused_attention_is_measured() -> None:
    model = Attention()
    data = [(torch.randn(8, 5, 4), torch.randint(0, 4, (8,)))]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        exact = top(dense(model, data), 1)[0]
    assert curvature(loss_of(model), model.parameters(), data).largest == pytest.approx(exact, rel=1e-2)


@pytest.mark.parametrize("in_place", [False, True])
def test_compiled_modules_are_measured(in_place: bool) -> None:
    plain, data = mlp(), batches()
    expected = curvature(loss_of(plain), plain.parameters(), data)
    model: nn.Module = plain
    if in_place:
        plain.compile(backend="aot_eager")
    else:
        model = torch.compile(plain, backend="aot_eager")  # type: ignore[assignment]
    assert curvature(loss_of(model), model.parameters(), data) == expected


def test_autocast_is_off_inside() -> None:
    model, data = mlp(), batches()
    expected = curvature(loss_of(model), model.parameters(), data)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert curvature(loss_of(model), model.parameters(), data) == expected


def test_it_is_measured_where_gradients_are_off() -> None:
    model, data = mlp(), batches()
    expected = curvature(loss_of(model), model.parameters(), data)
    with torch.no_grad():
        assert curvature(loss_of(model), model.parameters(), data) == expected
    with torch.inference_mode():
        assert curvature(loss_of(model), model.parameters(), data) == expected


# -- the spectrum ----------------------------------------------------------------------------------------------------------


def test_the_quadrature_has_the_trace_and_the_ends_of_the_spectrum() -> None:
    model, data = mlp(), batches()
    exact = dense(model, data)
    found = spectrum(loss_of(model), model.parameters(), data, probes=40, steps=12)
    off_diagonal = exact - torch.diag(exact.diag())
    standard_error = float(torch.sqrt(2.0 * off_diagonal.square().sum() / 40))
    assert found.weights.sum() == pytest.approx(1.0)
    assert abs(found.trace - float(exact.trace())) < 4.0 * standard_error
    assert found.nodes.max() == pytest.approx(top(exact, 1)[0], rel=1e-2)
    assert np.all(np.diff(found.nodes) >= 0)
    assert (found.products, found.parameters) == (40 * 12, exact.shape[0])


def test_the_quadrature_of_a_diagonal_hessian_is_exact() -> None:
    h = torch.tensor([4.0, 4.0, 1.0, -2.0, -2.0, -2.0])
    w = torch.zeros(6, requires_grad=True)
    found = spectrum(lambda _: 0.5 * (h * w * w).sum(), [w], [None], probes=1, steps=30)
    assert found.nodes == pytest.approx([-2.0, 1.0, 4.0], abs=1e-5)
    assert found.weights == pytest.approx([1 / 2, 1 / 6, 1 / 3], abs=1e-5)
    assert found.products == 3  # its Krylov space is exhausted
    assert found.trace == pytest.approx(float(h.sum()), abs=1e-5)
    at = np.linspace(-5.0, 7.0, 2001)
    density = found.density(at, width=0.2)
    assert trapezoid(density, at) == pytest.approx(1.0, abs=1e-6)
    assert at[density.argmax()] == pytest.approx(-2.0, abs=0.01)


# -- nothing is changed ----------------------------------------------------------------------------------------------------


def state(model: nn.Module) -> list[Any]:
    """Everything that must stay, as bytes."""
    tensors = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters() if p.grad is not None)]
    return [
        [(t.data_ptr(), t.detach().numpy().tobytes(), t.requires_grad) for t in tensors],
        [module.training for module in model.modules()],
        torch.get_rng_state().numpy().tobytes(),
        str(np.random.get_state()),
        random.getstate(),
        torch.is_grad_enabled(),
    ]


class Restless(nn.Module):
    """Draws from every generator, replaces a buffer, changes its mode; raises in a given call."""

    def __init__(self, raise_in: int | None) -> None:
        super().__init__()
        self.net = mlp(nn.BatchNorm1d(8), nn.Dropout(0.3))
        self.register_buffer("count", torch.zeros(()))
        self.net[1].eval()
        self._raise_in = raise_in
        self._calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self._calls += 1
        self.count = self.count + random.random() + np.random.rand()
        output: Tensor = self.net(x + 0.1 * torch.randn_like(x) + self.count)
        self.net.train(self._calls % 2 == 0)
        if self._calls == self._raise_in:
            raise ArithmeticError("in the loss")
        return output


@pytest.mark.parametrize("raise_in", [None, 1, 2, 7])
def test_nothing_is_changed(raise_in: int | None) -> None:
    model, data = Restless(raise_in), batches()
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    before = state(model)
    try:
        found = curvature(loss_of(model), model.parameters(), data, module=model)
    except ArithmeticError:
        assert raise_in is not None
    else:
        assert raise_in is None
        assert found.converged
    assert state(model) == before


def test_the_product_is_that_of_one_symmetric_matrix() -> None:
    model, data = Restless(None), batches()
    hessian = Hessian(loss_of(model), model.parameters(), data, module=model)
    matrix = np.stack([hessian.product(unit) for unit in np.eye(hessian.size)])
    assert np.abs(matrix - matrix.T).max() < 1e-5 * np.abs(matrix).max()


# -- what is refused -------------------------------------------------------------------------------------------------------


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * gradient


W = torch.ones(40, requires_grad=True)
OTHER = torch.ones(40, requires_grad=True)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda _: W.square(), "shape \\(40,\\).*mean"),
        (lambda _: 3.0, "a float"),
        (lambda _: W.detach().sum(), "no graph"),
        (lambda _: OTHER.square().sum(), "does not depend"),
        (lambda _: Once.apply(W).sum().square(), "differentiated twice.*once_differentiable"),
        (lambda _: checkpoint(lambda x: x.square().sum(), W, use_reentrant=True), "use_reentrant=False"),
    ],
)
def test_a_loss_that_cannot_be_measured_is_refused(loss: Callable[[Any], Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        curvature(loss, [W], [None])


@pytest.mark.parametrize("loss", [lambda _: W.sum() / 0.0, lambda _: (W - 1.0).norm(), lambda _: (W * torch.nan).sum()])
def test_a_loss_that_is_not_finite_is_refused(loss: Callable[[Any], Any]) -> None:
    with pytest.raises(NotFiniteError, match=r"not finite|diverged"):
        curvature(loss, [W], [None])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"parameters": []}, "No parameter"),
        ({"parameters": [torch.ones(3)]}, "No parameter"),
        ({"parameters": [torch.ones(3, dtype=torch.bfloat16, requires_grad=True)]}, "bfloat16.*mixed"),
        ({"batches": []}, "no batch"),
        ({"leading": 0}, "leading"),
        ({"leading": 41}, "leading=41 eigenvalues of 40"),
        ({"tolerance": 0.0}, "tolerance"),
        ({"max_products": 5}, "max_products"),
        ({"seed": -1}, "seed"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], words: str) -> None:
    options = {"parameters": [W], "batches": [None], **arguments}
    with pytest.raises(ConfigurationError, match=words):
        curvature(lambda _: W.square().sum(), **options)


@pytest.mark.parametrize("arguments", [{"probes": 0}, {"steps": 0}])
def test_bad_arguments_of_the_spectrum_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(arguments))):
        spectrum(lambda _: W.square().sum(), [W], [None], **arguments)


def test_what_the_loss_raises_is_passed_on() -> None:
    def broken(_: Any) -> Tensor:
        raise RuntimeError("derivative of my own is not implemented")

    with pytest.raises(RuntimeError, match="my own"):
        curvature(broken, [W], [None])


def test_the_slope_is_that_of_the_whole_loss_without_the_noise_of_its_estimate() -> None:
    """Of F(x) = ½ Σ h x² with gradients h x + ξ, and with so much noise that the mean gradient's square is mostly that."""
    h, noise = torch.tensor([4.0, 0.1]), torch.Generator().manual_seed(0)
    x = torch.tensor([0.1, 3.0], requires_grad=True)
    shifts = torch.randn(500, 2, generator=noise)
    shifts = (shifts - shifts.mean(0)) / shifts.std(0)  # what a hundred times as many would have
    found = gradient_noise(lambda shift: 0.5 * (h * x * x).sum() + shift @ x, [x], list(shifts))
    assert found.variance == pytest.approx(2.0, rel=0.01)
    assert found.slope == pytest.approx(0.16 + 0.09 - 2.0 / 500, rel=0.01)
    assert found.along_loss == pytest.approx(0.25 / (2.0 * 0.47), rel=0.25)
    hidden = gradient_noise(
        lambda shift: 0.5 * (h * x * x).sum() + 100.0 * shift @ x, [x], list(shifts[:4] - shifts[:4].mean(0))
    )
    assert hidden.slope < 0.0  # noise hides it: it may be as steep as that, and not steeper
    assert hidden.along_loss == pytest.approx(hidden.variance / 4 / (2.0 * hidden.loss))
    shifts = shifts[:10] - shifts[:10].mean(0)
    whole = gradient_noise(lambda shift: 0.5 * (h * x * x).sum() + shift @ x, [x], list(shifts), epoch=10)
    assert (whole.slope, whole.hidden) == (pytest.approx(0.25, rel=1e-5), 0.0)  # of all that there is: no noise is left
