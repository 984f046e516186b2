"""Tables whose rows a module looks up by indices computed from the ids: the gradient of a step has few rows, however large the
table.

    rows(table, i) = table[i]                                     table: [n, …], i: (…)

A table may stay in the CPU's memory while the model is on another device: indices are copied to the CPU, rows and gradients between
the two.

A table may be sharded among processes, like any parameter that torch shards. Every process then looks up the rows it holds for the
indices of all processes, and its rows receive the gradients of all.
"""

from __future__ import annotations

import contextlib
import contextvars
import warnings
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional as F

from retrofit.errors import RetrofitWarning
from retrofit.inputs.model_memory import zeros_for
from retrofit.process import set_variable

LARGE = 1 << 30  # bytes; a dense gradient of a table of this size is worth a warning
IN_CHECKS: contextvars.ContextVar[bool] = contextvars.ContextVar("in_checks", default=False)
warned: set[int] = set()  # by id: the tables for which a warning was given


class RowTables(nn.Module):
    """A module with tables, each of them a parameter."""

    sparse: bool = False  # whether the gradient of a table is a sparse tensor of the rows that were looked up
    on_host: bool = False  # whether tables stay in the CPU's memory
    reader: ClassVar[Callable[..., Tensor] | None] = None  # how rows are looked up if retrofit is installed: `read_rows`

    def tables(self) -> tuple[str, ...]:
        """Return the names of the parameters whose rows are looked up by indices computed from the ids."""
        return ()

    def rows(self, table: Tensor, i: Tensor) -> Tensor:
        """Return the rows at these indices; their gradients are sparse if `sparse` is set, else dense."""
        return self.plain_rows(table, i) if self.reader is None else self.reader(table, i)

    def plain_rows(self, table: Tensor, i: Tensor) -> Tensor:
        if i.device != table.device:
            return self.plain_rows(table, i.to(table.device)).to(i.device)
        if table.dim() == 2:
            return F.embedding(i, table, sparse=self.sparse)
        if self.sparse and is_learned(table):
            return RowsWithSparseGradient.apply(table, i)  # type: ignore[no-any-return, no-untyped-call]
        return F.embedding(i, table.flatten(1)).unflatten(-1, table.shape[1:])

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Apply `fn` to the module's tensors, as `nn.Module` does to move or cast them; tables on the host are only cast."""
        if not self.on_host:
            return super()._apply(fn, recurse)  # type: ignore[no-untyped-call, no-any-return]
        tables = [self.get_parameter(name) for name in self.tables()]
        held = {id(tensor) for table in tables for tensor in (table, table.grad)}
        return super()._apply(  # type: ignore[no-untyped-call, no-any-return]
            lambda tensor: cast_on_host(fn, tensor) if id(tensor) in held else fn(tensor), recurse
        )


@torch.no_grad()
def release_zeros(module: RowTables) -> None:
    """Release the memory of tables on the CPU that are all zero: a row uses memory once it is written."""
    for table in map(module.get_parameter, module.tables()):
        if table.device.type == "cpu" and type(table) is nn.Parameter and not bool(table.any()):
            table.data = zeros_for(table)


