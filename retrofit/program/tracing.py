"""Contexts for a trace: no cache, no warnings, dataclasses opened, autograd annotated, dynamic shapes.

Torch treats a dataclass whose class is registered as a container of its tensors; `open_dataclasses` registers it. A trace records
operations, but not whether they ran under `no_grad` or in a custom `torch.autograd.Function`: annotations record this.

During a trace all dimensions of the inputs are dynamic; for images only the batch is. A dynamic dimension is a symbol, and sizes
computed from it are expressions. Code that cuts images into windows makes these longer with every layer, until tracing takes hours;
therefore height and width are static.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import inspect
import io
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import is_fake
from torch.fx.traceback import annotate, preserve_node_meta
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from retrofit.inputs.model_state import evaluation_mode
from retrofit.inputs.module_calls import watched
from retrofit.process import PROCESS, preserve_attribute, replace_attributes, set_variable, silence_loggers
from retrofit.program.aten_ops import LIKE

NOISY = ("torch.fx.experimental.symbolic_shapes", "torch._subclasses.fake_tensor", "torch.export", "torch._export")  # logs


@contextlib.contextmanager
def disable_cache(model: nn.Module) -> Iterator[None]:
    """Within this context no config in the model enables its cache: a cache object cannot be a value of a graph."""
    found = [getattr(module, "config", None) for module in model.modules()]
    configs: list[Any] = [config for config in found if hasattr(config, "use_cache")]
    with preserve_attribute("use_cache", configs):
        for config in configs:
            config.use_cache = False
        yield


def disable_stack_traces() -> contextlib.AbstractContextManager[None]:
    """Within this context the tracer does not look up the line of code of each node, which is slow."""
    return replace_attributes(fx.config, do_not_emit_stack_traces=True)


def compile_on_call() -> contextlib.AbstractContextManager[None]:
    """Within this context a graph module's Python code is compiled on its first call, not after each change of its graph.

    An export changes its graphs two dozen times and calls none of them.
    """
    compile_now = fx.GraphModule.recompile

    def forward(module: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        compile_now(module)
        return type(module).forward(module, *args, **kwargs)

    def recompile(module: fx.GraphModule) -> None:
        tree = getattr(module.graph._codegen, "pytree_info", None)
        if tree is not None:  # an exporter reads the nesting of a part's arguments and results without calling it
            module._in_spec, module._out_spec = tree.in_spec, tree.out_spec
        type(module).forward = forward  # each graph module has a class of its own

    return replace_attributes(fx.GraphModule, recompile=recompile)


@contextlib.contextmanager
def silence_tracer() -> Iterator[None]:
    """Within this context the tracer prints no warnings, and no graphs when it fails; other threads wait to enter it."""
    with PROCESS, silence_loggers(*NOISY), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield


def skip_no_op_casts() -> contextlib.AbstractContextManager[None]:
    """Within this context `module.to` does nothing if dtype and device are the same: a tracer cannot replace weights."""
    cast = nn.Module.to

    def to(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        held = [tensor for tensor in (*module.parameters(), *module.buffers()) if tensor.is_floating_point()]
        same = all((dtype or tensor.dtype) == tensor.dtype and (device or tensor.device) == tensor.device for tensor in held)
        return module if same else cast(module, *args, **kwargs)

    return replace_attributes(nn.Module, to=to)


def skip_no_op_grad_modes() -> contextlib.AbstractContextManager[None]:
    """Within this context `no_grad` does nothing if no gradient is recorded: torch splits a graph at every change of mode."""
    enter, leave = torch.no_grad.__enter__, torch.no_grad.__exit__
    entered: list[bool] = []

    def enter_once(self: torch.no_grad) -> None:
        entered.append(torch.is_grad_enabled())
        if entered[-1]:
            enter(self)

    def leave_once(self: torch.no_grad, *how: Any) -> None:
        if entered.pop():
            leave(self, *how)

    return replace_attributes(torch.no_grad, __enter__=enter_once, __exit__=leave_once)


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Return a context without autocast; where it is off already, the context does nothing and is in no captured graph."""
    is_off = device.type == "meta" or not torch.is_autocast_enabled(device.type)
    return contextlib.nullcontext() if is_off else torch.autocast(device.type, enabled=False)


