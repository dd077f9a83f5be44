"""How much of a cluster's speed is left when one worker is slow?

Four workers whose batches take 50 ms each, one of them slowed 1, 4 and 10 times. The ideal is the sum over the workers of
1 / period: nobody ever waits. Compared on the same model, data and periods:

- AD-PSGD (this package) with gossip, and with ``exchanges_per_step=0``, in alternate epochs of one run;
- Lightning's DDP;
- Decent-DP, another decentralized library, in the plain loop that its API wants.

The time of an epoch is from its first worker's start to its last worker's end: waiting at the epoch's end counts.

    python -m benchmarks.straggler [--quick]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from benchmarks.harness import (
    RESULTS,
    against,
    axes_of,
    console,
    print_table,
    process_group,
    rank,
    repeated,
    run,
    trainer,
    write_results,
)
from lightning_gossip import ADPSGDStrategy
from lightning_gossip.callbacks import ClusterEmulator
from recipes.commands import cleaning_up_on_sigterm
from recipes.digits import DigitsClassifier, DigitsData

WORKERS = 4
PERIOD_S = 0.050
BATCH_SIZE = 16
SLOW_RANK = WORKERS - 1
SLOWDOWNS = (1.0, 4.0, 10.0)
LEARNING_RATE = 0.05

AIM_ON_OFF = 0.97
AIM_SHARE = 0.93


@dataclass(frozen=True)
class Size:
    """How long to measure."""

    batches: int = 400  # an epoch, of all workers together
    pairs: int = 4  # of epochs with and without gossip
    lockstep_batches: int = 400  # DDP and Decent-DP have no end-of-epoch rule, so one measured epoch says it


QUICK = Size(batches=120, pairs=1, lockstep_batches=60)


# -- the work that all contenders do ---------------------------------------------------------------------------------


def digits(batches: int) -> TensorDataset:
    """The digits images, repeated until an epoch has the wanted number of batches."""
    return repeated(DigitsData().train, batches * BATCH_SIZE)


def ideal_rate(slowdown: float) -> float:
    """Samples per second if nobody waited."""
    return (WORKERS - 1 + 1 / slowdown) * BATCH_SIZE / PERIOD_S


def lockstep_share(slowdown: float) -> float:
    """Share of the ideal that is left if everybody waits for the slowest worker in every step."""
    return WORKERS / slowdown / (WORKERS - 1 + 1 / slowdown)


# -- the contenders: each worker's account of its epochs, times on the machine's monotonic clock ---------------------


class EpochClock(Callback):
    """Keeps one worker's account; switches the gossip on and off in alternate epochs if the strategy has any."""

    def __init__(self) -> None:
        self.epochs: list[dict[str, Any]] = []

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        epoch: dict[str, Any] = {"start_s": time.monotonic(), "samples": 0}
        if isinstance(trainer.strategy, ADPSGDStrategy):
            epoch["gossip"] = trainer.current_epoch % 2 == 0
            trainer.strategy.exchanges_per_step = float(epoch["gossip"])
        self.epochs.append(epoch)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.epochs[-1]["samples"] += len(batch[0])

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.epochs[-1]["end_s"] = time.monotonic()
        if isinstance(trainer.strategy, ADPSGDStrategy):  # of all workers, of all epochs so far
            for name in ("exchanges", "steps"):
                self.epochs[-1][name] = sum(getattr(worker, name) or 0 for worker in trainer.strategy.report.workers)


def train_with_lightning(strategy: str, batches: int, epochs: int, slowdown: float) -> list[dict[str, Any]]:
    seed_everything(1, verbose=False)
    clock = EpochClock()
    emulator = ClusterEmulator(slowdown={SLOW_RANK: slowdown}, period_s=PERIOD_S)
    made = ADPSGDStrategy() if strategy == "adpsgd" else DDPStrategy()
    fit = trainer(strategy=made, max_epochs=epochs, callbacks=[emulator, clock])
    fit.fit(DigitsClassifier(lr=LEARNING_RATE), DataLoader(digits(batches), batch_size=BATCH_SIZE, shuffle=True))
    return clock.epochs


