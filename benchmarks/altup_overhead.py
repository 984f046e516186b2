"""What AltUp costs over the dense model: train step, cached decoding, activations kept. And what Gemma 3n's AltUp module costs.

    python benchmarks/altup_overhead.py --size t5-base --threads 1

T5 1.1 stacks of a few layers at their true widths, with the true vocabulary. What grows with the vocabulary, the gradient of the
token table and the head, is timed on its own: with a wide embedding both are K·d wide, whatever the depth of the model, and a few
layers would not put that in proportion. The models take turns in every round; a ratio is the median over the rounds of a model's
time over the dense model's in the same round, with the ratio of their fastest rounds in brackets: what is left where others use the
machine too.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import side_by_side
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import T5Config, T5ForConditionalGeneration
from transformers.models.gemma3n.configuration_gemma3n import Gemma3nTextConfig
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextAltUp

import retrofit
from retrofit.passes.altup.altup import AltUp

VOCABULARY = 32128
SIZES = {"t5-base": (768, 2048, 12), "t5-large": (1024, 2816, 16), "smoke": (32, 64, 2)}  # d, d_ff, heads


class GemmaAltUpLayer(nn.Module):
    """A layer between Gemma 3n's predict and correct, on a stream of its own layout, (K, batch, seq, d)."""

    def __init__(self, layer: nn.Module, width: int, k: int, depth: int, last: bool) -> None:
        super().__init__()
        config = Gemma3nTextConfig(hidden_size=width, altup_num_inputs=k, altup_active_idx=depth % k)
        self.layer, self.altup = layer, Gemma3nTextAltUp(config)
        self.k, self.active, self.first, self.last = k, depth % k, depth == 0, last
        nn.init.zeros_(self.altup.prediction_coefs.weight)
        nn.init.zeros_(self.altup.correction_coefs.weight)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        stream = torch.stack([x] * self.k) if self.first else x
        predictions = self.altup.predict(stream)
        output = self.layer(predictions[self.active], *args, **kwargs)
        corrected = self.altup.correct(predictions, output[0] if isinstance(output, tuple) else output)
        new = corrected.mean(0) if self.last else corrected
        return (new, *output[1:]) if isinstance(output, tuple) else new


def without_ends(model: nn.Module) -> nn.Module:
    """`model` without its head, and with a token table that is looked up but not trained; gradients still flow to the look-up."""
    model.lm_head = nn.Identity()
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module.num_embeddings == VOCABULARY:
            module.weight.requires_grad_(False)
            module.register_forward_hook(lambda module, args, y: y.requires_grad_() if torch.is_grad_enabled() else y)
    return model


def gemma_wrapped(model: T5ForConditionalGeneration, k: int) -> T5ForConditionalGeneration:
    for stack in (model.encoder, model.decoder):
        last = len(stack.block) - 1
        for depth, layer in enumerate(stack.block):
            stack.block[depth] = GemmaAltUpLayer(layer, model.config.d_model, k, depth, depth == last)
    return model


def build(options: argparse.Namespace) -> dict[str, nn.Module]:
    """The dense model and its rewritten copies, each without what grows with the vocabulary.

    They share their weights: two copies would differ by some percent, in whichever direction their memory happens to lie.
    """
    width, hidden, heads = SIZES[options.size]
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "d_model": width,
        "d_ff": hidden,
        "num_heads": heads,
        "d_kv": width // heads,
        "num_layers": options.layers,
        "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False,
        "dropout_rate": 0.0,
        "decoder_start_token_id": 0,
    }
    dense = T5ForConditionalGeneration(T5Config(**shape))

    def twin() -> T5ForConditionalGeneration:
        return copy.deepcopy(dense, {id(parameter): parameter for parameter in dense.parameters()})

    models: dict[str, nn.Module] = {
        "dense": dense,
        "altup recycled": retrofit.apply(twin(), AltUp(k=options.k, embedding="recycled"), verify=False),
        "altup wide": retrofit.apply(twin(), AltUp(k=options.k, embedding="wide"), verify=False),
        "gemma 3n module": gemma_wrapped(twin(), options.k),
    }
    return {
        name: without_ends(model).to(device=options.device, dtype=getattr(torch, options.dtype)) for name, model in models.items()
    }


def train_step(model: nn.Module, ids: Tensor) -> None:
    """One forward and backward pass, from the ids to what the head reads and back to the looked-up embeddings."""
    model.zero_grad(set_to_none=True)
    model(input_ids=ids, decoder_input_ids=ids).logits.float().square().mean().backward()


