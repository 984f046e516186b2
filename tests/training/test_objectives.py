"""Objectives against loops anybody can read, and the model's own objective found by asking it."""

from __future__ import annotations

import collections
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.refusals import refused
from torch import nn
from transformers import (
    BartConfig,
    BartForCausalLM,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    BertForPreTraining,
    BertForSequenceClassification,
    BertLMHeadModel,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from retrofit.errors import TrainingError
from retrofit.passbase.tokenization import byte_codec, codec_for
from retrofit.training.objectives import (
    IGNORED,
    Collator,
    add_loss,
    corrupt_spans,
    mask_tokens,
    objective_for,
    partition,
    reads_no_later_token,
    shift_targets,
    span_lengths,
)

VOCABULARY = 300
LAYERS: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
BART: dict[str, Any] = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
}
TEXT = "Beautiful is better than ugly. Explicit is better than implicit. Simple is better than complex."


def bert(kind: type[nn.Module] = BertForMaskedLM, **more: Any) -> nn.Module:
    return kind(BertConfig(vocab_size=VOCABULARY, **LAYERS, **more))


MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **LAYERS)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=2)),
    "bert decoder": lambda: bert(BertLMHeadModel, is_decoder=True),
    "bart decoder": lambda: BartForCausalLM(BartConfig(vocab_size=VOCABULARY, **BART)),
    "bert": bert,
    "t5": lambda: T5ForConditionalGeneration(
        T5Config(vocab_size=VOCABULARY, d_model=32, d_kv=16, d_ff=32, num_layers=2, num_heads=2)
    ),
    "bart": lambda: BartForConditionalGeneration(BartConfig(vocab_size=VOCABULARY, **BART)),
}
EXPECTED = {
    "llama": ("next token", 1),
    "gpt2": ("next token", 1),
    "bert decoder": ("next token", 1),
    "bart decoder": ("next token", 0),  # its loss leaves the shifting to whoever makes the labels
    "bert": ("masked tokens", 0),
    "t5": ("span corruption", 0),
    "bart": ("span corruption", 0),
}


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def negative_log(logits: torch.Tensor, target: int) -> float:
    """−log softmax(logits)[target], by the definition."""
    values = logits.double().tolist()
    top = max(values)
    return math.log(sum(math.exp(value - top) for value in values)) + top - values[target]


@given(length=st.integers(2, 400), seed=st.integers(0, 2**30))
@settings(max_examples=80, deadline=None)
def test_span_corruption_keeps_the_whole_text(length: int, seed: int) -> None:
    """Putting each span of the target in the place of its sentinel gives the text back."""
    ids = torch.randint(0, 1000, (length,), generator=seeded(seed))
    sentinels, end = list(range(2000, 1900, -1)), 1
    inputs, targets = (part.tolist() for part in corrupt_spans(ids, seeded(seed + 1), sentinels, end))
    assert inputs[-1] == targets[-1] == end
    spans: dict[int, list[int]] = {}
    for token in targets[:-1]:
        if token in sentinels:
            spans[token] = current = []
        else:
            current.append(token)
    rebuilt: list[int] = []
    for token in inputs[:-1]:
        rebuilt += spans.pop(token) if token in sentinels else [token]
    assert rebuilt == ids.tolist()
    assert not spans


@given(length=st.integers(8, 2000), seed=st.integers(0, 2**30))
@settings(max_examples=80, deadline=None)
def test_span_corruption_hides_fifteen_percent_in_spans_of_three(length: int, seed: int) -> None:
    hidden, shown = span_lengths(length, seeded(seed))
    assert len(hidden) == len(shown)
    assert min(hidden) >= 1 and min(shown) >= 1  # no two sentinels touch
    assert sum(hidden) + sum(shown) == length
    assert abs(sum(hidden) - 0.15 * length) <= 0.5
    assert abs(len(hidden) - sum(hidden) / 3) <= 0.5 or len(hidden) == 1


def test_sentinels_are_used_in_order_and_too_few_are_an_error() -> None:
    ids = torch.arange(100)
    inputs, targets = corrupt_spans(ids, seeded(0), [205, 204, 203, 202, 201], None)
    assert [token for token in inputs.tolist() if token > 200] == [205, 204, 203, 202, 201]
    assert [token for token in targets.tolist() if token > 200] == [205, 204, 203, 202, 201]
    with refused(TrainingError, "100 tokens", "5 spans", "4 sentinels", "--length", option="length"):
        corrupt_spans(ids, seeded(0), [205, 204, 203, 202], None)


def test_every_partition_is_equally_likely() -> None:
    generator, draws = seeded(0), 6000
    counts = collections.Counter(tuple(partition(5, 3, generator)) for _ in range(draws))
    every = {(a, b, 5 - a - b) for a in range(1, 4) for b in range(1, 5 - a)}
    assert set(counts) == every
    expected, spread = draws / len(every), math.sqrt(draws / len(every))
    assert all(abs(count - expected) < 5 * spread for count in counts.values())


@given(length=st.integers(2, 300), seed=st.integers(0, 2**30))
@settings(max_examples=80, deadline=None)
def test_masking_hides_fifteen_percent_and_says_what_was_there(length: int, seed: int) -> None:
    plain, mask = range(10, 50), 7
    ids = torch.randint(10, 50, (length,), generator=seeded(seed))
    corrupted, targets = mask_tokens(ids, seeded(seed + 1), mask=mask, plain=plain)
    hidden = 0
    for before, now, target in zip(ids.tolist(), corrupted.tolist(), targets.tolist(), strict=True):
        if target == IGNORED:
            assert now == before
        else:
            hidden += 1
            assert target == before
            assert now == mask or now in plain
    assert hidden == max(1, round(0.15 * length))


