"""A callback of the user's own saves a checkpoint every 5 optimizer steps; one worker is slower."""

import itertools
import time

import lightning as L
import torch
from _field import digits, folder, main, rank, same, trainer, weights
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class EveryFive(L.Callback):
    def __init__(self):
        self.steps = []

    def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
        if rank() == 1:
            time.sleep(0.02)
        self.steps.append((trainer.current_epoch, trainer.global_step))
        if trainer.global_step % 5 == 0:
            trainer.save_checkpoint(folder() / f"epoch={trainer.current_epoch}-step={trainer.global_step}.ckpt")


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def worker(strategy):
    torch.manual_seed(1)
    model, saving = Net(), EveryFive()
    t = trainer(strategy, callbacks=[saving])
    t.fit(model, DataLoader(TensorDataset(*digits(384)), 8, shuffle=True))
    files = sorted(p.name for p in folder().glob("*.ckpt"))
    return {"weights": weights(model), "epoch": t.current_epoch, "files": files, "steps": saving.steps}


def judge(ranks, run):
    same(ranks, "weights")
    assert ranks[0]["epoch"] == 2
    steps, files = ranks[0]["steps"], ranks[0]["files"]
    assert all(b - a == 1 for (e, a), (f, b) in itertools.pairwise(steps) if e == f), f"inside an epoch steps follow: {steps}"
    assert files == sorted(f"epoch={epoch}-step={step}.ckpt" for epoch, step in steps if step % 5 == 0), (files, steps)
    assert len(steps) > 2, steps
    return f"{len(files)} files"


if __name__ == "__main__":
    main(worker, judge)
