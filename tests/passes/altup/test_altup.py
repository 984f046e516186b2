"""The AltUp and Sum passes on whole models, against the dense model itself and the papers' formulas."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from support import tiny_models, zoo
from support.own_models import Own
from support.refusals import refused

import retrofit
from retrofit.errors import DoesNotFitError, SpecError
from retrofit.passes import AltUp, SumEmbedding
from retrofit.passes.altup.altup import other_width
from retrofit.passes.altup.layers import AltUpLayer
from retrofit.rewriting import apply_reported

MODELS = ("causal/llama", "causal/gpt2", "masked/bert", "seq2seq/t5", "image/vit", "masked/albert")
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "three blocks": {"k": 3},
    "same": {"selection": "same"},
    "lockstep": {"init": "lockstep"},
    "lockstep, three": {"init": "lockstep", "k": 3},
    "lockstep, three, same": {"init": "lockstep", "k": 3, "selection": "same"},
    "recycled": {"embedding": "recycled"},
    "recycled lockstep": {"embedding": "recycled", "init": "lockstep"},
    "dense": {"coefficients": "dense"},
    "dynamic": {"coefficients": "dynamic"},
    "some layers": {"layers": "0+2-3"},
    "some layers, lockstep": {"layers": "1", "init": "lockstep", "k": 3},
    "some layers, dynamic": {"coefficients": "dynamic", "layers": "1"},
    "extra": {"extra": 24},
    "extra, three": {"extra": 24, "k": 3},
}


def build(identity: str) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    entry = next(entry for entry in zoo.entries() if entry.id == identity)
    model = zoo.build(entry)
    return model, zoo.inputs(entry, model), zoo.inputs(entry, model, batch=3, length=9, seed=5)


def logits(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    with torch.no_grad():
        output = model(**inputs)
    return output if isinstance(output, torch.Tensor) else output.logits


def distance(new: torch.Tensor, old: torch.Tensor) -> float:
    return float((new - old).abs().max() / old.abs().max())


def combinations() -> list[tuple[str, str]]:
    """Every variant on one model, the default on all, and lockstep on most."""
    chosen = [(model, "default") for model in MODELS]
    chosen += [("causal/llama", variant) for variant in VARIANTS if variant != "default"]
    chosen += [("causal/gpt2", variant) for variant in ("lockstep", "extra", "recycled lockstep")]
    lockstep = [(model, "lockstep") for model in ("seq2seq/t5", "image/vit", "masked/albert")]
    return [*chosen, *lockstep, ("seq2seq/t5", "extra, three")]


@pytest.mark.first(3)
@pytest.mark.parametrize(("identity", "variant"), combinations())
def test_step_0_is_the_dense_function_and_the_parameters_are_the_formulas(identity: str, variant: str) -> None:
    model, inputs, others = build(identity)
    options = VARIANTS[variant]
    expected = logits(model, others)
    before = sum(parameter.numel() for parameter in model.parameters())
    (rewrite,) = apply_reported(model, AltUp(**options), example_inputs=inputs, verify=False, count_flops=False).rewrites
    assert distance(logits(model, others), expected) <= (1e-5 if options.get("init") == "lockstep" else 1e-6)
    added = sum(parameter.numel() for parameter in model.parameters()) - before
    assert added == rewrite.new_parameters
    if "coefficients" not in options and "layers" not in options:
        assert added == expected_parameters(model, AltUp(**options))


def expected_parameters(model: Any, altup: AltUp) -> int:
    """K² + K a layer, (K−1)·V·d a table (V·e + e·d with an extra width), as much again for an untied head, K weights before a tied
    head that starts with a hop: counted from the config alone."""
    config = model.config
    layers = sum(isinstance(module, AltUpLayer) for module in model.modules())
    total = layers * (altup.k**2 + altup.k)
    if altup.embedding == "recycled" or not hasattr(config, "vocab_size"):
        return total
    width = getattr(config, "embedding_size", config.hidden_size)
    columns = altup.extra or (altup.k - 1) * width
    tied = config.tie_word_embeddings
    total += config.vocab_size * columns * (1 if tied else 2) + altup.extra * width
    return total + (altup.k if tied and altup.init == "hop" else 0)


@pytest.mark.first(2)
@pytest.mark.parametrize("k", [2, 3])
@pytest.mark.parametrize("selection", ["alternating", "same"])
def test_layers_stay_narrow_and_take_turns(k: int, selection: str) -> None:
    model, inputs, _ = build("causal/llama")
    width = model.config.hidden_size
    dense = copy.deepcopy(model.model.layers)
    retrofit.apply(model, AltUp(k=k, selection=selection), example_inputs=inputs, verify=False)
    seen: list[int] = []
    for depth, layer in enumerate(model.model.layers):
        assert layer.active == (depth % k if selection == "alternating" else 0)
        assert (tuple(layer.p.shape), tuple(layer.g.shape)) == ((k, k), (k,))
        layer.layer.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[-1]))
        for mine, theirs in zip(layer.layer.parameters(), dense[depth].parameters(), strict=True):
            assert torch.equal(mine, theirs)
    logits(model, inputs)
    assert seen == [width] * len(model.model.layers)


def test_the_hop_is_the_dense_stream_bit_for_bit() -> None:
    model, inputs, others = build("causal/llama")
    dense = copy.deepcopy(model)
    retrofit.apply(model, AltUp(k=3, init="hop"), example_inputs=inputs, verify=False)
    with torch.no_grad():
        mine = model(**others, output_hidden_states=True).hidden_states
        theirs = dense(**others, output_hidden_states=True).hidden_states
    assert all(torch.equal(one, other) for one, other in zip(mine[1:-1], theirs[1:-1], strict=True))


def test_the_extra_blocks_hold_something_of_their_own_after_a_hop() -> None:
    model, inputs, _ = build("causal/llama")
    table = model.get_input_embeddings().weight.detach().clone()
    retrofit.apply(model, AltUp(k=2, init="hop"), example_inputs=inputs, verify=False)
    wide = model.get_input_embeddings().weight.detach()
    width = table.shape[1]
    assert torch.equal(wide[:, :width], table)
    assert 0.5 < float(wide[:, width:].std() / table.std()) < 2 and not torch.equal(wide[:, width:], table)


@pytest.mark.first(2)
@pytest.mark.parametrize("options", [{}, {"init": "lockstep"}, {"embedding": "recycled"}, {"coefficients": "dense"}])
def test_every_new_parameter_learns_within_two_steps(options: dict[str, Any]) -> None:
    model, inputs, _ = build("causal/gpt2")
    retrofit.apply(model, AltUp(**options), example_inputs=inputs, verify=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(2):
        optimizer.zero_grad()
        model(**inputs, labels=inputs["input_ids"]).loss.backward()
        optimizer.step()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name


def test_a_model_nobody_has_heard_of() -> None:
    torch.manual_seed(0)
    model = Own()
    ids = torch.randint(50, (3, 9))
    expected = logits(model, {"x": ids})
    retrofit.apply(model, AltUp(k=2))
    assert distance(logits(model, {"x": ids}), expected) <= 1e-5
    assert model.a.weight.shape[1] == 2 * model.b[0].m.normalized_shape[0]


@pytest.mark.long
class Towers(torch.nn.Module):
    """One tower for two texts, and how well they fit."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = Own()

    def forward(self, query: torch.Tensor, passage: torch.Tensor) -> torch.Tensor:
        return self.tower(query)[:, -1] @ self.tower(passage)[:, -1].T


