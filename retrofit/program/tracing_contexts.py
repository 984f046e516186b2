"""Contexts for a trace: no cache, no stack traces, no code for graphs, no warnings, no casts that change nothing."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx, nn

from retrofit.runtime.one_at_a_time import PROCESS

NOISY = ("torch.fx.experimental.symbolic_shapes", "torch._subclasses.fake_tensor", "torch.export", "torch._export")  # logs


@contextlib.contextmanager
def disable_cache(model: nn.Module) -> Iterator[None]:
    """Within this context no config in the model turns its cache on: a cache object is no value of a graph."""
    found = [getattr(module, "config", None) for module in model.modules()]
    configs: dict[int, Any] = {id(config): config for config in found if hasattr(config, "use_cache")}
    before = {key: config.use_cache for key, config in configs.items()}
    try:
        for config in configs.values():
            config.use_cache = False
        yield
    finally:
        for key, config in configs.items():
            config.use_cache = before[key]


@contextlib.contextmanager
def disable_stack_traces() -> Iterator[None]:
    """Within this context the tracer does not look up the line of code that each node comes from, which is slow."""
    settings: Any = fx.config
    before = getattr(settings, "do_not_emit_stack_traces", False)
    settings.do_not_emit_stack_traces = True
    try:
        yield
    finally:
        settings.do_not_emit_stack_traces = before


@contextlib.contextmanager
def compile_on_call() -> Iterator[None]:
    """Within this context a graph module gets its Python code when it is first called, and not each time its graph changes.

    An export changes its graphs two dozen times and calls none of them.
    """
    compile_now = fx.GraphModule.recompile

    def forward(module: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        compile_now(module)
        return type(module).forward(module, *args, **kwargs)

    def recompile(module: fx.GraphModule) -> None:
        tree = getattr(module.graph._codegen, "pytree_info", None)
        if tree is not None:  # an exporter reads how the arguments and results of a part nest without calling it
            module._in_spec, module._out_spec = tree.in_spec, tree.out_spec
        type(module).forward = forward  # each graph module has a class of its own

    fx.GraphModule.recompile = recompile  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        fx.GraphModule.recompile = compile_now  # type: ignore[method-assign]


@contextlib.contextmanager
def silence_tracer() -> Iterator[None]:
    """Within this context the tracer prints no warnings, and no graphs when it fails; other threads wait to enter it."""
    with PROCESS:
        logs = [logging.getLogger(name) for name in NOISY]
        before = [log.level for log in logs]
        for log in logs:
            log.setLevel(logging.CRITICAL)
        try:
            with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                warnings.simplefilter("ignore")
                yield
        finally:
            for log, level in zip(logs, before, strict=True):
                log.setLevel(level)


@contextlib.contextmanager
def skip_no_op_casts() -> Iterator[None]:
    """Within this context `module.to` does nothing where dtype and device are the same: a tracer cannot replace weights."""
    cast = nn.Module.to

    def to(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        held = [tensor for tensor in (*module.parameters(), *module.buffers()) if tensor.is_floating_point()]
        same = all((dtype or one.dtype) == one.dtype and (device or one.device) == one.device for one in held)
        return module if same else cast(module, *args, **kwargs)

    nn.Module.to = to  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.to = cast  # type: ignore[method-assign]
