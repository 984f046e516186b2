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
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import fx, nn

from retrofit.errors import CaptureError, CheckpointError, RetrofitError, first_few
from retrofit.inputs.example_inputs import accepts, forward_parameters, named_inputs
from retrofit.inputs.module_calls import tensors_in, watched
from retrofit.passbase import recipe_storage, replaying
from retrofit.passbase.protocol import Rewrite
from retrofit.passbase.recipe_storage import stored_inputs
from retrofit.provenance import ATTRIBUTE, provenance_of, record_provenance
from retrofit.surgery import Edit, Fate
from retrofit.surgery.auxiliary_losses import ForwardWithAuxiliaryLosses
from retrofit.surgery.transformers_bookkeeping import BOOKS, attention_of, shared_names
from retrofit.surgery.wrappers import holds_guards

SAFETENSORS = ".safetensors"
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
    attributes = {name: plain(value) for name, value in vars(module).items() if not name.startswith("_") and name not in PASSING}
    if isinstance(module, fx.GraphModule):  # each has its own class
        return fx.GraphModule, {"code": module.code}, {name: tuple(tensor.shape) for name, tensor in own_tensors(module)}
    return type(module), attributes, {name: tuple(tensor.shape) for name, tensor in own_tensors(module)}


def own_tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]


def plain(value: Any) -> Any:
    """Return a value that is equal for equal numbers, texts and containers of them, and for all other objects of the same class."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (tuple, list)):
        return tuple(map(plain, value))
    if isinstance(value, Mapping):
        return tuple((str(key), plain(item)) for key, item in value.items())
    return type(value).__qualname__


def require_equal_rewrite(model: Any, dense: Mapping[str, nn.Module], whole: Any, whole_dense: Mapping[str, nn.Module]) -> None:
    """Raises `CheckpointError` unless the recipe has changed `model` in the same way as `whole`, in the modules that both have.

    `dense` and `whole_dense` are the modules before the rewrite, by path.
    """
    ours, theirs = structure_of(model), structure_of(whole)
    new, recorded = (
        {path for path, module in rewritten.named_modules(remove_duplicate=False) if module not in set(before.values())}
        for rewritten, before in ((model, dense), (whole, whole_dense))
    )
    lost = [path for path in recorded - new if known_ancestor(path, whole_dense) in dense]
    other = [path for path in new & recorded if not same_module(ours[path], theirs[path], table_sizes(whole, model))]
    ties = [tied for tied in ties_in(whole, theirs, ours) ^ ties_in(model, ours, theirs) if any(in_any(name, new) for name in tied)]
    if new - recorded or lost or other or ties:
        problems = {
            "rewritten here and not there": new - recorded,
            "rewritten there and not here": lost,
            "rewritten otherwise": other,
            "tied in one of them": [" and ".join(sorted(names)) for names in ties],
        }
        raise CheckpointError(
            f"the recipe was applied to another {type(model).__name__} and rewrites this one differently",
            why="; ".join([*config_differences(whole, model), *(f"{k}: {first_few(sorted(v))}" for k, v in problems.items() if v)]),
            remedy="load it with the config it was saved with, and change the model afterwards",
            code="other-model",
        )


def known_ancestor(path: str, modules: Mapping[str, Any]) -> str:
    """Return the longest path in `modules` that equals or contains `path`."""
    while path not in modules:
        path = path.rpartition(".")[0]
    return path


def table_sizes(whole: Any, model: Any) -> tuple[int, int]:
    """Return the numbers of rows of both models' token tables, (0, 0) without tables: tokens may have been added since."""
    sizes = []
    for network in (whole, model):
        with contextlib.suppress(NotImplementedError, AttributeError):
            sizes.append(len(network.get_input_embeddings().weight))
    return (sizes[0], sizes[1]) if len(sizes) == 2 else (0, 0)