def test_a_tower_that_reads_two_texts_is_rewritten_by_itself() -> None:
    torch.manual_seed(0)
    model = Towers().eval()
    given = {"query": torch.randint(50, (2, 11)), "passage": torch.randint(50, (3, 7))}
    before = model(**given)
    with refused(DoesNotFitError, "tower.b.0", "example_inputs="):
        retrofit.apply(model, AltUp(k=2), example_inputs=given)
    tower = retrofit.apply(model.tower, AltUp(k=2))
    assert tower is model.tower and isinstance(tower.b[0], AltUpLayer)
    torch.testing.assert_close(model(**given), before)


@pytest.mark.long
def test_one_stack_of_two() -> None:
    model, inputs, others = build("seq2seq/bart")
    expected = logits(model, others)
    (rewrite,) = apply_reported(
        model, AltUp(embedding="recycled", stacks="encoder"), example_inputs=inputs, verify=False, count_flops=False
    ).rewrites
    assert distance(logits(model, others), expected) <= 1e-5
    assert all("encoder" in site.name for site in rewrite.sites) and rewrite.skipped[0].name
    shared, shared_inputs, _ = build("seq2seq/t5")
    with refused(DoesNotFitError, "embedding=recycled"):  # the decoder reads the same table, at its dense width
        retrofit.apply(shared, AltUp(stacks="encoder"), example_inputs=shared_inputs)


