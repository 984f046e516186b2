"""A part of a model as an ONNX graph: `torch.export`, then torch's own translation to ONNX.

For its own ONNX exporter, transformers has patches for known obstacles (operations that ONNX lacks, shapes on which torch would
specialize); they are active while a part is traced here.

A tracer records its assumptions about the dynamic sizes: its guards. If one fails at other sizes, the model's code took a branch,
or a number of loop iterations, that is right only for some sizes. A guard may also be unnecessary, or the model itself may fail
there (at the end of a table of positions). So the program is run at the first such size and compared with the model.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from retrofit.errors import CaptureError, first_line
from retrofit.inputs.module_calls import watched
from retrofit.inputs.packed_weights import refuse_packed_layers
from retrofit.numerics.distances import distance, tolerance_of
from retrofit.onnx.exporter.export_parts import LENGTH, PAST, PER, TOTAL, ExportPart, Sizes
from retrofit.onnx.importer.model_file import root_cause
from retrofit.process import replace_attributes, silence_loggers
from retrofit.program.tracing import both_kept, disable_stack_traces, silence_tracer

if TYPE_CHECKING:
    import onnx_ir


# ── Guards ────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


LARGEST = 2**13  # the largest size that is tested
Axes = Mapping[str, Mapping[int, str]]
Shapes = dict[str, list[int]]


def check_every_size(exported: torch.export.ExportedProgram, part: ExportPart, example: Mapping[str, Tensor], axes: Axes) -> None:
    """Raises `CaptureError` if the program computes something else than the model where a guard of the tracer fails."""
    for size, extent in guard_boundaries(exported, part.sizes, example, axes):
        try:
            inputs = part.example({**part.sizes, size: extent}, 5)
            results = run_without_guards(exported, inputs)
            with torch.no_grad():
                expected = part(inputs)
        except Exception:  # the model does not run either, or a table ends there
            continue
        if results is None or any(
            distance(result, dense) > 10 * tolerance_of(dense) for result, dense in zip(results, expected, strict=True)
        ):
            raise CaptureError(
                f"the {size} is not dynamic: at {extent} the model's code takes another branch than at {part.sizes[size]}",
                why="it was traced with the latter; loops over chunks and branches on the length are such code",
                remedy="remove the loop or branch; a decoder can be exported with its cache (cache=past)",
                code="fixed-size",
            )


def run_without_guards(exported: torch.export.ExportedProgram, inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...] | None:
    """Return the program's outputs without its guards; None if it does not run.

    Raises the error if a table is shorter than the inputs.
    """
    try:
        with replace_attributes(exported, _range_constraints={}), torch.no_grad():
            return exported.module(check_guards=False)(dict(inputs))  # type: ignore[no-any-return]
    except Exception as error:
        if "out of range" in str(error):  # a file reports this too
            raise
        return None


def guard_boundaries(
    exported: torch.export.ExportedProgram, traced: Sizes, example: Mapping[str, Tensor], axes: Axes
) -> list[tuple[str, int]]:
    """Return the limits of the guards: a dynamic size with the first extent above or below the traced one at which one fails."""
    shapes = {name: list(value.shape) for name, value in example.items()}
    guards = [guard for guard in map(compile_guard, getattr(exported, "_guards_code", None) or []) if guard(shapes)]
    found = set()
    for size, extent in traced.items():
        shapes_for = functools.cache(lambda other, size=size: shapes_at(shapes, axes, traced, {size: other}))  # type: ignore[misc]
        above = [extent + 2**step for step in range(LARGEST.bit_length())]
        below = [max(0 if size == PAST else 1, extent - 2**step) for step in range(extent.bit_length() + 1)]
        for guard, tried in itertools.product(guards, (above, below)):
            first = next((index for index, other in enumerate(tried) if not guard(shapes_for(other))), None)
            if first is not None:
                holds, fails = tried[first - 1] if first else extent, tried[first]
                while abs(fails - holds) > 1:
                    middle = (holds + fails) // 2
                    holds, fails = (middle, fails) if guard(shapes_for(middle)) else (holds, middle)
                found.add((size, fails))
    return sorted(found)


def shapes_at(shapes: Shapes, axes: Axes, traced: Sizes, other: Sizes) -> Shapes:
    """Return the shapes of the inputs at other sizes; `shapes` are those at the sizes `traced`."""
    sizes = {**traced, **other}

    def growth(size: str) -> int:
        if size == TOTAL:
            return growth(LENGTH) + growth(PAST)
        size, _, stride = size.partition(PER)
        step = int(stride or 1)
        return -(-sizes[size] // step) + traced[size] // -step if size in sizes else 0

    found = {name: list(shape) for name, shape in shapes.items()}
    for name, dynamic in axes.items():
        for axis, size in dynamic.items():
            found[name][axis] += growth(size)
    return found


def compile_guard(guard: str) -> Callable[[Shapes], bool]:
    """Return a test of shapes by the guard, an expression in `L['inputs'][name].size()[axis]`; always True for other guards."""
    code = compile(guard, "<guard>", "eval")

    def holds(shapes: Shapes) -> bool:
        inputs = {name: ShapeOnly(shape) for name, shape in shapes.items()}
        try:
            return bool(eval(code, {"__builtins__": {"max": max, "min": min, "abs": abs}, "L": {"inputs": inputs}}))
        except Exception:
            return True

    return holds


class ShapeOnly:
    """A stand-in for a tensor of this shape."""

    def __init__(self, shape: list[int]) -> None:
        self.shape = shape

    def size(self) -> list[int]:
        return self.shape


# ── Tracing ───────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


WRAPPED = "model"  # the attribute of a part that holds the model
OTHER_CODE = r"[/\\](torch|onnxscript|onnx_ir|retrofit[/\\]onnx|transformers[/\\](utils|exporters))[/\\]|contextlib"  # its files
NOISY = ("torch.onnx", "torch.export", "onnxscript", "onnx_ir", "torch.fx")  # loggers of what raises its failures
SCOPES = "pkg.torch.onnx.name_scopes"  # the key under which torch records the modules that a node comes from


def trace_part(part: ExportPart) -> onnx_ir.Model:
    """Return the part as an ONNX model with its names and dynamic sizes. Raises `CaptureError` if torch cannot create one."""
    axes = part.axes()
    example = part.example(part.sizes)
    refuse_packed_layers(part.model, CaptureError, "exported to ONNX", "which torch.export does not trace")
    try:
        with transformers_patches(), silence_tracer(), silence_loggers(*NOISY), disable_stack_traces(), torch.no_grad():
            exported = export_program(part, example, axes)
            symbols = size_names(exported, example, axes)
            check_every_size(exported, part, example, axes)
            model = translate_to_onnx(exported)
    except CaptureError:
        raise
    except Exception as error:
        raise CaptureError(
            f"{type(part.model).__name__} could not be exported to ONNX as {part.name}",
            why=failure_reason(error),
            remedy="code that branches on the values of tensors, or an operation that ONNX lacks, cannot be exported",
            code="not-traced",
        ) from error
    assign_names(model, list(example), part.outputs, symbols)
    ask_sizes_once(model)
    return model


def failure_reason(error: Exception) -> str:
    """Return why the model's code cannot be traced or translated to ONNX, and at which line."""
    error = root_cause(error)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not re.search(OTHER_CODE, frame.filename)]
    line = f", at {Path(frames[-1].filename).name}, line {frames[-1].lineno}: {frames[-1].line}" if frames else ""
    if isinstance(error, GuardOnDataDependentSymNode):
        return f"its code branches on the values of tensors{line}"
    return first_line(error) + line


