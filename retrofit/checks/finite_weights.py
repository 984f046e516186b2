"""A model whose weights are not numbers is not rewritten: what is computed from them is lost, and no check could tell a fault."""

from __future__ import annotations

from torch import nn

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
    weight = model.get_parameter(wrong[0])
    nan, infinite = int(weight.isnan().sum()), int(weight.isinf().sum())
    more = f" and {len(wrong) - 1} more weights" if wrong[1:] else ""
    raise RetrofitError(
        f"{wrong[0]}{more} {'hold' if more else 'holds'} values that are no numbers",
        why=f"of its {weight.numel():,} values {nan:,} are NaN and {infinite:,} infinite",
        remedy="give a checkpoint from before the training that made them",
    )
