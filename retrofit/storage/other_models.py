"""Compare a skeleton, before it is rewritten, with the model that its recipe was applied to.

The record stored with a recipe (`retrofit.passbase.recipe_storage`) contains the dense config, so that this model can be built
again, without weights. If the two differ (fewer layers, other heads, another vocabulary), both are rewritten, and the recipe must
change both in the same way. Differences that only the shape of a tensor shows are left to the check of the weights.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from retrofit.errors import CaptureError, CheckpointError, RetrofitError, first_few
from retrofit.inputs.example_inputs import forward_parameters, named_inputs, runs_on
from retrofit.inputs.module_calls import tensors_in, watched
from retrofit.passbase import recipe_storage, replaying
from retrofit.passbase.protocol import Rewrite
from retrofit.passbase.recipe_storage import stored_inputs
from retrofit.provenance import ATTRIBUTE, provenance_of, record_provenance
from retrofit.storage.load_guard import changed_settings, in_any, known_ancestor
from retrofit.surgery import Edit, Fate
from retrofit.surgery.auxiliary_losses import ForwardWithAuxiliaryLosses
from retrofit.surgery.transformers_bookkeeping import BOOKS, attention_of, shared_names
from retrofit.surgery.wrappers import holds_guards

PASSING = ("training", "name_or_path", ATTRIBUTE)  # attributes of a model that do not belong to its structure
Structure = dict[str, tuple[type, dict[str, Any], dict[str, Any]]]  # by path: class, plain attributes, shapes of own tensors


def recorded_skeleton(kind: type[Any], record: Mapping[str, Any], like: Any) -> Any:
    """Return the dense model of class `kind` that a recipe was applied to, as a skeleton; None if it was not recorded.

    Its attention implementation and the inputs of its capture are those of `like`, the model being loaded. Raises `CheckpointError`
    if its config cannot be read.
    """
    fields = record.get("config")
    if not fields or kind.config_class is None:
        return None
    try:
        config = kind.config_class.from_dict(copy.deepcopy(dict(fields)))
        config._attn_implementation = attention_of(like.config)
        model = kind(config)
    except Exception as error:  # of any type: transformers and the class may fail on a damaged config
        raise CheckpointError(
            f"the {kind.__name__} that the recipe was applied to cannot be rebuilt",
            why=f"{type(error).__name__}: {error}",
            remedy="load it with the version of transformers it was saved with",
            code="does-not-load",
        ) from error
    if inputs := stored_inputs(like):
        record_provenance(model, inputs=inputs)
    return model


def structure_of(model: nn.Module) -> Structure:
    """Return the structure of each module in the model, without values."""
    return {path: structure_of_module(module) for path, module in model.named_modules(remove_duplicate=False)}


def structure_of_module(module: nn.Module) -> tuple[type, dict[str, Any], dict[str, Any]]:
    """Return the class of a module (for a graph module, its code), its plain attributes and the shapes of its own tensors."""
    tensors = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors}
    if isinstance(module, fx.GraphModule):  # each has its own class
        return fx.GraphModule, {"code": module.code}, shapes
    attributes = {name: plain(value) for name, value in vars(module).items() if not name.startswith("_") and name not in PASSING}
    return type(module), attributes, shapes


def plain(value: Any) -> Any:
    """Return a value that is equal for equal numbers, texts and containers of them, and for all other objects of the same class."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (tuple, list)):
        return tuple(map(plain, value))
    if isinstance(value, Mapping):
        return tuple((str(key), plain(item)) for key, item in value.items())
    return type(value).__qualname__


