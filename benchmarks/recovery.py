"""What does a killed worker cost the others?

Eight workers train on scikit-learn's digits, every batch padded to 30 ms, for 12 epochs: undisturbed, and with rank 3 killed
(SIGKILL) in the middle of epoch 4 and rank 6 in epoch 7. Under AD-PSGD the others go on. Beside it DDP under torchrun, which
starts all workers anew from the checkpoint of the last epoch (``--max-restarts``, looking ten times a second). With the agent's
own store the workers did not find each other again after a restart (Gloo: connection refused, until no restart was left), so
each attempt has a new one.

For each kill: the time to the next step of the slowest worker (of a new process, under torchrun), and how much longer the epoch
took than those before. Test accuracy; samples of all epochs never trained on, and those trained on more than once.

    python -m benchmarks.recovery
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from benchmarks.common import console, kill_group, print_table, write_results
from lightning_gossip import ADPSGDStrategy

WORKERS, EPOCHS, STEP_S, TRAINING = 8, 12, 0.03, 1437
KILLS = {3: 4, 6: 7}  # rank: epoch, in its seventh batch
DEADLINE_S = 300
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
LAUNCHERS = {
    "adpsgd": [sys.executable],
    "ddp": [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORKERS}"),
        *("--max-restarts=4", "--monitor-interval=0.1", "--no-python", sys.executable),
    ],
}


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        self.accuracy = MulticlassAccuracy(10, average="micro")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.network(batch[0]), batch[1])

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.accuracy(self.network(batch[0]), batch[1])
        self.log("test_acc", self.accuracy)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Record(Callback):
    """Each step with its process and samples, one line a step; and the kill."""

    def __init__(self, folder: Path, kills: dict[int, int]) -> None:
        self.folder = folder
        self.number = int(os.environ.get("LOCAL_RANK", "0"))
        self.killed = folder / f"killed-{self.number}"
        self.kill_in = None if self.killed.exists() else kills.get(self.number)

    def on_train_batch_start(self, trainer: Trainer, model: Any, batch: Any, batch_idx: int) -> None:
        time.sleep(STEP_S)
        if trainer.current_epoch == self.kill_in and batch_idx == 6:
            self.killed.write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_batch_end(self, trainer: Trainer, model: Any, output: Any, batch: Any, batch_idx: int) -> None:
        with open(self.folder / f"steps-{self.number}", "a") as file:
            file.write(json.dumps([trainer.current_epoch, time.time(), os.getpid(), batch[2].tolist()]) + "\n")


def train(strategy: str, folder: Path, kills: dict[int, int]) -> None:
    """Runs in every worker."""
    seed_everything(0, verbose=False)
    torch.set_num_threads(1)
    digits = load_digits()
    order = torch.randperm(len(digits.data), generator=torch.Generator().manual_seed(1))
    x = torch.tensor(digits.data, dtype=torch.float32)[order] / 16
    y = torch.tensor(digits.target)[order]
    training = TensorDataset(x[:TRAINING], y[:TRAINING], torch.arange(TRAINING))
    restarts = strategy == "ddp"
    trainer = Trainer(
        strategy=ADPSGDStrategy() if strategy == "adpsgd" else strategy,
        devices=WORKERS,
        accelerator="cpu",
        max_epochs=EPOCHS,
        logger=False,
        enable_checkpointing=restarts,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Record(folder, kills), *([ModelCheckpoint(folder, save_last=True)] if restarts else [])],
    )
    model, last = Net(), folder / "last.ckpt"
    trainer.fit(model, DataLoader(training, batch_size=8, shuffle=True), ckpt_path=str(last) if last.exists() else None)
    testing = DataLoader(TensorDataset(x[TRAINING:], y[TRAINING:]), batch_size=60)
    accuracy = trainer.test(model, testing, verbose=False)[0]["test_acc"]
    if trainer.is_global_zero:
        (folder / "result").write_text(json.dumps({"test_acc": accuracy, "world_size": trainer.world_size}))


Step = tuple[int, float, int, list[int]]  # epoch, time, process, samples


def run(strategy: str, kills: dict[int, int]) -> dict[str, Any]:
    """One run, and what its records say.

    Raises:
        RuntimeError: if it failed or did not end in time.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [*LAUNCHERS[strategy], "-m", "benchmarks.recovery", strategy, name, json.dumps(kills)]
        with open(folder / "log", "w") as log:
            process = subprocess.Popen(
                command, env={**os.environ, **ENVIRONMENT}, stdout=log, stderr=log, start_new_session=True
            )
            try:
                status: int | None = process.wait(DEADLINE_S)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                kill_group(process.pid)
        if status != 0 or not (folder / "result").exists():
            ended = f"did not end within {DEADLINE_S} s" if status is None else f"ended with {status}"
            raise RuntimeError(f"{strategy} {ended}:\n{(folder / 'log').read_text()[-3000:]}")
        steps = {int(path.name[6:]): _steps(path) for path in folder.glob("steps-*")}
        killed_s = {rank: float((folder / f"killed-{rank}").read_text()) for rank in kills}
        return {**json.loads((folder / "result").read_text()), **account(strategy, steps, kills, killed_s)}


