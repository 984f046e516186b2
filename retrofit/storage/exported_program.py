"""Models as exported programs: reading and writing `.pt2` files.

A `.pt2` file is written by `torch.export.save`: a graph, its weights, an example of its inputs. It is read as a graph module. To
write a model, it is exported again with dynamic shapes, and the recipe becomes an extra file in the archive. For a rewritten graph
the archive also contains the dense program, which torch.export.load ignores. The recipe is replayed on it, so that the passes' own
modules exist again, with their behaviour in training. The dense program has no weights: those in the file are the rewritten
program's.

Some contents of a file would run as code when it is read. Torch unpickles sample inputs and some weights and constants, loads
compiled libraries, evaluates sizes as Python expressions, calls any function in `torch` that a node names, and writes names into
the source of the graph. Each of these is accepted here only in a form in which it can run nothing but operators on tensors.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import re
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import InputKind
from torch.export.pt2_archive import PT2ArchiveReader, constants
from torch.export.pt2_archive._package import load_pt2, package_pt2
from torch.utils._pytree import tree_leaves
from torch.utils._sympy import functions

from retrofit.emitted import DenseGraph, dense_graph, from_exported
from retrofit.errors import CaptureError, CheckpointError, RetrofitWarning, first_line
from retrofit.files.atomic_writes import whole_file
from retrofit.files.memory import require_memory, require_unpacked_fits
from retrofit.inputs.model_memory import zeros_for
from retrofit.inputs.model_state import evaluation_mode
from retrofit.inputs.probes import is_numbering, is_per_token, is_token_ids
from retrofit.inputs.usable_models import require_values
from retrofit.passbase import recipe_storage
from retrofit.passbase.replaying import replayed_inputs
from retrofit.process import unbroken
from retrofit.program.capture import as_plain_module
from retrofit.program.tracing import disable_cache, silence_tracer, with_dynamic_shapes
from retrofit.provenance import record_provenance
from retrofit.storage.filling import fill_model

CASTS = ("_to_copy", "to", "clone", "alias", "_assert_tensor_metadata")


def example_tensors(exported: torch.export.ExportedProgram) -> dict[str, Tensor]:
    """Return the tensors among the program's example inputs, by name.

    Programs are often exported on zeros, ones or consecutive ids, on which nothing can be measured; such ids are replaced by random
    ones.
    """
    args, kwargs = exported.example_inputs or ((), {})
    named = zip(exported.graph_signature.user_inputs, tree_leaves((args, kwargs)), strict=False)
    held = {name: value for name, value in named if isinstance(name, str) and isinstance(value, Tensor)}
    return held if any(map(is_token_ids, held.values())) else held | drawn_ids(exported, held)


def drawn_ids(exported: torch.export.ExportedProgram, held: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return random ids for the inputs that index the largest table; if it has other inputs, consecutive ids are positions."""
    nodes = {node.name: node for node in exported.graph.nodes if node.op == "placeholder"}
    rows = {name: max(table_rows(nodes[name]), default=0) for name, value in held.items() if is_per_token(value) and name in nodes}
    tables = {name: count for name, count in rows.items() if count}
    tables = {name: count for name, count in tables.items() if not is_numbering(held[name])} or tables
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randint(count, held[name].shape, generator=generator).to(held[name])
        for name, count in tables.items()
        if count == max(tables.values())
    }


def table_rows(ids: fx.Node) -> Iterator[int]:
    """Yield the number of rows of each table that is indexed by `ids` or a copy of them."""
    for user in ids.users:
        name = getattr(user.target, "_opname", "")
        if name == "embedding" and user.args[1] is ids:
            rows = user.args[0].meta["val"].shape[0]  # type: ignore[union-attr]
            yield from [rows] if isinstance(rows, int) else []
        elif name in CASTS:
            yield from table_rows(user)


