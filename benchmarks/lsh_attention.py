"""What attention in buckets costs next to torch's fused attention, and what it finds.

First the attention alone, causal, in heads of 64: seconds and peak memory by length, and from which length on it is faster. A
ratio is the median over the rounds of the dense attention's time over that of the buckets in the same round. The bar is 4 at 16,384
tokens and d = 512. Memory is that of the tensors held at one time, by `retrofit/inputs/model_memory.py`: without what an
operation takes while it runs. Last, a token decoded behind so many.

With --trained, SmolLM2 (which `make real` installs) on held-out documentation, four chunks long: of the 16 keys with the most
weight in the dense attention, how many are seen, and how much of all weight the seen keys have, by layer; then the loss of the
rewritten model, without any training, and of one that sees the last chunk and the first key only.

    python benchmarks/lsh_attention.py --threads 1
    python benchmarks/lsh_attention.py --threads 1 --rounds 1 --clock cpu    # while others use the machine
    python benchmarks/lsh_attention.py --trained --threads 1
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import side_by_side
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache

import retrofit
from retrofit.inputs.model_memory import peak_bytes
from retrofit.passes import LSHAttention
from retrofit.passes.lsh_attention.bucketed_attention import BucketedAttention
from retrofit.passes.lsh_attention.key_buckets import hash_buckets, random_rotations
from retrofit.passes.lsh_attention.seen_keys import seen_by_comparison
from retrofit.surgery.wrappers import AnsweredFusedAttention

HEAD, TOP, CHUNKS = 64, 16, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--hashes", type=int, nargs="+", default=[2, 4], help="rounds of hashes")
    parser.add_argument("--buckets", type=int, default=LSHAttention.buckets)
    parser.add_argument("--chunk", type=int, default=LSHAttention.chunk)
    parser.add_argument("--trained", action="store_true")
    parser.add_argument("--windows", type=int, default=4, help="of held-out text")
    side_by_side.add_options(parser, rounds=3)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with torch.no_grad():
        (trained if options.trained else alone)(options)


# ── The attention alone ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def alone(options: argparse.Namespace) -> None:
    print(f"d={options.width}, chunk={options.chunk}, {options.buckets} buckets, {side_by_side.conditions(options)}")
    faster: dict[int, int] = {}
    for length in options.lengths:
        q, k, v = (torch.randn(1, options.width // HEAD, length, HEAD, device=options.device) for _ in range(3))
        tasks = {"dense": lambda q=q, k=k, v=v: discard(F.scaled_dot_product_attention(q, k, v, is_causal=True))}
        for rounds in options.hashes:
            module = attention(rounds, options)
            tasks[f"{rounds} rounds"] = lambda q=q, k=k, v=v, module=module: discard(module(q, k, v, is_causal=True))
        seconds = side_by_side.interleaved(tasks, options)
        line = f"{length:6} tokens  dense {statistics.median(seconds['dense']):8.3f} s"
        for rounds in options.hashes:
            name = f"{rounds} rounds"
            ratio = statistics.median(one / other for one, other in zip(seconds["dense"], seconds[name], strict=True))
            line += f"   {name} {statistics.median(seconds[name]):8.3f} s ×{ratio:5.2f} {peak_bytes(tasks[name]) / 2**20:6.0f} MiB"
            if ratio > 1:
                faster.setdefault(rounds, length)
        print(line, flush=True)
    for rounds in options.hashes:
        print(f"{rounds} rounds: faster from {faster.get(rounds, 'no length tried')} on")
    for length in options.lengths[-2:]:
        decoding(length, options)


def attention(rounds: int, options: argparse.Namespace) -> BucketedAttention:
    rotations = random_rotations(HEAD, rounds, options.buckets, 0, torch.empty((), device=options.device))
    return BucketedAttention("attention", options.width // HEAD, True, False, options.chunk, rotations)


def discard(_: Tensor) -> None:
    """What a task made is not kept."""


def decoding(length: int, options: argparse.Namespace) -> None:
    """One more token behind so many, whose keys' buckets the cache holds."""
    q, k, v = (torch.randn(1, options.width // HEAD, length + 1, HEAD, device=options.device) for _ in range(3))
    last = q[:, :, -1:]
    tasks: dict[str, Callable[[], None]] = {"dense": lambda: discard(F.scaled_dot_product_attention(last, k, v))}
    for rounds in options.hashes:
        module, cache = attention(rounds, options), DynamicCache()
        module(q[:, :, :-1], k[:, :, :-1], v[:, :, :-1], is_causal=True, cache=cache)

        def step(module: BucketedAttention = module, cache: DynamicCache = cache) -> None:
            module(last, k, v, cache=cache)
            cache.histories["attention"].take_back(1)

        tasks[f"{rounds} rounds"] = step
    print(f"\na token decoded after {length}")
    side_by_side.compare(tasks, options)


# ── A trained model ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def trained(options: argparse.Namespace) -> None:
    sys.path.append(str(Path(__file__).parent.parent / "tests"))
    from support.real_models import documentation, load_smollm2, smollm2_tokenizer, split, windows

    length = CHUNKS * options.chunk
    rows = windows(smollm2_tokenizer(), split(documentation())[1], length, options.windows)
    model = load_smollm2()
    print(f"SmolLM2, {len(rows)} windows of {length} tokens, chunk={options.chunk}, {options.buckets} buckets")
    captured = vectors(model, rows[:1])
    for rounds in (0, *options.hashes):  # 0: the last chunk and the first key
        print(f"{rounds} rounds: {recall(captured, rounds, options)}", flush=True)
    print(f"dense loss {loss(model, rows):.4f}", flush=True)
    for rounds in options.hashes:
        spec = LSHAttention(rounds=rounds, buckets=options.buckets, chunk=options.chunk)
        rewritten = retrofit.apply(copy.deepcopy(model), spec, example_inputs={"input_ids": rows[:1, :16]}, verify=False)
        print(f"{rounds} rounds: loss {loss(rewritten, rows):.4f}", flush=True)
    print(f"the last {options.chunk} tokens and the first only: loss {local_loss(model, rows, options.chunk):.4f}")


def loss(model: torch.nn.Module, rows: Tensor) -> float:
    """The mean over the windows of the loss of a token, in nats."""
    return statistics.mean(float(model(input_ids=row[None], labels=row[None], use_cache=False).loss) for row in rows)


class Recorder(torch.nn.Module):
    """The dense attention, which records its operands."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[Tensor, Tensor]] = []

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: object, **how: object) -> Tensor:
        self.found.append((query[0], key[0].repeat_interleave(query.shape[1] // key.shape[1], 0)))
        return F.scaled_dot_product_attention(query, key, value, *args, **how)


class Local(torch.nn.Module):
    """The dense attention within the last `chunk` tokens and the first one."""

    def __init__(self, chunk: int) -> None:
        super().__init__()
        self.chunk = chunk

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: object, **how: object) -> Tensor:
        place = torch.arange(query.shape[2])
        apart = place[:, None] - place
        how |= {"is_causal": False, "attn_mask": (apart >= 0) & ((apart < self.chunk) | (place == 0))}
        return F.scaled_dot_product_attention(query, key, value, **how)


def vectors(model: torch.nn.Module, rows: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Queries and keys, (heads, tokens, d) each, of every layer."""
    recorder = Recorder()
    with AnsweredFusedAttention(recorder):
        model(input_ids=rows, use_cache=False)
    return recorder.found


def local_loss(model: torch.nn.Module, rows: Tensor, chunk: int) -> float:
    with AnsweredFusedAttention(Local(chunk)):
        return loss(model, rows)


def recall(layers: list[tuple[Tensor, Tensor]], rounds: int, options: argparse.Namespace) -> str:
    """Of the queries in the last quarter: how many of their top keys they see, and how much of all weight, over the layers."""
    found = []
    for number, (q, k) in enumerate(layers):
        n = q.shape[1]
        late = torch.arange(3 * n // 4, n)
        weights = (q[:, late] @ k.mT * HEAD**-0.5).masked_fill(torch.arange(n) > late[:, None], -torch.inf).softmax(-1)
        if rounds:
            rotations = random_rotations(HEAD, rounds, options.buckets, number, q)
            seen = seen_by_comparison(hash_buckets(q[:, late], rotations), hash_buckets(k, rotations), late, options.chunk)
        else:
            seen = ((torch.arange(n) <= late[:, None]) & (torch.arange(n) > late[:, None] - options.chunk)).expand_as(weights)
        seen = seen | (torch.arange(n) == 0)
        top = seen.gather(-1, weights.topk(TOP).indices).float().mean()
        found.append((float(top), float((weights * seen).sum(-1).mean())))
    tops, masses = zip(*found, strict=True)
    text = f"{statistics.mean(tops):.1%} of the top {TOP} keys seen ({min(tops):.1%} in the worst layer)"
    return f"{text}, {statistics.mean(masses):.1%} of the weight ({min(masses):.1%})"


if __name__ == "__main__":
    main()
