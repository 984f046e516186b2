"""`apply_streamed`: rewrite a model on disk into another directory, with one of its sites in memory at a time.

The passes run twice. The first run, on the model without weights, determines whether they fit, which tensors the result has, how
much space they need and where each will lie. The second run is on the model itself, with weights mapped from its files: code, order
and random numbers are those of `apply`, so the result is the same bit for bit. Each new parameter is written to its place in the
result at once; tensors that no pass changed are copied from file to file at the end. The model itself is captured, and both runs
use that program. A model whose weights are computed on loading has no weights before there is a place for them, and is captured in
each run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import hashlib
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn

from retrofit import __version__
from retrofit.checks import CHECKS, Reference, check_rewrite, verify
from retrofit.checks.parameters import require_finite_weight
from retrofit.checks.report import CheckResult, Report
from retrofit.errors import CheckpointError, VerificationError
from retrofit.files.atomic_writes import Unfinished, draft_folder, final_name, resumable_directory, unfinished_of
from retrofit.files.headers import INDEX, WEIGHTS, weight_files
from retrofit.files.model_folders import is_file_name
from retrofit.inputs.calibration import Calibration
from retrofit.inputs.example_inputs import named_inputs
from retrofit.inputs.model_memory import recordings_kept_by
from retrofit.inputs.model_state import preserve_random_state
from retrofit.passbase import recipe_storage
from retrofit.passbase.calibration import calibration_from
from retrofit.passbase.protocol import AnyPass, Recipe, Rewrite
from retrofit.passbase.running import refuse_early, run_passes
from retrofit.preview import parse_passes
from retrofit.process import quiet, serialized
from retrofit.program.capture import capture
from retrofit.program.program import Program
from retrofit.progress import Progress
from retrofit.rewriting import Applied, require_use, rewrite_once
from retrofit.storage.companions import add_companions, companion_files
from retrofit.storage.directories import transformer_folder
from retrofit.streaming.source_directory import (
    bytes_computed_on_loading,
    model_as_it_lies,
    model_on_files,
    model_without_weights,
    require_directory,
    same_file_contents,
    source_extents,
)
from retrofit.streaming.tensor_files import (
    SHARD,
    Expected,
    ModelLayout,
    ParametersInOrder,
    RecordingsOnDisk,
    ResultFiles,
    SetAside,
    TensorFiles,
    bytes_of,
    differs,
    expected_parameters,
    kept_out_of_memory,
    saved_tensors,
)
from retrofit.surgery import Edit

STREAMED = ("graph", "parameters", "function", "cost")  # each reads all weights a few times
ELSEWHERE = "it needs the whole model in memory: use retrofit verify without --stream"


@serialized
def verify_directory(model: Path, dense: Path | None, progress: Progress | None = None) -> Report:
    """Return the report on the model in a directory, compared with the one in the directory `dense`, if given.

    Weights that are merged on loading are stored in temporary files beside `model`. Raises `CheckpointError` if there is no space
    for them, or a directory is not one of safetensors.
    """
    progress = progress or (lambda stage: None)
    for place in filter(None, (model, dense)):
        require_directory(place)
    folders = [transformer_folder(folder) for folder in (model, dense) if folder is not None]
    computed = sum(
        sum(bytes_computed_on_loading(model_without_weights(folder), source_extents(folder)).values()) for folder in folders
    )
    if computed > (free := shutil.disk_usage(model.resolve().parent).free):
        raise CheckpointError(
            f"{model} cannot be verified here",
            why=f"weights merged on loading take {computed / 1e9:.2f} GB on the disk, and {free / 1e9:.2f} GB are free",
            remedy=f"free space in {model.resolve().parent}",
            code="disk-space",
        )
    files = TensorFiles()
    with draft_folder(model.resolve()) as aside, kept_out_of_memory(files):
        reference = None
        keep = SetAside(aside, files)
        if dense is not None:
            progress(f"measuring {dense}")
            before = model_on_files(folders[1], files, keep)
            reference = Reference.of(before, named_inputs(before), checks=STREAMED)
        progress(f"verifying {model}")
        report = verify(model_on_files(folders[0], files, keep), reference, checks=STREAMED)
    return with_others(report)


def verify_streamed(
    folder: Path, result: Path, applied: Applied, rewrites: tuple[Rewrite, ...], aside: Path, progress: Progress
) -> Report:
    """Return the report on the model in the directory `result`, read from its files. Raises `VerificationError` if a check fails.

    The weights computed on loading the model in `folder` are stored in the directory `aside`.
    """
    files = TensorFiles()
    with kept_out_of_memory(files):
        progress("measuring the dense model")
        keep = SetAside(aside, files)
        dense = model_on_files(folder, files, keep)
        reference = Reference.of(dense, named_inputs(dense), checks=STREAMED)
        progress("verifying")
        model = model_on_files(result, files, keep)
        report = with_others(check_rewrite(model, reference, rewrites, applied.fates, checks=STREAMED))
    if not report.ok:
        raise VerificationError(
            f"the rewritten model failed: {', '.join(check.name for check in report.failed)}",
            report=report,
            why=str(report),
            remedy="nothing was written; this is a bug in retrofit if the dense model passes the same checks",
            code="differs",
        )
    return report


@contextlib.contextmanager
def model_on_disk(directory: Path, beside: Path) -> Iterator[Any]:
    """Yield the model in a directory of safetensors, running on its mapped weights.

    Weights computed on loading are stored in temporary files beside `beside`.
    """
    files = TensorFiles()
    with draft_folder(beside.resolve()) as aside, kept_out_of_memory(files):
        yield model_on_files(transformer_folder(directory), files, SetAside(aside, files))


def with_others(report: Report) -> Report:
    """Return the report with an entry for every check that was not made."""
    others = (CheckResult(name, "skipped", "", ELSEWHERE, 0.0) for name in CHECKS if name not in STREAMED)
    return dataclasses.replace(report, checks=(*report.checks, *others))


# ── From directory to directory ───────────────────────────────────────────────────────────────────────────────────────────────────


ROOM = 1 << 26  # bytes for the files other than weights


@dataclasses.dataclass(frozen=True)
class Layouts:
    """The layouts determined by the run on the model without weights."""

    applied: Applied  # its model has no weights
    data: Calibration | None  # the data that the passes fit to
    result: ModelLayout
    new: tuple[Expected, ...]
    loaded: dict[str, str]  # names in the result of dense parameters that it holds unchanged
    aside: int  # upper bound on the bytes of temporary files
    computed: int  # bytes of the dense model's parameters that are not in its files as such


@dataclasses.dataclass(frozen=True)
class Mapped:
    """The model itself, its weights mapped from its files, before any change."""

    files: TensorFiles
    model: Any
    program: Program
    random_state: torch.Tensor  # of the generator after the capture, as in `apply`


@serialized
def apply_streamed(
    source: str | Path,
    output: str | Path,
    *passes: AnyPass | str,
    calibration: Any = None,
    seed: int = 0,
    force: bool = False,
    verify: bool = True,
    progress: Progress | None = None,
    shard_size: int = SHARD,
) -> Applied:
    """Rewrite the model in the directory `source` by `passes` and write it to the directory `output`, bit for bit as `apply` would.

    The memory used at a time is that of one site of a pass. Random starts are those of `torch.manual_seed(seed)`. With
    `calibration`, the data of `apply`, the model runs on its mapped weights, and the recorded inputs of its modules are stored in
    files. A stopped run is resumed when it is started again. The model of the returned `Applied` has no weights.

    Raises `CheckpointError` before anything is written if the source is not a directory of safetensors, the result does not fit on
    the disk, or `output` exists (unless `force`), and `DoesNotFitError` if a pass does not fit.
    """
    source, output = Path(source), Path(output)
    progress = progress or (lambda stage: None)
    recipe = parse_passes(passes)
    require_use(calibration, recipe)
    require_directories(source, output)
    output = final_name(output, force=force, directory=True)
    folder, companions = transformer_folder(source), companion_files(source)
    with preserve_random_state():
        progress(f"reading {source} without its weights")
        sources = source_extents(folder)
        skeleton = model_without_weights(folder)
        computed = bytes_computed_on_loading(skeleton, sources)
        mapped = None if computed else map_and_capture(folder, seed, progress)
        layouts = run_without_weights(skeleton, computed, mapped, recipe, calibration, progress, shard_size)
        require_room(output, layouts, verify)
        identity = identity_of(folder, layouts, seed)
        with resumable_directory(output, identity, force=force) as unfinished:
            place = unfinished.folder / folder.relative_to(source)
            place.mkdir(parents=True, exist_ok=True)
            rewrites = write_weights(folder, place, layouts, mapped, recipe, seed, unfinished, progress)
            del mapped  # its files may belong to parameters that were set aside
            progress(f"writing {output}")
            keep_weights_alone(unfinished.folder, place, layouts.result)
            write_configuration(layouts.applied.model, place)
            add_companions(layouts.applied.model, source, companions, unfinished.folder, output)  # type: ignore[arg-type]
            report = None
            if verify:
                gc.collect()  # the model whose parameters were set aside is gone
                shutil.rmtree(unfinished.aside)
                report = verify_streamed(folder, place, layouts.applied, rewrites, unfinished.aside, progress)
    return dataclasses.replace(layouts.applied, rewrites=rewrites, report=report)


def require_directories(source: Path, output: Path) -> None:
    """Raises `CheckpointError` unless the stream goes from one directory to another."""
    require_directory(source)
    if is_file_name(output):
        raise CheckpointError(
            f"{output} cannot be written by --stream",
            why="it writes a directory of safetensors",
            remedy="name a directory",
            code="name",
        )


def map_and_capture(folder: Path, seed: int, progress: Progress) -> Mapped | None:
    """Return the model on its mapped weights and its program; None if loading computes weights, which need a place first."""
    files = TensorFiles()
    with kept_out_of_memory(files):
        progress("mapping its weights")
        model = model_as_it_lies(folder, files)
        if model is None:
            return None
        progress("capturing the dense model")
        inputs = named_inputs(model)
        torch.manual_seed(seed)
        return Mapped(files, model, capture(model, inputs), torch.get_rng_state())


def run_without_weights(
    model: Any,
    computed: Mapping[str, int],
    mapped: Mapped | None,
    passes: Recipe,
    calibration: Any,
    progress: Progress,
    shard_size: int,
) -> Layouts:
    """Return the result of the passes on the model, without values. Raises `DoesNotFitError` if they do not fit.

    `computed` has the sizes of the parameters that no file holds as such.
    """
    if mapped is not None:
        cast_as_run(model, mapped.model)
    refuse_early(model, passes)
    data = None if calibration is None else calibration_from(model, calibration)
    order = ParametersInOrder(model)
    applied = rewrite_once(
        model,
        passes=passes,
        example_inputs=None,
        calibration=None,
        checks=(),
        emit="module",
        progress=progress,
        count_flops=True,
        keep=order,
        dense=None if mapped is None else mapped.program,
    )
    saved = saved_tensors(model)
    result = ModelLayout.of(model, shard_size)
    new = expected_parameters(order, model, saved)
    loaded = {name: fate.name for name, fate in applied.fates.items() if fate.kind in ("kept", "moved") and fate.name in saved}
    aside = sum(size for name, size in computed.items() if name not in loaded)
    aside += sum(tensor.size for tensor in new if not tensor.name)
    return Layouts(applied, data, result, new, loaded, aside, sum(computed.values()))


def cast_as_run(skeleton: nn.Module, model: nn.Module) -> None:
    """Cast the weights of the skeleton to the dtypes of the model after a run: some code casts its own (a router)."""
    with torch.no_grad():
        for own, other in zip(skeleton.parameters(), model.parameters(), strict=True):
            own.data = own.data.to(other.dtype)


def require_room(output: Path, layouts: Layouts, verify: bool) -> None:
    """Raises `CheckpointError` unless the disk has space for everything to be written, including space that an earlier run used."""
    left = unfinished_of(output)
    held = sum(512 * file.stat().st_blocks for file in left.rglob("*") if file.is_file()) if left.is_dir() else 0
    aside = max(layouts.aside, layouts.computed if verify else 0)
    needed, free = layouts.result.size + aside + ROOM, shutil.disk_usage(output.parent).free + held
    if needed > free:
        on_the_way = f", {aside / 1e9:.2f} GB of them on the way" if aside else ""
        raise CheckpointError(
            f"{output} does not fit on the disk",
            why=f"{needed / 1e9:.2f} GB are needed{on_the_way}, {free / 1e9:.2f} GB are free",
            remedy=f"free space in {output.parent}, or choose an output on another disk",
            code="disk-space",
        )


def digest_of(data: Calibration) -> str:
    """Return a digest that differs for different data."""
    digest = hashlib.sha256()
    for batch in data.batches:
        for name, value in sorted(batch.items()):
            digest.update(repr((name, value.shape, value.dtype) if isinstance(value, torch.Tensor) else (name, value)).encode())
            if isinstance(value, torch.Tensor):
                digest.update(bytes_of(value.cpu()))
    return digest.hexdigest()


def identity_of(folder: Path, layouts: Layouts, seed: int) -> dict[str, Any]:
    """Return the data in which a run must agree with a stopped one in order to resume it."""
    return {
        "source": [str(folder.resolve()), *same_file_contents([folder / "config.json", *weight_files(folder)])],
        "recipe": [rewrite.spec for rewrite in layouts.applied.rewrites],
        "calibration": None if layouts.data is None else digest_of(layouts.data),
        "seed": seed,
        "layout": layouts.result.digest,
        "versions": {"retrofit": __version__, **{name: metadata.version(name) for name in ("torch", "transformers")}},
    }


def write_weights(
    folder: Path,
    place: Path,
    layouts: Layouts,
    mapped: Mapped | None,
    passes: Recipe,
    seed: int,
    unfinished: Unfinished,
    progress: Progress,
) -> tuple[Rewrite, ...]:
    """Write every tensor of the result to its file in `place`; return what each pass did."""
    files = TensorFiles() if mapped is None else mapped.files
    if layouts.data is not None:  # some are fitted in place: a file may hold values of an incomplete fit
        unfinished.steps.difference_update(tensor.name for tensor in layouts.new)
    with ResultFiles(place, layouts.result, files, unfinished) as result, kept_out_of_memory(files):
        if mapped is None:
            progress("mapping its weights")
            model = model_on_files(
                folder, files, lambda name, parameter: result.move_out_of_memory(layouts.loaded.get(name, ""), parameter)
            )
        else:
            model = mapped.model
        with one_thread():
            for name, parameter in model.named_parameters():
                if name not in layouts.loaded:  # the others are checked when they are copied
                    require_finite_weight(name, parameter)
                    files.release()
        order = ParametersInOrder(model)

        def keep(parameters: Iterable[nn.Parameter]) -> None:
            for number, parameter in order.new_among(parameters):
                if number >= len(layouts.new):
                    raise differs(f"{number + 1} parameters are new with weights, {len(layouts.new)} without")
                layouts.new[number].require(parameter)
                result.move_out_of_memory(layouts.new[number].name, parameter)

        edit = Edit(model, layouts.data, keep)
        inputs = named_inputs(model)
        torch.manual_seed(seed)
        if mapped is not None:
            torch.set_rng_state(mapped.random_state)
        recipe_storage.make_room(model, edit)
        with recordings_kept_by(RecordingsOnDisk(unfinished.aside, files)):
            rewrites, _ = run_passes(model, passes, inputs, edit, progress, None if mapped is None else mapped.program)
        files.release()
        require_same(rewrites, layouts.applied.rewrites)
        write_rest(model, result, {*layouts.loaded.values()}, progress)
    return rewrites


def write_rest(model: nn.Module, result: ResultFiles, dense: set[str], progress: Progress) -> None:
    """Write every tensor that no edit has written. Raises `RetrofitError` if the `dense` ones contain NaN or Inf."""
    tensors = saved_by_layout(model, result.layout)
    done = 0
    with one_thread():
        for name, extent in result.layout.extents.items():
            result.write(name, tensors[name], finite=name in dense)
            result.files.release()
            done += extent.size
            progress(f"writing, {done / result.layout.size:.0%}")
    result.record()


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Within this context torch uses one thread: several do not speed up values that are read once from a file."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def saved_by_layout(model: nn.Module, layout: ModelLayout) -> dict[str, torch.Tensor]:
    """Return the tensors of the layout. Raises `CheckpointError` if shapes or dtypes differ."""
    tensors = model.state_dict()
    for name, extent in layout.extents.items():
        if name not in tensors or (tuple(tensors[name].shape), tensors[name].dtype) != (extent.shape, extent.dtype):
            raise differs(f"{name} differs with and without weights")
    return tensors


def require_same(rewrites: Sequence[Rewrite], planned: Sequence[Rewrite]) -> None:
    """Raises `CheckpointError` unless the passes made the same changes with weights as without."""
    for rewrite, other in zip(rewrites, planned, strict=True):
        if (rewrite.spec, rewrite.sites) != (other.spec, other.sites):
            raise differs(f"{rewrite.spec} was {other.spec} without weights, or rewrote other sites")


def keep_weights_alone(folder: Path, place: Path, layout: ModelLayout) -> None:
    """Delete everything in `folder` except the model's weights in `place`: other files of a stopped run may be incomplete."""
    weights = {place / INDEX, *(place / shard.file for shard in layout.shards)}
    for file in list(folder.rglob("*")):
        if not file.is_dir() and file not in weights:
            file.unlink()


def write_configuration(model: Any, place: Path) -> None:
    """Write to `place` the files that `save_pretrained` writes besides weights."""
    beside = place / ".configuration"
    shutil.rmtree(beside, ignore_errors=True)
    with quiet():
        model.save_pretrained(beside, state_dict={})
    for file in beside.iterdir():
        if file.name != WEIGHTS:
            file.replace(place / file.name)
    shutil.rmtree(beside)
