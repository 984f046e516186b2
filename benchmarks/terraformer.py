"""Decoding one token with the parts of Terraformer, as in Tables 1 and 6 of Sparse is Enough in Scaling Transformers.

The paper's two models, T5s: d = 1024 with 24 decoder layers, and d = 9216, of whose 6 decoder layers 2 are here, because 6 would
need 35 GB. `per block` is the time that the decoder layers take, divided by their number: of it a model has as many as one likes.
The rows take turns in one process, batch 1, one token after CONTEXT, encoder output of CONTEXT tokens in the cache. A ratio is the
median over the rounds of the dense model's time over the row's in the same round. Weights are random, and the rows have theirs in
the same memory: they do not change the time, and a token reads far more than the caches hold. Encoders do not run in decoding.

    python benchmarks/terraformer.py --threads 1         # 14 GB; each width is kept in build/terraformer.json once it is measured
    python benchmarks/terraformer.py --threads 1 --widths 64 --rounds 3      # a rehearsal
"""

from __future__ import annotations

import argparse
import collections
import json
import statistics
import time
from pathlib import Path
from typing import Any

import side_by_side
import torch
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache, T5Config, T5ForConditionalGeneration

import retrofit

SIZES = {  # d: decoder layers, heads, columns of a head, d_ff, V, S of the attention, N of the feed-forward
    64: (2, 4, 16, 256, 512, 4, 16),
    1024: (24, 16, 64, 4096, 32128, 16, 64),
    9216: (2, 96, 96, 36864, 32128, 64, 256),
}
WIDTHS = (1024, 9216)
LOSS = 4  # S of the output head
CONTEXT = 64  # tokens
PATTERN = 1 << 22  # random numbers that the weights repeat
DENSE = "dense"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", choices=SIZES, default=WIDTHS)
    parser.add_argument("--again", action="store_true", help="measure anew what has a result already")
    parser.add_argument("--results", type=Path, default=Path("build/terraformer.json"), help="where results are kept between runs")
    side_by_side.add_options(parser, rounds=9)
    parser.set_defaults(device="cpu")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    found: dict[str, Any] = json.loads(options.results.read_text()) if options.results.exists() else {}
    for width in options.widths:
        key = f"d={width}, {options.rounds} rounds, {side_by_side.conditions(options)}"
        if options.again or key not in found:
            found[key] = measured(width, options)
            options.results.parent.mkdir(parents=True, exist_ok=True)
            options.results.write_text(json.dumps(found, indent=1))
        print(table(width, key, found[key]), flush=True)


def rows(width: int) -> dict[str, tuple[str, ...]]:
    """What each row of the table was rewritten with."""
    *_, modules, sparsity = SIZES[width]
    units, attention, loss = f"sparse-ffn(sparsity={sparsity})", f"sparse-qkv(modules={modules})", f"sparse-loss(modules={LOSS})"
    return {
        DENSE: (),
        "+ sparse FF": (units,),
        "+ sparse QKV": (attention,),
        "+ sparse FF + QKV": (attention, units),
        "+ sparse FF + QKV + loss": (attention, units, loss),
        "Terraformer": (attention, units, "recurrence", "lsh-attention(buckets=128)", "reversible", loss),
    }


