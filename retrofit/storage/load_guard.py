"""Compare the weights in a model's files with those of a rewritten model, before and after transformers reads them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX as EXTRA_STATE

from retrofit.errors import CheckpointError, DoesNotFitError, first_few
from retrofit.passbase import recipe_storage
from retrofit.provenance import provenance_of
from retrofit.surgery.dequantization import is_packed, is_quantized


def in_any(name: str, paths: Iterable[str]) -> bool:
    """Return whether the name lies in one of the modules at `paths`, or is one of these."""
    return any(f"{name}.".startswith(f"{path}.") for path in paths)


def known_ancestor(path: str, modules: Collection[str]) -> str:
    """Return the longest path in `modules` that equals or contains `path`."""
    while path not in modules:
        path = path.rpartition(".")[0]
    return path


def names_in_files(files: Sequence[str] | None) -> set[str] | None:
    """Return the names of the tensors in a model's files, without reading values; None if they cannot be determined."""
    if not files:
        return None
    names: set[str] = set()
    for file in map(Path, files):
        try:
            if file.suffix == ".safetensors":
                with safe_open(file, "pt") as opened:
                    names.update(opened.keys())
            else:
                names.update(torch.load(file, map_location="meta", weights_only=True))
        except Exception as error:  # of any type: transformers reports the damage when it reads the file
            logging.getLogger(__name__).debug("%s: %s", file, error)
            return None
    return names


def changed_settings(before: Any, after: Any) -> list[str]:
    """Return the differences between two configs, one text per setting."""
    then, now = (dict(settings_in(config.to_dict())) for config in (before, after))
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


def openings_of(model: Any, part: str) -> list[Any]:
    """Return transformers' renamings by which `model` finds the weights of `part` in a file of the whole model."""
    # deferred: transformers is still importing itself when it imports this module
    from transformers.conversion_mapping import get_model_conversion_mapping

    renamings = (found for found in get_model_conversion_mapping(model) if not hasattr(found, "operations"))
    return [found for found in renamings if renamed(f"{part}.weight", [found]) == "weight"]


def renamed(name: str, renamings: Collection[Any]) -> str:
    """Return the name in the model of a tensor with this name in a file."""
    for renaming in renamings:
        name = renaming.rename_source_key(name)[0]
    return name


def require_part(model: Any, entry: Any, held: set[str], openings: Collection[Any]) -> None:
    """Raises `CheckpointError` if the files are the whole model's and transformers would not find the part's weights in them."""
    inside = {name for name in held if name.startswith(f"{entry.part}.")} if entry.part and not openings else ()
    own, prefix = model.state_dict(), f"{model.base_model_prefix}."
    if inside and {name.removeprefix(prefix) for name in held}.isdisjoint(own):
        outer = [name.removesuffix(rest).rstrip(".") for name in inside for rest in endings(name) if rest in own]
        place = max(outer, key=outer.count, default=str(entry.part))
        raise CheckpointError(
            f"{type(model).__name__} does not find its weights in the files of a {entry.architecture}",
            why=f"they are called {first_few(sorted(inside), 1)} there, which transformers does not look for, dense or rewritten",
            remedy=f"load it as {entry.architecture} and take its {place}, or save that by itself first",
            code="mismatch",
            site=place,
        )


def endings(name: str) -> list[str]:
    """Return the name without its first parts: `b.c` and `c` of `a.b.c`."""
    parts = name.split(".")
    return [".".join(parts[start:]) for start in range(1, len(parts))]


