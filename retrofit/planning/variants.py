"""A candidate applied once to the whole model, and what it puts into each layer, which can be taken by itself.

A hybrid is the dense model with the modules of some layers of some variants in it.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from retrofit.anatomy.anatomy import Anatomy
from retrofit.errors import DoesNotFitError
from retrofit.passbase.protocol import AnyPass
from retrofit.planning.candidates import takes_layers
from retrofit.planning.changed_modules import changed_modules, share_unchanged
from retrofit.program.program import Program
from retrofit.rewriting import apply_reported
from retrofit.runtime.calibration import Calibration
from retrofit.runtime.calibration_split import windows_of_batch
from retrofit.runtime.example_inputs import named_inputs
from retrofit.runtime.modes import evaluation_mode
from retrofit.runtime.peak_memory import own_bytes
from retrofit.runtime.probes import accepts, distance, logits_of, run, tolerance_of
from retrofit.runtime.state_preservation import preserve_random_state
from retrofit.surgery.edit import Edit

LayerPaths = Mapping[int, tuple[str, ...]]  # the layers of all stacks by depth


@dataclasses.dataclass(frozen=True)
class Replacement:
    """What one candidate puts in the place of dense modules: in the layers of some depths, or as a whole."""

    depths: tuple[int, ...]  # that the recipe names; empty where the candidate does not come apart by depth
    modules: Mapping[str, nn.Module]  # by the path of what they replace
    model: nn.Module | None = None  # the rewritten model itself, where its modules alone do not make it

    @property
    def paths(self) -> tuple[str, ...]:
        return ("",) if self.model is not None else tuple(self.modules)


Variant = tuple[Replacement, ...]  # a rewritten copy of the model, taken apart


def layers_by_depth(anatomy: Anatomy) -> LayerPaths:
    """The paths of the layers at each depth, of all stacks."""
    deepest = max((len(stack.layers) for stack in anatomy.stacks), default=0)
    return {
        depth: tuple(dict.fromkeys(stack.layers[depth].name for stack in anatomy.stacks if depth < len(stack.layers)))
        for depth in range(deepest)
    }


def rewritten_copy(
    dense: nn.Module,
    passes: Sequence[AnyPass],
    calibration: Calibration | None,
    seed: int,
    example_inputs: Any = None,
    program: Program | None = None,
) -> tuple[nn.Module, dict[int, Tensor]]:
    """A copy of `dense`, whose `program` is captured where not given, rewritten by the passes; and the dense tensor that each
    tensor was copied from, by identity."""
    memo: dict[int, Any] = {}
    copied = copy.deepcopy(dense, memo)
    tensors = {id(tensor): tensor for tensor in (*dense.parameters(), *dense.buffers())}
    originals = {id(memo[key]): tensor for key, tensor in tensors.items() if key in memo}
    with preserve_random_state():
        torch.manual_seed(seed)
        applied = apply_reported(
            copied,
            *passes,
            example_inputs=example_inputs,
            calibration=calibration if any(one.calibrates for one in passes) else None,
            verify=False,
            count_flops=False,
            dense=program,
        )
    return applied.model, originals


def build_variant(
    dense: nn.Module,
    candidate: AnyPass,
    data: Calibration,
    layers: LayerPaths,
    seed: int,
    example_inputs: Any = None,
    program: Program | None = None,
    *,
    fit: bool = True,
) -> Variant:
    """The candidate applied to all of the model, taken apart; raises `DoesNotFitError` where it fits nowhere.

    It is fitted on the data where `fit`; else only its structure is what it will be.
    """
    rewritten, originals = rewritten_copy(dense, (candidate,), data if fit else None, seed, example_inputs, program)
    rewritten.eval()
    require_same_arguments(dense, rewritten, data)
    changed = changed_modules(dense, rewritten)
    if "" in changed:
        return (Replacement((), {}, rewritten),)
    for module in changed.values():
        share_unchanged(module, originals)
    groups = by_depth(changed, layers) if takes_layers(candidate) else None
    replacements = tuple(Replacement(depths, modules) for depths, modules in groups or [((), changed)])
    if not comes_apart(dense, rewritten, replacements, data):
        return (Replacement((), {}, rewritten),)
    return replacements


def require_same_arguments(dense: nn.Module, rewritten: nn.Module, data: Calibration) -> None:
    """The rewritten model takes what the dense one does of each batch, else `DoesNotFitError`."""
    gone = [name for name in data.batches[0] if accepts(dense, name) and not accepts(rewritten, name)]
    if gone:
        raise DoesNotFitError(
            f"the rewritten model takes no {' and no '.join(gone)}, which the batches hold",
            why="it is a graph, which holds what such arguments led to when it was captured",
            remedy="leave them out of the batches, where they are what the model is captured with",
        )


def comes_apart(dense: nn.Module, rewritten: nn.Module, replacements: Sequence[Replacement], data: Calibration) -> bool:
    """Whether the model with all replacements computes what the rewritten one does, on a window of the data."""
    window = next(windows_of_batch(data.batches[0]))
    with evaluation_mode(rewritten):
        expected = logits_of(run(rewritten, named_inputs(rewritten, window)))
    with hybrid(dense, replacements) as model, evaluation_mode(model):
        found = logits_of(run(model, named_inputs(model, window)))
    return distance(found, expected) <= tolerance_of(expected)


def by_depth(changed: Mapping[str, nn.Module], layers: LayerPaths) -> list[tuple[tuple[int, ...], dict[str, nn.Module]]] | None:
    """The changed modules by the depths they are at; depths that share a module go together. None where one is in no layer."""
    groups: list[tuple[set[int], dict[str, nn.Module]]] = []
    for path, module in changed.items():
        depths = {depth for depth, paths in layers.items() if any(is_inside(path, layer) for layer in paths)}
        if not depths:
            return None
        touching = [group for group in groups if group[0] & depths]
        groups = [group for group in groups if not group[0] & depths]
        merged = {path: module}
        for known, modules in touching:
            depths |= known
            merged = {**modules, **merged}
        groups.append((depths, merged))
    return sorted(((tuple(sorted(depths)), modules) for depths, modules in groups), key=lambda group: group[0])


def is_inside(path: str, outer: str) -> bool:
    """Whether the module at `path` is the one at `outer` or lies in it."""
    return path == outer or not outer or path.startswith(f"{outer}.")


@contextlib.contextmanager
def hybrid(dense: nn.Module, replacements: Sequence[Replacement]) -> Iterator[nn.Module]:
    """Within this context the model with these replacements: `dense` itself, which is afterwards what it was, or another."""
    whole = next((one.model for one in replacements if one.model is not None), None)
    if whole is not None:
        yield whole
        return
    edit = Edit(dense)
    try:
        for one in replacements:
            for path, module in one.modules.items():
                edit.replace_module(path, module)
        yield dense
    finally:
        edit.undo()


def added_bytes(dense: nn.Module, replacement: Replacement) -> int:
    """The bytes of parameters and buffers that the model has more with this replacement."""
    before = own_bytes(dense)
    with hybrid(dense, (replacement,)) as model:
        return own_bytes(model) - before


def structure(replacement: Replacement) -> str:
    """What makes two replacements cost the same: classes and shapes of what is replaced, without the numbers of layers."""
    modules = [replacement.model] if replacement.model is not None else list(replacement.modules.values())
    parts = []
    for module in modules:
        parts += [
            f"{type(part).__name__} {[tuple(one.shape) for one in part._parameters.values() if one is not None]}"
            for part in module.modules()
        ]
    return "; ".join(parts)
