"""A training run on disk: the folder next to the model it writes, its numbers, its checkpoints."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import io
import itertools
import json
import shutil
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from retrofit.anatomy import plural
from retrofit.errors import TrainingError, first_few
from retrofit.files.atomic_writes import aside_of, held, is_held, whole_file
from retrofit.files.model_folders import EXPORTED, FILES
from retrofit.process import deferred_signals
from retrofit.training.optimizer import rates_text
from retrofit.training.settings import CHANGEABLE_ON_RESUME, Settings, flag

Points = tuple[tuple[int, float], ...]  # (step, loss)

COLOURS = ("#1f5fa8", "#d1592a", "#3a8a4f", "#8b4fa3", "#7a6a1f")  # distinguishable with any colour vision
SMOOTHED = 10  # a noisy line is smoothed over a tenth of its entries
SIZE, DPI = (7.2, 4.2), 160  # inches


class Losses(Protocol):
    """Protocol of a run with losses."""

    @property
    def losses(self) -> Points: ...

    @property
    def eval_losses(self) -> Points: ...


def running_means(points: Points, over: int) -> Points:
    """Return the mean of each entry and the entries before it, `over` in all; fewer at the beginning."""
    values = [value for _, value in points]
    means = (statistics.fmean(values[max(0, place + 1 - over) : place + 1]) for place in range(len(values)))
    return tuple((step, mean) for (step, _), mean in zip(points, means, strict=True))


def draw_curves(
    path: Path,
    runs: Mapping[str, Losses],
    title: str,
    *,
    levels: Mapping[str, float] | None = None,
    marks: Mapping[str, int] | None = None,
) -> Path:
    """Write a PNG of the held-out loss of each run, labelled with its last value; the axis ends at the last step.

    Behind a single run is its training loss, raw and smoothed. `levels` are losses drawn as horizontal lines, `marks` steps drawn
    as vertical lines.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=SIZE, dpi=DPI, layout="constrained")
    axes = figure.add_subplot()
    for colour, (name, run) in zip(itertools.cycle(COLOURS), runs.items(), strict=False):
        if run.losses and (len(runs) == 1 or not run.eval_losses):
            over = max(1, len(run.losses) // SMOOTHED)
            label = f"{name}, training" if over == 1 else None
            axes.plot(*zip(*run.losses, strict=True), color=colour, linewidth=1.0, alpha=0.35, label=label)
            if over > 1:
                smooth = f"{name}, training: mean of {over} entries"
                axes.plot(*zip(*running_means(run.losses, over), strict=True), color=colour, linewidth=1.2, alpha=0.7, label=smooth)
        if run.eval_losses:
            axes.plot(
                *zip(*run.eval_losses, strict=True), "o-", color=colour, markersize=4, label=f"{name}, held out", clip_on=False
            )
            last = run.eval_losses[-1]
            axes.annotate(
                f"{last[1]:.3f}", last, (6, 0), textcoords="offset points", va="center", color=colour, annotation_clip=False
            )
    for (name, loss), style in zip((levels or {}).items(), itertools.cycle(("--", ":")), strict=False):
        axes.axhline(loss, color="#555555", linewidth=1.0, linestyle=style, label=f"{name}, {loss:.3f}")
    for name, step in (marks or {}).items():
        axes.axvline(step, color="#999999", linewidth=1.0, label=name)
    steps = [step for run in runs.values() for step, _ in (*run.losses, *run.eval_losses)]
    if steps and max(steps) > min(0, *steps):
        axes.set_xlim(min(0, *steps), max(steps))
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats a token)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    add_grid(axes)
    if runs:
        axes.legend(frameon=False)
    return write_png(path, figure, force=True)