@torch.inference_mode()
def measured(width: int, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds a token and a block of each row, in every round, and its parameters without the encoder."""
    memory: dict[tuple[int, int], Tensor] = {}
    decoders = {name: Decoding(width, specs, memory, options.clock) for name, specs in rows(width).items()}
    whole = side_by_side.interleaved({name: one.step for name, one in decoders.items()}, options)
    return {
        name: {"parameters": one.parameters, "token": whole[name], "block": one.blocks[-options.rounds :]}
        for name, one in decoders.items()
    }


class Decoding:
    """A model that has read CONTEXT tokens, and decodes one more in every step."""

    def __init__(self, width: int, specs: tuple[str, ...], memory: dict[tuple[int, int], Tensor], clock: str) -> None:
        layers, heads, columns, units, vocabulary, *_ = SIZES[width]
        settings = T5Config(
            d_model=width,
            d_kv=columns,
            d_ff=units,
            num_heads=heads,
            num_layers=1,
            num_decoder_layers=layers,
            vocab_size=vocabulary,
            tie_word_embeddings=False,
        )
        began = time.monotonic()
        with torch.device("meta"):
            self.model: Any = T5ForConditionalGeneration(settings).eval()
        if specs:
            retrofit.apply(self.model, *specs, verify=False)
        self.parameters = fill(self.model, memory)
        self.blocks: list[float] = []
        self.clock = time.process_time if clock == "cpu" else time.perf_counter
        self.spent = self.since = 0.0
        for block in self.model.decoder.block:
            block.register_forward_pre_hook(self.enter)
            block.register_forward_hook(self.leave)
        self.layers = layers
        self.encoded = (torch.randn(1, CONTEXT, width),)
        self.cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        self.token = torch.zeros(1, 1, dtype=torch.long)
        self.run(self.token.expand(1, CONTEXT))
        print(f"  d={width}, {' > '.join(specs) or DENSE}: ready after {time.monotonic() - began:.0f} s", flush=True)

    def run(self, ids: Tensor) -> None:
        self.model(encoder_outputs=self.encoded, decoder_input_ids=ids, past_key_values=self.cache)

    def step(self) -> None:
        """One token; the seconds that a block took are in `blocks`."""
        self.spent = 0.0
        self.run(self.token)
        self.blocks.append(self.spent / self.layers)

    def enter(self, *_: object) -> None:
        self.since = self.clock()

    def leave(self, *_: object) -> None:
        self.spent += self.clock() - self.since


def fill(model: Any, memory: dict[tuple[int, int], Tensor]) -> int:
    """All of the model but its encoder has values; how many parameters that is.

    The n-th parameter of a size is the n-th of that size in every model that `memory` is given for: they share it.
    """
    filled: dict[nn.Parameter, nn.Parameter] = {}
    counts: collections.Counter[int] = collections.Counter()
    for path, module in model.named_modules():
        if path.startswith("encoder."):
            continue
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in filled:
                place = parameter.numel(), counts[parameter.numel()]
                counts[parameter.numel()] += 1
                if place not in memory:
                    memory[place] = numbers(parameter.numel())
                filled[parameter] = nn.Parameter(memory[place].view(parameter.shape), requires_grad=False)
            module.register_parameter(name, filled[parameter])
        for name, buffer in list(module.named_buffers(recurse=False)):
            order = torch.arange(buffer.numel()).view(buffer.shape).to(buffer.dtype)
            module.register_buffer(name, torch.randn(buffer.shape) if buffer.is_floating_point() else order)
    return sum(one.numel() for one in filled)


def numbers(size: int) -> Tensor:
    """So many small random numbers, which repeat after PATTERN of them."""
    found, pattern = torch.empty(size), 0.02 * torch.randn(min(size, PATTERN))
    for part in found.split(len(pattern)):
        part.copy_(pattern[: len(part)])
    return found


def table(width: int, key: str, found: dict[str, Any]) -> str:
    """The rows: parameters of the decoder and the head, seconds a token and a block, and how much faster than dense."""
    lines = [f"\n{key}: {SIZES[width][0]} decoder layers, float32, one token after {CONTEXT}", ""]
    lines += ["| | parameters | s a token | faster | s a block | faster |", "| --- | ---: | ---: | ---: | ---: | ---: |"]
    for name, row in found.items():
        cells = [name, f"{row['parameters'] / 1e6:,.1f}M"]
        for kind in ("token", "block"):
            ratios = [mine / reference for mine, reference in zip(found[DENSE][kind], row[kind], strict=True)]
            cells += [f"{statistics.median(row[kind]):.4f}", f"{statistics.median(ratios):.2f}×"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