def same_module(ours: Any, theirs: Any, tables: tuple[int, int]) -> bool:
    """Return whether two modules differ at most in sizes that their tensors show, or in the size of the token tables."""
    (kind, attributes, shapes), (other_kind, other_attributes, other_shapes) = ours, theirs
    if kind is not other_kind or attributes.keys() != other_attributes.keys() or shapes.keys() != other_shapes.keys():
        return False
    sizes = {(there, here) for name, shape in shapes.items() for there, here in zip(other_shapes[name], shape, strict=False)}
    return all(
        value == other_attributes[name] or (other_attributes[name], value) in sizes | {tables} for name, value in attributes.items()
    )


def ties_in(model: nn.Module, *structures: Structure) -> set[frozenset[str]]:
    """Return the groups of names that are one parameter, restricted to names in all the structures."""
    names = set.intersection(*({f"{path}.{name}" for path, entry in found.items() for name in entry[2]} for found in structures))
    groups = (frozenset(names.intersection(group)) for group in shared_names(model.named_parameters(remove_duplicate=False)))
    return {group for group in groups if len(group) > 1}


def config_differences(whole: Any, model: Any) -> list[str]:
    """Return the differences between the configs of the two models, one text per setting."""
    return changed_settings(whole.config.to_dict(), model.config.to_dict())


