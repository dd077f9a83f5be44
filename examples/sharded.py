"""A model in shards: two islands of two ranks each, FSDP2 inside an island, gossip between them: python sharded.py.

configure_model is what Lightning's ModelParallelStrategy wants, so the same module trains with that strategy too.
"""

import torch
from lightning.pytorch import LightningModule, Trainer
from script import Spirals, report
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lightning_gossip import ShardedADPSGDStrategy


class Block(nn.Module):
    """Attention, then two layers at each token."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.before(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.between(x))


class Transformer(LightningModule):
    """A small transformer on eight tokens made of a point."""

    def __init__(self, width: int = 32, layers: int = 2, lr: float = 0.003) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Linear(2, 8 * width), nn.Unflatten(1, (8, width)), *(Block(width, heads=4) for _ in range(layers))
        )
        self.head = nn.Linear(width, 3)

    def configure_model(self) -> None:
        """Each block in shards of its own, so that one block at a time is gathered; then what is left."""
        if any(isinstance(parameter, DTensor) for parameter in self.parameters()):
            return  # called again, as for validation after fit
        mesh = self.device_mesh["data_parallel"]  # of the island
        for layer in [*self.net, self.head]:
            if any(True for _ in layer.parameters()):
                fully_shard(layer, mesh=mesh)

    def forward(self, points: Tensor) -> Tensor:
        return self.head(self.net(points).mean(1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        points, label = batch
        return nn.functional.cross_entropy(self(points), label)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        points, label = batch
        self.log("val_acc", (self(points).argmax(1) == label).float().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])


if __name__ == "__main__":
    trainer = Trainer(
        strategy=ShardedADPSGDStrategy(data_parallel_size=2),  # "auto", the default: the ranks of a node
        devices=4,
        accelerator="cpu",
        max_epochs=10,
        enable_progress_bar=False,
    )
    trainer.fit(Transformer(), Spirals())
    report(trainer)
