"""A task of slurm.sh: Lightning takes rank and address from SLURM."""

import os

from lightning.pytorch import Trainer
from script import Classifier, Spirals, report

from lightning_gossip import ADPSGDStrategy

if __name__ == "__main__":
    tasks, on_a_node = int(os.environ["SLURM_NTASKS"]), int(os.environ["SLURM_NTASKS_PER_NODE"])
    trainer = Trainer(
        strategy=ADPSGDStrategy(),
        devices=on_a_node,
        num_nodes=tasks // on_a_node,
        accelerator="cpu",
        max_epochs=10,
        enable_progress_bar=False,
    )
    trainer.fit(Classifier(), Spirals())
    report(trainer)
