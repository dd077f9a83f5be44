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
import json
import logging
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import DDPStrategy
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from benchmarks.common import RESULTS, against, bounded, console, print_table, write_results
from benchmarks.pacing import Pacer
from lightning_gossip import ADPSGDStrategy
from lightning_gossip.callbacks import ClusterEmulator
from recipes.commands import cleaning_up_on_sigterm

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
    lockstep_batches: int = 400  # DDP and Decent-DP have no end-of-epoch rule, so one epoch says it


QUICK = Size(batches=120, pairs=1, lockstep_batches=60)


@dataclass
class Epoch:
    """One worker's account of one epoch; times on the machine's monotonic clock."""

    number: int
    start_s: float
    end_s: float = 0.0
    samples: int = 0
    exchanges_per_step: float | None = None  # asked for


@dataclass
class Account:
    """What one worker leaves behind: its epochs, and after each the counts of all workers (AD-PSGD)."""

    epochs: list[Epoch] = field(default_factory=list)
    exchanges: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)

    def write(self, folder: Path, rank: int) -> None:
        (folder / f"{rank}.json").write_text(json.dumps(asdict(self)))


# -- the work that all contenders do ---------------------------------------------------------------------------------


def digits(batches: int) -> TensorDataset:
    """The digits images, repeated until an epoch has the wanted number of batches."""
    images, labels = load_digits(return_X_y=True)
    index = torch.arange(batches * BATCH_SIZE) % len(images)
    return TensorDataset(torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8)[index] / 16, torch.tensor(labels)[index])


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def loss_of(net: nn.Module, batch: list[Tensor]) -> Tensor:
    images, labels = batch
    return nn.functional.cross_entropy(net(images), labels)


def ideal_rate(slowdown: float) -> float:
    """Samples per second if nobody waited."""
    return (WORKERS - 1 + 1 / slowdown) * BATCH_SIZE / PERIOD_S


def lockstep_share(slowdown: float) -> float:
    """Share of the ideal that is left if everybody waits for the slowest worker in every step."""
    return WORKERS / slowdown / (WORKERS - 1 + 1 / slowdown)


# -- AD-PSGD and DDP: Lightning --------------------------------------------------------------------------------------