def add_grid(axes: Any) -> None:
    """Draw a light grid, and no frame at the top and on the right."""
    axes.grid(True, color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def write_png(path: Path, figure: Any, *, force: bool) -> Path:
    """Write the figure to the file at `path`, and return the path."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    with whole_file(path, force=force) as file:
        FigureCanvasAgg(figure).print_png(file)
    return path


# ── The folder of a run ───────────────────────────────────────────────────────────────────────────────────────────────────────────


RECORD, NUMBERS, CURVE = "run.json", "numbers.csv", "curve.png"
FINDINGS = "findings.json"  # results of the stages before the last
ALIGNMENT = "align"  # folder of that stage's checkpoints
STATE = "trainer_state.json"  # last file of a checkpoint
REPLACED = "replaced"  # folder of the run that this one replaces, until it is finished
NO_GAP = 1e-3  # nats a token; a smaller gap between two losses is noise
FORMAT = "retrofit training run"
MODEL_FILES = (*FILES, EXPORTED)


@dataclasses.dataclass(frozen=True)
class TrainingRun:
    """The result of a training run."""

    settings: Settings
    objective: str
    reads: str  # how text became ids
    windows: int  # trained on
    held_out: int  # evaluated on
    parameters: int
    losses: Points  # (step, mean training loss since the entry before)
    eval_losses: Points  # (step, held-out loss)
    rates: Points  # (step, learning rate)
    seconds_per_step: float  # median without evaluation and saving; 0 if a resumed run had no step left
    new_rates: Mapping[str, float] = dataclasses.field(default_factory=dict)  # peak rates of added parameters, where not --lr
    tables: Mapping[str, int] = dataclasses.field(default_factory=dict)  # tables with sparse lookups and their sizes
    dense_loss: float | None = None  # held-out loss of the teacher
    start_loss: float | None = None  # held-out loss of the rewritten model before any stage
    alignment: Points = ()  # (step of that stage, mean squared error of the sites on held-out windows)
    stages: Mapping[str, int] = dataclasses.field(default_factory=dict)  # steps of each stage
    dials: Sequence[str] = ()  # sites annealed by their pass's dial instead of mixing
    untrained: Sequence[str] = ()  # parameters that no gradient reached in any step
    sampled: int = 0  # windows of the evaluations before the last; 0: all
    sample_loss: float | None = None  # loss on the sampled windows at the end
    output: Path | None = None
    folder: Path | None = None

    @staticmethod
    def read(output: str | Path) -> TrainingRun:
        """Return the finished run that wrote `output`; raises `TrainingError` where there is none."""
        folder = folder_of(Path(output))
        record = next((found for found in map(read_record, (folder, folder / REPLACED)) if is_finished(found)), None)
        if record is None:
            raise TrainingError(f"{folder} holds no finished run", remedy="train the model first", code="missing")
        values: dict[str, Any] = {field.name: record.get(field.name) for field in dataclasses.fields(TrainingRun)}
        for name in ("losses", "eval_losses", "rates", "alignment"):
            values[name] = tuple((step, value) for step, value in values[name] or ())
        for name in ("dials", "untrained"):
            values[name] = tuple(values[name] or ())
        for name in ("stages", "new_rates", "tables"):
            values[name] = values[name] or {}
        values |= {"sampled": values["sampled"] or 0, "settings": Settings(**record["settings"])}
        return TrainingRun(**{**values, "output": Path(output), "folder": folder})

    @property
    def tokens(self) -> int:
        """Tokens of training, over all stages."""
        return (self.settings.steps + self.stages.get("align", 0)) * self.settings.batch_size * self.settings.length

    @property
    def gap_closed(self) -> float | None:
        """Closed share of the gap between dense and rewritten model before training; None without a gap."""
        if self.dense_loss is None or self.start_loss is None or not self.eval_losses or self.start_loss - self.dense_loss < NO_GAP:
            return None
        return (self.start_loss - self.eval_losses[-1][1]) / (self.start_loss - self.dense_loss)

    @property
    def gap_closed_words(self) -> str:
        """Closed share of the gap as text; "" if the run compared with no dense model."""
        if self.dense_loss is None or self.start_loss is None or not self.eval_losses:
            return ""
        if (closed := self.gap_closed) is None:
            return "no gap"
        return f"{closed:.0%}" if closed <= 1 else f"all, {self.dense_loss - self.eval_losses[-1][1]:.4f} below the dense model"

    @property
    def held_out_words(self) -> str:
        """Held-out loss at the start and at the end, on the same windows."""
        first, last = self.eval_losses[0][1], self.eval_losses[-1][1]
        if self.sample_loss is None:
            return f"{first:.4f} → {last:.4f}"
        return f"{first:.4f} → {self.sample_loss:.4f} on a sample of {plural(self.sampled, 'window')}, at the end {last:.4f} on all"

    @property
    def curve(self) -> TrainingRun:
        """This run with its last held-out loss on the windows of the earlier evaluations."""
        if self.sample_loss is None:
            return self
        return dataclasses.replace(self, eval_losses=(*self.eval_losses[:-1], (self.eval_losses[-1][0], self.sample_loss)))

    def to_dict(self) -> dict[str, Any]:
        """Return the run as plain data, for `json`."""
        return {
            field.name: str(value) if isinstance(value, Path) else value
            for field in dataclasses.fields(self)
            if (value := getattr(self, field.name)) is not None and field.name != "settings"
        }

    def __str__(self) -> str:
        settings = self.settings
        tokens = settings.batch_size * settings.length
        rows = [
            ("objective", f"{self.objective}, {self.reads}"),
            (
                "data",
                f"{self.windows:,} windows of {settings.length} tokens, {self.held_out:,} more held out, "
                f"{(self.windows + self.held_out) * settings.length:,} tokens in all",
            ),
            ("steps", f"{settings.steps:,}, each of {plural(settings.batch_size, 'window')}"),
            ("parameters", f"{self.parameters:,}"),
            ("learning rate", rates_text(settings.lr, self.new_rates.items())),
        ]
        if self.tables:
            size = f"{plural(len(self.tables), 'table')} of {sum(self.tables.values()):,} numbers"
            rows.append(("optimizer", f"AdamW; row-wise Adagrad for the rows that were looked up in {size}"))
        if self.untrained:
            names = first_few(self.untrained, 3)
            rows.append(("not trained", f"{names}: no gradient reached {'it' if len(self.untrained) == 1 else 'them'}"))
        if self.losses:
            rows.append(("training loss", f"{self.losses[0][1]:.4f} → {self.losses[-1][1]:.4f}"))
        if self.eval_losses:
            rows.append(("held-out loss", self.held_out_words))
        if self.dense_loss is not None and self.start_loss is not None:
            rows.append(("rewritten", f"{self.start_loss:.4f} before any step, {self.dense_loss:.4f} the dense model"))
        if self.gap_closed_words:
            rows.append(("gap closed", self.gap_closed_words))
        if self.seconds_per_step:
            rows.append(("speed", f"{self.seconds_per_step:.3f} s a step, {tokens / self.seconds_per_step:,.0f} tokens a second"))
        if self.output is not None and self.folder is not None:
            rows += [("model", str(self.output)), ("curve", str(self.folder / CURVE)), ("numbers", str(self.folder / RECORD))]
        return "\n".join(f"{name:<14} {value}" for name, value in rows)


def folder_of(output: Path) -> Path:
    """Return the folder of a run's numbers and checkpoints: `model.run` next to `model.pt`."""
    return output.with_suffix(".run") if output.suffix in MODEL_FILES else output.with_name(f"{output.name}.run")


def refuse_to_overwrite(output: Path, *, resume: bool, force: bool) -> None:
    """Raises `TrainingError` if a run that writes `output` would overwrite something, or has nothing to resume."""
    folder = folder_of(output)
    has_run, finished = is_run(folder), is_finished(read_record(folder))
    refuse_held(folder)
    if folder.exists() and not has_run:
        raise TrainingError(f"{folder} exists already", why="it is not a training run", remedy="choose another -o", code="occupied")
    if resume and not has_checkpoint(folder) and finished:
        raise TrainingError(
            f"the run to resume in {folder} is finished and kept no checkpoint",
            why="without --save-every or --eval-every, none is written in the first minute",
            remedy=f"to continue from its result, train {output}; to start over, --force without --resume",
            code="finished",
        )
    if resume and not has_checkpoint(folder):
        raise TrainingError(
            f"no run to resume in {folder}",
            why="it holds no checkpoint",
            remedy="drop --resume",
            code="missing",
            option="resume",
        )
    if output.exists() and not force:
        if resume and finished:
            raise already_done(folder, f"{output} is its result")
        remedy = "overwrite it with --force" if resume else "name another with -o, or overwrite it with --force"
        raise TrainingError(f"{output} exists", remedy=remedy, code="exists")
    if has_run and not (resume or force or came_to_nothing(folder)):
        raise TrainingError(
            f"{folder} holds an earlier run",
            remedy="continue it with --resume, or start over with --force",
            code="exists",
            option="resume",
        )


def already_done(folder: Path, why: str) -> TrainingError:
    """Return the error for a run without steps left to resume: how to continue from its result, and how to start over."""
    checkpoint = last_checkpoint(folder)
    done = 0 if checkpoint is None else steps_done(checkpoint)
    return TrainingError(
        f"the run to resume has done {plural(done, 'step')} already",
        why=why,
        remedy=f"to continue, use --steps above {done} and --force; to start over, --force without --resume",
        code="finished",
    )


def refuse_held(folder: Path) -> None:
    """Raises `TrainingError` where another process trains into the folder."""
    if is_held(folder):
        raise TrainingError(
            f"{folder} is being written by another run", remedy="wait until it is done, or choose another -o", code="busy"
        )


def came_to_nothing(folder: Path) -> bool:
    """Return whether the run was killed before its first checkpoint, with nothing worth keeping."""
    return not (has_checkpoint(folder) or is_finished(read_record(folder)) or (folder / REPLACED).exists())


def is_run(folder: Path) -> bool:
    return folder.is_dir() and (not any(folder.iterdir()) or read_record(folder) is not None)


def last_checkpoint(folder: Path) -> Path | None:
    """Return the latest whole checkpoint: the trainer writes its state last."""
    complete = (state.parent for state in folder.glob(f"checkpoint-*/{STATE}"))
    return max(filter(is_checkpoint, complete), key=steps_done, default=None)


def is_checkpoint(folder: Path) -> bool:
    """Return whether the folder has the name of a checkpoint, complete or not."""
    return folder.is_dir() and folder.name.partition("-")[2].isdigit()


def steps_done(checkpoint: Path) -> int:
    """Return the steps after which `checkpoint-8` was written."""
    return int(checkpoint.name.partition("-")[2])


def remove_unfinished(folder: Path) -> None:
    """Remove checkpoints of any stage that were incomplete when the run was killed: a later one would mix with them."""
    for stage in (folder, folder / ALIGNMENT):
        for checkpoint in stage.glob("checkpoint-*"):
            if is_checkpoint(checkpoint) and not (checkpoint / STATE).is_file():
                shutil.rmtree(checkpoint)


def has_checkpoint(folder: Path) -> bool:
    """Return whether any stage of the run has a whole checkpoint."""
    return any(last_checkpoint(place) is not None for place in (folder, folder / ALIGNMENT))


@contextlib.contextmanager
def run_folder(
    output: Path | None, facts: Mapping[str, Any], settings: Settings, *, resume: bool
) -> Iterator[tuple[Path, Path | None]]:
    """Yield the folder of a run and the checkpoint it starts from.

    A run that fails before its first checkpoint leaves no folder, or that of the run it was to replace.
    """
    if output is None:
        if resume:
            raise TrainingError(
                "no run to resume",
                why="no output was named",
                remedy="name the output of that run",
                code="missing",
                option="resume",
            )
        with tempfile.TemporaryDirectory(prefix="retrofit-") as temporary:
            yield Path(temporary), None
        return
    folder, checkpoint = resume_folder(output, facts, settings) if resume else (start_folder(output, facts, settings), None)
    try:
        with held(folder):
            remove_unfinished(folder)
            yield folder, checkpoint
    except BaseException:
        if not has_checkpoint(folder):
            with deferred_signals():
                give_up(folder)
        raise


def start_folder(output: Path, facts: Mapping[str, Any], settings: Settings) -> Path:
    """Return the folder of a new run, with its settings and its `facts`; the run it replaces is kept."""
    folder = folder_of(output)
    refuse_held(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = aside_of(folder)
    try:
        draft.mkdir()
    except OSError as error:
        error.filename = str(folder)  # the user's name for it, not the internal one
        raise
    try:
        write_record(draft, {"format": FORMAT, "settings": dataclasses.asdict(settings), "facts": dict(facts)})
        with deferred_signals():
            if (folder / REPLACED).is_dir():  # the run that is started over was itself replacing one
                (folder / REPLACED).rename(draft / REPLACED)
                clear(folder, draft)
            elif folder.exists():
                folder.rename(draft / REPLACED)
            draft.rename(folder)
    except BaseException:
        with deferred_signals():
            if (draft / REPLACED).exists():
                (draft / REPLACED).rename(folder / REPLACED if folder.exists() else folder)
            clear(draft, folder)
        raise
    return folder


def give_up(folder: Path) -> None:
    """Remove the folder of a run that came to nothing, and restore that of the run it was to replace."""
    if not (folder / REPLACED).is_dir():
        shutil.rmtree(folder, ignore_errors=True)
        return
    earlier = aside_of(folder)
    (folder / REPLACED).rename(earlier)
    clear(folder, earlier)
    earlier.rename(folder)


def clear(folder: Path, other: Path) -> None:
    """Remove the folder; move what no run wrote to the other one."""
    for entry in sorted(folder.iterdir()):
        if is_own(entry.name):
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
            continue
        place = other / entry.name
        while place.exists() or place.is_symlink():
            place = place.with_name(f"{place.name}~")
        entry.rename(place)
    folder.rmdir()


def is_own(name: str) -> bool:
    """Return whether a run writes a file of this name into its folder."""
    return name in (RECORD, NUMBERS, CURVE, FINDINGS, ALIGNMENT, REPLACED) or name.startswith("checkpoint-")


def resume_folder(output: Path, facts: Mapping[str, Any], settings: Settings) -> tuple[Path, Path | None]:
    """Return the folder of the run to resume and its last checkpoint, if its last stage has begun.

    Raises `TrainingError` if the settings or facts are those of another run.
    """
    folder = folder_of(output)
    refuse_held(folder)
    record, checkpoint = read_record(folder), last_checkpoint(folder)
    if record is None or not has_checkpoint(folder):
        raise TrainingError(f"no run to resume in {folder}", remedy="start one without --resume", code="missing", option="resume")
    for field in dataclasses.fields(settings):
        before, now = record["settings"].get(field.name, field.default), getattr(settings, field.name)
        if before != now and field.name not in CHANGEABLE_ON_RESUME:
            raise TrainingError(
                f"{flag(field.name)} was {before} in the run to resume, now it is {now}",
                remedy="use the same value",
                code="other-run",
                option=field.name,
            )
    for name, now in facts.items():
        before = record["facts"].get(name, now)  # records of earlier versions may lack it
        if before != now:
            raise TrainingError(
                f"the {name} differs from the run to resume",
                why=f"{before or 'none'} then, {now or 'none'} now",
                remedy=f"use the same {name}, or start over with --force",
                code="other-run",
                option=name,
            )
    done = 0 if checkpoint is None else steps_done(checkpoint)
    if done > settings.steps or (done == settings.steps and is_finished(record) and output.exists()):
        raise already_done(folder, f"--steps {settings.steps} is not more than that")
    write_record(folder, {**record, "settings": dataclasses.asdict(settings)})
    return folder, checkpoint


def draw_run(run: TrainingRun) -> None:
    """Write the losses of the run into its folder, as numbers and as a curve."""
    assert run.folder is not None and run.output is not None
    with whole_file(run.folder / NUMBERS, force=True) as file:
        file.write(as_csv(run).encode())
    name = run.output.stem if run.output.suffix in MODEL_FILES else run.output.name
    levels = {"dense model": run.dense_loss, "rewritten, before any step": run.start_loss}
    if run.sample_loss is not None:
        levels["all windows held out, at the end"] = run.eval_losses[-1][1]
    draw_curves(
        run.folder / CURVE,
        {name: run.curve},
        f"{name}: {run.objective}",
        levels={what: loss for what, loss in levels.items() if loss is not None},
        marks={"from here on all is rewritten": step} if (step := run.stages.get("anneal")) else None,
    )


def finish_folder(run: TrainingRun) -> None:
    """Record that the run is finished and its model written, and remove the run that it replaced."""
    assert run.folder is not None
    write_record(run.folder, {**(read_record(run.folder) or {}), **run.to_dict()})
    if (run.folder / REPLACED).is_dir():
        with deferred_signals():
            clear(run.folder / REPLACED, run.folder)


def as_csv(run: TrainingRun) -> str:
    losses, rates, held_out = dict(run.losses), dict(run.rates), dict(run.eval_losses)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["step", "training_loss", "held_out_loss", "learning_rate"])
    for step in sorted({*losses, *held_out}):
        writer.writerow([step, losses.get(step, ""), held_out.get(step, ""), rates.get(step, "")])
    return text.getvalue()


def is_finished(record: Mapping[str, Any] | None) -> bool:
    """Return whether the record belongs to a run whose model was written."""
    return record is not None and "eval_losses" in record


def read_record(folder: Path) -> dict[str, Any] | None:
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) and record.get("format") == FORMAT else None


def write_record(folder: Path, record: Mapping[str, Any]) -> None:
    with whole_file(folder / RECORD, force=True) as file:
        file.write(json.dumps(record, indent=2, ensure_ascii=False).encode())