def export_program(part: ExportPart, example: Mapping[str, Any], axes: Axes) -> torch.export.ExportedProgram:
    shapes = {name: dict.fromkeys(axes[name], torch.export.Dim.AUTO) for name in example}
    bounded = watched({"": part}, before=lambda path, module, given, named: constrain_sizes(given[0], axes))
    with bounded, torch.fx.experimental._config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined] # 0 and 1 are sizes
        return torch.export.export(part, (dict(example),), dynamic_shapes=(shapes,), strict=False)


def constrain_sizes(inputs: Mapping[str, Tensor], axes: Axes) -> None:
    """Let the tracer assume that each dynamic size is at least 1, except the number of earlier tokens."""
    from torch.fx.experimental.symbolic_shapes import constrain_range

    for name, value in inputs.items():
        for axis, size in axes[name].items():
            if not size.startswith(PAST):
                constrain_range(value.shape[axis], min=1)  # type: ignore[arg-type] # sizes are symbols here


def size_names(exported: torch.export.ExportedProgram, example: Mapping[str, Tensor], axes: Axes) -> dict[str, str]:
    """Return the name of every dynamic size by its torch symbol. Raises `CaptureError` if torch has fixed one."""
    values = {node.name: node.meta["val"] for node in exported.graph.nodes if node.op == "placeholder"}
    placed = [values[name] for name in exported.graph_signature.user_inputs if isinstance(name, str)]
    found: dict[str, str] = {}
    extents: dict[str, int] = {}  # of each size where it was first met
    for (name, dynamic), value in zip(axes.items(), placed, strict=True):
        for axis, size in dynamic.items():
            extent = value.shape[axis]
            fixed = extent if isinstance(extent, int) else extent.node.maybe_as_int()
            if fixed is not None:
                raise CaptureError(
                    f"the {size} of {name} is fixed at {fixed} by the model's code",
                    why="it was traced with that size and branches differently for others",
                    remedy="export it with its cache, if it has one: cache='past'",
                    code="fixed-size",
                )
            same = extents.setdefault(size, example[name].shape[axis]) == example[name].shape[axis]
            found.setdefault(str(extent), size if same else f"{name}_{size}")
    return found


