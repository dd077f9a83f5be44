"""What does a training step cost under ``adpsgd`` beside Lightning alone? In processor time of the training thread.

Everything between one call of ``training_step`` and the next counts: the batch and its claim, forward, backward, optimizer, the
step boundary, Lightning's loop. Four variants take turns, in processes of one thread: Lightning alone in one process; in two at
a time, which share memory and caches as workers do and know nothing of each other; two workers of adpsgd without exchanges; two
with one exchange a step. A copy is an in-place copy of the model by the same thread.

    aim: 1.05 steps of Lightning alone + 1.1 copies without merges, + 2.5 copies with

    python -m benchmarks.step [--quick] [--profile]
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import time
from itertools import pairwise
from typing import Any

import torch
from lightning.pytorch import LightningModule, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.harness import against, console, print_table, rank, run, trainer, write_results
from lightning_gossip import ADPSGDStrategy

SIZES = {"0.1 M": (256, 2), "4.3 M": (1032, 5), "25 M": (2490, 5)}  # width, hidden layers
BATCH_SIZE, REST_S, WARM = 32, 0.03, 10
VARIANTS: dict[str, tuple[int, float | None]] = {  # processes, exchanges a step
    "alone": (1, None),
    "two alone": (2, None),
    "no exchanges": (2, 0.0),
    "exchanges": (2, 1.0),
}


def perceptron(width: int, hidden: int) -> nn.Sequential:
    sizes = [64, *[width] * hidden, 10]
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Measured(LightningModule):
    """Notes the thread's processor time at each step, without that of the copies."""

    def __init__(self, net: nn.Sequential) -> None:
        super().__init__()
        self.net = net
        self.marks_s: list[float] = []
        self.copies_s: list[float] = []
        self._source = [parameter.detach().clone() for parameter in net.parameters()]
        self._target = [parameter.detach().clone() for parameter in net.parameters()]

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        time.sleep(REST_S)  # in which a device would compute, and exchanges go on
        began_s = time.thread_time()
        torch._foreach_copy_(self._target, self._source)
        copied_s = time.thread_time()
        self.copies_s.append(copied_s - began_s)
        self.marks_s.append(copied_s)
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)

    @property
    def steps_s(self) -> list[float]:
        """From one mark to the next, without the copy."""
        copies = self.copies_s[1:]
        return [after - before - copy for (before, after), copy in zip(pairwise(self.marks_s), copies, strict=True)]


def train(width: int, hidden: int, exchanges: float | None, steps: int, profile: str) -> dict[str, Any]:
    """The task of one worker; Lightning alone if there is no number of exchanges."""
    torch.set_num_threads(1)
    seed_everything(1, verbose=False)
    workers = 1 if exchanges is None else 2
    data = TensorDataset(torch.rand(workers * steps * BATCH_SIZE, 64), torch.randint(10, (workers * steps * BATCH_SIZE,)))
    model = Measured(perceptron(width, hidden))
    options: dict[str, Any] = (
        {"num_nodes": 1} if exchanges is None else {"strategy": ADPSGDStrategy(exchanges_per_step=exchanges)}
    )
    fitting = trainer(max_epochs=1, **options)
    profiler = cProfile.Profile(time.thread_time)
    loader = DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)
    if profile and rank() == 0:
        profiler.runcall(fitting.fit, model, loader)
        profiler.dump_stats(profile)
    else:
        fitting.fit(model, loader)
    report = getattr(fitting.strategy, "report", None)
    own = next((each for each in report.workers if each.rank == rank()), None) if report is not None else None
    return {
        "step_s": statistics.median(model.steps_s[WARM:]),
        "copy_s": statistics.median(model.copies_s[WARM:]),
        "exchanges_per_step": None if own is None else (own.exchanges or 0) / own.steps,
    }


def measured(size: str, steps: int, rounds: int, profile: bool) -> dict[str, dict[str, float]]:
    """Medians of rank 0, by variant."""
    width, hidden = SIZES[size]
    found: dict[str, list[dict[str, float]]] = {name: [] for name in VARIANTS}
    for number in range(rounds):
        for name, (workers, exchanges) in VARIANTS.items():
            path = f"/tmp/step-{size[0]}-{name.replace(' ', '-')}.prof" if profile and not number else ""
            parameters = {"width": width, "hidden": hidden, "exchanges": exchanges, "steps": steps, "profile": path}
            found[name].append(run(train, parameters, hosts=[None] * workers, timeout_s=300)[0])
            if path:
                pstats.Stats(path).sort_stats("tottime").print_stats(25)
    return {
        name: {key: statistics.median(each[key] for each in runs) for key in runs[0] if runs[0][key] is not None}
        for name, runs in found.items()
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description="A step under adpsgd beside one of Lightning alone.")
    parser.add_argument("--quick", action="store_true", help="fewer steps, once each")
    parser.add_argument("--profile", action="store_true", help="print where the time goes, and measure nothing")
    arguments = parser.parse_args()
    steps, rounds = (40, 1) if arguments.quick or arguments.profile else (80, 5)
    rows, results = [], {}
    for size in SIZES:
        console.print(size)
        results[size] = found = measured(size, steps, rounds, arguments.profile)
        alone_s = found["alone"]["step_s"]
        copy_s = found["alone"]["copy_s"]
        cells = [f"{found['two alone']['step_s'] / alone_s:.2f}"]
        for name, copies in (("no exchanges", 1.1), ("exchanges", 2.5)):
            step_s = found[name]["step_s"]
            aim_s = 1.05 * alone_s + copies * copy_s
            cells += [
                f"{step_s / alone_s:.2f}",
                f"{(step_s - alone_s) / copy_s:.1f}",
                against(step_s / aim_s, 1.0, at_most=True),
            ]
        rows.append(
            (size, f"{1e3 * alone_s:.2f}", f"{1e3 * copy_s:.3f}", *cells, f"{found['exchanges']['exchanges_per_step']:.2f}")
        )
    if arguments.profile:
        return
    of_variant = ("× alone", "more, copies", "of the aim")
    columns = (
        "parameters",
        "alone, ms",
        "a copy, ms",
        "two alone: × alone",
        *of_variant,
        *(f"{each} (exch.)" for each in of_variant),
        "exchanges a step",
    )
    print_table("Processor time of a training step under adpsgd", columns, rows)
    console.print(f"Written to {write_results('step', results)}")


if __name__ == "__main__":
    main()
