"""The round-trip check: saved and loaded, the model gives the same bits."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from retrofit.checks.reference import attempt, loose_tensors, other_shapes, unsaved_buffers
from retrofit.checks.tracing import is_within
from retrofit.errors import CheckpointError
from retrofit.runtime.example_inputs import device_of
from retrofit.runtime.outcomes import Finding, failed, listed, passed, skipped
from retrofit.runtime.probes import distance, logits_of, run, same_bits
from retrofit.storage.checkpoint import load, save
from retrofit.surgery import transformers_bookkeeping
from retrofit.surgery.transformers_bookkeeping import is_transformers

if TYPE_CHECKING:
    from retrofit.checks.subject import Subject

LARGEST = 8 * 2**30  # bytes; a larger model is not written to disk for a check
SHARD = "256MB"


def check(subject: Subject) -> Finding:
    """A model that cannot be built again from a file gets its own weights back from one instead."""
    size = sum(tensor.numel() * tensor.element_size() for tensor in (*subject.model.parameters(), *subject.model.buffers()))
    with tempfile.TemporaryDirectory(prefix="retrofit-") as folder:
        if size > LARGEST or 2 * size > shutil.disk_usage(folder).free:
            return skipped(f"it would take {size / 2**30:.1f} GiB on disk; save it and run `retrofit verify` on the result")
        if is_transformers(subject.model):
            return through(subject, Path(folder) / "model")
        try:
            return through(subject, Path(folder) / "model.pt")
        except CheckpointError as error:
            return through_state_dict(subject, Path(folder) / "weights.pt", error.what)


def through(subject: Subject, path: Path) -> Finding:
    """Whether the model saved at `path` and loaded from there gives the same bits, also on another shape if it runs on that.

    It has every weight bit for bit, and then computes with those of the model: there is never a second copy of them in memory.
    """
    keep(subject.model, path)
    with transformers_bookkeeping.as_mapped():
        loaded = load(path).to(device_of(subject.model)).eval()
    if lost := share_weights(subject, loaded):
        return failed(f"through {medium(path)}", f"not what was saved: {listed(map(subject.placed, lost))}")
    excuse = ""
    others = [one for one in other_shapes(subject.model, subject.inputs)[:1] if attempt(run, subject.model, one) is not None]
    for inputs in (subject.inputs, *others):
        ours, theirs = logits_of(run(subject.model, inputs)), logits_of(run(loaded, inputs))
        if not same_bits(ours, theirs):
            gap, blame, own = distance(theirs, ours), unfaithful(subject, loaded), put_back(subject, loaded)
            if not same_bits(ours, logits_of(run(loaded, inputs))):
                return failed(f"{gap:.1e} through {medium(path)}", blame)
            excuse = f"but for buffers that the dense model does not save either: {listed(own)}"
    return passed(f"bit-identical through {medium(path)}", excuse)


def medium(path: Path) -> str:
    return "a .pt file" if path.suffix else "a directory"


def keep(model: nn.Module, path: Path) -> None:
    """The model is at `path`, a directory's weights in many small files: each is mapped by itself, and let go by itself."""
    if path.suffix:
        save(model, path)
    else:
        model.save_pretrained(path, max_shard_size=SHARD)  # type: ignore[operator]


def share_weights(subject: Subject, loaded: nn.Module) -> list[str]:
    """Each parameter of `loaded` that has the bits of the model's is in the same memory from now on; the names of the others."""
    lost = []
    for name, parameter in loaded.named_parameters():
        own = subject.parameters.get(name)
        if own is None or not same_bits(own, parameter):
            lost.append(name)
        else:
            parameter.data = own.data
    return lost


def put_back(subject: Subject, loaded: nn.Module) -> list[str]:
    """The unsaved buffers that the dense model had too have in `loaded` the values of the model; their names.

    A model that was cast after it was built, `model.half()`, has cast them as well, and building it again does not.
    """
    dense = [name.split(".") for name in subject.reference.unsaved] if subject.reference is not None else []
    now = unsaved_buffers(subject.model)
    found = {name: buffer for name, buffer in now.items() if any(is_within(old, name.split(".")) for old in dense)}
    for name, buffer in found.items():
        path, _, leaf = name.rpartition(".")
        loaded.get_submodule(path)._buffers[leaf] = buffer.clone()
    return list(found)


def unfaithful(subject: Subject, loaded: nn.Module) -> str:
    """What is not as it was saved, where the parameters are."""
    own = subject.model.state_dict()
    changed = [name for name, value in loaded.state_dict().items() if name not in own or not same_bits(own[name], value)]
    if changed:
        return f"not what was saved: {listed(map(subject.placed, changed))}"
    theirs = dict(loaded.named_modules())
    modules = [(path, module) for path, module in subject.model.named_modules() if not is_transformers(module)]
    settings = [f"{path}.{key}" for path, module in modules for key in differing(module, theirs.get(path))]
    return f"every saved tensor came back; not saved: {listed(map(subject.placed, settings)) or 'something that it computes with'}"


def differing(module: nn.Module, other: nn.Module | None) -> list[str]:
    """The numbers, words, tensors and buffers of a module that another has not, or has otherwise."""
    ours, theirs = plain(module), plain(other) if other is not None else {}
    return [key for key, value in ours.items() if key not in theirs or not same(value, theirs[key])]


def plain(module: nn.Module) -> dict[str, object]:
    kinds = (bool, int, float, str, tuple, torch.Tensor)
    return {key: value for key, value in [*vars(module).items(), *module._buffers.items()] if isinstance(value, kinds)}


def same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return same_bits(one, other)
    return isinstance(other, type(one)) and bool(one == other)


def through_state_dict(subject: Subject, path: Path, why: str) -> Finding:
    """Whether the model computes the same with the weights read back from a file, and holds no new tensor that the file lacks."""
    loose = loose_tensors(subject.model)
    before = subject.reference.loose if subject.reference is not None else frozenset(loose)
    if len(loose) > len(before):
        return failed(
            "through a state dict", f"plain attributes are not saved: {listed(name for name in loose if name not in before)}"
        )
    torch.save(subject.model.state_dict(), path)
    state = torch.load(path, weights_only=True, mmap=True, map_location=device_of(subject.model))
    learnt = {name for name, one in subject.model.named_parameters(remove_duplicate=False) if one.requires_grad}
    for name in learnt & set(state):
        state[name].requires_grad_()  # torch multiplies otherwise by what does not learn
    state = {name: state[name] for name in places(subject.model, state)}
    with torch.no_grad():
        # the state has every name of a tied weight
        answer = torch.func.functional_call(subject.model, state, (), dict(subject.inputs), tie_weights=False)
        theirs = logits_of(answer)
    ours = logits_of(run(subject.model, subject.inputs))
    if not same_bits(ours, theirs):
        return failed(f"{distance(theirs, ours):.1e} through a state dict", "its own weights, read back, give something else")
    return passed("bit-identical through a state dict", why)


def places(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Of the names of weights one for each place: a module that stands in several layers has its weights once."""
    found: dict[tuple[int, str], str] = {}
    for name in names:
        path, _, leaf = name.rpartition(".")
        found.setdefault((id(model.get_submodule(path)), leaf), name)
    return list(found.values())
