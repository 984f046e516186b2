"""Programs that never import retrofit load what it wrote: the entry point of `torch.backends` has been called by `import torch`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from support.sentence_models import TEXTS, WORDS, sentence_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import retrofit

IDS = [[3, 1, 4, 1, 5, 9, 2, 6]]
RECIPE = ("altup(k=2)", "sparse-ffn(sparsity=4)")
PROGRAM = f"""
import json
import sys

import torch
import transformers

IDS = torch.tensor({IDS})


def load():
    return transformers.AutoModelForCausalLM.from_pretrained("model").eval()


def by_transformers():
    return load()(IDS).logits.tolist()


def by_device_map():
    model = transformers.AutoModelForCausalLM.from_pretrained("model", device_map={{"": "cpu"}}).eval()
    return model(IDS).logits.tolist()


def by_pipeline():
    generate = transformers.pipeline("text-generation", "model", device="cpu")
    return generate("the quick fox", max_new_tokens=5, do_sample=False, return_full_text=False)[0]["generated_text"]


def by_accelerate():
    from accelerate import disk_offload

    return disk_offload(load(), "offloaded")(IDS).logits.tolist()


def by_peft():
    from peft import AutoPeftModelForCausalLM

    return AutoPeftModelForCausalLM.from_pretrained("adapter").eval()(IDS).logits.tolist()


def by_sentence_transformers():
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer("sentences.sum", device="cpu").encode({TEXTS!r}).tolist()


found = {{}}
with torch.no_grad():
    for way in (by_transformers, by_device_map, by_pipeline, by_accelerate, by_peft, by_sentence_transformers):
        try:
            found[way.__name__] = way()
        except Exception as error:
            found[way.__name__] = f"{{type(error).__name__}}: {{error}}"
json.dump(found, open("found.json", "w"))
"""


def tokenizer() -> PreTrainedTokenizerFast:
    words = ["[UNK]", "[PAD]", *WORDS]
    core = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="[UNK]", pad_token="[PAD]")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a retrofitted model, an adapter for it, and a retrofitted pipeline of sentence-transformers."""
    folder = tmp_path_factory.mktemp("written")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    tokens = {"vocab_size": 16, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **tokens, initializer_range=0.3)).eval()
    retrofit.apply(model, *RECIPE, verify=False).save_pretrained(folder / "model")
    tokenizer().save_pretrained(folder / "model")
    adapted = peft.get_peft_model(reloaded(folder), peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    adapted.peft_config["default"].base_model_name_or_path = "model"
    adapted.save_pretrained(folder / "adapter")
    sentences = sentence_model(folder / "bert")
    retrofit.save(retrofit.apply(sentences, "sum", verify=False), folder / "sentences.sum")
    (folder / "sentences.json").write_text(json.dumps(sentences.encode(TEXTS).tolist()))
    return folder


def reloaded(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder / "model").eval()


@pytest.fixture(scope="module")
def found(written: Path) -> dict[str, Any]:
    """What the program found."""
    assert "retrofit" not in PROGRAM
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}
    subprocess.run([sys.executable, "-c", PROGRAM], cwd=written, env=environment, check=True, timeout=600, capture_output=True)
    return dict(json.loads((written / "found.json").read_text()))


@pytest.mark.parametrize("way", ["transformers", "device_map", "accelerate"])
def test_the_model_is_the_retrofitted_one(way: str, found: dict[str, Any], written: Path) -> None:
    model = reloaded(written)
    assert [one.name for one in retrofit.recipe(model) or ()] == ["altup", "sparse-ffn"]
    torch.testing.assert_close(torch.tensor(found[f"by_{way}"]), model(torch.tensor(IDS)).logits.detach())


def test_a_pipeline_generates_what_the_model_does(found: dict[str, Any], written: Path) -> None:
    words = tokenizer()
    ids = words("the quick fox", return_tensors="pt")
    out = reloaded(written).generate(ids["input_ids"], attention_mask=ids["attention_mask"], max_new_tokens=5, do_sample=False)
    assert found["by_pipeline"].split() == words.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True).split()


def test_an_adapter_finds_its_retrofitted_base(found: dict[str, Any], written: Path) -> None:
    model = peft.PeftModel.from_pretrained(reloaded(written), written / "adapter").eval()
    torch.testing.assert_close(torch.tensor(found["by_peft"]), model(torch.tensor(IDS)).logits.detach())


def test_a_pipeline_of_sentence_transformers_encodes_as_it_did(found: dict[str, Any], written: Path) -> None:
    before = json.loads((written / "sentences.json").read_text())
    torch.testing.assert_close(torch.tensor(found["by_sentence_transformers"]), torch.tensor(before))
