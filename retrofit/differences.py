"""The differences between two models: architecture, config, recipe, sites, parameters.

If the recipes differ, the dense parameters recovered from the two models are compared, wherever they are stored.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from retrofit.adapters import BASE, CLASSES, CONFIG, TRAINED_ON, other_base, read_adapter_config
from retrofit.emitted import as_dense_graph_of, dense_graph
from retrofit.inputs.example_inputs import named_inputs
from retrofit.inputs.model_state import same_bits
from retrofit.inputs.packed_weights import unpacked
from retrofit.inputs.usable_models import require_in_memory, require_module, require_values
from retrofit.passbase import recipe_storage
from retrofit.passbase.protocol import parse_recipe
from retrofit.passbase.replaying import rewrites, rewritten_part
from retrofit.process import serialized
from retrofit.storage.checkpoint import load
from retrofit.undoing import DenseForm, dense_form

CHANGING = ("quantization_config", "transformers_version", "architectures", "_name_or_path")  # not about the model itself


class NoEntry(enum.Enum):
    """Replaces an entry that a configuration does not have."""

    ABSENT = "absent"


ABSENT = NoEntry.ABSENT


@dataclasses.dataclass(frozen=True)
class TensorDifference:
    """One parameter or saved buffer that differs."""

    name: str  # in the dense model if the recipes differ
    what: str  # values, shape, dtype, only in the first, only in the second, gone from the first, gone from the second
    one: str = ""  # in the first: shape and dtype, or why it is gone
    other: str = ""
    largest: float | None = None  # the largest |a − b|
    relative: float | None = None  # ‖a − b‖ / ‖a‖


@dataclasses.dataclass(frozen=True)
class SiteDifference:
    """One place that a pass rewrote in only one of the models."""

    name: str
    method: str
    only_in: str  # first, second


@dataclasses.dataclass(frozen=True)
class Differences:
    """The differences of two models; all fields are empty if there are none."""

    architectures: tuple[str, str]
    recipes: tuple[tuple[str, ...], tuple[str, ...]]
    config: Mapping[str, tuple[Any, Any]]  # the entries that differ; ABSENT if one model has no such entry
    sites: tuple[SiteDifference, ...]
    tensors: tuple[TensorDifference, ...]  # those with different values first, by decreasing relative difference
    equal: int  # parameters and saved buffers that are equal bit for bit
    compared: str = "by name"

    @property
    def same(self) -> bool:
        """Return whether nothing differs."""
        (a, b), (recipe, others) = self.architectures, self.recipes
        return a == b and recipe == others and not (self.config or self.sites or self.tensors)

    def passes(self) -> list[tuple[str, str, str]]:
        """Return the differences of the passes as rows: which model has the pass, or which options differ; both models' values."""
        rows: list[tuple[str, str, str]] = []
        in_a, in_b = (parse_recipe(specs) for specs in self.recipes)
        for place in range(max(len(in_a), len(in_b))):
            a, b = (passes[place] if place < len(passes) else None for passes in (in_a, in_b))
            if a is None or b is None or a.name != b.name:
                rows.append((f"pass {place + 1}", a.spec() if a else "", b.spec() if b else ""))
            elif a != b:
                ours, theirs = dataclasses.asdict(a), dataclasses.asdict(b)
                keys = [key for key in ours if ours[key] != theirs[key]]
                first, second = (", ".join(f"{key}={options[key]}" for key in keys) for options in (ours, theirs))
                rows.append((f"pass {place + 1}, {a.name}", first, second))
        return rows

    def as_json(self) -> dict[str, Any]:
        """Return the differences as plain data, with "absent" for an entry that a config does not have."""
        config = {key: [value.value if value is ABSENT else value for value in pair] for key, pair in self.config.items()}
        return {"same": self.same, **dataclasses.asdict(self), "config": config}


