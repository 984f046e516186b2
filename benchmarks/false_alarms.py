"""How often a faultless rewrite is reported as wrong: tiny models of twelve families, every pass, every check.

Each rewrite has a seed, from which come its weights, its odd sizes and the options of the pass; the weights are those of a fresh
model, or three times as large, which rounds as trained ones with massive activations do. A refusal before the edit is no alarm: it
is counted as `refused`. Progress is in the file of `-o`, and the next call goes on from there.

With `--recipes` each rewrite is a recipe of one to four passes in any order, whose options are drawn from all forms of the passes.

    python benchmarks/false_alarms.py -o false_alarms.json --rewrites 1000
    python benchmarks/false_alarms.py -o recipes.json --recipes --rewrites 200
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

import retrofit
from retrofit.errors import RetrofitError, VerificationError

SEEDS, LAYERS = 20, 4
SCALES = (1.0, 3.0)
TWO_STACKS = ("t5", "bart")  # the families with a decoder that reads an encoder
PASSES = (
    *("altup", "lsh-attention", "memory", "merge-cross-attention", "recurrence", "reversible", "sum"),
    *("sequence-altup", "shared-moe", "sparse-ffn", "sparse-loss", "sparse-qkv"),
)


def sizes(seed: int) -> dict[str, int]:
    """Odd extents: the width is a multiple of the heads and of nothing else."""
    draw = random.Random(seed)
    heads = draw.choice((2, 4))
    head = draw.choice((6, 10, 12, 14)) if heads == 4 else draw.choice((12, 14, 18, 22, 26))
    hidden = 8 * draw.randrange(5, 13)
    return {"vocabulary": draw.randrange(53, 131), "heads": heads, "width": heads * head, "head": head, "hidden": hidden}


def llama_like(name: str, **more: Any) -> Callable[[dict[str, int]], nn.Module]:
    def build(n: dict[str, int]) -> nn.Module:
        given = {
            "vocab_size": n["vocabulary"],
            "hidden_size": n["width"],
            "intermediate_size": n["hidden"],
            "num_hidden_layers": LAYERS,
            "num_attention_heads": n["heads"],
            "num_key_value_heads": n["heads"] // 2,
            "head_dim": n["head"],
            "max_position_embeddings": 64,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        config = transformers.AutoConfig.for_model(name, **{**given, **more})
        return transformers.AutoModelForCausalLM.from_config(config)

    return build


def gpt_like(name: str, names: dict[str, str], **more: Any) -> Callable[[dict[str, int]], nn.Module]:
    """`names`: how its config calls the sizes."""

    def build(n: dict[str, int]) -> nn.Module:
        given: dict[str, Any] = {theirs: n[ours] for ours, theirs in names.items()}
        tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "vocab_size": n["vocabulary"]}
        config = transformers.AutoConfig.for_model(name, **{**given, **tokens, **more})
        return transformers.AutoModelForCausalLM.from_config(config)

    return build


def bert(n: dict[str, int]) -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=n["vocabulary"],
        hidden_size=n["width"],
        intermediate_size=n["hidden"],
        num_hidden_layers=LAYERS,
        num_attention_heads=n["heads"],
        max_position_embeddings=64,
    )
    return transformers.BertForMaskedLM(config)


def t5(n: dict[str, int]) -> nn.Module:
    config = transformers.T5Config(
        vocab_size=n["vocabulary"],
        d_model=n["width"],
        d_kv=n["head"],
        d_ff=n["hidden"],
        num_layers=LAYERS,
        num_decoder_layers=3,
        num_heads=n["heads"],
        feed_forward_proj="gated-gelu",
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config)


def bart(n: dict[str, int]) -> nn.Module:
    sides = {
        f"{side}_{what}": value
        for side in ("encoder", "decoder")
        for what, value in (("layers", 3), ("attention_heads", n["heads"]), ("ffn_dim", n["hidden"]))
    }
    tokens = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": None}
    config = transformers.BartConfig(vocab_size=n["vocabulary"], d_model=n["width"], max_position_embeddings=64, **sides, **tokens)
    return transformers.BartForConditionalGeneration(config)


def phi(n: dict[str, int]) -> nn.Module:
    """A part of each head turns with the position, an even number of its columns."""
    names = {**WIDE, "hidden": "intermediate_size"}
    turning = {"partial_rotary_factor": 2 * (n["head"] // 4) / n["head"]}
    return gpt_like("phi", names, num_hidden_layers=LAYERS, max_position_embeddings=64, **turning)(n)


WIDE = {"width": "hidden_size", "heads": "num_attention_heads"}
FAMILIES: dict[str, Callable[[dict[str, int]], nn.Module]] = {
    "llama": llama_like("llama"),
    "qwen3": llama_like("qwen3", tie_word_embeddings=True),
    "gemma2": llama_like("gemma2", query_pre_attn_scalar=16, sliding_window=8),
    "mixtral": llama_like("mixtral", num_local_experts=4, num_experts_per_tok=2),
    "gpt2": gpt_like("gpt2", {"width": "n_embd", "heads": "n_head", "hidden": "n_inner"}, n_layer=LAYERS, n_positions=64),
    "gpt-neox": gpt_like("gpt_neox", {**WIDE, "hidden": "intermediate_size"}, num_hidden_layers=LAYERS, max_position_embeddings=64),
    "opt": gpt_like(
        "opt", {**WIDE, "hidden": "ffn_dim", "width ": "word_embed_proj_dim"}, num_hidden_layers=LAYERS, max_position_embeddings=64
    ),
    "bloom": gpt_like("bloom", {"width": "hidden_size", "heads": "n_head"}, n_layer=LAYERS),
    "phi": phi,
    "bert": bert,
    "t5": t5,
    "bart": bart,
}


def model_of(family: str, seed: int, scale: float) -> nn.Module:
    """The model, its matrices scaled, its norms and biases moved off their ones and zeros."""
    n = sizes(seed)
    n["width "] = n["width"]
    torch.manual_seed(seed)
    model = FAMILIES[family](n).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale if parameter.dim() > 1 else 1.0).add_(0.05 * torch.randn_like(parameter))
    return model


OTHER_FORMS = {
    "altup": ("k=2, coefficients=dynamic", "k=3, extra=6", "k=2, layers=0-1"),
    "sequence-altup": ("k=3, layers=1", "k=2, method=average-pooling", "k=3, layers=all, method=stride-and-skip"),
    "sparse-ffn": ("sparsity=4, active=2", "sparsity=4, controller=gate", "sparsity=4, multiply_by_controller=true, scale=true"),
    "shared-moe": ("experts=2, share_attention=true", "experts=3, groups=0, renormalize=false", "experts=4, capacity=1"),
    "memory": ("lookup=softmax, beside=ffns", "lookup=lsh, buckets=4, rank=1, layers=1", "lookup=token-id, sparse=true"),
    "recurrence": ("rank=2, bidirectional=true", "rank=2, layers=1-2"),
    "lsh-attention": ("share=queries", "share=queries, rounds=1, buckets=2, chunk=4"),
    "merge-cross-attention": ("positions=first", "layers=1"),
    "reversible": ("scheme=terraformer", "bits=8, layers=1-2"),
    "sparse-qkv": ("output=keep", "kernel=1", "kernel=2, output=mult-conv", "variant=mult, output=mult", "layers=1, output=conv"),
    "sparse-loss": ("modules=3",),
}


def spec_of(one: str, seed: int, others: dict[str, tuple[str, ...]]) -> str:
    """The pass with options that fit most models, or with `others` of them."""
    draw = random.Random(f"{one} {seed}")
    options = {
        "altup": ("k=2", "k=3, init=lockstep", "k=2, embedding=recycled", "k=3, coefficients=dense", "k=2, selection=same"),
        "sum": ("",),
        "sequence-altup": ("k=1", "k=2", "k=4", "k=2, layers=all", "k=2, method=stride-and-skip"),
        "sparse-ffn": ("sparsity=4", "sparsity=8", "sparsity=2"),
        "shared-moe": ("groups=0, experts=4", "experts=2, k=1", "experts=4, k=2", "groups=2, experts=4"),
        "memory": ("lookup=token-id", "lookup=softmax, rank=2", "lookup=lsh, rank=2", "lookup=token-id, rank=2"),
        "recurrence": ("", "rank=4", "rank=3, layers=0"),
        "lsh-attention": ("", "rounds=2, buckets=4, chunk=4", "rounds=1, buckets=2, chunk=5, layers=0"),
        "merge-cross-attention": ("", "attentions=1", "weight=0.1"),
        "reversible": ("", "bits=1", "layers=0-1"),
        "sparse-qkv": ("", "variant=mult", "variant=conv", "modules=2"),
        "sparse-loss": ("modules=2", "modules=4"),
    }
    chosen = draw.choice(options[one] + others.get(one, ()))
    return f"{one}({chosen})" if chosen else one


def cases() -> list[tuple[str, str, float, int]]:
    """Every family, pass, scale and seed, in an order in which any first part of them is a fair sample."""
    found = [(family, one, scale, seed) for family in FAMILIES for one in PASSES for scale in SCALES for seed in range(SEEDS)]
    random.Random(0).shuffle(found)
    return found


def recipes() -> Iterator[tuple[str, str, float, int]]:
    """Recipes for the families in turn: the family, the passes with " + " between them, scale and seed."""
    for seed, family in enumerate(itertools.cycle(FAMILIES)):
        draw = random.Random(f"recipe {seed}")
        some = [one for one in PASSES if one != "merge-cross-attention" or family in TWO_STACKS]
        yield family, " + ".join(draw.sample(some, draw.randint(1, 4))), draw.choice(SCALES), seed


def outcome(family: str, passes: str, scale: float, seed: int, others: dict[str, tuple[str, ...]]) -> dict[str, Any]:
    """What became of a rewrite: verified, refused, or the checks that failed with what they said."""
    specs = [spec_of(one, seed, others) for one in passes.split(" + ")]
    start = time.perf_counter()
    known: dict[str, Any] = {"family": family, "pass": passes, "scale": scale, "seed": seed, "spec": " + ".join(specs)}
    known |= {"alarms": {}, "why": ""}
    try:
        retrofit.apply(model_of(family, seed, scale), *specs)
        known["outcome"] = "verified"
    except VerificationError as error:
        known["outcome"] = "alarm"
        known["alarms"] = {check.name: f"{check.measured} | {check.why}" for check in error.report.failed}
    except RetrofitError as error:
        known |= {"outcome": "refused", "why": " ".join(str(error).split())}
    except Exception as error:  # a defect, which is counted as an alarm
        known |= {"outcome": "alarm", "alarms": {"raised": f"{type(error).__name__}: {error}"}}
    return {**known, "seconds": round(time.perf_counter() - start, 2)}


def table(results: list[dict[str, Any]]) -> str:
    """The outcomes by pass, and every alarm."""
    rows = ["| pass | rewrites | verified | refused | alarms |", "| --- | --- | --- | --- | --- |"]
    for one in (*PASSES, "all"):
        counts = Counter(result["outcome"] for result in results if one in (*result["pass"].split(" + "), "all"))
        done = counts["verified"] + counts["alarm"]
        rows.append(f"| {one} | {done} | {counts['verified']} | {counts['refused']} | {counts['alarm']} |")
    for result in results:
        for check, said in result["alarms"].items():
            rows.append(f"\n{result['family']} {result['spec']} scale {result['scale']:g} seed {result['seed']}: {check}: {said}")
    refused = [result for result in results if result["outcome"] == "refused"]
    refusals = Counter((result["family"], result["pass"], result["why"][:120]) for result in refused)
    for (family, one, why), count in sorted(refusals.items()):
        rows.append(f"\nrefused {count} times: {family} {one}: {why}")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="Rewrite faultless models and count what the checks report.")
    parser.add_argument("-o", "--output", type=Path, required=True, help="the JSON file with the outcomes, read and continued")
    parser.add_argument("--rewrites", type=int, default=1000, help="how many rewrites, refusals apart")
    parser.add_argument("--passes", nargs="+", choices=PASSES, default=PASSES)
    parser.add_argument("--recipes", action="store_true", help="recipes of up to four passes instead of single ones")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after so long")
    parser.add_argument("--again", action="store_true", help="first repeat those that raised an alarm")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    results: list[dict[str, Any]] = json.loads(arguments.output.read_text()) if arguments.output.exists() else []
    if arguments.again:
        results = [result for result in results if result["outcome"] != "alarm"]
    done = {(result["family"], result["pass"], result["scale"], result["seed"]) for result in results}
    end = time.monotonic() + 60 * arguments.minutes
    for case in recipes() if arguments.recipes else cases():
        if sum(result["outcome"] != "refused" for result in results) >= arguments.rewrites or time.monotonic() > end:
            break
        if case not in done and {*case[1].split(" + ")} <= {*arguments.passes}:
            results.append(outcome(*case, OTHER_FORMS if arguments.recipes else {}))
            arguments.output.write_text(json.dumps(results, indent=1))
    print(table(results))


if __name__ == "__main__":
    main()