NAME = re.compile(r"[\w.:+-]*")  # a text that remains one word in the source of a graph
SIZE = re.compile(r"[\w ()=,.'+\-*/%<>!&|~]*")  # the characters in an expression of sizes
OPERATOR = re.compile(r"torch\.ops\.(aten|prims|quantized_decomposed|torchvision|retrofit)\.(\w+)\.(\w+)")
MIXTURES = "torch.ops.transformers.grouped_mm_fallback.default"  # the products of all experts, in transformers
ON_FILES = ("from_file", "save")  # operators that read and write files
PYTHON_OPERATORS = frozenset(
    f"_operator.{name}"
    for name in "eq ne le ge lt gt neg pos mul add sub floordiv truediv mod pow and_ or_ xor lshift rshift getitem".split()
) | frozenset(
    ["math.trunc", "math.floor", "math.ceil", "math.sqrt"]
    + [f"torch.sym_{name}" for name in "not int float ite max min sqrt sum".split()]
)
WITH_GRAPHS = frozenset(  # operators that take graphs and run them
    f"torch.ops.higher_order.{name}"
    for name in "wrap_with_set_grad_enabled wrap_with_autocast cond while_loop scan map_impl associative_scan flex_attention "
    "tag_activation_checkpoint invoke_subgraph".split()
)
PICKLED = (  # beginnings of the names of pickled objects; torch 2.11 has one kind of them
    constants.CUSTOM_OBJ_FILENAME_PREFIX,
    getattr(constants, "OPAQUE_OBJ_FILENAME_PREFIX", "opaque_obj_"),
)
IMPORTS = ("__enum__", "default_factory_module")  # keys of a tree of arguments that make torch import a module
TEXTS = ("as_string", "as_strings", "metadata", "guards_code", "opset_version")  # data, or never read by this project


def refuse_code(path: Path) -> None:
    """Raises `CheckpointError` if anything in the exported program at `path` would run as code when it is read and called."""
    reader = PT2ArchiveReader(str(path))
    records = reader.get_file_names()
    if any(record.startswith(constants.AOTINDUCTOR_DIR) for record in records):
        raise is_code(path, "it holds a compiled library")
    before, after = constants.MODELS_FILENAME_FORMAT.split("{}")
    for record in records:
        if record.startswith(constants.MODELS_DIR):
            name = record[len(before) : -len(after)]
            for pickled in pickled_records(reader, name, path):
                refuse_pickle(reader.read_bytes(pickled), pickled, path)
            refuse_program(json.loads(reader.read_string(record)), path)


def is_code(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"{path} can run code when it is read",
        why=why,
        remedy="if you trust its author: allow_pickle=True (--allow-pickle)",
        code="untrusted",
    )


def pickled_records(reader: PT2ArchiveReader, model: str, path: Path) -> Iterator[str]:
    """Yield the records of a model that torch unpickles. Raises `CheckpointError` for those unpickled without limits."""
    records = reader.get_file_names()
    yield constants.SAMPLE_INPUTS_FILENAME_FORMAT.format(model)
    for folder, configured in (
        (constants.WEIGHTS_DIR, constants.WEIGHTS_CONFIG_FILENAME_FORMAT),
        (constants.CONSTANTS_DIR, constants.CONSTANTS_CONFIG_FILENAME_FORMAT),
    ):
        older = f"{folder}{model}.pt"
        if older in records:
            yield older
            continue
        for name, payload in json.loads(reader.read_string(configured.format(model)))["config"].items():
            stored = str(payload["path_name"])
            if stored.startswith(PICKLED):
                raise is_code(path, f"{name!r} is a pickled object")
            if payload["use_pickle"]:
                yield os.path.join(folder, stored)


def refuse_pickle(content: bytes, record: str, path: Path) -> None:
    """Raises `CheckpointError` unless the pickle holds tensors and plain data, which torch unpickles without running code."""
    if not content:
        return
    try:
        torch.load(io.BytesIO(content), weights_only=True)
    except Exception as error:  # torch names what it refuses; a damaged pickle is refused as well
        raise is_code(path, f"{record} is a pickle of more than tensors ({first_line(error)})") from error


