from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gossip.errors import ConfigurationError
from lightning_gossip.simulation import SGD, Classes, Classifier, Objective, Quadratic, digits, mlp, softmax_regression
from lightning_gossip.simulation.problems.sgd import StackedSGD
from lightning_gossip.simulation.problems.stacked_models import Models

GENERATOR = torch.Generator().manual_seed(0)
DATA = Classes(torch.randn(30, 6, generator=GENERATOR), torch.randint(0, 3, (30,), generator=GENERATOR))


def by_autograd(classifier: Classifier, model: torch.Tensor, batch: list[int]) -> torch.Tensor:
    model = model.clone().requires_grad_()
    logits = classifier._logits(model, classifier._x[batch])
    torch.nn.functional.cross_entropy(logits, classifier._y[batch]).backward()  # type: ignore[no-untyped-call]
    assert model.grad is not None
    return model.grad


@pytest.mark.parametrize("hidden", [0, 5])
def test_a_classifier_s_gradients_are_autograd_s_for_batches_of_any_length(hidden: int) -> None:
    classifier = Classifier(DATA, hidden=hidden, dtype=torch.float64)
    models = torch.stack([classifier.start(torch.Generator().manual_seed(seed)) for seed in range(4)])
    batches = [[0, 1, 2], [3], [4, 5, 6, 7, 8, 4], [29]]
    ours = classifier.gradients(models, range(4), batches, [])
    for row, model, batch in zip(ours, models, batches, strict=True):
        assert torch.allclose(row, by_autograd(classifier, model, batch), rtol=1e-10, atol=1e-12)


def test_the_digits_are_the_recipes_own_parts() -> None:
    from recipes.digits import DigitsData

    ours, theirs = digits(), DigitsData()
    assert torch.equal(ours.x, theirs.train.tensors[0].flatten(1))
    assert ours.test_y is not None
    assert torch.equal(ours.test_y, theirs.test.tensors[1])


def test_a_start_is_as_wide_as_a_linear_layer_s() -> None:
    start = mlp(DATA, hidden=100).start(torch.Generator().manual_seed(1))
    assert float(start[: 6 * 100].abs().max()) == pytest.approx(6**-0.5, rel=0.02)
    assert float(start[6 * 100 + 100 :].abs().max()) == pytest.approx(100**-0.5, rel=0.02)


def test_the_workers_minima_differ_by_the_heterogeneity_and_their_mean_is_zero() -> None:
    problem = Quadratic([1.0] * 200, heterogeneity=2.0, workers=40)
    gradients = problem.gradients(torch.zeros(40, 200, dtype=torch.float64), range(40), [None] * 40, [])
    assert float(gradients.mean(0).abs().max()) < 1e-12
    assert float(gradients.std()) == pytest.approx(2.0, rel=0.05)


def test_a_quadratic_s_noise_is_each_worker_s_own_and_as_large_as_asked() -> None:
    problem = Quadratic([1.0] * 500, noise=0.3)
    models = torch.zeros(2, 500, dtype=torch.float64)
    both = problem.gradients(models, [0, 1], [None, None], [np.random.default_rng(0), np.random.default_rng(1)])
    alone = problem.gradients(models[1:], [1], [None], [np.random.default_rng(1)])
    assert torch.equal(both[1], alone[0])
    assert float(both.std()) == pytest.approx(0.3, rel=0.1)


@pytest.mark.parametrize(
    "options",
    [SGD(lr=0.1), SGD(lr=0.1, momentum=0.9, weight_decay=0.01), SGD(lr=0.1, momentum=0.9, nesterov=True)],
    ids=str,
)
def test_the_optimizer_is_torch_s_to_the_bit(options: SGD) -> None:
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(2))
    theirs = torch.nn.Parameter(x[1].clone())
    reference = torch.optim.SGD(
        [theirs], lr=0.1, momentum=options.momentum, weight_decay=options.weight_decay, nesterov=options.nesterov
    )
    ours = StackedSGD(options, x)
    for step in range(5):
        gradient = torch.randn(8, generator=torch.Generator().manual_seed(step))
        theirs.grad = gradient.clone()
        reference.step()
        ours.step(1, gradient, 0.1)
        assert torch.equal(x[1], theirs.detach())


def test_the_learning_rate_falls_at_its_milestones() -> None:
    options = SGD(lr=1.0, milestones=(0.3, 0.6))
    assert [round(options.lr_at(progress), 6) for progress in (0.0, 0.29, 0.3, 0.6, 1.0)] == [1.0, 1.0, 0.1, 0.01, 0.01]


class Counted(Objective):
    """A quadratic that writes down how many gradients were asked for at once."""

    numel = 2

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def start(self, generator: torch.Generator) -> torch.Tensor:
        return torch.ones(2, dtype=torch.float64)

    def gradients(self, models, ranks, batches, generators):  # type: ignore[no-untyped-def]
        self.asked.append(list(ranks))
        return models.clone()

    def loss(self, model: torch.Tensor) -> float:
        return float(model.square().sum())


def test_the_gradients_of_all_steps_under_way_are_computed_together() -> None:
    problem = Counted()
    models = Models(problem, SGD(lr=0.5), workers=4, seed=0)
    for rank in (2, 0, 1):
        models.begin(rank, None)
    models.step(1, 0.5)
    models.begin(1, None)
    models.step(0, 0.5)
    models.begin(3, None)
    models.step(1, 0.5)
    assert problem.asked == [[0, 1, 2], [1, 3]]
    assert models.x[:, 0].tolist() == [0.5, 0.25, 1.0, 1.0]


@settings(max_examples=20)
@given(order=st.permutations(range(5)))
def test_when_a_gradient_is_computed_changes_no_model(order: list[int]) -> None:
    def final(batched: bool) -> torch.Tensor:
        models = Models(Quadratic([1.0, 3.0], noise=0.1), SGD(lr=0.1), workers=5, seed=1)
        for _ in range(3):
            for rank in order:
                models.begin(rank, None)
                if not batched:
                    models.step(rank, 0.1)
            for rank in order if batched else ():
                models.step(rank, 0.1)
        return models.x

    assert torch.equal(final(batched=True), final(batched=False))


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda: Quadratic([]), "spectrum"),
        (lambda: Quadratic([-1.0]), "spectrum"),
        (lambda: Quadratic([1.0], noise=-1.0), "noise"),
        (lambda: Quadratic([1.0], heterogeneity=1.0), "workers"),
        (lambda: Quadratic([1.0], heterogeneity=1.0, workers=3).check(4), "workers"),
        (lambda: Quadratic([1.0], start_at=float("inf")), "start_at"),
        (lambda: mlp(DATA, hidden=0), "hidden"),
        (lambda: Classifier(DATA, hidden=-1), "hidden"),
        (lambda: softmax_regression(DATA, dtype=torch.int64), "dtype"),
        (lambda: Classes(torch.zeros(3, 2), torch.zeros(4, dtype=torch.int64)), "x of shape"),
        (lambda: SGD(lr=-1.0), "lr"),
        (lambda: SGD(momentum=1.0), "momentum"),
        (lambda: SGD(weight_decay=-1.0), "weight_decay"),
        (lambda: SGD(milestones=(0.0,)), "milestones"),
        (lambda: SGD(gamma=0.0), "gamma"),
    ],
)
def test_what_cannot_be_is_refused_by_name(make, key: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigurationError, match=key):
        make()
