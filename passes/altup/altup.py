"""AltUp: the residual stream becomes K times as wide, and every layer stays d wide.

The stream is one tensor (batch, seq, K·d); block i is its i-th contiguous d columns. A layer predicts all blocks, computes block j,
and corrects all blocks (formulas in `layers.py`). `widening.py` decides what happens to the modules outside the layers.

Alternating Updates for Efficient Transformers (NeurIPS 2023), Alg. 1 and §4.1 (Recycled-AltUp). Alg. 2, whose coefficients are
matrices, and §5.4 are from the earlier paper on external memory. Input-dependent coefficients are Gemma 3n's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import ClassVar

import torch
from torch import fx, nn

from retrofit.passes.altup import reference as method_reference
from retrofit.passes.altup.layers import (
    COEFFICIENTS,
    AltUpLayer,
    BlockScale,
    Blockwise,
    DivideAndProject,
    Replicated,
    StackRun,
    outer_width,
)
from retrofit.passes.altup.plan import REPEATED, AltUpPlan, Growth, LayerPlan, Start, WideHead, WideTable, grow
from retrofit.passes.altup.widening import WideningPlan, WidthPropagation
from retrofit.sdk import (
    Anatomy,
    DoesNotFitError,
    Edit,
    MethodReference,
    ModuleReference,
    NearMiss,
    Pass,
    Recovery,
    Site,
    SpecError,
    Stack,
    option,
    selected_depths,
    unfit,
)
from retrofit.sdk.anatomy import reader_of
from retrofit.sdk.data import left_out
from retrofit.sdk.program import shape


@dataclasses.dataclass(frozen=True)
class AltUp(Pass[AltUpPlan]):
    """Widen the residual stream to K·d; every layer stays d wide: it predicts all blocks, computes one, corrects all."""

    name: ClassVar[str] = "altup"
    summary: ClassVar[str] = "widen the residual stream K times; each layer computes one block and corrects the others"
    paper: ClassVar[str] = "Alternating Updates for Efficient Transformers, Alg. 1"
    rewrites: ClassVar[str] = "stack"
    exact = True
    places_by: ClassVar[tuple[str, ...]] = ("stacks",)
    already: ClassVar[str] = "the stream is several blocks wide already"
    remedy: ClassVar[str] = "use stacks=all"
    way_around: ClassVar[str] = "its own code may depend on the stream's width: try embedding=recycled"
    reference: ClassVar[MethodReference] = MethodReference(
        {
            AltUpLayer: ModuleReference(method_reference.altup_layer, ("layer",), key="stream_out"),
            Blockwise: ModuleReference(method_reference.blockwise, ("layer",)),
            Replicated: ModuleReference(method_reference.replicated, ("layer",)),
            BlockScale: ModuleReference(method_reference.block_scale),
            DivideAndProject: ModuleReference(method_reference.divide_and_project),
        },
        method_reference.wiring,
        method_reference.start,
    )

    k: int = option(2, "K, d-wide blocks of the stream", minimum=2)
    selection: str = option(
        "alternating", "block that a layer computes: depth mod K, or the first (SameUp)", choices=("alternating", "same")
    )
    embedding: str = option(
        "wide", "a K·d-wide token table, or the d-wide look-up K times (Recycled-AltUp)", choices=("wide", "recycled")
    )
    init: str = option(
        "hop", "the exact start: blocks all equal, or the dense stream hops between them", choices=("lockstep", "hop")
    )
    coefficients: str = option(
        "scalar", "p and g are scalars, matrices, or depend on the token (Gemma 3n)", choices=tuple(COEFFICIENTS)
    )
    extra: int = option(0, "extra embedding width e, divided by K−1 and projected to d (0: (K−1)·d, no projection)", minimum=0)
    layers: str = option("all", "depths with their own coefficients, e.g. 0-5+8; the others keep their initial ones", depths=True)
    stacks: str = option("all", "stacks to widen", choices=("all", "encoder", "decoder"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.extra % (self.k - 1):
            raise SpecError(
                f"altup: extra={self.extra} does not divide into K−1 = {self.k - 1} sub-blocks",
                remedy="choose a multiple of K−1",
                option="extra",
                code="does-not-divide",
            )
        if self.extra and (self.init != "hop" or self.embedding != "wide"):
            raise SpecError(
                f"altup: extra={self.extra} needs init=hop and embedding=wide",
                why="a block projected from fewer columns cannot equal the dense embedding, as lockstep requires",
                remedy="leave init and embedding at their defaults",
                option="extra",
                code="combination",
            )

    # The plan.

    @property
    def recovery(self) -> Recovery:  # type: ignore[override]
        return Recovery(rate=1.0 if self.coefficients == "dynamic" else 10.0)

    def added_sizes(self, sizes: frozenset[int]) -> frozenset[int]:
        k = self.k
        blocks = {count * size for size in (*sizes, self.extra) for count in (k - 1, k)}
        return frozenset({k - 1, k, k * k, *blocks, *(size + self.extra for size in sizes)})

    def plan(self, anatomy: Anatomy) -> AltUpPlan:
        near_misses: list[NearMiss] = []
        stacks = self.chosen_stacks(anatomy, near_misses)
        if not stacks:
            return AltUpPlan((), tuple(near_misses))
        check_layers(stacks, anatomy)
        require_own_layers(stacks)
        look_ups = {stack.entry: token_look_ups(stack, anatomy) if self.embedding == "wide" else [] for stack in stacks}
        wide_ends = {stack.entry: stays_wide(stack, look_ups[stack.entry], anatomy) for stack in stacks}
        homes = {stack.entry: self.homes(stack) for stack in stacks}
        wide_nodes = [node for found in look_ups.values() for node in found]
        widening = WidthPropagation(anatomy, stacks, homes, wide_nodes, wide_ends).run()
        deepest = max(len(stack.layers) for stack in stacks)
        plan = AltUpPlan(
            (),
            tuple(near_misses),
            unseen=arguments_meeting_stream(anatomy) if widening.tables else (),
            tables=tuple(self.wide_table(name, paths, anatomy.model) for name, paths in widening.tables.items()),
            heads=tuple(self.wide_heads(widening, anatomy.model)),
            repeated=tuple(
                Growth(name, -1, (self.k - 1) * anatomy.model.get_parameter(name).shape[-1], "copies", REPEATED)
                for name in widening.parameters
            ),
            widening=widening,
            layers=tuple(
                layer
                for stack in stacks
                for layer in self.layer_plans(stack, deepest, widening, bool(look_ups[stack.entry]), wide_ends[stack.entry])
            ),
            readers={
                stack.layers[-1].name: reader[0]
                for stack in stacks
                if not is_shared(stack) and (reader := reader_of(stack.layers, [anatomy.node(stack.exit)], anatomy.program))
            },
            runs=tuple(
                (stack.name, tuple(layer.name for layer in stack.layers))
                for stack in stacks
                if self.init == "hop" and not is_shared(stack)
            ),
        )
        terms = list(self.parameter_terms(plan, anatomy.model))
        return dataclasses.replace(
            plan,
            sites=tuple(self.sites(plan)),
            notes=(f"extra={self.extra} has no effect: no token table is widened",) if self.extra and not plan.tables else (),
            new_parameters=sum(count for _, count in terms),
            formula=" + ".join(f"{label} = {count:,}" for label, count in terms),
        )

    def chosen_stacks(self, anatomy: Anatomy, near_misses: list[NearMiss]) -> list[Stack]:
        """Return the stacks to widen: of those that share layers, the longest. The others become near misses."""
        chosen: list[Stack] = []
        for stack in sorted(anatomy.stacks, key=lambda stack: -len(stack.layers)):
            taken = {(layer.name, layer.call) for other in chosen for layer in other.layers if layer.name}
            if self.stacks not in ("all", stack.kind):
                near_misses.append(NearMiss.not_selected(stack, self.stacks))
            elif any((layer.name, layer.call) in taken for layer in stack.layers):
                why = "a second stream through the layers of another stream, which is widened"
                near_misses.append(NearMiss(stack.name, why, code="shared-layers"))
            else:
                chosen.append(stack)
        return [stack for stack in anatomy.stacks if stack in chosen]

    def active(self, depth: int) -> int:
        return depth % self.k if self.selection == "alternating" else 0

    def homes(self, stack: Stack) -> list[int]:
        """Return the block that holds the dense stream before each layer and after the last."""
        return [0 if is_shared(stack) else self.active(depth) for depth in range(len(stack.layers))] + [0]

    def wide_table(self, name: str, paths: list[str], model: nn.Module) -> WideTable:
        width = model.get_parameter(name).shape[1]
        start: Start = "copies" if self.init == "lockstep" else "noise"
        return WideTable(Growth(name, 1, self.extra or (self.k - 1) * width, start, self.new_columns), width, tuple(paths))

    def wide_heads(self, widening: WideningPlan, model: nn.Module) -> Iterator[WideHead]:
        """Yield the heads, widened to read the whole stream. Raises `DoesNotFitError` if no module takes the stream of one."""
        for name, head in widening.heads.items():
            tied = name in widening.tables
            if not head.path and (tied or self.extra):
                raise DoesNotFitError(
                    f"the head ({name}) is applied in the model's own code",
                    by="altup",
                    site=name,
                    code="no-owner",
                    why="the blocks must be combined before it, and no module takes them as an argument there",
                    remedy="use embedding=recycled",
                )
            extent = self.extra or (self.k - 1) * model.get_parameter(name).shape[head.dim]
            if tied:
                growth = None
            elif self.init == "lockstep":
                growth = Growth(name, head.dim, extent, "copies", self.new_columns, 1 / self.k)
            else:
                growth = Growth(name, head.dim, extent, "zeros", self.new_columns)
            yield WideHead(name, head.path, growth)

    @property
    def new_columns(self) -> str:
        """Return the number of new elements in a token table or an untied head, as a formula."""
        return "V·e" if self.extra else "(K−1)·V·d"

    @property
    def combination(self) -> tuple[float, ...]:
        """Return the weights with which the blocks are combined to the dense stream."""
        return (1 / self.k,) * self.k if self.init == "lockstep" else (1.0,) + (0.0,) * (self.k - 1)

    def layer_plans(
        self, stack: Stack, deepest: int, widening: WideningPlan, starts_wide: bool, ends_wide: bool
    ) -> Iterator[LayerPlan]:
        """Yield the wrapper of each layer's module. Raises `DoesNotFitError` if layers share weights and an end is d wide."""
        shared = is_shared(stack)
        trained = selected_depths(self.layers, len(stack.layers), self.name, deepest)
        if shared and not (starts_wide and ends_wide):
            raise DoesNotFitError(
                f"the layers of {stack.name or 'the model'} share their weights across depth",
                by="altup",
                site=stack.name,
                code="shared-layers",
                why="one module runs at every depth, so the stream must be wide before the first layer and after the last",
                remedy="use embedding=wide on a model with a per-token head",
            )
        last = len(stack.layers) - 1
        planned: set[str] = set()
        for depth, layer in enumerate(stack.layers):
            if layer.name in planned:
                continue
            planned.add(layer.name)
            stream_in, stream_out = layer.stream_places()
            narrow = widening.narrow[layer.name, layer.call]
            arguments = {
                "stream_in": stream_in,
                "stream_out": stream_out,
                "narrow": {key: block for key, block in narrow.items() if key is not None},
                "expand": depth == 0 and not starts_wide,
                "combine": self.combination if depth == last and not ends_wide else None,
                "rotate": shared and self.selection == "alternating",
            }
            active = 0 if shared else self.active(depth)
            next_active = self.active(1) if shared else 0 if depth == last else self.active(depth + 1)
            yield LayerPlan(layer.name, stack.width, active, next_active, depth in trained, arguments)

    def parameter_terms(self, plan: AltUpPlan, model: nn.Module) -> Iterator[tuple[str, int]]:
        """Yield the terms of the parameter formula: label and number of parameters."""
        for table in plan.tables:
            yield table.growth.term(model)
            if self.extra:
                yield "projections, e·d", self.extra * table.width
        yield from (growth.term(model) for growth in plan.repeated)
        for head in plan.heads:
            if head.growth is not None:
                yield head.growth.term(model)
            elif self.init == "hop":
                yield "weights of the tied head's blocks, K", self.k
        for layer in plan.layers:
            if layer.trained:
                yield f"{layer.name}: p and g", COEFFICIENTS[self.coefficients].count(layer.width, self.k)

    def sites(self, plan: AltUpPlan) -> Iterator[Site]:
        columns = "d+e" if self.extra else "K·d"
        for table in plan.tables:
            yield from (Site(path, f"token table widened to {columns}") for path in table.paths)
        yield from (Site(path, f"applied to each of the {self.k} blocks") for path in plan.widening.blockwise)
        yield from (Site(path, f"output replicated {self.k} times") for path in plan.widening.replicated)
        yield from (Site(name, f"buffer replicated {self.k} times") for name in plan.widening.buffers)
        for head in plan.heads:
            yield Site(head.path or head.weight, f"{'' if head.growth else 'tied '}head reads {columns}")
        for layer in plan.layers:
            turns = " in turn" if layer.arguments["rotate"] else ""
            yield Site(layer.name, f"works on block {layer.active} of {self.k}{turns}")

    # The edits.

    def apply(self, plan: AltUpPlan, edit: Edit) -> None:
        model = edit.model
        projections = {table.growth.name: self.widen_table(table, edit) for table in plan.tables}
        for path, key in plan.widening.blockwise.items():
            edit.replace_module(path, Blockwise(model.get_submodule(path), self.k, 0 if key is None else key))
        for path in plan.widening.replicated:
            edit.replace_module(path, Replicated(model.get_submodule(path), self.k))
        for name in plan.widening.buffers:
            self.repeat_buffer(name, edit)
        for growth in plan.repeated:
            grow(growth, edit)
        for head in plan.heads:
            self.widen_head(head, projections, edit)
        for layer in plan.layers:
            self.wrap_layer(layer, edit)
        for owner, layers in plan.runs:
            self.track_run(owner, layers, edit)
        for last, path in plan.readers.items():
            end: AltUpLayer = model.get_submodule(last)  # type: ignore[assignment]
            edit.add_handle(model.get_submodule(path).register_forward_pre_hook(end.require_end, with_kwargs=True))
        paths = [*(path for table in plan.tables for path in table.paths), *(head.path for head in plan.heads if head.path)]
        if widths := {path: width for path in paths if (width := outer_width(model, path))}:
            first: AltUpLayer = model.get_submodule(plan.layers[0].name)  # type: ignore[assignment]
            edit.set_attribute(first, "ends", widths)
            edit.set_attribute(first, "place", plan.layers[0].name)
            edit.set_attribute(first, "projected", tuple(paths) if self.extra else ())
            edit.add_handle(model.register_forward_pre_hook(first.require_ends, with_kwargs=True))

    def widen_table(self, table: WideTable, edit: Edit) -> DivideAndProject | None:
        """Widen the table where it is looked up. Return the projection of its extra columns; None if it has none."""
        weight = edit.model.get_parameter(table.growth.name)
        grow(table.growth, edit)
        if not self.extra:
            return None
        project = DivideAndProject(self.extra, self.k, table.width).to(device=weight.device, dtype=weight.dtype)
        wide = edit.model.get_parameter(table.growth.name)
        same = (module for module in edit.model.modules() if isinstance(module, nn.Embedding) and module.weight is wide)
        looked_up = map(edit.model.get_submodule, table.paths)
        for module in dict.fromkeys([*looked_up, *same]):  # `same`: the model may return another table than it calls
            edit.add_module(module, "project", project)
            edit.add_handle(module.register_forward_hook(project.after))
        edit.expect_late_gradient(project.weight)  # the head and the layers do not read the extra blocks at the start
        return project

    def widen_head(self, head: WideHead, projections: dict[str, DivideAndProject | None], edit: Edit) -> None:
        """Make the head read the whole stream: block weights and projection are applied to its argument."""
        if head.growth is not None:
            grow(head.growth, edit)
        else:
            weight, owner = edit.model.get_parameter(head.weight), edit.model.get_submodule(head.path)
            scale = BlockScale(self.combination, learnable=self.init == "hop").to(device=weight.device, dtype=weight.dtype)
            edit.add_module(owner, "block_scale", scale)
            edit.add_handle(owner.register_forward_pre_hook(scale.before))
        project = projections.get(head.weight) or next(iter(projections.values()), None)
        if project is not None:
            module = edit.model.get_submodule(head.path)
            edit.add_module(module, "project", project)
            edit.add_handle(module.register_forward_pre_hook(project.before))

    def repeat_buffer(self, name: str, edit: Edit) -> None:
        owner, _, leaf = name.rpartition(".")
        module = edit.model.get_submodule(owner)
        buffer = module.get_buffer(leaf)
        edit.set_attribute(module, leaf, torch.cat([buffer] * self.k, -1))
        edit.make_persistent(module, leaf)

    def wrap_layer(self, layer: LayerPlan, edit: Edit) -> None:
        module = edit.model.get_submodule(layer.name)
        wrapper = COEFFICIENTS[self.coefficients](module, layer.width, self.k, layer.active, **layer.arguments)
        wrapper.start(self.init, layer.next_active)
        wrapper.next_active = layer.next_active if self.init == "hop" else None
        late = list(wrapper.second_step)
        if self.init == "hop" and layer.next_active == layer.active:  # the stream stays, so p affects only the other blocks
            late += ["p", "prediction_coefs.weight"]
        for name, parameter in wrapper.named_parameters():
            if name in late:
                edit.expect_late_gradient(parameter)
        if not layer.trained:
            wrapper.freeze()
        edit.replace_module(layer.name, wrapper)

    def track_run(self, owner: str, layers: Sequence[str], edit: Edit) -> None:
        """Install what detects skipped layers of a stack: one `StackRun`, shared by the wrappers in order."""
        wrappers: list[AltUpLayer] = [edit.model.get_submodule(path) for path in layers]  # type: ignore[misc]
        run = StackRun(layers, wrappers[0].active)
        for depth, wrapper in enumerate(wrappers):
            edit.set_attribute(wrapper, "stack_run", run)
            edit.set_attribute(wrapper, "stack_depth", depth)
        edit.add_handle(edit.model.get_submodule(owner).register_forward_pre_hook(run.begin))


