"""SAM in manual optimization: first_step and second_step of the optimizer are called, never step; the workers must hear of
each other all the same.
"""

import lightning as L
import torch
from _field import digits, main, same, trainer, weights
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class SAM(torch.optim.SGD):
    """Sharpness aware: climb a little, take the gradient there, step from where one was."""

    @torch.no_grad()
    def first_step(self):
        norm = torch.stack([p.grad.norm() for g in self.param_groups for p in g["params"] if p.grad is not None]).norm()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["climb"] = p.grad * (0.05 / (norm + 1e-12))
                    p.add_(self.state[p]["climb"])
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if "climb" in self.state[p]:
                    p.sub_(self.state[p].pop("climb"))
        torch.optim.SGD.step.__wrapped__(self) if hasattr(torch.optim.SGD.step, "__wrapped__") else super().step()
        self.zero_grad()


class Sharp(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
        self.at_step_5 = None

    def training_step(self, batch, batch_idx):
        x, y, _ = batch
        opt = self.optimizers()
        self.manual_backward(nn.functional.cross_entropy(self.net(x), y))
        opt.first_step()
        self.manual_backward(nn.functional.cross_entropy(self.net(x), y))
        opt.second_step()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == 5 and self.at_step_5 is None:
            self.at_step_5 = weights(self.net)

    def configure_optimizers(self):
        return SAM(self.parameters(), 0.1, momentum=0.9)


def worker(strategy):
    torch.manual_seed(1)
    model = Sharp()
    t = trainer(strategy)
    t.fit(model, DataLoader(TensorDataset(*digits(256)), 8, shuffle=True))
    report = getattr(t.strategy, "report", None)
    mine = [(w.steps, w.exchanges, w.averagings) for w in report.workers] if report is not None else None
    return {"weights": weights(model), "at_step_5": model.at_step_5, "report": mine}


def judge(ranks, run):
    same(ranks, "weights")
    if run.strategy.startswith(("ddp", "qsgd")):
        same(ranks, "at_step_5", 1e-6)
        return
    steps, exchanges, averagings = zip(*ranks[0]["report"])
    assert sum(steps) > 0, (
        f"no step was counted, nothing exchanged: steps {steps}, exchanges {exchanges}, averagings {averagings}"
    )
    assert sum(x or 0 for x in exchanges) > 0 or sum(x or 0 for x in averagings) > 4, (
        f"exchanges {exchanges}, averagings {averagings}"
    )


if __name__ == "__main__":
    main(worker, judge)
