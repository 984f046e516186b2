"""A recipe that meets another model than the one it was applied to: the same function, or a refusal, and never random weights."""

from __future__ import annotations

import copy
import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support import tiny_models
from support.refusals import refused
from torch import nn

import retrofit
from retrofit.errors import CheckpointError, DoesNotFitError
from retrofit.passbase import recipe_storage
from retrofit.passbase.protocol import AppliedTo
from retrofit.passbase.recipe_storage import tie_as
from retrofit.provenance import provenance_of

IDS = torch.arange(3, 19)[None]
SMALL = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
EXACT = [
    "altup(k=2)",
    "altup(k=2, embedding=recycled)",
    "memory(lookup=softmax)",
    "reversible",
    "shared-moe(groups=0)",
    "sum",
    "recurrence",
]
SPECS = [
    *EXACT,
    "altup(k=2, init=lockstep)",
    "sparse-ffn(sparsity=4, active=2, controller=gate)",
    "sparse-qkv(output=keep)",
    "sequence-altup(k=2)",
    "sparse-loss(modules=4)",
    "lsh-attention(chunk=4, buckets=4)",
    "shared-moe(groups=2)",
]
some = pytest.mark.first(2)


def config(**more):
    return transformers.LlamaConfig(**SMALL, num_key_value_heads=2, initializer_range=0.2, **more)


def llama(**more):
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config(**more)).eval()


def rewritten(model, spec):
    return retrofit.apply(model, spec, verify=False)


@torch.no_grad()
def gap(one, other, ids=IDS):
    return float((one(ids)[0] - other(ids)[0]).abs().max())


def reloaded(model, folder, **how):
    model.save_pretrained(folder)
    return type(model).from_pretrained(folder, **how).eval()


# Ties


def untie_head(model):
    for module in model.lm_head.modules():  # one matrix, or the two that a pass put in its place
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(parameter + 0.1 * torch.randn_like(parameter)))


def untie_table(model):
    table = model.get_input_embeddings()
    table.weight = nn.Parameter(table.weight + 0.1 * torch.randn_like(table.weight))


@pytest.mark.first(1)
@some
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("untie", [untie_head, untie_table])
@pytest.mark.parametrize("said", [True, False])
def test_what_is_untied_after_a_rewrite_is_loaded_as_it_was_saved(spec, untie, said, tmp_path):
    model = rewritten(llama(tie_word_embeddings=True), spec)
    untie(model)
    model.config.tie_word_embeddings = said
    assert gap(reloaded(model, tmp_path / "dir"), model) == 0
    assert gap(retrofit.load(retrofit.save(model, tmp_path / "model.pt")), model) == 0


def test_equal_weights_that_the_config_calls_untied_stay_apart(tmp_path):
    model = rewritten(llama(tie_word_embeddings=True), "altup(k=2)")
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    model.config.tie_word_embeddings = False
    back = reloaded(model, tmp_path)
    assert back.lm_head.weight is not back.get_input_embeddings().weight
    assert gap(back, model) == 0


def test_a_head_that_was_tied_after_a_rewrite_is_loaded_tied(tmp_path):
    model = rewritten(llama(), "altup(k=2)")
    model.lm_head.weight = model.get_input_embeddings().weight
    model.config.tie_word_embeddings = True
    model.__dict__["_tied_weights_keys"] = {"lm_head.weight": "model.embed_tokens.weight"}
    back = reloaded(model, tmp_path)
    assert back.lm_head.weight is back.get_input_embeddings().weight
    assert gap(back, model) == 0


def test_parameters_are_tied_as_told_and_no_others():
    model = nn.ModuleDict({name: nn.Linear(3, 3) for name in "abc"})
    model["b"].weight = model["a"].weight
    values = {name: parameter.clone() for name, parameter in model.named_parameters(remove_duplicate=False)}
    tie_as(model, [("b.weight", "c.weight"), ("a.bias", "missing.bias")])
    assert model["b"].weight is model["c"].weight is not model["a"].weight
    assert torch.equal(model["a"].weight, values["a.weight"]) and torch.equal(model["b"].weight, values["b.weight"])
    assert model["a"].bias is not model["b"].bias


