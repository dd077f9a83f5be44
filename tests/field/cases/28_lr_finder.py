"""Tuner.lr_find, then fit with what it suggests: one suggestion on all ranks, the model back where it was, the full fit after
it.
"""

import lightning as L
import torch
from _field import digits, main, same, trainer, weights
from lightning.pytorch.tuner import Tuner
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.lr = 1e-3
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen.append(batch[2])
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        opt = torch.optim.SGD(self.parameters(), self.lr)
        steps = int(self.trainer.estimated_stepping_batches)
        return {
            "optimizer": opt,
            "lr_scheduler": {
                "scheduler": torch.optim.lr_scheduler.LinearLR(opt, 1, 0.1, total_iters=steps),
                "interval": "step",
            },
        }


def worker(strategy):
    torch.manual_seed(1)
    model, data = Net(), TensorDataset(*digits(320))
    train = DataLoader(data, 8, shuffle=True)
    before = weights(model)
    t = trainer(strategy, max_epochs=2)
    finder = Tuner(t).lr_find(model, train, num_training=40, min_lr=1e-4, max_lr=1.0)
    moved = max((a - before[n]).abs().max().item() for n, a in weights(model).items())
    found, model.seen = model.lr, []
    t.fit(model, train)
    counts = torch.bincount(torch.cat(model.seen), minlength=320)
    return {
        "found": found,
        "suggested": finder.suggestion(),
        "tried": finder.results["lr"],
        "moved": moved,
        "weights": weights(model),
        "counts": counts,
        "lr": t.optimizers[0].param_groups[0]["lr"],
        "epoch": t.current_epoch,
    }


def judge(ranks, run):
    same(ranks, "found", 1e-12)
    same(ranks, "weights")
    r = ranks[0]
    assert abs(r["found"] - r["suggested"]) < 1e-9 and r["found"] != 1e-3, (r["found"], r["suggested"])
    # a worker's share of all steps may be less than half, so that its last rate is that of an earlier step
    assert r["tried"] == sorted(r["tried"]), r["tried"]
    assert r["tried"][0] < 2e-4 and r["tried"][-1] > 0.1, f"rates from {r['tried'][0]:.1e} to {r['tried'][-1]:.1e} were tried"
    assert r["epoch"] == 2 and r["moved"] < 1e-6, f"epoch {r['epoch']}, after lr_find the model had moved by {r['moved']:.3g}"
    total = sum(x["counts"] for x in ranks)
    assert (total == 2).all(), f"samples seen {total.min()} to {total.max()} times in 2 epochs"
    same(ranks, "lr", 1e-12)
    assert abs(r["lr"] / r["found"] - 0.1) < 0.03, f"the schedule ends at {r['lr'] / r['found']:.3f} of the rate, 0.1 wanted"


if __name__ == "__main__":
    main(worker, judge)
