"""A hyper-parameter search in one script: the first trial is pruned by an exception on all ranks, which the script catches;
the next trials run.
"""

import lightning as L
import torch
from _field import digits, main, same, trainer, weights
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Pruned(Exception):
    pass


class Prune(L.Callback):
    def on_validation_end(self, trainer, model):
        if model.bad and not trainer.sanity_checking:
            raise Pruned("this trial is hopeless")


class Net(L.LightningModule):
    def __init__(self, lr, bad):
        super().__init__()
        self.net, self.lr, self.bad = nn.Linear(8, 3), lr, bad

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.lr)


def worker(strategy):
    data, outcome, model = TensorDataset(*digits(96)), [], None
    for trial, lr in enumerate((0.001, 0.1, 0.3)):
        torch.manual_seed(1)
        model = Net(lr, bad=trial == 0)
        t = trainer(strategy, callbacks=[Prune()])
        try:
            t.fit(model, DataLoader(data, 8, shuffle=True), DataLoader(data, 8))
            outcome.append(round(float(t.callback_metrics["val_loss"]), 5))
        except Pruned:
            outcome.append("pruned")
    return {"outcome": outcome, "weights": weights(model)}


def judge(ranks, run):
    same(ranks, "outcome")
    same(ranks, "weights")
    first, *others = ranks[0]["outcome"]
    assert first == "pruned" and all(isinstance(o, float) for o in others), str(ranks[0]["outcome"])


if __name__ == "__main__":
    main(worker, judge)