# Another number of layers, other sizes


@some
@pytest.mark.parametrize("spec", EXACT)
@pytest.mark.parametrize("layers", [3, 2])
def test_fewer_layers_are_those_of_the_dense_model_or_refused(spec, layers, tmp_path):
    dense = reloaded(llama(), tmp_path / "dense", num_hidden_layers=layers)
    rewritten(llama(), spec).save_pretrained(tmp_path / "rewritten")
    refused = {("altup(k=2)", 3), ("altup(k=2, embedding=recycled)", 3), ("altup(k=2, embedding=recycled)", 2)}
    if (spec, layers) in refused:
        with pytest.raises(CheckpointError) as refusal:
            transformers.LlamaForCausalLM.from_pretrained(tmp_path / "rewritten", num_hidden_layers=layers)
        assert "num_hidden_layers" in refusal.value.why
    else:
        back = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "rewritten", num_hidden_layers=layers).eval()
        assert gap(back, dense) < 1e-4


def test_weights_of_layers_that_a_smaller_config_leaves_out_name_the_config(tmp_path):
    rewritten(llama(), "reversible(scheme=terraformer)").save_pretrained(tmp_path)
    with refused(CheckpointError, "num_hidden_layers", "3", "4", "config", code="other-model"):
        transformers.LlamaForCausalLM.from_pretrained(tmp_path, num_hidden_layers=3)


@some
@pytest.mark.parametrize("spec", [spec for spec in SPECS if not spec.startswith(("sum", "sparse-loss"))])
def test_more_layers_than_were_rewritten_are_refused(spec, tmp_path):
    rewritten(llama(), spec).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError) as refusal:
        transformers.LlamaForCausalLM.from_pretrained(tmp_path, num_hidden_layers=6)
    assert "num_hidden_layers" in refusal.value.why


def test_layers_grouped_otherwise_are_refused(tmp_path):
    rewritten(llama(), "shared-moe(groups=2)").save_pretrained(tmp_path)
    with refused(CheckpointError, "num_hidden_layers"):
        transformers.LlamaForCausalLM.from_pretrained(tmp_path, num_hidden_layers=3)


def test_shared_layers_called_less_often_are_refused(tmp_path):
    model = transformers.AlbertForMaskedLM(transformers.AlbertConfig(**SMALL, embedding_size=16, num_hidden_groups=1)).eval()
    rewritten(model, "memory(lookup=softmax)").save_pretrained(tmp_path)
    with refused(CheckpointError, "2 layers", "4 layers"):
        transformers.AlbertForMaskedLM.from_pretrained(tmp_path, num_hidden_layers=2)


@pytest.mark.first(1)
@pytest.mark.parametrize(("spec", "fits"), [("sparse-qkv(output=keep)", False), ("memory(lookup=softmax)", True), ("sum", True)])
def test_other_heads_matter_to_what_depends_on_them(spec, fits, tmp_path):
    """With another number of heads the dense weights have the same shapes."""
    dense = llama()
    dense.save_pretrained(tmp_path / "dense")
    rewritten(copy.deepcopy(dense), spec).save_pretrained(tmp_path / "rewritten")
    other = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4}
    if fits:
        one, two = (
            transformers.LlamaForCausalLM.from_pretrained(tmp_path / name, **other).eval() for name in ("dense", "rewritten")
        )
        assert gap(one, two) < 1e-5
    else:
        with pytest.raises(CheckpointError) as refusal:
            transformers.LlamaForCausalLM.from_pretrained(tmp_path / "rewritten", **other)
        assert "num_attention_heads" in refusal.value.why


@pytest.mark.long
def test_other_heads_that_change_a_shape_in_a_rewritten_module_are_named(tmp_path):
    rewritten(llama(), "memory(beside=values)").save_pretrained(tmp_path)
    other = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4}
    for more in ({}, {"ignore_mismatched_sizes": True}):
        with refused(CheckpointError, "num_attention_heads", "num_key_value_heads", code="mismatch"):
            transformers.LlamaForCausalLM.from_pretrained(tmp_path, **other, **more)


