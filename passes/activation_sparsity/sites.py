"""The products with weights whose inputs are masked, found in the data flow of a model: each site is a module with its weights."""

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
    unfit,
)
from retrofit.sdk.anatomy import InnerLayers, WeightProduct, modules_around, operand_chain, weight_product
from retrofit.sdk.modules import calls_multi_head
from retrofit.sdk.program import CONVOLUTION, Call, op

ALREADY = "its input is masked already"
WHERE = ("all", "ffn", "attention", "down")


@dataclasses.dataclass(frozen=True)
class MaskedWeight:
    """A weight whose columns are not needed if their inputs are zero."""

    name: str  # of the parameter
    role: str
    elements: int
    width: int  # of the input
    stream: str  # the node that is masked; weights with the same input share a sample


@dataclasses.dataclass(frozen=True)
class MaskedSite(Site):
    """A module that multiplies its argument at `stream_in` by one weight, or in its own code by several."""

    weights: tuple[MaskedWeight, ...]
    stream_in: int | str | None  # None: in its own code
    layer: str  # the module of the layer around it; "" if there is none

    @property
    def masks(self) -> Iterator[tuple[str, MaskedWeight]]:
        """Yield the path of the mask of each weight, once it is installed."""
        for index, weight in enumerate(self.weights):
            yield f"{self.name}.mask" if self.stream_in is not None else f"{self.name}.masks.{index}", weight


@dataclasses.dataclass(frozen=True)
class Wanted:
    """A weight selected by the options, and its layer."""

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
        """Return the sites selected by the options, in the order of the layers, and near misses for the weights that do not fit."""
        wanted, near_misses = self.wanted(where, layers, owner)
        modules: dict[str, list[str]] = {}  # by path: the names of its weights
        for name in wanted:
            with collect_near_miss(name, near_misses):
                modules.setdefault(self.module_of(name), []).append(name)
        sites = []
        for path, names in modules.items():
            with collect_near_miss(path, near_misses):
                sites.append(self.site(path, names, wanted))
        return sites, near_misses

    def wanted(self, where: str, layers: str, owner: str) -> tuple[dict[str, Wanted], list[NearMiss]]:
        """Return the weights selected by the options, by name, and near misses for those that must not be masked."""
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
                        why = "it chooses the experts of a token, and masking could change the choice"
                        near_misses.setdefault(projection.name, NearMiss(projection.name, why, in_any_form=True, code="router"))
                        continue
                    found.setdefault(projection.name, Wanted(projection.role, layer.name))
        return found, list(near_misses.values())

    def module_of(self, name: str) -> str:
        """Return the path of the module whose code multiplies by a weight.

        Raises `DoesNotFitError` if the products cannot be masked.
        """
        products = self.products.get(name, [])
        paths = {self.flow.call_of(product.node).path for product in products}
        if not products:
            raise unmaskable("no product reads it unchanged", "computed")
        if any(op(product.node) in CONVOLUTION for product in products):
            raise unmaskable("it is the kernel of a convolution", "convolution", in_any_form=True)
        if len(paths) > 1:
            raise unmaskable(f"several modules multiply by it: {', '.join(sorted(paths))}", "no-owner")
        (path,) = paths
        if is_masked(self.anatomy.model, path):
            raise unmaskable(ALREADY, "rewritten", in_any_form=True)
        if made := part_of_another_pass(self.anatomy.model, path):
            raise unmaskable(f"another pass uses it in its module at {made}", "other-pass", in_any_form=True)
        return path

    def site(self, path: str, names: list[str], wanted: dict[str, Wanted]) -> MaskedSite:
        """Return the site of the weights by which the module multiplies. Raises `DoesNotFitError` if it cannot be one."""
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
        what = f"small entries of the input of {', '.join(dict.fromkeys(weight.role for weight in weights))} are zero"
        return MaskedSite(path, what, weights, stream_in, layer)

    def argument(self, name: str) -> int | str | None:
        """Return the argument that the module only multiplies by the weight; None if there is none."""
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
        """Return whether only the values `inside` and the product read the values `inside` within the call."""
        users = {user for node in inside for user in self.flow.uses[node] if call.encloses(self.flow.call_of(user))}
        return users <= {*inside, product}

    def require_code(self, path: str, names: list[str]) -> None:
        """Raise `DoesNotFitError` if products in the code of the module at `path` cannot be masked while it runs."""
        if not path:
            raise unmaskable("the model's own code multiplies by it, and no module does", "no-owner")
        if not all(name.startswith(f"{path}.") for name in names):
            raise unmaskable(f"its code multiplies by {names[0]}, which it does not hold", "no-owner")
        if calls_multi_head(self.anatomy.model.get_submodule(path)):
            raise unmaskable("one function of torch computes its products and its attention", "fused")


def is_chosen(where: str, branch: Branch, role: str) -> bool:
    """Return whether `where` selects this projection of a branch."""
    is_ffn = branch.role in ("ffn", "moe")
    return where == "all" or (where == "down" and is_ffn and role == "down") or where == ("ffn" if is_ffn else "attention")


def is_masked(model: nn.Module, path: str) -> bool:
    """Return whether the module at `path`, or one around it, is already wrapped by a mask."""
    around = modules_around(model, path)
    return any(
        isinstance(module, (MaskedProjection, MaskedCode)) and step in (None, "layer")
        for module, step in itertools.zip_longest(around, path.split("."))
    )


def part_of_another_pass(model: nn.Module, path: str) -> str:
    """Return the path of the module of another pass that computes the module at `path` by its own formula; "" if there is none.

    A module that such a module only calls, like the layer that it wraps, computes as in the dense model.
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
    """Yield every imported pass."""
    for child in kind.__subclasses__():
        yield child
        yield from kinds_of(child)


def unmaskable(why: str, code: str, *, in_any_form: bool = False) -> DoesNotFitError:
    remedy = "" if in_any_form else Remedy("rewrite its graph, in which every product is in a module: emit='graph'", "graph")
    return unfit(why, remedy, in_any_form=in_any_form, code=code)
