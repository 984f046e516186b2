"""The module that owns a branch: it computes all of that and nothing of another, and the sum with the stream is outside of it.

The module in which a branch is computed (`Branch.name`) may hold more: the layer around it, or the sum. Norms, dropout and scaling
at either end of a branch may lie outside the module that owns it; the products with its weights do not.
"""

from __future__ import annotations

import dataclasses

from torch import fx

from retrofit.anatomy.branches import InnerLayers, owner_of
from retrofit.anatomy.findings import Findings
from retrofit.anatomy.parts import Branch, Layer
from retrofit.anatomy.weight_products import nearest_products, weight_product
from retrofit.errors import DoesNotFitError
from retrofit.program.aten_ops import is_float, is_heavy, shape
from retrofit.program.program import Call
from retrofit.surgery.wrappers import Wrapper

IN_CODE = "it is computed in the model's own code, and no module owns it"


@dataclasses.dataclass(frozen=True)
class BranchOwner:
    """One call of a module that owns a branch: x goes in as `stream_in`, y comes out as `stream_out`."""

    call: Call
    stream_in: int | str
    stream_out: int | str | None
    x: fx.Node
    y: fx.Node
    branches: tuple[Branch, ...]  # the branch, and those that it is the sum with
    last: str = ""  # where the last product is in another module: its path; that reads y and nothing else


