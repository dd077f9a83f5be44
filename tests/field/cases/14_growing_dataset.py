"""reload_dataloaders_every_n_epochs=1 with a data set that grows each epoch (curriculum): every sample of an epoch once,
schedules go on.
"""

import lightning as L
import torch
from _field import digits, main, same, trainer, weights
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Curriculum(L.LightningDataModule):
    def train_dataloader(self):
        n = 48 * (1 + self.trainer.current_epoch)
        return DataLoader(TensorDataset(*digits(n)), 8, shuffle=True)

    def val_dataloader(self):
        return DataLoader(TensorDataset(*digits(32, seed=3)), 8)


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net, self.seen, self.rates = nn.Linear(8, 3), {}, []

    def training_step(self, batch, batch_idx):
        self.seen.setdefault(self.current_epoch, []).extend(batch[2].tolist())
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self):
        opt = torch.optim.SGD(self.parameters(), 0.1)
        return {
            "optimizer": opt,
            "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.ExponentialLR(opt, 0.95), "interval": "step"},
        }


def worker(strategy):
    torch.manual_seed(1)
    model = Net()
    t = trainer(strategy, max_epochs=4, reload_dataloaders_every_n_epochs=1)
    t.fit(model, datamodule=Curriculum())
    return {"weights": weights(model), "seen": model.seen, "lr": t.optimizers[0].param_groups[0]["lr"]}


def judge(ranks, run):
    same(ranks, "weights")
    for epoch in range(4):
        n = 48 * (1 + epoch)
        counts = torch.bincount(torch.tensor([i for r in ranks for i in r["seen"][epoch]]), minlength=n)
        assert len(counts) == n and (counts == 1).all(), (
            f"epoch {epoch}: {len(counts)} of {n} samples, seen {counts.min()} to {counts.max()} times"
        )
    same(ranks, "lr", 1e-12)
    want = 0.1 * 0.95 ** (3 + 6 + 9 + 12)  # steps of each worker if all are equally fast
    assert abs(ranks[0]["lr"] - want) < 0.06 * want, f"the schedule ends at {ranks[0]['lr']:.5f}, 30 steps lead to {want:.5f}"


if __name__ == "__main__":
    main(worker, judge)
