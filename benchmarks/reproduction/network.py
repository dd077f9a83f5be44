"""A-PSGD on a network, whose loss is not convex: what to run, predicted and simulated. (Yu, Chen, Poor, arXiv 2406.11159.)

Digits with a hidden layer of 16 rectified units: time to a loss against the number of active workers and against the staleness
bound. The analysis is of a quadratic, and gets one: the Hessian where full-batch descent passes the target, its negative
eigenvalues left out, and the way from the start to a point below the target along its eigenvectors. A network begins on a
plateau, which a quadratic has not: full-batch descent says how much longer that takes to the target, and predicted times are as
much longer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.reproduction.report import Report, progress
from benchmarks.reproduction.schedule import BATCH, LAWS, Scene, figure_of, row
from lightning_gossip.analysis import Curve, Problem, Server, Setting
from lightning_gossip.simulation import Classifier, digits

HIDDEN = 16
TARGET, END = 0.5, 0.26
LR, LR_BOUNDED = 0.05, 0.1
SEEDS = range(2)
NUMBERS = [2, 4, 8, 12, 16, 24, 32, 64]
BOUNDS = [2, 4, 6, 8, 12, 16, None]
ACTIVE = 24
_CHUNK = 64
_DESCENT_LR = 0.2


def network(dtype: torch.dtype = torch.float32) -> Classifier:
    """The objective."""
    return Classifier(digits(), hidden=HIDDEN, dtype=dtype)


def gradients(objective: Classifier, models: Tensor) -> Tensor:
    """Of the whole loss, at several models, shape (k, d)."""
    everything, k = list(range(objective.samples or 0)), len(models)
    return objective.gradients(models, list(range(k)), [everything] * k, [np.random.default_rng(0)] * k)


def hessian(objective: Classifier, at: Tensor, *, epsilon: float = 1e-8) -> Tensor:
    """By central differences, shape (d, d); so short ones that hardly any of them crosses a kink of a rectified unit."""
    shifts = torch.eye(len(at), dtype=at.dtype) * epsilon
    rows = [
        (gradients(objective, at + part) - gradients(objective, at - part)) / (2.0 * epsilon) for part in shifts.split(_CHUNK)
    ]
    found = torch.cat(rows)
    return 0.5 * (found + found.T)


class Model(NamedTuple):
    """What the analysis is given of the network.

    Args:
        problem: the quadratic.
        target: of its loss.
        negative: eigenvalues that were left out.
        longer: times as long as the quadratic the network takes to the target by full-batch descent.
    """

    problem: Problem
    target: float
    negative: int
    longer: float

    def in_time(self, curve: Curve) -> Curve:
        """Predictions of the quadratic as those of the network."""
        return replace(curve, predictions=[replace(one, time_s=self.longer * one.time_s) for one in curve.predictions])


def quadratic_model(objective: Classifier) -> Model:
    """Of the loss, from the start of seed 0."""
    path = [objective.start(torch.Generator().manual_seed(0))]
    while objective.loss(path[-1]) > END:
        path.append(path[-1] - _DESCENT_LR * gradients(objective, path[-1].unsqueeze(0))[0])
    steps = next(number for number, model in enumerate(path) if objective.loss(model) < TARGET)
    eigenvalues, vectors = torch.linalg.eigh(hessian(objective, path[steps]))
    distances = vectors.T @ (path[0] - path[-1])
    kept = eigenvalues > 1e-6
    problem = Problem.grouped(eigenvalues[kept].numpy(), distances[kept].numpy())
    target = TARGET - objective.loss(path[-1])
    longer = _DESCENT_LR * steps / problem.flow_time(target)
    return Model(problem, target, int((eigenvalues < -1e-6).sum()), longer)


def show(report: Report) -> dict[str, Any]:
    """Run it, and put it on the report."""
    objective = network()
    with progress("the Hessian at the target"):
        model = quadratic_model(network(torch.float64))
    problem, excess = model.problem, model.target
    workers = [
        Scene(
            f"digits, MLP-{HIDDEN}, {name}",
            model.in_time(Server(problem, excess, law).over_workers(Setting(lr=LR, active_workers=1), NUMBERS)),
            objective,
            law,
            TARGET,
        )
        for name, law in LAWS.items()
    ]
    staleness = [
        Scene(
            f"digits, MLP-{HIDDEN}, {ACTIVE} workers, {name}",
            model.in_time(
                Server(problem, excess, LAWS[name]).over_staleness(Setting(lr=LR_BOUNDED, active_workers=ACTIVE), BOUNDS)
            ),
            objective,
            LAWS[name],
            TARGET,
        )
        for name in ("Erlang-4", "exponential")
    ]
    scenes = [*workers, *staleness]
    for number, scene in enumerate(scenes, start=1):
        with progress(f"{number}/{len(scenes)} {scene.name}"):
            scene.simulate(SEEDS)
    columns = ("", "predicted best", "simulated best", "simulated there over simulated best", "prediction off by, where stable")
    for title, group in (("active workers", workers), ("staleness bound", staleness)):
        report.table(
            f"Time to a loss of {TARGET} against the {title}",
            columns,
            [row(scene) for scene in group],
            caption="Times of the best in seconds, a step takes 1 on the average. Off by: median and largest, of settings with"
            " a margin of at least 1.3.",
        )
    for title, group in (("active workers", workers), ("staleness bound", staleness)):
        report.table(
            f"The same, at each number: {title}",
            ("", *("none" if value is None else f"{value:g}" for value in group[0].curve.values)),
            [cells for scene in group for cells in _all(scene)],
        )
    panels = [(f"digits, MLP-{HIDDEN}", workers), (f"digits, MLP-{HIDDEN}, {ACTIVE} workers", staleness)]
    report.figure(figure_of(panels))
    largest = float(max(problem.eigenvalues))
    return {
        "hidden": HIDDEN,
        "target": TARGET,
        "lr": LR,
        "lr_bounded": LR_BOUNDED,
        "seeds": len(SEEDS),
        "batch": BATCH,
        "largest_curvature": largest,
        "negative_eigenvalues": model.negative,
        "longer_than_the_quadratic": model.longer,
    }


def _all(scene: Scene) -> list[list[str]]:
    law = scene.name.rsplit(", ", 1)[1]
    predicted = [f"{prediction.time_s:.1f}" for prediction in scene.curve.predictions]
    return [[f"{law}, predicted", *predicted], [f"{law}, simulated", *(f"{time_s:.1f}" for time_s in scene.times)]]
