"""MoCo: a key encoder that follows without gradients, its storage replaced each step; a queue of unit vectors, its pointer."""

import lightning as L
import torch
from _field import digits, main, same, trainer, weights
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class MoCo(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.query = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        self.key = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        for q, k in zip(self.query.parameters(), self.key.parameters()):
            k.data.copy_(q.data)
            k.requires_grad = False
        self.register_buffer(
            "queue", nn.functional.normalize(torch.randn(4, 64, generator=torch.Generator().manual_seed(0)), dim=0)
        )
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))
        self.register_buffer("filled", torch.zeros(64, dtype=torch.bool))
        self.lengths, self.in_step = [], []

    def training_step(self, batch, batch_idx):
        x = batch[0]
        with torch.no_grad():
            for q, k in zip(self.query.parameters(), self.key.parameters()):
                k.data = k.data * 0.9 + q.data * 0.1
            keys = nn.functional.normalize(self.key(x + 0.1 * torch.randn_like(x)), dim=1)
        queries = nn.functional.normalize(self.query(x), dim=1)
        logits = torch.cat([(queries * keys).sum(1, keepdim=True), queries @ self.queue.clone()], 1)
        at = int(self.pointer)
        self.queue[:, at : at + len(x)] = keys.T
        self.filled[at : at + len(x)] = True
        self.pointer[0] = (at + len(x)) % 64
        return nn.functional.cross_entropy(logits / 0.2, torch.zeros(len(x), dtype=torch.long))

    def validation_step(self, batch, batch_idx):
        if batch_idx == 0 and not self.trainer.sanity_checking:
            self.lengths.append(float(self.queue.norm(dim=0).min()))
            # the pointer stands behind what was written last, so it and the mask are of one worker
            self.in_step.append(bool(self.filled.all()) or int(self.filled.sum()) == int(self.pointer))

    def configure_optimizers(self):
        return torch.optim.SGD(self.query.parameters(), 0.1, momentum=0.9)


def worker(strategy):
    torch.manual_seed(1)
    model, data = MoCo(), TensorDataset(*digits(144))
    trainer(strategy, max_epochs=3).fit(model, DataLoader(data, 8, shuffle=True), DataLoader(data, 8))
    return {"weights": weights(model), "lengths": model.lengths, "in_step": model.in_step}


def judge(ranks, run):
    same(ranks, "weights", 1e-5, only=lambda n: n.startswith(("query", "key")))
    if not run.strategy.startswith("ddp"):  # which gives rank 0's buffers to all in the next forward pass only
        same(ranks, "weights", 0.0, only=lambda n: n in ("queue", "pointer", "filled"))
    for r in ranks:
        assert min(r["lengths"]) > 0.999, f"shortest vector of the queue {min(r['lengths']):.3f}"
        assert all(r["in_step"]), "the pointer and the mask of the queue are not of one worker"


if __name__ == "__main__":
    main(worker, judge)
