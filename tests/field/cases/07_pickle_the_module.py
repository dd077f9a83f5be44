"""torch.save(pl_module) and deepcopy(pl_module) in on_train_epoch_end, the module having a torchmetrics metric."""

import copy

import lightning as L
import torch
import torchmetrics
from _field import digits, folder, main, rank, same, trainer, weights
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
        self.acc = torchmetrics.classification.MulticlassAccuracy(3, average="micro")

    def training_step(self, batch, batch_idx):
        out = self.net(batch[0])
        self.acc(out, batch[1])
        self.log("acc", self.acc, on_step=False, on_epoch=True)
        return nn.functional.cross_entropy(out, batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Keep(L.Callback):
    def on_train_epoch_end(self, trainer, model):
        torch.save(model, folder() / f"whole-{rank()}.pt")
        self.copy = copy.deepcopy(model)


def worker(strategy):
    torch.manual_seed(1)
    model, keep = Net(), Keep()
    x, y, i = digits(64)
    trainer(strategy, callbacks=[keep]).fit(model, DataLoader(TensorDataset(x, y, i), 8, shuffle=True))
    whole = torch.load(folder() / f"whole-{rank()}.pt", weights_only=False)
    results = {}
    for name, other in (("saved", whole), ("copied", keep.copy)):
        other.acc.reset()
        with torch.no_grad():
            other.acc.update(other.net(x), y)
            results[name] = float(other.acc.compute()) - float((model.net(x).argmax(1) == y).float().mean())
    return {"weights": weights(model.net), **results}


def judge(ranks, run):
    same(ranks, "weights")
    for r in ranks:
        assert abs(r["saved"]) < 1e-6, f"the loaded module's metric is off by {r['saved']:.3f}"
        assert abs(r["copied"]) < 1e-6, f"the copied module's metric is off by {r['copied']:.3f}"


if __name__ == "__main__":
    main(worker, judge)