def require_equal_rewrite(
    model: Any, dense: Mapping[str, nn.Module], recorded: Any, recorded_dense: Mapping[str, nn.Module]
) -> None:
    """Raises `CheckpointError` unless the recipe has changed `model` as it changed `recorded`, in the modules that both have.

    `dense` and `recorded_dense` are the modules before the rewrite, by path.
    """
    here, there = structure_of(model), structure_of(recorded)
    new, recorded_new = (
        {path for path, module in rewritten.named_modules(remove_duplicate=False) if module not in set(before.values())}
        for rewritten, before in ((model, dense), (recorded, recorded_dense))
    )
    lost = [path for path in recorded_new - new if known_ancestor(path, recorded_dense) in dense]
    tables = table_sizes(recorded, model)
    other = [path for path in new & recorded_new if not same_module(here[path], there[path], tables)]
    changed_ties = ties_in(recorded, there, here) ^ ties_in(model, here, there)
    ties = [tied for tied in changed_ties if any(in_any(name, new) for name in tied)]
    if new - recorded_new or lost or other or ties:
        problems = {
            "rewritten here and not there": new - recorded_new,
            "rewritten there and not here": lost,
            "rewritten otherwise": other,
            "tied in one of them": [" and ".join(sorted(names)) for names in ties],
        }
        raise CheckpointError(
            f"the recipe was applied to another {type(model).__name__} and rewrites this one differently",
            why="; ".join(
                [
                    *changed_settings(recorded.config, model.config),
                    *(f"{what}: {first_few(sorted(found))}" for what, found in problems.items() if found),
                ]
            ),
            remedy="load it with the config it was saved with, and change the model afterwards",
            code="other-model",
        )


def table_sizes(recorded: Any, model: Any) -> tuple[int, int]:
    """Return the numbers of rows of both models' token tables, (0, 0) without tables: tokens may have been added since."""
    with contextlib.suppress(NotImplementedError, AttributeError):
        return len(recorded.get_input_embeddings().weight), len(model.get_input_embeddings().weight)
    return 0, 0


def same_module(here: Any, there: Any, tables: tuple[int, int]) -> bool:
    """Return whether two modules differ at most in sizes that their tensors show, or in the size of the token tables."""
    (kind, attributes, shapes), (other_kind, other_attributes, other_shapes) = here, there
    if kind is not other_kind or attributes.keys() != other_attributes.keys() or shapes.keys() != other_shapes.keys():
        return False
    sizes = {pair for name, shape in shapes.items() for pair in zip(other_shapes[name], shape, strict=False)}
    return all(
        value == other_attributes[name] or (other_attributes[name], value) in sizes | {tables} for name, value in attributes.items()
    )


def ties_in(model: nn.Module, *structures: Structure) -> set[frozenset[str]]:
    """Return the groups of names that are one parameter, restricted to names in all the structures."""
    names = set.intersection(*({f"{path}.{name}" for path, entry in found.items() for name in entry[2]} for found in structures))
    groups = (frozenset(names.intersection(group)) for group in shared_names(model.named_parameters(remove_duplicate=False)))
    return {group for group in groups if len(group) > 1}


# ── A recipe on another class ─────────────────────────────────────────────────────────────────────────────────────────────────────


REGISTRIES = ("_modules", "_parameters", "_buffers")
GONE = object()  # the value of a deleted attribute or entry

Tables = Mapping[str, Mapping[Any, Any]]  # of a module: the table, "" for attributes → the name in it → the value


@dataclasses.dataclass(frozen=True)
class Step:
    """A dense skeleton of one of the classes that a model had successively, and the passes that were applied to it."""

    model: Any
    recipe: Sequence[str] = ()
    record: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of the model that these passes were applied to


def rewrite_by_steps(steps: Sequence[Step]) -> tuple[list[bool], frozenset[str]]:
    """Rewrite each step's model by its passes, after transferring the changes made so far to the parts it shares with the previous.

    Tied weights are tied in all of them. A part that a class lacks is dense in the next. Return for each step whether the last
    model depends on it, and the names of that model's tensors that its predecessor lacks. Raises `CheckpointError` if the shared
    part of two classes cannot be the same.
    """
    links = [Link(step.model, before.model) for before, step in itertools.pairwise(steps)]
    done, needed = tuple(steps[0].recipe), [True]
    replaying.replay(steps[0].model, done, steps[0].record)
    for step, link in zip(steps[1:], links, strict=True):
        changed = link.carry_over(done)
        last = link.common if step is steps[-1] else Common(steps[-1].model, link.common.source)
        needed.append(bool(step.recipe) or any(last.has(name) and not link.common.has(name) for name in changed))
        if step.recipe:
            earlier = replaying.rewrites(step.model)
            accounts = replaying.replay(step.model, step.recipe, step.record)
            record_provenance(step.model, rewrites=None if earlier is None else (*earlier, *accounts))
            done += tuple(step.recipe)
    return needed, links[-1].common.own_tensors()


