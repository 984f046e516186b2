"""Capture a model as one ATen graph with every module call: `torch.export` under fake tensors.

The trace is functionalized, so that no operation writes in place. If the export fails, fallbacks are tried: an attention mask of
ones, and replayed tensor values for code that branches on them. A dynamic program uses only values that are the same for all
inputs.

For a model without weights the tracer creates constants on the meta device, without values. They have values if the model is
captured again on fake CPU tensors, which take no memory (`with_constant_values`).
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from retrofit.errors import CaptureError, DoesNotFitError, first_line
from retrofit.inputs.model_state import preserve_modes, preserve_state
from retrofit.inputs.module_calls import watched
from retrofit.inputs.packed_weights import refuse_packed_layers
from retrofit.inputs.probes import extent_of, resized, run
from retrofit.process import deferred_signals, serialized
from retrofit.program.aten_ops import SELECTION, op
from retrofit.program.functionalize import functionalize, replace_nondifferentiable_copies
from retrofit.program.program import Call, CallMarker, Program, read_program, restore_users
from retrofit.program.repeated_modules import RepeatedModules, expand
from retrofit.program.tracing import (
    Recording,
    annotate_autograd,
    compile_on_call,
    disable_cache,
    disable_stack_traces,
    open_dataclasses,
    record_constant_values,
    record_tensor_values,
    replay_tensor_values,
    silence_tracer,
    skip_no_op_casts,
    skip_no_op_grad_modes,
    with_dynamic_shapes,
)

LIBRARY = torch.library.Library("retrofit", "DEF")
LIBRARY.define("mark(Tensor x, int call, bool leaves, str key) -> Tensor")
LIBRARY.impl("mark", lambda x, call, leaves, key: x.clone(), "CompositeExplicitAutograd")
fx.node.has_side_effect(torch.ops.retrofit.mark.default)  # kept in the graph even if no output depends on it


@serialized
def capture(model: nn.Module, example_inputs: Mapping[str, Any], *, dynamic: bool = False, training: bool = False) -> Program:
    """Return the program that `model` runs on inputs like `example_inputs` (by argument), in evaluation mode unless `training`.

    Nothing is computed and no weight is copied, except if the code branches on the values of tensors: then the model is run, and
    the program contains the branches taken for these inputs. A `dynamic` program runs on inputs of other sizes too, as far as the
    model's code does, and on any values: it contains a branch only if inputs of other values and sizes take the same one. Raises
    `CaptureError` if the model cannot be traced.
    """
    refuse_packed_layers(model, CaptureError, "captured as a graph", "which torch.export does not trace")
    try:
        with preserve_modes(model):
            model.train(training)
            program = captured(model, each_its_own(example_inputs), dynamic)
    except Exception as error:  # whatever the model's own code raises
        raise CaptureError(
            f"{type(model).__name__} could not be captured as a graph",
            why=failure_in(model, error),
            remedy="pass example_inputs= that its forward accepts; code that branches on the values of tensors cannot be captured",
            code="not-captured",
        ) from error
    return dataclasses.replace(program, examples=dict(example_inputs))


def captured(model: nn.Module, inputs: dict[str, Any], dynamic: bool) -> Program:
    """Return the program of the model in its mode, without its examples. Raises any error of the model's own code."""
    exported, calls, branches = export_with_fallbacks(model, inputs, dynamic)
    return dataclasses.replace(read_program(exported, calls), branches=branches)


