"""Edits on a live module tree with undo, and the account of where each dense parameter went.

Torch's fused code, which computes whole layers in one operation without calling their modules, is switched off around a new module.
In evaluation mode without gradients `nn.TransformerEncoder` passes nested tensors to its layers, and `nn.TransformerEncoderLayer`
reads the weights of its children without calling them. Both first test an attribute of their own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from retrofit.errors import DoesNotFitError
from retrofit.files.memory import page_out
from retrofit.progress import Note, Worst
from retrofit.provenance import ATTRIBUTE, provenance_of
from retrofit.surgery.user_hooks import OURS, hooked_module, hooks_of_passes, take_over_hooks
from retrofit.surgery.wrappers import Wrapper

if TYPE_CHECKING:
    from retrofit.inputs.calibration import Calibration


SWITCHES = {"use_nested_tensor": False, "activation_relu_or_gelu": 0}  # an attribute, and the value that disables the fused code


def switched_on(model: nn.Module, inside: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yield the modules of the model around `inside` whose fused code may run, each with its switch."""
    for owner in model.modules():
        names = [name for name in SWITCHES if owner.__dict__.get(name)]
        if names and owner is not inside and any(part is inside for part in owner.modules()):
            yield from ((owner, name) for name in names)


Keep = Callable[[Iterable[nn.Parameter]], None]  # called with parameters that have been put into a model
MISSING = object()


@dataclasses.dataclass(frozen=True)
class Widened:
    """A dense parameter that became part of a larger one: `new[index]` was `scale · old` when it was created."""

    name: str
    index: tuple[slice, ...]
    why: str
    scale: float = 1.0


