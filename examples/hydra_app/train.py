"""Your own Hydra app: python train.py strategy=adpsgd topology=exponential trainer.devices=4."""

import sys
from pathlib import Path

import hydra
from hydra.utils import instantiate
from lightning.pytorch import Trainer
from omegaconf import DictConfig

sys.path.append(str(Path(__file__).parents[1]))
from script import Classifier, Spirals, report


@hydra.main(version_base="1.3", config_path=".", config_name="config")
def main(config: DictConfig) -> None:
    """Train as the configuration says."""
    trainer = Trainer(strategy=instantiate(config.strategy), **config.trainer)
    trainer.fit(Classifier(config.lr), Spirals())
    report(trainer)


if __name__ == "__main__":
    main()
