"""The peak learning rates of parameters that passes added: each pass's proposal, a multiple of the rate, or one rate for all."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

from torch import nn

from retrofit.errors import TrainingError
from retrofit.passbase.replaying import added_parameters, recipe, rewrites, rewritten_part
from retrofit.surgery.row_tables import tables_of

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
            new = list(dict.fromkeys(named[name] for name in account.added if name in named))
            proposal = method.recovery
            looked_up = [parameter for parameter in new if parameter in tables]
            others = [parameter for parameter in new if parameter not in tables]
            groups += [
                NewRate(what, times * lr, tuple(parameters))
                for what, times, parameters in (
                    (method.name, proposal.rate, others),
                    (f"tables of {method.name}", proposal.table_rate, looked_up),
                )
                if parameters and times != 1
            ]
        return NewRates(tuple(groups))

    def by_parameter(self) -> dict[nn.Parameter, float]:
        """Return the rate of each parameter with a rate of its own."""
        return {parameter: group.rate for group in self.groups for parameter in group.parameters}

    def to_dict(self) -> dict[str, float]:
        return {group.what: group.rate for group in self.groups}


def rates_text(lr: float, new: Iterable[tuple[str, float]]) -> str:
    """Return the rates of a run as text."""
    parts = [f"{lr:g}", *(f"{rate:g} for {what}{times(rate, lr)}" for what, rate in new)]
    return ", ".join(parts)


def times(rate: float, lr: float) -> str:
    """Return the ratio of two rates as text, if it is a round number."""
    many = rate / lr if lr else 0.0
    return f" ({round(many)}×)" if many >= 2 and math.isclose(many, round(many), rel_tol=1e-6) else ""


def require_new(model: nn.Module, rate: float) -> list[nn.Parameter]:
    """Return the parameters that the passes added to `model`; raise `TrainingError` if there are none."""
    found = added_parameters(model)
    if not found:
        known = "no pass has rewritten it, or its file does not say what is new" if found is None else "its passes added none"
        raise TrainingError(
            f"--lr-new {rate:g}: the model has no new parameter", why=known, remedy="drop it", option="lr_new", code="no-effect"
        )
    return found
