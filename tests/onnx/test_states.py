"""Caches that hold more than keys and values are exported as states, one token a step; sizes that code fixes are refused."""

from __future__ import annotations

import pytest
import torch
import transformers
from support import tiny_models
from support.onnx_files import decode_greedily
from support.refusals import refused
from torch import nn
from torch.nn import functional as F

import retrofit
from retrofit.errors import CaptureError, RetrofitError
from retrofit.numerics.distances import distance
from retrofit.onnx.exporter import plan_export
from retrofit.onnx.exporter.cache_states import growth_axes, new_like
from retrofit.onnx.exporter.export_parts import PAST_KEY_VALUES, Decoder, OnnxSession

NEW = 4  # tokens decoded
SIZES = {"vocab_size": tiny_models.VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2}


def windows():
    """A layer with the window of a convolution, and one with keys and values."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 24, "max_position_embeddings": 32}
    config = transformers.Lfm2Config(**SIZES, **heads, layer_types=["conv", "full_attention"])
    return tiny_models.built(config, transformers.Lfm2ForCausalLM)


def recurrence():
    """Layers with the state of a recurrence, in a cache of another name; a mask is of the step's tokens."""
    config = transformers.MambaConfig(**SIZES, state_size=4, intermediate_size=32, time_step_rank=4)
    return tiny_models.built(config, transformers.MambaForCausalLM)


def sums():
    """A layer with a sum that the cache itself holds, apart from its list of layers, and one with keys and values."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 24, "max_position_embeddings": 32}
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "block_size": 4}
    config = transformers.MiniMaxConfig(**SIZES, **heads, **experts, layer_types=["linear_attention", "full_attention"])
    return tiny_models.built(config, transformers.MiniMaxForCausalLM)


MADE = {"windows": windows, "recurrence": recurrence, "sums": sums}
FIXED = {"windows": "0.conv", "recurrence": "0.conv", "sums": "0.linear_cache"}  # a state of a fixed size


def prompt() -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and their mask, one row padded on the left."""
    ids = torch.randint(3, tiny_models.VOCABULARY, (2, 6), generator=torch.Generator().manual_seed(4))
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    return ids, mask


def generated(model) -> torch.Tensor:
    ids, mask = prompt()
    how = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    model.generation_config.eos_token_id = None
    return model.generate(ids, attention_mask=mask, **how)


def part_of(model) -> Decoder:
    ids, _ = prompt()
    (part,) = plan_export(model, {"input_ids": ids}, "past").parts
    assert isinstance(part, Decoder)
    return part


@torch.no_grad()
def stepped(part: Decoder) -> torch.Tensor:
    """The greedy tokens after the prompt, one token a step."""
    tokens, mask = prompt()
    states = part.past(tokens[:, :0])
    for end in range(1, tokens.shape[1] + NEW):
        numbers = (mask[:, :end].cumsum(-1) - 1).clamp(min=0)[:, -1:]
        given = {"input_ids": tokens[:, end - 1 : end], "attention_mask": mask[:, :end], "position_ids": numbers}
        logits, *after = part({**{name: given[name] for name in ("input_ids", *part.extras)}, **states})
        states = {PAST_KEY_VALUES + name: value for name, value in zip(part.states, after, strict=True)}
        if end == tokens.shape[1]:
            new = logits[:, -1].argmax(-1, keepdim=True)
            tokens, mask = torch.cat([tokens, new], 1), torch.cat([mask, torch.ones_like(new)], 1)
    return tokens


@pytest.mark.parametrize("form", MADE)
def test_one_token_a_step_gives_the_tokens_of_generate(form):
    model = MADE[form]()
    part = part_of(model)
    assert "sequence_length" not in part.sizes and FIXED[form] in part.states
    assert torch.equal(stepped(part), generated(model))


