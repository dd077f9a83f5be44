"""Lightning's FineTuneLearningRateFinder: a search for the learning rate where some epochs begin, inside the fit."""

import lightning as L
import torch
from _field import digits, main, same, trainer, weights
from lightning.pytorch.callbacks import LearningRateFinder
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class FineTuneLearningRateFinder(LearningRateFinder):
    def __init__(self, milestones, **options):
        super().__init__(**options)
        self.milestones = milestones
        self.found = []

    def on_fit_start(self, *_):
        return

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch in self.milestones or trainer.current_epoch == 0:
            self.lr_find(trainer, pl_module)
            self.found.append(pl_module.lr)


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.lr = 1e-3
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), self.lr)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def worker(strategy):
    torch.manual_seed(1)
    model, finder = Net(), FineTuneLearningRateFinder((2,), num_training_steps=20)
    data = TensorDataset(*digits(320))
    t = trainer(strategy, max_epochs=3, callbacks=[finder])
    t.fit(model, DataLoader(data, 8, shuffle=True), DataLoader(data, 32))
    return {
        "weights": weights(model),
        "found": finder.found,
        "lr": t.optimizers[0].param_groups[0]["lr"],
        "epoch": t.current_epoch,
        "step": t.global_step,
        "moves": t.lr_scheduler_configs[0].scheduler.last_epoch,
        "val_loss": float(t.callback_metrics["val_loss"]),
    }


def judge(ranks, run):
    for key in ("weights", "lr", "found", "step", "moves", "val_loss"):
        same(ranks, key)
    first = ranks[0]
    assert len(first["found"]) == 2 and first["found"][0] != 1e-3, first["found"]
    assert (first["epoch"], first["step"]) == (3, 60), (first["epoch"], first["step"])
    assert first["moves"] == 60, f"the schedule has moved {first['moves']} times in 60 steps"
    assert first["val_loss"] < 1.2, first["val_loss"]  # what is found is high, under DDP too


if __name__ == "__main__":
    main(worker, judge)