def arguments_meeting_stream(anatomy: Anatomy) -> tuple[str, ...]:
    """Return the arguments that the example inputs lack, if modules outside the layers compute nothing without them.

    Their outputs, such as image features, may be inserted among the looked-up tokens, which become wide.
    """
    model, program = anatomy.model, anatomy.program
    used = {id(model.get_parameter(name)) for node, name in program.parameters.items() if node.users}
    inside = tuple(f"{layer.name}." for layer in anatomy.layers if layer.name)
    idle = any(id(parameter) not in used and not name.startswith(inside) for name, parameter in model.named_parameters())
    return left_out(model, program.examples) if idle else ()


def is_shared(stack: Stack) -> bool:
    """Return whether one module runs at several depths."""
    return len({layer.name for layer in stack.layers}) < len(stack.layers)


def check_layers(stacks: list[Stack], anatomy: Anatomy) -> None:
    """Raise `DoesNotFitError` at the first layer that cannot be wrapped."""
    attends = any(layer.attentions for stack in stacks for layer in stack.layers)
    for stack in stacks:
        for layer in stack.layers:
            try:
                layer.stream_places()
                entering = shape(anatomy.node(layer.entry))
                assert entering is not None
                if entering[-1] != stack.width:
                    raise other_width(entering, stack.width)
            except DoesNotFitError as error:
                raise DoesNotFitError(
                    f"layer {layer.name or layer.exit} of the {stack.kind} {stack.name or 'stack'} cannot be wrapped",
                    by="altup",
                    site=layer.name,
                    code=error.code,
                    why=error.why if attends else f"{error.why}; no layer attends: this may not be a transformer",
                    remedy=error.remedies,
                ) from None