@serialized
def diff(a: nn.Module, b: nn.Module) -> Differences:
    """Return the differences of two models in sites, parameters and options of the recipes, and their sizes; both are unchanged.

    Raises `CheckpointError` for a model without values, and if a recipe does not lead to its model.
    """
    for model in (a, b):
        require_module(model)
        require_in_memory(model, "compared")
        require_values(model, "compared", "load its weights first")
    a, b = rewritten_part(a), rewritten_part(b)
    recipes = recipe_storage.stored_recipe(a), recipe_storage.stored_recipe(b)
    if dense_graph(a) is not None and not recipes[1]:
        b = as_dense_graph_of(a, b, named_inputs(a))
    elif dense_graph(b) is not None and not recipes[0]:
        a = as_dense_graph_of(b, a, named_inputs(b))
    comparable = type(a) is type(b) or (has_dense_graph(a) and has_dense_graph(b))
    forms = () if recipes[0] == recipes[1] or not comparable else (dense_form(a), dense_form(b))
    if forms:
        tensors, equal = compare_forms(a, b, *forms)
    else:
        tensors, equal = compare_tensors(saved_tensors(a), saved_tensors(b))
    return Differences(
        (type(a).__name__, type(b).__name__),
        recipes,
        different_entries(config_of(a), config_of(b)),
        tuple(different_sites(a, b)),
        tuple(sorted(tensors, key=lambda found: (found.relative is None, -(found.relative or 0.0)))),
        equal,
        "by their names in the dense model" if forms else "by name",
    )


def has_dense_graph(model: nn.Module) -> bool:
    """Return whether the model is a graph whose dense form is known."""
    return isinstance(model, fx.GraphModule) and (dense_graph(model) is not None or not recipe_storage.stored_recipe(model))


def compare_forms(a: nn.Module, b: nn.Module, ours: DenseForm, theirs: DenseForm) -> tuple[list[TensorDifference], int]:
    """Return the differences in the dense parameters recovered from both, and in the parameters that each has besides."""
    found: list[TensorDifference] = []
    values: tuple[dict[str, Tensor], dict[str, Tensor]] = {}, {}
    for name in ours.skeleton.state_dict():
        here, there = ours.tensors[name], theirs.tensors.get(name)
        if there is None or here.value is None or there.value is None:
            lost = "first" if here.value is None else "second"
            found.append(TensorDifference(name, f"gone from the {lost}", here.why, there.why if there else ""))
        else:
            values[0][name], values[1][name] = here.value, there.value
    differing, equal = compare_tensors(*values)
    for model, form, which in ((a, ours, "first"), (b, theirs, "second")):
        for name in sorted(form.added):
            text = described(model.get_parameter(name))
            found.append(TensorDifference(name, f"only in the {which}", *((text, "") if which == "first" else ("", text))))
    return [*differing, *found], equal


def compare_tensors(in_a: Mapping[str, Tensor], in_b: Mapping[str, Tensor]) -> tuple[list[TensorDifference], int]:
    """Return the tensors that differ in any bit, and the number of equal ones."""
    found: list[TensorDifference] = []
    equal = 0
    for name in dict.fromkeys((*in_a, *in_b)):
        a, b = in_a.get(name), in_b.get(name)
        if a is None or b is None:
            which = "second" if a is None else "first"
            first, second = ("" if tensor is None else described(tensor) for tensor in (a, b))
            found.append(TensorDifference(name, f"only in the {which}", first, second))
        elif a.shape != b.shape or a.dtype != b.dtype:
            what = "shape" if a.shape != b.shape else "dtype"
            found.append(TensorDifference(name, what, described(a), described(b)))
        elif same_bits(a.cpu(), b.cpu()):
            equal += 1
        else:
            found.append(TensorDifference(name, "values", described(a), described(b), *distances(a, b)))
    return found, equal


