"""Architectures of the installed transformers, sized like a given model with mixtures of experts.

Only the entries of an architecture's config are known. The effect of an entry is determined by experiment: the model of a changed
config is built on the meta device, and its parameters are compared with the wanted ones. An architecture has mixtures if one of
these models has stacked weights.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from retrofit.anatomy import plural
from retrofit.errors import first_few, first_line
from retrofit.numerics.agreement import Choices
from retrofit.numerics.distances import distance
from retrofit.passbase.replaying import rewrites
from retrofit.process import quiet
from retrofit.undoing import skeleton_of

TOKENS = 64
SPREAD = 2.0  # of random router logits: large enough that gates differ


@dataclasses.dataclass(frozen=True)
class Mixture:
    """A module that maps a stream to one of the same width by experts, whose matrices are stacked along their first dimension."""

    path: str
    module: nn.Module
    experts: int

    @property
    def weights(self) -> dict[str, Tensor]:
        """Return its parameters, by their names in the module."""
        return {name: parameter.detach() for name, parameter in self.module.named_parameters()}


def installed_mixtures(model: nn.Module) -> list[Mixture]:
    """Return the mixtures that passes put into the model, in its order."""
    sites = {site.name for rewrite in rewrites(model) or () for site in rewrite.sites}
    found: list[Mixture] = []
    for path, module in model.named_modules(remove_duplicate=False):
        stacked = {parameter.shape[0] for parameter in module.parameters() if parameter.dim() == 3}
        if path in sites and len(stacked) == 1 and not any(path.startswith(f"{mixture.path}.") for mixture in found):
            found.append(Mixture(path, module, stacked.pop()))
    return found


@torch.no_grad()
def choices_of(module: nn.Module, x: Tensor) -> list[tuple[int, int]]:
    """Return, for each choice that the module makes for x, how many items it selects and out of how many."""
    with Choices(picks_only=True) as choices:
        module(x)
    return choices.sizes


@torch.no_grad()
def response(module: nn.Module, x: Tensor) -> Tensor:
    """Return the module's output for a stream: the first tensor of the stream's shape."""
    out: Any = module(x)
    for tensor in out if isinstance(out, (tuple, list)) else (out,):
        if isinstance(tensor, Tensor) and tensor.shape == x.shape:
            return tensor
    raise TypeError("it returns no stream")


def in_float32(module: nn.Module, fill: Callable[[str, Tensor], Tensor]) -> nn.Module:
    """Return a copy of the module in float32; `fill` gives its parameters by name and old value, and its buffers are zero."""
    memo = {id(parameter): nn.Parameter(torch.empty_like(parameter, device="meta")) for parameter in module.parameters()}
    made = copy.deepcopy(module, memo).to_empty(device="cpu").float().eval()
    with torch.no_grad():
        for buffer in made.buffers():
            buffer.zero_()
        for name, parameter in made.named_parameters():
            parameter.copy_(fill(name, parameter))
    return made


def random_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return random values such that no two parts of a mixture are equal."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: SPREAD * torch.randn(weight.shape, generator=generator) / max(1, weight.shape[-1]) ** 0.5
        for name, weight in weights.items()
    }


def random_stream(width: int) -> Tensor:
    """Return a random stream: (1, tokens, width)."""
    return torch.randn(1, TOKENS, width, generator=torch.Generator().manual_seed(1))


CLOSE = 1e-5  # relative to the largest output, in float32
MOST = 64  # combinations that are tried
Join = Callable[[list[Tensor]], Tensor]

JOINS: dict[str, Join] = {  # along the second dimension: the outputs of a matrix
    "joined": lambda parts: torch.cat(parts, 1),
    "interleaved": lambda parts: torch.stack(parts, 2).flatten(1, 2),
}


@dataclasses.dataclass(frozen=True)
class Layout:
    """The composition of one stacked weight: others, each whole or one of its halves, in order, joined, perhaps transposed."""

    sources: tuple[tuple[str, int | None], ...]  # names, and which half; none: zeros
    join: str = "joined"
    transposed: bool = False

    def made_of(self, weights: Mapping[str, Tensor], shape: torch.Size) -> Tensor:
        """Return the composed weight; zeros of that shape if it has no sources."""
        if not self.sources:
            return torch.zeros(shape)
        parts = [weights[name] if half is None else weights[name].chunk(2, 1)[half] for name, half in self.sources]
        whole = parts[0] if len(parts) == 1 else JOINS[self.join](parts)
        return (whole.transpose(1, 2) if self.transposed else whole).contiguous()


ZEROS = Layout(())


def layouts_for(shape: torch.Size, weights: Mapping[str, Tensor]) -> list[Layout]:
    """Return the layouts that give a weight of that shape."""
    experts = next(iter(weights.values())).shape[0]
    if len(shape) < 2 or shape[0] != experts:
        return [ZEROS]
    parts: list[tuple[str, int | None]] = [(name, None) for name in weights]
    parts += [(name, half) for name, weight in weights.items() for half in (0, 1) if weight.dim() > 1 and weight.shape[1] % 2 == 0]
    found: list[Layout] = []
    for sources in [(part,) for part in parts] + list(itertools.permutations(parts, 2)):
        halves = [(name, half) for name, half in sources]
        if len(sources) == 2 and {half is None for _, half in halves} == {True, False}:
            continue
        for join in JOINS if len(sources) == 2 else ("joined",):
            for transposed in (False, True):
                if shape_of(Layout(tuple(sources), join, transposed), weights) == shape:
                    found.append(Layout(tuple(sources), join, transposed))
    return found or [ZEROS]


def shape_of(layout: Layout, weights: Mapping[str, Tensor]) -> torch.Size | None:
    """Return the shape that a layout gives; None if its parts do not fit together."""
    with torch.device("meta"):
        hollow = {name: torch.empty(weight.shape) for name, weight in weights.items()}
    try:
        return layout.made_of(hollow, torch.Size()).shape
    except (RuntimeError, IndexError):
        return None


def combinations(wanted: Mapping[str, torch.Size], weights: Mapping[str, Tensor]) -> Iterator[dict[str, Layout]]:
    """Yield compositions of all the wanted weights in which each available weight is used exactly once."""
    options = [layouts_for(shape, weights) for shape in wanted.values()]
    for chosen in itertools.islice(itertools.product(*options), 4 * MOST):
        used = [part for layout in chosen for part in layout.sources]
        parts = {name: sorted((half for weight, half in used if weight == name), key=str) for name in weights}
        if all(halves in ([None], [0, 1]) for halves in parts.values()):  # whole, or both halves
            yield dict(zip(wanted, chosen, strict=True))


def equal_layout(source: nn.Module, target: nn.Module, weights: Mapping[str, Tensor], x: Tensor) -> tuple[dict[str, Layout], float]:
    """Return the layout of the weights of `source` in `target` with which both compute the same, empty if none, and the least
    distance.

    `weights` are random values for the source; the target's may be on the meta device.
    """
    expected = response(in_float32(source, lambda name, parameter: weights[name]), x)
    wanted = {name: parameter.shape for name, parameter in target.named_parameters()}
    nearest = float("inf")
    for layouts in itertools.islice(combinations(wanted, weights), MOST):
        made = {name: layout.made_of(weights, wanted[name]) for name, layout in layouts.items()}
        found = response(in_float32(target, lambda name, parameter, made=made: made[name]), x)  # type: ignore[misc]
        gap = distance(found, expected)
        if gap <= CLOSE:
            return layouts, gap
        nearest = min(nearest, gap)
    return {}, nearest


# ── Architectures ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────


IDENTITY = ("architectures", "model_type", "transformers_version", "_name_or_path", "quantization_config", "auto_map", "dtype")
DEPTH = "num_hidden_layers"  # transformers' name in every config, through `attribute_map`
SWEEPS = 3
Shapes = collections.Counter[tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Wanted:
    """The parameters that a native form must have, by shape, and the values that its config's entries may need."""

    around: Shapes  # outside the mixtures
    experts: int  # E
    elements: int  # of the stacked weights of all mixtures
    routers: Shapes  # of the other weights of all mixtures
    values: tuple[int, ...]  # numbers of the mixture: E, hidden units, K
    depths: tuple[int, ...]  # of the layers with a mixture
    layers: int

    def cost(self, model: nn.Module) -> int:
        """Return by how many elements the parameters of `model` differ from these."""
        shapes = shapes_of(model)
        stacked = sum(elements(shape) * count for shape, count in shapes.items() if self.is_stacked(shape))
        others = Shapes({shape: count for shape, count in shapes.items() if not self.is_stacked(shape)})
        wanted = self.around + self.routers
        gap = sum(elements(shape) * count for shape, count in ((wanted - others) + (others - wanted)).items())
        return gap + abs(stacked - self.elements)

    def is_stacked(self, shape: Sequence[int]) -> bool:
        return len(shape) == 3 and shape[0] == self.experts


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A class of transformers, and the config entries that give it the size of a given model."""

    kind: type[PreTrainedModel]
    fields: Mapping[str, Any]
    own: tuple[str, ...]  # the entries that the given model's config does not have
    inert: tuple[str, ...] = ()  # those of them that change no parameter

    @property
    def name(self) -> str:
        return str(self.config_kind.model_type)

    @property
    def config_kind(self) -> type[PreTrainedConfig]:
        assert self.kind.config_class is not None
        return self.kind.config_class

    def skeleton(self, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
        """Return the model with these entries changed, without weights. Raises any error of the architecture's code."""
        with quiet():
            return skeleton_of(self.kind, self.config_kind(**{**self.fields, **changes}), dtype)

    def with_fields(self, **changes: Any) -> Architecture:
        return dataclasses.replace(self, fields={**self.fields, **changes})


