"""The round-trip check: saved and loaded, the model gives the same bits.

Of large weights only a sample is written: the check is of the file's records and the places they are loaded to, not of the disk.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from retrofit.checks.parameters import is_within
from retrofit.checks.report import Finding, Raised, attempt, failed, passed, skipped
from retrofit.checks.subject import Context, Run, Subject
from retrofit.errors import CheckpointError, first_few
from retrofit.files.atomic_writes import why_full
from retrofit.files.memory import page_out
from retrofit.inputs.example_inputs import device_of
from retrofit.inputs.model_memory import own_bytes
from retrofit.inputs.model_state import same_bits
from retrofit.inputs.probes import logits_of, run
from retrofit.inputs.usable_models import holds_adapters
from retrofit.numerics.distances import distance
from retrofit.passbase.recipe_storage import lend_program, stored_recipe
from retrofit.program.program import Program
from retrofit.storage.checkpoint import load, save
from retrofit.storage.sampled_files import is_large, same_sample, write_samples
from retrofit.surgery import transformers_bookkeeping
from retrofit.surgery.transformers_bookkeeping import is_transformers
from retrofit.surgery.user_hooks import lend_hooks

LARGEST = 8 * 2**30  # bytes; a larger model is not written to disk whole for a check
SHARD = "256MB"
DIRECTORY, FILE, STATE_DICT = "a directory", "a .pt file", "a state dict"


@dataclasses.dataclass(frozen=True)
class Trip:
    """A model written to disk and read again."""

    medium: str = ""
    gap: float | None = None  # between the outputs; None if they are bitwise equal
    lost: tuple[str, ...] = ()  # parameters that came back with other bits
    culprit: str = ""  # saved state that came back changed
    restored: tuple[str, ...] = ()  # unsaved buffers of the dense model that restore the outputs
    note: str = ""  # why this medium was chosen
    omitted: str = ""  # why there was no trip


@dataclasses.dataclass(frozen=True)
class RoundTripMeasurement:
    """The state of a model that no file holds, and the model read back from a file; a dense model is not written."""

    loose: tuple[str, ...]  # tensors in plain attributes, which are not saved
    unsaved: frozenset[str]  # buffers that are not saved
    trip: Trip | None = None
    program: Program | None = None  # of a captured dense model


def measure_round_trip(
    subject: Subject, before: RoundTripMeasurement | None = None, context: Context | None = None
) -> RoundTripMeasurement:
    """Return the state that no file holds and, given a context, the result of saving and loading."""
    loose, unsaved = tuple(loose_tensors(subject.model)), frozenset(unsaved_buffers(subject.model))
    if context is None:
        return RoundTripMeasurement(loose, unsaved, program=None if stored_recipe(subject.model) else subject.captured)
    with tempfile.TemporaryDirectory(prefix="retrofit-") as folder:
        try:
            trip = take_trip(context, Path(folder), before, loose)
        except Exception as error:
            if not (full := why_full(error)):
                raise
            trip = Trip(omitted=f"the model cannot be written to {folder}: {full}")
        return RoundTripMeasurement(loose, unsaved, trip)


def take_trip(context: Context, folder: Path, before: RoundTripMeasurement | None, loose: tuple[str, ...]) -> Trip:
    """Save a transformers model in a directory with samples of its large weights, others in a file, and load them.

    Where samples come out wrong whole weights are written. A model that cannot be built again gets its weights back from a file.
    """
    subject = context.subject
    if holds_adapters(subject.model):
        return Trip(omitted="PEFT saves adapters without their model; merge them (retrofit.merge_adapters), then verify")
    through_directory = is_transformers(subject.model)
    sampled: Trip | Raised = Raised("not tried")
    if through_directory and (large := sum(is_large(parameter) for parameter in subject.model.parameters())):
        sampled = attempt(save_and_load, context, folder / "samples", before, True)
        if isinstance(sampled, Trip) and not sampled.lost and sampled.gap is None:
            return dataclasses.replace(sampled, note=f"of {large} large weights the directory held a sample")
        shutil.rmtree(folder / "samples", ignore_errors=True)
    size = own_bytes(subject.model)
    if size > LARGEST or 2 * size > shutil.disk_usage(folder).free:
        reason = f"it would take {size / 2**30:.1f} GiB on disk; save it and run `retrofit verify` on the result"
        return sampled if isinstance(sampled, Trip) else Trip(omitted=reason)
    if through_directory:
        return save_and_load(context, folder / "model", before)
    try:
        return save_and_load(context, folder / "model.pt", before)
    except CheckpointError as error:
        loses = len(loose) > len(before.loose if before is not None else loose)
        return Trip(STATE_DICT) if loses else dataclasses.replace(save_weights(subject, folder / "weights.pt"), note=error.what)


def judge_round_trip(now: RoundTripMeasurement, before: RoundTripMeasurement | None, context: Context) -> Finding:
    trip = now.trip
    assert trip is not None
    if trip.omitted:
        return skipped(trip.omitted)
    if trip.lost:
        return failed(f"through {trip.medium}", f"not what was saved: {first_few(map(context.place, trip.lost))}")
    attributes = [name for name in now.loose if before is not None and name not in before.loose]
    if trip.medium == STATE_DICT and before is not None and len(now.loose) > len(before.loose):
        return failed(f"through {trip.medium}", f"plain attributes are not saved: {first_few(attributes)}")
    if trip.gap is not None:
        return failed(f"{trip.gap:.1e} through {trip.medium}", trip.culprit)
    if trip.restored:
        note = f"but for buffers that the dense model does not save either: {first_few(trip.restored)}"
        return passed(f"bit-identical through {trip.medium}", "\n".join(filter(None, (note, trip.note))))
    return passed(f"bit-identical through {trip.medium}", trip.note)


# ── Through a file or directory ──────────────────────────────────────────────────────────────────────────────────────────────────


def save_and_load(context: Context, path: Path, before: RoundTripMeasurement | None, sampled: bool = False) -> Trip:
    """Save the model at `path`, load it and compare the outputs, on another shape too if the model runs on that.

    It has every weight bit for bit, those that are `sampled` as far as they were saved, and then computes with those of the model:
    there is never a second copy of them in memory.
    """
    subject, medium = context.subject, FILE if path.suffix else DIRECTORY
    with write_samples(subject.model) if sampled else contextlib.nullcontext():
        save_in_shards(subject.model, path)
    with transformers_bookkeeping.leave_weights_mapped(), lend_program(subject.model, None if before is None else before.program):
        loaded = load(path).to(device_of(subject.model)).eval()
        use_same_attention(subject.model, loaded)
        lend_hooks(subject.model, loaded)
    if lost := share_weights(subject, loaded, same_sample if sampled else same_bits):
        return Trip(medium, lost=tuple(lost))
    restored: tuple[str, ...] = ()
    for inputs, run_once in runs_to_repeat(subject):
        saved, read = run_once.logits, logits_loaded(subject, loaded, inputs)
        if not same_bits(saved, read):
            gap, culprit, buffers = distance(read, saved), find_culprit(context, loaded), restore_buffers(subject, loaded, before)
            if not same_bits(saved, logits_loaded(subject, loaded, inputs)):
                return Trip(medium, gap, culprit=culprit)
            restored = tuple(buffers)
    return Trip(medium, restored=restored)


def use_same_attention(model: nn.Module, loaded: nn.Module) -> None:
    """Set the attention kernel of `loaded` to the model's: it is chosen when a model is loaded, and no config has it."""
    if is_transformers(model) and is_transformers(loaded):
        chosen = transformers_bookkeeping.attention_of(model.config)
        if transformers_bookkeeping.attention_of(loaded.config) != chosen:
            loaded.set_attn_implementation(chosen)  # type: ignore[operator]


