"""What else holds a model and its parts: accelerate, by its forward and its device map; copies and pickles of replaced forwards."""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate
import peft
import pytest
import torch
import transformers
from accelerate.state import AcceleratorState
from support.tiny_models import VOCABULARY, built, gpt2, llama, t5
from torch import Tensor

import retrofit
from retrofit.errors import DoesNotFitError
from retrofit.inputs.usable_models import is_adapted
from retrofit.passes.shared_moe.mixture_of_experts import Router
from retrofit.surgery.auxiliary_losses import ForwardWithAuxiliaryLosses
from retrofit.surgery.transformers_bookkeeping import transformers_parts
from retrofit.surgery.wrappers import ForwardReplacement, InjectingForward, own_forward

IDS = torch.arange(3, 19)[None]
REPLACED = [
    "shared-moe(groups=0)",
    "memory(beside=ffns)",
    "memory(beside=ffns), shared-moe(groups=0)",
]  # they replace a forward
SPLIT = [
    "altup(k=2,embedding=recycled)",
    "memory(lookup=softmax)",
    "reversible",
    "sequence-altup(k=2,layers=1)",
]  # they wrap layers


def rewritten(model: Any, recipe: str) -> Any:
    """`model` with its new parameters moved away from where they began."""
    model = retrofit.apply(model, *recipe.split(", "), verify=False)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def gptj() -> Any:
    """A model whose code forwards no keywords to its layers, and which is itself what runs them."""
    sizes = {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 2, "rotary_dim": 4, "n_positions": 32}
    return built(transformers.GPTJConfig(**sizes), transformers.GPTJModel)


def outputs(model: Any) -> Tensor:
    more = {"decoder_input_ids": IDS} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        found: Tensor = model(input_ids=IDS, **more)[0]
    return found


def test_the_recipes_below_replace_forwards() -> None:
    kinds = [type(own_forward(rewritten(gptj(), recipe))) for recipe in REPLACED]
    assert kinds == [ForwardWithAuxiliaryLosses, InjectingForward, ForwardWithAuxiliaryLosses]


@pytest.fixture
def accelerator() -> Iterator[Any]:
    AcceleratorState._reset_state(True)  # that of another test in this process
    yield accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    AcceleratorState._reset_state(True)


@pytest.mark.long
@pytest.mark.first(1)
@pytest.mark.parametrize("make", [gptj, t5])
@pytest.mark.parametrize("recipe", REPLACED)
def test_accelerate_unwraps_a_replaced_forward(recipe: str, make: Any, accelerator: Any) -> None:
    """It binds the function of the method anew; copies of the model compute with weights of their own."""
    model = rewritten(make(), recipe)
    expected, signature = outputs(model), inspect.signature(model.forward)
    prepared = accelerator.prepare_model(model)
    outputs(prepared)
    plain = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
    assert plain is model and inspect.signature(model.forward) == signature
    torch.testing.assert_close(outputs(model), expected)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    torch.testing.assert_close(outputs(twin), expected)
    torch.compiler.reset()
    torch.testing.assert_close(outputs(torch.compile(twin, backend="eager")), expected)


@pytest.mark.parametrize("recipe", REPLACED)
def test_a_replaced_forward_is_pickled(recipe: str) -> None:
    model, file = rewritten(gptj(), recipe), io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert torch.equal(outputs(torch.load(file, weights_only=False)), outputs(model))


def test_a_copy_of_a_replaced_forward_injects_into_a_nested_one() -> None:
    """The module whose forward is replaced runs inside another whose forward is, too."""
    model = gpt2()
    seen: list[tuple[str, ...]] = []
    model.transformer.h[0].register_forward_pre_hook(lambda module, args, kwargs: seen.append(tuple(kwargs)), with_kwargs=True)
    model.transformer.h[0].forward = lambda *args, a=None, b=None, **kwargs: type(model.transformer.h[0]).forward(
        model.transformer.h[0], *args, **kwargs
    )
    inner = InjectingForward(model.transformer, ["h.0"], lambda args, kwargs: {"a": 1})
    model.transformer.forward = inner
    model.forward = InjectingForward(model, ["transformer.h.0"], lambda args, kwargs: {"b": 2})
    outputs(model)
    assert {"a", "b"} <= set(seen[-1]) and vars(model.transformer)["forward"] is inner


