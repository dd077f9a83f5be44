"""CombinedLoader of two lengths in each mode, and a hand-made DistributedSampler that Lightning must reshuffle each epoch."""

import lightning as L
import torch
from _field import digits, main, same, trainer, weights
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net, self.seen = nn.Linear(8, 3), {}

    def note(self, name, batch):
        self.seen.setdefault((name, self.current_epoch), []).extend(batch[2].tolist())
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def training_step(self, batch, batch_idx, dataloader_idx=0):
        if isinstance(batch, dict):
            return sum(self.note(name, part) for name, part in batch.items() if part is not None)
        return self.note("ab"[dataloader_idx], batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def worker(strategy):
    out = {}
    a, b = TensorDataset(*digits(80)), TensorDataset(*digits(48, seed=2))
    for mode in ("max_size_cycle", "min_size", "max_size"):
        torch.manual_seed(1)
        model = Net()
        loaders = CombinedLoader({"a": DataLoader(a, 8, shuffle=True), "b": DataLoader(b, 8, shuffle=True)}, mode)
        t = trainer(strategy)
        t.fit(model, loaders)
        out[mode] = {"seen": model.seen, "weights": weights(model), "steps": t.global_step}

    class ByHand(Net):
        def train_dataloader(self):
            sampler = DistributedSampler(
                a, num_replicas=self.trainer.world_size, rank=self.trainer.global_rank, shuffle=True, seed=3
            )
            return DataLoader(a, 8, sampler=sampler)

    for own in (True, False):
        torch.manual_seed(1)
        model = ByHand()
        t = trainer(strategy, use_distributed_sampler=not own)
        t.fit(model)
        out[f"by hand, use_distributed_sampler={not own}"] = {
            "seen": model.seen,
            "weights": weights(model),
            "steps": t.global_step,
        }
    return out


def judge(ranks, run):
    for name in ranks[0]:
        both = [r[name] for r in ranks]
        same(both, "weights")
        same(both, "steps", 0)
        for epoch in (0, 1):
            a = torch.bincount(torch.tensor([i for r in both for i in r["seen"].get(("a", epoch), [])]), minlength=80)
            if name == "min_size":
                assert a.sum() == 48 and a.max() == 1, f"{name}: a {a.sum()} seen, at most {a.max()} times"
            else:
                assert (a == 1).all(), f"{name}: samples of a seen {a.min()} to {a.max()} times"
            if "hand" not in name:
                b = torch.bincount(torch.tensor([i for r in both for i in r["seen"].get(("b", epoch), [])]), minlength=48)
                cycled = name == "max_size_cycle"
                assert b.sum() == (80 if cycled else 48) and b.max() == (2 if cycled else 1) and b.min() == 1, (
                    f"{name}: b {b.sum()} seen"
                )
        assert both[0]["seen"][("a", 0)] != both[0]["seen"][("a", 1)], f"{name}: the same order in both epochs"


if __name__ == "__main__":
    main(worker, judge)
