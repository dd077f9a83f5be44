"""In the hooks of a batch a callback writes into trainer.log_dir and saves, on rank 0 only; a ModelCheckpoint saves by time."""

import os
import time
from datetime import timedelta

import lightning as L
import torch
from _field import digits, folder, main, rank, same, trainer, weights
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Pictures(L.Callback):
    def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
        time.sleep(0.01 * rank())
        if batch_idx % 4 == 0 and trainer.is_global_zero:
            os.makedirs(trainer.log_dir, exist_ok=True)
            open(os.path.join(trainer.log_dir, f"{trainer.current_epoch}-{batch_idx}.png"), "w").close()
            trainer.save_checkpoint(folder() / f"{trainer.current_epoch}-{batch_idx}.ckpt")


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(8, 3)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def worker(strategy):
    torch.manual_seed(1)
    model = Net()
    saver = ModelCheckpoint(folder() / "by_time", save_top_k=-1, train_time_interval=timedelta(milliseconds=100))
    callbacks = [Pictures(), saver] if not strategy.startswith("ddp") else []  # DDP hangs: a save needs every rank
    t = trainer(
        strategy, callbacks=callbacks, logger=CSVLogger(folder(), version=f"rank{rank()}"), enable_checkpointing=bool(callbacks)
    )
    t.fit(model, DataLoader(TensorDataset(*digits(384)), 8, shuffle=True))
    names = {path.stem for path in folder().glob("*.ckpt")}
    pictures = {path.stem for path in folder().rglob("rank0/*.png")}
    return {
        "weights": weights(model),
        "names": sorted(names),
        "pictures": sorted(pictures),
        "by time": len(list((folder() / "by_time").glob("*.ckpt"))),
    }


def judge(ranks, run):
    same(ranks, "weights")
    if not run.strategy.startswith("ddp"):
        assert ranks[0]["names"] == ranks[0]["pictures"] and len(ranks[0]["names"]) >= 2, ranks[0]
        assert ranks[0]["by time"] >= 1


if __name__ == "__main__":
    main(worker, judge)
