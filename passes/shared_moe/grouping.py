"""The feed-forwards of a stack that become one mixture: even groups by depth, each reduced to its most common form.

With `share_attention` the layers of a group share the first layer's attention matrices; each keeps its norms, positions and cache.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, fx, nn

from retrofit.sdk import Anatomy, Branch, Edit, Layer, NearMiss, Stack, collect_near_miss, unfit
from retrofit.sdk.anatomy import FeedForward, Matrix, Port, weight_and_bias
from retrofit.sdk.data import evaluation_mode

DOWN = "down"  # the name in a mixture of the matrix that writes y


@dataclasses.dataclass(frozen=True)
class Group:
    """Feed-forwards of one stack, all of one form, that become one mixture."""

    sites: tuple[FeedForward, ...]
    chosen: tuple[int, ...] = ()  # the index of the site that each expert copies; empty: spread evenly

    @property
    def name(self) -> str:
        first, last = self.sites[0].name, self.sites[-1].name
        return first if first == last else f"{first} … {last}"

    def sources(self, experts: int) -> list[FeedForward]:
        """Return the feed-forward that each expert copies."""
        return [self.sites[index] for index in self.source_indices(experts)]

    def source_indices(self, experts: int) -> tuple[int, ...]:
        """Return the index of the site that each expert copies: the chosen ones, else spread evenly over the group's depth."""
        return self.chosen or tuple(int((e + 0.5) * len(self.sites) / experts) for e in range(experts))

    def copies(self, experts: int) -> list[int]:
        """Return the experts that copy the same feed-forward as an expert before them."""
        sources = self.sources(experts)
        return [e for e, site in enumerate(sources) if site in sources[:e]]

    def bound_to(self, model: nn.Module) -> Group:
        """Return the same group in `model`, a copy of the group's model."""
        return dataclasses.replace(self, sites=tuple(site.bound_to(model) for site in self.sites))