def require_own_layers(stacks: list[Stack]) -> None:
    """Raise `DoesNotFitError` if a module is a layer of several stacks, because its wrapper would differ between them."""
    names = [name for stack in stacks for name in dict.fromkeys(layer.name for layer in stack.layers) if name]
    for name in names:
        if names.count(name) > 1:
            raise DoesNotFitError(
                f"the layer {name} runs in several stacks",
                by="altup",
                site=name,
                code="shared-layers",
                why="its module runs on several inputs, and widening one stream would widen them all",
                remedy="rewrite that module by itself, with its own example_inputs=",
                in_any_form=True,
            )


def other_width(entering: Sequence[int | torch.SymInt], width: int) -> DoesNotFitError:
    """Return the error for a layer whose input, of shape `entering`, does not have the stream's width."""
    if isinstance(entering[-1], int) and entering[-1] % width == 0:
        return unfit(AltUp.already, "apply altup once", code="rewritten")
    return unfit(
        f"its input is {'×'.join(map(str, entering))}, not tokens of width {width}",
        "altup needs (batch, tokens, width) from the first layer of a stack to the last; passes that rewrite single layers may fit",
        code="other-layout",
    )


def token_look_ups(stack: Stack, anatomy: Anatomy) -> list[fx.Node]:
    """Return the token look-ups at the start of the stack's stream: those in the largest table."""
    names, entry = {part.node for part in anatomy.embeddings}, anatomy.node(stack.entry)
    found = [node for node in anatomy.flow.nodes if node.name in names and anatomy.flow.reaches(node, entry)]
    rows = [shape(node.args[0])[0] for node in found]  # type: ignore[index]
    return [node for node, count in zip(found, rows, strict=True) if count == max(rows)]


def stays_wide(stack: Stack, look_ups: list[fx.Node], anatomy: Anatomy) -> bool:
    """Return whether the wide stream reaches a head with one output per token, or one tied to the table of `look_ups`."""
    head = anatomy.head
    if not look_ups or head is None or stack is not anatomy.stacks[-1]:
        return False
    product, end = anatomy.node(head.node), anatomy.node(stack.exit)
    tied = any(node.args[0] in product.all_input_nodes for node in look_ups)
    return anatomy.flow.reaches(end, product) and (tied or (shape(product) or ())[:-1] == (shape(end) or ())[:-1])