class Link:
    """Two classes that a model had successively: the skeletons of `source`, the first, and of `model`, both dense so far."""

    def __init__(self, model: Any, source: Any) -> None:
        self.common = Common(model, source)
        self.inputs, self.interface = runnable_inputs(model), Interface(self.common)
        self.before = {module: contents_of(module) for module in self.common.source_modules.values()}

    def carry_over(self, recipe: Sequence[str]) -> set[str]:
        """Transfer to `model` what the recipe changed in its shared part of `source`; return the names of the changed parts."""
        common, model, source = self.common, self.common.model, self.common.source
        common.require_shared(recipe)
        edit, losses = Edit(model), take_auxiliary_losses(source)
        changes = {module: changes_between(before, contents_of(module)) for module, before in self.before.items()}
        changed = changed_parts(common, changes)
        why = self.interface.changed() or transfer(common, changes, changed, edit)
        if losses is not None:
            alone = losses.number_is_loss and "labels" not in forward_parameters(model)
            edit.set_attribute(model, "forward", ForwardWithAuxiliaryLosses(model, alone))
        if not why and self.inputs is not None and not runs_on(model, self.inputs):
            why = f"{type(model).__name__} does not run on what the recipe makes of {common.base or 'its modules'}"
        if why:
            edit.undo()
            rewrite_by_itself(common, recipe, why)
        else:
            carry_accounts(common)
        return changed


def runnable_inputs(model: Any) -> dict[str, Any] | None:
    """Return inputs on which the skeleton runs without values; None if there are none. Puts the model in evaluation mode."""
    try:
        inputs = {name: value for name, value in named_inputs(model.eval()).items() if isinstance(value, torch.Tensor)}
    except CaptureError:
        return None
    return inputs if runs_on(model, inputs) else None


# ── What two classes share ───────────────────────────────────────────────────────────────────────────────────────────────────────


