"""The candidates of a plan, and variants: a candidate applied once to the whole model, split by layer, and stored on disk.

A hybrid is the dense model with the modules of some layers of some variants in it.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, fx, nn

from retrofit.anatomy import Anatomy
from retrofit.errors import DoesNotFitError, PlanningError
from retrofit.files.atomic_writes import whole_file
from retrofit.inputs.calibration import Calibration
from retrofit.inputs.example_inputs import named_inputs
from retrofit.inputs.model_memory import own_bytes
from retrofit.inputs.model_state import evaluation_mode, plain_attributes, preserve_random_state
from retrofit.inputs.probes import accepts, logits_of, run
from retrofit.numerics.distances import distance, tolerance_of
from retrofit.passbase.options import format_value
from retrofit.passbase.protocol import AnyPass, Pass, load_pass, parse_spec, pass_names
from retrofit.planning.choosing import is_inside
from retrofit.planning.costs import uninterrupted
from retrofit.program.program import Program
from retrofit.rewriting import apply_reported
from retrofit.surgery import Edit
from retrofit.surgery.dequantization import TRACES
from retrofit.surgery.wrappers import Wrapper

ALL_LAYERS = "layers"  # the option that limits a pass to some depths


def candidates_of(given: AnyPass | str | Sequence[AnyPass | str] | None) -> tuple[AnyPass, ...]:
    """Return the candidates: passes and specs as given, the proposed settings of passes given by name, or for None of all passes.

    Raises `SpecError` if one cannot be parsed, `PlanningError` if there is none.
    """
    named = pass_names() if given is None else [given] if isinstance(given, (str, Pass)) else given
    families = [family(candidate, required=given is not None) for candidate in named]
    found: dict[str, AnyPass] = {}
    for several in itertools.zip_longest(*families):  # each pass's first setting, then each one's second: time may end between
        found |= {candidate.spec(): candidate for candidate in several if candidate is not None and candidate.spec() not in found}
    if not found:
        raise PlanningError(
            "no candidate passes",
            why="none was named, or none proposes settings",
            remedy="add --pass NAME with its options",
            code="no-candidate",
        )
    return tuple(found.values())


def family(candidate: AnyPass | str, *, required: bool) -> list[AnyPass]:
    """Return the settings that a named pass proposes, the pass itself if `required` and without any; any other spec as it is."""
    if not isinstance(candidate, str) or "(" in candidate:
        return [parse_spec(candidate) if isinstance(candidate, str) else candidate]
    kind = load_pass(candidate.strip())
    return [parse_spec(f"{kind.name}({options})") for options in kind.candidates or (("",) if required else ())]


def short_spec(candidate: AnyPass) -> str:
    """Return a pass as text with the options that differ from their defaults: `sparse-ffn(sparsity=8)`."""
    fields = [field for field in dataclasses.fields(candidate) if getattr(candidate, field.name) != field.default]
    options = ", ".join(f"{field.name}={format_value(getattr(candidate, field.name))}" for field in fields)
    return f"{candidate.name}({options})" if options else candidate.name


def takes_layers(candidate: AnyPass) -> bool:
    """Return whether the pass can be limited to some depths."""
    return any(field.name == ALL_LAYERS for field in dataclasses.fields(candidate))


def limited_to(candidate: AnyPass, depths: Iterable[int]) -> AnyPass:
    """Return the pass limited to layers of these depths."""
    return dataclasses.replace(candidate, **{ALL_LAYERS: depths_text(depths)})


def depths_text(depths: Iterable[int]) -> str:
    """Return depths in the form of the option `layers`: `0-5+8`."""
    runs: list[list[int]] = []
    for depth in sorted(set(depths)):
        if runs and runs[-1][-1] == depth - 1:
            runs[-1].append(depth)
        else:
            runs.append([depth])
    return "+".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


LayerPaths = Mapping[int, tuple[str, ...]]  # the layers of all stacks by depth


@dataclasses.dataclass(frozen=True)
class Replacement:
    """The modules with which a candidate replaces dense ones, in the layers of some depths or in all."""

    depths: tuple[int, ...]  # named in the recipe; empty if the candidate cannot be split by depth
    modules: Mapping[str, nn.Module]  # by the path of the module that they replace
    model: nn.Module | None = None  # the rewritten model itself, if its modules alone do not make it

    @property
    def paths(self) -> tuple[str, ...]:
        return ("",) if self.model is not None else tuple(self.modules)


Variant = tuple[Replacement, ...]  # a rewritten copy of the model, split


def layers_by_depth(anatomy: Anatomy) -> LayerPaths:
    """Return the paths of the layers at each depth, of all stacks."""
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
    """Return a copy of `dense` rewritten by the passes, and the dense original of each of its copied tensors, by identity.

    The `program` of `dense` is captured if not given.
    """
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
            calibration=calibration if any(candidate.calibrates for candidate in passes) else None,
            verify=False,
            count_flops=False,
            dense=program,
            fitted=calibration is not None,
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
    """Return the candidate applied to the whole model, split by depth. Raises `DoesNotFitError` if it fits nowhere.

    With `fit` it is fitted on the data; otherwise only its structure is final.
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
    """Raises `DoesNotFitError` unless the rewritten model accepts all arguments in the batches that the dense one accepts."""
    missing = [name for name in data.batches[0] if accepts(dense, name) and not accepts(rewritten, name)]
    if missing:
        raise DoesNotFitError(
            f"the rewritten model takes no {' and no '.join(missing)}, which the batches hold",
            why="it is a graph, captured with fixed values of them",
            remedy="remove them from the batches",
            code="other-arguments",
        )


