"""pix2pix: the discriminator is frozen for the generator's step and stays so at the end of the batch; it must still be one on
all ranks.
"""

import lightning as L
import torch
from _field import digits, main, same, trainer, unused_ok, weights
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def trainable(net, yes):
    for p in net.parameters():
        p.requires_grad = yes


class Pix2Pix(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.g = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
        self.d = nn.Sequential(nn.Linear(11, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))

    def training_step(self, batch, batch_idx):
        x, y, _ = batch
        real = nn.functional.one_hot(y, 3).float()
        opt_g, opt_d = self.optimizers()
        fake = self.g(x)
        trainable(self.d, True)
        opt_d.zero_grad()
        loss_d = (
            nn.functional.softplus(self.d(torch.cat([x, fake.detach()], 1))).mean()
            + nn.functional.softplus(-self.d(torch.cat([x, real], 1))).mean()
        )
        self.manual_backward(loss_d)
        opt_d.step()
        trainable(self.d, False)
        opt_g.zero_grad()
        self.manual_backward(nn.functional.softplus(-self.d(torch.cat([x, fake], 1))).mean() + (fake - real).abs().mean())
        opt_g.step()

    def configure_optimizers(self):
        return torch.optim.Adam(self.g.parameters(), 0.01), torch.optim.Adam(self.d.parameters(), 0.01)


def worker(strategy):
    torch.manual_seed(1)
    model = Pix2Pix()
    trainer(unused_ok(strategy), max_epochs=3).fit(model, DataLoader(TensorDataset(*digits(128)), 8, shuffle=True))
    return {"weights": weights(model)}


def judge(ranks, run):
    same(ranks, "weights", only=lambda name: name.startswith("g."))
    same(ranks, "weights", only=lambda name: name.startswith("d."))


if __name__ == "__main__":
    main(worker, judge)
