"""`p.data.add_(p.grad, alpha=-lr)`, as in many a first example: no optimizer, no change that torch counts; workers must meet
all the same.
"""

import lightning as L
import torch
from _field import digits, main, same, trainer, weights
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class ByHand(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))

    def training_step(self, batch, batch_idx):
        self.net.zero_grad()
        self.manual_backward(nn.functional.cross_entropy(self.net(batch[0]), batch[1]))
        for p in self.net.parameters():
            p.data.add_(p.grad, alpha=-0.1)

    def configure_optimizers(self):
        return None


def worker(strategy):
    torch.manual_seed(1)
    model = ByHand()
    t = trainer(strategy)
    t.fit(model, DataLoader(TensorDataset(*digits(256)), 8, shuffle=True))
    report = getattr(t.strategy, "report", None)
    mine = [(w.steps, w.exchanges, w.averagings) for w in report.workers] if report is not None else None
    return {"weights": weights(model), "report": mine}


def judge(ranks, run):
    same(ranks, "weights")
    if run.strategy.startswith(("ddp", "qsgd")):
        return
    steps, exchanges, averagings = zip(*ranks[0]["report"])
    assert sum(steps) == 64, f"of 64 batches the steps {steps} were counted"
    assert sum(x or 0 for x in exchanges) > 0 or sum(x or 0 for x in averagings) > 4, (
        f"exchanges {exchanges}, averagings {averagings}"
    )


if __name__ == "__main__":
    main(worker, judge)