def refuse_program(value: Any, path: Path, key: str = "") -> None:
    """Raises `CheckpointError` unless each string in the program is a name, operator or expression of sizes, as its key needs."""
    if isinstance(value, dict):
        for name, item in value.items():
            require(is_size(name) if key == "range_constraints" else NAME.fullmatch(name), name, path)
            if name == "metadata":
                refuse_module_paths(item, path)
            elif name not in TEXTS:
                refuse_program(item, path, name)
    elif isinstance(value, list):
        for item in value:
            refuse_program(item, path, key)
    elif isinstance(value, str):
        if key in ("target", "as_operator"):
            require(is_operator(value), value, path)
        elif key == "expr_str":
            require(is_size(value), value, path)
        elif key in ("in_spec", "out_spec"):
            refuse_tree(json.loads(value), path) if value else None
        else:
            require(NAME.fullmatch(value), value, path)


def require(admitted: Any, text: str, path: Path) -> None:
    if not admitted:
        raise is_code(path, f"its graph holds {text[:80]!r}, which may be code")


def refuse_module_paths(metadata: Any, path: Path) -> None:
    """Raises `CheckpointError` if module paths of a node's metadata contain quotation marks: they become source code."""
    stack = metadata.get("nn_module_stack", "") if isinstance(metadata, dict) else ""
    require(re.fullmatch(r"[^\"'\\\n]*", str(stack)), str(stack), path)


def refuse_tree(value: Any, path: Path) -> None:
    """Raises `CheckpointError` if the tree of a call's arguments or results names a module to import, or its keys are no names."""
    if isinstance(value, dict):
        for name, item in value.items():
            require(name not in IMPORTS, name, path)
            if name == "context" and isinstance(item, str):
                refuse_tree(as_json(item), path)
            else:
                refuse_tree(name, path)
                refuse_tree(item, path)
    elif isinstance(value, list):
        for item in value:
            refuse_tree(item, path)
    elif isinstance(value, str):
        require(NAME.fullmatch(value), value, path)


def as_json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def is_operator(target: str) -> bool:
    """Return whether a node's target computes on tensors and numbers and has no other effect."""
    if target in PYTHON_OPERATORS or target in WITH_GRAPHS or target == MIXTURES:
        return True
    match = OPERATOR.fullmatch(target)
    if match is None or match[2] in ON_FILES:
        return False
    packet = getattr(getattr(torch.ops, match[1]), match[2], None)
    return isinstance(getattr(packet, match[3], None), torch._ops.OpOverload)


def is_size(text: str) -> bool:
    """Return whether the text is arithmetic on numbers, symbols and sympy's functions."""
    if not SIZE.fullmatch(text):
        return False
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, RecursionError):
        return False
    return all(is_arithmetic(node) for node in ast.walk(tree))


