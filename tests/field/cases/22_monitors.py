"""Everything that watches: LearningRateMonitor, DeviceStatsMonitor, ThroughputMonitor, RichProgressBar, summary, timer,
profiler, CSV and TensorBoard.
"""

import csv

import lightning as L
import torch
from _field import digits, folder, main, same, trainer, weights
from lightning.pytorch.callbacks import DeviceStatsMonitor, LearningRateMonitor, ModelSummary, RichProgressBar, Timer
from lightning.pytorch.callbacks.throughput_monitor import ThroughputMonitor
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(L.LightningModule):
    def __init__(self, width=16):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 3))
        self.steps = 0

    def training_step(self, batch, batch_idx):
        self.steps += 1
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True, prog_bar=True)

    def configure_optimizers(self):
        opt = torch.optim.SGD(self.parameters(), 0.1)
        steps = int(self.trainer.estimated_stepping_batches)
        return {
            "optimizer": opt,
            "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.OneCycleLR(opt, 0.2, total_steps=steps), "interval": "step"},
        }


def worker(strategy):
    torch.manual_seed(1)
    model, data = Net(), TensorDataset(*digits(160))
    callbacks = [
        LearningRateMonitor("step"),
        DeviceStatsMonitor(cpu_stats=True),
        ThroughputMonitor(lambda b: len(b[0]), window_size=5),
        RichProgressBar(),
        ModelSummary(2),
        Timer(interval="epoch", duration="00:01:00:00"),
    ]
    t = trainer(
        strategy,
        max_epochs=3,
        callbacks=callbacks,
        logger=[CSVLogger(folder() / "csv"), TensorBoardLogger(folder() / "tb")],
        profiler="simple",
        enable_progress_bar=True,
        enable_model_summary=True,
        log_every_n_steps=2,
    )
    t.fit(model, DataLoader(data, 8, shuffle=True), DataLoader(data, 8))
    t.strategy.barrier()
    rows = list(csv.DictReader(next((folder() / "csv").glob("*/*/metrics.csv")).open()))
    return {
        "weights": weights(model),
        "rows": rows,
        "events": len(list((folder() / "tb").glob("*/*/events*"))),
        "hparams": len(list((folder()).glob("*/*/*/hparams.yaml"))),
        "lr": t.optimizers[0].param_groups[0]["lr"],
        "steps": model.steps,
    }


def judge(ranks, run):
    same(ranks, "weights")
    same(ranks, "lr", 1e-9)
    rows = ranks[0]["rows"]
    steps = [int(r["step"]) for r in rows if r["loss_step"]]
    due = ranks[0]["steps"] // 2  # where each worker takes what batches it can, rank 0 may take few
    assert steps and steps == sorted(set(steps)) and len(steps) >= due - 1, (
        f"steps of the loss in the log: {steps}, after {ranks[0]['steps']} steps"
    )
    assert [r["val_loss"] != "" for r in rows].count(True) == 3, "one val_loss an epoch"
    assert any(r.get("lr-SGD") for r in rows) and any(k.startswith("train|") or "device" in k for k in rows[0]), sorted(
        rows[0]
    )[:40]
    assert ranks[0]["events"] == 1 and ranks[0]["hparams"] == 2, (ranks[0]["events"], ranks[0]["hparams"])
    lost = [line for line in run.out.splitlines() if "Traceback" in line]
    assert not lost, lost


if __name__ == "__main__":
    main(worker, judge)