def architectures_like(model: PreTrainedModel, only: str | None = None) -> Iterator[Architecture]:
    """Yield the architectures for the same task, with the entries that their configs share with the model's."""
    names: dict[str, None] = {}
    for mapping in vars(modeling_auto).values():
        if type(mapping) is collections.OrderedDict and type(model).__name__ in mapping.values():  # not those that import classes
            names |= dict.fromkeys(name for name in mapping.values() if isinstance(name, str))
    for name in names:
        kind = getattr(transformers, name, None)
        if not isinstance(kind, type) or not issubclass(kind, PreTrainedModel) or kind.config_class is None:
            continue
        if only is not None and kind.config_class.model_type != only:
            continue
        try:
            with quiet():
                default = kind.config_class().to_dict()
        except Exception:  # a config without defaults
            continue
        shared = shared_entries(model.config, default)
        yield Architecture(kind, shared, tuple(key for key in default if key not in shared and key not in IDENTITY))


def shared_entries(config: PreTrainedConfig, keys: Iterable[str]) -> dict[str, Any]:
    """Return the entries of the config that are among `keys`, also under other names that the config has for them."""
    plain = config.to_dict()
    return {
        key: plain[key] if key in plain else getattr(config, key) for key in keys if key not in IDENTITY and hasattr(config, key)
    }


