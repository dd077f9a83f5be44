"""Layers are trained in turn, each thawed for a batch and frozen again: only the head requires a gradient where epochs meet."""

import lightning as L
import torch
from _field import digits, main, same, trainer, unused_ok, weights
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class LayerWise(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.head = nn.Linear(8, 3)
        self.only(None)

    def only(self, active):
        for number, layer in enumerate(self.layers):
            layer.requires_grad_(number == active)

    def on_train_batch_start(self, batch, batch_idx):
        self.only(None if batch_idx == 0 or self.trainer.is_last_batch else batch_idx % 3)

    def training_step(self, batch, batch_idx):
        x = batch[0]
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return nn.functional.cross_entropy(self.head(x), batch[1])

    def on_train_batch_end(self, *_):
        if self.trainer.is_last_batch:
            self.only(None)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.3)


def worker(strategy):
    torch.manual_seed(1)
    model = LayerWise()
    trainer(unused_ok(strategy), max_epochs=3).fit(model, DataLoader(TensorDataset(*digits(256)), 8, shuffle=True))
    return {"weights": weights(model)}


def judge(ranks, run):
    if run.strategy.startswith("ddp"):
        return  # which does not hear of parameters that are thawed after it was built
    same(ranks, "weights", 1e-5)


if __name__ == "__main__":
    main(worker, judge)
