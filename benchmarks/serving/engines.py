"""Whether other engines compute what transformers does: log-probabilities of ten tokens, and of twelve that follow.

    python benchmarks/serving/engines.py write OUT --tokenizer DIR     here: the directories, and what transformers makes of them
    VLLM/bin/python benchmarks/serving/engines.py vllm OUT             where vLLM is installed
    for m in OUT/*/; do python convert_hf_to_gguf.py $m --outfile ${m%/}.gguf --outtype f32; done      llama.cpp's converter
    LLAMA/bin/python benchmarks/serving/engines.py llama OUT           where llama-cpp-python is installed

Bundles (docs/bundle.md), of a Llama after one pass each, are tried with vLLM's Transformers backend alone: their names begin with
"bundle". A line for each directory: the largest difference of a log-probability, and whether the twelve tokens are the same.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

IDS = [5, 300, 17, 4000, 1234, 88, 42, 900, 11, 700]
NEW = 12
RECORD = "transformers.json"
SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS = (
    ("llama", "renormalize=true"),
    ("mistral", "renormalize=true"),
    ("qwen3", "renormalize=true"),
    ("granite", "renormalize=true"),
    ("llama", "renormalize=false"),
    ("qwen2", "renormalize=false"),
    ("olmo2", "renormalize=false"),
)
PASSES = (
    "sparse-ffn(sparsity=8)",
    "shared-moe",
    "sum",
    "reversible",
    "altup(k=2)",
    "memory",
    "sparse-qkv",
    "sparse-loss",
    "lsh-attention",
    "recurrence",
    "sequence-altup(k=2)",
)
BUNDLE = "bundle"


def write(folder: Path, tokenizer: Path, dense: Path | None) -> None:
    """The directories, small models at random and the upcycled `dense` one, and what transformers makes of them."""
    import torch
    import transformers

    import retrofit
    from retrofit.native import native_form

    reads = transformers.AutoTokenizer.from_pretrained(tokenizer)
    record = {}
    for kind, gates in (*MODELS, *([(str(dense), "renormalize=true")] if dense else [])):
        torch.manual_seed(0)
        trained = Path(kind).is_dir()
        if trained:
            model = transformers.AutoModelForCausalLM.from_pretrained(kind, dtype=torch.float32)
        else:
            sizes = SIZES | {"vocab_size": len(reads)}
            model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **sizes))
        retrofit.apply(model.eval(), f"shared-moe(experts=4, k=2, groups=0, {gates})", verify=False)
        with torch.no_grad():
            for name, one in model.named_parameters():
                if not trained or "router" in name:
                    one.add_(0.05 * torch.randn_like(one))
        form = native_form(model)
        name = f"{Path(kind).name}-{gates.partition('=')[2]}-{form.architecture}"
        form.model.save_pretrained(folder / name)
        reads.save_pretrained(folder / name)
        record[name] = answers(form.model)
        print(name, form.measured, flush=True)
    for spec in PASSES:
        torch.manual_seed(0)
        sizes = SIZES | {"vocab_size": len(reads), "num_hidden_layers": 4}
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model("llama", **sizes)).eval()
        retrofit.apply(model, spec, verify=False)
        with torch.no_grad():
            for one in model.parameters():  # as if it had trained: nothing is where the dense model put it
                one.add_(0.05 * torch.randn_like(one))
        name = f"{BUNDLE}-{spec.partition('(')[0]}"
        with tempfile.TemporaryDirectory() as place:
            model.save_pretrained(place)
            retrofit.bundle(place, folder / name)
        reads.save_pretrained(folder / name)
        record[name] = answers(model)
        print(name, flush=True)
    (folder / RECORD).write_text(json.dumps(record))


def answers(model: Any) -> dict[str, Any]:
    """The log-probabilities of every token after each of the given ones, and the tokens that follow."""
    import torch

    given = torch.tensor([IDS])
    whole = model.generate(given, max_new_tokens=NEW, do_sample=False)
    with torch.no_grad():
        found = model(whole).logits[0].double().log_softmax(-1)
    follow = whole[0, len(IDS) :]
    return {"log_probabilities": found.tolist(), "tokens": follow.tolist()}


def vllm(path: Path, known: dict[str, Any]) -> tuple[float, list[int]]:
    """The largest difference of a log-probability that vLLM gives, and the tokens that it chooses."""
    from vllm import LLM, SamplingParams

    how: dict[str, Any] = {"trust_remote_code": True, "model_impl": "transformers"} if path.name.startswith(BUNDLE) else {}
    engine = LLM(str(path), dtype="float32", enforce_eager=True, max_model_len=128, gpu_memory_utilization=0.3, **how)
    asked = SamplingParams(max_tokens=NEW, temperature=0, prompt_logprobs=1, logprobs=1)
    (answer,) = engine.generate({"prompt_token_ids": IDS}, asked)
    chosen = list(answer.outputs[0].token_ids)
    same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(chosen, known["tokens"], strict=False)))
    steps = answer.outputs[0].logprobs[: same + 1]  # as long as the steps before are the same
    rows = zip([*answer.prompt_logprobs[1:], *steps], known["log_probabilities"], strict=False)
    gaps = [abs(one.logprob - expected[token]) for row, expected in rows for token, one in row.items()]
    return worst(gaps), chosen


def llama(path: Path, known: dict[str, Any]) -> tuple[float, list[int]]:
    """The same of llama.cpp, with its cache in float32."""
    from llama_cpp import Llama

    float32 = 0  # ggml's number for it: the cache, which is float16 otherwise
    engine = Llama(f"{path}.gguf", n_ctx=256, logits_all=True, verbose=False, type_k=float32, type_v=float32)
    engine.eval(IDS)
    gaps = []
    for row, expected in zip(engine.scores[: len(IDS)].astype(float).tolist(), known["log_probabilities"], strict=False):
        top = max(row)
        total = top + math.log(sum(math.exp(one - top) for one in row))
        gaps += [abs(one - total - other) for one, other in zip(row, expected, strict=True)]
    engine.reset()
    chosen: list[int] = []
    for token in engine.generate(IDS, temp=0.0, top_k=1, repeat_penalty=1.0):
        chosen.append(token)
        if len(chosen) == NEW:
            break
    return worst(gaps), chosen


def worst(gaps: list[float]) -> float:
    return math.nan if any(math.isnan(one) for one in gaps) else max(gaps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("write", "vllm", "llama"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokenizer", type=Path, help="a directory with a tokenizer, which llama.cpp's converter needs")
    parser.add_argument("--dense", type=Path, help="a trained model's directory, to be upcycled too")
    parser.add_argument("--only", help="the name of one of the directories")
    arguments = parser.parse_args()
    if arguments.what == "write":
        arguments.folder.mkdir(parents=True, exist_ok=True)
        write(arguments.folder, arguments.tokenizer, arguments.dense)
        return
    record = json.loads((arguments.folder / RECORD).read_text())
    if arguments.what == "llama":  # its converter reads no code of a directory's own
        record = {name: one for name, one in record.items() if not name.startswith(BUNDLE)}
    if arguments.only is None:  # an engine that fails takes its process with it
        for name in record:
            command = [sys.executable, __file__, arguments.what, str(arguments.folder), "--only", name]
            said = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout
            print(next((line for line in said.splitlines() if line.startswith(name)), f"{name}: it does not load"), flush=True)
        return
    known = record[arguments.only]
    gap, tokens = (vllm if arguments.what == "vllm" else llama)(arguments.folder / arguments.only, known)
    same = tokens[: len(known["tokens"])] == known["tokens"]  # these end with the token that ends a text
    print(f"{arguments.only}: {gap:.1e}, {'the same' if same else 'other'} tokens", flush=True)


if __name__ == "__main__":
    main()
