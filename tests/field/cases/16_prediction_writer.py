"""BasePredictionWriter on two ranks, 101 samples, after a fit with the same Trainer: every sample predicted once, under its
own number.
"""

import lightning as L
import torch
from _field import digits, folder, main, rank, same, trainer, weights
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Writer(BasePredictionWriter):
    def __init__(self):
        super().__init__("batch_and_epoch")
        self.by_batch = []

    def write_on_batch_end(self, trainer, model, prediction, batch_indices, batch, batch_idx, dataloader_idx):
        self.by_batch.append((list(batch_indices), prediction))

    def write_on_epoch_end(self, trainer, model, predictions, batch_indices):
        torch.save((predictions, batch_indices), folder() / f"predictions-{rank()}.pt")


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(8, 3)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def predict_step(self, batch, batch_idx):
        return self.net(batch[0]).argmax(1)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def worker(strategy):
    torch.manual_seed(1)
    model, writer = Net(), Writer()
    t = trainer(strategy, callbacks=[writer], max_epochs=1)
    t.fit(model, DataLoader(TensorDataset(*digits(64)), 8, shuffle=True))
    x, y, i = digits(101, seed=4)
    t.predict(model, DataLoader(TensorDataset(x, y, i), 8), return_predictions=False)
    predictions, indices = torch.load(folder() / f"predictions-{rank()}.pt")
    indices = indices[0] if indices and indices[0] and isinstance(indices[0][0], (list, tuple)) else indices
    by_epoch = {int(n): int(p) for ns, ps in zip(indices, predictions) for n, p in zip(ns, ps)}
    by_batch = {int(n): int(p) for ns, ps in writer.by_batch for n, p in zip(ns, ps)}
    with torch.no_grad():
        truth = model.net(x).argmax(1).tolist()
    return {"by_epoch": by_epoch, "by_batch": by_batch, "truth": truth, "weights": weights(model)}


def judge(ranks, run):
    same(ranks, "weights")
    for kind in ("by_batch", "by_epoch"):
        numbers = sorted(n for r in ranks for n in r[kind])
        assert numbers == list(range(101)), f"{kind}: {len(numbers)} predictions of {len(set(numbers))} samples, 101 wanted"
        for r in ranks:
            assert all(r["truth"][n] == p for n, p in r[kind].items()), f"{kind}: predictions under other samples' numbers"


if __name__ == "__main__":
    main(worker, judge)
