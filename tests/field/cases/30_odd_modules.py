"""Lazy layers made in configure_model, torch.compile of the whole module, sparse embeddings with an optimizer of their own,
dataclass batches.
"""

import dataclasses

import lightning as L
import torch
from _field import digits, main, same, trainer, weights
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    y: torch.Tensor
    words: torch.Tensor


def collate(rows):
    x, y, i = (torch.stack(c) for c in zip(*rows))
    return Batch(x, y, i)


class Base(L.LightningModule):
    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.forward(batch), batch.y)

    def on_before_batch_transfer(self, batch, dataloader_idx):
        return dataclasses.replace(batch, x=batch.x.double())

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return dataclasses.replace(batch, x=batch.x.float())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Lazy(Base):
    def __init__(self):
        super().__init__()
        self.net = None

    def configure_model(self):
        if self.net is None:
            torch.manual_seed(torch.initial_seed() + self.global_rank)  # unseeded on purpose
            self.net = nn.Sequential(nn.LazyLinear(16), nn.ReLU(), nn.LazyLinear(3))
            self.net(torch.zeros(2, 8))

    def forward(self, batch):
        return self.net(batch.x)


class Plain(Base):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, batch):
        return self.net(batch.x)


class Sparse(Base):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.words = nn.Embedding(128, 4, sparse=True)
        self.net = nn.Linear(12, 3)

    def forward(self, batch):
        return self.net(torch.cat([batch.x, self.words(batch.words)], 1))

    def training_step(self, batch, batch_idx):
        opts = self.optimizers()
        [o.zero_grad() for o in opts]
        self.manual_backward(super().training_step(batch, batch_idx))
        [o.step() for o in opts]

    def configure_optimizers(self):
        return torch.optim.Adam(self.net.parameters(), 0.01), torch.optim.SparseAdam(self.words.parameters(), 0.01)


def worker(strategy):
    out = {}
    for name in ("lazy", "compiled", "sparse"):
        if name == "sparse" and strategy.startswith("qsgd"):
            continue  # refused, as it says
        torch.manual_seed(1)
        model = {"lazy": Lazy, "compiled": Plain, "sparse": Sparse}[name]()
        fitted = torch.compile(model, backend="eager") if name == "compiled" else model
        t = trainer(strategy)
        t.fit(fitted, DataLoader(TensorDataset(*digits(128)), 8, shuffle=True, collate_fn=collate))
        out[name] = {"weights": weights(model), "epoch": t.current_epoch}
    return out


def judge(ranks, run):
    for name in ranks[0]:
        both = [r[name] for r in ranks]
        assert both[0]["epoch"] == 2
        same(both, "weights")


if __name__ == "__main__":
    main(worker, judge)
