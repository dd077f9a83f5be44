"""Under torchrun, on one machine or several.

One machine:      torchrun --standalone --nproc-per-node=2 torchrun.py
Several machines: torchrun --nnodes=$N --node-rank=$R --nproc-per-node=1 --master-addr=host0 --master-port=29400 torchrun.py

One worker for each agent (--nproc-per-node=1, started as often as there are devices) lets the others go on when one dies.
"""

import os

from lightning.pytorch import Trainer
from script import Classifier, Spirals, report

from lightning_gossip import ADPSGDStrategy

if __name__ == "__main__":
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    trainer = Trainer(
        strategy=ADPSGDStrategy(),
        devices=local,
        num_nodes=int(os.environ["WORLD_SIZE"]) // local,
        accelerator="cpu",
        max_epochs=10,
        enable_progress_bar=False,
    )
    trainer.fit(Classifier(), Spirals())
    report(trainer)