def cast_on_host(fn: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """Return `fn(tensor)` in the CPU's memory, without a tensor of its size on another device."""
    asked = fn(tensor[:0])
    if asked.is_meta:
        return fn(tensor)
    if tensor.is_meta:
        return torch.empty_like(tensor, device="cpu", dtype=asked.dtype)
    return tensor.to("cpu", asked.dtype)


def is_learned(table: Tensor) -> bool:
    """Return whether a look-up now needs a gradient."""
    return torch.is_grad_enabled() and table.requires_grad and not torch.compiler.is_exporting()


class RowsWithSparseGradient(torch.autograd.Function):
    """`table[i]` with a sparse gradient of the table's shape; torch's own look-up supports that only for rows of numbers."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, i: Tensor) -> Tensor:
        ctx.save_for_backward(i)
        ctx.size = table.shape
        return table.index_select(0, i)

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return sparse_rows(ctx.saved_tensors[0], gradient, ctx.size), None


def sparse_rows(i: Tensor, rows: Tensor, size: torch.Size) -> Tensor:
    """Return the sparse tensor with these rows; an index may occur several times."""
    return torch.sparse_coo_tensor(i.unsqueeze(0), rows, size, check_invariants=False)  # the indices were looked up already


# ── Where retrofit is installed ──────────────────────────────────────────────────────────────────────────────────────────────────


def read_rows(module: RowTables, table: Tensor, i: Tensor) -> Tensor:
    """Return the rows at these indices of a table that may be sharded, in a model that may be compiled."""
    if hasattr(table, "to_local"):
        return rows_of_all(table, i)
    if module.training and not module.sparse and is_learned(table):
        warn_of_dense_gradient(table)
    if table.dim() > 2 and module.sparse and is_learned(table) and torch.compiler.is_compiling():
        return compiled_rows(table, i)
    return module.plain_rows(table, i)


def use_reader() -> None:
    """Make all tables use `read_rows`; a bundle, which contains only definitions, looks rows up plainly."""
    RowTables.reader = read_rows


use_reader()


def tables_of(model: nn.Module) -> dict[nn.Parameter, str]:
    """Return the trained tables of all modules, each with its first name."""
    found: dict[nn.Parameter, str] = {}
    for path, module in model.named_modules():
        for name in module.tables() if isinstance(module, RowTables) else ():
            table = module.get_parameter(name)
            if table.requires_grad:
                found.setdefault(table, f"{path}.{name}".lstrip("."))
    return found


def warn_of_dense_gradient(table: Tensor) -> None:
    """Warn, once per table, that its gradient and an optimizer step cost as much as the whole table."""
    size = table.numel() * table.element_size()
    if size < LARGE or id(table) in warned or IN_CHECKS.get() or torch.compiler.is_compiling():
        return
    warned.add(id(table))
    warnings.warn(
        f"a table of {size / 2**30:.1f} GiB is trained with dense gradients: a step makes one of its size and updates every row. "
        "With optimizers=(retrofit.optimizer(model, lr=…), None) a Trainer updates the rows that were looked up, as "
        "`retrofit train` does",
        RetrofitWarning,
        stacklevel=3,
    )


@contextlib.contextmanager
def unwarned() -> Iterator[None]:
    """Within this context there is no warning about dense gradients."""
    with set_variable(IN_CHECKS, True):
        yield


@torch.library.custom_op("retrofit::rows", mutates_args=(), schema="(Tensor table, Tensor i) -> Tensor")
def compiled_rows(table: Tensor, i: Tensor) -> Tensor:
    """Return the same as `RowsWithSparseGradient`, in a call that a compiler does not look into."""
    return table.index_select(0, i)


@compiled_rows.register_fake
def shaped_rows(table: Tensor, i: Tensor) -> Tensor:
    return table.new_empty(i.shape[0], *table.shape[1:])


def keep_index(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.size = inputs[0].shape
    ctx.save_for_backward(inputs[1])


def gradient_of_rows(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return sparse_rows(ctx.saved_tensors[0], gradient, ctx.size), None


compiled_rows.register_autograd(gradient_of_rows, setup_context=keep_index)


# ── Tables that are divided among processes ──────────────────────────────────────────────────────────────────────────────────────


def own_part(table: Any) -> Tensor:
    """Return the leaf that receives the gradient of this process's rows; its values are those of the table."""
    part = getattr(table, "part_with_gradient", None)
    if part is None or part.data_ptr() != table.to_local().data_ptr():
        part = table.to_local().detach().requires_grad_(table.requires_grad)
        table.part_with_gradient = part
    return part  # type: ignore[no-any-return]


def rows_of_all(table: Any, i: Tensor) -> Tensor:
    """Return the rows at these indices of a sharded table; every process has to call this the same number of times."""
    shape = (*i.shape, *table.shape[1:])
    return RowsOfAll.apply(own_part(table), i.flatten(), first_row(table)).view(shape)  # type: ignore[no-any-return, no-untyped-call]


def first_row(table: Any) -> int:
    """Return the index of this process's first row: each process holds as many rows as the first one, while there are any."""
    mesh = table.device_mesh
    each = -(-table.shape[0] // mesh.size())
    return int(min(each * mesh.get_local_rank(), table.shape[0]))


class RowsOfAll(torch.autograd.Function):
    """The rows at the indices `i` of this process, from a table of which it holds `part`, starting at row `first`.

    The gradient of `part` is the mean over the processes, as for parameters that are gathered whole.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor, i: Tensor, first: int) -> Tensor:
        wanted = gathered(i)
        rows, held = part_of(torch.cat(wanted), first, len(part))
        found = part.new_zeros(len(held), *part.shape[1:])
        found[held] = part[rows]
        dist.all_reduce(found)  # each row is in one process, and zero in the others
        ctx.save_for_backward(rows, held)
        ctx.size = part.shape
        return found.split([len(each) for each in wanted])[dist.get_rank()]

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        rows, held = ctx.saved_tensors
        everyone = torch.cat(gathered(gradient))
        return sparse_rows(rows, everyone[held] / dist.get_world_size(), ctx.size), None, None


def part_of(wanted: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Return the wanted rows that lie in a part, numbered from its first, and which of the wanted ones they are."""
    held = (wanted >= first) & (wanted < first + count)
    return wanted[held] - first, held


def gathered(x: Tensor) -> list[Tensor]:
    """Return the tensors of all processes; their first dimensions may differ."""
    if dist.get_world_size() == 1:
        return [x]
    counts = [torch.zeros(1, dtype=torch.long, device=x.device) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, torch.tensor([len(x)], device=x.device))
    sizes = [int(count) for count in counts]
    padded = x.new_zeros(max(sizes), *x.shape[1:])
    padded[: len(x)] = x
    found = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(found, padded)
    return [each[:size] for each, size in zip(found, sizes, strict=True)]