def test_weights_that_were_tied_when_saved_stay_so_where_the_config_given_says_otherwise(tmp_path):
    """The dense class draws a head then, of which no file has a value."""
    model = rewritten(llama(tie_word_embeddings=True), "altup(k=2)")
    back = reloaded(model, tmp_path, tie_word_embeddings=False)
    assert back.lm_head.weight is back.get_input_embeddings().weight
    assert gap(back, model) == 0


@some
@pytest.mark.parametrize("spec", ["altup(k=2)", "memory(lookup=softmax)", "sum", "sparse-qkv(output=keep)", "shared-moe(groups=0)"])
def test_tokens_added_since_are_no_other_model(spec, tmp_path):
    model = rewritten(llama(), spec)
    model.resize_token_embeddings(104)
    assert gap(reloaded(model, tmp_path), model, torch.tensor([[100, 3, 4]])) == 0


@pytest.mark.parametrize("tokens", [104, 90])
def test_the_bias_of_a_square_head_is_resized_with_it(tokens, tmp_path):
    """The stream is as wide as there are tokens, so the bias could belong to either side of the matrix."""
    model = rewritten(tiny_models.bert(vocab_size=96, hidden_size=32), "altup(k=3)")
    assert model.get_output_embeddings().weight.shape == (96, 96)
    model.resize_token_embeddings(tokens)
    assert gap(reloaded(model, tmp_path), model) == 0 and model(IDS).logits.shape[-1] == tokens


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_that_cannot_be_resized_is_refused_before_its_table_is(tied):
    model = rewritten(llama(tie_word_embeddings=tied), "sparse-loss(modules=4)")
    before = model(IDS).logits
    for tokens, multiple in ((104, None), (None, 64), (96, 64)):
        with refused(DoesNotFitError, "lm_head", "96", "resize the dense model", code="fixed-size"):
            model.resize_token_embeddings(tokens, multiple)
    model.resize_token_embeddings()
    model.resize_token_embeddings(96, pad_to_multiple_of=8)
    assert len(model.get_input_embeddings().weight) == model.config.vocab_size == 96
    assert torch.equal(model(IDS).logits, before)


def test_settings_that_change_no_structure_are_no_other_model(tmp_path):
    model = rewritten(llama(), "altup(k=2)")
    model.config.use_cache, model.config.pad_token_id = False, 0
    assert gap(reloaded(model, tmp_path, attn_implementation="eager"), model) < 1e-4


def test_the_record_of_a_recipe_is_plain_data_and_comes_back(tmp_path):
    model = rewritten(rewritten(llama(tie_word_embeddings=True), "altup(k=2)"), "memory(lookup=softmax)")
    record = recipe_storage.stored_record(model)
    assert json.loads(json.dumps(record)) == record
    first, second = map(AppliedTo.from_dict, record["passes"])
    assert ("model.embed_tokens.weight", "lm_head.weight") in first.ties
    assert {f"model.layers.{depth}" for depth in range(4)} <= set(first.sites) and second.sites
    assert first.stacks == (("decoder", 4, 32, 4),) and second.stacks[0][1:3] == (4, 32)
    assert "quantization_config" not in record["config"] and record["config"]["num_hidden_layers"] == 4
    back = reloaded(model, tmp_path / "a")
    again = reloaded(back, tmp_path / "b")
    assert recipe_storage.stored_record(again) == recipe_storage.stored_record(back) == record
    assert gap(again, model) == 0


@pytest.mark.parametrize(
    "damaged", [{"passes": 3}, {"passes": [{"sites": []}]}, {"config": [], "passes": []}, {"config": {"num_hidden_layers": "x"}}]
)
def test_a_damaged_record_is_refused(damaged, tmp_path):
    rewritten(llama(), "memory(lookup=softmax)").save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    content = json.loads(file.read_text())
    content["quantization_config"]["applied_to"] = damaged
    file.write_text(json.dumps(content))
    if damaged == {"config": [], "passes": []}:  # nothing recorded, as in older files
        assert transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    else:
        with pytest.raises(CheckpointError):
            transformers.LlamaForCausalLM.from_pretrained(tmp_path)


