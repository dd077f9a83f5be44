"""From what the workers of a run have written to its measures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from benchmarks.harness import recorded
from benchmarks.harness.workers import results
from benchmarks.network.workload import BATCH_SIZE, COMPUTE_S, Work, loss_of, shared_values

WARM_UP = 3  # steps in which connections are made


def measures(folder: Path, work: Work, workers: int, slow_worker: float = 1.0, compute_s: float = COMPUTE_S) -> dict[str, Any]:
    """All of them.

    Args:
        folder: of the run.
        work: that was done.
        workers: how many there were.
        slow_worker: how many times longer the last one computes.
        compute_s: of a step of the others.
    """
    steps, models, said = recorded(folder), recorded(folder, "models"), results(folder)
    began_s = models.at_s.min()
    exchanges = [result["exchanges"] for result in said if result.get("exchanges") is not None]
    return {
        **pace(steps, ideal_rates(workers, slow_worker, compute_s, work.batch_size)),
        # what the strategies say about themselves; None where they say nothing, or did not come to an end
        "exchanges_per_step": sum(exchanges) / len(steps) if len(exchanges) == workers else None,
        "period_mean": said[0].get("period_mean") if said else None,
        "training_s": steps.at_s.max() - began_s,
        "curve": curve(folder, models, work, began_s),
    }


def ideal_rates(workers: int, slow_worker: float, compute_s: float = COMPUTE_S, batch_size: int = BATCH_SIZE) -> list[float]:
    """Samples a second of each worker if nobody waited and nothing but computing took time."""
    slowdowns = [1.0] * (workers - 1) + [slow_worker]
    return [batch_size / (compute_s * slowdown) for slowdown in slowdowns]


def pace(steps: pd.DataFrame, ideal: Sequence[float]) -> dict[str, Any]:
    """Samples a second, bytes and processor time a step. Between the last worker's warm-up and the first one's last step but
    one: after the last one some contenders meet.

    Args:
        steps: one row a step, by rank and time.
        ideal: samples a second of each worker.

    Returns:
        ``samples_per_s`` of each worker, ``share`` of the ideal, ``bytes_per_step`` that a host sends, ``cpu_s_per_step`` of
        all threads of a worker.
    """
    nothing = {"samples_per_s": None, "share": None, "bytes_per_step": None, "cpu_s_per_step": None}
    number, count = steps.groupby("rank").cumcount() + 1, steps.groupby("rank")["rank"].transform("size") - 1
    steps, number = steps[number <= count], number[number <= count]
    made = steps.groupby("rank").size()
    warm_up = min(WARM_UP, made.min() // 2) if len(made) == len(ideal) else 0
    if warm_up < 1:
        return nothing
    since_s, until_s = steps.at_s[number == warm_up].max(), steps.groupby("rank").at_s.max().min()
    if until_s <= since_s:
        return nothing
    rates = steps[(steps.at_s > since_s) & (steps.at_s <= until_s)].groupby("rank").samples.sum() / (until_s - since_s)
    counters = steps[number >= warm_up].groupby("rank")[["sent", "cpu_s"]]
    spent = (counters.last() - counters.first()).sum() / (made - warm_up).sum()
    return {
        "samples_per_s": rates.reindex(range(len(ideal)), fill_value=0.0).tolist(),
        "share": float(rates.sum() / sum(ideal)),
        "bytes_per_step": float(spent.sent),
        "cpu_s_per_step": float(spent.cpu_s),
    }


def curve(folder: Path, models: pd.DataFrame, work: Work, began_s: float) -> dict[str, list[float]]:
    """Loss and accuracy of the mean of the workers' models on the test batch, at the times at which the worker that writes
    most has written one. The other workers' are the last that they had written by then."""
    leader = models[models["rank"] == models["rank"].value_counts().sort_index().idxmax()]
    net, test = work.build(), work.data()[1]
    rows = []
    for at_s in leader.at_s:
        # before its first one a worker has that one; the end is the last one's
        known = models if at_s == leader.at_s.max() else models[models.at_s <= at_s]
        latest = known.groupby("rank").last().combine_first(models.groupby("rank").first())
        values = [np.fromfile(folder / file, dtype=np.float32) for file in latest.file]
        loss, accuracy = _evaluate(net, torch.from_numpy(np.mean(values, axis=0)), test)
        rows.append((max(at_s, latest.at_s.max()) - began_s, latest.steps.mean(), loss, accuracy))
    return pd.DataFrame(rows, columns=["s", "steps", "loss", "accuracy"]).round(4).to_dict("list")


def _evaluate(net: nn.Module, flat: Tensor, test: list[Tensor]) -> tuple[float, float]:
    values = shared_values(net)
    for value, part in zip(values, flat.split([value.numel() for value in values]), strict=True):
        value.copy_(part.view_as(value))
    net.eval()
    with torch.no_grad():
        loss = loss_of(net, test)
        hits = net(test[0]).argmax(-1) == test[1]
    return float(loss), float(hits.float().mean())
