"""Any torch module as an objective, and torch's own optimizers on flat models."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_gossip.errors import ConfigurationError
from lightning_gossip.simulation import EAMSGD, Cluster, Constant, PeriodicAveraging, Recording, Steps, simulate
from lightning_gossip.simulation.cluster.compute_times import generator_of
from lightning_gossip.simulation.problems.modules import ModuleObjective
from lightning_gossip.simulation.problems.stacked_models import Models
from lightning_gossip.simulation.problems.torch_optimizers import ELEMENTWISE, TorchOptimizer

X = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
Y = torch.randint(0, 3, (40,), generator=torch.Generator().manual_seed(1))
SIZES = [6 * 5, 5, 5 * 3, 3]


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def normed() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))


def dropped() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 50), nn.Dropout(0.5), nn.Linear(50, 3))


def loss(module: nn.Module, batch: Sequence[int]) -> Tensor:
    return nn.functional.cross_entropy(module(X[list(batch)]), Y[list(batch)])


def objective(build: Any = net, **options: Any) -> ModuleObjective:
    return ModuleObjective(
        build, loss, samples=40, batch=lambda indices: indices, held_out=[range(20), range(20, 40)], **options
    )


def generators(number: int) -> list[np.random.Generator]:
    return [np.random.default_rng(rank) for rank in range(number)]


def as_module(build: Any, model: Tensor) -> nn.Module:
    module: nn.Module = build()
    values = [*module.parameters(), *(buffer for buffer in module.buffers() if buffer.is_floating_point())]
    for value, part in zip(values, model.split([value.numel() for value in values]), strict=True):
        value.data.copy_(part.view_as(value))
    return module


def test_gradients_are_each_model_s_own_on_its_own_batch() -> None:
    problem = objective()
    models = torch.stack([problem.start(torch.Generator().manual_seed(seed)) for seed in range(3)])
    batches = [[0, 1, 2, 3], [7], [4, 5, 6]]
    found = problem.gradients(models, range(3), batches, generators(3))
    for row, model, batch in zip(found, models, batches, strict=True):
        module = as_module(net, model)
        loss(module, batch).backward()  # type: ignore[no-untyped-call]
        assert torch.allclose(row, torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None]), rtol=1e-5)


def test_a_start_is_the_module_s_own_and_leaves_torch_s_random_state() -> None:
    problem = objective()
    torch.manual_seed(9)
    expected = torch.cat([p.detach().flatten() for p in net().parameters()])
    torch.manual_seed(5)
    before = torch.get_rng_state()
    assert torch.equal(problem.start(torch.Generator().manual_seed(9)), expected)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_worker_draws_its_own_dropout_whoever_is_computed_beside_it() -> None:
    problem = objective(dropped)
    model = problem.start(torch.Generator().manual_seed(0))
    both = problem.gradients(torch.stack([model, model]), [0, 1], [[1, 2], [1, 2]], generators(2))
    alone = problem.gradients(model[None], [1], [[1, 2]], generators(2)[1:])
    assert torch.equal(both[1], alone[0])
    assert not torch.equal(both[0], both[1])
    assert problem.loss(model) == problem.loss(model)  # in evaluation mode nothing is drawn


def test_the_loss_is_the_mean_over_the_held_out_batches() -> None:
    problem = objective()
    model = problem.start(torch.Generator().manual_seed(2))
    assert problem.loss(model) == pytest.approx(loss(as_module(net, model), range(40)).item(), rel=1e-6)


def test_a_loss_that_draws_at_random_is_the_same_of_the_same_model() -> None:
    def augmented(module: nn.Module, batch: Sequence[int]) -> Tensor:
        return loss(module, batch) + torch.rand(())

    made = ModuleObjective(net, augmented, samples=40, batch=lambda indices: indices, held_out=[range(20), range(20, 40)])
    model = made.start(torch.Generator().manual_seed(0))
    state = torch.get_rng_state()
    assert made.loss(model) == made.loss(model)
    assert torch.equal(torch.get_rng_state(), state)


def test_running_statistics_are_moved_by_forward_passes_and_by_no_optimizer() -> None:
    problem = objective(normed)
    assert problem.statistics == 10
    models = Models(problem, adam(problem, lr=0.5), workers=2, seed=3)
    reference = as_module(normed, models.x[1].clone())
    models.begin(1, [3, 4, 5])
    models.step(1, lr=0.5)
    reference.train()
    loss(reference, [3, 4, 5])
    assert torch.equal(models.x[1, -10:], torch.cat([reference[1].running_mean, reference[1].running_var]))  # type: ignore[index, list-item]
    assert not torch.equal(models.x[1, :-10], models.x[0, :-10])
    assert torch.equal(models.x[0, -10:], torch.cat([torch.zeros(5), torch.ones(5)]))


def adam(
    problem: ModuleObjective, *, lr: float, steps: int = 1, clip_norm: float | None = None, **options: Any
) -> TorchOptimizer:
    groups = [(SIZES[0], {"lr": lr, **options}), (problem.numel - problem.statistics - SIZES[0], {"lr": lr / 2, **options})]
    lrs = [lr * (1.0 - step / steps) for step in range(steps)]
    return TorchOptimizer(kind=torch.optim.AdamW, groups=groups, lrs=lrs, clip_norm=clip_norm)


@pytest.mark.parametrize("clip_norm", [None, 0.05])
def test_ddp_makes_the_steps_of_a_plain_loop_with_the_mean_gradient(clip_norm: float | None) -> None:
    """Losses of one process that has all workers' batches, with torch's optimizer, clipping and schedule."""
    steps, workers, seed = 12, 3, 4
    problem = objective()
    optimizer = adam(problem, lr=0.05, steps=steps, clip_norm=clip_norm, weight_decay=0.1)
    result = simulate(
        "ddp",
        Cluster(workers, Constant(1.0)),
        work=Steps(number=steps, batch_size=4),
        objective=problem,
        optimizer=optimizer,
        seed=seed,
        recording=Recording(evaluate_every=workers),
    )
    module = as_module(net, problem.start(torch.Generator().manual_seed((seed * 1_000_003 + 1) % 2**63)))
    first, *others = module.parameters()
    reference = torch.optim.AdamW([{"params": [first]}, {"params": others, "lr": 0.025}], lr=0.05, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(reference, lambda step: 1.0 - step / steps)
    draws = [generator_of(seed, 3, rank) for rank in range(workers)]
    expected = [loss(module, range(40)).item()]
    for _ in range(steps):
        reference.zero_grad()
        for generator in draws:
            (loss(module, generator.integers(40, size=4).tolist()) / workers).backward()  # type: ignore[no-untyped-call]
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(module.parameters(), clip_norm)
        reference.step()
        schedule.step()
        expected.append(loss(module, range(40)).item())
    assert [point.loss for point in result.points[: steps + 1]] == pytest.approx(expected, rel=1e-5)
    assert expected[-1] < 0.95 * expected[0]


@pytest.mark.parametrize("kind", ELEMENTWISE, ids=lambda kind: kind.__name__)
def test_rows_stepped_one_by_one_and_together_are_as_torch_moves_the_tensors(kind: type[torch.optim.Optimizer]) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 7, generator=generator)
    alone, together = x.clone(), x.clone()
    theirs = [nn.Parameter(part.clone()) for part in x[1].split([3, 4])]
    options = TorchOptimizer(kind=kind, groups=[(3, {"lr": 0.1}), (4, {"lr": 0.1})], lrs=[0.1])
    reference = kind(theirs, lr=0.1)  # type: ignore[call-arg]
    by_row, at_once = options.stacked(alone), options.stacked(together)
    for _ in range(4):
        gradients = torch.randn(2, 7, generator=generator)
        for row in range(2):
            by_row.step(row, gradients[row].clone(), 0.1)
        at_once.step(slice(None), gradients.clone(), 0.1)
        for part, gradient in zip(theirs, gradients[1].split([3, 4]), strict=True):
            part.grad = gradient.clone()
        reference.step()
    expected = torch.cat([part.detach() for part in theirs])
    assert torch.equal(alone[1], expected)
    assert torch.equal(together[1], expected)
    assert torch.equal(alone, together)


def test_a_schedule_follows_the_share_of_the_run() -> None:
    optimizer = TorchOptimizer(kind=torch.optim.SGD, groups=[(1, {"lr": 1.0})], lrs=[4.0, 3.0, 2.0, 1.0])
    assert [optimizer.lr_at(progress) for progress in (0.0, 0.24, 0.25, 0.5, 0.75, 1.0)] == [4.0, 4.0, 3.0, 2.0, 1.0, 1.0]


@pytest.mark.parametrize("rule", ["keep", "average", "reset"])
def test_periodic_averaging_keeps_averages_or_resets_the_moments(rule: Any) -> None:
    """With an average after each step: equal moments, and so equal models one step later, unless each keeps its own."""
    problem = objective()
    result = simulate(
        PeriodicAveraging(period=2, optimizer_state=rule, at_rendezvous="evaluate"),
        Cluster(2, Constant(1.0)),
        work=Steps(number=4, batch_size=4),
        objective=problem,
        optimizer=adam(problem, lr=0.05, steps=4),
        seed=1,
    )
    losses = [point.loss for point in result.points]
    assert losses[-1] < losses[0]
    ROWS[rule] = losses[-1]
    assert len(set(ROWS.values())) == len(ROWS)


ROWS: dict[str, float] = {}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: TorchOptimizer(kind=torch.optim.LBFGS, groups=[], lrs=[0.1]), "LBFGS"),
        (lambda: TorchOptimizer(kind=torch.optim.SGD, groups=[(1, {"lr": 1.0})], lrs=[]), "lrs"),
        (lambda: TorchOptimizer(kind=torch.optim.SGD, groups=[(1, {"lr": 1.0})], lrs=[0.1], clip_norm=0.0), "clip_norm"),
        (lambda: objective(lambda: nn.ReLU()), "none"),
        (lambda: objective(lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())), "float32 and torch.float64"),
        (
            lambda: simulate(
                EAMSGD(momentum=0.9),
                Cluster(2, Constant(1.0)),
                work=Steps(number=1, batch_size=1),
                objective=objective(),
                optimizer=adam(objective(), lr=0.1),
            ),
            "momentum=null",
        ),
    ],
)
def test_what_cannot_be_simulated_is_said(make: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        make()


def test_the_sizes_are_those_of_the_network() -> None:
    assert [end - start for start, end in pairwise([0, *np.cumsum(SIZES)])] == [p.numel() for p in net().parameters()]