class Blocks(nn.Module):
    """A model of one's own: `heads` is in its code, and no weight shows it."""

    def __init__(self, config: dict) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(40, 16)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(16, config["heads"], 32, batch_first=True) for _ in range(3))
        self.head = nn.Linear(16, 40)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def test_a_file_of_ones_own_model_is_not_filled_into_another(tmp_path):
    model = retrofit.apply(Blocks({"heads": 2}).eval(), "memory(lookup=softmax)", example_inputs={"ids": IDS}, verify=False)
    file = retrofit.save(model, tmp_path / "model.pt")
    again = retrofit.load(file, build=lambda: Blocks({"heads": 2}))
    with torch.no_grad():
        assert torch.equal(again(IDS), model(IDS))
    with refused(CheckpointError, "heads"):
        retrofit.load(file, build=lambda: Blocks({"heads": 4}))


# Configs


def test_a_config_that_two_models_hold_stays_that_of_the_other(tmp_path):
    shared = config()
    dense, other = transformers.LlamaForCausalLM(shared).eval(), transformers.LlamaForCausalLM(shared)
    before = shared.to_dict()
    rewritten(other, "reversible")
    assert shared.to_dict() == before and not hasattr(shared, "quantization_config")
    assert {id(module.config) for module in other.modules() if hasattr(module, "config")} == {id(other.config)}
    assert gap(reloaded(dense, tmp_path), dense) == 0


def test_a_rewrite_that_fails_leaves_the_config_object():
    model = llama()
    given = model.config
    with refused(DoesNotFitError, "merge-cross-attention"):
        retrofit.apply(model, "altup(k=2)", "merge-cross-attention", verify=False)
    assert model.config is given is model.model.config and "quantization_config" not in vars(given)


@some
@pytest.mark.parametrize("spec", SPECS)
def test_from_config_builds_a_rewritten_model_that_is_saved_and_loaded(spec, tmp_path):
    model = rewritten(llama(), spec)
    fresh = transformers.AutoModelForCausalLM.from_config(model.config).eval()
    assert fresh.config is not model.config and recipe_storage.stored_recipe(fresh) == recipe_storage.stored_recipe(model)
    assert gap(reloaded(fresh, tmp_path), fresh) == 0


@pytest.mark.first(1)
@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_from_config_of_a_base_class_is_a_dense_model_that_is_saved_and_loaded(kind, tmp_path):
    model = rewritten(llama() if kind == "llama" else t5(), "shared-moe(groups=0)")
    fresh = transformers.AutoModel.from_config(model.config).eval()
    back = reloaded(fresh, tmp_path)
    assert not recipe_storage.stored_recipe(back) and recipe_storage.stored_recipe(model)
    assert all(torch.equal(tensor, back.state_dict()[name]) for name, tensor in fresh.state_dict().items())


def test_from_config_of_another_class_is_refused():
    model = rewritten(llama(), "reversible")
    with refused(CheckpointError, "LlamaForCausalLM", "LlamaForSequenceClassification"):
        transformers.AutoModelForSequenceClassification.from_config(model.config)


@some
@pytest.mark.parametrize("spec", SPECS)
def test_a_config_without_the_recipe_is_refused_for_a_directory_that_holds_it(spec, tmp_path):
    rewritten(llama(), spec).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError) as refusal:
        transformers.LlamaForCausalLM.from_pretrained(tmp_path, config=config())
    assert (refusal.value.code, refusal.value.option) == ("no-recipe", "config")


def test_a_class_that_has_nothing_of_what_was_rewritten_loads_without_the_recipe(tmp_path):
    rewritten(llama(), "sparse-loss(modules=4)").save_pretrained(tmp_path)
    base = transformers.LlamaModel.from_pretrained(tmp_path, config=config()).eval()
    assert gap(base, llama().model) == 0


def test_a_composite_whose_config_lacks_the_recipe_of_a_part_is_not_saved(tmp_path):
    vision = transformers.CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, image_size=32, patch_size=8
    )
    composite = transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(vision_config=vision, text_config=config(), image_token_index=95)
    )
    composite.save_pretrained(tmp_path / "dense")
    composite.model.language_model = rewritten(llama(), "reversible").model
    with pytest.raises(CheckpointError) as refusal:
        composite.save_pretrained(tmp_path / "rewritten")
    assert (refusal.value.code, refusal.value.site) == ("no-recipe", "model.language_model")
    assert not (tmp_path / "rewritten").exists()