@process_group()
def train_with_decent_dp(batches: int, slowdown: float) -> list[dict[str, Any]]:
    """Decent-DP's wrapper, on its ring, in the plain loop that it wants."""
    from decent_dp.ddp import DecentralizedDataParallel
    from loguru import logger

    logger.disable("decent_dp")
    torch.manual_seed(1)
    net = DigitsClassifier()
    model = DecentralizedDataParallel(
        net,
        optim_fn=lambda named: torch.optim.SGD([p for _, p in named], lr=LEARNING_RATE, momentum=0.9),
        topology="ring",
        _local_world_size=WORKERS,
    )
    data = digits(batches)
    loader = DataLoader(data, batch_size=BATCH_SIZE, sampler=DistributedSampler(data))
    torch.distributed.barrier()
    start_s = due_s = time.monotonic()
    samples = 0
    for images, labels in loader:
        loss = net.loss(model(images), labels)
        # as ClusterEmulator does: a batch that is late by itself is not made up for
        due_s = max(time.monotonic(), due_s + PERIOD_S * (slowdown if rank() == SLOW_RANK else 1.0))
        time.sleep(max(0.0, due_s - time.monotonic()))
        loss.backward()  # the wrapper's hooks average and step
        samples += len(images)
    return [{"start_s": start_s, "end_s": time.monotonic(), "samples": samples}]


# -- what came out ---------------------------------------------------------------------------------------------------


def measure(slowdown: float, task: Callable[..., Any], **parameters: Any) -> list[dict[str, Any]]:
    """Run one contender and put its workers' accounts together, epoch by epoch."""
    everyones = run(task, {"slowdown": slowdown, **parameters}, hosts=(None,) * WORKERS, timeout_s=300)
    epochs = []
    before = {"exchanges": 0, "steps": 0}
    for number, workers in enumerate(zip(*everyones, strict=True)):
        seconds = max(w["end_s"] for w in workers) - min(w["start_s"] for w in workers)
        samples = [w["samples"] for w in workers]
        epoch = {
            "epoch": number,
            "seconds": seconds,
            "samples": samples,
            "samples_per_s": sum(samples) / seconds,
            "share_of_ideal": sum(samples) / seconds / ideal_rate(slowdown),
        }
        if "gossip" in workers[0]:
            exchanges, steps = (workers[0][name] - before[name] for name in before)
            epoch |= {"gossip": workers[0]["gossip"], "exchanges_per_step": exchanges / steps}
            before = {name: workers[0][name] for name in before}
        epochs.append(epoch)
    return epochs


def measure_gossip(size: Size, slowdown: float) -> dict[str, Any]:
    """Gossip on in even epochs, off in odd ones; the first pair warms up."""
    number = 2 * size.pairs + 2
    epochs = measure(slowdown, train_with_lightning, strategy="adpsgd", batches=size.batches, epochs=number)
    on, off = ([epoch for epoch in epochs[2:] if epoch["gossip"] is wanted] for wanted in (True, False))
    return {
        "on_over_off": _median(on, "samples_per_s") / _median(off, "samples_per_s"),
        "share_on": _median(on, "share_of_ideal"),
        "share_off": _median(off, "share_of_ideal"),
        "exchanges_per_step_on": _median(on, "exchanges_per_step"),
        "exchanges_per_step_off": _median(off, "exchanges_per_step"),
        "epochs": epochs,
    }


def measure_ddp(size: Size, slowdown: float) -> dict[str, Any]:
    """The second of two epochs: the first has connections to make, and a second's work that is done once."""
    epochs = measure(slowdown, train_with_lightning, strategy="ddp", batches=size.lockstep_batches, epochs=2)
    return {"share": _median(epochs[1:], "share_of_ideal"), "epochs": epochs}


def measure_decent_dp(size: Size, slowdown: float) -> dict[str, Any]:
    if find_spec("decent_dp") is None:
        return {"share": None, "reason": "not installed: pip install decent-dp"}
    epochs = measure(slowdown, train_with_decent_dp, batches=size.lockstep_batches)
    return {"share": _median(epochs, "share_of_ideal"), "epochs": epochs}


