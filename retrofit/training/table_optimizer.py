"""AdamW for a model with tables: a row that nobody looked up is not touched, so a step costs what its lookups cost.

    s_i ← s_i + mean(g_i²)        b_i ← b_i − lr g_i / (√s_i + ε)        for the rows i with a gradient g_i

which is row-wise Adagrad (arXiv:1906.00091), without weight decay: the steps of a row shrink with the number of its lookups, and
its state is one number. All other parameters are torch's AdamW's. Gradients of tables are sparse. Each is taken away as soon as a
backward pass has made it, so clipping sees the other parameters alone, and kept until the step. Several processes exchange the rows
of their gradients in the step; of a table that is divided among them each has its own rows.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from retrofit.errors import TrainingError
from retrofit.surgery.row_tables import RowTables, gathered, own_part, sparse_rows, tables_of
from retrofit.training import processes
from retrofit.training.rates import NewRates

SQUARES = "sum"  # in the state of a table: Σ mean(g_i²) of each row
IGNORED = "_ddp_params_and_buffers_to_ignore"  # where DistributedDataParallel looks for names
Collected = dict[nn.Parameter, list[Tensor]]  # the gradients of each table since the last step


def optimizer(
    model: nn.Module,
    lr: float = 1e-4,
    *,
    lr_new: float | None = None,
    weight_decay: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
) -> TableAdamW:
    """Return an optimizer for a training loop or a Trainer of your own: AdamW, and row-wise Adagrad for the tables of `model`.

    New parameters have the rates that their passes propose, as in `retrofit train`, or `lr_new`. Weights of two dimensions or more
    decay, tables do not. Where several processes train the model, make the optimizer before the model is wrapped.
    """
    rates = NewRates.of(model, lr, lr_new).by_parameter()
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            decay = weight_decay if parameter.dim() > 1 else 0.0
            groups.setdefault((rates.get(parameter, lr), decay), []).append(parameter)
    if not groups:
        raise TrainingError(
            f"{type(model).__name__} has nothing to train",
            why="no parameter requires a gradient",
            remedy="call requires_grad_() on the parameters to train",
            code="frozen",
        )
    given = [{"params": parameters, "lr": rate, "weight_decay": decay} for (rate, decay), parameters in groups.items()]
    return TableAdamW(given, tables_in=model, lr=lr, betas=betas, eps=eps)


class TableAdamW(torch.optim.AdamW):
    """AdamW whose parameters that are tables in the model are updated row by row.

    While it lives, and until `close`, the gradients of these tables are sparse, and `grad` of each is None.
    """

    _step_supports_amp_scaling = True  # a gradient scaler calls `step` itself then, which refuses it

    def __init__(self, params: Iterable[Any], *, tables_in: nn.Module, **options: Any) -> None:
        super().__init__(params, **options)
        mine = {parameter for group in self.param_groups for parameter in group["params"]}
        self.names = {table: name for table, name in tables_of(tables_in).items() if table in mine}
        self.collected: Collected = {table: [] for table in self.names}
        self.close = weakref.finalize(self, restore, prepare(tables_in, self.collected))
        self.close.atexit = False
        self.register_step_pre_hook(refuse_scaled)
        self.register_step_post_hook(TableAdamW.step_tables)

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for gradients in self.collected.values():
            gradients.clear()

    def received(self, parameter: nn.Parameter) -> bool:
        """Return whether the parameter has a gradient for the next step."""
        return parameter.grad is not None or bool(self.collected.get(parameter))

    @torch.no_grad()
    def step_tables(self, *call: Any) -> None:
        """Update the rows that have a gradient."""
        for group in self.param_groups:
            for table in group["params"]:
                if table not in self.collected:
                    continue
                has_gradient = bool(self.collected[table])  # perhaps of no row that this process holds: the step counts
                i, gradient = mean_rows(table, self.collected[table])
                self.collected[table].clear()
                if has_gradient or len(i):
                    self.update(table, i, -gradient if group["maximize"] else gradient, group)

    def update(self, table: nn.Parameter, i: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[table]
        if SQUARES not in state:
            squares = torch.zeros_like(wide(one_column(table.detach())))
            state.update({"step": torch.tensor(0.0), SQUARES: squares})  # AdamW reads `step` when it loads
        state["step"] += 1
        held, total = here(table), here(state[SQUARES])
        square = total.index_select(0, i) + gradient.square().flatten(1).mean(1).view(-1, *total.shape[1:])
        total.index_copy_(0, i, square)
        step = float(group["lr"]) * gradient / (square.sqrt() + group["eps"])
        held.index_copy_(0, i, (held.index_select(0, i).to(step.dtype) - step).to(held.dtype))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state; what torch has then rounded to the dtype of a table is as precise as it was saved."""
        super().load_state_dict(state_dict)
        saved = [number for group in state_dict["param_groups"] for number in group["params"]]
        mine = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, table in zip(saved, mine, strict=True):
            squares = state_dict["state"].get(number, {}).get(SQUARES)
            if squares is not None:
                self.state[table][SQUARES] = squares.clone().to(table.device)


