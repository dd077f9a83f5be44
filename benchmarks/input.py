"""How many images a second does a CPU core prepare, and does a training step wait for them?

JPEG files as large as ImageNet's usual ones (500 × 375 pixels), generated, in the page cache: decoding counts, not the disk.

1. One core, one image after the other, everything on one thread: the usual way (Pillow, then crop, flip, float32, normalise)
   and that of ``recipes/vision`` (torchvision's decoder, crop and flip, still bytes). Both in turn, medians of rounds.
2. Two workers train with one loader process each, for two cores. A step sleeps, as a CPU does while a GPU computes, so long
   that training asks for a given share of what a core can prepare. What is measured is the time between two steps, in which
   Lightning fetches a batch, as a share of the whole; Lightning's DDP and AD-PSGD, with loader processes, without, and with
   batches that lie in memory: what is left there is Lightning's own loop.

    python -m benchmarks.input [--quick]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.strategies import DDPStrategy
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

from benchmarks.harness import against, console, print_table, run, trainer, write_results
from lightning_gossip import ADPSGDStrategy
from recipes.commands import cleaning_up_on_sigterm
from recipes.vision.data import ImageNetData
from recipes.vision.images import decode_rgb

WIDTH, HEIGHT, QUALITY = 500, 375, 90
BATCH_SIZE = 64
WORKERS = 2
LOADS = (0.25, 0.5, 0.75)
AIM_WAIT = 0.02
MEMORY = "memory"
LOADERS = {"1 process": 1, "none": 0, MEMORY: 0}

STRATEGIES: dict[str, Callable[[], DDPStrategy]] = {"ddp": DDPStrategy, "adpsgd": ADPSGDStrategy}


def generate(root: Path, images: int) -> float:
    """ImageNet's layout with two classes, the same images to train and to evaluate; returns a file's mean size in bytes."""
    random = np.random.default_rng(0)
    sizes = []
    for number in range(images):
        coarse = random.integers(0, 256, (HEIGHT // 8 + 1, WIDTH // 8 + 1, 3), dtype=np.uint8)
        smooth = np.asarray(Image.fromarray(coarse).resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC), dtype=np.int16)
        pixels = (smooth + random.normal(scale=12, size=smooth.shape)).clip(0, 255).astype(np.uint8)
        for part in ("train", "val"):
            folder = root / part / f"n{number % 2:08}"
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"{number}.JPEG"
            Image.fromarray(pixels).save(path, quality=QUALITY)
        sizes.append(path.stat().st_size)
    return statistics.fmean(sizes)


def per_core(root: Path, rounds: int) -> dict[str, float]:
    """Images a second on one thread, each way; medians."""
    torch.set_num_threads(1)
    files = [path.read_bytes() for path in sorted((root / "train").rglob("*.JPEG"))]
    geometry = [v2.RandomResizedCrop(224, antialias=True), v2.RandomHorizontalFlip()]
    as_numbers = [v2.ToDtype(torch.float32, scale=True), v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))]
    usual = v2.Compose([v2.ToImage(), *geometry, *as_numbers, v2.ToPureTensor()])
    bytes_only = v2.Compose(geometry)
    ways: dict[str, Callable[[bytes], Tensor]] = {
        "usual": lambda file: usual(Image.open(BytesIO(file)).convert("RGB")),
        "recipes": lambda file: bytes_only(decode_rgb(file)),
        "recipes, decoding alone": decode_rgb,
    }
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, prepare in ways.items():
            started_s = time.perf_counter()
            for file in files:
                prepare(file)
            times[way].append((time.perf_counter() - started_s) / len(files))
    return {way: 1.0 / statistics.median(seconds) for way, seconds in times.items()}


class Step(LightningModule):
    """Next to no work for the CPU; sleeps as if a GPU worked."""

    def __init__(self, step_s: float) -> None:
        super().__init__()
        self.step_s = step_s
        self.net = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        time.sleep(self.step_s)
        return nn.functional.cross_entropy(self.net(images), labels)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Bytes(ImageNetData):
    """Not normalised: that would be the GPU's work."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        images, labels = batch
        return images[:, :, ::16, ::16].float(), labels

    def _loader(self, data: Any, **order: Any) -> DataLoader[Any]:
        loader = super()._loader(data, **order)
        if isinstance(data, Memory):
            loader.collate_fn = lambda batch: batch
        return loader


