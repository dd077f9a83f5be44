"""Two workers train by gossip in a loop of one's own: python fabric.py."""

import torch
from lightning.fabric import Fabric
from script import Classifier, Spirals
from torch.nn.functional import cross_entropy

import lightning_gossip  # noqa: F401  makes the name "adpsgd" known


def main() -> None:
    """Train, evaluate, save."""
    fabric = Fabric(accelerator="cpu", devices=2, strategy="adpsgd")
    fabric.launch()
    spirals, net = Spirals(), Classifier().net
    spirals.setup("fit")
    model, optimizer = fabric.setup(net, torch.optim.Adam(net.parameters(), lr=0.01))
    train, val = fabric.setup_dataloaders(spirals.train_dataloader(), spirals.val_dataloader())
    for _ in range(10):
        for points, label in train:
            optimizer.zero_grad()
            fabric.backward(cross_entropy(model(points), label))
            optimizer.step()
    with torch.no_grad():
        hits = sum((model(points).argmax(1) == label).sum() for points, label in val)
    fabric.print(f"accuracy {float(fabric.all_reduce(hits.float(), reduce_op='sum')) / len(spirals.val):.2f}")
    fabric.save("fabric.ckpt", {"model": model, "optimizer": optimizer})
    if fabric.is_global_zero:
        for worker in fabric.strategy.report.workers:
            print(f"rank {worker.rank}: {worker.steps} steps, {worker.exchanges} exchanges, waited {worker.wait_s:.2f} s")


if __name__ == "__main__":
    main()
