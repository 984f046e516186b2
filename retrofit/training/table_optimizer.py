"""AdamW for a model with tables: only rows that were looked up are updated, so a step costs as much as its lookups.

    s_i ← s_i + mean(g_i²)        b_i ← b_i − lr g_i / (√s_i + ε)        for the rows i with a gradient g_i

This is row-wise Adagrad (arXiv:1906.00091) without weight decay: the steps of a row shrink with the number of its lookups, and its
state is one number. All other parameters have torch's AdamW. Gradients of tables are sparse. Each is taken from `grad` as soon as a
backward pass has computed it, so clipping sees only the other parameters, and kept until the step. Several processes exchange the
rows of their gradients in the step; of a divided table each process has its own rows.
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
IGNORED = "_ddp_params_and_buffers_to_ignore"  # attribute that DistributedDataParallel reads
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
    """Return an optimizer for your own training loop or Trainer: AdamW, and row-wise Adagrad for the tables of `model`.

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
    """AdamW with row-wise updates of the parameters that are tables of the model.

    Until `close`, the gradients of these tables are sparse, and their `grad` is None.
    """

    _step_supports_amp_scaling = True  # a gradient scaler then calls `step` itself, which refuses it

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
        """Return whether the parameter has a gradient in the next step."""
        return parameter.grad is not None or bool(self.collected.get(parameter))

    @torch.no_grad()
    def step_tables(self, *call: Any) -> None:
        """Update the rows that have a gradient."""
        for group in self.param_groups:
            for table in group["params"]:
                if table not in self.collected:
                    continue
                has_gradient = bool(self.collected[table])  # even without rows of this process: the step counts
                i, gradient = mean_rows(table, self.collected[table])
                self.collected[table].clear()
                if has_gradient or len(i):
                    self.update(table, i, -gradient if group["maximize"] else gradient, group)

    def update(self, table: nn.Parameter, i: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[table]
        if SQUARES not in state:
            squares = torch.zeros_like(wide(one_column(table.detach())))
            state.update({"step": torch.tensor(0.0), SQUARES: squares})  # AdamW reads `step` when it loads a state
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
    """Return this process's rows of a table: all of them if it is not divided."""
    return table.to_local() if hasattr(table, "to_local") else table.detach()  # type: ignore[no-any-return]


def mean_rows(table: Any, gradients: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the indices of this process's rows with a gradient in any process, in order, and their means over the processes."""
    held = here(table)
    i, rows = summed([rows_in(gradient) for gradient in gradients], held)
    if processes.count() == 1 or hasattr(table, "to_local"):  # gradients of a divided table are summed over the processes already
        return i, rows
    i, rows = summed(list(zip(gathered(i), gathered(rows), strict=True)), held)
    return i, rows / processes.count()


def rows_in(gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices and values of a gradient's rows, unordered and possibly repeated; of a dense gradient those other than
    zero.
    """
    if gradient.is_sparse:
        return gradient._indices()[0], gradient._values()
    i = gradient.flatten(1).any(1).nonzero().flatten()
    return i, gradient[i]


def summed(parts: Sequence[tuple[Tensor, Tensor]], table: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows in order, repeated ones summed, in float32 or wider."""
    if not parts:
        return torch.empty(0, dtype=torch.long, device=table.device), wide(table[:0])
    i, rows = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    total = sparse_rows(i, wide(rows), table.shape).coalesce()
    return total.indices()[0], total.values()


def wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype.itemsize < torch.float32.itemsize else x


def refuse_scaled(optimizer: torch.optim.Optimizer, *call: Any) -> None:
    """Raise `TrainingError` if a gradient scaler calls the step: it does not scale the gradients of the tables."""
    if getattr(optimizer, "found_inf", None) is not None:
        raise TrainingError(
            "tables cannot be trained with scaled gradients",
            why="the scaler of float16 training does not reach the rows' gradients",
            remedy="train in bfloat16 (bf16=True), which needs no scaling",
            code="float16",
        )


def prepare(model: nn.Module, collected: Collected) -> list[Callable[[], Any]]:
    """Make the gradients of the tables sparse, collect them, and hide them from DistributedDataParallel; return functions that undo
    it.
    """
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
