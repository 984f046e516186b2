"""Tables whose rows a module looks up by indices that follow from the ids: a step's gradient has few rows, whatever a table weighs.

    rows(table, i) = table[i]                                     table: [n, …], i: (…)

A table may stay in the CPU's memory, wherever the model is: the indices go there, the rows come back, their gradients go there.

A table may be divided among processes: each holds some of its rows, as of any parameter that torch divides. Every process then
looks up the rows that it holds for the indices of all, and its rows get the gradients of all.
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

LARGE = 1 << 30  # bytes of a table from which a dense gradient of it is worth a warning
IN_CHECKS: contextvars.ContextVar[bool] = contextvars.ContextVar("in_checks", default=False)
warned: set[int] = set()  # by id: the tables that a warning was about


class RowTables(nn.Module):
    """A module with tables, each a parameter of its own."""

    sparse: bool = False  # whether the gradient of a table is a sparse tensor, of the rows that were looked up
    on_host: bool = False  # whether tables stay in the CPU's memory
    reader: ClassVar[Callable[..., Tensor] | None] = None  # how rows are looked up where retrofit is installed: `read_rows`

    def tables(self) -> tuple[str, ...]:
        """Return the names of the parameters whose rows are looked up by indices that follow from the ids."""
        return ()

    def rows(self, table: Tensor, i: Tensor) -> Tensor:
        """Return the rows at these indices, the gradients of which are dense or sparse as `sparse` says."""
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
        """Do what a module does to move or cast its tensors; tables on the host are cast alone."""
        if not self.on_host:
            return super()._apply(fn, recurse)  # type: ignore[no-untyped-call, no-any-return]
        tables = [self.get_parameter(name) for name in self.tables()]
        held = {id(tensor) for table in tables for tensor in (table, table.grad)}
        return super()._apply(  # type: ignore[no-untyped-call, no-any-return]
            lambda tensor: cast_on_host(fn, tensor) if id(tensor) in held else fn(tensor), recurse
        )


@torch.no_grad()
def release_zeros(module: RowTables) -> None:
    """Give back the memory of tables in the CPU's that are all zero: a row takes some once it is written."""
    for table in map(module.get_parameter, module.tables()):
        if table.device.type == "cpu" and type(table) is nn.Parameter and not bool(table.any()):
            table.data = zeros_for(table)


def cast_on_host(fn: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """Return what `fn` makes of a tensor, but in the CPU's memory: nothing of its size is made elsewhere."""
    asked = fn(tensor[:0])
    if asked.is_meta:
        return fn(tensor)
    if tensor.is_meta:
        return torch.empty_like(tensor, device="cpu", dtype=asked.dtype)
    return tensor.to("cpu", asked.dtype)


def is_learned(table: Tensor) -> bool:
    """Return whether a look-up now is to have a gradient."""
    return torch.is_grad_enabled() and table.requires_grad and not torch.compiler.is_exporting()


class RowsWithSparseGradient(torch.autograd.Function):
    """`table[i]`, whose gradient is a sparse tensor of the table's shape; torch's own look-up has one for rows of numbers only."""

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
    """Return the sparse tensor with these rows; an index may be there several times."""
    return torch.sparse_coo_tensor(i.unsqueeze(0), rows, size, check_invariants=False)  # the indices were looked up already


# ── Where retrofit is installed ──────────────────────────────────────────────────────────────────────────────────────────────────


def read_rows(module: RowTables, table: Tensor, i: Tensor) -> Tensor:
    """Return the rows at these indices of a table that may be divided, in a model that may be compiled."""
    if hasattr(table, "to_local"):
        return rows_of_all(table, i)
    if module.training and not module.sparse and is_learned(table):
        warn_of_dense_gradient(table)
    if table.dim() > 2 and module.sparse and is_learned(table) and torch.compiler.is_compiling():
        return compiled_rows(table, i)
    return module.plain_rows(table, i)


def use_reader() -> None:
    """Have all tables read so; a bundle, which has definitions alone, reads them plainly."""
    RowTables.reader = read_rows


use_reader()


def tables_of(model: nn.Module) -> dict[nn.Parameter, str]:
    """Return the tables of all modules that are trained, each with its first name."""
    found: dict[nn.Parameter, str] = {}
    for path, module in model.named_modules():
        for name in module.tables() if isinstance(module, RowTables) else ():
            table = module.get_parameter(name)
            if table.requires_grad:
                found.setdefault(table, f"{path}.{name}".lstrip("."))
    return found


def warn_of_dense_gradient(table: Tensor) -> None:
    """Warn, once for a table, that its gradient and the step of an optimizer cost what the whole table weighs."""
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
    """Within this context dense gradients are made on purpose."""
    token = IN_CHECKS.set(True)
    try:
        yield
    finally:
        IN_CHECKS.reset(token)


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
    """Return the leaf that gets the gradient of the rows that this process holds; its values are those of the table."""
    part = getattr(table, "part_with_gradient", None)
    if part is None or part.data_ptr() != table.to_local().data_ptr():
        part = table.to_local().detach().requires_grad_(table.requires_grad)
        table.part_with_gradient = part
    return part  # type: ignore[no-any-return]


def rows_of_all(table: Any, i: Tensor) -> Tensor:
    """Return the rows at these indices of a table that is divided; every process has to call this as often."""
    shape = (*i.shape, *table.shape[1:])
    return RowsOfAll.apply(own_part(table), i.flatten(), first_row(table)).view(shape)  # type: ignore[no-any-return, no-untyped-call]


def first_row(table: Any) -> int:
    """Return where the rows start that this process holds: each holds as many as the first one, while there are any."""
    mesh = table.device_mesh
    each = -(-table.shape[0] // mesh.size())
    return int(min(each * mesh.get_local_rank(), table.shape[0]))


class RowsOfAll(torch.autograd.Function):
    """The rows at the indices `i` of this process, of a table of which it holds `part`, from row `first` on.

    The gradient of `part` is the mean over the processes, as of parameters that are gathered whole.
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
    """Return the numbers of the wanted rows that lie in a part, counted from its first, and which of those wanted they are."""
    held = (wanted >= first) & (wanted < first + count)
    return wanted[held] - first, held


def gathered(x: Tensor) -> list[Tensor]:
    """Return the tensors of all processes, of which the first dimension may be of another size in each."""
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
