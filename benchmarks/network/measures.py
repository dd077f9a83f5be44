"""From what the workers of a run have written to its measures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.network.workload import BATCH_SIZE, COMPUTE_S, shared_values, test_data

WARM_UP = 3  # steps in which connections are made


class Step(NamedTuple):
    """A line of ``steps-<rank>``."""

    at_s: float
    samples: int
    sent: int
    cpu_s: float = 0.0


class Model(NamedTuple):
    """A line of ``models-<rank>``."""

    at_s: float
    steps: int
    file: str


def measures(folder: Path, net: nn.Module, *, workers: int, slow_worker: float, compute_s: float = COMPUTE_S) -> dict[str, Any]:
    """All of them.

    Args:
        folder: of the run.
        net: a model of the same kind, whose values are lost.
        workers: how many there were.
        slow_worker: how many times longer the last one computes.
        compute_s: of a step of the others.
    """
    steps = [[Step(*line) for line in _lines(folder / f"steps-{rank}")] for rank in range(workers)]
    models = [[Model(*line) for line in _lines(folder / f"models-{rank}")] for rank in range(workers)]
    results = [json.loads(path.read_text()) for path in sorted(folder.glob("result-*"))]
    began_s = min(own[0].at_s for own in models)
    return {
        **pace(steps, ideal_rates(workers, slow_worker, compute_s)),
        **_counts(results, steps),
        "training_s": max(own[-1].at_s for own in steps) - began_s,
        "curve": curve(folder, models, net, began_s),
    }


def ideal_rates(workers: int, slow_worker: float, compute_s: float = COMPUTE_S) -> list[float]:
    """Samples a second of each worker if nobody waited and nothing but computing took time."""
    slowdowns = [1.0] * (workers - 1) + [slow_worker]
    return [BATCH_SIZE / (compute_s * slowdown) for slowdown in slowdowns]


def pace(steps: Sequence[Sequence[Step]], ideal: Sequence[float]) -> dict[str, Any]:
    """Samples a second, bytes and processor time a step. Between the last worker's warm-up and the first one's last step but
    one: after the last one some contenders meet.

    Returns:
        ``samples_per_s`` of each worker, ``share`` of the ideal, ``bytes_per_step`` that a host sends, ``cpu_s_per_step`` of
        all threads of a worker.
    """
    steps = [own[:-1] for own in steps]
    nothing = {"samples_per_s": None, "share": None, "bytes_per_step": None, "cpu_s_per_step": None}
    warm_up = min(WARM_UP, min(len(own) for own in steps) // 2)
    if warm_up < 1:
        return nothing
    since_s = max(own[warm_up - 1].at_s for own in steps)
    until_s = min(own[-1].at_s for own in steps)
    if until_s <= since_s:
        return nothing
    rates, sent, cpu_s, made = [], 0, 0.0, 0
    for own in steps:
        inside = [step for step in own if since_s < step.at_s <= until_s]
        rates.append(sum(step.samples for step in inside) / (until_s - since_s))
        sent += own[-1].sent - own[warm_up - 1].sent
        cpu_s += own[-1].cpu_s - own[warm_up - 1].cpu_s
        made += len(own) - warm_up
    return {
        "samples_per_s": rates,
        "share": sum(rates) / sum(ideal),
        "bytes_per_step": sent / made,
        "cpu_s_per_step": cpu_s / made,
    }


def curve(folder: Path, models: Sequence[Sequence[Model]], net: nn.Module, began_s: float) -> dict[str, list[float]]:
    """Loss and accuracy of the mean of the workers' models on the test images, at the times at which the worker that writes
    most has written one. The other workers' are the last that they had written by then."""
    leader = max(models, key=len)
    images, labels = test_data()
    columns: dict[str, list[float]] = {name: [] for name in ("s", "steps", "loss", "accuracy")}
    for moment in leader:
        if moment is leader[-1]:  # the end is the last one's
            latest = [own[-1] for own in models]
        else:
            latest = [next((model for model in reversed(own) if model.at_s <= moment.at_s), own[0]) for own in models]
        values = [np.fromfile(folder / model.file, dtype=np.float32) for model in latest]
        loss, accuracy = _evaluate(net, torch.from_numpy(np.mean(values, axis=0)), images, labels)
        at_s = max(moment.at_s, *(model.at_s for model in latest)) - began_s
        row = (at_s, sum(model.steps for model in latest) / len(latest), loss, accuracy)
        for name, value in zip(columns, row, strict=True):
            columns[name].append(round(value, 4))
    return columns


def _evaluate(net: nn.Module, flat: Tensor, images: Tensor, labels: Tensor) -> tuple[float, float]:
    place = 0
    for value in shared_values(net):
        value.copy_(flat[place : place + value.numel()].view_as(value))
        place += value.numel()
    net.eval()
    with torch.no_grad():
        logits = net(images)
        loss = nn.functional.cross_entropy(logits, labels)
    return float(loss), float((logits.argmax(1) == labels).float().mean())


def _counts(results: Sequence[dict[str, Any]], steps: Sequence[Sequence[Step]]) -> dict[str, Any]:
    """What the strategies say about themselves; None where they say nothing, or did not come to an end."""
    exchanges = [result["exchanges"] for result in results if result.get("exchanges") is not None]
    periods = [result.get("period_mean") for result in results]
    return {
        "exchanges_per_step": sum(exchanges) / sum(len(own) for own in steps) if len(exchanges) == len(steps) else None,
        "period_mean": periods[0] if periods else None,
    }


def _lines(path: Path) -> list[list[Any]]:
    """Whole ones: the last may be half written."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.rpartition("\n")[0].splitlines()]
