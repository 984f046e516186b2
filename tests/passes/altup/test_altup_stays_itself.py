"""A model with AltUp in it is still the model of its library: it generates, pads, copies, saves and answers as it did."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import transformers
from support import retrofitted, zoo
from support.refusals import refused
from support.retrofitted import CAUSAL, FORMS, RECURRENT, SEQ2SEQ

import retrofit
from retrofit.errors import DoesNotFitError
from retrofit.surgery import transformers_bookkeeping

NEW = 6
PAD = 0
AUTO = {
    "causal": transformers.AutoModelForCausalLM,
    "seq2seq": transformers.AutoModelForSeq2SeqLM,
    "masked": transformers.AutoModelForMaskedLM,
    "image": transformers.AutoModelForImageClassification,
}


# Generation


def prompts(model, rows=2, length=7):
    return torch.randint(16, 80, (rows, length), generator=torch.Generator().manual_seed(1))


def generate(model, ids, **how):
    """Tokens of a fixed number, drawn with a fixed seed."""
    torch.manual_seed(11)
    given = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": PAD, **how}
    return model.generate(ids, attention_mask=given.pop("attention_mask", torch.ones_like(ids)), **given)


WAYS = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 20, "temperature": 1.5},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
}


@pytest.mark.first(6)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", CAUSAL + SEQ2SEQ)
def test_generation_with_a_cache_is_generation_without(form, way):
    model = retrofitted.trained(form)
    ids = prompts(model)
    how = {**WAYS[way], "return_dict_in_generate": True, "output_logits": True}
    cached, full = (generate(model, ids, use_cache=use_cache, **how) for use_cache in (True, False))
    assert torch.equal(cached.sequences, full.sequences)
    assert len(cached.logits) == NEW
    for one, other in zip(cached.logits, full.logits, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


@pytest.mark.first(4)
@pytest.mark.parametrize("form", [form for form in CAUSAL + SEQ2SEQ if form not in RECURRENT])
def test_a_static_cache_gives_the_same_tokens(form):
    model = retrofitted.trained(form)
    ids = prompts(model)
    assert torch.equal(generate(model, ids, cache_implementation="static"), generate(model, ids))


@pytest.mark.first(4)
@pytest.mark.parametrize("form", CAUSAL)
def test_left_padding_does_not_change_a_row(form):
    model = retrofitted.trained(form)
    short, long = prompts(model, rows=1, length=4), prompts(model, rows=1, length=9)
    batch = torch.cat([torch.nn.functional.pad(short, (5, 0), value=PAD), long])
    mask = torch.ones_like(batch)
    mask[0, :5] = 0
    together = generate(model, batch, attention_mask=mask)
    assert torch.equal(together[:1, 9:], generate(model, short)[:, 4:])
    assert torch.equal(together[1:, 9:], generate(model, long)[:, 9:])


@pytest.mark.first(2)
@pytest.mark.parametrize("form", ["llama", "gpt2", "mixtral", "t5"])
def test_assisted_generation_gives_the_same_tokens(form):
    model, draft = retrofitted.trained(form), retrofitted.dense(form)
    ids = prompts(model, rows=1)
    expected = generate(model, ids)
    assert torch.equal(generate(model, ids, assistant_model=draft), expected)
    assert torch.equal(generate(model, ids, prompt_lookup_num_tokens=2), expected)
    assert torch.equal(generate(draft, ids, assistant_model=model), generate(draft, ids))


# What it shows of itself


@pytest.mark.first(5)
@pytest.mark.parametrize("form", [form for form in FORMS if form != "mamba"])  # mamba's own loop collects the stream instead
def test_hidden_states_are_those_of_the_layers(form):
    """As many as before: what the first layer works on, and what each returns, d wide; the exact start's are the dense model's."""
    dense, model, given = retrofitted.dense(form), retrofitted.started(form), retrofitted.inputs(form)
    for one in (dense, model):
        one.set_attn_implementation("eager")
    with torch.no_grad():
        before, after = (one(**given, output_hidden_states=True, output_attentions=True) for one in (dense, model))
    names = [name for name in before if name.endswith(("hidden_states", "attentions")) and before[name]]
    assert len(names) >= 2
    for name in names:
        assert len(after[name]) == len(before[name])
        shown = list(zip(before[name], after[name], strict=True))
        for one, other in shown if name.endswith("attentions") else shown[:-1]:
            torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-4)
        *lead, width = before[name][-1].shape
        assert after[name][-1].shape[:-1] == torch.Size(lead)
        assert after[name][-1].shape[-1] % width == 0  # the last one is what the head reads: K·d wide where the head is


# Copies


@pytest.mark.parametrize("form", ["llama", "gpt2", "mixtral", "t5", "albert", "vit"])
def test_a_copy_is_another_model(form):
    model, given = retrofitted.trained(form), retrofitted.inputs(form)
    expected = retrofitted.logits(model, given)
    pickled = io.BytesIO()
    torch.save(model, pickled)
    pickled.seek(0)
    for copied in (copy.deepcopy(model), torch.load(pickled, weights_only=False), pickle.loads(pickle.dumps(model))):
        assert torch.equal(retrofitted.logits(copied, given), expected)
        assert retrofit.recipe(copied) == retrofit.recipe(model) == (FORMS[form][1],)
        with torch.no_grad():
            for tensor in (*copied.parameters(), *copied.buffers()):
                tensor.zero_()
        assert not torch.equal(retrofitted.logits(copied, given), expected)
        assert torch.equal(retrofitted.logits(model, given), expected)


@pytest.mark.parametrize("form", ["llama", "gpt2", "t5", "bert", "albert", "vit"])
def test_the_model_changes_precision(form):
    model, given = retrofitted.trained(form), retrofitted.inputs(form)
    expected = retrofitted.logits(model, given)
    double = {key: value.double() if value.is_floating_point() else value for key, value in given.items()}
    torch.testing.assert_close(retrofitted.logits(copy.deepcopy(model).double(), double).float(), expected, rtol=1e-4, atol=1e-4)
    half = copy.deepcopy(model).half()
    assert {tensor.dtype for tensor in (*half.parameters(), *half.buffers()) if tensor.is_floating_point()} == {torch.float16}
    half = {key: value.half() if value.is_floating_point() else value for key, value in given.items()}
    torch.testing.assert_close(
        retrofitted.logits(copy.deepcopy(model).half(), half).float(), expected, rtol=0.05, atol=0.05 * float(expected.abs().max())
    )


# Embeddings and heads


def tied(model):
    return model.get_output_embeddings().weight is model.get_input_embeddings().weight


WORDS = ("llama", "llama-recycled", "gpt2", "cohere", "gemma2", "t5", "bart", "bert", "albert")


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("form", "rows"),
    [("llama", 80), ("llama-recycled", 128), ("gpt2", 80), ("cohere", 128), ("gemma2", 128), ("t5", 128), ("albert", 80)],
)
def test_the_vocabulary_grows_and_shrinks(form, rows, tmp_path):
    model, given = retrofitted.trained(form), retrofitted.inputs(form)  # the ids drawn are below 80
    expected = retrofitted.logits(model, given)
    model.resize_token_embeddings(rows)
    assert tied(model) == tied(retrofitted.original(form)) == tied(retrofitted.dense(form))
    resized = retrofitted.logits(model, given)
    assert resized.shape[-1] == rows
    both = min(rows, expected.shape[-1])
    torch.testing.assert_close(resized[..., :both], expected[..., :both])
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert tied(loaded) == tied(model)
    assert torch.equal(retrofitted.logits(loaded, given), resized)
    if model.can_generate():
        assert generate(loaded, given["input_ids"], eos_token_id=None).shape[0] == 2


@pytest.mark.parametrize("form", WORDS)
def test_ids_and_their_embeddings_give_the_same(form):
    model, given = retrofitted.trained(form), retrofitted.inputs(form)
    expected = retrofitted.logits(model, given)
    table = model.get_input_embeddings()
    embedded = {**given, "inputs_embeds": table(given["input_ids"])}
    del embedded["input_ids"]
    assert torch.equal(retrofitted.logits(model, embedded), expected)
    was = tied(model)
    model.set_input_embeddings(copy.deepcopy(table))
    model.tie_weights()
    assert tied(model) == was
    assert torch.equal(retrofitted.logits(model, given), expected)


@pytest.mark.parametrize("form", ["llama", "t5", "mixtral"])
def test_embeddings_of_the_dense_width_are_refused(form):
    model, given = retrofitted.trained(form), retrofitted.inputs(form)
    narrow = {**given, "inputs_embeds": retrofitted.dense(form).get_input_embeddings()(given["input_ids"])}
    del narrow["input_ids"]
    with refused(DoesNotFitError, "64", "128") as error:
        model(**narrow)
    assert "get_input_embeddings" in error.value.remedy
    model.set_input_embeddings(retrofitted.dense(form).get_input_embeddings())
    with pytest.raises(DoesNotFitError):
        model(**given)


@pytest.mark.first(1)
@pytest.mark.parametrize("form", ["llama-hop", "gpt2", "cohere", "mixtral", "bart", "bert", "albert", "vit"])
def test_ties_and_outputs_survive_saving_and_loading(form, tmp_path):
    model, given = retrofitted.trained(form), retrofitted.inputs(form)
    groups = transformers_bookkeeping.shared_names(model.named_parameters(remove_duplicate=False))
    expected = retrofitted.logits(model, given)
    model.to(torch.float64).to(torch.float32)
    assert transformers_bookkeeping.shared_names(model.named_parameters(remove_duplicate=False)) == groups
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    loaded, info = AUTO[FORMS[form][0].split("/")[0]].from_pretrained(tmp_path, device_map="cpu", output_loading_info=True)
    assert not any(info.values())
    assert transformers_bookkeeping.shared_names(loaded.named_parameters(remove_duplicate=False)) == groups
    assert torch.equal(retrofitted.logits(loaded, given), expected)
    if form in ("gpt2", "albert"):
        low = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16).state_dict()
        for name, tensor in model.state_dict().items():
            assert torch.equal(low[name], tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor), name


@pytest.mark.first(1)
@pytest.mark.parametrize("name", ["seq2seq/t5", "seq2seq/bart", "causal/llama"])
def test_extra_columns_are_projected_by_the_table_that_the_model_gives_out(name):
    entry = zoo.entry(name)
    model = zoo.build(entry)
    given = zoo.inputs(entry, model)
    retrofit.apply(model, "altup(k=3, extra=16)", verify=False)
    retrofitted.moved(model)
    expected, ids = retrofitted.logits(model, given), given["input_ids"]
    table, rest = model.get_input_embeddings(), {name: value for name, value in given.items() if name != "input_ids"}
    torch.testing.assert_close(retrofitted.logits(model, {**rest, "inputs_embeds": table(ids)}), expected)
    model.set_input_embeddings(table)
    torch.testing.assert_close(retrofitted.logits(model, given), expected)
    size = model.config.vocab_size
    model.resize_token_embeddings(size + 8)
    if tied(model):
        torch.testing.assert_close(retrofitted.logits(model, given)[..., :size], expected)
    else:
        with refused(DoesNotFitError, code="replaced", site="lm_head"):
            model(**given)