@pytest.mark.parametrize("spec", ["reversible", "altup(k=2)", "sparse-loss(modules=4)"])
def test_a_dense_model_built_from_the_config_of_a_rewritten_one_is_saved_dense(spec, tmp_path):
    model = rewritten(llama(), spec)
    dense = transformers.LlamaForCausalLM(model.config).eval()
    assert gap(reloaded(dense, tmp_path / "dense"), dense) == 0
    assert gap(reloaded(model, tmp_path / "rewritten"), model) == 0  # and its config is as it was


@pytest.mark.long
def test_so_is_a_composite(tmp_path):
    model = rewritten(llava(), "reversible")
    dense = transformers.LlavaForConditionalGeneration(model.config).eval()
    assert gap(reloaded(dense, tmp_path / "dense"), dense) == 0
    assert gap(reloaded(model, tmp_path / "rewritten"), model) == 0


# What was changed after the rewrite


def other_head(model):
    head = model.get_output_embeddings()
    model.set_output_embeddings(nn.Linear(head.in_features, head.out_features, bias=False))


def other_table(model):
    model.set_input_embeddings(nn.Embedding(96, 32))


def other_router(model):
    model.model.layers[1].mlp.moe.router = nn.Identity()


@pytest.mark.parametrize(
    ("spec", "change", "site"),
    [
        ("altup(k=2)", other_head, "lm_head"),
        ("sum", other_table, "model.embed_tokens"),
        ("shared-moe(groups=0)", other_router, "model.layers.1.mlp.moe.router"),
    ],
)
def test_a_model_without_what_its_recipe_added_is_not_saved(spec, change, site, tmp_path):
    model = rewritten(llama(tie_word_embeddings=True), spec)
    whole, unchanged = model.state_dict(), rewritten(llama(tie_word_embeddings=True), spec)
    change(model)
    with pytest.raises(CheckpointError) as refusal:
        model.save_pretrained(tmp_path / "model")
    assert (refusal.value.code, refusal.value.site) == ("not-saved", site)
    assert not (tmp_path / "model").exists()
    model.save_pretrained(tmp_path / "given", state_dict=whole)
    assert gap(transformers.LlamaForCausalLM.from_pretrained(tmp_path / "given"), unchanged) == 0


def test_the_fix_for_another_head_works(tmp_path):
    model = rewritten(llama(tie_word_embeddings=True), "altup(k=2)")
    model.lm_head.weight = nn.Parameter(torch.randn_like(model.lm_head.weight))
    assert gap(reloaded(model, tmp_path), model) == 0


def test_a_dense_state_dict_is_not_saved_under_a_recipe(tmp_path):
    dense = t5()
    with pytest.raises(CheckpointError) as refusal:
        rewritten(t5(), "sum").save_pretrained(tmp_path / "model", state_dict=dense.state_dict())
    assert refusal.value.code == "not-saved"


def test_layers_taken_out_of_a_rewritten_model_are_not_missed(tmp_path):
    model = rewritten(llama(), "memory(lookup=softmax)")
    model.model.layers = nn.ModuleList([model.model.layers[0], *model.model.layers[2:]])
    model.config.num_hidden_layers = 3
    for depth, layer in enumerate(model.model.layers):
        layer.layer.self_attn.layer_idx = depth
    assert gap(reloaded(model, tmp_path), model) == 0


def test_a_changed_module_in_the_files_is_not_called_dense(tmp_path):
    model = rewritten(llama(), "reversible")
    nn.utils.parametrizations.weight_norm(model.model.layers[0].layer.self_attn.q_proj)
    model.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError) as refusal:
        transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert "q_proj" in refusal.value.why and not any("dense weights" in remedy for remedy in refusal.value.remedies)


# The names in the files


