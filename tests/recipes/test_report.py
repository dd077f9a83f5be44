"""One page over many runs, from made-up ones."""

from __future__ import annotations

import base64
import io
import json
import re
from collections import defaultdict
from collections.abc import Iterable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from rich.console import Console

from lightning_gossip import ConfigurationError
from recipes.record import RunRecord, WorkerRecord
from recipes.report import page, runs
from recipes.report.__main__ import main, table
from recipes.report.groups import COLOURS, DASHES, group, rank
from recipes.report.units import Unit, digits, percent, points

RISING = (0.5, 0.8, 0.905)


def write_run(
    folder: Path,
    strategy: str = "ddp",
    *,
    seed: int = 0,
    accuracies: Iterable[float] = RISING,
    epoch_s: float = 2.0,
    test_acc: float = 0.9,
    overrides: Iterable[str] = (),
    recipe: str = "digits",
    gossip: bool | None = None,
    metric: str = "val_acc",
    bits: float | None = None,
) -> Path:
    """A finished run of two workers; of a strategy other than ddp also what it reports."""
    gossip = strategy != "ddp" if gossip is None else gossip
    write_hydra(folder, [f"strategy={strategy}", f"seed={seed}", *overrides], recipe)
    rows = [
        {"epoch": i, "time/wall_s": epoch_s * (i + 1), metric: accuracy, "train_loss": 1.0 / (i + 1)}
        | ({} if bits is None else {"val_bpc": bits + 1.0 / (i + 1)})
        for i, accuracy in enumerate(accuracies)
    ]
    train_s = epoch_s * len(rows)
    RunRecord(
        train_s, 0, rows, [WorkerRecord(rank, 10 * (rank + 1), 300, train_s, [], [(0.5, 1.0)]) for rank in range(2)]
    ).save(folder)
    reported = {"exchanges": 5, "bytes_sent": 3_000_000, "staleness_mean": 0.5, "staleness_p95": 2.0, "staleness_max": 3}
    nothing = dict.fromkeys([*reported, "dropped", "wait_s"])
    worker = nothing | reported | {"wait_s": 0.25 * train_s} if gossip else nothing
    summary = {
        "strategy": strategy,
        "topology": "ring" if gossip else None,
        "world_size": 2,
        "epochs": len(rows),
        "train_loss": 0.1,
        "test_acc": test_acc,
        "train_s": train_s,
        "samples_per_s": 600 / train_s,
        "consensus_distance": 0.04 if gossip else None,
        "period_mean": None,
        "averagings": None,
        "collectives_in_training": 0,
        "workers": [{"rank": rank, "steps": 10 * (rank + 1), "samples": 300, "busy_s": 1.0} | worker for rank in range(2)],
    }
    summary |= {} if bits is None else {"test_bpc": bits}
    (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    return folder


def write_hydra(folder: Path, overrides: list[str], recipe: str = "digits") -> None:
    hydra = folder / ".hydra"
    hydra.mkdir(parents=True)
    (hydra / "overrides.yaml").write_text("".join(f"- {json.dumps(override)}\n" for override in overrides), encoding="utf-8")
    (hydra / "config.yaml").write_text(f"recipe:\n  epochs: 3\n  model: {{lr: 0.1}}\nseed: {overrides[1][5:]}\n")
    (hydra / "hydra.yaml").write_text(f"hydra:\n  runtime:\n    choices:\n      recipe: {recipe}\n")


class Page(HTMLParser):
    """What a reader sees, and what a browser would fetch."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.folder = path.parent
        self.source = path.read_text(encoding="utf-8")
        self.tags: dict[str, list[dict[str, str | None]]] = defaultdict(list)
        self.rows: list[list[str]] = []
        self._words: list[str] = []
        self._hidden = self._cell = False
        self.feed(self.source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag].append(dict(attrs))
        self._hidden = tag == "style"
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self._cell = True
            self.rows[-1].append("")
        if tag == "small":
            self.rows[-1][-1] += " "

    def handle_endtag(self, tag: str) -> None:
        self._hidden = False
        self._cell = self._cell and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self._hidden:
            return
        self._words.append(data)
        if self._cell:
            self.rows[-1][-1] += data

    @property
    def text(self) -> str:
        return " ".join(" ".join(self._words).split())

    def ranked(self) -> list[dict[str, str]]:
        """The rows of the first table, by heading."""
        end = next(i for i, row in enumerate(self.rows[1:], start=1) if row[0] == "strategy")
        headings, *rows = [[" ".join(cell.split()) for cell in row] for row in self.rows[:end]]
        return [dict(zip(headings, row, strict=True)) for row in rows]


def page_of(*folders: Path, out: Path) -> Page:
    main([*map(str, folders), "--out", str(out)])
    return Page(out / "report.html")


def ranked(*folders: Path, **options: Any) -> pd.DataFrame:
    return rank(group(runs.load(list(folders))), **options)


def looks_of(*folders: Path) -> list[tuple[str, str]]:
    """Colour and dash of each group, by their place among all."""
    rows = ranked(*folders).drop_duplicates("label").set_index("label")
    rows = rows.loc[group(runs.load(list(folders))).table.label.unique()]
    return list(zip(rows.colour.map(COLOURS.index), rows.dash.map(DASHES.index), strict=True))


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which take most of the time."""
    monkeypatch.setattr(page, "draw", lambda *_: [])


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two seeds each of ddp and of a strategy twice as fast, one of a strategy that does not arrive, and a job that failed."""
    folder = tmp_path_factory.mktemp("sweep")
    write_run(folder / "0", "ddp", seed=0, test_acc=0.90)
    write_run(folder / "1", "ddp", seed=1, test_acc=0.92, epoch_s=4.0)
    write_run(folder / "2", "adpsgd", seed=0, test_acc=0.93, epoch_s=1.0)
    write_run(folder / "3", "adpsgd", seed=1, test_acc=0.95, epoch_s=2.0)
    write_run(folder / "10", "dpsgd", accuracies=(0.3, 0.4, 0.5), test_acc=0.5, epoch_s=3.0)
    write_hydra(folder / "11", ["strategy=qsgd", "seed=7"])
    (folder / "11" / "metrics.csv").write_text("epoch,val_acc\n0,0.1\n1,0.2\n")
    (folder / "notes").mkdir()
    return folder


@pytest.fixture(scope="module")
def seen(sweep: Path, tmp_path_factory: pytest.TempPathFactory) -> Page:
    return page_of(sweep, out=tmp_path_factory.mktemp("page"))


def test_the_table_has_the_means_over_the_seeds_and_their_range(seen: Page) -> None:
    first, second, third = seen.ranked()
    assert (first["strategy"], second["strategy"], third["strategy"]) == ("adpsgd", "ddp baseline", "dpsgd")
    assert first["seeds"] == second["seeds"] == "2"
    assert first["test accuracy"] == "94.00 % 93.00–95.00"
    assert first["difference to the baseline"] == "+3.00 points"
    assert first["training time"] == "4.50 s 3.00–6.00"
    assert first["samples/s"] == "150"


def test_speed_ups_are_ratios_of_means_and_what_is_not_reached_is_said(seen: Page) -> None:
    first, second, third = seen.ranked()
    assert first["speed-up, equal epochs"] == first["speed-up to 90 %"] == "2.00 ×"
    assert first["time to 90 %"] == "4.50 s 3.00–6.00"
    assert second["speed-up to 90 %"] == "1.00 ×"
    assert (third["time to 90 %"], third["speed-up to 90 %"]) == ("not reached", "–")
    assert third["speed-up, equal epochs"] == "1.00 ×"


def test_the_page_says_what_was_run_and_what_came_out(seen: Page) -> None:
    assert "The recipe digits trained for 3 epochs on 2 workers with the strategies ddp, adpsgd and dpsgd" in seen.text
    assert "1–2 runs of each that differ in their seed alone, 5 runs in all" in seen.text
    assert (
        "adpsgd was the first to reach 90 % validation accuracy, after 4.50 s: 2.00 times as fast as the baseline" in seen.text
    )
    assert (
        "Its test accuracy of 94.00 % is 3.00 points above the 91.00 % of ddp, more than the spread of the seeds." in seen.text
    )


def test_what_workers_sent_and_waited_is_in_the_second_table(seen: Page) -> None:
    row = next(row for row in seen.rows if row[:2] == ["adpsgd", "3.0\u00a0MB"])
    assert [" ".join(cell.split()) for cell in row[2:]] == ["1.00 ×", "0.0400", "–", "0.500 p95 2, max 3", "25.0 %", "10–20"]


def test_runs_of_text_have_bits_per_character_and_a_figure_of_them_and_others_have_none(seen: Page, tmp_path: Path) -> None:
    for seed, bits in ((0, 2.0), (1, 2.5)):
        write_run(tmp_path / str(seed), seed=seed, recipe="char_gpt", bits=bits)
    page = page_of(tmp_path, out=tmp_path)
    assert [row["bits per character"] for row in page.ranked()] == ["2.25 2.00–2.50"]
    assert (tmp_path / "report_bits_time.png").is_file()
    assert "bits per character" not in seen.ranked()[0]
    assert not (seen.folder / "report_bits_time.png").exists()


def test_the_page_needs_nothing_from_outside(seen: Page) -> None:
    assert "http" not in seen.source
    assert not seen.tags["script"]
    assert not seen.tags["link"]
    assert "@import" not in seen.source
    assert "url(" not in seen.source
    assert all((image["src"] or "").startswith("data:image/png;base64,") for image in seen.tags["img"])
    assert all((link["href"] or "").startswith("#") for link in seen.tags["a"])


def test_each_picture_is_in_the_page_and_beside_it_and_says_what_it_shows(seen: Page) -> None:
    files = sorted(path.name for path in seen.folder.glob("*.png"))
    names = ["accuracy_samples", "accuracy_time", "bytes", "loss_time", "staleness", "steps", "waiting"]
    assert files == [f"report_{name}.png" for name in names]
    embedded = {base64.b64decode((image["src"] or "").partition(",")[2]) for image in seen.tags["img"]}
    assert embedded == {path.read_bytes() for path in seen.folder.glob("*.png")}
    assert all("adpsgd" in (image["alt"] or "") for image in seen.tags["img"])


def test_a_job_that_failed_is_named_with_its_overrides(seen: Page, sweep: Path) -> None:
    assert "1 more run has no result" in seen.text
    row = next(row for row in seen.rows if row[0] == str(sweep / "11"))
    assert row[1:] == ["strategy=qsgd seed=7", "no summary.json: stopped or still running; 2 epochs done"]
    assert "qsgd" not in seen.ranked()[-1]["strategy"]


def test_why_a_job_failed_is_said_where_it_left_a_note(tmp_path: Path) -> None:
    write_run(tmp_path / "0")
    write_hydra(tmp_path / "1", ["strategy=qsgd", "seed=7"])
    (tmp_path / "1" / "failed.txt").write_text("ValueError: too <few>\n\nTraceback ...\n")
    (reason,) = runs.load([tmp_path]).unfinished.reason
    assert reason == "failed: ValueError: too <few>; no epoch done"


def test_a_summary_that_is_cut_off_counts_as_no_result(tmp_path: Path) -> None:
    write_run(tmp_path / "0")
    write_run(tmp_path / "1", seed=1)
    (tmp_path / "1" / "summary.json").write_text('{"strategy": "dd')
    found = runs.load([tmp_path])
    assert [folder.name for folder in found.table.folder] == ["0"]
    assert "JSONDecodeError" in found.unfinished.reason[0]


def test_what_all_runs_share_is_listed_and_the_seed_is_not(seen: Page) -> None:
    assert "recipe.epochs: 3 recipe.model.lr: 0.1" in seen.text
    assert "seed: 0" not in seen.text


def test_runs_and_sweeps_can_be_mixed_and_each_run_counts_once(sweep: Path, tmp_path: Path) -> None:
    alone = write_run(tmp_path / "alone", "adpsgd", seed=5)
    table = runs.load([sweep, alone, sweep / "2"]).table
    assert [folder.name for folder in table.folder] == ["0", "1", "2", "3", "10", "alone"]


def test_odd_strings_stay_text(tmp_path: Path) -> None:
    odd = "<script>alert('&')</script>"
    write_run(tmp_path / "0", overrides=[f"+note={odd}"])
    write_run(tmp_path / "1", overrides=["+note=$x_{1$ [bold]"])
    write_hydra(tmp_path / "2", ["strategy=<b>ddp</b>", "seed=0"])
    found = page_of(tmp_path, out=tmp_path / "out")
    assert not found.tags["script"]
    assert not found.tags["b"]
    assert f"note={odd}" in found.ranked()[0]["strategy"]
    assert "note=$x_{1$ [bold]" in found.ranked()[1]["strategy"]
    assert "strategy=<b>ddp</b>" in found.text


def test_without_ddp_the_first_is_the_baseline(tmp_path: Path) -> None:
    write_run(tmp_path / "0", "dpsgd")
    write_run(tmp_path / "1", "adpsgd", epoch_s=1.0)
    rows = ranked(tmp_path)
    assert rows.baseline.tolist() == ["dpsgd", "dpsgd"]
    assert rows.speedup_to_target[0] == 2.0


def test_another_baseline_can_be_named_but_must_be_there(sweep: Path) -> None:
    assert set(ranked(sweep, baseline="adpsgd").baseline) == {"adpsgd"}
    with pytest.raises(ConfigurationError, match=r"'qsgd'. There are: ddp, adpsgd, dpsgd"):
        ranked(sweep, baseline="qsgd")


def test_each_setting_is_measured_against_the_baseline_in_the_same_setting(tmp_path: Path) -> None:
    for number, (strategy, cluster, epoch_s) in enumerate(
        [("ddp", "none", 1.0), ("ddp", "slow", 8.0), ("adpsgd", "none", 1.0), ("adpsgd", "slow", 2.0)]
    ):
        write_run(tmp_path / str(number), strategy, epoch_s=epoch_s, overrides=[f"cluster={cluster}"])
    speedups = ranked(tmp_path).set_index("label").speedup
    assert speedups["adpsgd, cluster=slow"] == 4.0
    assert speedups["adpsgd, cluster=none"] == 1.0


@pytest.mark.usefixtures("no_pictures")
def test_settings_are_ranked_apart_and_each_has_its_sentence(tmp_path: Path) -> None:
    for number, (strategy, cluster, epoch_s) in enumerate(
        [("ddp", "slow", 8.0), ("ddp", "none", 1.0), ("adpsgd", "slow", 2.0), ("adpsgd", "none", 1.5)]
    ):
        write_run(tmp_path / str(number), strategy, epoch_s=epoch_s, overrides=[f"cluster={cluster}"])
    found = page_of(tmp_path, out=tmp_path / "out")
    names = ["adpsgd, cluster=slow", "ddp, cluster=slow", "ddp, cluster=none", "adpsgd, cluster=none"]
    assert [row["strategy"].split(" against")[0].removesuffix(" baseline") for row in found.ranked()] == names
    assert [row[""] for row in found.ranked()] == ["1", "2", "1", "2"]
    assert "after 6.00 s: 4.00 times as fast as the baseline ddp, cluster=slow." in found.text
    assert "ddp, cluster=none was the first to reach 90 % validation accuracy, after 3.00 s; it is the baseline." in found.text


def test_labels_name_what_differs_and_no_more(tmp_path: Path) -> None:
    for number, lr in enumerate(("0.1", "0.2")):
        write_run(tmp_path / str(number), "adpsgd", overrides=[f"recipe.model.lr={lr}", "recipe.epochs=3", f"other.lr={lr}"])
    write_run(tmp_path / "2", "adpsgd", overrides=["recipe.epochs=3"])
    labels = group(runs.load([tmp_path])).table.label.tolist()
    assert labels == ["recipe.model.lr=0.1, other.lr=0.1", "recipe.model.lr=0.2, other.lr=0.2", "defaults"]


@pytest.mark.usefixtures("no_pictures")
def test_a_target_of_which_one_seed_falls_short_is_not_reached(tmp_path: Path) -> None:
    write_run(tmp_path / "0", "ddp")
    write_run(tmp_path / "1", "adpsgd", seed=0)
    write_run(tmp_path / "2", "adpsgd", seed=1, accuracies=(0.5, 0.8, 0.89))
    found = page_of(tmp_path, out=tmp_path / "out").ranked()
    assert found[1]["time to 90 %"] == "not reached 1 of 2 seeds did"


def test_accuracies_of_32_bits_reach_the_target_that_they_print(tmp_path: Path) -> None:
    write_run(tmp_path / "0", accuracies=(0.5, 0.9700000286102295, 0.9699999690055847))
    assert ranked(tmp_path).target.tolist() == [0.97]
    again = ranked(write_run(tmp_path / "1", accuracies=(0.5, 0.9699999690055847)))
    assert again.target.tolist() == [0.97]
    assert again.reached_s.tolist() == [4.0]


@pytest.mark.usefixtures("no_pictures")
def test_times_over_different_numbers_of_epochs_are_not_compared(tmp_path: Path) -> None:
    write_run(tmp_path / "0", "ddp")
    write_run(tmp_path / "1", "adpsgd", accuracies=(0.5, 0.95))
    found = {row["strategy"]: row for row in page_of(tmp_path, out=tmp_path / "out").ranked()}
    assert found["adpsgd"]["speed-up, equal epochs"] == "– other number of epochs"
    assert found["adpsgd"]["speed-up to 90 %"] == "1.50 ×"


def test_a_single_run_has_a_page_too(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", "ddp")
    main([str(run)])
    found = Page(run / "report.html")
    assert "ddp reached 90.00 % test accuracy in 6.00 s" in found.text
    assert "nothing to compare it with" in found.text
    assert "Thin lines" not in found.text
    assert not (run / "report_bytes.png").exists()


def test_without_validation_the_runs_are_ranked_by_test_accuracy(tmp_path: Path) -> None:
    write_run(tmp_path / "0", "ddp", metric="other")
    write_run(tmp_path / "1", "adpsgd", metric="other", test_acc=0.95, epoch_s=3.0)
    found = page_of(tmp_path, out=tmp_path / "out")
    assert [row["strategy"] for row in found.ranked()] == ["adpsgd", "ddp baseline"]
    assert "adpsgd has the highest test accuracy, 95.00 %; ddp took the least time" in found.text
    assert not any("accuracy" in path.name for path in (tmp_path / "out").glob("*.png"))


@pytest.mark.usefixtures("no_pictures")
def test_a_run_without_hydra_is_told_from_its_summary(tmp_path: Path) -> None:
    run = write_run(tmp_path / "0", "adpsgd")
    for file in (run / ".hydra").iterdir():
        file.unlink()
    (run / ".hydra").rmdir()
    (job,) = runs.load([tmp_path]).table.itertuples()
    assert (job.options["strategy"], job.options["topology"], job.config) == ("adpsgd", "ring", {})
    assert "The runs kept none." in page_of(tmp_path, out=tmp_path / "out").text


@pytest.mark.usefixtures("no_pictures")
def test_recipes_are_ranked_apart_and_their_mixture_is_said(tmp_path: Path) -> None:
    for number, (strategy, recipe) in enumerate([("ddp", "digits"), ("adpsgd", "digits"), ("adpsgd", "mnist_mlp")]):
        write_run(tmp_path / str(number), strategy, recipe=recipe)
    rows = ranked(tmp_path)
    assert rows.recipe.tolist() == ["digits", "digits", "mnist_mlp"]
    assert rows.baseline[2] == rows.label[2]
    assert "The runs are of several recipes." in page_of(tmp_path, out=tmp_path / "out").text


def test_recipes_with_different_metrics_are_refused(tmp_path: Path) -> None:
    write_run(tmp_path / "0", recipe="digits")
    write_run(tmp_path / "1", recipe="words", metric="val_loss")
    with pytest.raises(ConfigurationError, match="different metrics"):
        runs.load([tmp_path])


@pytest.mark.parametrize("what", ["missing", "empty", "failed"])
def test_a_folder_without_a_result_is_one_clear_sentence(what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / what
    if what == "empty":
        folder.mkdir()
    if what == "failed":
        write_hydra(folder / "0", ["strategy=ddp", "seed=0"])
    with pytest.raises(SystemExit) as left:
        main([str(folder)])
    assert left.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("ConfigurationError: ")
    assert str(folder) in said
    assert {"missing": "is not a folder", "empty": "has no finished job", "failed": "has finished"}[what] in said
    assert not folder.exists() or not list(folder.glob("*.html"))


def test_a_target_out_of_range_is_refused(sweep: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"Write 0.9 for 90 %"):
        ranked(sweep, target=90.0)


@pytest.mark.usefixtures("no_pictures")
def test_the_terminal_gets_the_ranking_and_the_path(sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(sweep), "--out", str(tmp_path / "mine.html"), "--target", "0.8"])
    said = capsys.readouterr().out
    assert re.search(r"adpsgd +94\.00 +4\.50 +2\.00 +3\.00 +2\.00 +3\.0\sMB", said)
    assert "1 more without a result: 11" in said
    assert f"The page is {tmp_path / 'mine.html'}" in said


def test_the_ranking_fits_a_terminal_of_80_columns(tmp_path: Path) -> None:
    write_run(tmp_path / "0", "ddp")
    write_run(tmp_path / "1", "adaptive_averaging", accuracies=(0.1, 0.2))
    text = io.StringIO()
    Console(file=text, width=80).print(table(ranked(tmp_path), Unit("s", 1.0)))
    assert "adaptive_averaging " in text.getvalue()
    assert "not reached" in text.getvalue()


def test_one_colour_a_strategy_in_every_figure_and_in_the_table(sweep: Path) -> None:
    found = group(runs.load([sweep]))
    pictures = page.draw(found, rank(found), Unit("s", 1.0))
    bars = {picture.name: picture.figure.axes[0].patches for picture in pictures}
    colours = {name: [patch.get_facecolor() for patch in patches] for name, patches in bars.items()}
    assert colours["steps"] == [colours["waiting"][0], colours["steps"][1], colours["waiting"][1]] * 2
    assert colours["bytes"] == colours["waiting"]


def test_settings_of_a_strategy_share_its_colour_unless_they_are_too_many(tmp_path: Path) -> None:
    for number in range(5):
        write_run(tmp_path / f"a{number}", "adpsgd", overrides=[f"lr={number}"])
    assert looks_of(tmp_path) == [(0, 0), (1, 0), (2, 0), (3, 0), (4, 0)]
    few = [write_run(tmp_path / f"d{number}", "ddp", overrides=[f"lr={number}"]) for number in range(2)]
    assert looks_of(tmp_path / "a0", tmp_path / "a1", *few) == [(0, 0), (0, 1), (1, 0), (1, 1)]


@pytest.mark.parametrize(
    ("value", "text"),
    [(1234.5, "1,234"), (45.67, "45.7"), (1.5, "1.50"), (0.045, "0.0450"), (0.0, "0.00"), (1.5e-5, "1.50e-05")],
)
def test_numbers_have_few_digits(value: float, text: str) -> None:
    assert digits(value) == text


def test_shares_and_differences() -> None:
    assert (percent(0.97, 0), percent(0.98611, 2), percent(float("nan"))) == ("97\u00a0%", "98.61\u00a0%", "–")
    assert (points(-0.0014), points(0.00001), points(0.01)) == ("−0.14", "0", "+1.00")