def each_its_own(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs with each tensor a separate object: a trace distinguishes arguments by their tensors."""
    found: dict[str, Any] = {}
    for name, value in inputs.items():
        again = isinstance(value, torch.Tensor) and any(value is earlier for earlier in found.values())
        found[name] = value.clone() if again else value
    return found


def export_with_fallbacks(
    model: nn.Module, inputs: dict[str, Any], dynamic: bool
) -> tuple[torch.export.ExportedProgram, list[Call], bool]:
    """Return the result of `export`, and whether values were replayed.

    If it fails, it is tried again with a mask of ones, then with replayed values. Raises the last error before the values.
    """
    without_values = any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    try:
        return *export(model, inputs, dynamic), False
    except Exception as error:
        why = error
    masks = missing_masks(model, inputs)
    if masks:
        try:
            return *export(model, inputs | masks, dynamic), False
        except Exception as error:
            why = error
    if (without_values and not dynamic) or isinstance(why, (RuntimeError, TypeError)):
        with contextlib.suppress(Exception):
            runnable, given = materialize(model, inputs | masks)
            with torch.no_grad(), silence_tracer(), disable_cache(runnable):
                recording = constant_values(runnable, given) if dynamic else values_read(runnable, given)
            if not dynamic or recording:
                with replay_tensor_values(recording):
                    return *export(runnable, given, dynamic, repeats=not recording), bool(recording)
    raise why


def values_read(model: nn.Module, inputs: Mapping[str, Any]) -> Recording:
    """Return the values that the code reads from tensors."""
    with record_tensor_values() as recording:
        model(**inputs)
    return recording


def constant_values(model: nn.Module, inputs: Mapping[str, Any]) -> Recording:
    """Return the values that the code reads from tensors if they are no input's and the same for other sizes; else nothing."""
    found, training = [], model.training
    for given in (inputs, *other_sizes(model, inputs)):
        with preserve_state(model), record_constant_values(given) as recording:
            model.train(training)(**given)
        found.append(recording)
    return found[0] if all(values == found[0] for values in found) else {}


def other_sizes(model: nn.Module, inputs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return inputs of another batch size and length, and of a single token."""
    batch, length = extent_of(inputs)
    if length:
        return [resized(model, inputs, batch + 1, length + 2), resized(model, inputs, batch, 1)]
    shorter, shortest = (
        {name: value[:, :size] if isinstance(value, torch.Tensor) and value.dim() == 3 else value for name, value in inputs.items()}
        for size in (3, 1)
    )
    return [resized(model, shorter, batch + 1, 0), resized(model, shortest, batch, 0)]


def materialize(model: nn.Module, inputs: Mapping[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    """Return `model` and its inputs, or copies with random values if they have none: branches rarely depend on weights."""
    if not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        return model, dict(inputs)
    drawn, generator = copy.deepcopy(model), torch.Generator().manual_seed(0)
    values: dict[torch.Tensor, torch.Tensor] = {}  # by tensor: shared tensors stay shared
    for module in drawn.modules():
        for own in (module._parameters, module._buffers):
            for name, tensor in own.items():
                if tensor is not None and tensor not in values:
                    values[tensor] = random_like(tensor, generator)
                own[name] = None if tensor is None else values[tensor]  # type: ignore[assignment]
    given = {
        name: torch.ones_like(value, device="cpu") if isinstance(value, torch.Tensor) else value for name, value in inputs.items()
    }
    return drawn, given


def random_like(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return a CPU tensor like this parameter or buffer, of small random numbers, or of zeros if it contains no floats."""
    value = torch.empty_like(tensor, device="cpu").detach()
    value.normal_(std=0.02, generator=generator) if value.is_floating_point() else value.zero_()
    return nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value


def export(
    model: nn.Module, inputs: dict[str, Any], dynamic: bool = False, repeats: bool = True
) -> tuple[torch.export.ExportedProgram, list[Call]]:
    """Return the model as a functionalized exported program with markers, and the calls they belong to."""
    if not dynamic:
        with disable_stack_traces(), compile_on_call():  # a graph module keeps its traces and is called, so only here
            return trace(model, inputs, None, repeats)
    # only tensors of **kwargs: torch.export compares the others with kwargs from which the code may have popped
    named = inspect.signature(model.forward).parameters
    inputs = {name: value for name, value in inputs.items() if name in named or isinstance(value, torch.Tensor)}
    # new tensors: if the trace fails, torch leaves its marks of dynamic sizes on them
    inputs = {name: value.detach() if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}
    return with_dynamic_shapes(model, inputs, lambda shapes: trace(model, inputs, shapes))


def trace(
    model: nn.Module, inputs: dict[str, Any], shapes: dict[str, Any] | None, repeats: bool = False
) -> tuple[torch.export.ExportedProgram, list[Call]]:
    """Return the result of `export` for the dynamic shapes `shapes`, in the form of `torch.export`; None: all static.

    With `repeats`, modules that compute the same are traced once. Signals are deferred: torch's code in C++ calls back into Python,
    and an exception there may end the process.
    """
    modes = skip_no_op_grad_modes() if shapes is None else annotate_autograd()
    marker = CallMarker(model)
    modules = RepeatedModules(model, marker) if repeats else None
    try:
        with (
            deferred_signals(),
            marker.active(),
            open_dataclasses(model, inputs),
            torch.no_grad(),
            silence_tracer(),
            disable_cache(model),
            skip_no_op_casts(),
            modules.active() if modules else contextlib.nullcontext(),
        ):
            with modes:
                exported = torch.export.export(as_plain_module(model), (), inputs, dynamic_shapes=shapes, strict=False)
            restore_users(exported.graph)
            expand(exported.graph, marker.calls)
            if not functionalize(exported.graph):
                exported = exported.run_decompositions({})  # functionalized, no operation decomposed
            replace_nondifferentiable_copies(exported.graph)
    except Exception:
        if not modules or not modules.repeated:
            raise
        return trace(model, inputs, shapes)
    return exported, marker.calls


def as_plain_module(model: nn.Module) -> nn.Module:
    """Return `model`; for a graph module, a plain module with the same state, which `torch.export` traces by calling it.

    `torch.export` interprets the graph of a graph module instead, which skips its hooks and a replaced forward, and takes its
    arguments by position.
    """
    if not isinstance(model, fx.GraphModule):
        return model
    plain: nn.Module = object.__new__(type("Graph", (nn.Module,), {"forward": type(model).forward}))
    plain.__dict__ = model.__dict__  # the same modules, parameters and hooks
    return plain


def missing_masks(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return masks of ones where the model has an argument and `inputs` only the ids: some code needs one in a trace."""
    taken = inspect.signature(model.forward).parameters
    sides = [(f"{side}attention_mask", inputs.get(f"{side}input_ids")) for side in ("", "decoder_")]
    return {name: torch.ones_like(ids) for name, ids in sides if name in taken and ids is not None and inputs.get(name) is None}


def with_constant_values(program: Program, model: nn.Module) -> Program:
    """Return `program` with the values of constants used as indices, if `model` can also be captured on the CPU."""
    names = {name for node, name in program.constants.items() if any(op(user) in SELECTION for user in node.users)}
    if not any(program.values[name].is_meta for name in names & program.values.keys()):
        return program
    given = {name: node.meta["val"] for node, name in program.inputs.items()}
    inputs = {name: torch.ones(held.shape, dtype=held.dtype) for name, held in given.items() if isinstance(held, Tensor)}
    try:
        again = capture(on_fake_cpu(model), inputs)
    except CaptureError:
        return program
    found = {name: value for name, value in again.values.items() if name in names and not value.is_meta}
    return dataclasses.replace(program, values=program.values | found)


def on_fake_cpu(model: nn.Module) -> nn.Module:
    """Return a copy of a model without weights whose weights are fake tensors on the CPU."""
    twin = copy.deepcopy(model)
    made: dict[int, Tensor] = {}
    with FakeTensorMode(allow_non_fake_inputs=True):
        for module in twin.modules():
            for table in (module._parameters, module._buffers):
                for name, tensor in table.items():
                    if tensor is not None and tensor.is_meta:
                        empty = torch.empty_like(tensor, device="cpu")
                        fake = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
                        table[name] = made.setdefault(id(tensor), fake)  # type: ignore[assignment]
    return twin


def failure_in(model: nn.Module, error: BaseException, at: str = "") -> str:
    """Return the first line of the error, after the path of the innermost module in whose code it was raised.

    The model may itself be part of another model, at the path `at`.
    """
    paths = {  # by contents: a tracer calls other modules with the same contents
        id(vars(module)): f"{at}.{path}".strip(".") for path, module in model.named_modules()
    }
    owners = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    inside = [id(vars(owner)) for owner in owners if isinstance(owner, nn.Module)]
    path = next((paths[owner] for owner in reversed(inside) if owner in paths), "")
    return f"{path}: {first_line(error)}" if path else first_line(error)


@serialized
def call_or_capture(model: nn.Module, inputs: Mapping[str, Any]) -> None:
    """Call the model on the inputs, without cache, for its hooks; capture it instead if its code fails without values."""
    try:
        with preserve_state(model), disable_cache(model):
            run(model, inputs)
    except Exception:  # whatever the model's own code raises
        capture(model, inputs)


# ── Trial calls ───────────────────────────────────────────────────────────────────────────────────────────────────────────────────


Trial = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], object]  # called with a module and the arguments of one of its calls


@serialized
def failed_trials(model: nn.Module, inputs: Mapping[str, Any], trials: Mapping[str, Trial]) -> dict[str, str]:
    """Run `model` without its cache, with each module's trial before each of its calls; return why trials failed.

    `trials` and the result are by path. A model without values is captured instead, because it may branch on them. A model that
    does not run on the inputs has no trials.
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
    # deferred: it imports sympy, and a refusal should not wait for that
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    in_trial = False

    def attempt(path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal in_trial
        if in_trial or path in failed:
            return
        in_trial = True
        try:
            with torch.no_grad():
                trials[path](module, args, dict(kwargs))
        except GuardOnDataDependentSymNode:  # the capture continues with values
            raise
        except DoesNotFitError as error:
            failed[path] = error.what
        except Exception as error:  # whatever the module's own code raises
            failed[path] = failure_in(module, error, path)
        finally:
            in_trial = False

    with watched({path: model.get_submodule(path) for path in trials}, before=attempt):
        yield
