"""StochasticWeightAveraging over the last epochs, and ModelPruning after each: one model on all ranks, and its loss is the one
that is reported.
"""

import lightning as L
import torch
from _field import digits, main, same, trainer, weights
from lightning.pytorch.callbacks import ModelPruning, StochasticWeightAveraging
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.2, momentum=0.9)


def worker(strategy):
    data, out = TensorDataset(*digits(128)), {}
    for name, callback in {
        "averaged": StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=2, annealing_epochs=1),
        "pruned": ModelPruning("l1_unstructured", amount=0.3, parameter_names=["weight"], make_pruning_permanent=True),
    }.items():
        torch.manual_seed(1)
        model = Net()
        t = trainer(strategy, max_epochs=5, callbacks=[callback])
        t.fit(model, DataLoader(data, 8, shuffle=True), DataLoader(data, 8))
        again = t.validate(model, DataLoader(data, 8), verbose=False)[0]["val_loss"]
        model.eval()
        with torch.no_grad():
            alone = float(nn.functional.cross_entropy(model.net(data.tensors[0]), data.tensors[1]))
        zeros = float((model.net[0].weight == 0).float().mean())
        out[name] = {"weights": weights(model), "again": again, "alone": alone, "zeros": zeros}
    return out


def judge(ranks, run):
    for name in ranks[0]:
        both = [r[name] for r in ranks]
        # running statistics are rank 0's own under DDP too, after the last batch
        same(both, "weights", 1e-5, only=lambda n: "running" not in n and "num_batches" not in n)
    assert ranks[0]["pruned"]["zeros"] > 0.25, ranks[0]["pruned"]["zeros"]
    for name in ranks[0]:
        gaps = [abs(r[name]["again"] - r[name]["alone"]) for r in ranks]
        assert max(gaps) < (1e-4 if not run.strategy.startswith("ddp") else 1), (
            f"{name}: validated, then computed alone: {gaps}"
        )


if __name__ == "__main__":
    main(worker, judge)
