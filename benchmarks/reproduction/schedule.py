"""Asynchronous SGD with a server: what to run. (The SDDE framework of Yu, Chen, Poor, arXiv 2406.11159, as reconstructed here.)

Time to a loss against the number of active workers, the staleness bound and the event threshold: predicted by
``lightning_gossip.analysis`` and simulated, on a quadratic with three eigenvalues, and on softmax regression with digits, for
which the analysis gets the Hessian at the target and the distances along its eigenvectors. A setting counts as found if the
simulated time there is at most 1.1 of the simulated best on the grid.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from benchmarks.reproduction.report import Report, axes_of, progress
from lightning_gossip.analysis import Curve, Problem, Server, Setting
from lightning_gossip.simulation import (
    SGD,
    Cluster,
    Constant,
    Erlang,
    Exponential,
    Law,
    Links,
    Objective,
    Quadratic,
    Recording,
    Steps,
    digits,
    make_strategy,
    simulate,
    softmax_regression,
)

SPECTRUM, TARGET = [1.0, 0.3, 0.1], 7e-4
LR = 0.05
SEEDS = range(4)
LAWS: dict[str, Law] = {"constant": Constant(1.0), "Erlang-4": Erlang(1.0, 4), "exponential": Exponential(1.0)}
BATCH = 256  # of softmax regression
BYTES = 1_000  # of a model; only its time on a link matters
COLOURS = ("#3b6ea8", "#c8553d", "#1b7f5c", "#8a6fb0")


def links_of(transfer_s: float) -> Links | None:
    """On which a vector that has the server's link for itself takes so long; None for no time."""
    return Links(bandwidth=BYTES / transfer_s) if transfer_s else None


@dataclass
class Scene:
    """One curve: a knob, what is predicted and what is simulated."""

    name: str
    curve: Curve
    objective: Objective
    law: Law
    target: float
    transfer_s: float = 0.0
    first: bool = False  # the first time that the loss is reached, not the last
    times: list[float] = field(default_factory=list)

    def simulate(self, seeds: Sequence[int]) -> None:
        """Fill in the simulated times, the mean over seeds."""
        for prediction in self.curve.predictions:
            patience_s = 2.5 * prediction.time_s + 20.0 if math.isfinite(prediction.time_s) else 60.0
            runs = [self._run(prediction.setting, seed, patience_s) for seed in seeds]
            self.times.append(float(np.mean(runs)))

    @property
    def ratio(self) -> float:
        """Simulated time at the predicted best over the simulated best."""
        return self.times[list(self.curve.predictions).index(self.curve.best)] / min(self.times)

    def _run(self, setting: Setting, seed: int, patience_s: float) -> float:
        options = {"max_staleness": setting.max_staleness, "event_trigger": setting.event_threshold}
        result = simulate(
            make_strategy("apsgd", scale=1.0, **options),
            Cluster(setting.active_workers, self.law),
            work=Steps(number=1_000_000, batch_size=BATCH),
            objective=self.objective,
            optimizer=SGD(lr=setting.lr),
            links=links_of(self.transfer_s),
            model_bytes=BYTES,
            recording=Recording(evaluate_every=1 if isinstance(self.objective, Quadratic) else 4),
            target_loss=self.target if self.first else None,
            until_s=patience_s,
            seed=seed,
        )
        above = np.flatnonzero(~(np.array([point.loss for point in result.points]) <= self.target))
        last = int(above[-1]) + 1 if above.size else 0
        return result.points[last].time_s if last < len(result.points) else math.inf


def softmax_on_digits() -> tuple[Objective, Problem, float, float]:
    """The objective, its quadratic model around a point below the target, the target, and the model's target."""
    data = digits()
    x, y = torch.cat([data.x.double(), torch.ones(len(data.y), 1, dtype=torch.float64)], dim=1), data.y
    objective, target = softmax_regression(data, dtype=torch.float64), 0.5
    path = [objective.start(torch.Generator().manual_seed(0)).view(65, 10)]  # the last row is the bias
    hot = torch.nn.functional.one_hot(y, 10).double()
    while objective.loss(path[-1].flatten()) > 0.26:
        path.append(path[-1] - 0.5 * x.T @ (torch.softmax(x @ path[-1], dim=1) - hot) / len(x))
    at = next(w for w in path if objective.loss(w.flatten()) < target)
    p = torch.softmax(x @ at, dim=1)
    hessian = torch.einsum("ni,nab,nj->iajb", x, torch.diag_embed(p) - p[:, :, None] * p[:, None, :], x) / len(x)
    eigenvalues, vectors = torch.linalg.eigh(hessian.reshape(650, 650))
    distances = vectors.T @ (path[0] - path[-1]).flatten()
    problem = Problem.grouped(eigenvalues.numpy(), distances.numpy())
    return objective, problem, target, target - objective.loss(path[-1].flatten())