class Digits(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        return loss_of(self.net, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=LEARNING_RATE, momentum=0.9)


class EpochClock(Callback):
    """Keeps one worker's account; switches the gossip on and off in alternate epochs if the strategy has any."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._account = Account()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        epoch = Epoch(trainer.current_epoch, time.monotonic())
        if isinstance(trainer.strategy, ADPSGDStrategy):
            epoch.exchanges_per_step = trainer.strategy.exchanges_per_step = float(trainer.current_epoch % 2 == 0)
        self._account.epochs.append(epoch)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: list[Tensor], batch_idx: int
    ) -> None:
        self._account.epochs[-1].samples += len(batch[0])

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._account.epochs[-1].end_s = time.monotonic()
        if isinstance(trainer.strategy, ADPSGDStrategy):
            workers = trainer.strategy.report.workers
            self._account.exchanges.append(sum(worker.exchanges or 0 for worker in workers))
            self._account.steps.append(sum(worker.steps for worker in workers))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._account.write(self._folder, trainer.global_rank)


def run_lightning(make_strategy: Callable[[], Any], batches: int, epochs: int, slowdown: float, folder: Path) -> None:
    """Train with a Lightning strategy; each worker leaves its account in the folder."""
    seed_everything(1, verbose=False)
    trainer = Trainer(
        strategy=make_strategy(),
        accelerator="cpu",
        devices=WORKERS,
        max_epochs=epochs,
        callbacks=[ClusterEmulator(slowdown={SLOW_RANK: slowdown}, period_s=PERIOD_S), EpochClock(folder)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Digits(), DataLoader(digits(batches), batch_size=BATCH_SIZE, shuffle=True))


# -- Decent-DP: a plain loop -----------------------------------------------------------------------------------------


def run_decent_dp(batches: int, slowdown: float, folder: Path) -> None:
    """Train with Decent-DP's wrapper, on its ring; each worker leaves its account in the folder."""
    mp.start_processes(_decent_dp_worker, args=(batches, slowdown, folder), nprocs=WORKERS, start_method="fork")


def _decent_dp_worker(rank: int, batches: int, slowdown: float, folder: Path) -> None:
    from decent_dp.ddp import DecentralizedDataParallel
    from loguru import logger

    logger.disable("decent_dp")
    torch.manual_seed(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORKERS)
    model = DecentralizedDataParallel(
        network(),
        optim_fn=lambda named: torch.optim.SGD([p for _, p in named], lr=LEARNING_RATE, momentum=0.9),
        topology="ring",
        _local_world_size=WORKERS,
    )
    data = digits(batches)
    loader = DataLoader(data, batch_size=BATCH_SIZE, sampler=DistributedSampler(data))
    dist.barrier()
    epoch = Epoch(0, time.monotonic())
    pacer = Pacer(PERIOD_S * (slowdown if rank == SLOW_RANK else 1.0))
    for batch in loader:
        loss = loss_of(model, batch)
        pacer.wait()
        loss.backward()  # the wrapper's hooks average and step
        epoch.samples += len(batch[0])
    epoch.end_s = time.monotonic()
    Account([epoch]).write(folder, rank)
    dist.barrier()
    dist.destroy_process_group()


# -- what came out ---------------------------------------------------------------------------------------------------


def measure(run: Callable[[Path], None], slowdown: float, timeout_s: float) -> list[dict[str, Any]]:
    """Run one contender and put its workers' accounts together, epoch by epoch."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bounded(run, folder, timeout_s=timeout_s)
        accounts = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORKERS)]
    epochs = []
    for number, workers in enumerate(zip(*(account["epochs"] for account in accounts), strict=True)):
        seconds = max(w["end_s"] for w in workers) - min(w["start_s"] for w in workers)
        samples = [w["samples"] for w in workers]
        epoch = {
            "epoch": number,
            "seconds": seconds,
            "samples": samples,
            "samples_per_s": sum(samples) / seconds,
            "share_of_ideal": sum(samples) / seconds / ideal_rate(slowdown),
        }
        if accounts[0]["exchanges"]:
            totals = accounts[0]
            exchanges, steps = (totals[k][number] - (totals[k][number - 1] if number else 0) for k in ("exchanges", "steps"))
            epoch["gossip"] = workers[0]["exchanges_per_step"] > 0
            epoch["exchanges_per_step"] = exchanges / steps
        epochs.append(epoch)
    return epochs


def measure_gossip(size: Size, slowdown: float) -> dict[str, Any]:
    """Gossip on in even epochs, off in odd ones; the first pair warms up."""
    run = partial(run_lightning, partial(ADPSGDStrategy, start_method="fork"), size.batches, 2 * size.pairs + 2, slowdown)
    epochs = measure(run, slowdown, timeout_s=300)
    measured = epochs[2:]
    on, off = ([e for e in measured if e["gossip"] is wanted] for wanted in (True, False))
    return {
        "on_over_off": _median(on, "samples_per_s") / _median(off, "samples_per_s"),
        "share_on": _median(on, "share_of_ideal"),
        "share_off": _median(off, "share_of_ideal"),
        "exchanges_per_step_on": _median(on, "exchanges_per_step"),
        "exchanges_per_step_off": _median(off, "exchanges_per_step"),
        "epochs": epochs,
    }


def measure_ddp(size: Size, slowdown: float) -> dict[str, Any]:
    run = partial(run_lightning, partial(DDPStrategy, start_method="fork"), size.lockstep_batches, 1, slowdown)
    epochs = measure(run, slowdown, timeout_s=300)
    return {"share": _median(epochs, "share_of_ideal"), "epochs": epochs}


def measure_decent_dp(size: Size, slowdown: float) -> dict[str, Any]:
    try:
        import decent_dp.ddp  # noqa: F401
    except ImportError as error:
        return {"share": None, "reason": f"not installed ({error}): pip install decent-dp"}
    epochs = measure(partial(run_decent_dp, size.lockstep_batches, slowdown), slowdown, timeout_s=300)
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
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    contenders: list[tuple[str, str, Callable[[dict[str, Any]], float | None]]] = [
        ("AD-PSGD", "#1b7f5c", lambda r: r["adpsgd"]["share_on"]),
        ("AD-PSGD, gossip off", "#a9d5c3", lambda r: r["adpsgd"]["share_off"]),
        ("Lightning DDP", "#c8553d", lambda r: r["ddp"]["share"]),
        ("Decent-DP", "#8a6fb0", lambda r: r["decent_dp"]["share"]),
    ]
    figure, axes = plt.subplots(figsize=(8, 4.2), layout="constrained")
    width = 0.2
    for place, (label, colour, share) in enumerate(contenders):
        shares = [share(result) for result in results.values()]
        if all(value is None for value in shares):
            continue
        at = [group + (place - (len(contenders) - 1) / 2) * width for group in range(len(shares))]
        bars = axes.bar(at, [value or 0.0 for value in shares], width * 0.92, label=label, color=colour)
        ground = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
        axes.bar_label(bars, fmt="%.2f", fontsize=8, padding=4, bbox=ground, zorder=5)
    for group, slowdown in enumerate(results):
        bound = lockstep_share(float(slowdown))
        axes.hlines(bound, group - 0.45, group + 0.45, color="#444444", linestyle=":", linewidth=1.2, label=None)
    axes.plot([], [], color="#444444", linestyle=":", label="lock-step bound")
    axes.set_xticks(range(len(results)), [f"{float(s):g}×" for s in results])
    axes.set(xlabel=f"slowdown of one of {WORKERS} workers", ylabel="share of Σ 1 / period", ylim=(0, 1.22))
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1.0])
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(ncols=5, fontsize=8, loc="upper center", frameon=False, columnspacing=1.0, handlelength=1.4)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description="Throughput with one slow worker, as a share of the ideal.")
    parser.add_argument("--quick", action="store_true", help="one minute or two, less exact")
    arguments = parser.parse_args()
    size = QUICK if arguments.quick else Size()

    torch.set_num_threads(1)  # four workers on a few cores; and a parent with a thread pool must not fork
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module="lightning")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

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
