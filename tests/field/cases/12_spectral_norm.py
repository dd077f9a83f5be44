"""Spectral norm keeps two unit vectors as buffers; in evaluation it uses them as they are, so they must still have length 1."""

import lightning as L
import torch
from _field import digits, main, same, trainer, weights
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.data import DataLoader, TensorDataset


class Critic(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            spectral_norm(nn.Linear(8, 64)),
            nn.ReLU(),
            spectral_norm(nn.Linear(64, 64)),
            nn.ReLU(),
            spectral_norm(nn.Linear(64, 3)),
        )
        self.lengths, self.norms = [], []

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(5 * self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        if batch_idx == 0 and not self.trainer.sanity_checking:
            for buffer in self.net.buffers():
                self.lengths.append(float(buffer.norm()))
            self.norms += [float(torch.linalg.matrix_norm(self.net[i].weight.detach(), 2)) for i in (0, 2, 4)]
        self.log("val_loss", nn.functional.cross_entropy(5 * self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.2, momentum=0.9)


def worker(strategy):
    torch.manual_seed(1)
    model, data = Critic(), TensorDataset(*digits(256))
    trainer(strategy, max_epochs=4).fit(model, DataLoader(data, 8, shuffle=True), DataLoader(data, 8))
    return {"lengths": model.lengths, "norms": model.norms, "weights": weights(model)}


def judge(ranks, run):
    for r in ranks:
        worst = min(r["lengths"])
        assert worst > 0.999, (
            f"shortest unit vector {worst:.4f}; largest spectral norm of a normalized layer in validation {max(r['norms']):.3f}"
        )
    same(ranks, "weights", 1e-5)


if __name__ == "__main__":
    main(worker, judge)