class Common:
    """The modules and parameters that `model` shares with `source`, a dense model, under the same names in a file."""

    def __init__(self, model: Any, source: Any) -> None:
        self.model, self.source = model, source
        self.base, self.source_base = path_of(model.base_model, model), path_of(source.base_model, source)
        self.modules, self.source_modules = (dict(network.named_modules(remove_duplicate=False)) for network in (model, source))
        self.parameters, self.source_parameters = (
            dict(network.named_parameters(remove_duplicate=False)) for network in (model, source)
        )
        self.pairs = {
            path: (module, self.modules[str(self.name(path))])
            for path, module in self.source_modules.items()
            if self.has(path) and (path in ("", self.source_base) or self.has_same_class(path))
        }

        named = {self.name(name) for name in (*self.source_modules, *self.source_parameters)}
        self.different = named ^ {*self.modules, *self.parameters}  # names in `model`

    def name(self, name: str) -> str | None:
        """Return the name in `model` of a module or parameter of `source`; None if it can have none."""
        if is_inside(name, self.source_base):
            return ".".join(part for part in (self.base, name[len(self.source_base) :].lstrip(".")) if part)
        return None if is_inside(name, self.base) else name

    def has(self, name: str) -> bool:
        """Return whether `model` has the module or parameter called `name` in `source`."""
        own = self.name(name)
        return own in self.modules or own in self.parameters

    def has_same_class(self, path: str) -> bool:
        return type(self.modules[str(self.name(path))]) is type(self.source_modules[path])

    def require_shared(self, recipe: Sequence[str]) -> None:
        """Raises `CheckpointError` if the shared weights have other names in a file, or the shared stacks other depths."""
        if self.base and self.source_base and self.base != self.source_base:
            why = f"transformers finds no weight of {self.base} in a file that has those of {self.source_base}"
            raise refusal(self, recipe, why)
        lists = (pair for pair in self.pairs.values() if isinstance(pair[0], nn.ModuleList))
        if any(before._modules.keys() != now._modules.keys() for before, now in lists):
            why = "; ".join(changed_settings(self.source.config, self.model.config))
            raise refusal(self, recipe, why, "load it with the config it was saved with")

    def own_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters that only `model` has."""
        shared = {self.name(name) for name in self.source_parameters}
        return {name: parameter for name, parameter in self.parameters.items() if name not in shared}

    def own_tensors(self) -> frozenset[str]:
        """Return the current names of the tensors in parts that only the dense `model` has."""
        places, found = {module: path for path, module in self.modules.items()}, set()
        now = dict(self.model.named_modules(remove_duplicate=False))
        for name in self.model.state_dict():
            path, _, leaf = name.rpartition(".")
            place = places.get(now.get(path))
            if place is not None and self.is_of_one_class(f"{place}.{leaf}".lstrip(".")):
                found.add(name)
        return frozenset(found)

    def correspondence(self) -> dict[int, Any]:
        """Return for each shared object of `source`, by identity, the one of `model`: a memo for copies."""
        memo: dict[int, Any] = {}
        for before, now in self.pairs.values():
            memo[id(before)] = now
            if hasattr(before, "config") and hasattr(now, "config"):
                memo[id(before.config)] = now.config
        for name, parameter in self.source_parameters.items():
            same = self.parameters.get(self.name(name) or "")
            if same is not None and same.shape == parameter.shape:
                memo.setdefault(id(parameter), same)
        return memo

    def is_of_one_class(self, name: str) -> bool:
        """Return whether a name in `model` lies in a module or parameter that one of the two dense classes lacks."""
        parts = name.split(".")
        return any(".".join(parts[:length]) in self.different for length in range(1, len(parts) + 1))


def path_of(part: nn.Module, model: nn.Module) -> str:
    """Return the path of `part` in `model`; "" if it is `model` itself."""
    return next(path for path, module in model.named_modules() if module is part)


def is_inside(path: str, outer: str) -> bool:
    return not outer or path == outer or path.startswith(f"{outer}.")


class Interface:
    """The shapes returned by the outermost shared modules of `source`, which parts that only `model` has may read.

    None are compared if `model` has no parameters of its own.
    """

    def __init__(self, common: Common) -> None:
        source = common.source.eval()
        inputs = replaying.replayed_inputs(source, recipe_storage.stored_inputs(source))
        self.common, self.inputs = common, {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
        self.paths = outermost_shared(common, source, "") if common.own_parameters() else []
        self.dense = self.shapes()

    def shapes(self) -> dict[str, list[torch.Size]]:
        """Return the shapes by path; empty if the model does not run without values."""
        found: dict[str, list[torch.Size]] = {}
        modules = {path: self.common.source.get_submodule(path) for path in self.paths}

        def note(path: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            found[path] = [tensor.shape for tensor in tensors_in(output)]

        with watched(modules, after=note):
            runs = bool(modules) and runs_on(self.common.source, self.inputs)
        return found if runs else {}

    def changed(self) -> str:
        """Return a text that names a module which now returns other shapes; "" if there is none."""
        now = self.shapes()
        path = next((path for path in now if path in self.dense and now[path] != self.dense[path]), None)
        if path is None:
            return ""
        widths = [list(shapes[path][0]) for shapes in (self.dense, now)]
        return f"{path} returns {widths[1]} where it returned {widths[0]}, which parts of {type(self.common.model).__name__} read"


def outermost_shared(common: Common, module: nn.Module, path: str) -> list[str]:
    """Return the paths of the shared modules inside `module` that lie in no other; `source` itself is not among them."""
    found: list[str] = []
    for name, child in module.named_children():
        inner = f"{path}.{name}".lstrip(".")
        shared = inner in common.pairs and common.has_same_class(inner)
        found += [inner] if shared else outermost_shared(common, child, inner)
    return found


# ── The same changes ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def contents_of(module: nn.Module) -> Tables:
    """Return a module's attributes and tables (children, parameters, hooks …) without the records about whole models."""
    held = {name: value for name, value in vars(module).items() if name not in BOOKS and not name.startswith("retrofit_")}
    tables = {name: table_of(value) for name, value in held.items() if isinstance(value, (dict, set))}
    return {"": {name: value for name, value in held.items() if name not in tables}, **tables}


