"""A script that trains several times and prints nothing: ``python fits.py OUT START_METHOD COUNT [STORE]``."""

from __future__ import annotations

import json
import logging
import sys
import warnings
from pathlib import Path

from lightning.pytorch import Trainer

from lightning_gossip import ADPSGDStrategy
from tests.strategies.models import Net, loader


def main(out: str, start_method: str, count: str, store: str | None = None) -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    model, samples = Net(), []
    for _ in range(int(count)):
        strategy = ADPSGDStrategy(start_method=start_method, store=store)  # type: ignore[arg-type]
        trainer = Trainer(
            strategy=strategy,
            devices=2,
            accelerator="cpu",
            max_epochs=1,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
        )
        trainer.fit(model, loader(400, 4), loader(32, shuffle=False))
        trainer.validate(model, loader(32, shuffle=False), verbose=False)
        samples.append([worker.samples for worker in strategy.report.workers])
    if trainer.is_global_zero:
        Path(out, "result.json").write_text(
            json.dumps({"samples": samples, "accuracy": trainer.callback_metrics["val_acc"].item()})
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