def comes_apart(dense: nn.Module, rewritten: nn.Module, replacements: Sequence[Replacement], data: Calibration) -> bool:
    """Return whether the model with all replacements computes the same as the rewritten one, on a window of the data."""
    window = next(data.windows())
    with evaluation_mode(rewritten):
        expected = logits_of(run(rewritten, named_inputs(rewritten, window)))
    with hybrid(dense, replacements) as model, evaluation_mode(model):
        found = logits_of(run(model, named_inputs(model, window)))
    return distance(found, expected) <= tolerance_of(expected)


def by_depth(changed: Mapping[str, nn.Module], layers: LayerPaths) -> list[tuple[tuple[int, ...], dict[str, nn.Module]]] | None:
    """Return the changed modules by depth, depths that share a module together; None if a module is in no layer."""
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


@contextlib.contextmanager
def hybrid(dense: nn.Module, replacements: Sequence[Replacement]) -> Iterator[nn.Module]:
    """Yield the model with these replacements: `dense` itself, which is restored afterwards, or another model.

    Weights that a replacement shares with the dense model have their evaluation layout, so that timings do not include preparing
    it.
    """
    other = next((replacement.model for replacement in replacements if replacement.model is not None), None)
    if other is not None:
        yield other
        return
    edit = Edit(dense)
    try:
        for replacement in replacements:
            for path, module in replacement.modules.items():
                edit.replace_module(path, module)
                for part in module.modules():
                    if isinstance(part, Wrapper):
                        part.arrange()
        yield dense
    finally:
        with uninterrupted():
            edit.undo()


def added_bytes(dense: nn.Module, replacement: Replacement) -> int:
    """Return by how many bytes this replacement increases the model's parameters and buffers."""
    before = own_bytes(dense)
    with hybrid(dense, (replacement,)) as model:
        return own_bytes(model) - before


def structure(replacement: Replacement) -> str:
    """Return a text that is equal for replacements of equal cost: classes and shapes of the modules, without layer numbers."""
    modules = [replacement.model] if replacement.model is not None else replacement.modules.values()
    return "; ".join(
        f"{type(part).__name__} {[tuple(tensor.shape) for tensor in part._parameters.values() if tensor is not None]}"
        for module in modules
        for part in module.modules()
    )


HOOKS = ("_forward_pre_hooks", "_forward_hooks")
OWN = "retrofit_"  # attributes with the library's own records
ORIGINS = {*TRACES, "name_or_path"}  # attributes that describe the origin of the weights
PLAIN = (bool, int, float, str, tuple)