@pytest.mark.first(5)
@pytest.mark.parametrize("spec", ["reversible", "altup(k=2)", "memory(lookup=softmax)", "shared-moe(groups=0)"])
@pytest.mark.parametrize("device_map", [None, "cpu"])
def test_no_tensor_of_a_rewritten_module_is_left_at_random(spec, device_map, tmp_path):
    rewritten(llama(), spec).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    gone = next(name for name in tensors if "layers.2." in name and "down" in name)  # a dense weight, moved under a new module
    if spec == "altup(k=2)":
        gone = "model.embed_tokens.weight"  # widened in the dense module
    save_file({name: tensor for name, tensor in tensors.items() if name != gone}, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError) as refusal:
        transformers.LlamaForCausalLM.from_pretrained(tmp_path, device_map=device_map)
    assert gone in refusal.value.why


def test_no_tensor_of_a_recipe_is_left_unread(tmp_path):
    rewritten(llama(), "memory(lookup=softmax)").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    more = "model.layers.1.memory.more"
    save_file({**load_file(file), more: torch.ones(3), "classifier.weight": torch.ones(2)}, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError) as refusal:
        transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert more in refusal.value.why and "classifier" not in refusal.value.why


# A part saved by itself


def llava():
    vision = transformers.CLIPVisionConfig(**{**SMALL, "num_hidden_layers": 3}, image_size=32, patch_size=8)
    text = transformers.LlamaConfig(**{**SMALL, "vocab_size": 100}, num_key_value_heads=2, initializer_range=0.2)
    joint = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=99, image_seq_length=16)
    torch.manual_seed(0)
    return transformers.LlavaForConditionalGeneration(joint).eval()


def image_encoder_and_decoder():
    encoder = transformers.ViTConfig(**{k: v for k, v in SMALL.items() if k != "vocab_size"}, image_size=16, patch_size=8)
    decoder = transformers.GPT2Config(vocab_size=96, n_embd=32, n_layer=3, n_head=4, add_cross_attention=True, is_decoder=True)
    joint = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        encoder, decoder, decoder_start_token_id=0, pad_token_id=0
    )
    torch.manual_seed(0)
    return transformers.VisionEncoderDecoderModel(joint).eval()


def t5():
    torch.manual_seed(0)
    shape = transformers.T5Config(vocab_size=96, d_model=32, d_ff=64, d_kv=8, num_layers=3, num_heads=4, decoder_start_token_id=0)
    return transformers.T5ForConditionalGeneration(shape).eval()


PARTS = {
    "llava": (llava, lambda model: model.model.language_model, {"input_ids": IDS}),
    "image encoder": (image_encoder_and_decoder, lambda model: model.encoder, {"pixel_values": torch.ones(1, 3, 16, 16)}),
    "t5 encoder": (t5, lambda model: model.encoder, {"input_ids": IDS}),
}


@pytest.mark.first(1)
@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("spec", ["memory(lookup=softmax)", "reversible", "shared-moe(groups=0)", "altup(k=2, embedding=recycled)"])
def test_a_part_of_a_rewritten_model_is_saved_and_loaded_by_itself(spec, name, tmp_path):
    make, part_of, inputs = PARTS[name]
    part = part_of(rewritten(make(), spec))
    back, found = type(part).from_pretrained(save(part, tmp_path / "a"), output_loading_info=True)
    again = type(part).from_pretrained(save(back, tmp_path / "b")).eval()
    assert not found["missing_keys"] and not found["unexpected_keys"]
    with torch.no_grad():
        expected = part(**inputs)[0]
        assert torch.equal(back.eval()(**inputs)[0], expected) and torch.equal(again(**inputs)[0], expected)


def save(model, folder):
    model.save_pretrained(folder)
    return folder


def test_a_part_that_was_not_rewritten_is_dense(tmp_path):
    model = rewritten(llava(), "memory(lookup=softmax, layers=0)")
    tower = model.model.vision_tower
    sites = [site.name for account in provenance_of(model).rewrites for site in account.sites]
    assert sites and not any("vision_tower" in name for name in sites)
    assert recipe_storage.entry_of(tower.config) == {} != recipe_storage.entry_of(model.model.language_model.config)