def of_depth(config: Mapping[str, Any], kind: type[PreTrainedConfig], depth: int) -> dict[str, Any]:
    """Return the config's entries for its first layers only; a list with an entry per layer is shortened."""
    key = kind.attribute_map.get(DEPTH, DEPTH)
    whole = config.get(key)
    cut = {name: value[:depth] if isinstance(value, list) and len(value) == whole else value for name, value in config.items()}
    return {**cut, key: depth} if key in config else cut


@dataclasses.dataclass(frozen=True)
class Sized:
    """An architecture with the entries for which its parameters are closest to the wanted ones."""

    architecture: Architecture
    why: str = ""  # why it does not fit; "" if every parameter outside the mixtures is there and the experts have the wanted size
    has_stacks: bool = False  # in one of the models that were built


def sized(architecture: Architecture, wanted: Wanted) -> Sized:
    """Return the architecture in the wanted size: its entries are changed one by one until none brings it closer."""
    try:
        model = architecture.skeleton()
    except Exception as error:  # of any type: the architecture's code may fail for another model's sizes
        return Sized(architecture, f"it cannot be built of that size: {first_line(error)}")
    stacks = has_stacks(model)
    absent = absent_weights(model, wanted)
    if absent and len(wanted.depths) < wanted.layers:  # they may belong to layers without a mixture
        for key, value in all_trials(architecture, model, wanted):
            mixed = built(architecture.with_fields(**{key: value}))
            if mixed is not None and depths_with_stacks(mixed) == wanted.depths and not absent_weights(mixed, wanted):
                architecture, model, absent, stacks = architecture.with_fields(**{key: value}), mixed, [], True
                break
    if absent:
        return Sized(architecture, f"it has no weight {described(absent[0])} outside its mixtures", stacks)
    config = {**model.config.to_dict(), **architecture.fields}
    least, inert = wanted.cost(model), dict.fromkeys(architecture.own)
    in_vain = 0  # entries in a row that brought it no closer: once these are all, another sweep would repeat them
    for _ in range(SWEEPS):
        for key in architecture.own:
            in_vain += 1
            for value in trials(config.get(key), wanted):
                if value == architecture.fields.get(key, config.get(key)):
                    continue
                changed = built(architecture.with_fields(**{key: value}))
                if changed is None:
                    continue
                if shapes_of(changed) == shapes_of(model):
                    if key in inert and type(value) is int and value > 1:
                        break  # it changes no parameter, whatever its value
                    continue
                inert.pop(key, None)
                stacks = stacks or has_stacks(changed)
                if has_stacks(model) and not has_stacks(changed):
                    continue  # a model without mixtures is closer only while the experts are too many or too large
                if wanted.cost(changed) < least:
                    least, model, architecture = wanted.cost(changed), changed, architecture.with_fields(**{key: value})
                    in_vain = 0
            if in_vain >= len(architecture.own):
                break
        if not stacks:
            return Sized(architecture, "it has no mixtures")
        if least == 0 or in_vain >= len(architecture.own):
            break
    return Sized(dataclasses.replace(architecture, inert=tuple(key for key in inert if key not in architecture.fields)), "", stacks)


