"""Rewritten models in vLLM: its plugin, called in each of its processes, lets it load a directory with a recipe like any other.

vLLM reads such a directory's config without the recipe, which is no quantization, and builds the model by the class in
`retrofit.serving.vllm_model`. Nothing here imports vLLM before vLLM has called `register`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from retrofit.errors import CheckpointError, DoesNotFitError, RetrofitError

ARCHITECTURE = "RetrofittedForCausalLM"  # as vLLM's registry knows the class
RECIPE = "retrofit_recipe"  # in the config that vLLM reads: what config.json has as its quantization_config
CLASSES = "retrofit_architectures"  # the same: the classes that were saved
TESTED = ((0, 32),)  # major and minor versions of vLLM


def register() -> None:
    """Have vLLM load directories with recipes; vLLM calls this once in each of its processes.

    A version that was not tried may lack what this needs: then a warning says so, and vLLM loads other models as before.
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
    """Have this version of vLLM read a config without its recipe, and build the model by a class of this project."""
    import logging

    from vllm import ModelRegistry
    from vllm.transformers_utils import config as reading

    from retrofit.storage import transformers_hook

    transformers_hook.install()
    if ARCHITECTURE in ModelRegistry.models:
        return
    own: Any = type(reading.get_config_parser("hf"))

    class RecipeParser(own):  # type: ignore[misc]
        """vLLM's reader of config.json, for which a recipe is no quantization."""

        def parse(self, *arguments: Any, **keywords: Any) -> tuple[dict[str, Any], Any]:
            held, config = super().parse(*arguments, **keywords)
            return without_recipe(held, config, version)

    logger = logging.getLogger(reading.__name__)
    level = logger.level
    logger.setLevel(logging.ERROR)  # it warns that the reader is replaced
    try:
        reading.register_config_parser("hf")(RecipeParser)
    finally:
        logger.setLevel(level)
    ModelRegistry.register_model(ARCHITECTURE, f"retrofit.serving.vllm_model:{ARCHITECTURE}")


def without_recipe(held: Mapping[str, Any], config: Any, version: str) -> tuple[dict[str, Any], Any]:
    """Return the content of config.json and its config as vLLM is to read them; unchanged where they hold no recipe.

    Raise `RetrofitError` where this version of vLLM, or the recipe, is not one that is served.
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
    """Raise `RetrofitError` where rewritten models were not tried in this version of vLLM."""
    found = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if found not in TESTED:
        tested = ", ".join(".".join(map(str, number)) for number in TESTED)
        raise RetrofitError(
            f"a rewritten model is not loaded in vLLM {version}",
            why=f"it was tried in vLLM {tested}, and what it needs of vLLM changes between versions",
            remedy=f"pip install 'vllm=={tested.rpartition(' ')[2]}.*'",
            code="version",
        )


def require_served(recipe: Sequence[str], quantization: Any = None, part: str | None = None) -> None:
    """Raise `DoesNotFitError` where a pass of the recipe cannot run in vLLM, `CheckpointError` for other kinds of models."""
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
            why="vLLM is given the recipe of a whole model",
            remedy="apply the recipe to the model that generates",
            code="not-served",
        )
