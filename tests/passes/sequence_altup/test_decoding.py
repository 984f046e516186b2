"""Whole models with strided layers against loops over tokens written from the formula: padded, in chunks, cached, in beams."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import cached_decoding, tiny_models, zoo
from support.retrofitted import moved
from torch import Tensor
from transformers import DynamicCache, MistralConfig, MistralForCausalLM, StaticCache

import retrofit
from retrofit.errors import RetrofitError
from retrofit.passes import SequenceAltUp
from retrofit.sdk.modules import SLACK

LENGTH = 11
TOKENS = st.lists(st.integers(3, tiny_models.VOCABULARY - 1), min_size=LENGTH, max_size=LENGTH)


@functools.cache
def strided() -> Any:
    """Three layers of four strided, their coefficients away from the start."""
    return moved(retrofit.apply(tiny_models.llama(num_hidden_layers=4), SequenceAltUp(k=2, layers="0-2"), verify=False))


def with_k(k: int) -> Any:
    """The model with another stride, which is no part of any parameter."""
    model = strided()
    for layer in model.model.layers[:3]:
        layer.k = k
    return model


@torch.no_grad()
def by_loops(model: Any, tokens: list[int]) -> Tensor:
    """The logits of one sequence without padding, the layers inside called on anchors, the rest token by token: (T, vocabulary)."""
    x = model.model.embed_tokens(torch.tensor([tokens]))
    cos, sin = model.model.rotary_emb(x, torch.arange(len(tokens))[None])
    for layer in model.model.layers:
        if not hasattr(layer, "a1"):
            x = layer(x, position_embeddings=(cos, sin), attention_mask=None)
            continue
        kept = list(range(0, len(tokens), layer.k))
        made = layer.layer(x[:, kept], position_embeddings=(cos[:, kept], sin[:, kept]), attention_mask=None)
        rows = []
        for i in range(len(tokens)):
            anchor = i // layer.k * layer.k
            predicted = layer.a1 * x[0, i] + layer.a2 * x[0, anchor]
            predicted_there = layer.a1 * x[0, anchor] + layer.a2 * x[0, anchor]
            rows.append(predicted + layer.b * (made[0, i // layer.k] - predicted_there))
        x = torch.stack(rows)[None]
    return model.lm_head(model.model.norm(x))[0]  # type: ignore[no-any-return]


def close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-5)


@given(tokens=TOKENS, length=st.integers(1, LENGTH), k=st.integers(1, LENGTH + 4))
@settings(deadline=None, max_examples=30)
def test_a_whole_model_is_the_formula(tokens: list[int], length: int, k: int) -> None:
    """Lengths that k does not divide, and k larger than the length."""
    model = with_k(k)
    with torch.no_grad():
        close(model(torch.tensor([tokens[:length]]), use_cache=False).logits[0], by_loops(model, tokens[:length]))


@st.composite
def prompts(draw: st.DrawFn) -> tuple[Tensor, Tensor, list[int]]:
    """Rows of tokens, padded on one side or not at all, their mask, and where chunks of them end."""
    count = draw(st.integers(1, 3))
    most = draw(st.sampled_from([0, LENGTH - 1]))
    pads = [draw(st.integers(0, most)) for _ in range(count)]
    left = draw(st.booleans())
    rows = torch.tensor([draw(TOKENS) for _ in pads])
    columns = torch.arange(LENGTH)
    real = torch.stack([columns >= pad if left else columns < LENGTH - pad for pad in pads])
    ends = sorted({*draw(st.lists(st.integers(1, LENGTH - 1), max_size=5)), LENGTH})
    return rows.masked_fill(~real, 0), real, ends


@given(prompt=prompts(), k=st.integers(1, LENGTH + 2), static=st.booleans())
@settings(deadline=None, max_examples=40)
def test_chunks_of_any_size_on_any_cache_are_the_formula(prompt: Any, k: int, static: bool) -> None:
    tokens, real, ends = prompt
    model = with_k(k)
    cache: Any = StaticCache(config=model.config, max_cache_len=LENGTH + 3) if static else None
    positions = (real.long().cumsum(1) - 1).clamp(min=0)
    pieces, start = [], 0
    for end in ends:
        with torch.no_grad():
            out = model(
                tokens[:, start:end],
                attention_mask=real[:, :end].long(),
                position_ids=positions[:, start:end],
                past_key_values=cache,
                use_cache=True,
            )
        cache, start = out.past_key_values, end
        pieces.append(out.logits)
    made = torch.cat(pieces, 1)
    for row in range(len(tokens)):
        close(made[row, real[row]], by_loops(model, tokens[row, real[row]].tolist()))


@pytest.mark.parametrize("pads", [(0, 0), (0, 1)], ids=["in step", "out of step"])
def test_in_a_static_cache_every_step_has_the_same_sizes(pads: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention on a GPU is planned for each size anew; so the strided layers have one, the others another."""
    k, length, prompt = 3, 22, 5
    model = with_k(k)
    tokens = torch.randint(3, tiny_models.VOCABULARY, (2, length), generator=torch.Generator().manual_seed(0))
    real = (torch.arange(length) >= torch.tensor(pads)[:, None]).long()
    positions = (real.cumsum(1) - 1).clamp(min=0)
    cache = StaticCache(config=model.config, max_cache_len=length)
    seen: list[tuple[torch.Size, ...]] = []
    attention = torch.nn.functional.scaled_dot_product_attention

    def watched(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **given: Any) -> Tensor:
        seen.append((query.shape, key.shape, *(() if attn_mask is None else (attn_mask.shape,))))
        return attention(query, key, value, attn_mask=attn_mask, **given)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    made = []
    for start, end in [(0, prompt), *((i, i + 1) for i in range(prompt, length))]:
        given = {"attention_mask": real[:, :end], "position_ids": positions[:, start:end], "past_key_values": cache}
        with torch.no_grad():
            made.append(model(tokens[:, start:end], **given).logits)
        if end == prompt:
            seen.clear()
    assert {key[-2] for _, key, *_ in seen} == {length, -(-length // k) + max(pads)}
    assert len(set(seen)) == 2 and len(seen) > length - prompt
    for row, pad in enumerate(pads):
        close(torch.cat(made, 1)[row, pad:], by_loops(model, tokens[row, pad:].tolist()))


@given(tokens=st.lists(TOKENS, min_size=2, max_size=3), k=st.integers(1, 5), cut=st.integers(1, LENGTH - 2), data=st.data())
@settings(deadline=None, max_examples=20)
def test_beams_take_their_anchors_with_them(tokens: list[list[int]], k: int, cut: int, data: st.DataObject) -> None:
    """Rows that are swapped or doubled between two steps go on as the sequences that they are now."""
    model = with_k(k)
    rows = torch.tensor(tokens)
    chosen = torch.tensor([data.draw(st.integers(0, len(tokens) - 1)) for _ in tokens])
    with torch.no_grad():
        cache = model(rows[:, :cut], use_cache=True).past_key_values
        cache.reorder_cache(chosen)
        made = [model(rows[:, i : i + 1], past_key_values=cache).logits[:, 0] for i in range(cut, LENGTH)]
    for row, source in enumerate(chosen.tolist()):
        whole = by_loops(model, tokens[source][:cut] + tokens[row][cut:])
        close(torch.stack(made, 1)[row], whole[cut:])


@pytest.mark.first(5)
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("how", [{}, {"cache_implementation": "static"}], ids=["dynamic", "static"])
@pytest.mark.parametrize("k", [2, 5, 20])
def test_generate_finds_what_it_finds_without_a_cache(k: int, how: dict[str, Any], beams: int) -> None:
    model = with_k(k)
    tokens = torch.randint(3, tiny_models.VOCABULARY, (3, 7), generator=torch.Generator().manual_seed(k))
    mask = (torch.arange(7) >= torch.tensor([[0], [4], [1]])).long()
    given = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "num_beams": beams}
    cached = model.generate(tokens, attention_mask=mask, **given, **how)
    assert torch.equal(cached, model.generate(tokens, attention_mask=mask, **given, use_cache=False))


WINDOW = 5


@functools.cache
def windowed() -> Any:
    """Every layer strided, and attention within a window."""
    sizes = {"num_hidden_layers": 3, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = MistralConfig(vocab_size=tiny_models.VOCABULARY, sliding_window=WINDOW, initializer_range=0.3, **sizes)
    model = tiny_models.built(config, MistralForCausalLM)
    return moved(retrofit.apply(model, SequenceAltUp(k=2, layers="all"), verify=False))


@pytest.mark.parametrize("hidden", [slice(5, 6), slice(7, 9)], ids=str)
def test_tokens_hidden_behind_a_full_window_leave_the_last_correction(hidden: slice) -> None:
    """From them on rows count their anchors by themselves, some of which have left the window."""
    tokens = torch.randint(3, tiny_models.VOCABULARY, (2, 13), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    mask[:, hidden] = 0
    cached_decoding.check_mask(windowed(), tokens, mask, (5, 1, 1, 2, 1, 3))


COUNTS = st.integers(1, 9).flatmap(lambda new: st.tuples(st.just(new), st.integers(0, new)))  # computed, and removed of these


@given(rounds=st.lists(COUNTS, min_size=2, max_size=5), pad=st.integers(0, 3))
@settings(deadline=None, max_examples=15)
@torch.no_grad()
def test_tokens_that_are_taken_back_bring_their_window_back(rounds: list[tuple[int, int]], pad: int) -> None:
    """As assisted decoding does it: tokens are computed and removed behind a full window, and others follow."""
    model = windowed()
    tokens = torch.randint(3, tiny_models.VOCABULARY, (2, 60), generator=torch.Generator().manual_seed(pad))
    mask = (torch.arange(60) >= torch.tensor([[0], [pad]])).long()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()

    def compute(start: int, end: int, past: Any) -> Tensor:
        given = {"attention_mask": mask[:, :end], "position_ids": positions[:, start:end]}
        return model(input_ids=tokens[:, start:end], past_key_values=past, use_cache=past is not None, **given).logits  # type: ignore[no-any-return]

    compute(0, 16, cache)
    end = 16
    for new, removed in rounds:
        close(compute(end, end + new, cache), compute(0, end + new, None)[:, end:])
        end += new - removed
        cache.crop(-removed)


@torch.no_grad()
def test_a_window_that_cannot_be_brought_back_is_an_error() -> None:
    cache = DynamicCache(config=windowed().config)
    cache.activate_past_recording()
    windowed()(input_ids=torch.full((1, 100), 5), past_key_values=cache)
    with pytest.raises(RetrofitError) as caught:
        cache.crop(-80)
    assert str(SLACK) in caught.value.remedy


@pytest.mark.parametrize("pad", [0, 2])
@torch.no_grad()
def test_a_window_that_transformers_has_lost_count_of_is_an_error(pad: int) -> None:
    """More was removed than was computed since the last time: the next removal is counted by what is left."""
    cache = DynamicCache(config=windowed().config)
    cache.activate_past_recording()
    mask = (torch.arange(18) >= torch.tensor([[0], [pad]])).long()

    def compute(start: int, end: int) -> None:
        windowed()(input_ids=torch.full((2, end - start), 5), attention_mask=mask[:, :end], past_key_values=cache)

    for start, end, removed in ((0, 16, 0), (16, 17, 5), (12, 13, 12)):
        compute(start, end)
        cache.crop(-removed)
    compute(1, 2)
    with pytest.raises(RetrofitError) as caught:
        cache.crop(0)
    assert str(SLACK) in caught.value.remedy


@given(k=st.integers(1, 9), length=st.integers(1, 40))
@settings(deadline=None, max_examples=10)
def test_a_strided_layer_holds_one_entry_in_k(k: int, length: int) -> None:
    model = with_k(k)
    tokens = torch.full((1, length), 5)
    with torch.no_grad():
        cache = model(tokens, use_cache=True).past_key_values
    sizes = [layer.keys.nbytes + layer.values.nbytes for layer in cache.layers]
    assert sizes[:3] == [sizes[3] // length * -(-length // k)] * 3
    assert [cache.get_seq_length(index) for index in range(4)] == [length] * 4


@functools.cache
def two_attentions() -> Any:
    """A decoder whose layers hold two attentions each, which write to cache layers of their own."""
    entry = zoo.entry("causal/longcat_flash")
    model = zoo.build(entry, num_layers=2)
    return moved(retrofit.apply(model, SequenceAltUp(k=3, layers="all"), example_inputs=zoo.inputs(entry, model), verify=False))


@pytest.mark.long
@given(rows=st.lists(TOKENS, min_size=2, max_size=3), data=st.data())
@settings(deadline=None, max_examples=10)
def test_layers_with_two_attentions_decode_what_they_compute_at_once(rows: list[list[int]], data: st.DataObject) -> None:
    """Rows padded on the left, swapped and doubled, the last tokens taken back: logits of the whole without a cache."""
    model = two_attentions()
    tokens = torch.tensor(rows)
    pads = torch.tensor([0, *(data.draw(st.integers(0, 4)) for _ in rows[1:])])
    chosen = torch.tensor([data.draw(st.integers(0, len(rows) - 1)) for _ in rows])
    cut, back = data.draw(st.integers(5, LENGTH - 2)), data.draw(st.integers(0, 3))
    real = (torch.arange(LENGTH) >= pads[:, None]).long()
    tokens = torch.where(real.bool(), tokens, 0)
    positions = (real.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        cache = model(
            tokens[:, :cut], attention_mask=real[:, :cut], position_ids=positions[:, :cut], use_cache=True
        ).past_key_values
        assert {layer.keys.shape[2] for layer in cache.layers[:2]} == {-(-cut // 3)}
        cache.reorder_cache(chosen)
        tokens, real, positions = torch.cat([tokens[chosen, :cut], tokens[:, cut:]], 1), real[chosen], positions[chosen]
        if back:
            cache.crop(-back)
        made = [
            model(
                tokens[:, i : i + 1], attention_mask=real[:, : i + 1], position_ids=positions[:, i : i + 1], past_key_values=cache
            ).logits[:, 0]
            for i in range(cut - back, LENGTH)
        ]
        whole = model(tokens, attention_mask=real, position_ids=positions, use_cache=False).logits
    seen = real[:, cut - back :].bool()
    close(torch.stack(made, 1)[seen], whole[:, cut - back :][seen])