def absent_weights(model: nn.Module, wanted: Wanted) -> list[Sequence[int]]:
    """Return the shapes of wanted weights outside the mixtures that no parameter of the model has."""
    return [shape for shape in wanted.around - shapes_of(model) if len(shape) > 1]


def all_trials(architecture: Architecture, model: PreTrainedModel, wanted: Wanted) -> Iterator[tuple[str, Any]]:
    """Yield each of the architecture's own entries with each value to be tried."""
    for key in architecture.own:
        yield from ((key, value) for value in trials(model.config.to_dict().get(key), wanted))


def depths_with_stacks(model: nn.Module) -> tuple[int, ...]:
    """Return the depths of the layers with experts' weights: the first number in the weights' names."""
    stacked = (name for name, parameter in model.named_parameters() if parameter.dim() == 3 and min(parameter.shape) > 1)
    return tuple(sorted({int(part) for name in stacked if (part := next(filter(str.isdigit, name.split(".")), None))}))


def has_stacks(model: nn.Module) -> bool:
    """Return whether two parameters can be weights of the same experts: the input size of one is the output size of the other."""
    stacked = [shape for shape in shapes_of(model) if len(shape) == 3 and min(shape) > 1]
    return any(a[0] == b[0] and a[1] == b[2] for a, b in itertools.product(stacked, repeat=2))


def built(architecture: Architecture) -> PreTrainedModel | None:
    """Return the model without weights; None if the entries are inconsistent, or give it empty weights, which few programs read."""
    try:
        model = architecture.skeleton()
    except Exception:  # of any type, from the architecture's code
        return None
    return None if any(not parameter.numel() for parameter in model.parameters()) else model


def trials(value: Any, wanted: Wanted) -> list[Any]:
    """Return the values to try for an entry, by the type of its default, which comes last."""
    if isinstance(value, bool):
        return [not value, value]
    if isinstance(value, int) or value is None:
        return list(dict.fromkeys((*wanted.values, 1, 0, None, value)))
    if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        kinds = list(dict.fromkeys(value))
        b = [[kind if depth in wanted.depths else two for depth in range(wanted.layers)] for kind in kinds for two in kinds]
        return [list(fromkey) for fromkey in dict.fromkeys((*map(tuple, b), tuple(value)))]
    if isinstance(value, list):
        return [[depth for depth in range(wanted.layers) if depth not in wanted.depths], list(wanted.depths), value]
    return []


def shapes_of(model: nn.Module) -> Shapes:
    """Return the number of parameters of each shape; tied ones count once."""
    return Shapes(tuple(parameter.shape) for parameter in model.parameters())


def elements(shape: Sequence[int]) -> int:
    count = 1
    for extent in shape:
        count *= extent
    return count


def described(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape)) or "of one number"


def mixture_paths(model: nn.Module, wanted: Wanted) -> list[str]:
    """Return the smallest modules with stacked weights and a router; empty if some stacked weights have no router."""
    routers = set(wanted.routers)
    owners: dict[str, None] = {}
    for name, parameter in model.named_parameters():
        if not wanted.is_stacked(parameter.shape):
            continue
        path = name.rpartition(".")[0]
        while path and not any(tuple(parameter.shape) in routers for parameter in model.get_submodule(path).parameters()):
            path = path.rpartition(".")[0]
        if not path:
            return []
        owners[path] = None
    return list(owners)


def extra_parameter(model: nn.Module, mixtures: Sequence[str], wanted: Wanted) -> str:
    """Return a description of a shape with too few or too many parameters outside the mixtures; "" if there is none."""
    inside = {id(parameter) for path in mixtures for parameter in model.get_submodule(path).parameters()}
    outside = Shapes(tuple(parameter.shape) for parameter in model.parameters() if id(parameter) not in inside)
    for shape in (*(wanted.around - outside), *(outside - wanted.around)):
        named = [
            name for name, parameter in model.named_parameters() if id(parameter) not in inside and tuple(parameter.shape) == shape
        ]
        count = wanted.around[shape]
        some = f": {first_few(named, 3)}" if len(named) > count else ""
        place = f"outside the mixtures of {plural(wanted.layers, 'layer')}"
        return f"it has {len(named) or 'no'} parameters {described(shape)} {place}, the model {count or 'none'}{some}"
    return ""


def as_text(fields: Mapping[str, Any]) -> str:
    """Return entries of a config as text, `num_experts=4, norm_topk_prob=true`."""
    return ", ".join(f"{key}={json.dumps(value)}" for key, value in fields.items())