def test_of_the_hidden_tokens_eighty_percent_are_masked_ten_random_ten_kept() -> None:
    ids = torch.full((100_000,), 10)
    corrupted, targets = mask_tokens(ids, seeded(0), mask=7, plain=range(10, 1010))
    shares = [float((corrupted[targets != IGNORED] == value).float().mean()) for value in (7, 10)]
    assert shares == pytest.approx([0.8, 0.1], abs=0.01)
    replaced = corrupted[(targets != IGNORED) & (corrupted != 7) & (corrupted != 10)]
    assert len(replaced.unique()) > 600  # of a thousand, each about equally often
    assert float(replaced.float().mean()) == pytest.approx(509.5, abs=25)


@given(length=st.integers(2, 30), shift=st.integers(0, 1))
@settings(max_examples=30, deadline=None)
def test_labels_stand_where_the_loss_looks_for_them(length: int, shift: int) -> None:
    targets = torch.arange(length)
    labels = shift_targets(targets, shift)
    assert len(labels) == length
    for place in range(length - shift):
        assert labels[place + shift] == targets[place]
    assert all(labels[place] == IGNORED for place in range(shift))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_asked_for_its_objective(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().to(dtype)
    codec = codec_for(model)
    objective = objective_for(model, codec, codec.encode(TEXT)[:64].long())
    assert (objective.name, objective.shift) == EXPECTED[name]  # type: ignore[attr-defined]
    assert model.training


@pytest.mark.parametrize("name", MODELS)
def test_the_loss_of_the_model_is_the_loss_of_the_objective(name: str) -> None:
    """The model's own loss on the collated labels equals a loop over what the objective says is to be predicted where."""
    torch.manual_seed(1)
    model = MODELS[name]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)  # so that outputs at neighbouring places differ
    codec = codec_for(model)
    ids = codec.encode(TEXT)[:48].long()
    objective = objective_for(model, codec, ids)
    batch = Collator(objective)([{"ids": ids, "seed": 3}])
    with torch.no_grad():
        loss = float(model(**batch).loss)
        logits = model(**{key: value for key, value in batch.items() if key != "labels"}).logits[0]
    if objective.name == "next token":
        wanted = {place: int(ids[place + 1]) for place in range(len(ids) - 1)}
        assert torch.equal(batch["input_ids"][0], ids)
    elif objective.name == "masked tokens":
        _, targets = mask_tokens(ids, seeded(3), mask=codec.mask, plain=codec.plain)
        wanted = {place: int(target) for place, target in enumerate(targets) if target != IGNORED}
    else:
        _, targets = corrupt_spans(ids, seeded(3), codec.sentinels, codec.end)
        wanted = {place: int(target) for place, target in enumerate(targets)}
        start = {"t5": 0, "bart": 2}[name]  # T5 starts its decoder from padding, BART from the end of a text
        assert batch["decoder_input_ids"][0].tolist() == [start, *targets.tolist()[:-1]]
    expected = sum(negative_log(logits[place], target) for place, target in wanted.items()) / len(wanted)
    assert loss == pytest.approx(expected, rel=1e-4)


class Windowed(nn.Module):
    """Each output sees its own token and `ahead` later ones; the loss compares with the label at the same place."""

    def __init__(self, ahead: int) -> None:
        super().__init__()
        self.ahead, self.table = ahead, nn.Embedding(VOCABULARY, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        logits = self.table(input_ids)
        if self.ahead:
            later = torch.cat([logits[:, self.ahead :], torch.zeros_like(logits[:, : self.ahead])], 1)
            logits = logits + 0.01 * later
        if labels is None:
            return (logits,)
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED), logits


@pytest.mark.parametrize(("ahead", "name"), [(0, "next token"), (1, "masked tokens")])
def test_one_token_of_looking_ahead_is_seen(ahead: int, name: str) -> None:
    """Models that are no transformers models and return tuples are asked in the same way."""
    torch.manual_seed(0)
    objective = objective_for(Windowed(ahead), byte_codec(VOCABULARY, {}), torch.arange(40))
    assert (objective.name, objective.shift) == (name, 0)  # type: ignore[attr-defined]


def test_a_causal_mask_that_leaks_is_not_causal() -> None:
    torch.manual_seed(0)
    model = MODELS["llama"]().eval()
    window = torch.arange(3, 35)
    assert reads_no_later_token(model, window, range(3, 259))
    hook = model.get_submodule("model.layers.1.self_attn").register_forward_hook(
        lambda module, args, output: (output[0] + 1e-3 * output[0].mean(1, keepdim=True), *output[1:])
    )
    assert not reads_no_later_token(model, window, range(3, 259))
    hook.remove()
    assert reads_no_later_token(model, window, range(3, 259))


@pytest.mark.parametrize(
    ("model", "code", "named"),
    [
        (lambda: bert(BertModel), "no-loss", "BertModel"),
        (lambda: bert(BertForPreTraining), "no-loss", "BertForPreTraining"),
        (lambda: bert(BertForSequenceClassification), "no-logits", "64 tokens"),
        (lambda: bert(max_position_embeddings=32), "too-long", "--length"),
        (lambda: add_loss(nn.Embedding(VOCABULARY, 8)), "no-loss", "Embedding"),
        (lambda: add_loss(nn.Bilinear(2, 2, 2)), "no-loss", "Bilinear"),
    ],
    ids=["no head", "half a loss", "no logits a token", "too long", "no language model", "no token ids"],
)
def test_a_model_without_a_loss_is_refused_with_the_reason(model: Any, code: str, named: str) -> None:
    with refused(TrainingError, named, code=code):
        objective_for(model(), byte_codec(VOCABULARY, {}), torch.arange(64))