def translate_to_onnx(exported: torch.export.ExportedProgram) -> onnx_ir.Model:
    """Return the ONNX model of an exported program, before any optimization."""
    from transformers.exporters import exporter_onnx, utils

    unsqueeze_complex_as_pairs(exported.graph_module)
    utils.apply_fx_node_fixes("onnx", exported.graph_module)
    replace_aliases(exported.graph_module)
    table = {**exporter_onnx._ONNX_TRANSLATION_TABLE, **custom_translations()}
    with trace_once():
        program = torch.onnx.export(exported, args=(), custom_translation_table=table, optimize=False, verbose=False)
    assert program is not None
    exporter_onnx.apply_onnx_ir_fixes(program)
    make_topk_extents_dynamic(program.model)
    return program.model


def make_topk_extents_dynamic(model: onnx_ir.Model) -> None:
    """Make extents dynamic that depend on a `TopK` of k elements, of which there may be fewer."""
    import onnx_ir

    for node in [node for node in model.graph.all_nodes() if node.op_type == "TopK"]:
        k, shape = node.inputs[1], node.outputs[0].shape
        extent = None if shape is None else shape[node.attributes["axis"].as_int()]
        if k is None or onnx_ir.convenience.get_const_tensor(k) is not None or not isinstance(extent, int):
            continue
        reached, seen = list(node.outputs), set(node.outputs)
        for value in reached:
            after = [output for user in value.consumers() for output in user.outputs if output not in seen]
            reached.extend(after)
            seen.update(after)
            if value.shape is not None:
                value.shape = onnx_ir.Shape([None if size == extent else size for size in value.shape])


def unsqueeze_complex_as_pairs(module: torch.fx.GraphModule) -> None:
    """Append an axis to complex values, as pairs of reals, ONNX's representation; torch's own translation does not support this."""
    aten = torch.ops.aten
    for node in module.graph.find_nodes(op="call_function", target=aten.unsqueeze.default):
        value, axis = node.args
        if not value.meta["val"].is_complex():
            continue
        axis = axis if axis >= 0 else axis + value.meta["val"].dim() + 1
        with module.graph.inserting_before(node):
            pairs = module.graph.call_function(aten.view_as_real.default, (value,))
            pairs.meta["val"] = torch.view_as_real(value.meta["val"])
            longer = module.graph.call_function(aten.unsqueeze.default, (pairs, axis))
            longer.meta["val"] = pairs.meta["val"].unsqueeze(axis)
        node.target, node.args = aten.view_as_complex.default, (longer,)
    module.recompile()


