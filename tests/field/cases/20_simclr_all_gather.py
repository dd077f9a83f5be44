"""SimCLR gathers all ranks' embeddings with gradients in training_step; where that cannot work it must be refused, saying what
to write.
"""

import lightning as L
import torch
from _field import digits, main, same, trainer, weights
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class SimCLR(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16))
        self.negatives = set()

    def training_step(self, batch, batch_idx):
        x = batch[0]
        views = [nn.functional.normalize(self.net(x + 0.1 * torch.randn_like(x)), dim=1) for _ in range(2)]
        z = torch.cat([self.all_gather(v, sync_grads=True).flatten(0, 1) for v in views])
        n = len(z) // 2
        self.negatives.add(len(z) - 2)
        logits = z @ z.T / 0.2 - 1e9 * torch.eye(len(z))
        return nn.functional.cross_entropy(logits, torch.cat([torch.arange(n) + n, torch.arange(n)]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def worker(strategy):
    torch.manual_seed(1)
    model = SimCLR()
    trainer(strategy).fit(model, DataLoader(TensorDataset(*digits(128)), 8, shuffle=True))
    return {"weights": weights(model), "negatives": sorted(model.negatives)}


def judge(ranks, run):
    same(ranks, "weights", 1e-5)
    assert ranks[0]["negatives"] == [30], (
        f"16 samples in two views on two ranks have 30 negatives, here {ranks[0]['negatives']}"
    )


if __name__ == "__main__":
    main(worker, judge, may_refuse=True)