def changes_between(before: Tables, now: Tables) -> Tables:
    """Return the entries of a module's contents that differ `now`: the new value, or `GONE`."""
    found = {}
    for table, new in now.items():
        old = before.get(table, {})
        names = [name for name in {**old, **new} if not is_same(old.get(name, GONE), new.get(name, GONE))]
        if names:
            found[table] = {name: new.get(name, GONE) for name in names}
    return found


def table_of(held: Any) -> dict[Any, Any]:
    """Return a copy of a dictionary, or the members of a set as its keys."""
    return dict.fromkeys(held) if isinstance(held, set) else dict(held)


def is_same(old: Any, new: Any) -> bool:
    if old is new or isinstance(old, (torch.Tensor, nn.Module)) or type(old) is not type(new):
        return old is new
    try:
        return bool(old == new)
    except (TypeError, ValueError, RuntimeError):  # of several values
        return False


def changed_parts(common: Common, changes: Mapping[nn.Module, Tables]) -> set[str]:
    """Return the names of the dense modules and parameters of `source` that were changed or replaced."""
    dense = {*common.source_modules, *common.source_parameters}
    found: set[str] = set()
    for path, module in common.source_modules.items():
        for table, values in changes[module].items():
            names = {f"{path}.{name}".lstrip(".") for name in values} if table in REGISTRIES else {path}
            found |= names & dense
    return found


def transfer(common: Common, changes: Mapping[nn.Module, Tables], changed: Collection[str], edit: Edit) -> str:
    """Apply the changes of `source` to the modules of `model`; return the reason if that is impossible, else "".

    Changes of parts that the model lacks are ignored.
    """
    model, source, memo = common.model, common.source, common.correspondence()
    kinds = type(source).__name__, type(model).__name__
    dense = {*common.source_modules, *common.source_parameters}
    for path in changed:
        if path in common.source_modules and path not in common.pairs and common.has(path):
            classes = type(common.source_modules[path]).__name__, type(common.modules[str(common.name(path))]).__name__
            return f"{path} is {classes[0]} in {kinds[0]}, and {classes[1]} in {kinds[1]}"
    for path, (before, now) in common.pairs.items():
        for table, values in changes[before].items():
            if type(before) is not type(now) and holds_guards(before, table, values):
                continue
            if type(before) is not type(now) and table not in REGISTRIES:
                return f"the recipe changes {type(before).__name__}, and {kinds[1]} has {type(now).__name__} instead"
            if table in REGISTRIES:
                names = {name: f"{path}.{name}".lstrip(".") for name in values}
                values = {name: value for name, value in values.items() if names[name] not in dense or common.has(names[name])}
            copied = {name: value if value is GONE else copy.deepcopy(value, memo) for name, value in values.items()}
            apply_changes(now, table, copied, edit)
    if id(source) in memo and memo[id(source)] not in common.modules.values():
        return f"what the recipe makes of {common.source_base} needs the whole {kinds[0]}"
    return unfit_parameter(common)


def apply_changes(module: nn.Module, table: str, values: Mapping[Any, Any], edit: Edit) -> None:
    """Set these values in the table of the module, or as its attributes."""
    if table:
        held = vars(module).get(table, {})
        changed = {name: value for name, value in {**table_of(held), **values}.items() if value is not GONE}
        edit.set_attribute(module, table, type(held)(changed))
        return
    for name, value in values.items():
        if value is GONE:
            edit.delete_attribute(module, name)
        else:
            edit.set_attribute(module, name, value)


