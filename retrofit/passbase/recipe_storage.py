"""The recipe stored with a live model and in its config, and a record of the model that it was applied to.

The record is plain data: what each pass found (`AppliedTo`) and, for a transformers model, the dense config. A recipe is not
replayed on another model if the difference matters.

    {"config": {…}, "passes": [{"sites": ["layers.0", …], "ties": [["a.weight", "b.weight"]], "stacks": [["decoder", 4, 64, 8]]}]}
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from retrofit.errors import CheckpointError
from retrofit.passbase.protocol import AppliedTo, Rewrite
from retrofit.process import set_variable
from retrofit.provenance import provenance_of, record_provenance
from retrofit.surgery import Edit
from retrofit.surgery.dequantization import (
    METHOD,
    came_through_quantizer,
    forget_quantization,
    has_plain_weights,
    is_recipe,
    quantization_of,
    refuse_packed,
)
from retrofit.surgery.transformers_bookkeeping import (
    declare_published_ties,
    declare_ties,
    deny_ties,
    is_transformers,
    keep_own_names,
    keep_published_names,
    own_configs,
    persistent_buffers,
    shared_names,
    transformers_parts,
)

if TYPE_CHECKING:
    from torch import nn

    from retrofit.program.program import Program


BUNDLE = "retrofit_bundle"  # the entry of config.json in which a bundle names its source


def store_recipe(model: nn.Module, recipe: Sequence[str], record: Mapping[str, Any] | None = None) -> None:
    """Store the recipe and its record on the model, to be saved with it; an empty recipe removes both.

    Without a `record` the stored one remains. For a transformers model, the list of tied weights is updated, and files get the
    model's own parameter names. Raises `CheckpointError`, before anything has changed, if the model's config or buffers leave no
    room for a recipe.
    """
    record = stored_record(model) if record is None else record
    if is_transformers(model):
        store_in_config(model, recipe, record) if recipe else remove_from_config(model)
    record_provenance(model, recipe=tuple(recipe), record=dict(record) if recipe else {})


def stored_recipe(model: nn.Module) -> tuple[str, ...]:
    """Return the recipe stored with the model; empty for a dense one."""
    return provenance_of(model).recipe


def stored_record(model: nn.Module) -> dict[str, Any]:
    """Return the record of the model that the recipe was applied to (`applied_to`); empty if there is none."""
    return dict(provenance_of(model).record)


CAPTURED: contextvars.ContextVar[tuple[dict[str, Any], Program] | None] = contextvars.ContextVar("CAPTURED", default=None)


def lend_program(model: nn.Module, program: Program | None) -> contextlib.AbstractContextManager[object]:
    """Let `captured_program` return `program`, the dense model's, in this context, in which a rewritten `model` is built again."""
    record = json.loads(json.dumps(stored_record(model)))
    is_whole = len(passes_of(record)) == len(stored_recipe(model))
    return set_variable(CAPTURED, (record, program) if program is not None and is_whole else None)


def captured_program(record: Mapping[str, Any]) -> Program | None:
    """Return the lent program, if any, of the dense model that a recipe with this record was applied to."""
    lent = CAPTURED.get()
    return lent[1] if lent is not None and lent[0] == record else None


def new_record(model: nn.Module, config: Mapping[str, Any] | None, accounts: Iterable[Rewrite]) -> dict[str, Any]:
    """Return the record of a model to which further passes were applied; `config` is the dense model's."""
    earlier = stored_record(model)
    passes = [*earlier.get("passes", ()), *(account.applied_to.to_dict() for account in accounts if account.applied_to is not None)]
    kept = earlier.get("config", config) if stored_recipe(model) else config
    return ({"config": kept} if kept else {}) | {"passes": passes}


def dense_config(model: Any) -> dict[str, Any] | None:
    """Return the config of a transformers model as in `config.json`, without recipe or quantization; None for other models."""
    if not is_transformers(model):
        return None
    config = json.loads(model.config.to_json_string(use_diff=True))
    return {key: value for key, value in config.items() if key not in ("quantization_config", "transformers_version")}


def store_in_config(model: Any, recipe: Sequence[str], record: Mapping[str, Any]) -> None:
    """Make `save_pretrained`, also of a part of the model, write the recipe and the rewritten model's names and ties."""
    require_room(model)
    # Not always the model's own class: the base of a rewritten model, saved by itself, has the recipe of the whole model.
    saved = entry_of(model.config).get("architecture") if stored_recipe(model) else None
    inputs = stored_inputs(model)
    entry: dict[str, Any] = {"quant_method": METHOD, "recipe": list(recipe), "architecture": saved or type(model).__name__}
    entry |= {"inputs": inputs} if inputs else {}
    entry |= {"applied_to": dict(record)} if record else {}
    earlier, own, count = entry_of(model.config) if saved else {}, type(model).__name__, len(stored_recipe(model))
    part, through = earlier.get("part"), list(earlier.get("through") or ())
    if saved and not part and len(recipe) > count and own != (through[-1][0] if through else saved):
        through.append([own, count])  # the following passes were applied to this class
    model.config.quantization_config = entry | ({"part": part} if part else {}) | ({"through": through} if through else {})
    for path, inner in parts_with_configs(model):
        if any(f"{site}.".startswith(f"{path}.") for applied in record.get("passes", ()) for site in applied["sites"]):
            inner.config.quantization_config = entry | {"part": f"{part}.{path}" if part else path}
            keep_own_names(inner)
    keep_own_names(model)
    declare_ties(model)