def runs_to_repeat(subject: Subject) -> list[tuple[dict[str, Any], Run]]:
    """Return inputs and outputs of the model, for two shapes if it runs on both, for a large model the cheapest."""
    if subject.is_large:
        return [(subject.shapes[subject.cheapest], subject.run(subject.cheapest))]
    shapes = [0, *(shape for shape in range(1, len(subject.shapes))[:1] if not isinstance(attempt(subject.run, shape), Raised))]
    return [(subject.shapes[shape], subject.run(shape)) for shape in shapes]


def logits_loaded(subject: Subject, loaded: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
    """Return the loaded model's outputs in the arithmetic of the saved one's measurement."""
    with subject.arithmetic.computing():
        return logits_of(run(loaded, inputs)).cpu()


def save_in_shards(model: nn.Module, path: Path) -> None:
    """Write the model to `path`, a directory's weights in many small files that are mapped and released one by one."""
    if path.suffix:
        save(model, path)
    else:
        model.save_pretrained(path, max_shard_size=SHARD)  # type: ignore[operator]


def share_weights(
    subject: Subject, loaded: nn.Module, is_same_weight: Callable[[torch.Tensor, torch.Tensor], bool] = same_bits
) -> list[str]:
    """Put each parameter of `loaded` that is the model's in the same memory; return the names of the others."""
    lost = []
    for name, parameter in loaded.named_parameters():
        own = subject.parameters.get(name)
        if own is None or not is_same_weight(own, parameter):
            lost.append(name)
        else:
            page_out([parameter])  # the file stays mapped as long as any of its tensors is held
            parameter.data = own.data
    return lost


def restore_buffers(subject: Subject, loaded: nn.Module, before: RoundTripMeasurement | None) -> list[str]:
    """Give `loaded` the model's unsaved buffers that the dense model had too; return their names.

    A model that was cast after it was built, `model.half()`, has cast them as well, and building it again does not.
    """
    dense = [name.split(".") for name in before.unsaved] if before is not None else []
    now = unsaved_buffers(subject.model)
    found = {name: buffer for name, buffer in now.items() if any(is_within(old, name.split(".")) for old in dense)}
    for name, buffer in found.items():
        path, _, leaf = name.rpartition(".")
        loaded.get_submodule(path)._buffers[leaf] = buffer.clone()
    return list(found)


# ── What is not saved ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def loose_tensors(model: nn.Module) -> list[str]:
    """Return the names of the tensors in plain attributes of modules, which no state dict contains."""
    modules = [(f"{path}." if path else "", vars(module)) for path, module in model.named_modules()]
    return [f"{prefix}{key}" for prefix, held in modules for key, value in held.items() if isinstance(value, torch.Tensor)]


def unsaved_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers outside of the state dict, which a model sets when it is built."""
    saved = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers(remove_duplicate=False) if name not in saved}


def find_culprit(context: Context, loaded: nn.Module) -> str:
    """Return the state, other than parameters, that came back changed."""
    model = context.subject.model
    own = model.state_dict()
    changed = [name for name, value in loaded.state_dict().items() if name not in own or not same_bits(own[name], value)]
    if changed:
        return f"not what was saved: {first_few(map(context.place, changed))}"
    reloaded = dict(loaded.named_modules())
    modules = [(path, module) for path, module in model.named_modules() if not is_transformers(module)]
    settings = [f"{path}.{key}" for path, module in modules for key in differing_values(module, reloaded.get(path))]
    return f"all saved tensors match; not saved: {first_few(map(context.place, settings)) or 'a value that it computes with'}"


def differing_values(module: nn.Module, other: nn.Module | None) -> list[str]:
    """Return the numbers, strings, tensors and buffers of a module that another lacks or has with other values."""
    others = plain_values(other) if other is not None else {}
    return [key for key, value in plain_values(module).items() if key not in others or not is_same(value, others[key])]


def plain_values(module: nn.Module) -> dict[str, object]:
    kinds = (bool, int, float, str, tuple, torch.Tensor)
    return {key: value for key, value in [*vars(module).items(), *module._buffers.items()] if isinstance(value, kinds)}


def is_same(value: object, other: object) -> bool:
    if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
        return same_bits(value, other)
    return isinstance(other, type(value)) and bool(value == other)


# ── Through the weights alone ────────────────────────────────────────────────────────────────────────────────────────────────────


def save_weights(subject: Subject, path: Path) -> Trip:
    """Return the trip of a model's weights alone through a file."""
    torch.save(subject.model.state_dict(), path)
    state = torch.load(path, weights_only=True, mmap=True, map_location=device_of(subject.model))
    trainable = {name for name, parameter in subject.parameters.items() if parameter.requires_grad}
    for name in trainable & set(state):
        state[name].requires_grad_()  # torch multiplies differently by frozen weights
    state = {name: state[name] for name in unique_names(subject.model, state)}
    with torch.no_grad():
        # the state has every name of a tied weight
        output = torch.func.functional_call(subject.model, state, (), dict(subject.inputs), tie_weights=False)
    saved, read = logits_of(run(subject.model, subject.inputs)), logits_of(output)
    if same_bits(saved, read):
        return Trip(STATE_DICT)
    return Trip(STATE_DICT, distance(read, saved), culprit="the reloaded weights compute something else")


def unique_names(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Return one name for each weight of each module, once for a module registered in several layers."""
    found: dict[tuple[int, str], str] = {}
    for name in names:
        path, _, leaf = name.rpartition(".")
        found.setdefault((id(model.get_submodule(path)), leaf), name)
    return list(found.values())
