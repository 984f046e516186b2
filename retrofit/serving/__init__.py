"""Rewritten models in vLLM: a plugin, called in each of vLLM's processes, that loads a directory with a recipe like any other.

vLLM reads such a directory's config without the recipe, which is not a quantization, and builds the model by the class in
`retrofit.serving.vllm_model`. Nothing here imports vLLM before vLLM has called `register`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from retrofit.errors import CheckpointError, DoesNotFitError, RetrofitError
from retrofit.process import silence_loggers

ARCHITECTURE = "RetrofittedForCausalLM"  # the class's name in vLLM's registry
RECIPE = "retrofit_recipe"  # in the config that vLLM reads: the quantization_config of config.json
CLASSES = "retrofit_architectures"  # also there: the classes that were saved
TESTED = ((0, 32),)  # major and minor versions of vLLM


def register() -> None:
    """Make vLLM load directories with recipes; vLLM calls this once in each of its processes.

    An untested version may lack an interface that this needs: then there is a warning, and vLLM loads other models as before.
    """
    import logging

    import vllm

    try:
        read_recipes(vllm.__version__)
    except Exception:
        try:
            require_tested(vllm.__version__)
        except RetrofitError as untested:
            logging.getLogger(__name__).warning(str(untested))
            return
        raise


def read_recipes(version: str) -> None:
    """Make this version of vLLM read a config without its recipe, and build the model by a class of this project."""
    from vllm import ModelRegistry
    from vllm.transformers_utils import config as reading

    from retrofit.storage import transformers_hook

    transformers_hook.install()
    if ARCHITECTURE in ModelRegistry.models:
        return
    own: Any = type(reading.get_config_parser("hf"))

    class RecipeParser(own):  # type: ignore[misc]
        """vLLM's reader of config.json, except that a recipe is not a quantization."""

        def parse(self, *arguments: Any, **keywords: Any) -> tuple[dict[str, Any], Any]:
            held, config = super().parse(*arguments, **keywords)
            return without_recipe(held, config, version)

    with silence_loggers(reading.__name__):  # it warns that the reader is replaced
        reading.register_config_parser("hf")(RecipeParser)
    ModelRegistry.register_model(ARCHITECTURE, f"retrofit.serving.vllm_model:{ARCHITECTURE}")


def without_recipe(held: Mapping[str, Any], config: Any, version: str) -> tuple[dict[str, Any], Any]:
    """Return the content of config.json and its config in the form that vLLM should read; unchanged if they have no recipe.

    Raises `RetrofitError` if this version of vLLM, or the recipe, is not supported.
    """
    from retrofit.surgery.dequantization import is_recipe

    entry: Any = held.get("quantization_config")
    if not (is_recipe(entry) and entry.get("recipe")):
        return dict(held), config
    require_tested(version)
    require_served(entry["recipe"], entry.get("quantization"), entry.get("part"))
    saved = list(config.architectures or ())
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config
    config.update({"architectures": [ARCHITECTURE], RECIPE: entry, CLASSES: saved})
    return {key: value for key, value in held.items() if key != "quantization_config"}, config


def require_tested(version: str) -> None:
    """Raises `RetrofitError` if rewritten models were not tested in this version of vLLM."""
    found = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if found not in TESTED:
        tested = ", ".join(".".join(map(str, number)) for number in TESTED)
        raise RetrofitError(
            f"a rewritten model is not loaded in vLLM {version}",
            why=f"it was tested with vLLM {tested}, and the interfaces that it needs change between versions",
            remedy=f"pip install 'vllm=={tested.rpartition(' ')[2]}.*'",
            code="version",
        )


def require_served(recipe: Sequence[str], quantization: Any = None, part: str | None = None) -> None:
    """Raises `DoesNotFitError` if a pass of the recipe cannot run in vLLM, `CheckpointError` for other kinds of models."""
    from retrofit.passbase.protocol import parse_spec

    for spec in recipe:
        method = parse_spec(spec)
        if method.not_served:
            raise DoesNotFitError(
                f"a model with {spec} does not run in vLLM",
                by=method.name,
                why=method.not_served,
                remedy="generate with transformers, or in ONNX Runtime",
                code="not-served",
            )
    if quantization is not None:
        raise CheckpointError(
            "a rewritten model with quantized weights does not run in vLLM",
            why="vLLM would have to read the quantization of weights that the recipe moves",
            remedy="save it without quantization",
            code="not-served",
        )
    if part:
        raise CheckpointError(
            f"a model of which {part} alone was rewritten does not run in vLLM",
            why="vLLM needs the recipe of the whole model",
            remedy="apply the recipe to the model that generates",
            code="not-served",
        )
