"""The products with weights that are masked, found in the data flow of a model: each site is a module, with its weights."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from torch import fx, nn

from retrofit.passes.activation_sparsity.masked_products import MaskedCode, MaskedProjection
from retrofit.sdk import (
    Anatomy,
    Branch,
    DoesNotFitError,
    ModuleReference,
    NearMiss,
    Pass,
    Remedy,
    Site,
    collect_near_miss,
    selected_layers,
)
from retrofit.sdk.anatomy import InnerLayers, WeightProduct, modules_around, operand_chain, weight_product
from retrofit.sdk.modules import calls_multi_head
from retrofit.sdk.program import CONVOLUTION, Call, op

ALREADY = "its input is masked already"
WHERE = ("all", "ffn", "attention", "down")


@dataclasses.dataclass(frozen=True)
class MaskedWeight:
    """A weight whose columns are left out where what it multiplies is zero."""

    name: str  # of the parameter
    role: str
    elements: int
    width: int  # of what it multiplies
    stream: str  # the node that is masked; weights that read the same have the same sample


@dataclasses.dataclass(frozen=True)
class MaskedSite(Site):
    """A module that multiplies by weights: one, by which it multiplies its argument at `stream_in`, or several in its own code."""

    weights: tuple[MaskedWeight, ...]
    stream_in: int | str | None  # None: in its own code
    layer: str  # the module of the layer around it, "" where none is

    @property
    def masks(self) -> Iterator[tuple[str, MaskedWeight]]:
        """Yield the path of the mask of each weight, once it is installed."""
        for index, weight in enumerate(self.weights):
            yield f"{self.name}.mask" if self.stream_in is not None else f"{self.name}.masks.{index}", weight


@dataclasses.dataclass(frozen=True)
class Wanted:
    """A weight that the options choose, and the layer it is of."""

    role: str
    layer: str


class ProductSites:
    """Finds the products of one model that can be masked."""

    def __init__(self, anatomy: Anatomy) -> None:
        self.anatomy, self.flow = anatomy, anatomy.flow
        self.products: dict[str, list[WeightProduct]] = {}  # by parameter
        for node in self.flow.computations:
            if (product := weight_product(node, self.flow)) is not None:
                self.products.setdefault(product.parameter, []).append(product)

    def find(self, where: str, layers: str, owner: str) -> tuple[list[MaskedSite], list[NearMiss]]:
        """Return the sites that the options choose, in the order of the layers, and the weights that cannot be masked."""
        wanted, near_misses = self.wanted(where, layers, owner)
        modules: dict[str, list[str]] = {}  # by path: the weights that it multiplies by
        for name in wanted:
            with collect_near_miss(name, near_misses):
                modules.setdefault(self.module_of(name), []).append(name)
        sites = []
        for path, names in modules.items():
            with collect_near_miss(path, near_misses):
                sites.append(self.site(path, names, wanted))
        return sites, near_misses

    def wanted(self, where: str, layers: str, owner: str) -> tuple[dict[str, Wanted], list[NearMiss]]:
        """Return the weights that the options choose, by name, and those that are left alone on purpose."""
        found: dict[str, Wanted] = {}
        near_misses: dict[str, NearMiss] = {}
        inner = InnerLayers(self.flow)
        head = "" if self.anatomy.head is None else self.anatomy.head.parameter
        for stack, depth in selected_layers(self.anatomy, layers, owner):
            layer = stack.layers[depth]
            for branch in inner.inside(layer).branches:
                for projection in branch.projections:
                    if not is_chosen(where, branch, projection.role) or projection.name in (head, ""):
                        continue
                    if projection.role == "router":
                        why = "it chooses the experts of a token: another choice would be another function"
                        near_misses.setdefault(projection.name, NearMiss(projection.name, why, in_any_form=True, code="router"))
                        continue
                    found.setdefault(projection.name, Wanted(projection.role, layer.name))
        return found, list(near_misses.values())

    def module_of(self, name: str) -> str:
        """Return the path of the module whose code multiplies by a weight; raise `DoesNotFitError` where none can be masked."""
        products = self.products.get(name, [])
        paths = {self.flow.call_of(product.node).path for product in products}
        if not products:
            raise unfit(name, "nothing is multiplied by it as it is", "computed")
        if any(op(product.node) in CONVOLUTION for product in products):
            raise unfit(name, "it is the kernel of a convolution", "convolution", in_any_form=True)
        if len(paths) > 1:
            raise unfit(name, f"several modules multiply by it: {', '.join(sorted(paths))}", "no-owner")
        (path,) = paths
        if is_masked(self.anatomy.model, path):
            raise unfit(name, ALREADY, "rewritten", in_any_form=True)
        if made := part_of_another_pass(self.anatomy.model, path):
            raise unfit(name, f"it is part of what another pass has put at {made}", "other-pass", in_any_form=True)
        return path

    def site(self, path: str, names: list[str], wanted: dict[str, Wanted]) -> MaskedSite:
        """Return the site of the weights that the module at the path multiplies by; raise `DoesNotFitError` where it is none."""
        weights = tuple(
            MaskedWeight(
                name,
                wanted[name].role,
                self.anatomy.model.get_parameter(name).numel(),
                self.products[name][0].in_features,
                self.products[name][0].source.name,
            )
            for name in names
        )
        layer = wanted[names[0]].layer
        layer = layer if layer and path.startswith(f"{layer}.") else ""
        stream_in = self.argument(names[0]) if len(names) == 1 else None
        if stream_in is None:
            self.require_code(path, names)
        what = f"small entries of what {', '.join(dict.fromkeys(weight.role for weight in weights))} reads are zero"
        return MaskedSite(path, what, weights, stream_in, layer)

    def argument(self, name: str) -> int | str | None:
        """Return the argument that a module multiplies by the weight and uses for nothing else; None where there is none."""
        found = {self.argument_of(product) for product in self.products[name]}
        return found.pop() if len(found) == 1 else None

    def argument_of(self, product: WeightProduct) -> int | str | None:
        call = self.flow.call_of(product.node)
        inside: list[fx.Node] = []
        for node in operand_chain(product, self.flow):
            inside.append(node)
            for key, given in call.inputs.items():
                if given is node and key is not None:
                    return key if self.reads_only(call, inside, product.node) else None
        return None

    def reads_only(self, call: Call, inside: list[fx.Node], product: fx.Node) -> bool:
        """Return whether nothing in the call reads what is `inside` but that itself and the product."""
        users = {user for node in inside for user in self.flow.uses[node] if call.encloses(self.flow.call_of(user))}
        return users <= {*inside, product}

    def require_code(self, path: str, names: list[str]) -> None:
        """Raise `DoesNotFitError` where products in the code of the module at the path cannot be masked as it runs."""
        if not path:
            raise unfit(names[0], "the model's own code multiplies by it, and no module does", "no-owner")
        if not all(name.startswith(f"{path}.") for name in names):
            raise unfit(path, f"its code multiplies by {names[0]}, which it does not hold", "no-owner")
        if calls_multi_head(self.anatomy.model.get_submodule(path)):
            raise unfit(path, "one function of torch computes its products and its attention", "fused")


def is_chosen(where: str, branch: Branch, role: str) -> bool:
    """Return whether `where` names this projection of a branch."""
    is_ffn = branch.role in ("ffn", "moe")
    return where == "all" or (where == "down" and is_ffn and role == "down") or where == ("ffn" if is_ffn else "attention")


def is_masked(model: nn.Module, path: str) -> bool:
    """Return whether the module at the path, or one around it, is wrapped by a mask already."""
    around = modules_around(model, path)
    return any(
        isinstance(module, (MaskedProjection, MaskedCode)) and step in (None, "layer")
        for module, step in itertools.zip_longest(around, path.split("."))
    )


def part_of_another_pass(model: nn.Module, path: str) -> str:
    """Return the path of a module with a formula of its own that computes the module at the path; "" where there is none.

    What such a module was given, as the layer that it wraps, is computed as in the dense model.
    """
    steps = path.split(".")
    for count, module in enumerate(modules_around(model, path)):
        given = next((found.given for found in map(reference_in(module), kinds_of(Pass)) if found is not None), None)
        if given is not None and (count == len(steps) or steps[count] not in given):
            return ".".join(steps[:count])
    return ""


def reference_in(module: nn.Module) -> Callable[[Any], ModuleReference | None]:
    return lambda kind: None if kind.reference is None else kind.reference.of(module)


def kinds_of(kind: type[Any]) -> Iterator[type[Any]]:
    """Yield every pass that was imported."""
    for child in kind.__subclasses__():
        yield child
        yield from kinds_of(child)


def unfit(name: str, why: str, code: str, *, in_any_form: bool = False) -> DoesNotFitError:
    remedy = "" if in_any_form else Remedy("rewrite its graph, in which every product is in a module: emit='graph'", "graph")
    return DoesNotFitError(f"{name} cannot be masked", why=why, remedy=remedy, in_any_form=in_any_form, site=name, code=code)