def changed_settings(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return the differences between two configs, given as dictionaries, one text per setting."""
    then, now = dict(settings_in(before)), dict(settings_in(after))
    return [f"{key} is {now[key]}, and was {then[key]}" for key in then if key in now and now[key] != then[key]]


def settings_in(config: Mapping[str, Any], place: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the settings of the model itself in a config and its sub-configs, by dotted name."""
    for key, value in config.items():
        if key.startswith("_") or key in ("quantization_config", "architectures", "dtype"):
            continue
        if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
            yield from settings_in(value, f"{place}{key}.")
        else:
            yield f"{place}{key}", value


def names_in_files(files: Sequence[str] | None) -> set[str] | None:
    """Return the names of the tensors in a model's files, without reading values; None if they cannot be determined."""
    if not files:
        return None
    names: set[str] = set()
    for file in map(Path, files):
        try:
            if file.suffix == SAFETENSORS:
                with safe_open(file, "pt") as opened:
                    names.update(opened.keys())
            else:
                names.update(torch.load(file, map_location="meta", weights_only=True))
        except Exception as error:  # of any type: transformers reports the damage when it reads the file
            logging.getLogger(__name__).debug("%s: %s", file, error)
            return None
    return names


def in_any(name: str, paths: Iterable[str]) -> bool:
    """Return whether the name lies in one of the modules at `paths`, or is one of these."""
    return any(f"{name}.".startswith(f"{path}.") for path in paths)


# ── A recipe on another class ─────────────────────────────────────────────────────────────────────────────────────────────────────


REGISTRIES = ("_modules", "_parameters", "_buffers")
GONE = object()  # the value of a deleted attribute or entry

Changes = Mapping[str, Mapping[Any, Any]]  # the table, "" for attributes → the name in it → the value


@dataclasses.dataclass(frozen=True)
class Step:
    """A dense skeleton of one of the classes that a model had successively, and the passes that were applied to it."""

    model: Any
    recipe: Sequence[str] = ()
    record: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of the model that these passes were applied to


def rewrite_by_steps(steps: Sequence[Step]) -> tuple[list[bool], frozenset[str]]:
    """Rewrite the model of each step by its passes, after transferring to it the earlier changes of the parts it shares with the
    last.

    Tied weights are tied in all of them. A part that a class lacks is dense in the next. Return for each step whether the last
    model depends on it, and the names of that model's tensors that its predecessor lacks. Raises `CheckpointError` if the shared
    part of two classes cannot be the same.
    """
    links = [Link(step.model, before.model) for before, step in itertools.pairwise(steps)]
    done, needed = tuple(steps[0].recipe), [True]
    replaying.replay(steps[0].model, done, steps[0].record)
    for step, link in zip(steps[1:], links, strict=True):
        changed = link.carry_over(done)
        last = link.common if step is steps[-1] else Common(steps[-1].model, link.common.whole)
        needed.append(bool(step.recipe) or any(last.has(name) and not link.common.has(name) for name in changed))
        if step.recipe:
            earlier = replaying.rewrites(step.model)
            accounts = replaying.replay(step.model, step.recipe, step.record)
            record_provenance(step.model, rewrites=None if earlier is None else (*earlier, *accounts))
            done += tuple(step.recipe)
    return needed, links[-1].common.own_tensors()


class Link:
    """Two classes that a model had successively: the skeletons of `whole`, the first, and of `model`, both dense so far."""

    def __init__(self, model: Any, whole: Any) -> None:
        self.common = Common(model, whole)
        self.inputs, self.interface = runnable_inputs(model), Interface.of(self.common)
        self.before = {module: Contents.of(module) for module in self.common.whole_modules.values()}

    def carry_over(self, recipe: Sequence[str]) -> set[str]:
        """Transfer to `model` what the recipe changed in its shared part of `whole`; return the names of the changed parts."""
        common, model, whole = self.common, self.common.model, self.common.whole
        common.require_shared(recipe)
        edit, losses = Edit(model), take_auxiliary_losses(whole)
        changes = {module: contents.changes(Contents.of(module)) for module, contents in self.before.items()}
        changed = changed_parts(common, changes)
        why = self.interface.changed() or transfer(common, changes, changed, edit)
        if losses is not None:
            alone = losses.number_is_loss and "labels" not in forward_parameters(model)
            edit.set_attribute(model, "forward", ForwardWithAuxiliaryLosses(model, alone))
        if not why and self.inputs is not None and not accepts(model, self.inputs):
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
    return inputs if accepts(model, inputs) else None


# ── What two classes share ───────────────────────────────────────────────────────────────────────────────────────────────────────


class Common:
    """The modules and parameters that `model` shares with `whole`, a dense model, under the same names in a file."""

    def __init__(self, model: Any, whole: Any) -> None:
        self.model, self.whole = model, whole
        self.base, self.whole_base = path_of(model.base_model, model), path_of(whole.base_model, whole)
        self.modules, self.whole_modules = (dict(every.named_modules(remove_duplicate=False)) for every in (model, whole))
        self.parameters, self.whole_parameters = (dict(every.named_parameters(remove_duplicate=False)) for every in (model, whole))
        self.pairs = {
            path: (theirs, self.modules[str(self.name(path))])
            for path, theirs in self.whole_modules.items()
            if self.has(path) and (path in ("", self.whole_base) or self.has_same_class(path))
        }

        named = {self.name(name) for name in (*self.whole_modules, *self.whole_parameters)}
        self.different = named ^ {*self.modules, *self.parameters}  # names in `model`

    def name(self, name: str) -> str | None:
        """Return the name in `model` of a module or parameter of `whole`; None if it can have none."""
        if is_inside(name, self.whole_base):
            return ".".join(part for part in (self.base, name[len(self.whole_base) :].lstrip(".")) if part)
        return None if is_inside(name, self.base) else name

    def has(self, name: str) -> bool:
        """Return whether `model` has the module or parameter called `name` in `whole`."""
        ours = self.name(name)
        return ours is not None and (ours in self.modules or ours in self.parameters)

    def has_same_class(self, path: str) -> bool:
        return type(self.modules[str(self.name(path))]) is type(self.whole_modules[path])

    def require_shared(self, recipe: Sequence[str]) -> None:
        """Raises `CheckpointError` if the shared weights have other names in a file, or the shared stacks other depths."""
        if self.base and self.whole_base and self.base != self.whole_base:
            raise refusal(
                self, recipe, f"transformers finds no weight of {self.base} in a file that has those of {self.whole_base}"
            )
        lists = ((theirs, ours) for theirs, ours in self.pairs.values() if isinstance(theirs, nn.ModuleList))
        if any(theirs._modules.keys() != ours._modules.keys() for theirs, ours in lists):
            raise refusal(
                self, recipe, "; ".join(config_differences(self.whole, self.model)), "load it with the config it was saved with"
            )

    def own_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters that only `model` has."""
        theirs = {self.name(name) for name in self.whole_parameters}
        return {name: parameter for name, parameter in self.parameters.items() if name not in theirs}

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
        """Return for each shared object of `whole`, by identity, the one of `model`: a memo for copies."""
        memo: dict[int, Any] = {}
        for theirs, ours in self.pairs.values():
            memo[id(theirs)] = ours
            if hasattr(theirs, "config") and hasattr(ours, "config"):
                memo[id(theirs.config)] = ours.config
        for name, parameter in self.whole_parameters.items():
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
    """The shapes returned by the outermost shared modules of `whole`, which parts that only `model` has may read."""

    def __init__(self, common: Common, paths: list[str], inputs: Mapping[str, Any]) -> None:
        self.common, self.paths, self.inputs = common, paths, inputs
        self.dense = self.shapes()

    @classmethod
    def of(cls, common: Common) -> Interface:
        """Return the interface of the dense model; empty if `model` has no parameters of its own."""
        whole = common.whole.eval()
        inputs = replaying.replayed_inputs(whole, recipe_storage.stored_inputs(whole))
        paths = outermost_shared(common, whole, "") if common.own_parameters() else []
        return cls(common, paths, {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)})

    def shapes(self) -> dict[str, list[torch.Size]]:
        """Return the shapes by path; empty if the model does not run without values."""
        found: dict[str, list[torch.Size]] = {}
        modules = {path: self.common.whole.get_submodule(path) for path in self.paths}

        def note(path: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            found[path] = [tensor.shape for tensor in tensors_in(output)]

        with watched(modules, after=note):
            runs = bool(modules) and accepts(self.common.whole, self.inputs)
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
    """Return the paths of the shared modules inside `module` that lie in no other; `whole` itself is not among them."""
    found: list[str] = []
    for name, child in module.named_children():
        inner = f"{path}.{name}".lstrip(".")
        shared = inner in common.pairs and common.has_same_class(inner)
        found += [inner] if shared else outermost_shared(common, child, inner)
    return found


# ── The same changes ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclasses.dataclass(frozen=True)
class Contents:
    """The contents of a module at one time: its attributes, and its tables of children, parameters, hooks and so on."""

    tables: Changes

    @classmethod
    def of(cls, module: nn.Module) -> Contents:
        """Return the module's current contents, without retrofit's and transformers' records about whole models."""
        held = {name: value for name, value in vars(module).items() if name not in BOOKS and not name.startswith("retrofit_")}
        tables = {name: table_of(value) for name, value in held.items() if isinstance(value, (dict, set))}
        return cls({"": {name: value for name, value in held.items() if name not in tables}, **tables})

    def changes(self, now: Contents) -> Changes:
        """Return the differences in `now`: the new value, or `GONE`."""
        found = {}
        for table, new in now.tables.items():
            old = self.tables.get(table, {})
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


def changed_parts(common: Common, changes: Mapping[nn.Module, Changes]) -> set[str]:
    """Return the names of the dense modules and parameters of `whole` that were changed or replaced."""
    dense = {*common.whole_modules, *common.whole_parameters}
    found: set[str] = set()
    for path, module in common.whole_modules.items():
        for table, values in changes[module].items():
            names = {f"{path}.{name}".lstrip(".") for name in values} if table in REGISTRIES else {path}
            found |= names & dense
    return found


def transfer(common: Common, changes: Mapping[nn.Module, Changes], changed: Collection[str], edit: Edit) -> str:
    """Apply the changes of `whole` to the modules of `model`; return the reason if that is impossible, else "".

    Changes of parts that the model lacks are ignored.
    """
    model, whole, memo = common.model, common.whole, common.correspondence()
    kinds = type(whole).__name__, type(model).__name__
    dense = {*common.whole_modules, *common.whole_parameters}
    for path in changed:
        if path in common.whole_modules and path not in common.pairs and common.has(path):
            classes = type(common.whole_modules[path]).__name__, type(common.modules[str(common.name(path))]).__name__
            return f"{path} is {classes[0]} in {kinds[0]}, and {classes[1]} in {kinds[1]}"
    for path, (theirs, ours) in common.pairs.items():
        for table, values in changes[theirs].items():
            if type(theirs) is not type(ours) and holds_guards(theirs, table, values):
                continue
            if type(theirs) is not type(ours) and table not in REGISTRIES:
                return f"the recipe changes {type(theirs).__name__}, and {kinds[1]} has {type(ours).__name__} instead"
            if table in REGISTRIES:
                names = {name: f"{path}.{name}".lstrip(".") for name in values}
                values = {name: value for name, value in values.items() if names[name] not in dense or common.has(names[name])}
            copied = {name: value if value is GONE else copy.deepcopy(value, memo) for name, value in values.items()}
            apply_changes(ours, table, copied, edit)
    if id(whole) in memo and memo[id(whole)] not in common.modules.values():
        return f"what the recipe makes of {common.whole_base} needs the whole {kinds[0]}"
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
    model, whole = common.model, common.whole
    present, kept = ({id(parameter) for parameter in network.parameters()} for network in (model, whole))
    for name, parameter in common.own_parameters().items():
        if id(parameter) not in present:
            return f"{name}, which {type(whole).__name__} does not have, is inside what the recipe replaces"
    for name, parameter in common.whole_parameters.items():
        ours = common.parameters.get(common.name(name) or "")
        if ours is not None and id(ours) in present and id(parameter) not in kept:
            return f"the recipe replaces {name}, which is also the weight of a part that only {type(model).__name__} has"
    return ""


def take_auxiliary_losses(whole: nn.Module) -> ForwardWithAuxiliaryLosses | None:
    """Remove the addition of auxiliary losses from the forward of `whole`; return the forward that added them, or None."""
    forward = vars(whole).get("forward")
    if not isinstance(forward, ForwardWithAuxiliaryLosses):
        return None
    del vars(whole)["forward"]
    if forward.inner is not None:
        vars(whole)["forward"] = forward.inner
    return forward


# ── Accounts, and the loaded class by itself ─────────────────────────────────────────────────────────────────────────────────────


def carry_accounts(common: Common) -> None:
    """Copy the accounts of `whole` to the model, with its names; those of the passes only if it has every site."""
    model, whole = common.model, common.whole
    names, paths = (dict(every(remove_duplicate=False)) for every in (model.named_parameters, model.named_modules))
    theirs, accounts = provenance_of(whole), replaying.rewrites(whole) or ()
    record_provenance(
        model,
        added=frozenset(renamed(theirs.added or (), common, names)),
        rearranged={
            str(common.name(name)): renamed_fate(fate, common)
            for name, fate in theirs.rearranged.items()
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


def renamed(theirs: Iterable[str], common: Common, names: Collection[str]) -> tuple[str, ...]:
    return tuple(name for name in map(str, map(common.name, theirs)) if name in names)


def rewrite_by_itself(common: Common, recipe: Sequence[str], why: str) -> None:
    """Replay the recipe on the loaded class. Raises `CheckpointError` if that makes the shared part another model."""
    model, whole = common.model, common.whole
    try:
        replaying.replay(model, recipe)
    except RetrofitError as error:
        raise refusal(common, recipe, f"{why}; and by itself: {error.what}" + (f" ({error.why})" if error.why else "")) from error
    ours = {name: tensor.shape for name, tensor in model.state_dict().items()}
    theirs = {str(common.name(name)): tensor.shape for name, tensor in whole.state_dict().items() if common.name(name) is not None}
    other = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name) and not common.is_of_one_class(name)]
    if other:
        raise refusal(common, recipe, f"{why}; and rewritten by itself it has other parameters: {first_few(other)}")


def refusal(common: Common, recipe: Sequence[str], why: str, remedy: str = "") -> CheckpointError:
    saved, wanted = type(common.whole).__name__, type(common.model).__name__
    return CheckpointError(
        f"{', '.join(recipe)} makes another model of {wanted} than of {saved}, which it was applied to",
        why=why,
        remedy=remedy or f"load it as {saved}, or rewrite a {wanted} that holds the dense weights",
        code="other-model",
    )