class Memory(Dataset[Any]):
    """The same image again and again; a batch of them costs nothing."""

    def __init__(self, images: int) -> None:
        self.images = images
        self.batch = torch.zeros(BATCH_SIZE, 3, 224, 224, dtype=torch.uint8), torch.zeros(BATCH_SIZE, dtype=torch.long)

    def __len__(self) -> int:
        return self.images

    def __getitems__(self, indices: list[int]) -> Any:
        return self.batch


class Waits(Callback):
    """Seconds between the end of a step and the begin of the next one, of the last epoch."""

    def __init__(self) -> None:
        self.between_s: list[float] = []
        self.began_s = self.ended_s = 0.0

    def on_train_epoch_start(self, *_: Any) -> None:
        self.between_s, self.ended_s = [], 0.0

    def on_train_batch_start(self, *_: Any) -> None:
        now_s = time.perf_counter()
        if self.ended_s:
            self.between_s.append(now_s - self.ended_s)
        else:
            self.began_s = now_s

    def on_train_batch_end(self, *_: Any) -> None:
        self.ended_s = time.perf_counter()


def train(root: str, strategy: str, step_s: float, way: str) -> float:
    """One run of two epochs, of which the first one warms up; the share of the time between steps."""
    waits = Waits()
    data = Bytes(root=Path(root), classes=2, batch_size=BATCH_SIZE, num_workers=LOADERS[way], prefetch=4)
    if way == MEMORY:
        data.train = Memory(sum(1 for _ in (Path(root) / "train").rglob("*.JPEG")))
    options: dict[str, Any] = {"max_epochs": 2, "limit_val_batches": 0, "num_sanity_val_steps": 0, "callbacks": [waits]}
    trainer(strategy=STRATEGIES[strategy](), **options).fit(Step(step_s), datamodule=data)
    return sum(waits.between_s) / (waits.ended_s - waits.began_s)


def waiting(root: Path, strategy: str, step_s: float, way: str) -> float:
    """The share of time between steps, mean of the workers."""
    parameters = {"root": str(root), "strategy": strategy, "step_s": step_s, "way": way}
    return statistics.fmean(run(train, parameters, hosts=(None,) * WORKERS, timeout_s=180.0))


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a quarter of the images, fewer rounds")
    quick = parser.parse_args().quick
    images, rounds = (1280, 2) if quick else (5120, 5)
    with tempfile.TemporaryDirectory() as folder, cleaning_up_on_sigterm():
        root = Path(folder)
        size = generate(root / "small", 200)
        rates = per_core(root / "small", rounds)
        title = f"Images a second and core, {WIDTH} × {HEIGHT} pixels, {size / 1000:.0f} kB"
        print_table(
            title, ["", "images/s", "÷ usual"], [[w, f"{r:.0f}", f"{r / rates['usual']:.2f}"] for w, r in rates.items()]
        )

        repeat(root / "small", root / "large", images)
        table, shares = [], []
        for load in LOADS:
            step_s = BATCH_SIZE / (load * rates["recipes"])
            row = {f"{name}, {way}": waiting(root / "large", name, step_s, way) for way in LOADERS for name in STRATEGIES}
            shares.append({"load": load, "step_s": step_s, "waiting": row})
            cells = []
            for name, share in row.items():
                memory = row[f"{name.split(',')[0]}, {MEMORY}"]
                aimed = "1 process" in name
                cells.append(against(share, memory + AIM_WAIT, at_most=True, digits=3) if aimed else f"{share:.3f}")
            table.append([f"{load:.0%}, {step_s * 1e3:.0f} ms", *cells])
            console.print(f"{load:.0%} done", style="dim")
    caption = f"aim, with a loader process: at most {AIM_WAIT} more than from memory"
    print_table("Share of the time in which a worker waits for data", ["asked of a core, step", *row], table, caption=caption)
    print(write_results("input", {"file_bytes": size, "images_per_core": rates, "waiting": shares}))


def repeat(small: Path, large: Path, images: int) -> None:
    """The same files many times, as links."""
    files = sorted((small / "train").rglob("*.JPEG"))
    for number in range(images):
        file = files[number % len(files)]
        folder = large / "train" / file.parent.name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number}.JPEG").symlink_to(file)
    (large / "val").symlink_to(small / "val")


if __name__ == "__main__":
    main()
