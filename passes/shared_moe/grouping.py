"""Which feed-forwards of a stack become one mixture: even groups by depth, and in each group those of its most common form."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor, fx, nn

from retrofit.sdk import DoesNotFitError, FeedForward, Matrix, NearMiss, Port, collect_near_miss, evaluation_mode, weight_and_bias

DOWN = "down"  # the name in a mixture of the matrix that writes y


@dataclasses.dataclass(frozen=True)
class Group:
    """Feed-forwards of one stack, all of one form, that become one mixture."""

    sites: tuple[FeedForward, ...]
    chosen: tuple[int, ...] = ()  # of the sites, the one that each expert is taken from; empty: spread evenly

    @property
    def name(self) -> str:
        first, last = self.sites[0].name, self.sites[-1].name
        return first if first == last else f"{first} … {last}"

    def sources(self, experts: int) -> list[FeedForward]:
        """The feed-forward that each expert is taken from."""
        return [self.sites[index] for index in self.source_indices(experts)]

    def source_indices(self, experts: int) -> tuple[int, ...]:
        """Of the sites, the one that each expert is taken from: the chosen ones, else spread evenly over the depth of the group."""
        return self.chosen or tuple(int((e + 0.5) * len(self.sites) / experts) for e in range(experts))

    def copies(self, experts: int) -> list[int]:
        """The experts that are taken from the same feed-forward as an expert before them."""
        sources = self.sources(experts)
        return [e for e, site in enumerate(sources) if site in sources[:e]]

    def bound_to(self, model: nn.Module) -> Group:
        """The same group in `model`, a copy of the one it was found in."""
        return dataclasses.replace(self, sites=tuple(site.bound_to(model) for site in self.sites))


def group_feed_forwards(sites: Sequence[FeedForward], count: int, model: nn.Module, near_misses: list[NearMiss]) -> list[Group]:
    """`count` even groups of the feed-forwards in order of depth; those of another form than most of their group are left out."""
    groups: list[Group] = []
    for index in range(count):
        members = sites[index * len(sites) // count : (index + 1) * len(sites) // count]
        functions: list[HiddenFunction] = []
        forms = [form_of(site, model, functions) for site in members]
        common = collections.Counter(forms).most_common(1)[0][0]
        fitting: list[FeedForward] = []
        for site, form in zip(members, forms, strict=True):
            with collect_near_miss(site.name, near_misses):
                check_same_form(site, form, common)
                fitting.append(site)
        groups.append(Group(tuple(fitting)))
    return groups


def named_matrices(site: FeedForward) -> dict[str, Matrix]:
    """The matrices of a feed-forward by the names they have in a mixture: their roles, numbered where two have the same."""
    roles = [matrix.role for matrix in site.into]
    names = [role if roles.count(role) == 1 and role != DOWN else f"{role}{index}" for index, role in enumerate(roles)]
    return {**dict(zip(names, site.into, strict=True)), DOWN: site.out}


# ── Form ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclasses.dataclass(frozen=True)
class Form:
    """What feed-forwards must have in common to be experts of one mixture."""

    width: int = dataclasses.field(metadata={"words": "width is"})
    units: int = dataclasses.field(metadata={"words": "hidden units are"})
    matrices: tuple[str, ...] = dataclasses.field(metadata={"words": "matrices are"})
    biases: tuple[bool, ...] = dataclasses.field(metadata={"words": "biases are"})
    storage: tuple[tuple[torch.dtype, torch.device], ...] = dataclasses.field(metadata={"words": "type and device is"})
    ports: tuple[Port, ...] = dataclasses.field(metadata={"words": "hidden units' columns are"})
    function: tuple[str, ...] = dataclasses.field(metadata={"words": "hidden function is"})


@dataclasses.dataclass(frozen=True)
class HiddenFunction:
    """The function between the matrices of a feed-forward: its values on fixed arguments, and a text for each step."""

    values: Tensor
    steps: tuple[str, ...]

    def equals(self, other: HiddenFunction) -> bool:
        return self.steps == other.steps or torch.allclose(self.values, other.values, rtol=1e-5, atol=1e-6, equal_nan=True)


def form_of(site: FeedForward, model: nn.Module, functions: list[HiddenFunction]) -> Form:
    """The form of a feed-forward; `functions` are the hidden functions of its group so far, to which a new one is appended."""
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


def check_same_form(site: FeedForward, form: Form, common: Form) -> None:
    """Raises `DoesNotFitError` with the first difference between a feed-forward's form and the common one of its group."""
    for field in dataclasses.fields(Form):
        value = getattr(form, field.name)
        if value != getattr(common, field.name):
            why = f"its {field.metadata['words']} {value}, unlike most of its group"
            raise DoesNotFitError(f"the feed-forward {site.name} cannot share a mixture", why=why)


def function_of(site: FeedForward, functions: list[HiddenFunction]) -> tuple[str, ...]:
    """The steps that identify a hidden function: those of the first of `functions` that computes the same, else its own.

    One that holds weights is identified by its steps alone: a recipe is replayed on models whose weights have no values.
    """
    steps = steps_of(site)
    if any(True for _ in (*site.hidden.parameters(), *site.hidden.buffers())):
        return steps
    z = torch.linspace(-6, 6, 97)  # a prime length: shifted for each port, the arguments meet in different pairs
    with evaluation_mode(site.hidden):
        function = HiddenFunction(site.hidden(*(z.roll(7 * port) for port in range(len(site.ports)))), steps)
    for other in functions:
        if function.equals(other):
            return other.steps
    functions.append(function)
    return steps


def steps_of(site: FeedForward) -> tuple[str, ...]:
    """A text for each step of the hidden function."""
    nodes = list(site.hidden.graph.nodes)
    position = {node: index for index, node in enumerate(nodes)}
    return tuple(
        f"{operation(node, site.hidden)} {fx.node.map_arg((node.args, dict(node.kwargs)), position.get)}" for node in nodes
    )


def operation(node: fx.Node, hidden: fx.GraphModule) -> str:
    """The operation of a node as text, or the module that it calls."""
    if node.op == "call_module":
        return str(hidden.get_submodule(str(node.target)))
    return str(node.target) if node.op == "call_function" else node.op
