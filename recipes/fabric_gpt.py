"""A language model of bytes in a loop of one's own: Lightning Fabric with a decentralized strategy.

    python -m recipes.fabric_gpt --strategy adpsgd --devices 4 [--path text.txt] [--resume fabric_gpt.ckpt]

A session of the strategy lasts from a loader's first batch to its last. There all workers meet, and the model is their mean.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import STRATEGY_REGISTRY
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import lightning_gossip  # noqa: F401 - makes the strategies known to Fabric
from recipes.text.data import TextData
from recipes.text.transformer import Transformer

CLIP, WARM_UP = 1.0, 0.05


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m recipes.fabric_gpt", description="A language model of bytes with Fabric.")
    parser.add_argument("--strategy", default="adpsgd", help="of Fabric: adpsgd, diloco, ddp, ...; default: adpsgd")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--devices", type=int, default=2, help="workers of a node; default: 2")
    parser.add_argument("--num-nodes", type=int, default=1)
    parser.add_argument("--path", type=Path, help="a text; default: the sources of Python's standard library")
    parser.add_argument("--characters", type=int, default=200_000, help="of the text; default: 200000")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=16, help="of a worker")
    parser.add_argument("--accumulate", type=int, default=1, help="batches of a step")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak, of the batches of all workers together")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--checkpoint", type=Path, default=Path("fabric_gpt.ckpt"), help="written after each epoch")
    parser.add_argument("--resume", type=Path, help="a checkpoint to go on from")
    chosen = parser.parse_args()
    if min(chosen.epochs, chosen.batch_size, chosen.accumulate, chosen.devices, chosen.num_nodes) < 1 or chosen.lr <= 0:
        parser.error("--epochs, --batch-size, --accumulate, --devices and --num-nodes are at least 1, --lr is above 0")
    if chosen.strategy not in STRATEGY_REGISTRY:
        parser.error(f"--strategy {chosen.strategy} is none of {', '.join(sorted(STRATEGY_REGISTRY))}")
    if chosen.resume is not None and not chosen.resume.exists():
        parser.error(f"--resume {chosen.resume}: there is no such file")
    return chosen


def lr_at(share: float, peak: float) -> float:
    """A warm-up, then half a cosine to 0, at a share of the run.

    >>> [round(lr_at(share, 1.0), 2) for share in (0.0, 0.025, 0.05, 0.525, 1.0)]
    [0.0, 0.5, 1.0, 0.5, 0.0]
    """
    if share < WARM_UP:
        return peak * share / WARM_UP
    return peak * 0.5 * (1 + math.cos(math.pi * (share - WARM_UP) / (1 - WARM_UP)))


def loss_of(model: Any, batch: list[Tensor]) -> Tensor:
    """Nats a byte."""
    return cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def evaluate(fabric: Fabric, model: Any, data: DataLoader[Any]) -> float:
    """Bits a byte of held-out text, over all workers: each sequence once."""
    model.eval()
    total = torch.zeros(2, device=fabric.device)
    with torch.no_grad():  # under which a loader of Fabric's evaluates
        for batch in data:
            total += torch.stack(
                [loss_of(model, batch) * len(batch[0]), torch.tensor(float(len(batch[0])), device=fabric.device)]
            )
    nats, sequences = fabric.all_reduce(total, reduce_op="sum")
    return float(nats / sequences) / math.log(2)


def main() -> None:
    """Train, and write a checkpoint after each epoch."""
    options = arguments()
    fabric = Fabric(
        accelerator=options.accelerator, devices=options.devices, num_nodes=options.num_nodes, strategy=options.strategy
    )
    fabric.launch()
    fabric.seed_everything(0, verbose=False)
    text = TextData(path=options.path, max_characters=options.characters, batch_size=options.batch_size)
    net = Transformer(vocabulary=256, sequence_length=128, layers=options.layers, heads=4, width=options.width)
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=0.0, weight_decay=0.1, betas=(0.9, 0.95)))
    train, held_out = fabric.setup_dataloaders(text.train_dataloader(), text.val_dataloader())
    state = {"model": model, "optimizer": optimizer, "epochs": 0}
    if options.resume is not None:
        fabric.load(options.resume, state)
    epochs_left = getattr(fabric.strategy, "epochs_left", lambda epochs, state: range(state["epochs"], epochs))
    for epoch in epochs_left(options.epochs, state):
        model.train()
        for number, batch in enumerate(train, start=1):
            # fast workers make more steps: the schedule follows what all have done, not the steps of one
            share = getattr(fabric.strategy, "share_of_epoch", number / len(train))
            for group in optimizer.param_groups:
                group["lr"] = lr_at((epoch + share) / options.epochs, options.lr)
            accumulates = number % options.accumulate != 0
            with fabric.no_backward_sync(model, enabled=accumulates):
                fabric.backward(loss_of(model, batch) / options.accumulate)
            if not accumulates:
                fabric.clip_gradients(model, optimizer, max_norm=CLIP)
                optimizer.step()
                optimizer.zero_grad()
        fabric.print(f"epoch {epoch + 1}: {evaluate(fabric, model, held_out):.3f} bits a byte")
        fabric.save(options.checkpoint, {**state, "epochs": epoch + 1})


if __name__ == "__main__":
    main()