def replace_aliases(module: torch.fx.GraphModule) -> None:
    """Replace casts and operators that torch translates only under another name; casts to the same type go."""
    aten = torch.ops.aten
    casts = (aten.to.dtype, aten.to.device, aten.to.dtype_layout)
    renamed = {
        aten.__and__.Tensor: aten.bitwise_and.Tensor,
        aten.__or__.Tensor: aten.bitwise_or.Tensor,
        aten.__xor__.Tensor: aten.bitwise_xor.Tensor,
        aten.__xor__.Scalar: aten.bitwise_xor.Scalar,
        aten.min.other: aten.minimum.default,
        aten.max.other: aten.maximum.default,
    }
    for part in graphs_in(module):
        for node in list(part.graph.nodes):
            node.target = renamed.get(node.target, node.target)
            if node.target in casts and "val" in node.meta and "val" in node.args[0].meta:
                source, dtype = node.args[0], node.meta["val"].dtype
                if source.meta["val"].dtype == dtype and not any(user.op == "output" for user in node.users):  # these keep names
                    node.replace_all_uses_with(source)
                    part.graph.erase_node(node)
                else:
                    node.target, node.args, node.kwargs = aten._to_copy.default, (source,), {"dtype": dtype}
        part.recompile()


def graphs_in(module: torch.fx.GraphModule) -> list[torch.fx.GraphModule]:
    """Return a graph module and those of its branches and loop bodies."""
    return [part for part in module.modules() if isinstance(part, torch.fx.GraphModule)]


@contextlib.contextmanager
def trace_once() -> Iterator[None]:
    """Within this context torch does not run a program again if it can translate every operation as it is.

    By default `torch.onnx.export` runs it twice: to decompose operations without a translation, and to insert casts where operands
    of different types are promoted.
    """
    from torch.onnx._internal.exporter import _decomp, _fx_passes
    from torch.onnx._internal.fx.passes import type_promotion

    passes: Any = _fx_passes
    promotion: Any = type_promotion._TypePromotionInterpreter
    decompose, run_node = passes.decompose_with_registry, promotion.run_node

    def decompose_if_needed(exported: torch.export.ExportedProgram, registry: Any) -> torch.export.ExportedProgram:
        known = set(_decomp.get_onnx_implemented_overloads(registry))
        nodes = [node for part in graphs_in(exported.graph_module) for node in part.graph.nodes if node.op == "call_function"]
        mutable = any(isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable for node in nodes)
        without_value = any("val" not in node.meta for node in nodes)  # a constant that the code made
        if mutable or without_value or exported.graph_signature.buffers_to_mutate or not known.issuperset(n.target for n in nodes):
            return decompose(exported, registry)
        return exported

    def promote(interpreter: Any, node: torch.fx.Node) -> Any:
        if node.op != "call_function" or "val" not in node.meta:
            return run_node(interpreter, node)
        rule = type_promotion.get_type_promotion_rule(node, interpreter.type_promotion_table)
        if rule is not None:
            with interpreter._set_current_node(node):
                interpreter._maybe_promote_node(node, rule)
        return node.meta["val"]

    with replace_attributes(passes, decompose_with_registry=decompose_if_needed), replace_attributes(promotion, run_node=promote):
        yield


