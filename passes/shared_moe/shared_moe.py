"""Shared MoE (WideNet): the feed-forwards of a group of layers become one mixture of experts; their norms stay their own.

    x'' = Norm_i(x),   x = MoE(x'') + x            one router and E experts for every layer i of the group
    loss = l_main + λ Σ_t l_balance^t              t: every routing, a layer's of a group's mixture

groups=1 is WideNet: one mixture for all layers of a stack. With as many groups as layers (groups=0) and gates that sum to one,
every expert begins as a copy of its layer's feed-forward and the function is the dense model's: sparse upcycling.

Go Wider Instead of Deeper (AAAI 2022), eq. 6 and 8; the mixture itself, eq. 1 to 5, is in experts.py. `reinit` is the partial
re-initialisation of Drop-Upcycling (ICLR 2025).
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, fx, nn

from retrofit.passes.shared_moe.expert_load import expert_load
from retrofit.passes.shared_moe.experts import ExpertMatrices, MixtureOfExperts, MoEBlock
from retrofit.sdk import (
    Anatomy,
    Branch,
    DoesNotFitError,
    Edit,
    FeedForward,
    ForwardWithAuxiliaryLosses,
    Layer,
    Matrix,
    NearMiss,
    Pass,
    Rearranged,
    Rewrite,
    Site,
    SpecError,
    Stack,
    evaluation_mode,
    feed_forwards,
    install,
    option,
    selected_depths,
    weight_and_bias,
    weight_out_first,
)

DOWN = "down"  # what the matrix that writes y is called in a mixture

# ── The pass ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclasses.dataclass(frozen=True)
class SharedMoE(Pass):
    """Replace the feed-forwards of a group of layers by one mixture of experts."""

    name: ClassVar[str] = "shared-moe"
    summary: ClassVar[str] = "replace the FFNs of groups of layers by one mixture of experts each (WideNet); norms stay their own"
    paper: ClassVar[str] = "Go Wider Instead of Deeper, eq. 1 to 8"
    calibrates: ClassVar[bool] = True

    experts: int = option(4, "E, the experts of a mixture", minimum=1)
    k: int = option(2, "K, the experts a token is sent to", minimum=1)
    groups: int = option(1, "mixtures in each stack: 1 is WideNet; 0, one a layer, is sparse upcycling", minimum=0)
    share_attention: bool = option(False, "the layers of a group have one attention, too")
    renormalize: bool = option(True, "the K gates of a token sum to one; the paper leaves them as they are")
    capacity: float | None = option(
        1.2, "C: in training an expert keeps ⌈C·K·tokens/E⌉ tokens of a batch (none: all of them)", minimum=0
    )
    balance: float = option(0.01, "λ, the weight of the balance loss", minimum=0)
    noise: float | None = option(None, "standard deviation of the noise on the router's logits in training (none: 1/E)", minimum=0)
    reinit: float = option(0.0, "part of the hidden units of an expert that is a copy that starts anew", minimum=0)
    layers: str = option("all", "depths whose FFNs are replaced, e.g. 0-5+8")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.k > self.experts:
            raise SpecError(
                f"shared-moe: k={self.k} experts for each token of experts={self.experts}", remedy="choose k up to experts"
            )
        if self.k == 1 and self.renormalize and not self.balance:
            raise SpecError(
                "shared-moe: with k=1, gates that sum to one and no balance loss the router learns nothing",
                why="the one gate is 1 whatever the router says",
                remedy="give balance > 0, or renormalize=false",
            )
        if self.reinit > 1:
            raise SpecError(f"shared-moe: reinit={self.reinit} is above 1", remedy="give the part of the units, 0 to 1")
        if self.capacity == 0:
            raise SpecError("shared-moe: with capacity=0 no expert keeps a token", remedy="give 1 or more, or none")

    @property
    def exact(self) -> bool:
        """As far as the options say: with as many groups as a model has layers `groups=L` is exact too, and the rewrite says so."""
        return self.groups == 0 and self.sums_to_one and not self.reinit

    @property
    def sums_to_one(self) -> bool:
        """Whether the gates of a token do: made to, or because there is one for every expert."""
        return self.renormalize or self.k == self.experts

    def rewrite(self, anatomy: Anatomy, edit: Edit) -> Rewrite:
        return Application(self, anatomy, edit).run()


@dataclasses.dataclass(frozen=True)
class Group:
    """Layers of one stack whose feed-forwards, all of one form, become one mixture."""

    stack: Stack
    sites: tuple[FeedForward, ...]

    @property
    def name(self) -> str:
        first, last = self.sites[0].name, self.sites[-1].name
        return first if first == last else f"{first} … {last}"

    def sources(self, experts: int) -> list[FeedForward]:
        """The feed-forward that each expert is taken from: spread evenly over the depth of the group."""
        return [self.sites[int((e + 0.5) * len(self.sites) / experts)] for e in range(experts)]

    def layers(self) -> list[Layer]:
        """The layers that the feed-forwards belong to."""
        paths = [f"{site.path}." for site in self.sites]
        return [layer for layer in self.stack.layers if layer.name and any(path.startswith(f"{layer.name}.") for path in paths)]


class Application:
    """One rewrite of one model."""

    def __init__(self, shared: SharedMoE, anatomy: Anatomy, edit: Edit) -> None:
        self.shared, self.anatomy, self.edit = shared, anatomy, edit
        self.model = anatomy.model
        self.flow = anatomy.flow
        self.nodes = self.flow.named
        self.sites: list[Site] = []
        self.skipped: list[NearMiss] = []
        self.terms: list[tuple[str, int]] = []  # of the parameter formula
        self.seen: list[Group] = []
        self.alike: list[MixtureOfExperts] = []  # whose experts are equal: gates that sum to one do not matter until they differ
        self.placed: set[int] = set()  # ids of dense parameters that are part of an expert
        self.notes: list[str] = []
        self.exact = shared.sums_to_one

    def run(self) -> Rewrite:
        groups = [group for stack in self.anatomy.stacks for group in self.groups(stack)]
        if not groups:
            raise DoesNotFitError(
                "shared-moe: no feed-forward of the model can become experts",
                why="; ".join(dict.fromkeys(f"{miss.name}: {miss.why}" for miss in self.skipped[:4])) or "it has none",
                remedy="retrofit inspect shows what was found in the model",
            )
        if self.shared.groups > max(len(stack.layers) for stack in self.anatomy.stacks):
            raise DoesNotFitError(
                f"shared-moe: groups={self.shared.groups}, and no stack has as many layers",
                remedy="groups=0 gives every layer a mixture of its own",
            )
        for group in groups:
            self.replace(group)
            if self.shared.share_attention:
                self.share_attention(group)
        if self.shared.balance:
            self.balance()
        late = [f"{path}.router.weight" for path, module in self.model.named_modules() if module in self.alike]
        seen = None if self.edit.calibration is None else expert_load(self.model, self.edit.calibration)
        return Rewrite(
            self.shared.spec(),
            self.exact,
            tuple(self.sites),
            tuple(self.skipped),
            new_parameters=sum(count for _, count in self.terms),
            formula=" + ".join(f"{label} = {count:,}" for label, count in self.terms),
            second_step=tuple(late),
            notes=(*self.notes, *(() if seen is None else seen.lines())),
        )

    # Where experts come from.

    def groups(self, stack: Stack) -> Iterator[Group]:
        """The feed-forwards of the stack, in order of depth, divided evenly; of a group those of its most common form."""
        chosen = selected_depths(self.shared.layers, len(stack.layers), "shared-moe")
        found, missed = feed_forwards(dataclasses.replace(self.anatomy, stacks=(stack,)), chosen)
        self.skipped.extend(missed)
        taken = {site.path for group in self.seen for site in group.sites}
        sites = [site for site in found if site.path not in taken]
        count = min(self.shared.groups or len(sites), len(sites))
        for index in range(count):
            members = sites[index * len(sites) // count : (index + 1) * len(sites) // count]
            functions: list[tuple[Tensor, tuple[str, ...]]] = []
            forms = [form(site, self.model, functions) for site in members]
            common = collections.Counter(forms).most_common(1)[0][0]
            for site, own in zip(members, forms, strict=True):
                if own != common:
                    self.skipped.append(NearMiss(site.name, f"{difference(own, common)}, unlike most of its group"))
            group = Group(stack, tuple(site for site, own in zip(members, forms, strict=True) if own == common))
            self.seen.append(group)
            yield group

    def replace(self, group: Group) -> None:
        """One mixture stands in place of the feed-forwards of the group, and where each of their weights went is accounted for."""
        shared, sources = self.shared, group.sources(self.shared.experts)
        matrices = [matrices_of(site) for site in sources]
        into = {name: self.stacked([one[name] for one in matrices]) for name in matrices[0] if name != DOWN}
        moe = MixtureOfExperts(
            into,
            group.sites[0].ports,
            self.stacked([one[DOWN] for one in matrices]),
            k=shared.k,
            renormalize=shared.renormalize,
            capacity=shared.capacity,
            balance=shared.balance,
            noise=1 / shared.experts if shared.noise is None else shared.noise,
        )
        copies = [e for e, site in enumerate(sources) if site in sources[:e]]
        dense = 0
        for e in sorted(set(range(shared.experts)) - set(copies)):
            dense += self.place(sources[e], e, moe)
        for e in copies:
            self.renew(moe, e)
        for site in group.sites:
            self.drop(site, f"its layer uses the mixture of {group.name}, whose experts are taken from other layers")
            block = MoEBlock(site, self.model.get_submodule(site.path), moe)
            install(site, block, self.edit)
            if site.dropout:
                self.notes.append(f"{site.path}: {site.dropout_note}")
            what = f"E={shared.experts} experts" + (f", those of {group.name}" if len(group.sites) > 1 else "")
            self.sites.append(Site(site.path, what))
        router = moe.router.weight.numel()
        self.terms.append((f"{group.name}: router E·d", router))
        rest = sum(parameter.numel() for parameter in moe.parameters()) - router - dense
        if rest:
            self.terms.append((f"{len(copies)} copies of its feed-forwards", rest))
        self.exact &= len(group.sites) == 1 and not (shared.reinit and copies)
        if len(copies) == shared.experts - 1:
            self.alike.append(moe)

    def stacked(self, matrices: Sequence[Matrix]) -> ExpertMatrices:
        """One matrix of each expert."""
        weights, biases = zip(*(weight_and_bias(matrix, self.model) for matrix in matrices), strict=True)
        trains = any(weight.requires_grad for weight in weights)
        weight = nn.Parameter(torch.stack([weight_out_first(matrix, self.model) for matrix in matrices]), requires_grad=trains)
        if biases[0] is None:
            return ExpertMatrices(weight, None)
        bias = nn.Parameter(torch.stack([bias.detach() for bias in biases]), requires_grad=trains)
        return ExpertMatrices(weight, bias)

    def place(self, site: FeedForward, e: int, moe: MixtureOfExperts) -> int:
        """The dense weights of `site` are accounted for as expert `e`; returns how many elements they have."""
        count = 0
        for name, matrix in matrices_of(site).items():
            stacked: Any = moe.get_submodule(name)
            weight, bias = weight_and_bias(matrix, self.model)
            layouts = ((weight, stacked.weight, not matrix.out_first), (bias, stacked.bias, False))
            for old, new, transposed in layouts:
                if old is not None and id(old) not in self.placed:
                    self.placed.add(id(old))
                    layout = Rearranged((e,), transposed=transposed)
                    self.edit.rearrange_parameter(old, new, moe, layout, f"it is expert {e} of a mixture")
                    count += old.numel()
        return count

    def drop(self, site: FeedForward, why: str) -> None:
        """What `site` has and no expert holds is accounted for as dropped."""
        for matrix in matrices_of(site).values():
            for old in weight_and_bias(matrix, self.model):
                if old is not None and id(old) not in self.placed:
                    self.edit.drop_parameter(old, why)

    @torch.no_grad()
    def renew(self, moe: MixtureOfExperts, e: int) -> None:
        """A part of the hidden units of expert `e` has new weights, drawn with the mean and spread of the old ones."""
        count = round(self.shared.reinit * moe.units)
        down = moe.down.weight[e]
        if not count or down.is_meta:
            return
        units = torch.randperm(moe.units, device=down.device)[:count]
        down[:, units] = like(down, (moe.width, count))
        for port in moe.ports:
            matrices: Any = moe.get_submodule(moe.into[port.matrix])
            weight = matrices.weight[e]
            weight[port.columns(units)] = like(weight, (count, moe.width))

    # Attention.

    def share_attention(self, group: Group) -> None:
        """Every layer of the group multiplies by the attention matrices of its first; norms, positions and caches stay its own."""
        layers = group.layers()
        if not layers:
            self.skipped.append(NearMiss(group.name, "no module owns its layers, whose attentions could be told apart"))
            return
        first = layers[0]
        for other in layers[1:]:
            for ours, theirs in itertools.zip_longest(first.attentions, other.attentions):
                why = self.tie(first, ours, other, theirs)
                if why:
                    self.skipped.append(NearMiss(theirs.name if theirs else other.name, why))

    def tie(self, first: Layer, ours: Branch | None, other: Layer, theirs: Branch | None) -> str:
        """The matrices of the branch `theirs` are those of `ours`; or why not."""
        if ours is None or theirs is None or ours.role != theirs.role:
            return f"{first.name} has not the same attentions, which it would share"
        common = self.read_by(ours) & self.read_by(theirs)
        here, there = self.own_matrices(ours, first, common), self.own_matrices(theirs, other, common)
        if {name: one.shape for name, one in here.items()} != {name: one.shape for name, one in there.items()}:
            return f"its matrices are not those of {first.name} in name and size, which it would share"
        for name, old in there.items():
            for owner in list(self.model.modules()):
                for attribute, parameter in list(owner._parameters.items()):
                    if parameter is old:
                        self.edit.set_item(owner._parameters, attribute, here[name])
            self.edit.drop_parameter(old, f"its layer shares the attention of {first.name}")
            self.exact = False
        if there:
            self.sites.append(Site(theirs.name, f"shares the attention matrices of {first.name}"))
        return ""

    def read_by(self, branch: Branch) -> set[str]:
        """The names of the parameters that a branch reads."""
        return set(self.flow.parameters_of(self.flow.between(self.nodes[branch.source], self.nodes[branch.output])))

    def own_matrices(self, branch: Branch, layer: Layer, common: set[str]) -> dict[str, nn.Parameter]:
        """The matrices of an attention and their biases, by name inside the layer, less those that are common already."""
        prefix = f"{layer.name}."
        found = {name: self.model.get_parameter(name) for name in self.read_by(branch) - common if name.startswith(prefix)}
        owners = {name.rpartition(".")[0] for name, parameter in found.items() if parameter.dim() > 1}
        return {name.removeprefix(prefix): one for name, one in found.items() if name.rpartition(".")[0] in owners}

    # What the model is told.

    def balance(self) -> None:
        """The model adds the balance losses to its own."""
        if not isinstance(vars(self.model).get("forward"), ForwardWithAuxiliaryLosses):
            self.edit.set_attribute(self.model, "forward", ForwardWithAuxiliaryLosses(self.model))


def matrices_of(site: FeedForward) -> dict[str, Matrix]:
    """The matrices of a feed-forward by their role, numbered where two have the same."""
    roles = [matrix.role for matrix in site.into]
    names = [role if roles.count(role) == 1 and role != DOWN else f"{role}{index}" for index, role in enumerate(roles)]
    return {**dict(zip(names, site.into, strict=True)), DOWN: site.out}


def like(weight: Tensor, shape: Sequence[int]) -> Tensor:
    """Noise with the mean and spread of `weight`."""
    values = weight.float()
    return (values.mean() + values.std() * torch.randn(*shape, device=weight.device)).to(weight.dtype)


Form = tuple[tuple[str, Any], ...]


def form(site: FeedForward, model: nn.Module, functions: list[tuple[Tensor, tuple[str, ...]]]) -> Form:
    """What feed-forwards must have in common to be experts of one mixture, each with its name.

    `functions` are the hidden functions seen so far: values and steps.
    """
    matrices = {name: weight_and_bias(matrix, model) for name, matrix in matrices_of(site).items()}
    return (
        ("width", site.width),
        ("hidden units", site.units),
        ("matrices", tuple(matrices)),
        ("biases", tuple(bias is not None for _, bias in matrices.values())),
        ("type and device", tuple((weight.dtype, weight.device) for weight, _ in matrices.values())),
        ("hidden units' places", site.ports),
        ("hidden function", function(site, functions)),
    )


def function(site: FeedForward, known: list[tuple[Tensor, tuple[str, ...]]]) -> tuple[str, ...]:
    """The hidden function, one text a step: that of the first of those `known` that gives the same, to which it is added.

    One that holds weights is known by its steps alone: a recipe is replayed where these have no values.
    """
    own = steps(site)
    if any(True for _ in (*site.hidden.parameters(), *site.hidden.buffers())):
        return own
    z = torch.linspace(-6, 6, 97)  # a prime number of places: those of the ports fall on other ones each
    with evaluation_mode(site.hidden):
        values = site.hidden(*(z.roll(7 * port) for port in range(len(site.ports))))
    for other, text in known:
        if text == own or torch.allclose(other, values, rtol=1e-5, atol=1e-6, equal_nan=True):
            return text
    known.append((values, own))
    return own


def steps(site: FeedForward) -> tuple[str, ...]:
    """The hidden function, one text a step."""
    nodes = list(site.hidden.graph.nodes)
    position = {node: index for index, node in enumerate(nodes)}
    return tuple(f"{step_of(node, site.hidden)} {fx.node.map_arg((node.args, dict(node.kwargs)), position.get)}" for node in nodes)


def step_of(node: fx.Node, hidden: fx.GraphModule) -> str:
    """What a node does: its operation, or the module that it calls."""
    if node.op == "call_module":
        return str(hidden.get_submodule(str(node.target)))
    return str(node.target) if node.op == "call_function" else node.op


def difference(own: Form, common: Form) -> str:
    """In what the first form is not the other."""
    name, value = next((name, value) for (name, value), (_, other) in zip(own, common, strict=True) if value != other)
    return f"its {name} {'is' if name in ('width', 'hidden function', 'type and device') else 'are'} {value}"
