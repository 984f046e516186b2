"""An attention's own code with the weights of another attention: a copy for one call, of which only the core's operands are kept.

    keys and values of the encoder's tokens by self-attention's weights          the code of the cross-attention
    keys and values of the decoder's tokens by cross-attention's weights         the code of the self-attention

So head layout, norms, positions, masks and the cache are whatever the model's own code makes of them. The copy shares every module
with the two attentions, and nothing is registered in the model.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from retrofit.passes.merge_cross_attention.core_calls import no_values
from retrofit.sdk import child_modules

HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)


Recorded = Callable[[list[dict[str, Any]]], AbstractContextManager[Any]]  # what an attention attends with goes into the list


@dataclasses.dataclass(frozen=True)
class Borrowing:
    """What of an attention's code is replaced, by paths inside it: modules of another one; queries and results, which go unused."""

    modules: Mapping[str, str]  # path in the code's own module → path of what replaces it in the other
    query: tuple[str, int]  # what projects the queries, and their columns; "" where the queries are needed
    out: str  # what multiplies the result; "" where that is outside


class NoQuery(nn.Module):
    """Zeros for each token: the queries are those of another call."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        return no_values(x, self.width)


def borrowed_operands(
    code: nn.Module, lender: nn.Module, borrowing: Borrowing, recorded: Recorded, args: Any, kwargs: Mapping[str, Any]
) -> tuple[dict[str, Any], Any]:
    """What `code`, with the modules of `lender`, attends with, as `recorded` has it; and its result, made of zeros."""
    replaced = {path: module_at(lender, other) for path, other in borrowing.modules.items()}
    path, width = borrowing.query
    if path:
        replaced[path] = NoQuery(width)
    if borrowing.out:
        replaced[borrowing.out] = nn.Identity()
    calls: list[dict[str, Any]] = []
    with recorded(calls):
        returned = copy_with(code, replaced)(*args, **kwargs)
    operands = {key: value for key, value in calls[0].items() if key not in ("dropout_p", "enable_gqa")} if calls else {}
    return (operands | {"query": None} if path and operands else operands), returned


def copy_with(module: nn.Module, replaced: Mapping[str, nn.Module]) -> nn.Module:
    """A shallow copy of `module`, and of those inside it on the way to a path in `replaced`, with the modules there replaced."""
    if "" in replaced:
        return replaced[""]
    children = dict(child_modules(module))
    inner: dict[str, dict[str, nn.Module]] = {}
    for path, other in replaced.items():
        name, _, rest = path.partition(".")
        inner.setdefault(name, {})[rest] = other
    for name, below in inner.items():
        children[name] = copy_with(children[name], below)
    copy: nn.Module = object.__new__(type(module))
    hooks: dict[str, Any] = {name: OrderedDict() for name in HOOKS}  # what watches the module's calls does not watch this one
    copy.__dict__.update({**module.__dict__, **hooks, "_modules": children})
    return copy


def module_at(module: nn.Module, path: str) -> nn.Module:
    """The module at a path inside another, from the registries: while tracing, attribute access returns proxies."""
    for name in path.split(".") if path else ():
        module = child_modules(module)[name]
    return module