def show(report: Report) -> dict[str, Any]:
    """Run it, and put it on the report."""
    workers, staleness, events = _over_workers(), _over_staleness(), _over_events()
    scenes = [*workers, *staleness, *events]
    for number, scene in enumerate(scenes, start=1):
        with progress(f"{number}/{len(scenes)} {scene.name}"):
            scene.simulate(SEEDS if not scene.first else range(12))
    for title, group in (("active workers", workers), ("staleness bound", staleness), ("event threshold", events)):
        report.table(
            f"Time to a loss against the {title}",
            ("", "predicted best", "simulated best", "simulated there over simulated best", "prediction off by, where stable"),
            [row(scene) for scene in group],
            caption="Times of the best in seconds, a step takes 1 on the average. Off by: median and largest, of settings with"
            " a margin of at least 1.3.",
        )
    report.figure(figure_of([("quadratic", workers[:3]), ("softmax regression", workers[3:])]))
    report.figure(figure_of([("quadratic, 24 workers", staleness), ("quadratic, 24 workers, Erlang-4", events)]), "_bounds")
    return {"spectrum": SPECTRUM, "target": TARGET, "lr": LR, "seeds": len(SEEDS), "batch": BATCH}


def _over_workers() -> list[Scene]:
    numbers = [2, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 64]
    setting = Setting(lr=LR, active_workers=1)
    scenes = [
        Scene(
            f"quadratic, {name}",
            Server(Problem(eigenvalues=SPECTRUM), TARGET, law).over_workers(setting, numbers),
            Quadratic(SPECTRUM),
            law,
            TARGET,
        )
        for name, law in LAWS.items()
    ]
    objective, problem, target, excess = softmax_on_digits()
    for name, law in LAWS.items():
        curve = Server(problem, excess, law).over_workers(setting, numbers)
        scenes.append(Scene(f"softmax regression, {name}", curve, objective, law, target))
    return scenes


def _over_staleness() -> list[Scene]:
    bounds = [2, 4, 6, 8, 10, 12, 14, 16, 20, 24, 32, None]
    scenes = []
    for link_name, transfer_s in (("ideal", 0.0), ("limited link", 0.1)):
        for name in ("Erlang-4", "exponential"):
            server = Server(Problem(eigenvalues=SPECTRUM), TARGET, LAWS[name], links=links_of(transfer_s), model_bytes=BYTES)
            curve = server.over_staleness(Setting(lr=0.12, active_workers=24), bounds)
            scenes.append(Scene(f"{link_name}, {name}", curve, Quadratic(SPECTRUM), LAWS[name], TARGET, transfer_s))
    return scenes


def _over_events() -> list[Scene]:
    thresholds = [None, 0.001, 0.002, 0.004, 0.008, 0.016, 0.024, 0.032, 0.048, 0.064]
    scenes = []
    for link_name, transfer_s in (("ideal", 0.0), ("limited link", 0.1), ("three times narrower", 0.3)):
        server = Server(Problem(eigenvalues=SPECTRUM), TARGET, LAWS["Erlang-4"], links=links_of(transfer_s), model_bytes=BYTES)
        curve = server.over_thresholds(Setting(lr=0.03, active_workers=24), thresholds)
        scenes.append(
            Scene(f"{link_name}, Erlang-4", curve, Quadratic(SPECTRUM), LAWS["Erlang-4"], TARGET, transfer_s, first=True)
        )
    return scenes


def row(scene: Scene) -> list[str]:
    """Of a table: the predicted best and the simulated best."""
    best = scene.curve.best
    fastest = int(np.argmin(scene.times))
    pairs = zip(scene.curve.predictions, scene.times, strict=True)
    errors = [abs(prediction.time_s / time - 1.0) for prediction, time in pairs if prediction.margin >= 1.3 and time < math.inf]
    return [
        scene.name,
        f"{_text(getattr(best.setting, scene.curve.knob))} ({best.time_s:.1f})",
        f"{_text(scene.curve.values[fastest])} ({scene.times[fastest]:.1f})",
        f"{scene.ratio:.2f}",
        f"{np.median(errors):.0%}, {max(errors):.0%}",
    ]


def _text(value: float | None) -> str:
    return "none" if value is None else f"{value:g}"


def figure_of(panels: Sequence[tuple[str, Sequence[Scene]]]) -> Any:
    """Predicted lines and simulated dots, a panel for each group of scenes."""
    figure, axes = axes_of(len(panels), width=6.0, height=4.2)
    for panel, (label, scenes) in zip(axes, panels, strict=True):
        for scene, colour in zip(scenes, COLOURS, strict=False):
            place = list(range(len(scene.curve.values)))
            predicted = [prediction.time_s for prediction in scene.curve.predictions]
            panel.plot(place, predicted, color=colour, label=scene.name.removeprefix(f"{label}, "))
            panel.plot(place, scene.times, "o", color=colour, ms=4)
            panel.set_xticks(place, [_text(value) for value in scene.curve.values])
        knob = scenes[0].curve.knob.replace("_", " ")
        panel.set(
            title=label, xlabel=f"{knob}  (lines: predicted; dots: simulated)", ylabel="seconds to the loss", yscale="log"
        )
        panel.set_ylim(top=3.0 * panel.get_ylim()[1])  # room for the legend
        panel.legend(frameon=False, loc="upper center", ncols=2)
    return figure
