"""A recipe and a quantization in one config: the recipe is replayed, then transformers' own quantizer does its part.

    "quantization_config": {"quant_method": "retrofit", "recipe": ["sparse-ffn(…)"], …,
                            "quantization": {"quant_method": "torchao", …}}

The quantizer is transformers' own, of its own class as far as anybody can see, with three things added: the skeleton it gets is
the rewritten model's, the weights keep the names they have there, and what is saved says both. Where quantizers pack the weights of
linear layers in place, so are the matrices that sparse feed-forwards keep by rows (`feed_forward_blocks.PackableRows`).
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer

from retrofit.anatomy.feed_forwards import PackableRows, RowMajor
from retrofit.errors import CheckpointError
from retrofit.provenance import record_provenance
from retrofit.surgery import transformers_bookkeeping
from retrofit.surgery.dequantization import transpose_again, transposed_layers


class ReplayFirst(HfQuantizer):
    """The steps of a quantizer that come first where there is a recipe: mixed into its class."""

    replay: Any  # RecipeReplay: what happens to a skeleton without a quantization
    entry: dict[str, Any]  # what config.json says of the recipe alone
    transposed: list[str]  # the paths of linear layers that hold their weight transposed
    rows: dict[str, bool]  # the paths of the matrices kept by rows, and whether the quantizer packs them in place

    def preprocess_model(self, model: Any, *args: Any, **kwargs: Any) -> None:
        """The skeleton is the rewritten model's, prepared for the packed weights."""
        model.config.quantization_config = self.replay.quantization_config
        self.replay.preprocess_model(model)
        self.entry = dict(model.config.quantization_config)
        paths = [path for path, module in model.named_modules() if type(module) is RowMajor]
        self.transposed = transposed_layers(model)
        super().preprocess_model(model, *args, **kwargs)
        self.rows = {path: self.packs_in_place(model, path) for path in paths}

    def packs_in_place(self, model: Any, path: str) -> bool:
        """Return whether the quantizer packs the matrix at `path` as the weight of a linear layer, which it is from now on."""
        module = model.get_submodule(path)
        if type(module) is not RowMajor:  # replaced by a layer of the quantizer's own
            return False
        model.set_submodule(path, PackableRows(module.weight, module.bias))
        if self.param_needs_quantization(model, f"{path}.weight"):
            return True
        model.set_submodule(path, module)
        return False

    def update_weight_conversions(self, weight_conversions: list[Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Return the conversions of the quantizer alone: the file has the model's own names apart from parts of a packed weight."""
        return super().update_weight_conversions([], *args, **kwargs)  # type: ignore[no-any-return]

    def postprocess_model(self, model: Any, *args: Any, **kwargs: Any) -> None:
        """The model is quantized, its config says so and holds the recipe, and every other weight has its value."""
        super().postprocess_model(model, *args, **kwargs)
        for path in [path for path, packed in self.rows.items() if packed]:
            if type(model.get_submodule(path)) not in (PackableRows, RowMajor):
                raise CheckpointError(
                    f"{type(self).__name__} replaces {path}, a matrix that is kept by rows, with a layer of its own",
                    remedy=f"name {path} among the modules that it does not convert",
                    code="replaced",
                )
        if "hf_quantizer" in vars(model):
            model.config.quantization_config = self.entry | {"quantization": self.quantization_config.to_dict()}
        record_provenance(model, recipe=tuple(self.entry["recipe"]))
        transformers_bookkeeping.keep_own_names(model)
        self.replay.finish(model)

    def remove_quantization_config(self, model: Any) -> None:
        """Make the config say only that the model is a rewritten one."""
        super().remove_quantization_config(model)
        transpose_again(model, self.transposed)
        for path, packed in self.rows.items():
            module: Any = model.get_submodule(path)
            if type(module) is not RowMajor:  # a layer that the quantizer has put in, and made a linear one again, is transposed
                weight = module.weight if packed else nn.Parameter(module.weight.detach().t().contiguous())
                model.set_submodule(path, RowMajor(weight, module.bias))
        model.config.quantization_config = self.entry


def replaying_quantizer(config: Any, replay: Any) -> HfQuantizer:
    """Return the quantizer of the config's quantization, which replays the config's recipe by a `replay` of it first."""
    quantizer = auto.AutoHfQuantizer.from_config(config.quantization, pre_quantized=config.packed)
    kind = type(quantizer)
    quantizer.__class__ = type(kind.__name__, (ReplayFirst, kind), {"__module__": kind.__module__})
    alone = {key: value for key, value in vars(config).items() if key not in ("quantization", "packed")}
    quantizer.replay = replay(type(config)(**alone))
    return quantizer