def unfit_parameter(common: Common) -> str:
    """Return why a parameter of a part that only `model` has does not fit the rewritten part; "" if all do."""
    model, source = common.model, common.source
    present, kept = ({id(parameter) for parameter in network.parameters()} for network in (model, source))
    for name, parameter in common.own_parameters().items():
        if id(parameter) not in present:
            return f"{name}, which {type(source).__name__} does not have, is inside what the recipe replaces"
    for name, parameter in common.source_parameters.items():
        same = common.parameters.get(common.name(name) or "")
        if same is not None and id(same) in present and id(parameter) not in kept:
            return f"the recipe replaces {name}, which is also the weight of a part that only {type(model).__name__} has"
    return ""


def take_auxiliary_losses(source: nn.Module) -> ForwardWithAuxiliaryLosses | None:
    """Remove the addition of auxiliary losses from the forward of `source`; return the forward that added them, or None."""
    forward = vars(source).get("forward")
    if not isinstance(forward, ForwardWithAuxiliaryLosses):
        return None
    del vars(source)["forward"]
    if forward.inner is not None:
        vars(source)["forward"] = forward.inner
    return forward


# ── Accounts, and the loaded class by itself ─────────────────────────────────────────────────────────────────────────────────────


def carry_accounts(common: Common) -> None:
    """Copy the accounts of `source` to the model, with its names; those of the passes only if it has every site."""
    model, source = common.model, common.source
    names, paths = (dict(named(remove_duplicate=False)) for named in (model.named_parameters, model.named_modules))
    provenance, accounts = provenance_of(source), replaying.rewrites(source) or ()
    record_provenance(
        model,
        added=frozenset(renamed(provenance.added or (), common, names)),
        rearranged={
            str(common.name(name)): renamed_fate(fate, common)
            for name, fate in provenance.rearranged.items()
            if common.name(fate.name) in names
        },
    )
    if accounts and all(common.name(site.name) in paths for account in accounts for site in account.sites):
        record_provenance(model, rewrites=tuple(renamed_account(account, common, names) for account in accounts))


def renamed_fate(fate: Fate, common: Common) -> Fate:
    layout = fate.layout
    if layout is not None:
        order, fitted = (str(common.name(name)) if name else "" for name in (layout.order, layout.fitted))
        layout = dataclasses.replace(layout, order=order, fitted=fitted)
    return dataclasses.replace(fate, name=str(common.name(fate.name)), layout=layout)


def renamed_account(account: Rewrite, common: Common, names: Collection[str]) -> Rewrite:
    return dataclasses.replace(
        account,
        sites=tuple(dataclasses.replace(site, name=str(common.name(site.name))) for site in account.sites),
        second_step=renamed(account.second_step, common, names),
        unreached=renamed(account.unreached, common, names),
        added=renamed(account.added, common, names),
    )


def renamed(source_names: Iterable[str], common: Common, names: Collection[str]) -> tuple[str, ...]:
    return tuple(name for name in map(str, map(common.name, source_names)) if name in names)


def rewrite_by_itself(common: Common, recipe: Sequence[str], why: str) -> None:
    """Replay the recipe on the loaded class. Raises `CheckpointError` if that makes the shared part another model."""
    model, source = common.model, common.source
    try:
        replaying.replay(model, recipe)
    except RetrofitError as error:
        raise refusal(common, recipe, f"{why}; and by itself: {error.what}" + (f" ({error.why})" if error.why else "")) from error
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    shared = {str(common.name(name)): tensor.shape for name, tensor in source.state_dict().items() if common.name(name) is not None}
    other = [name for name in {**shapes, **shared} if shapes.get(name) != shared.get(name) and not common.is_of_one_class(name)]
    if other:
        raise refusal(common, recipe, f"{why}; and rewritten by itself it has other parameters: {first_few(other)}")


def refusal(common: Common, recipe: Sequence[str], why: str, remedy: str = "") -> CheckpointError:
    saved, wanted = type(common.source).__name__, type(common.model).__name__
    return CheckpointError(
        f"{', '.join(recipe)} makes another model of {wanted} than of {saved}, which it was applied to",
        why=why,
        remedy=remedy or f"load it as {saved}, or rewrite a {wanted} that holds the dense weights",
        code="other-model",
    )