@pytest.mark.long
@pytest.mark.parametrize("form", MADE)
def test_one_token_a_step_goes_out_and_comes_back(form, tmp_path):
    model = MADE[form]()
    made = retrofit.export_onnx(model, tmp_path / "model.onnx", "past")
    running = OnnxSession(made.files[0].path, 1)
    assert running.tokens_per_step == 1 and running.inputs[f"past_key_values.{FIXED[form]}"].shape[0] == "batch_size"
    ids, mask = prompt()
    assert torch.equal(decode_greedily(running, ids, NEW, mask), generated(model))
    imported = retrofit.from_onnx(made.files[0].path)
    given = {"input_ids": ids[:, :1], "attention_mask": mask[:, 2:3], "position_ids": torch.zeros(2, 1, dtype=torch.long)}
    with torch.no_grad():
        found = imported(**{name: value for name, value in given.items() if name in running.inputs})
        assert distance(found["logits"], model(input_ids=ids[:, :1]).logits) <= 1e-4


def test_a_state_grows_with_each_token_or_keeps_its_size():
    def states(tokens: int, odd: int) -> dict[str, torch.Tensor]:
        return {"0.indexer_keys": torch.zeros(2, tokens, 4), "0.conv": torch.zeros(2, 4, 3), "0.odd": torch.zeros(2, odd)}

    assert growth_axes({6: states(6, 5), 7: states(7, 5), 12: states(12, 5)}) == {"0.indexer_keys": 1}
    with pytest.raises(CaptureError) as raised:
        growth_axes({6: states(6, 1), 7: states(7, 1), 12: states(12, 3)})
    assert "0.odd" in raised.value.why


def test_a_cache_layer_that_forgets_what_it_is_made_of_is_refused():
    class Layer:
        def __init__(self, config, **more):
            self.window = config

    with pytest.raises(CaptureError, match="Layer") as raised:
        new_like(Layer(3))
    assert "config" in raised.value.why


def test_what_an_encoder_returns_is_of_its_own_kind():
    heads = {"num_heads": 2, "d_kv": 8, "d_model": 16, "d_ff": 24, "num_layers": 2, "num_decoder_layers": 2, "num_experts": 2}
    config = transformers.SwitchTransformersConfig(vocab_size=tiny_models.VOCABULARY, decoder_start_token_id=0, **heads)
    model = tiny_models.built(config, transformers.SwitchTransformersForConditionalGeneration)
    ids, _ = prompt()
    encoder, first, _ = plan_export(model, {"input_ids": ids, "decoder_input_ids": ids}, "past").parts
    given, source = first.example(first.sizes), encoder.example(encoder.sizes)
    with torch.no_grad():
        logits, *_ = first(given)
        whole = model(**source, decoder_input_ids=given["input_ids"]).logits
    assert distance(logits, whole) <= 1e-5


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.mix = nn.Embedding(19, 8), nn.Linear(8, 6)


class Pieces(Plain):
    """Adds up the tokens in pieces of 16, one piece after another."""

    def forward(self, tokens):
        length = tokens.shape[1]
        x = F.pad(self.table(tokens), (0, 0, 0, -length % 16))
        x = x.reshape(tokens.shape[0], -1, 16, 8)
        sums, carried = torch.zeros_like(x), torch.zeros_like(x[:, 0, 0])
        for piece in range((length + 15) // 16):
            sums[:, piece] = x[:, piece].cumsum(1) + carried[:, None]
            carried = sums[:, piece, -1]
        return self.mix(sums.reshape(tokens.shape[0], -1, 8)[:, :length])


class Bent(Plain):
    """Looks up biases from the end of a table, of which one place serves all: how much is cut off depends on the length."""

    def forward(self, tokens):
        table = torch.arange(64.0)[None]
        bias = table[max(0, 1 - tokens.shape[1]) :, max(0, 64 - tokens.shape[1]) :]
        return self.mix(self.table(tokens)) + bias[..., None]


class Choosy(Plain):
    """Keeps the six largest numbers of a row where there are more."""

    def forward(self, tokens):
        x = self.mix(self.table(tokens)) + 0.01 * torch.arange(tokens.shape[1])[:, None]
        if tokens.shape[1] > 6:
            x = x * torch.zeros_like(x).scatter(1, torch.topk(x, 6, dim=1).indices, 1.0)
        return x


class Pooled(Plain):
    """Takes the largest of neighbouring tokens, zeros before the first and after the last."""

    def forward(self, tokens):
        padded = F.pad(self.mix(self.table(tokens))[:, None] - 5.0, (0, 0, 1, 1), value=0.0)
        return F.max_pool2d(padded, (3, 1), stride=1)[:, 0]


class Turned(Plain):
    """Turns pairs of numbers as complex ones, by an angle for each place and pair."""

    def forward(self, tokens):
        x = self.table(tokens)
        angles = torch.arange(tokens.shape[1])[:, None] * torch.tensor([1.0, 0.3])
        turns = torch.polar(torch.ones_like(angles), angles)
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], 2, 2, 2)) * turns[:, None]
        return self.mix(torch.view_as_real(pairs).flatten(2))


