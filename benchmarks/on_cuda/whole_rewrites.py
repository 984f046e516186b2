"""`retrofit.apply` on the device: every pass with all its checks on a small model, and its time and memory on large ones."""

from __future__ import annotations

import functools
import time
from typing import Any

import torch
from apply_cost import SIZES
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

from on_cuda.parts import FAILED, Part, shortened
from on_cuda.timing import peak_bytes
from retrofit.errors import VerificationError
from retrofit.rewriting import apply_reported

PASSES = (
    "altup(k=2)",
    "sparse-ffn(sparsity=8)",
    "sparse-ffn(sparsity=8, active=4, controller=gate)",
    "shared-moe(groups=1)",
    "sparse-qkv",
    "sparse-loss(modules=4)",
    "memory",
    "recurrence",
    "sequence-altup(k=2, layers=all)",
    "lsh-attention(chunk=4)",
    "reversible",
    "merge-cross-attention",
    "sum",
)
LARGE = {
    "1B": SIZES["1b"],
    "7B": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "vocab_size": 32000,
        "num_key_value_heads": 32,
    },
}
SPECS = ("altup(k=2, embedding=recycled)", "sparse-ffn(sparsity=8, active=4)")
SECONDS = {"1B": 30, "7B": 120}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def checked_parts(dtype: str, device: str) -> list[Part]:
    """Every pass with its checks, in one precision."""
    return [Part(f"checks: {spec}, {dtype}", 5, functools.partial(checked, spec, dtype, device)) for spec in PASSES]


def large_parts(size: str, device: str, rehearsal: bool) -> list[Part]:
    """Models of a size, rewritten without checks and with them."""
    ways = {f"apply {size}: {spec}": functools.partial(large, size, spec, device, rehearsal) for spec in SPECS}
    return [Part(key, SECONDS[size], way, alone=True) for key, way in ways.items()]


def checked(spec: str, dtype: str, device: str) -> dict[str, Any]:
    """How the checks of a rewrite came out on the device; one that fails raises."""
    torch.manual_seed(0)
    model: Any = small_encoder_decoder() if spec.startswith("merge") else small_decoder()
    report = verified(model.to(device, DTYPES[dtype]).eval(), spec)
    return {"ok": report.ok, "checks": {one.name: one.status for one in report.checks}, **reasons(report)}


def reasons(report: Any) -> dict[str, str]:
    """Why each check that failed did."""
    return {f"{one.name} {FAILED}": shortened(one.why) for one in report.checks if one.status == FAILED}


def small_decoder() -> Any:
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=64, num_key_value_heads=2, **sizes))


def small_encoder_decoder() -> Any:
    sizes = {"num_layers": 1, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4}
    return T5ForConditionalGeneration(T5Config(vocab_size=64, decoder_start_token_id=0, **sizes))


def large(size: str, spec: str, device: str, rehearsal: bool) -> dict[str, Any]:
    """Seconds and bytes of building the model, and of `apply` without and with verification."""
    given = SIZES["smoke"] if rehearsal else LARGE[size]
    found: dict[str, Any] = {}
    for verify in (False, True):
        began = time.monotonic()
        model = random_llama(given, device)
        bytes_of = sum(one.numel() * one.element_size() for one in model.parameters())
        found |= {"build": time.monotonic() - began, "model bytes": bytes_of}
        began = time.monotonic()
        applied: list[Any] = []
        way = verified if verify else functools.partial(apply_reported, verify=False, count_flops=False)
        rewrite = functools.partial(way, model, spec)
        memory = peak_bytes(lambda rewrite=rewrite, applied=applied: applied.append(rewrite()), device)
        row = {"seconds": time.monotonic() - began, **memory}
        if verify:
            row["by check"] = {one.name: round(one.seconds, 2) for one in applied[0].checks}
            row |= reasons(applied[0])
        found["verified" if verify else "unverified"] = row
        del model, applied, rewrite
    return found


def verified(model: Any, spec: str) -> Any:
    """The report of a rewrite with its checks, whether they passed or not."""
    try:
        return apply_reported(model, spec, count_flops=False).report
    except VerificationError as error:
        return error.report


def random_llama(given: dict[str, Any], device: str) -> Any:
    """A model in bfloat16, made on the device."""
    settings = LlamaConfig(**{"num_key_value_heads": 4, **given}, tie_word_embeddings=False)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return LlamaForCausalLM(settings).eval()
    finally:
        torch.set_default_dtype(before)