class BranchOwners:
    """Finds these modules in one model."""

    def __init__(self, anatomy: Findings) -> None:
        self.model, self.flow = anatomy.model, anatomy.flow
        self.sums: set[fx.Node] = set()
        self.work: dict[fx.Node, Branch] = {}  # by heavy operation: the branch it is of
        self.layers: dict[Branch, Layer] = {}
        for layer in map(InnerLayers(self.flow).inside, anatomy.layers):
            for branch in layer.branches:
                self.sums.add(self.flow.node(branch.add))
                self.layers[branch] = layer
                self.work.update(dict.fromkeys(filter(is_heavy, self.region(branch)), branch))
        self.inside: dict[Call, list[fx.Node]] = {}  # by call: what it computes from the contents of the inputs
        for node in self.flow.computations:
            for call in self.flow.call_of(node).chain:
                self.inside.setdefault(call, []).append(node)
        self.parameters = dict(self.model.named_parameters(remove_duplicate=False))
        self.calls: dict[str, list[Call]] = {}  # by path: those that return something
        for call in self.flow.program.calls:
            if any(node in self.flow.position for node in call.outputs.values()):
                self.calls.setdefault(call.path, []).append(call)

    def region(self, branch: Branch) -> list[fx.Node]:
        """The nodes of a branch."""
        return self.flow.between(self.flow.node(branch.source), self.flow.node(branch.output))

    def owner(self, branch: Branch) -> BranchOwner:
        """The innermost call that owns `branch`, or the outer one of a module that only this layer calls, or that reads a sequence.

        Of nested calls that take and return the same tensors it is the outermost: the inner ones may be parts of a method. Raises
        `DoesNotFitError` with what the innermost module that computes it all does besides, or does not.
        """
        region, output = self.region(branch), self.flow.node(branch.output)
        return self.innermost(branch, region, output, [node for node in region if is_heavy(node)] or region)

    def owner_but_for_last_product(self, branch: Branch) -> BranchOwner:
        """The call that owns all of `branch` but its last product, which another module computes of y alone."""
        flow, region, output = self.flow, self.region(branch), self.flow.node(branch.output)
        ends = [product for product in nearest_products([output], flow) if product.node in set(region)]
        last = flow.call_of(ends[0].node) if len(ends) == 1 else flow.program.root
        work = [node for node in region if is_heavy(node) and not last.encloses(flow.call_of(node))]
        entering = list(last.inputs.items())
        if not last.path or not work or len(entering) != 1 or entering[0][0] != 0 or list(last.outputs) != [None]:
            raise self.unfit(branch, "its last product is in no module of its own")
        y = entering[0][1]
        own, inside = self.inside.get(last, []), set(region)
        if any(node not in inside or not flow.reaches(y, node) or (is_heavy(node) and node is not ends[0].node) for node in own):
            raise self.unfit(branch, f"{last.path} computes more than its last product")
        if y not in inside or any(not last.encloses(flow.call_of(user)) for user in self.readers(y, work)):
            raise self.unfit(branch, f"what {last.path} reads is read elsewhere too")
        owner = self.innermost(branch, flow.between(flow.node(branch.source), y), y, work, (last.path,))
        if owner.y is not y:
            raise self.unfit(branch, f"there is code between {owner.call.path} and {last.path}")
        if len(self.calls[last.path]) != len(self.calls[owner.call.path]):
            raise self.unfit(branch, f"{last.path} also runs elsewhere")
        return dataclasses.replace(owner, last=last.path)

    def owner_of_sum(self, branch: Branch) -> BranchOwner:
        """The call that owns a branch with all of its kind that is added to it: experts of all tokens, adapters.

        Raises `DoesNotFitError` where nothing is, or no call owns them together.
        """
        flow, source, add = self.flow, self.flow.node(branch.source), self.flow.node(branch.add)
        added = [other for other in self.layers[branch].branches if (other.source, other.add) == (branch.source, branch.add)]
        together = tuple(one for one in added if one.role == branch.role or (branch.role == "moe" and one.role == "ffn"))
        if len(together) < 2:
            raise self.unfit(branch, "nothing else of its kind is added to it")
        regions = {node for one in together for node in self.region(one)}
        ours, theirs = ([flow.node(one.output) for one in added if (one in together) == own] for own in (True, False))
        region = [
            node
            for node in flow.between(source, add)
            if node in regions
            or (any(flow.reaches(one, node) for one in ours) and not any(flow.reaches(one, node) for one in theirs))
        ]
        owner = self.innermost(branch, region, add, [node for node in region if is_heavy(node)])
        return dataclasses.replace(owner, branches=together)

    def last_module(self, branch: Branch) -> str:
        """The path of a module that computes the last product of a branch and no other, "" where there is none."""
        output = self.flow.node(branch.output)
        ends = [product for product in nearest_products([output], self.flow) if product.node in set(self.region(branch))]
        call = self.flow.call_of(ends[0].node) if len(ends) == 1 else self.flow.program.root
        return call.path if sum(map(is_heavy, self.inside.get(call, []))) == 1 else ""

    def readers(self, node: fx.Node, work: list[fx.Node]) -> list[fx.Node]:
        """What reads `node` outside the innermost call that computes all of `work`."""
        around = owner_of(work, self.flow)
        return [user for user in self.flow.uses[node] if not around.encloses(self.flow.call_of(user))]

    def innermost(
        self, branch: Branch, region: list[fx.Node], output: fx.Node, work: list[fx.Node], others: tuple[str, ...] = ()
    ) -> BranchOwner:
        """The call to choose among those that compute all of `work` and own what lies in `region`; `others` have weights too."""
        found: list[BranchOwner] = []
        why: DoesNotFitError | None = None
        for call in owner_of(work, self.flow).chain:
            if not call.path:
                break
            try:
                found.append(self.as_owner(call, branch, set(region), output, others))
            except DoesNotFitError as error:
                why = why or error
        if not found:
            raise why or self.unfit(branch, IN_CODE)
        inner = found[0]
        alone = [one for one in found if self.is_alone(one.call, self.layers[branch])]
        flat = len(shape(inner.x) or ()) < len(shape(self.flow.node(branch.add)) or ())
        laid_out = [one for one in alone or found if not flat or self.lays_out(one, inner)]
        chosen = (laid_out or alone or found)[0]
        return [one for one in alone or found if one.x is chosen.x and one.y is chosen.y][-1]

    def as_owner(self, call: Call, branch: Branch, region: set[fx.Node], output: fx.Node, others: tuple[str, ...]) -> BranchOwner:
        """`call` as the owner of a branch; raises `DoesNotFitError` where it does more or less."""
        flow = self.flow
        if any(call.encloses(flow.call_of(node)) for node in self.sums):
            raise self.unfit(branch, f"{call.path}, in which it is computed, also adds it to the stream")
        if wrapper := self.wrapper_with_part(call.path):
            raise self.unfit(branch, f"it is part of what another pass has put around {wrapper}")
        own = self.inside.get(call, [])
        for node in own:
            other = self.work.get(node)
            if node not in region and other is not None:
                raise self.unfit(branch, f"{call.path}, in which it is computed, also computes a branch that is {other.role}")
            if not flow.reaches(node, output) and (product := weight_product(node, flow)) is not None:
                raise self.unfit(branch, f"{call.path}, in which it is computed, also multiplies by {product.parameter}")
        inside, add = set(own), flow.node(branch.add)
        readers = {node: [user for user in flow.uses[node] if user in flow.depends and user not in inside] for node in own}
        ends = [node for node in own if node in region and any(flow.reaches(user, add) for user in readers[node])]
        keys = [key for key, node in call.outputs.items() if node in ends]
        if len(ends) != 1 or not keys or add in inside:
            raise self.unfit(branch, f"{call.path} does not return it as one tensor")
        source = flow.node(branch.source)
        given = [(key, node) for key, node in call.inputs.items() if key is not None and (node is source or node in region)]
        read = [(key, node) for key, node in given if is_float(node) and flow.reaches_through_heavy_op(node, output)]
        if not read:
            raise self.unfit(branch, f"{call.path} takes no argument that is what it reads of the stream")
        self.require_weights((call.path, *others), branch, [node for node in own if node in region])
        key, x = max(read, key=lambda pair: flow.position[pair[1]])  # the stream itself may be an argument too
        return BranchOwner(call, key, keys[0], x, ends[0], (branch,))

    def wrapper_with_part(self, path: str) -> str:
        """The path of a wrapper that the module at `path` is a part of, and not of what it wraps; "" where there is none."""
        module, steps = self.model, path.split(".")
        for count, step in enumerate(steps):
            if isinstance(module, Wrapper) and step in module._modules and step != "layer":
                return ".".join(steps[:count])
            module = module.get_submodule(step)
        return ""

    def require_weights(self, paths: tuple[str, ...], branch: Branch, nodes: list[fx.Node]) -> None:
        """The modules at `paths` hold all matrices that the nodes and the projections of the branch multiply by."""
        held = {id(one) for path in paths for one in self.model.get_submodule(path).parameters()}
        products = (weight_product(node, self.flow) for node in nodes)
        names = [product.parameter for product in products if product is not None]
        for name in (*names, *(one.name for one in branch.projections if one.name)):
            if name in self.parameters and id(self.parameters[name]) not in held:
                raise self.unfit(branch, f"{paths[0]} computes it with {name}, which it does not hold")

    def is_alone(self, call: Call, layer: Layer) -> bool:
        """Whether no other layer calls the module."""
        return all(any(around.path == layer.name for around in other.chain) for other in self.calls[call.path])

    def lays_out(self, outer: BranchOwner, inner: BranchOwner) -> bool:
        """Whether `outer` does no more around `inner` than lay tokens out in a sequence, and as they were."""
        flow = self.flow
        sequence = len(shape(outer.x) or ()) > len(shape(inner.x) or ())
        return sequence and outer.x in flow.carried_chain(inner.x) and inner.y in flow.carried_chain(outer.y)

    def unfit(self, branch: Branch, why: str) -> DoesNotFitError:
        return DoesNotFitError(f"no module owns the branch {branch.name or branch.output}", why=why)