def test_the_whole_model_loads_beside_its_parts_and_forgets_with_them(tmp_path):
    model = rewritten(llava(), "reversible")
    ids = torch.tensor([[3, 4, 5, 6]])
    back = reloaded(model, tmp_path)
    with torch.no_grad():
        assert torch.equal(back(input_ids=ids).logits, model(input_ids=ids).logits)
    assert recipe_storage.entry_of(back.model.language_model.config)["part"] == "model.language_model"
    recipe_storage.store_recipe(back, ())
    assert not recipe_storage.entry_of(back.config) and not recipe_storage.entry_of(back.model.language_model.config)


@pytest.mark.long
def test_each_part_of_what_was_recorded_attends_as_it_does_in_the_model(tmp_path):
    attention = {"": "eager", "text_config": "sdpa", "vision_config": "eager"}  # what lsh-attention replaces is in the text's alone
    model = llava()
    model.set_attn_implementation(attention)
    model = rewritten(model, "lsh-attention(rounds=2, buckets=4, chunk=4)")
    back = reloaded(model, tmp_path, attn_implementation=attention)
    with torch.no_grad():
        assert torch.equal(back(input_ids=IDS).logits, model(input_ids=IDS).logits)


def test_a_setting_of_an_inner_config_is_named(tmp_path):
    model = rewritten(llava(), "memory(lookup=softmax, rank=2)")
    model.save_pretrained(tmp_path)
    config = transformers.LlavaConfig.from_pretrained(tmp_path)
    config.text_config.num_hidden_layers = 5
    with pytest.raises(CheckpointError) as refusal:
        type(model).from_pretrained(tmp_path, config=config)
    assert "text_config.num_hidden_layers is 5" in refusal.value.why and "hidden_size" not in refusal.value.why


def test_a_part_is_rewritten_no_further(tmp_path):
    part = rewritten(llava(), "memory(lookup=softmax)").model.language_model
    back = type(part).from_pretrained(save(part, tmp_path)).eval()
    with refused(CheckpointError, type(part).__name__):
        retrofit.apply(back, "recurrence", verify=False)
    assert torch.equal(back(IDS)[0], part(IDS)[0])


def test_a_part_of_another_size_is_refused(tmp_path):
    part = rewritten(llava(), "memory(lookup=softmax)").model.language_model
    part.save_pretrained(tmp_path)
    with refused(CheckpointError, "num_hidden_layers"):
        type(part).from_pretrained(tmp_path, num_hidden_layers=3)


def test_a_part_of_another_kind_says_which_class_it_was(tmp_path):
    rewritten(llava(), "memory(lookup=softmax)").model.language_model.save_pretrained(tmp_path)
    with refused(CheckpointError, "MistralModel", "LlamaModel", "model.language_model", code="mismatch"):
        transformers.MistralModel.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("spec", "lost"), [("altup(k=2)", "lm_head.block_scale.scale"), ("sparse-loss(modules=4)", "lm_head.weight")]
)
def test_a_base_model_without_the_head_that_its_recipe_rewrote_says_which_class_it_was(spec, lost, tmp_path):
    rewritten(llama(tie_word_embeddings=True), spec).model.save_pretrained(tmp_path)
    with refused(CheckpointError, "LlamaModel", lost, code="mismatch"):
        transformers.LlamaForCausalLM.from_pretrained(tmp_path)


def test_a_head_that_was_not_saved_is_new_where_that_is_said(tmp_path):
    rewritten(llama(tie_word_embeddings=False), "sparse-loss(modules=4)").model.save_pretrained(tmp_path)
    model, info = transformers.LlamaForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert info["missing_keys"] == {"lm_head.weight"}
    assert gap(reloaded(model, tmp_path / "again"), model.eval()) == 0


@some
@pytest.mark.parametrize("field", ["recipe", "no recipe", "inputs", "applied_to", "through"])
def test_a_damaged_entry_in_the_config_is_refused(field, tmp_path):
    rewritten(llama(), "sum").save_pretrained(tmp_path)
    config_file = tmp_path / "config.json"
    held = json.loads(config_file.read_text())
    key = field.removeprefix("no ")
    held["quantization_config"][key] = [3] if field == "recipe" else [] if field == "no recipe" else "many"
    config_file.write_text(json.dumps(held))
    with pytest.raises(CheckpointError) as refusal:
        transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert refusal.value.code == "no-recipe"
