"""self.trainer.save_checkpoint() inside training_step every 2 steps, as a maintainer once advised."""

import lightning as L
import torch
from _field import digits, folder, main, same, trainer, weights
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
        self.seen = []
        self.asked = []

    def training_step(self, batch, batch_idx):
        if self.global_step % 2 == 0 and self.global_step > 0:
            self.asked.append(f"step={self.global_step}.ckpt")
            self.trainer.save_checkpoint(folder() / self.asked[-1])
        self.seen.append(batch[2])
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def worker(strategy):
    torch.manual_seed(1)
    model = Net()
    trainer(strategy).fit(model, DataLoader(TensorDataset(*digits(160)), 8, shuffle=True))
    counts = torch.bincount(torch.cat(model.seen), minlength=160)
    loads = set()
    for path in folder().glob("*.ckpt"):
        Net().load_state_dict(torch.load(path, weights_only=False)["state_dict"])
        loads.add(path.name)
    return {"weights": weights(model), "counts": counts, "loads": loads, "asked": set(model.asked)}


def judge(ranks, run):
    same(ranks, "weights")
    total = sum(r["counts"] for r in ranks)
    assert (total == 2).all(), f"in 2 epochs samples were seen {total.min()} to {total.max()} times"
    assert ranks[0]["loads"] == ranks[0]["asked"] != set(), f"{ranks[0]['loads']} of {ranks[0]['asked']}"


if __name__ == "__main__":
    main(worker, judge, may_refuse=True)
