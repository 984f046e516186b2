"""What in a `.pt2` file would run as code when it is read, and the refusal of it.

Torch unpickles sample inputs and some weights and constants, loads compiled libraries, evaluates sizes as Python expressions, calls
whatever in `torch` a node names, and writes names into the source of the graph. Each of these is admitted here only in the form in
which it cannot run anything but operators on tensors.
"""

from __future__ import annotations

import ast
import io
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sympy
import torch
from torch.export.pt2_archive import PT2ArchiveReader, constants
from torch.utils._sympy import functions

from retrofit.errors import CheckpointError, first_line

NAME = re.compile(r"[\w.:+-]*")  # what stays one word in the source of a graph
SIZE = re.compile(r"[\w ()=,.'+\-*/%<>!&|~]*")  # the characters of an expression of sizes
OPERATOR = re.compile(r"torch\.ops\.(aten|prims|quantized_decomposed|torchvision|retrofit)\.(\w+)\.(\w+)")
MIXTURES = "torch.ops.transformers.grouped_mm_fallback.default"  # the products of all experts, of transformers' own
ON_FILES = ("from_file", "save")  # operators that read and write them
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
PICKLED = (  # how names of pickled objects begin; torch 2.11 knows one kind of them
    constants.CUSTOM_OBJ_FILENAME_PREFIX,
    getattr(constants, "OPAQUE_OBJ_FILENAME_PREFIX", "opaque_obj_"),
)
IMPORTS = ("__enum__", "default_factory_module")  # keys of a tree of arguments by which torch imports a module
TEXTS = ("as_string", "as_strings", "metadata", "guards_code", "opset_version")  # data, or never read by this project


def refuse_code(path: Path) -> None:
    """Nothing in the exported program at `path` runs when it is read and called; else `CheckpointError`."""
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
        remedy="if you trust whoever wrote it: allow_pickle=True (--allow-pickle)",
    )


def pickled_records(reader: PT2ArchiveReader, model: str, path: Path) -> Iterator[str]:
    """The records of a model that torch unpickles; raises for those that it unpickles without any limits."""
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
    """The pickle holds tensors and plain data, which torch unpickles without running code."""
    if not content:
        return
    try:
        torch.load(io.BytesIO(content), weights_only=True)
    except Exception as error:  # torch names what it refuses; a damaged pickle is refused as well
        raise is_code(path, f"{record} is a pickle of more than tensors ({first_line(error)})") from error


def refuse_program(value: Any, path: Path, key: str = "") -> None:
    """Every string in the program is a name, an operator or an expression of sizes, as the entry it belongs to takes."""
    if isinstance(value, dict):
        for name, one in value.items():
            require(is_size(name) if key == "range_constraints" else NAME.fullmatch(name), name, path)
            if name == "metadata":
                refuse_module_paths(one, path)
            elif name not in TEXTS:
                refuse_program(one, path, name)
    elif isinstance(value, list):
        for one in value:
            refuse_program(one, path, key)
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
    """The module paths of a node's metadata hold no quotation marks: they become source code."""
    stack = metadata.get("nn_module_stack", "") if isinstance(metadata, dict) else ""
    require(re.fullmatch(r"[^\"'\\\n]*", str(stack)), str(stack), path)


def refuse_tree(value: Any, path: Path) -> None:
    """The tree of a call's arguments or results names no module to import, and its keys are names."""
    if isinstance(value, dict):
        for name, one in value.items():
            require(name not in IMPORTS, name, path)
            if name == "context" and isinstance(one, str):
                refuse_tree(as_json(one), path)
            else:
                refuse_tree(name, path)
                refuse_tree(one, path)
    elif isinstance(value, list):
        for one in value:
            refuse_tree(one, path)
    elif isinstance(value, str):
        require(NAME.fullmatch(value), value, path)


def as_json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def is_operator(target: str) -> bool:
    """Whether a node's target computes on tensors and numbers and does nothing else."""
    if target in PYTHON_OPERATORS or target in WITH_GRAPHS or target == MIXTURES:
        return True
    match = OPERATOR.fullmatch(target)
    if match is None or match[2] in ON_FILES:
        return False
    packet = getattr(getattr(torch.ops, match[1]), match[2], None)
    return isinstance(getattr(packet, match[3], None), torch._ops.OpOverload)


def is_size(text: str) -> bool:
    """Whether the text is arithmetic on numbers, symbols and sympy's functions."""
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
    if isinstance(node, ast.Constant):  # of a symbol's name only a word
        return not isinstance(node.value, str) or re.fullmatch(r"\w+", node.value) is not None
    if isinstance(node, ast.Name):
        return not node.id.startswith("__")
    arithmetic = (ast.Expression, ast.keyword, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare)
    return isinstance(node, (*arithmetic, ast.operator, ast.unaryop, ast.boolop, ast.cmpop, ast.expr_context))


def is_sympy(name: str) -> bool:
    """Whether a class of expressions is called so, of sympy's or of torch's."""
    kind = getattr(functions, name, None) or getattr(sympy, name, None)
    return isinstance(kind, type) and issubclass(kind, sympy.Basic)