def group_feed_forwards(sites: Sequence[FeedForward], count: int, model: nn.Module, near_misses: list[NearMiss]) -> list[Group]:
    """Return `count` even groups of the feed-forwards by depth; those of another form than most of their group are near misses."""
    groups: list[Group] = []
    for index in range(count):
        members = sites[index * len(sites) // count : (index + 1) * len(sites) // count]
        functions: list[HiddenFunction] = []
        forms = [form_of(site, model, functions) for site in members]
        common = collections.Counter(forms).most_common(1)[0][0]
        fitting: list[FeedForward] = []
        for site, form in zip(members, forms, strict=True):
            with collect_near_miss(site.name, near_misses):
                check_same_form(form, common)
                fitting.append(site)
        groups.append(Group(tuple(fitting)))
    return groups


def named_matrices(site: FeedForward) -> dict[str, Matrix]:
    """Return the matrices of a feed-forward by their names in a mixture: their roles, numbered if several have the same role."""
    roles = [matrix.role for matrix in site.into]
    names = [role if roles.count(role) == 1 and role != DOWN else f"{role}{index}" for index, role in enumerate(roles)]
    return {**dict(zip(names, site.into, strict=True)), DOWN: site.out}


# ── Form ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclasses.dataclass(frozen=True)
class Form:
    """The properties in which the experts of one mixture must agree."""

    width: int = dataclasses.field(metadata={"words": "width is"})
    units: int = dataclasses.field(metadata={"words": "hidden units are"})
    matrices: tuple[str, ...] = dataclasses.field(metadata={"words": "matrices are"})
    biases: tuple[bool, ...] = dataclasses.field(metadata={"words": "biases are"})
    storage: tuple[tuple[torch.dtype, torch.device], ...] = dataclasses.field(metadata={"words": "type and device is"})
    ports: tuple[Port, ...] = dataclasses.field(metadata={"words": "hidden units' columns are"})
    function: tuple[str, ...] = dataclasses.field(metadata={"words": "hidden function is"})


@dataclasses.dataclass(frozen=True)
class HiddenFunction:
    """The function between the matrices of a feed-forward: its values for fixed arguments, and a text for each step."""

    values: Tensor
    steps: tuple[str, ...]

    def equals(self, other: HiddenFunction) -> bool:
        return self.steps == other.steps or torch.allclose(self.values, other.values, rtol=1e-5, atol=1e-6, equal_nan=True)


def form_of(site: FeedForward, model: nn.Module, functions: list[HiddenFunction]) -> Form:
    """Return the form of a feed-forward. A new hidden function is appended to `functions`, those of its group."""
    matrices = {name: weight_and_bias(matrix, model) for name, matrix in named_matrices(site).items()}
    return Form(
        site.width,
        site.units,
        tuple(matrices),
        tuple(bias is not None for _, bias in matrices.values()),
        tuple((weight.dtype, weight.device) for weight, _ in matrices.values()),
        site.ports,
        function_of(site, functions),
    )


def check_same_form(form: Form, common: Form) -> None:
    """Raise `DoesNotFitError` with the first difference between a feed-forward's form and its group's common one."""
    for field in dataclasses.fields(Form):
        value = getattr(form, field.name)
        if value != getattr(common, field.name):
            raise unfit(f"its {field.metadata['words']} {value}, unlike most of its group")


def function_of(site: FeedForward, functions: list[HiddenFunction]) -> tuple[str, ...]:
    """Return the steps that identify a hidden function: those of the first of `functions` that computes the same, else its own.

    A function with weights is identified only by its steps, because recipes are replayed on models whose weights have no values.
    """
    _, values = evaluate(site)
    if values is None:
        return steps_of(site)
    function = HiddenFunction(values, steps_of(site))
    functions.append(function)
    return next(other.steps for other in functions if function.equals(other))


def evaluate(site: FeedForward) -> tuple[list[Tensor], Tensor | None]:
    """Return fixed arguments of a hidden function, and its values for them; None if it has weights."""
    z = torch.linspace(-6, 6, 97, device="cpu", dtype=torch.float32)  # a prime number: rolled arguments meet in different pairs
    arguments = [z.roll(7 * port) for port in range(len(site.ports))]
    if any(True for _ in (*site.hidden.parameters(), *site.hidden.buffers())):
        return arguments, None
    with evaluation_mode(site.hidden):
        return arguments, site.hidden(*arguments)


def activation_name(site: FeedForward) -> str:
    """Return transformers' name of the hidden function, alone or times the second argument; "" if there is none."""
    from transformers.activations import ACT2FN  # deferred: slow to import

    arguments, values = evaluate(site)
    if len(arguments) > 2 or values is None:
        return ""
    found = values.to(torch.float32)  # T5 casts it to the dtype of the next weight
    for name in ACT2FN:
        try:
            expected = ACT2FN[name](arguments[0])
        except Exception:  # some need arguments
            continue
        if torch.allclose(found, expected * arguments[1] if len(arguments) == 2 else expected, rtol=1e-5, atol=1e-6):
            return str(name)
    return ""


def steps_of(site: FeedForward) -> tuple[str, ...]:
    """Return a text for each step of the hidden function."""
    nodes = list(site.hidden.graph.nodes)
    position = {node: index for index, node in enumerate(nodes)}
    return tuple(
        f"{operation(node, site.hidden)} {fx.node.map_arg((node.args, dict(node.kwargs)), position.get)}" for node in nodes
    )


def operation(node: fx.Node, hidden: fx.GraphModule) -> str:
    """Return the operation of a node, or the module that it calls, as text."""
    if node.op == "call_module":
        return str(hidden.get_submodule(str(node.target)))
    return str(node.target) if node.op == "call_function" else node.op


@dataclasses.dataclass(frozen=True)
class SharedAttention:
    """An attention whose matrices and biases are replaced by those of the layer `first`."""

    name: str
    first: str
    replacements: dict[str, str]  # parameter name → name of the parameter that replaces it


def plan_sharing(group: Group, stack: Stack, anatomy: Anatomy, near_misses: list[NearMiss]) -> list[SharedAttention]:
    """Return the attentions of a group that share the matrices of the group's first layer."""
    shared: list[SharedAttention] = []
    paths = [f"{site.path}." for site in group.sites]
    layers = [layer for layer in stack.layers if layer.name and any(path.startswith(f"{layer.name}.") for path in paths)]
    if not layers:
        near_misses.append(NearMiss(group.name, "no module owns its layers, so their attentions are unknown", code="no-owner"))
        return []
    first = layers[0]
    for layer in layers[1:]:
        for source, attention in itertools.zip_longest(first.attentions, layer.attentions):
            with collect_near_miss(attention.name if attention else layer.name, near_misses):
                replacements = pair_parameters(first, source, layer, attention, anatomy)
                if attention is not None and replacements:
                    shared.append(SharedAttention(attention.name, first.name, replacements))
    return shared


def pair_parameters(first: Layer, source: Branch | None, layer: Layer, branch: Branch | None, anatomy: Anatomy) -> dict[str, str]:
    """Return, for the parameters of `branch`, those of `source` that replace them. Raises `DoesNotFitError` if the two differ."""
    if source is None or branch is None or source.role != branch.role:
        raise unfit(f"{first.name}, whose attentions it would share, has other attentions")
    common = parameter_names(source, anatomy) & parameter_names(branch, anatomy)
    new, old = own_shapes(source, first, common, anatomy), own_shapes(branch, layer, common, anatomy)
    if new != old:
        raise unfit(f"its matrices differ in name or size from those of {first.name}, which it would share")
    return {f"{layer.name}.{name}": f"{first.name}.{name}" for name in old}


def parameter_names(branch: Branch, anatomy: Anatomy) -> set[str]:
    """Return the names of the parameters that a branch reads."""
    return set(anatomy.flow.parameters_of(anatomy.flow.between(anatomy.node(branch.source), anatomy.node(branch.output))))


def own_shapes(branch: Branch, layer: Layer, common: set[str], anatomy: Anatomy) -> dict[str, torch.Size]:
    """Return the shapes of an attention's matrices and their biases, by name inside the layer, without the `common` ones."""
    prefix = f"{layer.name}."
    names = (name for name in parameter_names(branch, anatomy) - common if name.startswith(prefix))
    shapes = {name: anatomy.model.get_parameter(name).shape for name in names}
    owners = {name.rpartition(".")[0] for name, size in shapes.items() if len(size) > 1}
    return {name.removeprefix(prefix): size for name, size in shapes.items() if name.rpartition(".")[0] in owners}


def share(attention: SharedAttention, edit: Edit) -> None:
    """Replace the parameters in all modules that hold them."""
    for own, other in attention.replacements.items():
        old, new = edit.model.get_parameter(own), edit.model.get_parameter(other)
        for module in list(edit.model.modules()):
            for name, parameter in list(module._parameters.items()):
                if parameter is old:
                    edit.set_item(module._parameters, name, new)
        edit.drop_parameter(old, f"its layer shares the attention of {attention.first}")