def one_column(table: Tensor) -> Tensor:
    """Return the first number of each row."""
    for dim in range(1, table.dim()):
        table = table.narrow(dim, 0, 1)
    return table


def here(table: Any) -> Tensor:
    """Return the rows of a table that this process holds, which is all where it is not divided."""
    return table.to_local() if hasattr(table, "to_local") else table.detach()  # type: ignore[no-any-return]


def mean_rows(table: Any, gradients: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return which rows of this process have a gradient in any process, in order, and the means of these over the processes."""
    held = here(table)
    i, rows = summed([rows_in(gradient) for gradient in gradients], held)
    if processes.count() == 1 or hasattr(table, "to_local"):  # the rows of a table that is divided have those of all already
        return i, rows
    i, rows = summed(list(zip(gathered(i), gathered(rows), strict=True)), held)
    return i, rows / processes.count()


def rows_in(gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Return which rows of a gradient there are, in any order and perhaps several times; of a dense one those that are not zero."""
    if gradient.is_sparse:
        return gradient._indices()[0], gradient._values()
    i = gradient.flatten(1).any(1).nonzero().flatten()
    return i, gradient[i]


def summed(parts: Sequence[tuple[Tensor, Tensor]], table: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows in order, each once, their sums in float32 at least."""
    if not parts:
        return torch.empty(0, dtype=torch.long, device=table.device), wide(table[:0])
    i, rows = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    total = sparse_rows(i, wide(rows), table.shape).coalesce()
    return total.indices()[0], total.values()


def wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype.itemsize < torch.float32.itemsize else x


def refuse_scaled(optimizer: torch.optim.Optimizer, *call: Any) -> None:
    """Raise `TrainingError` where a gradient scaler calls the step: it has not seen the gradients of the tables."""
    if getattr(optimizer, "found_inf", None) is not None:
        raise TrainingError(
            "tables cannot be trained with scaled gradients",
            why="the scaler of float16 training does not reach the rows' gradients",
            remedy="train in bfloat16 (bf16=True), which needs no scaling",
            code="float16",
        )


def prepare(model: nn.Module, collected: Collected) -> list[Callable[[], Any]]:
    """Have the gradients of the tables sparse and collected, and left alone by DistributedDataParallel; return what undoes that."""
    undo: list[Callable[[], Any]] = []
    for module in model.modules():
        if isinstance(module, RowTables) and any(module.get_parameter(name) in collected for name in module.tables()):
            before = vars(module).get("sparse", False)
            module.sparse = True
            undo.append(functools.partial(setattr, module, "sparse", before))
    for table, gradients in collected.items():
        leaf = own_part(table) if hasattr(table, "to_local") else table

        def take(leaf: Any, gradients: list[Tensor] = gradients) -> None:
            gradients.append(leaf.grad)
            leaf.grad = None

        undo.append(leaf.register_post_accumulate_grad_hook(take).remove)
    names = [name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter in collected]
    if names:
        ignored = vars(model).get(IGNORED)
        setattr(model, IGNORED, [*(ignored or ()), *names])

        def ignore_no_more() -> None:
            vars(model).pop(IGNORED, None)
            if ignored is not None:
                setattr(model, IGNORED, ignored)

        undo.append(ignore_no_more)
    return undo


def restore(undo: list[Callable[[], Any]]) -> None:
    while undo:
        undo.pop()()
