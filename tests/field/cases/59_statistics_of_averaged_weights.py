"""StochasticWeightAveraging ends with an epoch that only gathers BatchNorm's statistics: they must be those of the averaged
weights over all samples, on all ranks.
"""

import lightning as L
import torch
from _field import digits, main, same, trainer, weights
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.2, momentum=0.9)


def worker(strategy):
    torch.manual_seed(1)
    data, model = TensorDataset(*digits(128)), Net()
    callback = StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=2, annealing_epochs=1)
    trainer(strategy, max_epochs=4, callbacks=[callback]).fit(model, DataLoader(data, 8, shuffle=True))
    with torch.no_grad():  # in its last step Lightning moves the weights once more, by the gradients of the epoch before
        expected = callback._average_model.net[0](data.tensors[0]).mean(0)
    return {"weights": weights(model), "off": float((model.net[1].running_mean - expected).abs().max())}


def judge(ranks, run):
    if run.strategy.startswith("ddp"):
        return  # each rank has the statistics of its own samples
    same(ranks, "weights", 1e-6)
    for r in ranks:
        assert r["off"] < 1e-4, f"the running mean is off by {r['off']}"


if __name__ == "__main__":
    main(worker, judge)