def decoder(model: nn.Module, ids: Tensor, tokens: int) -> Callable[[], None]:
    """Decodes `tokens` tokens with the model's cache, on an encoded input."""
    with torch.no_grad():
        encoded = model(input_ids=ids[:1], decoder_input_ids=ids[:1, :1]).encoder_last_hidden_state

    @torch.no_grad()
    def decode() -> None:
        cache = None
        for _ in range(tokens):
            cache = model(
                encoder_outputs=(encoded,), decoder_input_ids=ids[:1, :1], past_key_values=cache, use_cache=True
            ).past_key_values

    return decode


def head_step(rows: int, width: int, train: bool, options: argparse.Namespace) -> Callable[[], None]:
    """The head on its own: the logits of `rows` tokens, and with `train` their loss and its gradients."""
    like: dict[str, Any] = {"device": options.device, "dtype": getattr(torch, options.dtype)}
    weight = torch.randn(VOCABULARY, width, requires_grad=train, **like)
    x = torch.randn(rows, width, requires_grad=train, **like)
    labels = torch.randint(VOCABULARY, (rows,), device=options.device)

    def step() -> None:
        logits = F.linear(x, weight)
        if train:
            F.cross_entropy(logits.float(), labels).backward()
            x.grad = weight.grad = None

    return step


def table_step(rows: int, width: int, options: argparse.Namespace) -> Callable[[], None]:
    """The token table on its own: the look-ups of `rows` tokens by the encoder and by the decoder, and the gradient of both."""
    weight = torch.randn(VOCABULARY, width, requires_grad=True, device=options.device, dtype=getattr(torch, options.dtype))
    ids = torch.randint(VOCABULARY, (rows,), device=options.device)
    grad = torch.randn_like(weight[:rows])

    def step() -> None:
        torch.autograd.backward([F.embedding(ids, weight), F.embedding(ids, weight)], [grad, grad])
        weight.grad = None

    return step


def activation_bytes(model: nn.Module, ids: Tensor, options: argparse.Namespace) -> int:
    """Bytes a train step keeps for its backward pass (CPU: saved tensors that are no parameters; CUDA: peak above the start)."""
    if options.device == "cuda":
        train_step(model, ids)
        model.zero_grad(set_to_none=True)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        train_step(model, ids)
        return torch.cuda.max_memory_allocated() - before
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        train_step(model, ids)
    return sum(kept.values())


def report(options: argparse.Namespace) -> None:
    width = SIZES[options.size][0]
    models = build(options)
    ids = torch.randint(VOCABULARY, (options.batch, options.length), device=options.device)
    tokens = options.batch * options.length
    print(f"{options.size}, {options.layers}+{options.layers} layers, K={options.k}, {options.dtype}, ", end="")
    print(side_by_side.conditions(options))

    print(f"\ntrain step, {options.batch}×{options.length} tokens")
    steps: dict[str, Callable[[], None]] = {name: partial(train_step, model, ids) for name, model in models.items()}
    side_by_side.compare(steps, options)

    for model in models.values():
        model.eval().zero_grad(set_to_none=True)
    print("\ndecoding one token with the cache, batch 1")
    side_by_side.compare({name: decoder(model, ids, options.decode) for name, model in models.items()}, options, options.decode)

    for what, step in (
        (f"the token table on its own, training on {tokens} tokens", partial(table_step, tokens)),
        (f"the head on its own, training on {tokens} tokens", partial(head_step, tokens, train=True)),
        ("the head on its own, decoding one token", partial(head_step, 1, train=False)),
    ):
        print(f"\n{what}")
        side_by_side.compare({f"V×{k}d": step(width=k * width, options=options) for k in (1, options.k)}, options)

    print("\nkept for the backward pass")
    dense = 0
    for name, model in models.items():
        kept = activation_bytes(model.train(), ids, options)
        dense = dense or kept
        print(f"  {name:<18}{kept / 2**20:10.1f} MiB {100 * (kept / dense - 1):+8.1f} %")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="t5-base")
    parser.add_argument("--layers", type=int, default=2, help="layers in the encoder, and as many in the decoder")
    parser.add_argument("--k", type=int, default=2)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--decode", type=int, default=16, help="tokens decoded in a round")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    side_by_side.add_options(parser, rounds=7)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    report(options)


if __name__ == "__main__":
    main()
