"""Tokens a second of a decoder after each pass: called from Python, as a CUDA graph of these calls, and compiled.

One token is decoded at a time, behind a prompt, with transformers' static cache: what `generate` does with `cache_implementation=
"static"`. A layer is as wide as in a model of a billion parameters, and there are four. The graph is captured by hand from plain
calls; compiled is `mode="reduce-overhead"`, which makes CUDA graphs of what Inductor wrote. Each is compared with plain calls: by
how much its logits differ after the same tokens. Next to that, the default cache, which grows: cuDNN's attention, which torch takes
on some GPUs, makes a plan for every length of the keys, so that is measured with it and without.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, StaticCache

from on_cuda import timing
from on_cuda.page import DENSE_CALLED
from on_cuda.parts import FAILED, Part, attempt
from on_cuda.random_models import REAL, TINY, rewritten
from on_cuda.timing import WARM, captured, milliseconds
from retrofit.passes.sparse_ffn.sparse_feed_forward import SparseFeedForward

DENSE, READ = "dense", ", rows read"  # the latter: whatever the pass itself would choose for so many tokens
HALF = "sparse-ffn(sparsity=8, active=4)"
GATED = "sparse-ffn(sparsity=8, active=4, controller=gate)"
NAMES = (
    DENSE,
    HALF + READ,
    GATED + READ,
    HALF,
    "sparse-ffn(sparsity=8)" + READ,
    "sparse-ffn(sparsity=64)" + READ,
    "shared-moe(groups=1, k=1)",
    "shared-moe(groups=0, k=2)",
    "sparse-qkv",
    "sparse-loss(modules=4)",
    "altup(k=2)",
    "memory",
    "recurrence",
    "sequence-altup(k=2)",
    "lsh-attention",
    "reversible",
    "sum",
)
EXACT = (HALF + READ,)  # compiled in float32 too: in bfloat16 rounding decides between units that are near each other
GROWING = (DENSE, "sequence-altup(k=2)")  # in a cache that grows
FIRST = (DENSE, HALF + READ, "sparse-ffn(sparsity=8)" + READ, "shared-moe(groups=1, k=1)")  # compiled before all others
BATCHES = (1, 8, 64)
PROMPT, ROOM, GROUP = 128, 128, 4  # tokens: of the prompt, behind it, and in one timed call


def parts(device: str, rehearsal: bool) -> list[Part]:
    """Plain calls and graphs of every pass, and what is compiled of the first few."""
    plain = [Part(f"decode: {name}", 4, functools.partial(plainly, name, device, rehearsal)) for name in NAMES]
    return [*plain, *compiled_parts(FIRST, BATCHES[:1], device, rehearsal)]


def later_parts(device: str, rehearsal: bool) -> list[Part]:
    """What is compiled of the others, and for larger batches."""
    others = [name for name in NAMES if name not in FIRST]
    rest = compiled_parts(others, BATCHES[:1], device, rehearsal)
    exact = [Part(f"exact: {name}", 12, functools.partial(exactly, name, device, rehearsal)) for name in EXACT]
    grow = [Part(f"growing: {name}", 4, functools.partial(growing, name, device, rehearsal)) for name in GROWING]
    return [*grow, *compiled_parts(FIRST, BATCHES[1:], device, rehearsal), *rest, *exact]


def compiled_parts(names: Iterable[str], batches: Iterable[int], device: str, rehearsal: bool) -> list[Part]:
    return [
        Part(f"compiled: {name}, batch {batch}", 12, functools.partial(compiled, name, batch, device, rehearsal))
        for batch in batches
        for name in names
    ]


def model_of(name: str, device: str, rehearsal: bool, dtype: torch.dtype | None = None) -> Any:
    """The decoder after the pass; in bfloat16 on a GPU."""
    spec = "" if name == DENSE else name.removesuffix(READ)
    dtype = dtype or (torch.bfloat16 if device == "cuda" else torch.float32)
    model = rewritten(spec, TINY if rehearsal else REAL, device, dtype)
    for module in model.modules():
        if name.endswith(READ) and isinstance(module, SparseFeedForward):
            module.prefers_gather = lambda x: True  # type: ignore[method-assign]
    return model


@torch.no_grad()
def plainly(name: str, device: str, rehearsal: bool) -> dict[str, Any]:
    """Milliseconds a token of plain calls and of their graph, by batch; after a graph that failed no other is tried."""
    model = model_of(name, device, rehearsal)
    dense = None if name == DENSE else model_of(DENSE, device, rehearsal)
    batches = BATCHES[:2] if rehearsal else BATCHES
    found: dict[str, Any] = {"parameters": sum(one.numel() for one in model.parameters())}
    for batch in batches:
        found[f"batch {batch}"] = attempt(lambda batch=batch: called(model, dense, batch, device))
    for batch in batches:
        row = attempt(lambda batch=batch: graph(Decoding(model, batch, device), model, batch, device))
        found[f"batch {batch}"] |= {"graph": row[FAILED]} if FAILED in row else row
        if FAILED in row:
            break
    return found


def called(model: Any, dense: Any, batch: int, device: str) -> dict[str, Any]:
    """Milliseconds a token of plain calls, and of those of the dense model in the same process, at the same time."""
    decoding = {"called": Decoding(model, batch, device)}
    if dense is not None:
        decoding[DENSE_CALLED] = Decoding(dense, batch, device)
    with timing.alone():
        return {way: milliseconds(decode, device) / GROUP for way, decode in decoding.items()}


@torch.no_grad()
def growing(name: str, device: str, rehearsal: bool) -> dict[str, Any]:
    """Milliseconds a token of plain calls with the default cache at batch 1, as torch chooses its attention and without cuDNN's."""
    model = model_of(name, device, rehearsal)
    found: dict[str, Any] = {}
    before = torch.backends.cuda.cudnn_sdp_enabled()
    for way, enabled in (("as chosen", before), ("without cuDNN", False)):
        torch.backends.cuda.enable_cudnn_sdp(enabled)
        try:
            decode = Decoding(model, 1, device, cache=DynamicCache(config=model.config))
            found[way] = attempt(lambda decode=decode: milliseconds(decode, device) / GROUP)
        finally:
            torch.backends.cuda.enable_cudnn_sdp(before)
    return found


