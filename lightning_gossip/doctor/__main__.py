"""The command; see docs/doctor.md."""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path

from lightning_gossip.doctor import cluster_file, picture, plan
from lightning_gossip.doctor.launch import place, started_here
from lightning_gossip.doctor.measure.training import Trained, load
from lightning_gossip.doctor.report import Report
from lightning_gossip.doctor.session import News, Session, Times
from lightning_gossip.doctor.verdicts import findings, status
from lightning_gossip.errors import ConfigurationError, GossipError

REPORT = "doctor.json"
_WIDTH = 120  # of a file or a log
_COULD_NOT = 2  # exit status, as argparse's


def main(arguments: Sequence[str] | None = None) -> int:
    """Run on this rank; the exit status: 0, or 1 if there is a problem (rank 0's), or 2 if nothing could be measured."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    if importlib.util.find_spec("rich") is None:
        print("The doctor needs rich: pip install rich", file=sys.stderr)
        return _COULD_NOT
    parser = _parser()
    options = parser.parse_args(given)
    if options.data is not None and options.model is None:
        parser.error("--data is of a model: give --model too")
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    try:
        with ExitStack() as stack:
            model = None if options.model is None else load(options.model, options.data)
            where = place()
            if where is None:
                where = stack.enter_context(started_here(options.workers, _for_others(options)))
            elif options.workers is not None:
                raise ConfigurationError(
                    f"--workers={options.workers}, and {where.launcher} has started {where.world_size} processes. Leave it out."
                )
            on_progress = stack.enter_context(_progress(quiet=where.rank != 0))
            times = Times(total=options.seconds, join=options.join)
            trained = None if model is None else Trained(*model, 3 * times.alone)
            report = Session(where, times, on_progress).run(trained)
    except GossipError as error:
        print(f"The doctor could not do its work: {error}", file=sys.stderr)
        return _COULD_NOT
    if report is None:
        return 0
    return _leave(report, options)


def _for_others(options: argparse.Namespace) -> list[str]:
    """What the ranks that this one starts need to know."""
    given = {"--seconds": options.seconds, "--join": options.join, "--model": options.model, "--data": options.data}
    return [word for option, value in given.items() if value is not None for word in (option, str(value))]


def _leave(report: Report, options: argparse.Namespace) -> int:
    found = findings(report)
    folder = Path(options.folder)
    folder.mkdir(parents=True, exist_ok=True)
    everything = {**report.as_dict(), "findings": [asdict(finding) for finding in found], "status": status(found)}
    (folder / REPORT).write_text(json.dumps(everything, indent=1), encoding="utf-8")
    files = [REPORT]
    files += [cluster_file.FILE] if cluster_file.save(report, folder) else []
    files += [picture.FIGURE] if picture.draw(report, folder / picture.FIGURE) else []
    planned: list[str] = []
    if options.model is not None:
        arguments = plan.command(report, folder)
        if isinstance(arguments, str):
            planned = [f"No plan was made: {arguments}."]
        else:
            print("doctor: the planner", file=sys.stderr)
            planned = plan.choice(arguments, folder)
    if options.json:
        print(json.dumps({**everything, "plan": planned}))
    else:
        from rich.console import Console

        from lightning_gossip.doctor.show import show

        console = Console() if sys.stdout.isatty() else Console(width=_WIDTH)
        show(report, found, console)
        for sentence in planned:
            console.print(sentence, soft_wrap=True, markup=False, highlight=False)
        console.print(f"In {folder}: {', '.join(files)}", soft_wrap=True, markup=False, highlight=False)
    return status(found)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m lightning_gossip.doctor",
        description="Measures the cluster under your own launcher, and says what is wrong with it. Start it as you would start"
        " training: torchrun --nproc-per-node 4 -m lightning_gossip.doctor; srun python -m lightning_gossip.doctor; or plainly,"
        " for workers on this machine.",
        epilog="Exit status: 0, no problem; 1, a problem; 2, nothing could be measured. docs/doctor.md has each verdict.",
    )
    parser.add_argument("--workers", type=_whole, help="on this machine, where no launcher has started them; default one a GPU")
    parser.add_argument("--model", help="module:name of a LightningModule: its step time and curvature, and a plan for it")
    parser.add_argument("--data", help="module:name of its data, if it has no train_dataloader; needs --model")
    parser.add_argument("--folder", default="doctor", help="where cluster.json, doctor.json and links.png go (default: doctor)")
    parser.add_argument("--json", action="store_true", help="print everything as one line of JSON in place of tables")
    parser.add_argument("--seconds", type=_seconds, default=100.0, help="that measuring may take (default: 100)")
    parser.add_argument("--join", type=_seconds, default=60.0, help="seconds to wait for all ranks to come (default: 60)")
    return parser


def _whole(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 1.0 <= value <= 3600.0:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 1 to 3600")
    return value


@contextmanager
def _progress(*, quiet: bool) -> Iterator[News]:
    """A bar on stderr, or a line for each part where that is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if quiet:
        yield lambda what, share: None
    elif not console.is_terminal:
        parts: list[str] = []

        def line(what: str, share: float) -> None:
            if what not in parts:
                parts.append(what)
                print(f"doctor: {what}", file=sys.stderr, flush=True)

        yield line
    else:
        with Progress(
            TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=console, transient=True
        ) as bar:
            task = bar.add_task("waiting for all ranks", total=1.0)
            yield lambda what, share: bar.update(task, description=what, completed=share)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code) if code == _COULD_NOT else sys.exit(code)