def parts_with_configs(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield the outermost parts of a transformers model that have their own config, with their paths."""
    seen = {id(model.config)}
    for path, inner in transformers_parts(model):
        if path and id(inner.config) not in seen:
            seen.add(id(inner.config))
            yield path, inner


def entry_of(config: Any) -> dict[str, Any]:
    """Return the recipe's entry in a config; empty if there is none."""
    found = getattr(config, "quantization_config", None)
    if not is_recipe(found):
        return {}
    return dict(found) if isinstance(found, dict) else dict(vars(found))


def stored_inputs(model: nn.Module) -> dict[str, Any]:
    """Return the input descriptions stored on the model or in its config; empty if the inputs were inferred from the model."""
    if (own := provenance_of(model).inputs) is not None:
        return dict(own)
    return dict(entry_of(getattr(model, "config", None)).get("inputs") or {})


def remove_from_config(model: Any) -> None:
    """Make `save_pretrained` write a dense model."""
    for part in (model, *(inner for _, inner in parts_with_configs(model))):
        if is_recipe(getattr(part.config, "quantization_config", None)):
            del part.config.quantization_config
        keep_published_names(part)
    declare_published_ties(model)


def make_room(model: nn.Module, edit: Edit) -> None:
    """Prepare a transformers model to store a recipe. Raises `CheckpointError` if it cannot."""
    if is_transformers(model):
        require_room(model)
        require_own_recipe(model)
        own_configs(model, edit)
        deny_ties(model, edit)
        if not is_recipe(quantization_of(model)):
            forget_quantization(model, edit)


@contextlib.contextmanager
def as_ordinary_model(model: Any) -> Iterator[None]:
    """Hide, in this context, that the model was loaded through a quantizer, unless its weights are quantized."""
    edit = Edit(model)
    if came_through_quantizer(model) and not is_recipe(quantization_of(model)) and has_plain_weights(model):
        forget_quantization(model, edit)
    try:
        yield
    finally:
        edit.undo()


def require_own_recipe(model: Any) -> None:
    """Raises `CheckpointError` if the recipe was applied to a larger model that contained this one, and is replayed on that."""
    entry = entry_of(model.config) if stored_recipe(model) else {}
    if entry.get("part"):
        raise CheckpointError(
            f"{type(model).__name__} cannot be rewritten further",
            why=f"it was saved as {entry['part']} of a rewritten {entry['architecture']}, on which its recipe is replayed",
            remedy=f"apply the passes to the {entry['architecture']}, and save {entry['part']} of that",
            code="rewritten",
        )


def require_room(model: Any) -> None:
    """Raises `CheckpointError` if the weights are quantized or a persistent buffer has two names."""
    refuse_bundle(vars(model.config), type(model).__name__)
    refuse_packed(model, "rewritten")
    buffers = dict(model.named_buffers(remove_duplicate=False))
    for names in shared_names(persistent_buffers(model, buffers)):
        raise CheckpointError(
            f"the buffer {names[0]} is also registered as {', '.join(names[1:])}",
            why="transformers ties parameters, not buffers, when it loads a model",
            remedy="register it in one place, or make it a parameter with requires_grad=False",
            code="twice",
        )


def refuse_bundle(config: Mapping[str, Any], what: str) -> None:
    """Raises `CheckpointError` if a config is that of a bundle, whose modules no recipe creates."""
    if BUNDLE in config:
        raise CheckpointError(
            f"{what} is a bundle, which retrofit cannot load",
            why="it has its own modelling code and does not use retrofit",
            remedy="use the directory that it was bundled from",
            code="bundle",
        )


def passes_of(record: Mapping[str, Any] | None) -> tuple[AppliedTo, ...]:
    """Return what each pass of a stored record was applied to; empty if there is no record."""
    passes = (record or {}).get("passes", [])
    return tuple(map(AppliedTo.from_dict, passes if isinstance(passes, list) else [passes]))


def tie_as(model: nn.Module, groups: Sequence[Sequence[str]]) -> None:
    """Tie the parameters in each group of names, and no others; ignore unknown names."""
    named = dict(model.named_parameters(remove_duplicate=False))
    wanted = [[name for name in group if name in named] for group in groups]
    if sorted(map(sorted, filter(lambda group: len(group) > 1, wanted))) == sorted(map(sorted, shared_names(iter(named.items())))):
        return
    for names in shared_names(iter(named.items())):
        for name in names[1:]:
            named[name] = copy.deepcopy(named[name])
            assign(model, name, named[name])
    for first, *others in filter(None, wanted):
        for name in others:
            assign(model, name, named[first])


def assign(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Set the model's parameter `name` to `parameter` itself, past all hooks on the registration of parameters."""
    owner, _, leaf = name.rpartition(".")
    model.get_submodule(owner)._parameters[leaf] = parameter
