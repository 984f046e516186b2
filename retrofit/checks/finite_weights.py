"""A model whose weights are not numbers is not rewritten: what is computed from them is lost, and no check could tell a fault."""

from __future__ import annotations

from torch import Tensor, nn

from retrofit.checks.fingerprint import chunks, is_finite
from retrofit.checks.reference import Reference
from retrofit.errors import RetrofitError


def require_finite(model: nn.Module, reference: Reference | None = None) -> None:
    """No weight of the model is NaN or infinite, else `RetrofitError` that names one.

    What `reference` has read is not read again.
    """
    measured = None if reference is None else reference["parameters"]
    if measured is not None:
        wrong = [name for name, one in measured.prints.items() if not one.finite]
    else:
        wrong = [name for name, one in model.named_parameters() if not (one.is_meta or all(map(is_finite, chunks(one))))]
    if not wrong:
        return
    raise not_finite(wrong[0], model.get_parameter(wrong[0]), len(wrong) - 1)


def require_finite_weight(name: str, weight: Tensor) -> None:
    """No value of the weight is NaN or infinite, else `RetrofitError`."""
    if not all(map(is_finite, chunks(weight))):
        raise not_finite(name, weight)


def not_finite(name: str, weight: Tensor, others: int = 0) -> RetrofitError:
    nan, infinite = int(weight.isnan().sum()), int(weight.isinf().sum())
    more = f" and {others} more weights" if others else ""
    return RetrofitError(
        f"{name}{more} {'contain' if more else 'contains'} NaN or Inf",
        why=f"of its {weight.numel():,} values {nan:,} are NaN and {infinite:,} infinite",
        remedy="give a checkpoint from before the training that made them",
        code="not-finite",
        site=name,
    )