@pytest.mark.parametrize("tied", [True, False])
def test_single_trained_tokens_of_a_tied_wide_table_are_refused(tied: bool) -> None:
    """PEFT multiplies by the table itself, past the head that weighs the blocks; an untied head is not touched."""
    peft = pytest.importorskip("peft")
    model, inputs = tiny_models.llama(tie_word_embeddings=tied), {"input_ids": torch.arange(3, 9)[None]}
    expected = logits(retrofit.apply(model, AltUp(k=2), verify=False), inputs)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], trainable_token_indices=[5, 6]))
    if tied:
        with refused(DoesNotFitError, "modules_to_save", code="single-tokens"):
            adapted(**inputs)
        model = adapted.unload()
    else:
        torch.testing.assert_close(logits(adapted, inputs), expected)
    torch.testing.assert_close(logits(model, inputs), expected)


@pytest.mark.parametrize("identity", ["causal/gpt2", "causal/llama", "masked/bert", "seq2seq/t5"])
def test_an_end_of_the_dense_width_is_named(identity: str) -> None:
    model, inputs, _ = build(identity)
    ends = {"table": model.get_input_embeddings(), "head": model.get_output_embeddings()}
    narrow = {name: copy.deepcopy(module) for name, module in ends.items()}
    width = narrow["table"].embedding_dim
    embeddings = narrow["table"](inputs["input_ids"])
    expected = logits(retrofit.apply(model, AltUp(k=2), example_inputs=inputs, verify=False), inputs)
    others = {name: value for name, value in inputs.items() if name != "input_ids"}
    with refused(DoesNotFitError, str(width), option="inputs_embeds"):
        model(**others, inputs_embeds=embeddings)
    wide = model(**others, inputs_embeds=model.get_input_embeddings()(inputs["input_ids"])).logits
    torch.testing.assert_close(wide, expected)
    for put, get, name in (
        (model.set_output_embeddings, model.get_output_embeddings, "head"),
        (model.set_input_embeddings, model.get_input_embeddings, "table"),
    ):
        before = get()
        put(narrow[name])
        paths = {path for path, module in model.named_modules(remove_duplicate=False) if module is narrow[name]}
        with refused(DoesNotFitError, str(width), str(2 * width)) as caught:
            model(**inputs)
        assert caught.value.site in paths
        put(before)
    torch.testing.assert_close(logits(model, inputs), expected)


@pytest.mark.parametrize(("embedding", "last"), [("wide", 2), ("recycled", 1)])
def test_hidden_states_are_those_of_the_layers(embedding: str, last: int) -> None:
    model, inputs, _ = build("causal/llama")
    dense = model(**inputs, output_hidden_states=True).hidden_states
    retrofit.apply(model, AltUp(k=2, embedding=embedding), example_inputs=inputs, verify=False)
    states = model(**inputs, output_hidden_states=True).hidden_states
    assert len(states) == len(dense) and states[-1].shape[-1] == last * dense[-1].shape[-1]
    for now, then in zip(states[:-1], dense[:-1], strict=True):
        torch.testing.assert_close(now, then)


@pytest.mark.first(1)
@pytest.mark.parametrize("order", [("sum", "altup"), ("altup", "sum")])
def test_sum_before_and_after(order: tuple[str, str]) -> None:
    model, inputs, others = build("causal/gpt2")
    expected = logits(model, others)
    retrofit.apply(model, *order, example_inputs=inputs, verify=False)
    assert distance(logits(model, others), expected) <= 1e-5
    assert [one.name for one in retrofit.recipe(model)] == list(order)


@pytest.mark.parametrize(
    "spec",
    [
        "altup(extra=8)",
        "altup(extra=8, selection=same)",
        "altup(coefficients=dynamic)",
        "altup(coefficients=dynamic, selection=same)",
    ],
)
def test_what_has_no_gradient_at_the_start_is_announced(spec: str) -> None:
    """With an odd number of layers the last works on the block that the stream stays in: its P acts on the others only."""
    model = tiny_models.llama(num_hidden_layers=3)
    before = {name for name, _ in model.named_parameters()}
    (rewrite,) = apply_reported(model, spec, verify=False, count_flops=False).rewrites
    ids = torch.randint(3, 60, (4, 12), generator=torch.Generator().manual_seed(0))
    model(input_ids=ids, labels=ids).loss.backward()
    idle = {name for name, one in model.named_parameters() if one.grad is None or not one.grad.abs().max()}
    assert idle and not idle & before
    assert idle <= set(rewrite.second_step)


