"""EMAWeightAveraging: the averaged model is one on all ranks, the one that is validated, and what is left at the end."""

import lightning as L
import torch
from _field import digits, main, same, trainer, weights
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3))
        self.validated = []

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        if batch_idx == 0 and not self.trainer.sanity_checking:
            self.validated.append(float(self.net[0].weight.double().sum()))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.2, momentum=0.9)


def worker(strategy):
    torch.manual_seed(1)
    model, data, average = Net(), TensorDataset(*digits(256)), EMAWeightAveraging(decay=0.9)
    trainer(strategy, max_epochs=3, callbacks=[average]).fit(model, DataLoader(data, 8, shuffle=True), DataLoader(data, 8))
    return {"weights": weights(model), "validated": model.validated, "count": float(average._average_model.n_averaged)}


def judge(ranks, run):
    # running statistics are each rank's own under DDP
    same(ranks, "weights", 1e-6, only=lambda n: not run.strategy.startswith("ddp") or "running" not in n)
    same(ranks, "count")
    gaps = [abs(a - b) for a, b in zip(ranks[0]["validated"], ranks[1]["validated"])]
    assert max(gaps) < 1e-6, f"the ranks have validated different averages: {gaps}"


if __name__ == "__main__":
    main(worker, judge)
