"""Trainer(max_time=...): the fit ends in the middle of an epoch, saves, and a second one goes on there."""

import time

import lightning as L
import torch
from _field import digits, folder, main, rank, same, trainer, weights
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(8, 3)
        self.batches, self.ended = 0, False

    def training_step(self, batch, batch_idx):
        self.batches += 1
        time.sleep(0.02 if rank() == 0 else 0.05)
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def on_train_end(self):
        self.ended = True

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def worker(strategy):
    torch.manual_seed(1)
    out = {}
    for part, seconds in (("first", 1), ("second", 600)):
        model = Net()
        saver = ModelCheckpoint(folder() / "saved", save_last=True)
        options = {"max_epochs": 1, "max_time": {"seconds": seconds}, "callbacks": [saver], "enable_checkpointing": True}
        t = trainer(strategy, **options)
        t.fit(model, DataLoader(TensorDataset(*digits(1600)), 8, shuffle=True), ckpt_path="last" if part == "second" else None)
        out[part] = {"weights": weights(model), "batches": model.batches, "ended": model.ended, "steps": t.global_step}
        t.strategy.barrier()
    return out


def judge(ranks, run):
    for part in ("first", "second"):
        both = [r[part] for r in ranks]
        same(both, "weights")
        same(both, "steps")
        assert all(one["ended"] for one in both), "on_train_end runs as after any fit"
    first = sum(r["first"]["batches"] for r in ranks)
    assert 2 <= first < 180, f"{first} of 200 batches in a second"
    if not run.strategy.startswith("ddp"):  # whose sampler counts on in the next epoch
        second = sum(r["second"]["batches"] for r in ranks)
        assert 200 <= first + second <= 202, f"{first} batches, and {second} after the resume"


if __name__ == "__main__":
    main(worker, judge)