@pytest.mark.first(1)
@pytest.mark.parametrize("identity", ["causal/llama", "seq2seq/t5", "seq2seq/bart"])
def test_sum_adds_one_table_and_learns_at_once(identity: str) -> None:
    model, inputs, others = build(identity)
    expected = logits(model, others)
    before = sum(parameter.numel() for parameter in model.parameters())
    retrofit.apply(model, SumEmbedding(), example_inputs=inputs, verify=False)
    assert torch.equal(logits(model, others), expected)
    extra = [parameter for name, parameter in model.named_parameters() if "extra" in name]
    assert len(extra) == 1 and extra[0].numel() == sum(parameter.numel() for parameter in model.parameters()) - before
    logits_with_gradient = model(**inputs).logits
    logits_with_gradient.square().mean().backward()
    assert extra[0].grad.abs().max() > 0


def state(model: Any) -> tuple[Any, ...]:
    modules = [
        (name, id(module), len(module._forward_hooks) + len(module._forward_pre_hooks)) for name, module in model.named_modules()
    ]
    return modules, [(name, id(parameter)) for name, parameter in model.named_parameters()], model.config.to_dict()


@pytest.mark.parametrize(("entering", "code"), [((2, 12, 64), "rewritten"), ((1, 32, 6, 40), "other-layout")])
def test_a_layer_with_another_input_is_refused(entering: tuple[int, ...], code: str) -> None:
    assert other_width(entering, 32).code == code


@pytest.mark.first(1)
@pytest.mark.parametrize("passes", [("altup", "altup"), ("sum", "altup(stacks=encoder)"), ("altup(layers=99)",)])
def test_a_refusal_leaves_the_model_exactly_as_it_was(passes: tuple[str, ...]) -> None:
    model, inputs, _ = build("causal/gpt2")
    before = state(model)
    with pytest.raises(retrofit.RetrofitError) as caught:
        retrofit.apply(model, *passes, example_inputs=inputs)
    assert caught.value.what
    assert state(model) == before
    assert retrofit.recipe(model) is None


@pytest.mark.parametrize(
    "options",
    [
        {"k": 1},
        {"k": "two"},
        {"selection": "random"},
        {"extra": 24, "init": "lockstep"},
        {"extra": 25, "k": 3},
        {"extra": 24, "embedding": "recycled"},
    ],
)
def test_options_out_of_range_are_named(options: dict[str, Any]) -> None:
    with pytest.raises(SpecError) as refused:
        AltUp(**options)
    assert refused.value.option in options


def test_unknown_specs_say_what_there_is() -> None:
    with pytest.raises(SpecError) as caught:
        retrofit.apply(Own(), "altupp")
    assert "altup" in caught.value.remedy
    with pytest.raises(SpecError) as caught:
        retrofit.apply(Own(), "altup(width=2)")
    assert caught.value.option == "width" and "selection" in caught.value.remedy


STARTS = [{"selection": "same"}, {"k": 3, "embedding": "recycled"}, {"coefficients": "dynamic"}, {"extra": 8}]


@pytest.mark.first(1)
@pytest.mark.parametrize("options", STARTS, ids=str)
def test_every_start_passes_verification(options: dict[str, Any]) -> None:
    model, inputs, _ = build("causal/gpt2")
    report = apply_reported(model, AltUp(**options), example_inputs=inputs, count_flops=False).report
    assert report is not None and report.ok and report["gradients"].status == "passed"


@pytest.mark.long
def test_weights_mapped_from_a_file_stay_where_they_are(tmp_path):
    tiny_models.llama().save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    before = {id(parameter): parameter.data_ptr() for parameter in model.parameters()}
    retrofit.apply(model, AltUp(k=2))
    kept = [parameter for parameter in model.parameters() if id(parameter) in before]
    assert len(kept) == len(before) - 2  # all but the token table and the head
    assert all(parameter.data_ptr() == before[id(parameter)] for parameter in kept)
