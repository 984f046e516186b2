"""What merged attention costs over the dense encoder-decoder, and how near the dense model it begins.

First, a T5 of random weights: a training step, a prefill of the decoder, a decoding step, with one attention a layer and with two.
The models take turns in every round; a ratio is the median over the rounds of a model's time over the dense model's.

With `--start` a small BART first learns to write a sequence of letters backwards. Then every form is measured as it begins (its
loss, the divergence from the dense model's predictions, how often both rank the same letter first) and after more steps.
The last is turned from the dense function to the method's by its dial, in the first half of these steps. With `--whisper` the start
is that of Whisper tiny.en, on spoken vowels and windows of text.

    python benchmarks/merge_cross_attention.py --threads 1
    python benchmarks/merge_cross_attention.py --threads 1 --start
    python benchmarks/merge_cross_attention.py --threads 1 --whisper
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import side_by_side
import torch
from torch import Tensor, nn
from transformers import BartConfig, BartForConditionalGeneration, T5Config, T5ForConditionalGeneration

import retrofit
from retrofit.passes.merge_cross_attention.merged_layer import OtherTokens

SPEC = "merge-cross-attention(attentions={}, weight={})"
FORMS = {
    "attentions=1": (1, 1.0),
    "attentions=2": (2, 1.0),
    "attentions=2, weight=0.1": (2, 0.1),
    "attentions=2, weight=0.01": (2, 0.01),
}
DIAL = "attentions=2, turned by the dial"
LETTERS, FIRST, LENGTH, BEGIN = 24, 4, 12, 2  # of the sequences that are written backwards


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--source", type=int, default=256, help="tokens of the encoder")
    parser.add_argument("--length", type=int, default=256, help="tokens of the decoder")
    parser.add_argument("--decode", type=int, default=16, help="tokens decoded in a round")
    parser.add_argument("--start", action="store_true", help="measure the start on a trained model instead")
    parser.add_argument("--whisper", action="store_true", help="measure the start on Whisper tiny.en instead")
    parser.add_argument("--steps", type=int, default=600, help="with --start: in which the dense model is trained")
    parser.add_argument("--more", type=int, default=200, help="with --start: steps of each form after the rewrite")
    side_by_side.add_options(parser, rounds=7)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    if options.whisper:
        whisper_start()
    elif options.start:
        toy_start(options)
    else:
        costs(options)


# ── What it costs ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def costs(options: argparse.Namespace) -> None:
    sizes = {"d_model": options.width, "d_ff": 3 * options.width, "num_layers": options.layers, "num_heads": options.width // 64}
    dense = T5ForConditionalGeneration(T5Config(vocab_size=256, decoder_start_token_id=0, dropout_rate=0.0, **sizes))
    models: dict[str, Any] = {"dense": dense.to(options.device)}
    for name in ("attentions=1", "attentions=2"):
        models[name] = retrofit.apply(copy.deepcopy(dense), SPEC.format(*FORMS[name]), verify=False)
    print(
        f"d={options.width}, 2 × {options.layers} layers, batch {options.batch}, {options.source} tokens of the encoder, ", end=""
    )
    print(f"{options.length} of the decoder, {side_by_side.conditions(options)}")
    for name, model in models.items():
        print(f"  {name:<24}{sum(one.numel() for one in model.parameters()):,} parameters")
    source = torch.randint(256, (options.batch, options.source), device=options.device)
    tokens = torch.randint(256, (options.batch, options.length), device=options.device)
    print("\na training step, forward, backward and AdamW")
    side_by_side.compare({name: training_step(model, source, tokens) for name, model in models.items()}, options)
    for model in models.values():
        model.eval().requires_grad_(False)
    print("\na prefill of the decoder, with its cache, the encoder's states given")
    side_by_side.compare({name: prefill(model, source, tokens) for name, model in models.items()}, options)
    print(f"\na token decoded after {options.length}, batch 1")
    steps = {name: decoding(model, source[:1], tokens[:1], options.decode) for name, model in models.items()}
    side_by_side.compare(steps, options, options.decode)


def training_step(model: Any, source: Tensor, tokens: Tensor) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    def step() -> None:
        model.train()
        optimizer.zero_grad(set_to_none=True)
        model(input_ids=source, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()

    return step


def prefill(model: Any, source: Tensor, tokens: Tensor) -> Callable[[], None]:
    with torch.no_grad():
        encoded = model.get_encoder()(source)

    @torch.no_grad()
    def run() -> None:
        model(encoder_outputs=encoded, decoder_input_ids=tokens, use_cache=True)

    return run


def decoding(model: Any, source: Tensor, tokens: Tensor, count: int) -> Callable[[], None]:
    """Decodes some tokens, always after the same ones."""
    with torch.no_grad():
        encoded = model.get_encoder()(source)
        cache = model(encoder_outputs=encoded, decoder_input_ids=tokens, use_cache=True).past_key_values

    @torch.no_grad()
    def decode() -> None:
        for _ in range(count):
            model(encoder_outputs=encoded, decoder_input_ids=tokens[:, :1], past_key_values=cache, use_cache=True)
        cache.crop(-count)

    return decode


# ── How near it begins ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def toy_start(options: argparse.Namespace) -> None:
    sizes = {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    given = {"vocab_size": FIRST + LETTERS, "max_position_embeddings": 64, "dropout": 0.0, "decoder_start_token_id": BEGIN}
    config = BartConfig(**given, **sizes, **heads)
    dense = BartForConditionalGeneration(config)
    train(dense, options.steps, seed=1)
    held_out = batch(256, seed=99)
    print(f"sequences of {LENGTH} letters, backwards; loss in nats a letter, {side_by_side.conditions(options)}")
    print(f"  {'':<34}{'loss':>8}{'KL':>8}{'top-1':>8}{f'loss after {options.more} steps':>24}", flush=True)
    row("dense", dense, dense, held_out, trained(dense, options.more, dial=False))
    for name, form in FORMS.items():
        model = retrofit.apply(copy.deepcopy(dense), SPEC.format(*form), verify=False)
        row(name, model, dense, held_out, trained(model, options.more, dial=False))
    model = retrofit.apply(copy.deepcopy(dense), SPEC.format(*FORMS["attentions=2"]), verify=False)
    after = trained(model, options.more, dial=True)
    OtherTokens().turn(model, 0.0)
    row(DIAL, model, dense, held_out, after)


def batch(count: int, seed: int) -> dict[str, Tensor]:
    letters = torch.randint(FIRST, FIRST + LETTERS, (count, LENGTH), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": letters, "labels": letters.flip(1)}


def train(model: Any, steps: int, seed: int, dial: bool = False) -> None:
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    for step in range(steps):
        if dial:
            OtherTokens().turn(model, min(1.0, 2 * step / steps))
        optimizer.zero_grad(set_to_none=True)
        model(**batch(32, seed=seed * 1_000_000 + step)).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.eval()


def trained(model: Any, steps: int, dial: bool) -> Any:
    """A copy of the model after so many steps."""
    other = copy.deepcopy(model)
    if steps:
        train(other, steps, seed=2, dial=dial)
    return other


@torch.no_grad()
def row(name: str, model: Any, dense: Any, held_out: dict[str, Tensor], after: Any) -> None:
    model.eval()
    found, before = model(**held_out), dense(**held_out)
    p, q = before.logits.log_softmax(-1), found.logits.log_softmax(-1)
    kl = float((p.exp() * (p - q)).sum(-1).mean())
    same = float((p.argmax(-1) == q.argmax(-1)).float().mean())
    print(f"  {name:<34}{float(found.loss):8.3f}{kl:8.3f}{same:8.1%}{float(after(**held_out).loss):24.4f}", flush=True)


@torch.no_grad()
def whisper_start() -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
    from support.real_models import REAL_MODELS

    whisper = REAL_MODELS["Whisper"]
    dense: Any = whisper.load().eval()
    given = whisper.held_out()
    examples = {**given[0], "decoder_input_ids": given[0]["decoder_input_ids"][:, :9]}
    batches = [
        {"encoder_outputs": dense.get_encoder()(one["input_features"]), "decoder_input_ids": one["decoder_input_ids"]}
        for one in given
    ]
    print("Whisper tiny.en on spoken vowels, windows of text to write: loss in nats a token")
    print(f"  {'':<34}{'loss':>8}{'KL':>8}{'top-1':>8}", flush=True)
    logits = [dense(**one).logits for one in batches]
    for name, form in {"dense": None, **FORMS}.items():
        model = dense
        if form is not None:
            model = retrofit.apply(copy.deepcopy(dense), SPEC.format(*form), example_inputs=examples, verify=False)
        losses, kls, same = [], [], []
        for one, before in zip(batches, logits, strict=True):
            found, ids = model(**one).logits, one["decoder_input_ids"]
            p, q = before.log_softmax(-1), found.log_softmax(-1)
            kls.append(float((p.exp() * (p - q)).sum(-1).mean()))
            same.append(float((p.argmax(-1) == q.argmax(-1)).float().mean()))
            losses.append(float(nn.functional.cross_entropy(found[0, :-1], ids[0, 1:])))
        loss, kl, agreement = (sum(one) / len(one) for one in (losses, kls, same))
        print(f"  {name:<34}{loss:8.3f}{kl:8.3f}{agreement:8.1%}", flush=True)


if __name__ == "__main__":
    main()