@contextlib.contextmanager
def as_if_traced(model: nn.Module) -> Iterator[None]:
    """Run the model, in this context, with the code that a capture records: `torch.compiler` reports an exporter at work."""
    flags = replace_attributes(torch.compiler, _is_compiling_flag=True, _is_exporting_flag=True)
    with evaluation_mode(model), torch.no_grad(), disable_cache(model), silence_tracer(), flags:
        yield


@contextlib.contextmanager
def open_dataclasses(model: nn.Module, inputs: Any) -> Iterator[None]:
    """Within this context dataclasses in the inputs and outputs are containers of their fields."""
    register_classes(inputs)
    with watched({"": model}, after=lambda path, module, args, kwargs, output: register_classes(output)):
        yield


def register_classes(value: Any) -> None:
    """Register every dataclass in the value, at any depth, as a container with torch."""
    is_instance = dataclasses.is_dataclass(value) and not isinstance(value, type)
    if is_instance and type(value) not in _pytree.SUPPORTED_NODES:
        torch.export.register_dataclass(type(value))
    for item in _pytree.tree_leaves(value, is_leaf=lambda part: part is not value):
        if item is not value:
            register_classes(item)


NO_GRAD, CUSTOM_BACKWARD = "retrofit_no_grad", "retrofit_custom_backward"
SWITCHES: dict[Any, Callable[[Any], bool]] = {  # contexts that enable or disable gradients → whether one disables them
    torch.no_grad: lambda switch: True,
    torch.enable_grad: lambda switch: False,
    torch.set_grad_enabled: lambda switch: not switch.mode,
}


@contextlib.contextmanager
def annotate_autograd() -> Iterator[None]:
    """Within this context traced operations are annotated inside `no_grad` and inside functions with a custom backward."""
    apply = annotated_apply(vars(torch.autograd.Function)["apply"].__func__)
    with contextlib.ExitStack() as stack:
        for switch, is_off in SWITCHES.items():
            stack.enter_context(annotate_within(switch, is_off))
        stack.enter_context(replace_attributes(torch.autograd.Function, apply=classmethod(apply)))
        stack.enter_context(preserve_node_meta())
        yield


def annotate_within(switch: Any, is_off: Callable[[Any], bool]) -> contextlib.AbstractContextManager[None]:
    """Within this context the context `switch` annotates the operations inside it."""
    enter, leave = switch.__enter__, switch.__exit__
    opened: list[contextlib.ExitStack] = []

    def entered(self: Any) -> Any:
        result = enter(self)
        opened.append(annotations := contextlib.ExitStack())
        annotations.enter_context(annotate({NO_GRAD: is_off(self)}))
        return result

    def left(self: Any, *how: Any) -> Any:
        opened.pop().close()
        return leave(self, *how)

    return replace_attributes(switch, __enter__=entered, __exit__=left)


