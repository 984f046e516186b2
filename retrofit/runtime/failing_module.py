"""Where in a model an error came from."""

from __future__ import annotations

import traceback

from torch import nn

from retrofit.errors import first_line


def failure_in(model: nn.Module, error: BaseException, at: str = "") -> str:
    """The first line of the error, after the path of the innermost module of the model in whose code it was raised.

    The model may itself be a part of another, where its path is `at`.
    """
    paths = {  # by contents: a tracer calls other modules that have the same ones
        id(vars(module)): f"{at}.{path}".strip(".") for path, module in model.named_modules()
    }
    owners = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    inside = [id(vars(one)) for one in owners if isinstance(one, nn.Module)]
    path = next((paths[one] for one in reversed(inside) if one in paths), "")
    return f"{path}: {first_line(error)}" if path else first_line(error)