def require_names(model: Any, held: set[str], rewritten: set[str], new: Collection[str] = (), dense: Collection[str] = ()) -> None:
    """Raises `CheckpointError` if a rewritten module's tensor is missing in the files, or one in the files would not be read.

    The `new` tensors may be missing, but those that the recipe rewrote in the saved model only if something shows it: where all
    `new` parameters are tied to weights in the files, transformers reports none. `dense` are the names before the rewrite.
    """
    prefix = f"{model.base_model_prefix}."
    known = held | {name.removeprefix(prefix) for name in held} | {prefix + name for name in held}
    own = model.state_dict()
    groups = [{name, source} for name, source in model.all_tied_weights_keys.items()]
    missing = [
        name
        for name in own
        if in_any(name, rewritten)
        and name not in known
        and name not in new
        and not any(name in group and group & known for group in groups)
    ]
    drawn = [name for name, _ in model.named_parameters(remove_duplicate=False) if name in new and name not in known]
    if all(any(name in group and group & known for group in groups) for name in drawn):
        sites = recorded_sites(model)
        missing += [name for name in drawn if in_any(name, sites)]
    unread = [name for name in sorted(held) if {name, name.removeprefix(prefix), prefix + name}.isdisjoint(own)]
    unread = [name for name in unread if in_any(name, rewritten) or in_any(name.removeprefix(prefix), rewritten)]
    remedy = REMOVE_RECIPE if known.isdisjoint(own.keys() - set(dense)) else UNCHANGED
    if missing:
        raise wrong_weights(model, "missing", missing, remedy)
    if unread:
        raise wrong_weights(model, "in the files and not in the model", unread, remedy)


def require_added(model: Any, weights: Mapping[str, Any] | None) -> None:
    """Raises `CheckpointError` if the model to be saved, or `weights` in its place, lacks parameters that its recipe added.

    Those of a layer that was removed from its list are not needed: a recipe is also replayed on fewer layers. Processes that save
    nothing give no weights.
    """
    added = provenance_of(model).added or ()
    adapters_alone = getattr(model, "_hf_peft_config_loaded", False)
    if not added or adapters_alone or is_quantized(model) or (weights is not None and not weights):
        return
    held = set(model.state_dict() if weights is None else weights)
    held |= {name for pair in model.all_tied_weights_keys.items() if held.intersection(pair) for name in pair}
    present = {path for path, _ in model.named_modules(remove_duplicate=False)}
    for name in sorted(set(added) - held):
        place = known_ancestor(name.rpartition(".")[0], present)
        missing = name.removeprefix(f"{place}.").partition(".")[0]
        if weights is None and missing.isdigit():
            continue
        raise CheckpointError(
            f"{type(model).__name__} is not saved: {name} is missing" + ("" if weights is None else " in the given state_dict"),
            why=f"{', '.join(recipe_storage.stored_recipe(model))} added it, and without it the files cannot be loaded",
            remedy=f"keep what the rewrite made of {place or 'the model'} and set its weights, or change it before the rewrite",
            code="not-saved",
            site=place,
        )


def require_places(model: Any, weights: Collection[str], prefix: str) -> None:
    """Raises `CheckpointError` if weights to be loaded belong to a rewritten module and have no place there.

    PEFT ignores them silently: those of an adapter that was trained on the dense model. `weights` are their names, with `prefix`
    before the names in the model.
    """
    sites = recorded_sites(model)
    inside = [name for key in weights if key.startswith(prefix) and in_any(name := key.removeprefix(prefix), sites)]
    if not inside:
        return
    places = {name for named in (model.named_parameters, model.named_buffers) for name, _ in named(remove_duplicate=False)}
    lost = [name for name in inside if name not in places and not name.endswith(EXTRA_STATE)]
    if lost:
        changes = settings_since_rewrite(model)
        reason = f"{', '.join(recipe_storage.stored_recipe(model))} has rewritten the modules that they belong to"
        other = "merge an adapter into the dense model before the rewrite, or train it on the rewritten one; "
        other += "load dense weights into the dense model"
        raise CheckpointError(
            f"{first_few(sorted(lost), 1)} would not be loaded into this {type(model).__name__}",
            why="; ".join([*changes, reason]),
            remedy=[OWN_CONFIG, other] if changes else other,
            code="other-model",
        )