def test_what_runs_over_pieces_is_refused_with_the_length_that_it_would_fail_at(tmp_path):
    with pytest.raises(CaptureError, match=r"\b17\b|\bvalues of tensors\b"):
        retrofit.export_onnx(Pieces(), tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


def goes_out(model, path, lengths):
    """The model is a file that computes what it does at these lengths."""
    retrofit.export_onnx(model, path, fuse=False)
    running = OnnxSession(path, 1)
    for length in lengths:
        tokens = torch.randint(19, (3, length))
        with torch.no_grad():
            assert distance(running({"tokens": tokens})["output"], model(tokens)) <= 1e-4


@pytest.mark.first(1)
@pytest.mark.parametrize("kind", [Bent, Choosy, Pooled, pytest.param(Turned, marks=pytest.mark.long)])
def test_what_torch_alone_stumbles_over_goes_out(kind, tmp_path):
    goes_out(kind(), tmp_path / "model.onnx", (1, 40))


def test_a_model_that_takes_rows_in_groups_is_refused_before_it_is_traced(tmp_path):
    class Grouped(Plain):
        def forward(self, tokens):
            return self.mix(self.table(tokens.reshape(-1, 2, tokens.shape[1])).sum(1))

    with refused(CaptureError, "Grouped", "batch_size 3", code="does-not-run"):
        retrofit.export_onnx(Grouped(), tmp_path / "model.onnx")


def test_a_graph_of_fixed_sizes_is_refused_with_how_to_get_one_of_dynamic_sizes(tmp_path):
    program = torch.export.export(nn.Sequential(nn.Embedding(19, 8), nn.Linear(8, 6)).eval(), (torch.randint(19, (2, 7)),))
    torch.export.save(program, tmp_path / "model.pt2")
    with refused(CaptureError, "2", "dynamic_shapes=", code="does-not-run"):
        retrofit.export_onnx(retrofit.load(tmp_path / "model.pt2"), tmp_path / "model.onnx")


def test_a_model_that_wants_some_tokens_goes_out_for_these_and_more(tmp_path):
    class Neighbours(Plain):
        def forward(self, tokens):
            x = self.mix(self.table(tokens))
            assert x.shape[1] > 2
            return x[:, 2:] - x[:, :-2]

    goes_out(Neighbours(), tmp_path / "model.onnx", (3, 40))


class Growing(Plain):
    """Makes a longer table where one is needed: in a file it has an end, at which ONNX Runtime raises."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Buffer(torch.arange(32.0), persistent=False)

    def forward(self, tokens):
        if tokens.shape[1] > self.places.shape[0]:
            self.places = torch.arange(2.0 * tokens.shape[1])
        places = self.places.index_select(0, torch.arange(tokens.shape[1]))
        return self.mix(self.table(tokens) + places[:, None])


def test_a_table_that_would_grow_goes_out_as_long_as_it_is(tmp_path):
    model = Growing()
    retrofit.export_onnx(model, tmp_path / "model.onnx", fuse=False)
    running = OnnxSession(tmp_path / "model.onnx", 1)
    tokens = torch.randint(19, (2, 32))
    with torch.no_grad():
        assert distance(running({"tokens": tokens})["output"], model(tokens)) <= 1e-4
    with refused(RetrofitError, code="does-not-run"):
        running({"tokens": torch.randint(19, (2, 33))})


def test_a_branch_on_values_is_refused_with_its_line(tmp_path):
    class Choosing(Plain):
        def forward(self, tokens):
            x = self.table(tokens)
            return self.mix(x if x.sum() > 0 else -x)

    with pytest.raises(CaptureError) as raised:
        retrofit.export_onnx(Choosing(), tmp_path / "model.onnx")
    assert "x if x.sum() > 0" in raised.value.why
