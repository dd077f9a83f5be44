"""LightningCLI with the strategy from a file: python cli.py fit --config cli.yaml --trainer.strategy.init_args.wire int8."""

from lightning.pytorch.cli import LightningCLI
from script import Classifier, Spirals, report

if __name__ == "__main__":
    cli = LightningCLI(Classifier, Spirals, save_config_callback=None)
    report(cli.trainer)
