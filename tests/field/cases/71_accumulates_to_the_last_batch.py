"""Manual accumulation that ends at num_training_batches, KL annealing inside an epoch, set_epoch on the sampler; rank 1
is slow.
"""

import time

import lightning as L
import torch
from _field import digits, main, rank, same, trainer, weights
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(L.LightningModule):
    automatic_optimization = False

    def __init__(self):
        super().__init__()
        self.net, self.pending, self.left, self.beta, self.seen = nn.Linear(8, 3), 0, [], [], {}

    def on_train_epoch_start(self):
        self.trainer.train_dataloader.sampler.set_epoch(self.current_epoch)

    def training_step(self, batch, batch_idx):
        time.sleep(0.01 * rank())
        batches = self.trainer.num_training_batches
        self.beta.append((self.current_epoch + batch_idx / batches) / self.trainer.max_epochs)
        self.seen.setdefault(self.current_epoch, []).extend(batch[2].tolist())
        self.manual_backward(nn.functional.cross_entropy(self.net(batch[0]), batch[1]) / 4)
        self.pending += 1
        if (batch_idx + 1) % 4 == 0 or batch_idx + 1 == batches:
            self.optimizers().step()
            self.optimizers().zero_grad()
            self.pending = 0

    def on_train_epoch_end(self):
        self.left.append(self.pending)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def worker(strategy):
    torch.manual_seed(1)
    model = Net()
    trainer(strategy, max_epochs=3).fit(model, DataLoader(TensorDataset(*digits(144)), 8, shuffle=True))
    return {"left": model.left, "beta": model.beta, "seen": model.seen, "weights": weights(model)}


def judge(ranks, run):
    same(ranks, "weights")
    for r in ranks:
        assert r["left"] == [0, 0, 0], f"batches that made no step at the epochs' ends: {r['left']}"
        assert all(a < b for a, b in zip(r["beta"], r["beta"][1:])) and r["beta"][-1] < 1, f"annealed {r['beta']}"
    for epoch in range(3):
        counts = torch.bincount(torch.tensor([i for r in ranks for i in r["seen"][epoch]]), minlength=144)
        assert (counts == 1).all(), f"epoch {epoch}: samples seen {counts.min()} to {counts.max()} times"


if __name__ == "__main__":
    main(worker, judge)