def custom_translations() -> dict[Any, Callable[..., Any]]:
    """Return translations of operations that torch's own translation lacks, or supports only at some sizes.

    These are a maximum or minimum over all axes; the k largest where there may be fewer than k (a model asks for them only if there
    are more, so a program for more tokens does, and for fewer tokens takes all that there are); the stride of an axis, an operand
    of a choice by size.
    """
    from onnxscript import onnx_opset

    op: Any = onnx_opset.opset18

    def reduced(reduce: Callable[..., Any]) -> Callable[..., Any]:
        def translate(self: Any, dim: Any = (), keepdim: bool = False) -> Any:
            axes = [dim] if isinstance(dim, int) else list(dim)
            return reduce(self, op.Constant(value_ints=axes), keepdims=keepdim) if axes else reduce(self, keepdims=keepdim)

        return translate

    def top_k(self: Any, k: Any, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
        extent = None if self.shape is None else self.shape[dim]
        if isinstance(extent, int) or not isinstance(k, int):
            return op.TopK(self, [k], axis=dim, largest=largest, sorted=sorted)
        dynamic_extent = op.Gather(op.Shape(self), op.Constant(value_ints=[dim]))
        least = op.Min(op.Constant(value_ints=[k]), dynamic_extent)
        return op.TopK(self, least, axis=dim, largest=largest, sorted=sorted)

    def stride(self: Any, dim: int) -> Any:  # every tensor in ONNX is contiguous
        return op.ReduceProd(op.Shape(self, start=dim + 1), keepdims=False) if dim != -1 else op.Constant(value_int=1)

    aten = torch.ops.aten
    reductions = {aten.amax.default: reduced(op.ReduceMax), aten.amin.default: reduced(op.ReduceMin)}
    return {**reductions, aten.topk.default: top_k, aten.sym_stride.int: stride}


def assign_names(model: onnx_ir.Model, inputs: list[str], outputs: list[str], symbols: Mapping[str, str]) -> None:
    """Assign these names to the inputs, the outputs and the dynamic sizes of the model, the sizes wherever they occur."""
    import onnx_ir

    graph = model.graph
    for index, value in enumerate(graph.outputs):  # an input that is also an output keeps its own name
        if value.is_graph_input() or value in list(graph.outputs)[:index]:
            identity = onnx_ir.node("Identity", [value])
            (copy,) = identity.outputs
            copy.shape, copy.type = value.shape, value.type
            graph.append(identity)
            graph.outputs[index] = copy
    for value in list(graph.initializers.values()):
        value.name = str(value.name).removeprefix(f"{WRAPPED}.")  # the model's own name of a weight
    for node in graph.all_nodes():
        if (scopes := node.metadata_props.get(SCOPES)) is not None:
            node.metadata_props[SCOPES] = re.sub(rf"'{WRAPPED}(?:\.|(?='))", "'", scopes)
    for values, names in ((graph.inputs, inputs), (graph.outputs, outputs)):
        for value, name in zip(values, names, strict=True):
            value.name = name
    for value in (*graph.inputs, *(output for node in graph.all_nodes() for output in node.outputs)):
        if value.shape is not None:
            value.shape = onnx_ir.Shape([extent if isinstance(extent, int) else named(extent, symbols) for extent in value.shape])


def ask_sizes_once(model: onnx_ir.Model) -> None:
    """Read each dynamic size from the first used input that has it, so that values derived from it are computed once."""
    import onnx_ir

    first: dict[str, tuple[onnx_ir.Value, int]] = {}
    for value in [value for value in model.graph.inputs if any(node.op_type != "Shape" for node in value.consumers())]:
        for axis, extent in enumerate(value.shape or ()):
            if isinstance(extent, onnx_ir.SymbolicDim) and extent.value is not None:
                first.setdefault(extent.value, (value, axis))
    for node in [node for node in model.graph.all_nodes() if node.op_type == "Shape" and {"start", "end"} <= set(node.attributes)]:
        measured, start, end = node.inputs[0], node.attributes["start"].as_int(), node.attributes["end"].as_int()
        if measured is None or not measured.is_graph_input() or measured.shape is None or end != start + 1:
            continue
        extent = measured.shape[start]
        if isinstance(extent, onnx_ir.SymbolicDim) and extent.value in first:
            source, axis = first[extent.value]
            node.replace_input_with(0, source)
            for name, number in (("start", axis), ("end", axis + 1)):
                node.attributes[name] = onnx_ir.AttrInt64(name, number)


def named(extent: onnx_ir.SymbolicDim, symbols: Mapping[str, str]) -> onnx_ir.SymbolicDim | str:
    """Return the extent with names of dynamic sizes for torch's symbols: fusions compare extents of inputs with others."""
    if extent.value is None:
        return extent
    text = str(extent.value)
    return symbols.get(text) or re.sub(r"\bs\d+\b", lambda found: symbols.get(found[0], found[0]), text)


@contextlib.contextmanager
def transformers_patches() -> Iterator[None]:
    """Within this context transformers' patches for ONNX export are active, except for the branches of a choice by size."""
    import transformers.exporters.exporter_onnx  # noqa: F401 # registers them
    from transformers.exporters import utils

    def patched(path: Any) -> Any:  # in earlier versions the object itself
        return utils.import_dotted_path(path, missing_ok=True) if isinstance(path, str) else path

    def is_in_torch(path: Any) -> bool:
        name = path if isinstance(path, str) else getattr(path, "__module__", None) or path.__name__
        return str(name).startswith("torch")

    owners = [(patched(path), name) for path, name, _ in utils._PATCHES["onnx"] if is_in_torch(path)]
    originals = [(owner, name, getattr(owner, name)) for owner, name in owners if owner is not None]
    with utils.apply_patches("onnx"), both_kept(originals):
        yield
