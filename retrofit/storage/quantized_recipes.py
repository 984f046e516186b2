"""A recipe and a quantization in one config: first the recipe is replayed, then transformers' own quantizer runs.

    "quantization_config": {"quant_method": "retrofit", "recipe": ["sparse-ffn(…)"], …,
                            "quantization": {"quant_method": "torchao", …}}

The quantizer is an instance of transformers' own class with three additions: it receives the rewritten model's skeleton, the
weights keep their names in that skeleton, and the saved config holds both recipe and quantization. If a quantizer packs the weights
of linear layers in place, it also packs the matrices that sparse feed-forwards store by rows (`feed_forwards.PackableRows`).
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer

from retrofit.anatomy.feed_forwards import PackableRows
from retrofit.errors import CheckpointError
from retrofit.provenance import record_provenance
from retrofit.surgery import transformers_bookkeeping
from retrofit.surgery.dequantization import transpose_again, transposed_layers
from retrofit.surgery.row_major import RowMajor


class ReplayFirst(HfQuantizer):
    """The quantizer's methods that replay a recipe first; mixed into its class."""

    replay: Any  # RecipeReplay: prepares a skeleton for a recipe without a quantization
    entry: dict[str, Any]  # the entry of config.json for the recipe alone
    transposed: list[str]  # the paths of linear layers with a transposed weight
    rows: dict[str, bool]  # the paths of the matrices stored by rows, and whether the quantizer packs them in place

    def preprocess_model(self, model: Any, *args: Any, **kwargs: Any) -> None:
        """Turn the skeleton into the rewritten model's, prepared for the packed weights."""
        model.config.quantization_config = self.replay.quantization_config
        self.replay.preprocess_model(model)
        self.entry = dict(model.config.quantization_config)
        paths = [path for path, module in model.named_modules() if type(module) is RowMajor]
        self.transposed = transposed_layers(model)
        super().preprocess_model(model, *args, **kwargs)
        self.rows = {path: self.packs_in_place(model, path) for path in paths}

    def packs_in_place(self, model: Any, path: str) -> bool:
        """Return whether the quantizer packs the matrix at `path` like the weight of a linear layer; make it one if so."""
        module = model.get_submodule(path)
        if type(module) is not RowMajor:  # replaced by a layer of the quantizer's own
            return False
        model.set_submodule(path, PackableRows(module.weight, module.bias))
        if self.param_needs_quantization(model, f"{path}.weight"):
            return True
        model.set_submodule(path, module)
        return False

    def update_weight_conversions(self, weight_conversions: list[Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Return only the quantizer's conversions: except for parts of packed weights, the file has the model's own names."""
        return super().update_weight_conversions([], *args, **kwargs)  # type: ignore[no-any-return]

    def postprocess_model(self, model: Any, *args: Any, **kwargs: Any) -> None:
        """Mark the model as quantized, with the recipe in its config, and check that every other weight has its value."""
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
        """Make the config describe only a rewritten model."""
        super().remove_quantization_config(model)
        transpose_again(model, self.transposed)
        for path, packed in self.rows.items():
            module: Any = model.get_submodule(path)
            if type(module) is not RowMajor:  # a layer of the quantizer that was made linear again is transposed
                weight = module.weight if packed else nn.Parameter(module.weight.detach().t().contiguous())
                model.set_submodule(path, RowMajor(weight, module.bias))
        model.config.quantization_config = self.entry


def replaying_quantizer(config: Any, replay: Any) -> HfQuantizer:
    """Return the quantizer of the config's quantization, extended to replay the config's recipe with `replay` first."""
    quantizer = auto.AutoHfQuantizer.from_config(config.quantization, pre_quantized=config.packed)
    kind = type(quantizer)
    quantizer.__class__ = type(kind.__name__, (ReplayFirst, kind), {"__module__": kind.__module__})
    alone = {key: value for key, value in vars(config).items() if key not in ("quantization", "packed")}
    quantizer.replay = replay(type(config)(**alone))
    return quantizer
