"""Replays a recipe on the empty skeleton that `from_pretrained` is about to fill: for transformers, a quantizer that packs nothing.

`retrofit.storage.transformers_hook` imports it when transformers is imported; it implements transformers' `HfQuantizer`. If a
config holds a quantization with the recipe, `retrofit.storage.quantized_recipes` runs its quantizer afterwards.
"""

from __future__ import annotations

import contextvars
import copy
import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from retrofit.errors import CheckpointError, first_few, kind_of
from retrofit.files.model_folders import read_json
from retrofit.passbase import recipe_storage
from retrofit.process import set_variable
from retrofit.provenance import record_provenance
from retrofit.storage.load_guard import (
    after_hooks,
    changed_settings,
    in_any,
    names_in_files,
    openings_of,
    renamed,
    require_added,
    require_filled,
    require_names,
    require_part,
    require_places,
    require_resizable,
    require_shapes,
)
from retrofit.surgery import Edit, transformers_bookkeeping
from retrofit.surgery.dequantization import METHOD, is_recipe

if TYPE_CHECKING:
    from retrofit.program.program import Program


@dataclasses.dataclass
class RecipeConfig(QuantizationConfigMixin):
    """The entry of `config.json` for a retrofitted model."""

    quant_method: Any = METHOD
    recipe: list[str] = dataclasses.field(default_factory=list)
    architecture: str | None = None  # the class that it was applied to
    part: str | None = None  # the path in that class of the saved model, if it is a part
    inputs: dict[str, Any] = dataclasses.field(default_factory=dict)  # dtype and shape of the inputs of the capture
    applied_to: dict[str, Any] = dataclasses.field(default_factory=dict)  # the record of `retrofit.passbase.recipe_storage`
    quantization: Any = None  # the config of a quantizer that runs after the replay, as an object or a dictionary
    packed: bool = True  # whether the weights in the file are packed by it
    through: list[list[Any]] = dataclasses.field(default_factory=list)  # later classes of the model, each after how many passes

    def __post_init__(self) -> None:
        """Raises `CheckpointError` if the recipe is not a list of passes, or the record has another form than retrofit's."""
        if not isinstance(self.recipe, list) or not all(isinstance(spec, str) for spec in self.recipe):
            raise CheckpointError(
                f"the recipe {self.recipe!r} is not a list of passes",
                why='it is in "quantization_config" of config.json',
                remedy='write a list of passes: ["altup(k=2)"]',
                code="no-recipe",
            )
        for name, kind in (("inputs", dict), ("applied_to", dict), ("through", list)):
            if not isinstance(getattr(self, name), kind):
                raise CheckpointError(
                    f"the record of the recipe {', '.join(self.recipe)} is malformed",
                    why=f'"{name}" in "quantization_config" of config.json is {getattr(self, name)!r}',
                    remedy="take the config.json that was saved with the model",
                    code="no-recipe",
                    option=name,
                )
        if not self.recipe and (passes := self.applied_to.get("passes")):
            raise CheckpointError(
                "the recipe of a rewritten model is empty",
                why=f'"applied_to" in "quantization_config" of config.json is a record of {len(passes)} passes',
                remedy="take the config.json that was saved with the model; undo makes a dense model of it",
                code="no-recipe",
                option="recipe",
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the entry as it is in `config.json`."""
        kept = {key: copy.deepcopy(value) for key, value in vars(self).items() if key not in ("quantization", "packed")}
        if self.quantization is not None:
            kept["quantization"] = self.quantization if isinstance(self.quantization, dict) else self.quantization.to_dict()
        return kept


class RecipeReplay(HfQuantizer):
    """Rewrites the skeleton before its weights are loaded, and checks the weights afterwards."""

    quantization_config: RecipeConfig
    new: frozenset[str] = frozenset()  # the names of tensors that files may lack: another head's, as its class initializes it
    widened: frozenset[str] = frozenset()  # the names of tensors that the recipe made larger where the class is the saved one
    of_part: bool = False  # whether transformers has built a part by the recipe, and the rest of the model is dense
    openings: Collection[Any] = ()  # the renamings that find a part's weights in a file of the whole model

    def __new__(cls, quantization_config: RecipeConfig, **kwargs: Any) -> Any:
        """Return a `RecipeReplay`; if the config also holds a quantization, its quantizer, which replays the recipe first."""
        if quantization_config.quantization is None:
            return super().__new__(cls)
        from retrofit.storage import quantized_recipes  # deferred: transformers is still importing itself then

        return quantized_recipes.replaying_quantizer(quantization_config, cls)

    def __deepcopy__(self, memo: dict[int, Any]) -> RecipeReplay:
        """Return itself: transformers copies a quantizer with each of its weight conversions, and this one holds the model."""
        return self

    def __bool__(self) -> bool:
        """Return False, so that transformers casts weights as in a model without quantization."""
        return False

    def is_serializable(self) -> bool:
        """Return True: the weights are ordinary ones."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Return True: the weights are ordinary ones."""
        return True

    def preprocess_model(
        self, model: Any, dtype: torch.dtype | None = None, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> None:
        """Turn the skeleton `model`, on the meta device, into the rewritten model's.

        Raises `CheckpointError` if the names in the files are not those of the rewritten modules.
        """
        self.of_part = is_built_by(model, self.quantization_config)
        if self.of_part:
            self.quantization_config = dataclasses.replace(self.quantization_config, recipe=[], applied_to={})
        entry = self.quantization_config
        self.dense, before = set(model.modules()), shapes_of(model)
        unfreeze(model)
        self.openings = [] if entry.part is None else openings_of(model, entry.part)
        transformers_bookkeeping.keep_own_names(model)
        declared = dict(model.all_tied_weights_keys)
        saved = (model.config.architectures or [None])[0] if checkpoint_files else None
        if entry.recipe and entry.part:
            self.dense, self.new = rewrite_inner_part(model, entry)
        elif entry.recipe and not entry.through and {entry.architecture, saved} <= {None, type(model).__name__}:
            self.dense = rewrite_same_class(model, entry)
            self.widened = frozenset(name for name, shape in shapes_of(model).items() if before.get(name, shape) != shape)
        elif entry.recipe:
            self.dense, self.new = rewrite_as_part(model, entry, saved)
        self.shapes = shapes_of(model)
        self.frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
        if entry.recipe and (held := names_in_files(checkpoint_files)) is not None:
            require_part(model, entry, held, self.openings)
            held = {renamed(name, self.openings) for name in held}
            tie_as_saved(model, held, declared)
            require_names(model, held, self.rewritten(model), self.new, before)

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any = None) -> list[Any]:
        """Return no renaming but a part's: the file has the model's own names (`transformers_bookkeeping.keep_own_names`)."""
        return list(self.openings)

    def postprocess_model(self, model: Any, **kwargs: Any) -> None:
        """Check that every new parameter and buffer has its value; remove the traces of a quantizer from the model."""
        del model.hf_quantizer
        transformers_bookkeeping.keep_own_names(model)
        if self.of_part:
            del model.config.quantization_config  # the part's stays
        else:
            recipe_storage.store_recipe(model, self.quantization_config.recipe, self.quantization_config.applied_to)
        self.finish(model)

    def rewritten(self, model: Any) -> set[str]:
        """Return the paths of the modules that the recipe has put into the model, and the names of the tensors it has widened."""
        return {path for path, module in model.named_modules(remove_duplicate=False) if module not in self.dense} | self.widened

    def finish(self, model: Any) -> None:
        """Check the loaded tensors, compute the remaining buffers of new modules, and freeze what a pass froze."""
        transformers_bookkeeping.align_weights(model)
        require_filled(model, self.rewritten(model), self.shapes, self.new)
        for name in self.frozen:
            model.get_parameter(name).requires_grad_(False)
        rebuild_buffers(model, self.dense)


def register() -> None:
    """Register this class with transformers, so that it replays the recipe of a config."""
    if METHOD not in auto.AUTO_QUANTIZER_MAPPING:
        auto.register_quantization_config(METHOD)(RecipeConfig)
        auto.register_quantizer(METHOD)(RecipeReplay)
        own = auto.AutoHfQuantizer.merge_quantization_configs
        setattr(auto.AutoHfQuantizer, "merge_quantization_configs", staticmethod(functools.partial(merge_configs, own)))  # noqa: B010


def merge_configs(own: Callable[..., Any], stored: Any, given: Any) -> Any:
    """Merge the config of a directory with the one given to `from_pretrained`, by `own` and by retrofit's additions.

    A recipe and a quantization are compatible: the given quantization is applied after the recipe. If the directory holds both, its
    quantization is merged with the given one as if there were no recipe.
    """
    if not is_recipe(stored) or is_recipe(given):
        return own(stored, given)
    config = RecipeConfig.from_dict(stored) if isinstance(stored, dict) else stored
    if config.quantization is not None:
        config.quantization = own(config.quantization, given)
    elif given is not None:
        config.quantization = auto.AutoQuantizationConfig.from_dict(given) if isinstance(given, dict) else given
        config.packed = False
    return config


def rewrite_configured() -> None:
    """Extend transformers so that models are built, filled and saved by their recipes.

    `from_config`, given a config with a recipe, returns a newly initialized model rewritten by the recipe. A model is refused if it
    lacks the recipe of the files that fill it, or would be saved without that of a part; so are weights, also of an adapter, that
    have no place in the rewritten model, and other numbers of tokens than a rewritten head has been fitted to.
    """
    models = sys.modules["transformers.modeling_utils"].PreTrainedModel
    own, save, resize = models._from_config.__func__, models.save_pretrained, models.resize_token_embeddings
    if isinstance(own, functools.partial):
        return

    @functools.wraps(save)
    def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not transformers_bookkeeping.is_rewritten(self):  # a dense model, built from the config of a rewritten one
            forget_recipe(self)
        require_saved_recipes(self)
        require_added(self, inspect.signature(save).bind(self, *args, **kwargs).arguments.get("state_dict"))
        return save(self, *args, **kwargs)

    @functools.wraps(resize)
    def resize_token_embeddings(
        self: Any, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        require_resizable(self, new_num_tokens, pad_to_multiple_of)
        return resize(self, new_num_tokens, pad_to_multiple_of, *args, **kwargs)

    models._from_config = classmethod(functools.partial(from_config, own))
    models._load_pretrained_model = staticmethod(functools.partial(load_weights, models._load_pretrained_model))
    models.save_pretrained = save_pretrained
    models.resize_token_embeddings = resize_token_embeddings
    models._load_from_state_dict = functools.partialmethod(load_tensors, models._load_from_state_dict)


def load_tensors(model: Any, own: Callable[..., None], weights: Mapping[str, Any], prefix: str, *args: Any) -> None:
    """Load the tensors of one module by torch's `own`. Raises `CheckpointError` if others would be lost in a rewritten model."""
    if recipe_storage.stored_recipe(model):
        require_places(model, after_hooks(model, weights, prefix), prefix)
    own(model, weights, prefix, *args)


def load_weights(
    own: Callable[..., Any], model: Any, state_dict: Any = None, checkpoint_files: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """Fill the model by transformers' `own`. Raises `CheckpointError` if the model lacks the recipe of its files."""
    loaded = own(model, state_dict, checkpoint_files, *args, **kwargs)
    if recipe_storage.stored_recipe(model):  # without one, `RecipeReplay` has compared them, except for an adapter's
        require_places(model, loaded[0].unexpected_keys, "")
        require_shapes(model, loaded[0].mismatched_keys)
    elif checkpoint_files:
        require_recipe_of_files(model, Path(checkpoint_files[0]), loaded[0].missing_keys, loaded[0].unexpected_keys)
    return loaded


def require_recipe_of_files(model: Any, file: Path, missing: Collection[str], unread: Collection[str]) -> None:
    """Raises `CheckpointError` if weights of a module that the recipe beside `file` rewrites were missing or not read."""
    entries = list(recipes_in(read_json(file.parent / "config.json")))
    passes = [applied for entry in entries for applied in recipe_storage.passes_of(entry.get("applied_to"))]
    base = f"{model.base_model_prefix}."
    ends = tuple({f".{site.removeprefix(base)}" for applied in passes for site in applied.sites})
    if not ends:
        return
    sites = {path for path, _ in model.named_modules(remove_duplicate=False) if f".{path}".endswith(ends)}
    lost = [
        name for name in (*missing, *unread) if any(in_any(path, sites) for path in (name, name.removeprefix(base), base + name))
    ]
    if lost:
        raise CheckpointError(
            f"{file.parent} is not loaded as a {type(model).__name__} without its recipe {', '.join(entries[0]['recipe'])}",
            why=f"the given config does not contain it, so these weights have no values or no place: {first_few(sorted(lost))}",
            remedy="leave out config=, or change what AutoConfig.from_pretrained returns for this directory and give that",
            code="no-recipe",
            option="config",
        )


def recipes_in(config: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the recipe entries of a config, in the form of `config.json`, and of its sub-configs."""
    for key, value in config.items() if isinstance(config, Mapping) else ():
        if key == "quantization_config" and is_recipe(value) and value.get("recipe"):
            yield value
        elif key != "quantization_config":
            yield from recipes_in(value)


def require_saved_recipes(model: Any) -> None:
    """Raises `CheckpointError` if a part of the model was rewritten and no config saved with the model holds its recipe."""
    saved = [entry["recipe"] for entry in recipes_in(model.config.to_dict())]
    for path, part in transformers_bookkeeping.transformers_parts(model):
        recipe = list(recipe_storage.entry_of(part.config).get("recipe") or ())
        if recipe and recipe not in saved:
            raise CheckpointError(
                f"{type(model).__name__} is not saved: {path} in it is rewritten, and its config does not say so",
                why=f"{path} was rewritten by {', '.join(recipe)} by itself: loaded again, its weights would have no place",
                remedy=f"put the dense module there and apply the recipe to the {type(model).__name__}, or save {path} by itself",
                code="no-recipe",
                site=path,
            )


def is_built_by(model: Any, entry: RecipeConfig) -> bool:
    """Return whether the recipe is a part's, which was built by it: transformers loads a composite with its decoder's entry."""
    parts = [part for _, part in transformers_bookkeeping.transformers_parts(model) if part.config is not model.config]
    found = [recipe_storage.entry_of(part.config) for part in parts if recipe_storage.stored_recipe(part) == tuple(entry.recipe)]
    return bool(entry.recipe) and any(own.get("applied_to") == entry.applied_to for own in found)


BUILDING = contextvars.ContextVar("building", default=False)  # true within `from_config`, by which models also build their parts


def from_config(own: Callable[..., Any], kind: Any, config: Any, **kwargs: Any) -> Any:
    """Return transformers' model of class `kind` for the config (by `own`), rewritten by the config's recipe.

    For a config that is being loaded, or that of a part of a rewritten model, the caller rewrites the model; a base class, which
    other classes build by this call, is dense. Raises `CheckpointError` for any other class than that of the recipe, unless the
    model is created without weights, as part of another one that is loaded.
    """
    entry = getattr(config, "quantization_config", None)
    if BUILDING.get() or not (isinstance(entry, dict) and is_recipe(entry)) or entry.get("part"):
        return own(kind, config, **kwargs)
    recipe, architecture = list(entry.get("recipe", ())), entry.get("architecture")
    if not recipe:
        return own(kind, config, **kwargs)
    if architecture in (None, kind.__name__):
        model, dense = rewrite_drawn(own, kind, config, entry, kwargs)
    else:
        model = own(kind, config, **kwargs)
        if all(parameter.is_meta for parameter in model.parameters()):  # filled from a file later
            dense, _ = rewrite_as_part(model, RecipeConfig.from_dict(copy.deepcopy(entry)), None)
        elif model.base_model is model:
            forget_recipe(model)
            return model
        else:
            raise CheckpointError(
                f"no {kind.__name__} is built from this config",
                why=f"it holds the recipe {', '.join(recipe)}, which was applied to {architecture}",
                remedy=f"build {architecture}, or remove the recipe from a copy of the config: del config.quantization_config",
                code="other-model",
            )
    with torch.device("cpu"):  # tensors that no file holds get values, even if the weights have none yet
        for module in set(model.modules()) - dense:
            for name in module._non_persistent_buffers_set:
                buffer = module._buffers[name]
                module._buffers[name] = torch.empty_like(buffer, device="cpu") if buffer.is_meta else buffer
        rebuild_buffers(model, dense)
    return model


def forget_recipe(model: Any) -> None:
    """Give a dense model and the modules in it configs without a recipe: it would be saved as if it had been rewritten."""
    holders = [module for module in model.modules() if is_recipe(getattr(vars(module).get("config"), "quantization_config", None))]
    if holders:
        transformers_bookkeeping.own_configs(model, Edit(model))
    for module in holders:
        vars(module.config).pop("quantization_config", None)  # several modules have one config


def rewrite_drawn(
    own: Callable[..., Any], kind: Any, config: Any, entry: Mapping[str, Any], settings: Mapping[str, Any]
) -> tuple[Any, set[nn.Module]]:
    """Return transformers' model for the config (by `own`), rewritten by its recipe, and its modules before the rewrite."""
    with set_variable(BUILDING, True):
        model = own(kind, copy.deepcopy(config), **settings)
    from retrofit.passbase import replaying  # deferred: transformers is still importing itself when it imports this module

    dense = set(model.modules())
    replaying.replay(model, list(entry["recipe"]), entry.get("applied_to"))
    transformers_bookkeeping.keep_on_one_device(model, dense)
    return model, dense


def unfreeze(model: nn.Module) -> None:
    """Make every floating-point parameter trainable, also those that the class freezes, as transformers does on loading."""
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.is_floating_point())


def rewrite_skeleton(
    model: Any,
    recipe: list[str],
    record: Mapping[str, Any] | None = None,
    *,
    same: bool = True,
    program: Program | None = None,
) -> set[nn.Module]:
    """Rewrite the skeleton by the recipe; return the modules that it had before.

    It is tied as in `record`, the description of the model that the recipe was applied to; with `same`, it must have the recorded
    sites. `program` is that of an equal model, if there is one.
    """
    from retrofit.passbase import replaying  # deferred: transformers is still importing itself when it imports this module

    dense = prepare(model)
    replaying.replay(model, recipe, record, same_model=same, program=program)
    recipe_storage.store_recipe(model, recipe, record)
    untie(model)
    transformers_bookkeeping.keep_on_one_device(model, dense)
    return dense


def rewrite_same_class(model: Any, entry: RecipeConfig) -> set[nn.Module]:
    """Rewrite a skeleton of the class that was saved in the same way; return the modules that it had before.

    Raises `CheckpointError` if its config differs and the recipe therefore makes another model of it.
    """
    from retrofit.storage.other_models import recorded_skeleton, require_equal_rewrite, structure_of  # deferred, as above

    recorded = recorded_skeleton(type(model), entry.applied_to, model)
    if recorded is None:
        return rewrite_skeleton(model, entry.recipe, entry.applied_to)
    if structure_of(recorded) == structure_of(model):
        program = recipe_storage.captured_program(entry.applied_to)
        return rewrite_skeleton(model, entry.recipe, entry.applied_to, program=program)
    before, recorded_before = (dict(network.named_modules(remove_duplicate=False)) for network in (model, recorded))
    unfreeze(recorded)
    dense = rewrite_skeleton(model, entry.recipe, entry.applied_to, same=False)
    rewrite_skeleton(recorded, entry.recipe, entry.applied_to)
    require_equal_rewrite(model, before, recorded, recorded_before)
    return dense


def rewrite_inner_part(model: Any, entry: RecipeConfig) -> tuple[set[nn.Module], frozenset[str]]:
    """Rewrite `model`, a part of the class that was rewritten, as the recipe rewrote that part.

    It may have a head or a pooler of its own. Return the modules that are not new, and the names of the tensors that were not
    saved. Raises `CheckpointError` if it is not that part, as it was recorded.
    """
    from retrofit.storage.filling import transformers_class  # deferred, as above
    from retrofit.storage.other_models import Link, recorded_skeleton, structure_of

    kind = transformers_class(str(entry.architecture))
    outer = None if kind is None else recorded_skeleton(kind, entry.applied_to, model)
    places = dict(() if outer is None else outer.named_modules(remove_duplicate=False))
    found: Any = places.get(str(entry.part))
    base = getattr(found, "base_model", None)
    pairs = ((found, model), (base, model), (found, model.base_model), (base, model.base_model))
    part, target = next((pair for pair in pairs if type(pair[0]) is type(pair[1])), (None, model))
    differences = changed_settings(part.config, target.config) if part is not None else ()
    if outer is None or part is None or differences:
        raise CheckpointError(
            f"{', '.join(entry.recipe)} was applied to {entry.architecture}, whose {entry.part} no {type(model).__name__} is",
            why="; ".join(differences) or f"that is {kind_of(found)}" if found is not None else f"there is no {entry.part} in it",
            remedy="load it with the class and config it was saved with, or save and load the whole model",
            code="mismatch",
        )
    unfreeze(outer)
    own, config, new = set(model.modules()), target.config, frozenset[str]()
    if structure_of(part) == structure_of(target):
        dense = rewrite_skeleton(outer, entry.recipe, entry.applied_to) | own
        vars(target).update(vars(part))
    else:
        link = Link(model, found)
        dense = rewrite_skeleton(outer, entry.recipe, entry.applied_to) | own
        link.carry_over(entry.recipe)
        new = link.common.own_tensors()
    for module in target.modules():
        for name, value in vars(module).items():
            if value is part.config:
                vars(module)[name] = config
    record_provenance(model, recipe=tuple(entry.recipe))  # its config names class and part
    recipe_storage.store_recipe(model, entry.recipe, entry.applied_to)
    transformers_bookkeeping.keep_on_one_device(model, dense)
    return dense, new


def rewrite_as_part(model: Any, entry: RecipeConfig, saved: str | None) -> tuple[set[nn.Module], frozenset[str]]:
    """Rewrite the part that `model` shares with the class of the recipe in the same way as there.

    `saved` is the class that it was last saved as. Return the modules that are not new, and the names of the tensors that were not
    saved.
    """
    from retrofit.inputs.example_inputs import forward_parameters
    from retrofit.storage import other_models
    from retrofit.storage.filling import transformers_class

    own, count = type(model).__name__, len(entry.recipe)
    classes = [(entry.architecture or own, 0), *((str(name), int(after)) for name, after in entry.through)]
    classes += [(name, count) for name in (saved, own) if name is not None]
    classes = [named for place, named in enumerate(classes) if not place or named[0] != classes[place - 1][0]]
    recorded, steps = entry.applied_to.get("passes", []), []
    for place, (name, after) in enumerate(classes):
        kind = transformers_class(name)
        if kind is None:
            raise CheckpointError(
                f"the recipe {', '.join(entry.recipe)} was applied to {name}, which transformers does not have",
                remedy="import the package that defines it first",
                code="missing",
            )
        until = classes[place + 1][1] if place + 1 < len(classes) else count
        skeleton = model if place == len(classes) - 1 else skeleton_of(kind, entry, model)
        record = {**entry.applied_to, "passes": recorded[after:until]} if recorded else {}
        steps.append(other_models.Step(skeleton, entry.recipe[after:until], record))
    dense = prepare(model)
    for step in steps:
        fits = entry.inputs.keys() <= forward_parameters(step.model).keys()
        record_provenance(step.model, inputs=dict(entry.inputs) if fits else {})
    needed, new = other_models.rewrite_by_steps(steps)
    record_provenance(model, inputs=None)
    through = [
        [name, after]
        for (name, after), keep in list(zip(classes, needed, strict=True))[1:]
        if keep and (name, after) != (own, count)
    ]
    model.config.quantization_config = dataclasses.replace(entry, through=through)
    record_provenance(model, recipe=tuple(entry.recipe))
    recipe_storage.store_recipe(model, entry.recipe, entry.applied_to)
    untie(model)
    transformers_bookkeeping.keep_on_one_device(model, dense)
    return dense, frozenset() if saved == own else new


def skeleton_of(kind: Any, entry: RecipeConfig, like: Any) -> Any:
    """Return a dense skeleton of a class that a model had before it became `like`."""
    from retrofit.storage.other_models import recorded_skeleton  # deferred, as above

    skeleton = recorded_skeleton(kind, entry.applied_to, like) or kind(copy.deepcopy(like.config))
    unfreeze(skeleton)
    prepare(skeleton)
    return skeleton


def prepare(skeleton: Any) -> set[nn.Module]:
    """Move the skeleton to the meta device, tie the weights that it declares tied, and return its modules."""
    modules = set(skeleton.modules())
    for module in modules:
        for name, parameter in module._parameters.items():
            if parameter is not None and not parameter.is_meta:  # `torch.Tensor(size)` ignores the default device
                module._parameters[name] = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
    transformers_bookkeeping.cast_kept(skeleton)
    transformers_bookkeeping.tie(skeleton)
    return modules


def shapes_of(model: nn.Module) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in model.state_dict().items()}


def untie(model: Any) -> None:
    """Give each name a weight of its own again, as `from_pretrained` expects until it ties them itself."""
    for target in model.all_tied_weights_keys:
        owner, _, leaf = target.rpartition(".")
        weight = model.get_parameter(target)
        setattr(model.get_submodule(owner), leaf, nn.Parameter(torch.empty_like(weight), requires_grad=weight.requires_grad))


def tie_as_saved(model: Any, held: set[str], declared: Mapping[str, str]) -> None:
    """Tie the weights of which the files hold one name, through transformers, and leave apart those with both names in the files.

    The recipe was replayed with the ties of the model it was applied to; `declared` are the ties of the current config.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    ties = {
        name: source
        for name, source in model.all_tied_weights_keys.items()
        if not (name in held and source in held) or getattr(model.config, "tie_word_embeddings", True)
    }
    ties |= {
        name: source
        for name, source in declared.items()
        if name not in held and source in held and name in named and source in named and named[name].shape == named[source].shape
    }
    model.all_tied_weights_keys = ties
    model.__dict__["_tied_weights_keys"] = dict(ties)


def rebuild_buffers(model: nn.Module, dense: set[nn.Module]) -> None:
    """Compute the non-persistent buffers of new modules, by the modules' own method."""
    for path, module in model.named_modules():
        if module in dense or not module._non_persistent_buffers_set:
            continue
        if not hasattr(module, "rebuild_buffers"):
            raise CheckpointError(
                f"{path} ({type(module).__name__}) has buffers that are neither saved nor rebuilt",
                why=f"{', '.join(sorted(module._non_persistent_buffers_set))}: registered with persistent=False",
                remedy="register them persistent, or add a method rebuild_buffers() to the module",
                site=path,
                code="not-saved",
            )
        with torch.no_grad():
            module.rebuild_buffers()