def _median(epochs: list[dict[str, Any]], key: str) -> float:
    return statistics.median(epoch[key] for epoch in epochs)


def _row(slowdown: float, gossip: dict[str, Any], ddp: dict[str, Any], decent: dict[str, Any]) -> list[str]:
    return [
        f"{slowdown:g}×",
        against(gossip["on_over_off"], AIM_ON_OFF, digits=3),
        against(gossip["share_on"], AIM_SHARE, digits=3),
        f"{gossip['share_off']:.3f}",
        f"{gossip['exchanges_per_step_on']:.2f}",
        f"{ddp['share']:.3f}",
        "–" if decent["share"] is None else f"{decent['share']:.3f}",
        f"{lockstep_share(slowdown):.3f}",
    ]


COLUMNS = ("slowdown", "on / off", "AD-PSGD", "AD-PSGD, gossip off", "exchanges a step", "DDP", "Decent-DP", "lock-step bound")


def plot(results: dict[str, dict[str, Any]], path: Path) -> None:
    """Share of the ideal, one group of bars a slowdown."""
    shares = (
        pd.DataFrame(
            {
                f"{float(slowdown):g}×": {
                    "AD-PSGD": result["adpsgd"]["share_on"],
                    "AD-PSGD, gossip off": result["adpsgd"]["share_off"],
                    "Lightning DDP": result["ddp"]["share"],
                    "Decent-DP": result["decent_dp"]["share"],
                }
                for slowdown, result in results.items()
            }
        )
        .T.astype(float)
        .dropna(axis="columns", how="all")
    )
    figure, ((axes,),) = axes_of(width=8, height=4.2)
    shares.plot.bar(ax=axes, rot=0, width=0.8, color=["#1b7f5c", "#a9d5c3", "#c8553d", "#8a6fb0"])
    ground = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
    for bars in axes.containers:
        axes.bar_label(bars, fmt="%.2f", fontsize=8, padding=4, bbox=ground, zorder=5)
    for group, slowdown in enumerate(results):
        bound, label = lockstep_share(float(slowdown)), "" if group else "lock-step bound"
        axes.hlines(bound, group - 0.45, group + 0.45, color="#444444", linestyle=":", linewidth=1.2, label=label)
    axes.set(xlabel=f"slowdown of one of {WORKERS} workers", ylabel="share of Σ 1 / period", ylim=(0, 1.22))
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1.0])
    axes.grid(axis="y", alpha=0.3)
    axes.legend(ncols=5, fontsize=8, loc="upper center", frameon=False, columnspacing=1.0, handlelength=1.4)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description="Throughput with one slow worker, as a share of the ideal.")
    parser.add_argument("--quick", action="store_true", help="one minute or two, less exact")
    arguments = parser.parse_args()
    size = QUICK if arguments.quick else Size()

    results: dict[str, dict[str, Any]] = {}
    rows = []
    with cleaning_up_on_sigterm():
        for slowdown in SLOWDOWNS:
            with console.status(f"one worker of {WORKERS} slowed {slowdown:g}×"):
                gossip = measure_gossip(size, slowdown)
                ddp = measure_ddp(size, slowdown)
                decent = measure_decent_dp(size, slowdown)
            results[f"{slowdown:g}"] = {"adpsgd": gossip, "ddp": ddp, "decent_dp": decent}
            rows.append(_row(slowdown, gossip, ddp, decent))
    caption = f"Shares of Σ 1 / period. Aims: on / off ≥ {AIM_ON_OFF}, AD-PSGD ≥ {AIM_SHARE}. ✓ reached, ✗ missed."
    print_table(f"One slow worker of {WORKERS}, {PERIOD_S * 1e3:.0f} ms a batch", COLUMNS, rows, caption=caption)
    settings = {"workers": WORKERS, "period_s": PERIOD_S, "batch_size": BATCH_SIZE, "slow_rank": SLOW_RANK, **asdict(size)}
    path = write_results("straggler", {"quick": arguments.quick, "settings": settings, "slowdowns": results})
    plot(results, RESULTS / "straggler.png")
    console.print(f"Written: {path.relative_to(path.parents[2])} and straggler.png beside it")


if __name__ == "__main__":
    main()
