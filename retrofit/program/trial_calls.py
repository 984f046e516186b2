"""Try on a model's own calls what a pass is about to do to its modules: a failure is known before anything is rewritten.

What a module's code does with its arguments shows in no graph: that it lays tokens out in a grid of a size that it knows, say, or
reads the width of what it is given. So each trial gets the arguments of a call that the dense model makes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from retrofit.errors import CaptureError, DoesNotFitError
from retrofit.inputs.model_state import preserve_state
from retrofit.inputs.probes import run
from retrofit.process import serialized
from retrofit.program.capture import capture, failure_in
from retrofit.program.tracing_contexts import disable_cache

Trial = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], object]  # of a module and the arguments of one of its calls


@serialized
def failed_trials(model: nn.Module, inputs: Mapping[str, Any], trials: Mapping[str, Trial]) -> dict[str, str]:
    """Run `model` without its cache, and before each call of a module at one of the paths its trial; return why trials failed.

    `trials` and what is returned are by path. A model without values is captured instead: it may branch on them. One that does not
    run on the inputs has no trials.
    """
    failed: dict[str, str] = {}
    with trying(model, trials, failed):
        if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
            with contextlib.suppress(CaptureError):
                capture(model, inputs)
        else:
            with preserve_state(model), disable_cache(model), contextlib.suppress(Exception):  # whatever the model's code raises
                run(model, inputs)
    return failed


@contextlib.contextmanager
def trying(model: nn.Module, trials: Mapping[str, Trial], failed: dict[str, str]) -> Iterator[None]:
    """Within this context each call of a module at a path is preceded by its trial; `failed` gets the first failure of each."""
    in_trial = False

    def hook_for(path: str, trial: Trial) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            nonlocal in_trial
            if in_trial or path in failed:
                return
            in_trial = True
            try:
                with torch.no_grad():
                    trial(module, args, dict(kwargs))
            except GuardOnDataDependentSymNode:  # the capture goes on with values
                raise
            except DoesNotFitError as error:
                failed[path] = error.what
            except Exception as error:  # whatever the module's own code raises
                failed[path] = failure_in(module, error, path)
            finally:
                in_trial = False

        return hook

    handles = [
        model.get_submodule(path).register_forward_pre_hook(hook_for(path, trial), with_kwargs=True)
        for path, trial in trials.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