def _steps(path: Path) -> list[Step]:
    return [(epoch, at_s, process, samples) for epoch, at_s, process, samples in map(json.loads, path.read_text().splitlines())]


def account(strategy: str, steps: dict[int, list[Step]], kills: dict[int, int], killed_s: dict[int, float]) -> dict[str, Any]:
    """What became of the samples, and what each kill cost."""
    taken = [
        Counter(i for own in steps.values() for epoch, _, _, samples in own if epoch == e for i in samples)
        for e in range(EPOCHS)
    ]
    padding = -TRAINING % WORKERS if strategy == "ddp" else 0  # Lightning's sampler repeats a few
    lengths = []
    for e in range(EPOCHS):
        at_s = [at for own in steps.values() for epoch, at, _, _ in own if epoch == e]
        lengths.append(max(at_s) - min(at_s))
    costs = []
    for rank, epoch in kills.items():
        nexts = [_next_s(own, killed_s[rank], anew=strategy == "ddp") for own in steps.values()]
        costs.append(
            {
                "rank": rank,
                "next_step_s": round(max(next_s - killed_s[rank] for next_s in nexts if next_s is not None), 3),
                "epoch_longer_s": round(lengths[epoch] - statistics.median(lengths[1:epoch]), 3),
            }
        )
    return {
        "samples_missing": sum(TRAINING - len(counts) for counts in taken),
        "samples_again": sum(max(0, counts.total() - TRAINING - padding) for counts in taken),
        "epoch_s": round(statistics.median(lengths), 3),
        "kills": costs,
    }


def _next_s(own: list[Step], killed_s: float, *, anew: bool) -> float | None:
    """A worker's first step after a kill; None for the killed one, which makes no more."""
    before = [process for _, at_s, process, _ in own if at_s <= killed_s]
    return next((at_s for _, at_s, process, _ in own if at_s > killed_s and not (anew and process == before[-1])), None)


def main() -> None:
    """Measure, print, write."""
    results: dict[str, dict[str, Any]] = {}
    for strategy in LAUNCHERS:
        for name, kills in (("undisturbed", {}), ("two killed", KILLS)):
            console.print(f"{strategy}, {name} …")
            results.setdefault(strategy, {})[name] = run(strategy, kills)
    rows = []
    for strategy, runs in results.items():
        calm, killed = runs["undisturbed"], runs["two killed"]
        rows.append(
            (
                strategy,
                ", ".join(f"{cost['next_step_s']:.3g}" for cost in killed["kills"]),
                ", ".join(f"{cost['epoch_longer_s']:.3g}" for cost in killed["kills"]),
                f"{killed['samples_missing']}, {killed['samples_again']}",
                f"{killed['test_acc']:.3f} ({calm['test_acc']:.3f})",
                str(killed["world_size"]),
            )
        )
    print_table(
        f"Two of {WORKERS} workers killed",
        ("", "next step after, s", "epoch longer, s", "samples missing, again", "accuracy (undisturbed)", "workers at the end"),
        rows,
        caption=f"A step lasts {STEP_S} s. Next step: of the slowest worker.",
    )
    console.print(f"Written: {write_results('recovery', results)}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(sys.argv[1], Path(sys.argv[2]), {int(rank): epoch for rank, epoch in json.loads(sys.argv[3]).items()})
    else:
        main()