@dataclasses.dataclass(frozen=True)
class Rearranged:
    """The layout of a dense parameter in a new one: at `new[index]`, transposed or not, with its hidden units possibly in another
    order.

    The units run along `dim` of the dense parameter, in `ports` of (first, step): unit u of a port is at first + step·u. If
    `sliced`, `new[index]` holds equal slices of the units along its first dimension, and within each slice one port after the
    other. If it was fitted to data, its values are others and only its place is known.
    """

    index: tuple[int | slice, ...] = ()
    transposed: bool = False
    order: str = ""  # the buffer with the dense unit of each unit of the new parameter; "" if they are in order
    dim: int = 0
    ports: tuple[tuple[int, int], ...] = ((0, 1),)
    fitted: str = ""  # the buffer that records whether the values were fitted to data; "" if they are the dense ones
    sliced: bool = False

    def dense(self, new: torch.Tensor, order: torch.Tensor | None = None) -> torch.Tensor:
        """Return the dense parameter, read from `new`."""
        value = new.detach()[self.index]
        value = self.joined(value) if self.sliced else value
        value = value.t() if self.transposed else value
        if order is None:
            return value
        units = torch.arange(len(order), device=order.device)
        old = torch.empty_like(value)
        for first, step in self.ports:
            old.index_copy_(self.dim, first + step * order, value.index_select(self.dim, first + step * units))
        return old

    def put(self, dense: torch.Tensor, new: torch.Tensor, order: torch.Tensor | None = None) -> None:
        """Write the dense parameter into `new`; `dense` reads it back."""
        value = dense if order is None else self.ordered(dense, order)
        value = value.t() if self.transposed else value
        place = new.detach()[self.index]
        place.copy_(self.divided(value, len(place)) if self.sliced else value)

    def ordered(self, dense: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        """Return `dense` with its units in the new order: unit i is the dense unit order[i]."""
        new = torch.empty_like(dense)
        units = torch.arange(len(order), device=order.device)
        for first, step in self.ports:
            new.index_copy_(self.dim, first + step * units, dense.index_select(self.dim, first + step * order))
        return new

    @property
    def units_dim(self) -> int:
        """Return the dimension of the units in the new parameter's layout without slices."""
        return 1 - self.dim if self.transposed else self.dim

    def divided(self, value: torch.Tensor, slices: int) -> torch.Tensor:
        """Return a value in the new parameter's layout without slices as equal slices: (slices, …)."""
        at = self.units_dim
        units = torch.arange(value.shape[at] // len(self.ports), device=value.device)
        parts = torch.stack(
            [value.index_select(at, first + step * units) for first, step in self.ports], at
        )  # (…, ports, units, …)
        return parts.unflatten(at + 1, (slices, -1)).movedim(at + 1, 0).flatten(at + 1, at + 2)

    def joined(self, slices: torch.Tensor) -> torch.Tensor:
        """Return the inverse of `divided`: the value with these slices."""
        at = self.units_dim
        parts = slices.unflatten(at + 1, (len(self.ports), -1)).movedim(0, at + 1).flatten(at + 1, at + 2)
        value = torch.empty_like(parts.flatten(at, at + 1))
        units = torch.arange(parts.shape[at + 1], device=value.device)
        for port, (first, step) in enumerate(self.ports):
            value.index_copy_(at, first + step * units, parts.select(at, port))
        return value


@dataclasses.dataclass(frozen=True)
class Fate:
    """The place of one dense parameter in the rewritten model."""

    kind: str  # kept, moved, widened, rearranged, dropped
    name: str  # its name in the rewritten model, "" if dropped
    why: str = ""
    index: tuple[slice, ...] = ()
    scale: float = 1.0
    layout: Rearranged | None = None  # if rearranged


class Edit:
    """A journal of edits on `model`: each takes effect at once, `undo` reverts all, `account` says where the parameters went.

    `calibration` is data on which a pass may observe the model before it edits it, or None. `keep` is called with the parameters of
    everything that an edit has put into the model: it may move them out of memory.
    """

    def __init__(
        self,
        model: nn.Module,
        calibration: Calibration | None = None,
        keep: Keep | None = None,
    ) -> None:
        self.model, self.calibration, self.keep = model, calibration, keep
        self.dense = dict(model.named_parameters(remove_duplicate=False))
        self.widened: dict[int, Widened] = {}  # id of the dense parameter → what it became part of
        self.replaced: dict[int, nn.Parameter] = {}  # id of the dense parameter → its wider or rearranged successor
        self.layouts: dict[int, tuple[nn.Module, Rearranged, str]] = {}  # id of the dense parameter → how its successor holds it
        self.reasons: dict[int, str] = {}  # id of the dense parameter → why it was dropped
        self.journal: list[Callable[[], None]] = []
        self.plans: dict[str, Any] = {}  # of the first pass, by its spec, if it was made before the edit
        self.notes: list[Note] = []  # of the current pass
        self.late: list[nn.Parameter] = []  # of the current pass: parameters whose gradient is zero until others have changed
        self.unreached: list[nn.Parameter] = []  # of the current pass: parameters whose gradient is always zero
        self.pass_name: str | None = None  # the current pass; None before the first
        self.exchanged: dict[int, nn.Module] = {}  # by id: the modules that the current pass has replaced, and their replacements

    def begin_pass(self, name: str = "") -> None:
        """Start the pass `name`: later notes, late gradients and replacements are its own."""
        self.notes, self.late, self.unreached = [], [], []
        self.pass_name, self.exchanged = name, {}

    def note(
        self, text: str, site: str = "", values: Mapping[str, float] | None = None, *, form: str = ".3g", worst: Worst = "lowest"
    ) -> None:
        """Add `text`, a finding, to the account of the current pass.

        For a measurement at each site, `text` names the quantity, in the same words for every site, and `values` are this site's
        numbers by column: a report shows all sites in one table. `form` is the format of the numbers (`.1%`); the first column
        ranks the sites, and `worst` is its worst end, lowest or highest.
        """
        self.notes.append(Note(text, site, values, form, worst))

    def expect_late_gradient(self, parameter: nn.Parameter) -> None:
        """Declare that the gradient of the new `parameter` may be zero until other parameters have changed."""
        self.late.append(parameter)

    def expect_no_gradient(self, parameter: nn.Parameter) -> None:
        """Declare that the gradient of the new `parameter` is always zero: with these options it has no effect."""
        self.unreached.append(parameter)

    def late_parameters(self) -> tuple[str, ...]:
        """Return the names of the current pass's parameters whose gradient may be zero until others have changed."""
        return self.names_of(self.late)

    def unreached_parameters(self) -> tuple[str, ...]:
        """Return the names of the current pass's parameters whose gradient is always zero."""
        return self.names_of(self.unreached)

    def names_of(self, parameters: Iterable[nn.Parameter]) -> tuple[str, ...]:
        """Return the names of the parameters in the model, in its order."""
        wanted = {id(parameter) for parameter in parameters}
        return tuple(name for name, parameter in self.model.named_parameters() if id(parameter) in wanted)

    def set_attribute(self, owner: Any, name: str, value: Any) -> None:
        """Set `owner.name` to `value`; modules, parameters and buffers go into torch's registries."""
        for registry in ("_modules", "_parameters", "_buffers"):
            table = owner.__dict__.get(registry) if isinstance(owner, nn.Module) else None
            if table is not None and name in table:
                self.set_item(table, name, value)
                return
        before = owner.__dict__.get(name, MISSING) if hasattr(owner, "__dict__") else getattr(owner, name, MISSING)
        setattr(owner, name, value)
        self.journal.append(lambda: delattr(owner, name) if before is MISSING else setattr(owner, name, before))
        self.keep_parameters(value)

    def record_provenance(self, **changes: Any) -> None:
        """Set fields of the model's `Provenance`."""
        self.set_attribute(self.model, ATTRIBUTE, dataclasses.replace(provenance_of(self.model), **changes))

    def delete_attribute(self, owner: Any, name: str) -> None:
        """Delete `owner.name`, if `owner` itself has it."""
        if name in vars(owner):
            before = vars(owner)[name]
            delattr(owner, name)
            self.journal.append(lambda: setattr(owner, name, before))

    def set_item(self, table: Any, key: Any, value: Any) -> None:
        """Set `table[key]` to `value`."""
        before = table.get(key, MISSING) if hasattr(table, "get") else table[key]
        table[key] = value

        def restore() -> None:
            if before is MISSING:
                del table[key]
            else:
                table[key] = before

        self.journal.append(restore)
        self.keep_parameters(value)

    def keep_parameters(self, value: Any) -> None:
        """Move new parameters to where the model's parameters are."""
        if self.keep is not None:
            self.keep([value] if isinstance(value, nn.Parameter) else value.parameters() if isinstance(value, nn.Module) else ())

    def replace_module(self, path: str, module: nn.Module) -> None:
        """Replace the submodule at `path`, under each of its registered names, by `module`; torch's fused code never bypasses it.

        Raises `DoesNotFitError` if the current pass has replaced it already, or if `module` would wrap a wrapper that must stay
        outermost.
        """
        old = self.model.get_submodule(path)
        if self.pass_name is not None and id(old) in self.exchanged:
            raise DoesNotFitError(
                f"{self.pass_name or 'the pass'}: {path} is replaced twice",
                why="a module that runs at several depths, or holds several parts, is one site",
                remedy="plan each module once: anatomy.sites(…) returns each owner with all its depths",
                in_any_form=True,
                code="twice",
                site=path,
            )
        if getattr(old, "stays_outermost", False) and any(part is old for part in module.modules()):
            raise DoesNotFitError(
                f"{type(old).__name__} at {path} cannot be nested inside {type(module).__name__}",
                why="it has to wrap the whole layer, with all that other passes add",
                remedy="apply the pass that put it there last",
                site=path,
                code="replaced",
            )
        module.train(old.training)
        if not any(part is old for part in module.modules()):
            take_over_hooks(old, module)
        for owner in list(self.model.modules()):
            if owner is module:
                continue
            for name, child in list(owner._modules.items()):
                if child is old:
                    self.set_item(owner._modules, name, module)
        for owner, switch in list(switched_on(self.model, module)):
            self.set_attribute(owner, switch, SWITCHES[switch])
        if self.pass_name is not None:
            self.exchanged.update({id(old): old, id(module): module})

    def add_module(self, owner: nn.Module, name: str, module: nn.Module) -> None:
        """Add `module` to `owner` as its child `name`."""
        module.train(owner.training)
        self.set_item(owner._modules, name, module)

    def make_persistent(self, owner: nn.Module, name: str) -> None:
        """Make the buffer `name` of `owner` persistent: on loading, the dense model's code cannot compute it again."""
        if name in owner._non_persistent_buffers_set:
            owner._non_persistent_buffers_set.discard(name)
            self.journal.append(lambda: owner._non_persistent_buffers_set.add(name))

    def add_handle(self, handle: torch.utils.hooks.RemovableHandle) -> None:
        """Remove the hook of `handle`, which a pass added, when the edits are undone."""
        owner = hooked_module(self.model, handle)
        if owner is not None:
            self.set_attribute(owner, OURS, hooks_of_passes(owner) | {handle.id})
        self.journal.append(handle.remove)

    def widen_parameter(self, old: nn.Parameter, new: nn.Parameter, index: tuple[slice, ...], why: str, scale: float = 1.0) -> None:
        """Register `new` wherever `old` was registered, and record that `new[index]` is `scale · old`.

        Only `undo` reads `old` from then on; if `old` is mapped from a file, its pages are released from memory.
        """
        for owner in list(self.model.modules()):
            for name, parameter in list(owner._parameters.items()):
                if parameter is old:
                    self.set_item(owner._parameters, name, new)
        self.widened[id(old)] = Widened("", index, why, scale)
        self.replaced[id(old)] = new
        page_out([old])

    def rearrange_parameter(self, old: nn.Parameter, new: nn.Parameter, owner: nn.Module, layout: Rearranged, why: str) -> None:
        """Record that `new`, which the edits put into the model, contains `old` by `layout`, whose buffers are on `owner`.

        If `old` is mapped from a file, its pages are released, as in `widen_parameter`.
        """
        self.layouts[id(old)] = owner, layout, why
        self.replaced[id(old)] = new
        page_out([old])

    def drop_parameter(self, old: nn.Parameter, why: str) -> None:
        """Record that `old` was dropped on purpose; only an approximate pass may do so."""
        self.reasons[id(old)] = why

    def account(self) -> dict[str, Fate]:
        """Return, for each dense parameter by its old name, its fate (kept, moved, widened, rearranged, dropped) and its place."""
        now: dict[int, str] = {}
        names: dict[int, set[str]] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            now.setdefault(id(parameter), name)
            names.setdefault(id(parameter), set()).add(name)
        fates: dict[str, Fate] = {}
        for name, parameter in self.dense.items():
            if id(parameter) in now:
                same = name in names[id(parameter)]
                fates[name] = Fate("kept", name) if same else Fate("moved", now[id(parameter)], "its module was wrapped")
            elif id(parameter) in self.widened and id(self.replaced[id(parameter)]) in now:
                part, successor = self.widened[id(parameter)], self.replaced[id(parameter)]
                new_name = name if name in names[id(successor)] else now[id(successor)]
                fates[name] = Fate("widened", new_name, part.why, part.index, part.scale)
            elif id(parameter) in self.layouts and id(self.replaced[id(parameter)]) in now:
                owner, layout, why = self.layouts[id(parameter)]
                path = next((path for path, module in self.model.named_modules() if module is owner), "")
                order, fitted = (f"{path}.{buffer}".lstrip(".") if buffer else "" for buffer in (layout.order, layout.fitted))
                layout = dataclasses.replace(layout, order=order, fitted=fitted)
                fates[name] = Fate("rearranged", now[id(self.replaced[id(parameter)])], why, layout=layout)
            else:
                why = self.reasons.get(id(parameter), "no module of the rewritten model holds it")
                fates[name] = Fate("dropped", "", why)
        return fates

    def undo(self) -> None:
        """Restore the model exactly as it was before the first edit."""
        for module in self.model.modules() if self.journal else ():
            if isinstance(module, Wrapper):
                module.release()
        while self.journal:
            self.journal.pop()()
        self.widened.clear()
        self.replaced.clear()
        self.layouts.clear()
        self.reasons.clear()
        self.begin_pass()
        self.pass_name = None