def changed_modules(dense: nn.Module, rewritten: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost modules of `rewritten`, an edited copy of `dense`, that have changed, by path.

    The path is "" if the model itself has changed: its own parameters, hooks, children or forward.
    """
    found: dict[str, nn.Module] = {}
    seen: set[int] = set()

    def compare(path: str, module: nn.Module, other: nn.Module) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        if not is_same_shell(module, other):
            found[path] = other
            return
        for name, child in module._modules.items():
            if child is not None:
                compare(f"{path}.{name}".lstrip("."), child, other.get_submodule(name))

    compare("", dense, rewritten)
    return found


def is_same_shell(module: nn.Module, other: nn.Module) -> bool:
    """Return whether two modules are equal except for the contents of their children."""
    same_code = (
        module.code == other.code
        if isinstance(module, fx.GraphModule) and isinstance(other, fx.GraphModule)
        else type(module) is type(other)
    )
    children = {name: child is None for name, child in module._modules.items()}
    return (
        same_code
        and children == {name: child is None for name, child in other._modules.items()}
        and all(len(getattr(module, name)) == len(getattr(other, name)) for name in HOOKS)
        and same_tensors(module._parameters, other._parameters)
        and same_tensors(module._buffers, other._buffers)
        and settings(module) == settings(other)
    )


def same_tensors(table: dict[str, Any], other: dict[str, Any]) -> bool:
    return table.keys() == other.keys() and all(
        (tensor is None and other[name] is None) or is_same_tensor(tensor, other[name]) for name, tensor in table.items()
    )


def is_same_tensor(tensor: Tensor | None, other: Tensor | None) -> bool:
    """Return whether two tensors have equal values."""
    if tensor is None or other is None or tensor.shape != other.shape or tensor.dtype != other.dtype:
        return False
    return tensor is other or torch.equal(tensor, other)


def settings(module: nn.Module) -> dict[str, Any]:
    """Return a module's attributes that are plain data, except the origin of weights, and whether its forward is its class's."""
    kept = {
        name: value
        for name, value in plain_attributes(module).items()
        if isinstance(value, PLAIN) and not name.startswith(OWN) and name not in ORIGINS
    }
    return {**kept, "forward": "forward" in vars(module), "training": False}


def share_unchanged(module: nn.Module, originals: dict[int, Tensor]) -> None:
    """Replace the parameters and buffers in `module` that still equal their originals by those tensors.

    `originals` has the tensor that each was copied from, by the identity of the copy. Ties are kept, and a hybrid of the model and
    this module has no second copy of any tensor.
    """
    for part in module.modules():
        for table in (part._parameters, part._buffers):
            for name, value in table.items():
                original = originals.get(id(value))
                if original is not None and is_same_tensor(value, original):
                    table[name] = original  # type: ignore[assignment]


def own_tensors(variant: Variant, dense: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor of the replacements that is not the dense model's, with a unique name."""
    known = {id(tensor) for tensor in (*dense.parameters(), *dense.buffers())}
    for number, replacement in enumerate(variant):
        for path, module in replacement.modules.items():
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                if id(tensor) not in known:
                    known.add(id(tensor))
                    yield f"{number} {path} {name}", tensor.detach()


def save_variant(file: Path, variant: Variant, dense: nn.Module) -> None:
    """Write the values of the replacements to `file`; does nothing if the variant is a whole model."""
    if all(replacement.model is None for replacement in variant):
        values = {name: tensor.cpu().clone().contiguous() for name, tensor in own_tensors(variant, dense)}
        with whole_file(file, force=True) as stream:
            stream.write(save(values))


@torch.no_grad()
def restore_variant(file: Path, variant: Variant, dense: nn.Module) -> bool:
    """Load the values in `file` into the replacements, of the same structure as the saved ones; return whether that succeeded."""
    try:
        kept = load_file(file)
    except (OSError, SafetensorError):
        return False
    places = dict(own_tensors(variant, dense))
    same = places.keys() == kept.keys() and all(places[name].shape == kept[name].shape for name in kept)
    if same:
        for name, value in kept.items():
            places[name].copy_(value)
    return same