def is_arithmetic(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and is_sympy(node.func.id)
    if isinstance(node, ast.Constant):  # in a symbol's name, only a word
        return not isinstance(node.value, str) or re.fullmatch(r"\w+", node.value) is not None
    if isinstance(node, ast.Name):
        return not node.id.startswith("__")
    arithmetic = (ast.Expression, ast.keyword, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare)
    return isinstance(node, (*arithmetic, ast.operator, ast.unaryop, ast.boolop, ast.cmpop, ast.expr_context))


def is_sympy(name: str) -> bool:
    """Return whether this is the name of a class of expressions, of sympy or torch."""
    kind = getattr(functions, name, None) or getattr(sympy, name, None)
    return isinstance(kind, type) and issubclass(kind, sympy.Basic)


def leave_out_parameters(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Return `program` with a single zero for each of its parameters, which takes no space in a file; tied ones share it."""
    zeros: dict[int, Tensor] = {}
    for name, held in program.state_dict.items():
        if isinstance(held, nn.Parameter):
            zero = zeros.setdefault(held.data_ptr(), torch.zeros(1, dtype=held.dtype))
            program.state_dict[name] = nn.Parameter(zero, held.requires_grad)
    return program


def give_back_parameters(program: torch.export.ExportedProgram) -> None:
    """Restore the shapes of the parameters that `leave_out_parameters` left out, with zeros."""
    shapes = dict(parameter_shapes(program))
    require_memory(sum(shape.numel() * shape.element_size() for shape in shapes.values()), "the weights of its dense program")
    made: dict[int, nn.Parameter] = {}
    for name, held in program.state_dict.items():
        if isinstance(held, nn.Parameter) and name in shapes:
            zeros = nn.Parameter(zeros_for(shapes[name]), held.requires_grad)
            program.state_dict[name] = made.setdefault(held.data_ptr(), zeros)


def parameter_shapes(program: torch.export.ExportedProgram) -> Iterator[tuple[str, Any]]:
    """Yield each parameter's name, and its value in the trace, which has only a shape."""
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    for input_spec in program.graph_signature.input_specs:
        if input_spec.kind is InputKind.PARAMETER and input_spec.target is not None:
            yield input_spec.target, nodes[input_spec.arg.name].meta["val"]


def rewrite_again(
    dense: torch.export.ExportedProgram, rewritten: torch.export.ExportedProgram, recipe: Sequence[str], examples: dict[str, Tensor]
) -> fx.GraphModule:
    """Return the graph of `dense`, rewritten by the recipe, with the weights of the `rewritten` program.

    Raises `RetrofitError` if the recipe does not transform one program into the other.
    """
    give_back_parameters(dense)
    model = from_exported(dense)
    record_provenance(model, examples=examples)
    record_provenance(model, dense=DenseGraph.of(model))
    trained = {name: tensor.requires_grad for name, tensor in rewritten.state_dict.items()}
    fill_model(model, recipe, rewritten.state_dict, None)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained[name])
    held = {**rewritten.state_dict, **rewritten.constants}
    for path, module in model.named_modules():
        for leaf in module._non_persistent_buffers_set:
            value = held.get(f"{path}.{leaf}" if path else leaf)
            if isinstance(value, Tensor):  # of the dtype and on the device that the model was saved with
                module._buffers[leaf] = value
    return model


Programs = dict[str, torch.export.ExportedProgram]  # of a file, by their names in it

RECIPE = "retrofit.json"  # the extra file with the recipe
MODEL, DENSE = "model", "dense"  # the program that torch loads, and the one that it was made from


def save_exported(model: nn.Module, path: Path, *, force: bool = False) -> Path:
    """Write the model to `path` as an exported program for any batch size and length that its code allows, with its recipe."""
    require_values(model, "exported", "load its weights first")
    given = replayed_inputs(model, recipe_storage.stored_inputs(model))
    inputs = {name: value.contiguous() for name, value in given.items() if isinstance(value, Tensor)}  # only such strides run
    try:
        programs = {MODEL: export_program(model, inputs)}
    except Exception as error:  # of any type, from the model's own code
        raise CheckpointError(
            f"{type(model).__name__} cannot be exported", why=first_line(error), remedy="save it as a .pt file", code="unwritable"
        ) from error
    dense = dense_graph(model)
    if dense is not None:
        with contextlib.suppress(Exception):  # the program runs without it
            on_cpu = {name: value.cpu() for name, value in inputs.items()}
            programs[DENSE] = leave_out_parameters(export_program(dense.empty(), on_cpu))
    recipe = json.dumps(list(recipe_storage.stored_recipe(model)))
    with whole_file(path, force=force) as file, unbroken(file) as sink:
        try:
            package_pt2(sink, exported_programs=programs, extra_files={RECIPE: recipe})
        except NotImplementedError as error:  # a class of the model's own among its inputs or outputs
            raise CheckpointError(
                f"{path} cannot be written",
                why=first_line(error),
                remedy="wrap the model in a module that takes and returns tensors, tuples and dicts, before it is rewritten",
                code="unwritable",
            ) from error
    return path


def export_program(model: nn.Module, inputs: dict[str, Any]) -> torch.export.ExportedProgram:
    """Return the model's program in evaluation mode, for any batch size and length that its code allows."""
    with evaluation_mode(model), torch.no_grad(), silence_tracer(), disable_cache(model):
        return with_dynamic_shapes(
            model,
            inputs,
            lambda sizes: torch.export.export(as_plain_module(model), (), inputs, dynamic_shapes=sizes, strict=False),
        )


def load_exported(path: Path, *, allow_pickle: bool = False) -> fx.GraphModule:
    """Return the exported program at `path` as a graph module in evaluation mode.

    Raises `CheckpointError` if it is not an exported program, or would run code when read and `allow_pickle` is not set.
    """
    try:
        with silence_tracer():
            programs, recipe = read_trusted(path) if allow_pickle else read_data(path)
        model = graph_of(programs, recipe, path)
    except CheckpointError:
        raise
    except CaptureError as error:
        raise CheckpointError(f"{path}: {error.what}", why=error.why, remedy=error.remedies, **error.labels) from error
    except Exception as error:
        raise CheckpointError(
            f"{path} cannot be read as an exported program",
            why=first_line(error),
            remedy="use a complete file written by torch.export.save of torch 2.8 or later",
            code="unreadable",
        ) from error
    return model.eval()


def graph_of(programs: Programs, recipe: list[str], path: Path) -> fx.GraphModule:
    """Return the rewritten program as a graph module, with the passes' own modules if the recipe can be replayed."""
    program = programs[MODEL]
    examples = example_tensors(program)
    if recipe and DENSE in programs:
        try:
            return rewrite_again(programs[DENSE], program, recipe, examples)
        except Exception as error:  # torch's too
            lost = "what its passes do in training is not in the model"
            message = f"{path}: {lost}, whose recipe cannot be replayed: {first_line(error)}"
            warnings.warn(message, RetrofitWarning, stacklevel=2)
    model = from_exported(program)
    record_provenance(model, examples=examples)
    if recipe:
        recipe_storage.store_recipe(model, recipe)
    return model


def read_data(path: Path) -> tuple[Programs, list[str]]:
    """Return the programs and the recipe in a file. Raises `CheckpointError` if it could run code when it is read."""
    require_unpacked_fits(path)
    refuse_code(path)
    return read_archive(path)  # if this fails, torch.export.load would try an older format


def read_archive(path: Path) -> tuple[Programs, list[str]]:
    """Return the programs and the recipe in a file of torch's current format."""
    content = load_pt2(str(path))
    programs = {MODEL: content.exported_programs[MODEL]}  # a KeyError if torch could not load it either
    if DENSE in content.exported_programs:
        programs[DENSE] = content.exported_programs[DENSE]
    for program in programs.values():
        program._guards_code = []  # source code that checks the inputs
    return programs, parse_recipe(content.extra_files.get(RECIPE, ""))


def read_trusted(path: Path) -> tuple[Programs, list[str]]:
    """Return the programs and the recipe in a file of any format that torch reads; this may run code."""
    with contextlib.suppress(Exception):
        return read_archive(path)
    extra = {RECIPE: ""}
    exported = torch.export.load(path, extra_files=extra)
    return {MODEL: exported}, parse_recipe(extra[RECIPE])


def parse_recipe(text: str) -> list[str]:
    """Return the recipe in the extra file; empty if there is no such file."""
    recipe = json.loads(text or "[]")
    if not (isinstance(recipe, list) and all(isinstance(spec, str) for spec in recipe)):
        raise ValueError(f"its recipe is {text[:80]}")
    return recipe
