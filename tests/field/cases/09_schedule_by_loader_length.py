"""Schedules reckoned from the training loader's length: lightning-bolts' BYOL (len(trainer.train_dataloader)) and DANN
(trainer.num_training_batches).
"""

import math
import time

import lightning as L
import torch
from _field import digits, main, same, trainer, weights
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class DANN(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(8, 3)
        self.p, self.last = [], 0

    def training_step(self, batch, batch_idx):
        time.sleep(0.01)  # on a busy machine shorter steps are of very different lengths, and one worker makes most of them
        n = self.trainer.num_training_batches
        p = (batch_idx + self.current_epoch * n) / (self.trainer.max_epochs * n)
        self.p.append(p)
        self.last += batch_idx == n - 1  # what some do at the last batch
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Tau(L.Callback):
    def __init__(self):
        self.tau = []

    def on_train_batch_end(self, trainer, model, *_):
        try:
            steps = len(trainer.train_dataloader) * trainer.max_epochs
            self.tau.append(1 - 0.01 * (math.cos(math.pi * trainer.global_step / steps) + 1) / 2)
        except TypeError as error:
            self.tau.append(f"TypeError: {error}")


def worker(strategy):
    torch.manual_seed(1)
    model, tau = DANN(), Tau()
    trainer(strategy, max_epochs=4, callbacks=[tau]).fit(model, DataLoader(TensorDataset(*digits(128)), 8, shuffle=True))
    return {"weights": weights(model), "p": model.p, "tau": tau.tau, "last": model.last}


def judge(ranks, run):
    same(ranks, "weights")
    wrong = []
    for r in ranks:
        p, tau = r["p"], r["tau"][-1]
        if not (p[0] < 0.05 and 0.85 < p[-1] <= 1.0 and all(a < b for a, b in zip(p, p[1:]))):
            wrong.append(f"progress by num_training_batches goes from {p[0]:.2f} to {p[-1]:.2f}")
        if isinstance(tau, str) or abs(tau - 1) > 1e-3:
            wrong.append(f"tau ends at {tau}")
        if r["last"] != 4:
            wrong.append(f"batch_idx == num_training_batches - 1 came {r['last']} times in 4 epochs")
    assert not wrong, "; ".join(sorted(set(wrong)))


if __name__ == "__main__":
    main(worker, judge)