@pytest.mark.long
def test_a_copy_of_a_replaced_forward_is_compiled_in_one_graph() -> None:
    model = gpt2()
    expected = outputs(model)
    for layer in model.transformer.h:
        layer.forward = TakingKeywords(layer)
    model.transformer.forward = InjectingForward(model.transformer, ["h.0"], lambda args, kwargs: {"a": 1})
    model.forward = InjectingForward(model, ["transformer.h.1"], lambda args, kwargs: {"b": 2})
    torch.compiler.reset()
    torch.testing.assert_close(outputs(torch.compile(model, fullgraph=True, backend="eager")), expected)


class TakingKeywords(ForwardReplacement):
    """Takes the keywords `a` and `b`, which the layer's own code does not know."""

    def run(self, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        return type(self.module).forward(module, *args, **{name: value for name, value in kwargs.items() if name not in "ab"})


@pytest.mark.long
@pytest.mark.first(1)
@pytest.mark.parametrize("recipe", SPLIT)
def test_new_parts_stay_on_the_device_of_their_layer(recipe: str) -> None:
    """As in a model that was loaded; a failing rewrite leaves what was there."""
    model = llama(num_hidden_layers=4)
    kept = {path: part._no_split_modules for path, part in transformers_parts(model)}
    with pytest.raises(DoesNotFitError):
        retrofit.apply(model, recipe, "sequence-altup(k=2,layers=2)", "merge-cross-attention")
    assert {path: part._no_split_modules for path, part in transformers_parts(model)} == kept
    model = rewritten(model, recipe)
    for size in range(6000, 30000, 2000):
        memory = {0: size, 1: size, "cpu": 10**9}
        where = accelerate.infer_auto_device_map(model, max_memory=memory, no_split_module_classes=list(model._no_split_modules))
        assert not [path for path in where if path.startswith("model.layers.") and path.count(".") > 2]


@pytest.mark.first(1)
@pytest.mark.parametrize("recipe", ["shared-moe(groups=1)", "memory(lookup=softmax,rank=2), shared-moe(groups=0)"])
@pytest.mark.parametrize("make", [llama, t5])
def test_an_adapter_for_each_row_of_a_batch(recipe: str, make: Any) -> None:
    """PEFT's adapter_names: each row is what it is alone with its adapter, the router's adapted too."""
    names = ["b", "a", "__base__", "a"]
    model: Any = rewritten(make(), recipe)
    config = peft.LoraConfig(target_modules="all-linear", init_lora_weights=False, r=4)
    torch.manual_seed(0)
    adapted: Any = peft.get_peft_model(model, config, adapter_name="a")
    adapted.add_adapter("b", config)
    adapted.eval()
    assert any(is_adapted(module) and isinstance(module.get_base_layer(), Router) for module in model.modules())
    ids = torch.randint(3, VOCABULARY, (4, 12))
    given = {"input_ids": ids} | ({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})
    with torch.no_grad():
        found = adapted(**given, adapter_names=names).logits
        for index, name in enumerate(names):
            row = {key: value[index : index + 1] for key, value in given.items()}
            adapted.set_adapter("a" if name == "__base__" else name)
            with adapted.disable_adapter() if name == "__base__" else contextlib.nullcontext():
                torch.testing.assert_close(found[index : index + 1], adapted(**row).logits, rtol=1e-4, atol=1e-4)
        assert (found[1] - adapted(**given, adapter_names=["__base__"] * 4).logits[1]).abs().max() > 1e-2


@pytest.mark.first(1)
@pytest.mark.parametrize("recipe", ["altup(k=2)", "memory, shared-moe(groups=1)", "sequence-altup(k=2,layers=1-2), lsh-attention"])
def test_the_page_fills_an_empty_skeleton(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = rewritten(llama(num_hidden_layers=4, tie_word_embeddings=True), recipe)
    monkeypatch.chdir(tmp_path)
    model.save_pretrained("model.altup")
    page = (Path(__file__).parents[2] / "docs" / "larger_than_memory.md").read_text(encoding="utf-8")
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.S) if "init_empty_weights" in block)
    names: dict[str, Any] = {}
    exec(code, names)
    assert torch.equal(outputs(names["model"].eval()), outputs(model))
    assert set(names["model"]._no_split_modules) == set(model._no_split_modules)
