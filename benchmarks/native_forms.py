"""Which options of shared-moe give which native form, on small models of several architectures: a table in Markdown.

python benchmarks/native_forms.py [--models llama qwen3] [--seconds]
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
import transformers

import retrofit
from retrofit.errors import RetrofitError
from retrofit.native import native_form

SIZES = {
    "vocab_size": 61,
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS = ("llama", "mistral", "qwen2", "qwen3", "granite", "olmo2", "phi3", "gemma2", "gpt_neox", "stablelm")
OPTIONS = ("groups=0", "groups=0, renormalize=false", "groups=0, layers=1", "groups=1")


def upcycled(model_type: str, options: str) -> Any:
    """A small model of that architecture with mixtures whose experts differ."""
    torch.manual_seed(0)
    sizes = dict(SIZES, head_dim=8) if model_type in ("qwen3", "gemma2") else SIZES
    dense = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(model_type, **sizes)).eval()
    model = retrofit.apply(dense, f"shared-moe(experts=4, k=2, {options})", verify=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def outcome(model_type: str, options: str) -> str:
    """The native form, or the reason why there is none."""
    try:
        form = native_form(upcycled(model_type, options))
    except RetrofitError as error:
        return f"none: {' '.join((error.why or error.what).split())[:160]}"
    zeros = f"; zero: {len(form.zeros)} parameters" if form.zeros else ""
    return f"`{form.architecture}` ({form.options}), {form.measured}{zeros}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--options", nargs="+", default=OPTIONS)
    parser.add_argument("--seconds", action="store_true", help="also how long each took")
    arguments = parser.parse_args()
    print("| dense model | `shared-moe` | native form |\n| --- | --- | --- |")
    for model_type in arguments.models:
        for options in arguments.options:
            start = time.perf_counter()
            found = outcome(model_type, options)
            took = f" ({time.perf_counter() - start:.0f} s)" if arguments.seconds else ""
            print(f"| {model_type} | `{options}` | {found}{took} |", flush=True)


if __name__ == "__main__":
    main()