def distances(a: Tensor, b: Tensor) -> tuple[float, float]:
    """Return the largest |a − b|, and ‖a − b‖ / ‖a‖."""
    left, right = a.detach().to("cpu", torch.float64), b.detach().to("cpu", torch.float64)
    gap = left - right
    return float(gap.abs().max()), float(gap.norm() / (left.norm() or 1.0))


def described(tensor: Tensor) -> str:
    return f"{'×'.join(map(str, tensor.shape)) or 'a number'} {str(tensor.dtype).removeprefix('torch.')}"


def saved_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that a file of the model contains: one for tied tensors, the represented values of packed ones."""
    seen: set[int] = set()
    found: dict[str, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor) and id(tensor) not in seen:
            seen.add(id(tensor))
            found[name] = unpacked(tensor.detach())
    return found


def different_sites(a: nn.Module, b: nn.Module) -> Iterable[SiteDifference]:
    """Yield the places that were rewritten in only one of the models."""
    ours, theirs = sites_of(a), sites_of(b)
    yield from (SiteDifference(name, method, "first") for method, name in ours if (method, name) not in theirs)
    yield from (SiteDifference(name, method, "second") for method, name in theirs if (method, name) not in ours)


def sites_of(model: nn.Module) -> dict[tuple[str, str], None]:
    """Return the places that were rewritten, with the method, in order."""
    found = rewrites(model) or ()
    return {(rewrite.spec.partition("(")[0], site.name): None for rewrite in found for site in rewrite.sites}


def config_of(model: nn.Module) -> dict[str, Any]:
    """Return the model's configuration as plain data; empty if it has none."""
    config: Any = getattr(model, "config", None)
    if dataclasses.is_dataclass(config) and not isinstance(config, type) and not hasattr(config, "to_dict"):
        return dataclasses.asdict(config)
    if hasattr(config, "to_dict"):
        return {key: value for key, value in config.to_dict().items() if key not in CHANGING}
    return dict(config) if isinstance(config, Mapping) else {}


def different_entries(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the entries of two configurations that differ; None and a missing entry count as equal."""
    keys = dict.fromkeys((*a, *b))
    return {key: (a.get(key, ABSENT), b.get(key, ABSENT)) for key in keys if a.get(key) != b.get(key)}


def require_base_of(folder: Path, model: nn.Module, base: Path) -> None:
    """Raises `CheckpointError` unless `model`, read from `base`, is the one that the adapter in `folder` was trained on.

    If that model is on disk too, at another path, the two must have the same recipe and the same values. If it is no longer there,
    it may have been moved to `base`: then the class must match, and, when the adapter is loaded, the tensors.
    """
    config = read_adapter_config(folder)
    classes = config.get(CLASSES)
    trained_on = classes.get("base_model_class") if isinstance(classes, dict) else None
    if trained_on not in (None, type(model).__name__):
        raise other_base(folder, base, f"it was trained on a {trained_on}, and this is a {type(model).__name__}", TRAINED_ON)
    named = config.get(BASE)
    if not named or not isinstance(named, str) or not Path(named).exists() or Path(named).samefile(base):
        return
    found = diff(load(Path(named)), model)
    if not found.same:
        why = f"{CONFIG} names {named}, and {difference_in_words(found)}"
        raise other_base(folder, base, why, f"leave --base out, or, where {base} is to take its place, name it in {CONFIG}")


def difference_in_words(found: Differences) -> str:
    """Return in words the difference between an adapter's model and another one: class, recipe, or else parameters."""
    (a, b), recipes = found.architectures, [", ".join(specs) or "none" for specs in found.recipes]
    if a != b:
        return f"that is a {a}, this a {b}"
    if recipes[0] != recipes[1]:
        return f"its recipe is {recipes[0]}, the one of this model {recipes[1]}"
    if found.tensors:
        first, more = found.tensors[0], len(found.tensors) - 1
        return f"{first.name} differs ({first.what})" + (f", as do {more} more parameters" if more else "")
    return f"{next(iter(found.config), 'its sites')} differs"