def require_resizable(model: Any, tokens: int | None, multiple: int | None) -> None:
    """Raises `DoesNotFitError` if the model's head was replaced by one that transformers cannot resize to this many tokens.

    transformers raises an error too, but after it has resized the embedding.
    """
    head = model.get_output_embeddings() if recipe_storage.stored_recipe(model) else None
    if head is None or isinstance(head, (nn.Linear, nn.Embedding)) or (tokens is None and multiple is None):
        return
    place = next(path for path, module in model.named_modules(remove_duplicate=False) if module is head)
    tokens = len(model.get_input_embeddings().weight) if tokens is None else tokens
    if place in recorded_sites(model) and -(-tokens // (multiple or 1)) * (multiple or 1) != len(head.weight):
        raise DoesNotFitError(
            f"the head {place} cannot be resized: it is a {type(head).__name__} of {len(head.weight)} tokens",
            why=f"{', '.join(recipe_storage.stored_recipe(model))} replaced a dense head, whose rows are independent",
            remedy="resize the dense model and apply the recipe to it",
            code="fixed-size",
            site=place,
        )


def after_hooks(model: Any, weights: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the weights, renamed by the pre-hooks that torch calls when the model's modules load them."""
    renamed = dict(weights)
    for path, module in model.named_modules(remove_duplicate=False):
        for hook in module._load_state_dict_pre_hooks.values():
            hook(renamed, f"{prefix}{path}." if path else prefix, {}, True, [], [], [])
    return renamed


def recorded_sites(model: Any) -> set[str]:
    """Return the paths in `model` that the passes of its recipe have rewritten."""
    sites = {site for applied in recipe_storage.passes_of(recipe_storage.stored_record(model)) for site in applied.sites}
    return sites & {path for path, _ in model.named_modules(remove_duplicate=False)}  # a model of another class has only some


def require_shapes(model: Any, mismatched: Collection[tuple[Any, ...]]) -> None:
    """Raises `CheckpointError` if weights of a rewritten module have other shapes in the files.

    The first item of each entry of `mismatched` is a name.
    """
    sites = recorded_sites(model)
    names = sorted(name for name, *_ in mismatched if in_any(name, sites))
    if names:
        changes = settings_since_rewrite(model)
        remedy = OWN_CONFIG if changes else REMOVE_RECIPE
        raise wrong_weights(model, "; ".join([*changes, "of another shape in the files"]), names, remedy)


def settings_since_rewrite(model: Any) -> list[str]:
    """Return the differences between the model's config and the one that its recipe was applied to, if it was recorded."""
    with contextlib.suppress(Exception):  # of any type: the class may fail on a damaged record
        was = type(model.config).from_dict(dict(recipe_storage.stored_record(model)["config"]))
        return changed_settings(was, model.config)
    return []


OWN_CONFIG = "load it with the config it was saved with"
UNCHANGED = "the model was changed after its rewrite: save it with the modules that the rewrite made, and set their weights"
REMOVE_RECIPE = 'if they are dense weights, remove the recipe ("quantization_config" in a config.json)'


def wrong_weights(model: Any, what: str, names: list[str], remedy: str = REMOVE_RECIPE) -> CheckpointError:
    """Return the error that names the weights of a model that do not match its recipe."""
    recipe = ", ".join(recipe_storage.stored_recipe(model))
    named = str(model.config.name_or_path)  # "None" for weights that were in memory
    place = f"{named}: " if Path(named).exists() else ""
    own, saved = type(model).__name__, (model.config.architectures or [""])[0]
    if saved not in ("", own):
        remedy = f"load it as {saved}, the class it was saved as, or save a {own}; {remedy}"
    return CheckpointError(
        f"{place}the weights do not match the recipe {recipe}",
        why=f"{what}: {first_few(names)}",
        remedy=remedy,
        code="mismatch",
    )


def require_filled(model: Any, rewritten: set[str], shapes: dict[str, torch.Size], new: Collection[str] = ()) -> None:
    """Raises `CheckpointError` if a tensor's shape differs from the skeleton's, or a rewritten module's tensor was not loaded.

    The `new` tensors need not be loaded.
    """
    state = {  # packed tensors are compared by the quantizer; its layers have further ones of their own
        name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if name in shapes and not is_packed(tensor)
    }
    wrong = [name for name, tensor in state.items() if not tensor.is_meta and tensor.shape != shapes[name]]
    if not hasattr(model, "hf_device_map"):  # moving a tensor to another device loses transformers' mark that it was loaded
        wrong += [
            name
            for name, tensor in state.items()
            if in_any(name, rewritten)
            and name not in new
            and not getattr(tensor, "_is_hf_initialized", False)
            and not tensor.is_meta
        ]
    if wrong:
        raise wrong_weights(model, "missing or of another shape", wrong)
