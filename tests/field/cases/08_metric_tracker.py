"""torchmetrics.MetricTracker copies its metric every epoch inside the fit; a clone is made in a hook too. Both must see all
ranks' samples.
"""

import lightning as L
import torch
import torchmetrics
from _field import digits, main, same, trainer, weights
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
        self.base = torchmetrics.classification.MulticlassAccuracy(3, average="micro")
        self.tracker = torchmetrics.MetricTracker(torchmetrics.classification.MulticlassAccuracy(3, average="micro"))
        self.history, self.cloned, self.truth = [], [], []

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def on_validation_epoch_start(self):
        self.tracker.increment()
        self.clone = self.base.clone()

    def validation_step(self, batch, batch_idx):
        out = self.net(batch[0])
        self.tracker.update(out, batch[1])
        self.clone.update(out, batch[1])

    def on_validation_epoch_end(self):
        self.history.append(float(self.tracker.compute()))
        self.cloned.append(float(self.clone.compute()))
        x, y = self.whole
        with torch.no_grad():
            self.truth.append(float((self.net(x).argmax(1) == y).float().mean()))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.05)


def worker(strategy):
    torch.manual_seed(1)
    model, val = Net(), digits(96, seed=5)
    model.whole = val[:2]
    t = trainer(strategy, num_sanity_val_steps=0, max_epochs=3)
    t.fit(model, DataLoader(TensorDataset(*digits(96)), 8, shuffle=True), DataLoader(TensorDataset(*val), 8))
    return {"history": model.history, "cloned": model.cloned, "truth": model.truth, "weights": weights(model.net)}


def judge(ranks, run):
    same(ranks, "weights")
    for r in ranks:
        for kind in ("history", "cloned"):
            for got, want in zip(r[kind], r["truth"]):
                assert abs(got - want) < 1e-5, (
                    f"{kind}: {[round(x, 3) for x in r[kind]]}, of all samples {[round(x, 3) for x in r['truth']]}"
                )


if __name__ == "__main__":
    main(worker, judge)