def graph(decode: Decoding, model: Any, batch: int, device: str) -> dict[str, Any]:
    """Milliseconds a token of a CUDA graph of four calls, and by how much its logits differ from those of plain calls."""
    replay = captured(decode, device)
    decode.read_others()  # what the graph was captured with, tokens and what they left behind, is no longer true
    for _ in range(2):
        replay()
    mine = decode.logits.clone()
    before = WARM if device == "cuda" else 0  # the calls before the capture
    return {"graph": milliseconds(replay, device) / GROUP, "graph differs": difference(mine, model, batch, device, before, 2)}


@torch.no_grad()
def compiled(name: str, batch: int, device: str, rehearsal: bool) -> dict[str, Any]:
    """Milliseconds a token of compiled calls, with CUDA graphs and, where that fails, without."""
    model = model_of(name, device, rehearsal)
    how = {"mode": "reduce-overhead"} if device == "cuda" else {"backend": "eager"}
    found: dict[str, Any] = attempt(lambda: with_mode(model, batch, device, how))
    if FAILED in found and device == "cuda":
        without = attempt(lambda: with_mode(model, batch, device, {"mode": "default"}))
        return {"compiled": found[FAILED], **{f"{key}, no graphs": value for key, value in without.items()}}
    return found


@torch.no_grad()
def exactly(name: str, device: str, rehearsal: bool) -> dict[str, Any]:
    """As `compiled`, without graphs, in float32 at batch 1."""
    how = {"mode": "default"} if device == "cuda" else {"backend": "eager"}
    return with_mode(model_of(name, device, rehearsal, torch.float32), 1, device, how)


def with_mode(model: Any, batch: int, device: str, how: dict[str, str]) -> dict[str, Any]:
    """Milliseconds a token, the breaks of the graph, and by how much the logits differ from those of plain calls."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    try:
        decode = Decoding(model, batch, device, torch.compile(model, dynamic=False, **how))
        for _ in range(3):
            decode()
        decode.read_others()
        for _ in range(2):
            decode()
        mine = decode.logits.clone()
        breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
        return {
            "compiled": milliseconds(decode, device) / GROUP,
            "graph breaks": breaks,
            "differs": difference(mine, model, batch, device, 3, 2),
        }
    finally:
        torch.compiler.reset()


class Decoding:
    """A model that has read a prompt; a call decodes GROUP more tokens, the last logits of which are `logits`."""

    def __init__(
        self, model: Any, batch: int, device: str, step: Callable[..., Any] | None = None, cache: Cache | None = None
    ) -> None:
        self.step = model if step is None else step
        vocabulary = model.config.vocab_size
        ids = torch.randint(vocabulary, (batch, PROMPT), generator=torch.Generator().manual_seed(batch)).to(device)
        self.tokens, self.others = (ids[:, start : start + GROUP, None].transpose(0, 1).contiguous() for start in (0, GROUP))
        self.cache = StaticCache(config=model.config, max_cache_len=PROMPT + ROOM) if cache is None else cache
        self.logits: Tensor = model(ids, past_key_values=self.cache, logits_to_keep=1).logits

    def read_others(self) -> None:
        """From now on other tokens are read, where the first were."""
        self.tokens.copy_(self.others)

    def __call__(self) -> None:
        for token in self.tokens.unbind():
            self.logits = self.step(token, past_key_values=self.cache).logits


def difference(mine: Tensor, model: Any, batch: int, device: str, before: int, after: int) -> float | str:
    """‖mine − theirs‖ / ‖theirs‖, theirs being the logits of plain calls: so many of the first tokens, then of the others."""
    decode = Decoding(model, batch, device)
    for _ in range(before):
        decode()
    decode.read_others()
    for _ in range(after):
        decode()
    theirs = decode.logits.double()
    error = float((mine.double() - theirs).norm() / theirs.norm())
    return error if error == error else FAILED
