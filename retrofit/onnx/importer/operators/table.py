"""The table of ONNX operators: the torch function that computes each, by domain and name.

A function takes its inputs in ONNX's order and the attributes by name; it returns one value or a tuple. Where all inputs are
numbers (`retrofit.onnx.importer.values`) and numbers can express the result, it returns numbers.

Source: the operator specifications of ONNX, operator sets 13 to 24.
"""

from __future__ import annotations

import builtins
import keyword
from collections.abc import Callable
from typing import Any

MICROSOFT = "com.microsoft"  # the domain of ONNX Runtime's own operators
CHOICE = "retrofit.choice"  # in the metadata of an `If` that an export made of the operator it says: both branches may be computed
Operator = Callable[..., Any]


OPERATORS: dict[tuple[str, str], Operator] = {}  # by domain and name


REFUSALS: dict[
    tuple[str, str], Callable[[dict[str, Any]], str]
] = {}  # what of a node's attributes its function does not support, "" if nothing


FACTORIES: set[Operator] = set()  # those that create a tensor from numbers and take its device


def operator(
    *names: str, domain: str = "", creates: bool = False, refuses: Callable[[dict[str, Any]], str] | None = None
) -> Callable[[Operator], Operator]:
    """Nodes of these names call the decorated function; one that `creates` a tensor from numbers takes its device.

    `refuses` says what of a node's attributes the function does not compute, "" where it computes all.
    """

    def registered(function: Operator) -> Operator:
        for name in names:
            OPERATORS[domain, name] = function
            if refuses is not None:
                REFUSALS[domain, name] = refuses
        if creates:
            FACTORIES.add(function)
        return function

    return registered


def function_name(name: str) -> str:
    """The name of the function: `greater_or_equal` for `GreaterOrEqual`."""
    words = "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name).lstrip("_")
    return f"{words}_" if keyword.iskeyword(words) or hasattr(builtins, words) else words
