"""Two workers train by gossip, as a plain script: python script.py."""

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_gossip  # noqa: F401  makes the name "adpsgd" known


class Spirals(LightningDataModule):
    """Points on three spirals, in the plane; which spiral is the class."""

    def __init__(self, points: int = 3000, batch_size: int = 32) -> None:
        super().__init__()
        self.points, self.batch_size = points, batch_size

    def setup(self, stage: str) -> None:
        draw = torch.Generator().manual_seed(0)
        label = torch.randint(3, (self.points,), generator=draw)
        along = torch.rand(self.points, generator=draw)
        angle = 4 * along + 2 * torch.pi * label / 3 + 0.1 * torch.randn(self.points, generator=draw)
        points = along[:, None] * torch.stack([angle.cos(), angle.sin()], dim=1)
        self.train, self.val = torch.utils.data.random_split(TensorDataset(points, label), [0.8, 0.2], generator=draw)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, 200)


class Classifier(LightningModule):
    """A small network."""

    def __init__(self, lr: float = 0.01) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        points, label = batch
        return nn.functional.cross_entropy(self.net(points), label)

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        points, label = batch
        self.log("val_acc", (self.net(points).argmax(1) == label).float().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.hparams["lr"])


def report(trainer: Trainer) -> None:
    """What each worker did."""
    if trainer.is_global_zero:
        print(f"accuracy {float(trainer.callback_metrics['val_acc']):.2f}")
        for worker in trainer.strategy.report.workers:
            print(f"rank {worker.rank}: {worker.steps} steps, {worker.exchanges} exchanges, waited {worker.wait_s:.2f} s")


if __name__ == "__main__":
    trainer = Trainer(strategy="adpsgd", devices=2, accelerator="cpu", max_epochs=10, enable_progress_bar=False)
    trainer.fit(Classifier(), Spirals())
    report(trainer)