def annotated_apply(apply: Callable[..., Any]) -> Callable[..., Any]:
    """Return `torch.autograd.Function.apply` with annotations on the operations inside it, except for torch's own functions."""

    def annotating(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls.__module__.partition(".")[0] == "torch":
            return apply(cls, *args, **kwargs)
        with annotate({CUSTOM_BACKWARD: cls.__name__}):
            return apply(cls, *args, **kwargs)

    return annotating


def annotation(node: fx.Node, what: str) -> Any:
    """Return the node's annotation `what`; None if it has none."""
    return (node.meta.get("custom") or {}).get(what)


Result = TypeVar("Result")
MAX_OPERATIONS = 24  # in the expression of a size; windows have 29 after one layer and 81 after two, other sizes at most 13


class LongExpressionError(Exception):
    """A size in the trace became too long an expression of the input sizes."""


def with_dynamic_shapes(model: nn.Module, inputs: dict[str, Any], trace: Callable[[dict[str, Any]], Result]) -> Result:
    """Return the result of `trace` with all dimensions dynamic (in the form of `torch.export`), or only the batch of images."""
    try:
        with ExpressionLimit() if any(map(is_image_batch, inputs.values())) else contextlib.nullcontext():
            return trace(dynamic_shapes_by_argument(model, inputs, all_dimensions))
    except LongExpressionError:
        return trace(dynamic_shapes_by_argument(model, inputs, only_batch_of_images))


def dynamic_shapes_by_argument(model: nn.Module, inputs: dict[str, Any], dynamic: Callable[[Any], Any]) -> dict[str, Any]:
    """Return the dynamic dimensions of each input; those in the forward's `**kwargs` under that name."""
    parameters = inspect.signature(model.forward).parameters
    keywords = next((name for name, parameter in parameters.items() if parameter.kind is parameter.VAR_KEYWORD), "")
    shapes: dict[str, Any] = {name: dynamic(inputs[name]) for name in parameters if name in inputs}
    if others := {name: dynamic(value) for name, value in inputs.items() if name not in parameters}:
        shapes[keywords] = others
    return shapes


def all_dimensions(value: Any) -> Any:
    """Return every dimension of a tensor as dynamic, as far as the code allows; nothing for other values."""
    if isinstance(value, torch.Tensor):
        return dict.fromkeys(range(value.dim()), torch.export.Dim.AUTO)
    return tree_map(lambda leaf: None, value)


def only_batch_of_images(value: Any) -> Any:
    """Return `all_dimensions`, but for images only the batch."""
    return {0: torch.export.Dim.AUTO} if is_image_batch(value) else all_dimensions(value)


def is_image_batch(value: Any) -> bool:
    """Return whether the value is a batch of images, (batch, channels, height, width)."""
    return isinstance(value, torch.Tensor) and value.dim() == 4 and value.is_floating_point()


class ExpressionLimit(TorchFunctionMode):
    """Within this context a trace ends with `LongExpressionError` once an operation returns a tensor with such a size."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and any(expression_length(size) > MAX_OPERATIONS for size in result.shape):
            raise LongExpressionError
        return result


def expression_length(size: int | torch.SymInt) -> int:
    """Return the number of operations in the expression of a size."""
    return int(size.node.expr.count_ops()) if isinstance(size, torch.SymInt) else 0


# ── Values that a trace replays ───────────────────────────────────────────────────────────────────────────────────────────────────


QUERIES = ("__bool__", "__int__", "__float__", "__index__", "__format__", "item", "tolist", "nonzero")
TORCH = str(Path(torch.__file__).parent)
TENSOR_TOLIST = Tensor.tolist  # the original, even while queries are intercepted
UNKNOWN = object()  # recorded for a value that must not be replayed

Line: TypeAlias = tuple[str, int]  # file and number
Recording: TypeAlias = dict[tuple[Line, str], deque[Any]]  # results by line and query, in the order of the calls
Query: TypeAlias = Callable[..., Any]


@contextlib.contextmanager
def record_tensor_values() -> Iterator[Recording]:
    """Within this context the result of every query of a tensor's values is recorded."""
    with recording_queries(lambda tensor: False) as recording:
        yield recording


@contextlib.contextmanager
def record_constant_values(inputs: Any) -> Iterator[Recording]:
    """Record values, with `UNKNOWN` for values computed from the inputs or at random, and for all values read after these."""
    influence = Influence(inputs)
    with recording_queries(influence.is_read) as recording, influence:
        yield recording


@contextlib.contextmanager
def recording_queries(is_unknown: Callable[[Tensor], bool]) -> Iterator[Recording]:
    recording: Recording = {}

    def record(name: str, original: Query, tensor: Tensor, *more: Any, **how: Any) -> Any:
        result = original(tensor, *more, **how)
        known = UNKNOWN if is_unknown(tensor) else without_tensors(result)
        recording.setdefault((calling_line(), name), deque()).append(known)
        return result

    with intercept_queries(record):
        yield recording


class Influence(TorchDispatchMode):
    """Within this context the memory of all values computed from the sources, or at random, is tracked."""

    def __init__(self, sources: Any) -> None:
        super().__init__()
        self.was_read = False
        self.kept: dict[int, Tensor] = {}  # by memory, which is kept alive so that no other tensor gets it
        self.spread(tree_leaves(sources))

    def spread(self, values: Iterable[Any]) -> None:
        self.kept |= {memory_of(value): value for value in values if isinstance(value, Tensor)}

    def reaches(self, tensor: Tensor) -> bool:
        return memory_of(tensor) in self.kept

    def is_read(self, tensor: Tensor) -> bool:
        """Return whether Python code, which reads this tensor, has read a tracked value: its later results may depend on it."""
        self.was_read |= self.reaches(tensor)
        return self.was_read

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        reached = any(map(self.reaches, given)) and func.overloadpacket.__name__ not in LIKE
        result = func(*args, **kwargs)
        if reached or torch.Tag.nondeterministic_seeded in func.tags:
            self.spread(tree_leaves(result))
            if func._schema.is_mutable:
                self.spread(given)
        return result


def memory_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata  # type: ignore[no-any-return]


@contextlib.contextmanager
def replay_tensor_values(recording: Recording) -> Iterator[None]:
    """Within this context queries of fake tensors return the recorded values."""
    left = {call: results.copy() for call, results in recording.items()}

    def replay(name: str, original: Query, tensor: Tensor, *more: Any, **how: Any) -> Any:
        results = left.get((calling_line(), name))
        if is_fake(tensor) and results:
            result = results.popleft()
            return original(tensor, *more, **how) if result is UNKNOWN else as_returned(result, name, tensor)
        if results:  # a tensor outside the trace: its recorded result is skipped
            results.popleft()
        return original(tensor, *more, **how)

    with intercept_queries(replay):
        yield


def calling_line() -> Line:
    """Return the line of code that queries a tensor: the innermost one outside this file and torch."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (frame.f_code.co_filename == __file__ or frame.f_code.co_filename.startswith(TORCH)):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def without_tensors(result: Any) -> Any:
    """Return the result with its tensors as lists."""
    if isinstance(result, Tensor):
        return TENSOR_TOLIST(result)
    return tuple(map(without_tensors, result)) if isinstance(result, tuple) else result


def as_returned(result: Any, name: str, tensor: Tensor) -> Any:
    """Return a recorded result in the form that the query returns: indices are tensors."""
    if name != "nonzero":
        return result
    if isinstance(result, tuple):
        return tuple(torch.tensor(index, dtype=torch.int64, device=tensor.device) for index in result)
    return torch.tensor(result, dtype=torch.int64, device=tensor.device).reshape(-1, tensor.dim())


@contextlib.contextmanager
def intercept_queries(handle: Callable[..., Any]) -> Iterator[None]:
    """Within this context `handle(name, original, tensor, …)` runs instead of every query of a tensor's values."""
    nonzero, where = torch.nonzero, torch.where

    def intercepted(name: str, original: Query) -> Query:
        return lambda tensor, *more, **how: handle(name, original, tensor, *more, **how)

    def intercepted_where(condition: Tensor, *branches: Any, **named: Any) -> Any:
        if branches or named:
            return where(condition, *branches, **named)
        return handle("nonzero", nonzero, condition, as_tuple=True)

    methods = {name: intercepted(name, getattr(Tensor, name)) for name in QUERIES}
    functions = replace_attributes(torch, nonzero=intercepted("nonzero", nonzero), where=intercepted_where)
    with replace_attributes(Tensor, **methods), functions:
        yield


# ── One of two ways ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def is_exporting() -> bool:
    """Return whether an exporter records this call: torch 2.11 also says so while it compiles, but its own flag is right."""
    return torch.compiler.is_exporting() and bool(getattr(torch.compiler, "_is_exporting_flag", True))


Originals = Sequence[tuple[Any, str, Any]]  # owner, attribute, value

KEPT: contextvars.ContextVar[Originals | None] = contextvars.ContextVar("kept", default=None)


def cond(
    condition: bool | torch.SymBool,
    yes: Callable[..., Tensor],
    no: Callable[..., Tensor],
    *operands: Tensor,
    size: Sequence[int | torch.SymInt],
) -> Tensor:
    """Return `yes(*operands)` if the condition holds, else `no(*operands)`, which must be right for operands of any size.

    Both return a tensor of that `size`. In an exported program, which must hold for any sizes, only `no` is used; within
    `both_kept`, both branches and the condition.
    """
    if torch.compiler.is_dynamo_compiling() or not is_exporting():
        return yes(*operands) if condition else no(*operands)
    originals = KEPT.get()
    if originals is None or condition is False:
        return no(*operands)
    with contextlib.ExitStack() as as_it_was:  # the tracer of a branch handles only torch's own functions
        for owner, name, value in originals:
            as_it_was.enter_context(replace_attributes(owner, **{name: value}))
        flat = torch.cond(condition, flattened(yes), flattened(no), operands)  # type: ignore[arg-type]
    return flat.view(size)  # type: ignore[no-any-return]


def holds_one_way() -> bool:
    """Return whether a program with one branch for all sizes is being exported: code that chose by sizes would fix them."""
    return is_exporting() and KEPT.get() is None


def flattened(branch: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the branch with a flat result: the tracer cannot compare strides computed from several dynamic sizes."""
    return lambda *operands: branch(*operands).flatten()


def both_kept(originals: Originals = ()) -> contextlib.AbstractContextManager[Originals | None]:
    """Within this context exported programs contain both branches; each is traced with these attributes' original values."""
    return set_variable(KEPT, tuple(originals))
