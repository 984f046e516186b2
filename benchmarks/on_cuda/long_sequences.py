"""Attention in buckets against the fused dense one by length, and the scan of a recurrence against a loop."""

from __future__ import annotations

import argparse
from typing import Any

import lsh_attention
import torch
from recurrence import loop, scanning
from torch.nn import functional as F

from on_cuda.parts import Part, attempt
from on_cuda.timing import in_turns, peak_bytes
from retrofit.passes import LSHAttention
from retrofit.passes.recurrence.simple_recurrent_unit import all_states, in_chunks

WIDTH, ROUNDS = 1024, 2  # 16 heads; of hashes
LENGTHS = (1024, 4096, 16384, 65536)
SCANNED, RANK, BATCH, LOOPED = (256, 1024, 8192), 32, 8, 1024  # tokens of the scan; up to which the loop is tried


def parts(device: str, rehearsal: bool) -> list[Part]:
    return [
        Part("attention in buckets", 6, lambda: attention(device, rehearsal)),
        Part("scan", 4, lambda: scan(device, rehearsal)),
    ]


@torch.no_grad()
def attention(device: str, rehearsal: bool) -> dict[str, Any]:
    """Milliseconds and peak bytes of one causal attention, dense and in buckets."""
    found: dict[str, Any] = {}
    given = argparse.Namespace(width=WIDTH, buckets=LSHAttention.buckets, chunk=LSHAttention.chunk, device=device)
    module = lsh_attention.attention(ROUNDS, given)
    heads, head = WIDTH // lsh_attention.HEAD, lsh_attention.HEAD
    for length in (64, 256) if rehearsal else LENGTHS:
        size = (1, heads, length, head)
        q, k, v = (torch.randn(size, device=device, dtype=torch.bfloat16 if device == "cuda" else torch.float32) for _ in range(3))
        ways = {
            "dense": lambda q=q, k=k, v=v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
            "buckets": lambda q=q, k=k, v=v: module(q, k, v, is_causal=True),
        }
        row = attempt(lambda ways=ways: {"milliseconds": in_turns(ways, device)})
        for name, way in ways.items():
            row |= attempt(lambda name=name, way=way: {f"{name} bytes": peak_bytes(way, device)})
        found[f"{length} tokens"] = row
    return found


def scan(device: str, rehearsal: bool) -> dict[str, Any]:
    """Milliseconds of the scan and its gradient: over all tokens at once, in chunks as exported, and as a loop."""
    found: dict[str, Any] = {}
    given = argparse.Namespace(batch=BATCH, rank=RANK, device=device)
    for length in (8, 32) if rehearsal else SCANNED:
        ways = {"all at once": all_states, "in chunks": in_chunks} | ({"loop": loop} if length <= LOOPED else {})
        tasks = {name: scanning(way, length, given) for name, way in ways.items()}
        found[f"{BATCH}×{length} tokens"] = attempt(lambda tasks=tasks: in_turns(tasks, device))
    return found
