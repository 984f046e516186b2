"""The optimizer of a run: learning rates of their own for parameters that passes added, and AdamW for a model with tables.

The peak learning rate of an added parameter is its pass's proposal, a multiple of the rate, or one rate for all. Only the rows of a
table that were looked up are updated, so a step costs as much as its lookups:

    s_i ← s_i + mean(g_i²)        b_i ← b_i − lr g_i / (√s_i + ε)        for the rows i with a gradient g_i

This is row-wise Adagrad (arXiv:1906.00091) without weight decay: the steps of a row shrink with the number of its lookups, and its
state is one number. All other parameters have torch's AdamW. Gradients of tables are sparse. Each is taken from `grad` as soon as a
backward pass has computed it, so clipping sees only the other parameters, and kept until the step. Several processes exchange the
rows of their gradients in the step; of a divided table each process has its own rows.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from retrofit.errors import TrainingError
from retrofit.passbase.replaying import added_parameters, recipe, rewrites, rewritten_part
from retrofit.surgery.row_tables import RowTables, gathered, own_part, sparse_rows, tables_of
from retrofit.training import processes

ALL = "new parameters"


@dataclasses.dataclass(frozen=True)
class NewRate:
    """The learning rate of some added parameters, and their description."""

    what: str
    rate: float
    parameters: tuple[nn.Parameter, ...]


@dataclasses.dataclass(frozen=True)
class NewRates:
    """The learning rates of all added parameters with a rate of their own."""

    groups: tuple[NewRate, ...] = ()

    @staticmethod
    def of(model: nn.Module, lr: float, lr_new: float | None = None) -> NewRates:
        """Return `lr_new` for all added parameters, or each pass's proposal for a model trained at `lr`.

        Raises `TrainingError` where `lr_new` is given and the model has no new parameter.
        """
        if lr_new is not None:
            return NewRates((NewRate(ALL, lr_new, tuple(require_new(model, lr_new))),))
        part = rewritten_part(model)
        methods, accounts = recipe(model) or (), rewrites(model) or ()
        if len(methods) != len(accounts):  # unknown which parameters each pass added
            return NewRates()
        tables, named = tables_of(part), dict(part.named_parameters(remove_duplicate=False))
        groups = []
        for method, account in zip(methods, accounts, strict=True):
            new = dict.fromkeys(named[name] for name in account.added if name in named)
            others = tuple(parameter for parameter in new if parameter not in tables)
            looked_up = tuple(parameter for parameter in new if parameter in tables)
            if others and method.recovery.rate != 1:
                groups.append(NewRate(method.name, method.recovery.rate * lr, others))
            if looked_up and method.recovery.table_rate != 1:
                groups.append(NewRate(f"tables of {method.name}", method.recovery.table_rate * lr, looked_up))
        return NewRates(tuple(groups))

    def by_parameter(self) -> dict[nn.Parameter, float]:
        """Return the rate of each parameter with a rate of its own."""
        return {parameter: group.rate for group in self.groups for parameter in group.parameters}

    def to_dict(self) -> dict[str, float]:
        return {group.what: group.rate for group in self.groups}


def rates_text(lr: float, new: Iterable[tuple[str, float]]) -> str:
    """Return the rates of a run as text."""
    return ", ".join([f"{lr:g}", *(f"{rate:g} for {what}{multiple_text(rate, lr)}" for what, rate in new)])


def multiple_text(rate: float, lr: float) -> str:
    """Return the ratio of two rates as text, if it is a round number."""
    ratio = rate / lr if lr else 0.0
    return f" ({round(ratio)}×)" if ratio >= 2 and math.isclose(ratio, round(ratio), rel_tol=1e-6) else ""


def require_new(model: nn.Module, rate: float) -> list[nn.Parameter]:
    """Return the parameters that the passes added to `model`; raise `TrainingError` if there are none."""
    found = added_parameters(model)
    if not found:
        why = "no pass has rewritten it, or its file does not say what is new" if found is None else "its passes added none"
        raise TrainingError(
            f"--lr-new {rate:g}: the model has no new parameter", why=why, remedy="drop it", option="lr_new", code="no-effect"
        )
    return found


# ── AdamW with tables ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


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
        own = {parameter for group in self.param_groups for parameter in group["params"]}
        self.collected: Collected = {table: [] for table in tables_of(tables_in) if table in own}
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
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, table in zip(numbers, parameters, strict=True):
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
    """Return the indices and values of a gradient's rows, unordered and possibly repeated; of a dense gradient the nonzero ones."""
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
    """Make the gradients of the tables sparse, collect them, and hide them from DistributedDataParallel; return what undoes it."""
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
        remove = functools.partial(vars(model).pop, IGNORED, None)
        undo.append(remove if ignored is None else functools.partial(setattr, model, IGNORED, ignored))
    return undo


def restore(undo: list[Callable[[], Any]]) -> None:
    while undo:
        undo.pop()()
