"""Every pass after every other, held to all checks, or refused for a reason that is written here."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support import tiny_models, zoo
from support.feed_forward_models import IDS, Model, Plain
from support.method_verdicts import verdict
from support.retrofitted import moved
from transformers import DynamicCache

import retrofit
from retrofit.errors import DoesNotFitError
from retrofit.inputs.example_inputs import named_inputs
from retrofit.inputs.probes import accepts
from retrofit.passbase.protocol import as_pass, pass_names
from retrofit.passbase.replaying import rewrites
from retrofit.passes.memory.external_memory import ExternalMemory
from retrofit.program.capture import capture
from retrofit.surgery.wrappers import InjectingForward

SPECS = {
    "activation-sparsity": "activation-sparsity",
    "altup": "altup(k=2)",
    "sum": "sum",
    "sequence-altup": "sequence-altup(k=4)",
    "sparse-ffn": "sparse-ffn(sparsity=4)",
    "shared-moe": "shared-moe(experts=3)",
    "memory": "memory",
    "recurrence": "recurrence(rank=4)",
    "lsh-attention": "lsh-attention",
    "reversible": "reversible",
    "merge-cross-attention": "merge-cross-attention",
    "sparse-qkv": "sparse-qkv",
    "sparse-loss": "sparse-loss(modules=4)",
}
SHARING = "shared-moe(experts=2, share_attention=true)"
SKIPPING = "sequence-altup(k=2, method=stride-and-skip)"
OTHERWISE = {  # other forms of the same passes
    "activation-sparsity": ("activation-sparsity(level=0.25, where=down, centre=true)",),
    "altup": ("altup(k=3, init=hop)", "altup(k=2, embedding=recycled)"),
    "sequence-altup": (SKIPPING,),
    "sparse-ffn": ("sparse-ffn(sparsity=1)",),
    "shared-moe": ("shared-moe(experts=3, groups=0)", SHARING),
    "recurrence": ("recurrence(rank=3, layers=0)",),
    "merge-cross-attention": ("merge-cross-attention(attentions=1)",),
    "sparse-qkv": ("sparse-qkv(kernel=1)",),  # rewrites merged attentions too
    "memory": ("memory(beside=ffns)", "memory(lookup=softmax, rank=2)", "memory(lookup=lsh, beside=ffns)"),
}

# What is refused, and a part of the reason. The others come through every check.
REFUSED = {
    ("activation-sparsity", "activation-sparsity"): "its input is masked already",
    ("altup", "altup"): "several blocks wide already",
    ("sequence-altup", "sequence-altup"): "strided already",
    ("sparse-ffn", "sparse-ffn"): "another pass has already replaced it",
    ("sparse-ffn", "shared-moe"): "another pass has already replaced it",
    ("recurrence", "recurrence"): "it has a recurrence already",
    ("recurrence", "sequence-altup"): "its own code numbers the tokens",
    ("lsh-attention", "lsh-attention"): "it attends in buckets already",
    ("merge-cross-attention", "merge-cross-attention"): "its attentions are merged already",
    ("lsh-attention", "merge-cross-attention"): "its projections are not in the module that attends",
    ("sparse-qkv", "merge-cross-attention"): "is made by",
    ("reversible", "altup"): "has to wrap the whole layer",
    ("reversible", "memory"): "has to wrap the whole layer",
    ("reversible", "reversible"): "it is reversible already",
    ("reversible", "sequence-altup"): "has to wrap the whole layer",
    ("sparse-qkv", "sequence-altup"): "numbers the tokens it receives",
    ("sparse-qkv", "sparse-qkv"): "its projections are sparse already",
    ("sparse-loss", "altup"): "the wide stream cannot pass",
    ("sparse-loss", "sparse-loss"): "is sparse already",
    ("shared-moe", "sparse-ffn"): "already a mixture of experts",
    ("shared-moe", "shared-moe"): "already a mixture of experts",
}
REFUSED_ON = {  # of one of the models
    "llama": {
        ("activation-sparsity", "sparse-ffn"): "do not all read the same tensor",
        ("activation-sparsity", "shared-moe"): "do not all read the same tensor",
        ("activation-sparsity", "sparse-qkv"): "compute their own columns",
    },
    "bart": {("activation-sparsity", "merge-cross-attention"): "and no argument of it"},
}
REFUSED_FORMS = {
    (SKIPPING, "reversible"): "no two layers follow each other",  # of some models
    **{(SKIPPING, form): "picks tokens of the stream for a layer inside it" for form in (SPECS["altup"], *OTHERWISE["altup"])},
}
NO_CROSS = "no attention reads the output of another stack"  # merge-cross-attention is refused on a decoder by itself
MERGE = "merge-cross-attention"
QUICK = (  # every pass, and a refusal
    ("llama", "sequence-altup", "sparse-qkv"),
    ("llama", "altup", "memory"),
    ("llama", "lsh-attention", "recurrence"),
    ("llama", "sum", "reversible"),
    ("llama", "shared-moe", "sparse-loss"),
    ("llama", "sparse-ffn", "shared-moe"),
    ("llama", "activation-sparsity", "altup"),
    ("bart", "sparse-ffn", "merge-cross-attention"),
)


def bart() -> Any:
    sizes = {"d_model": 16, "encoder_layers": 3, "decoder_layers": 3, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = transformers.BartConfig(
        vocab_size=tiny_models.VOCABULARY, max_position_embeddings=32, decoder_start_token_id=2, init_std=0.3, **sizes, **heads
    )
    return tiny_models.built(config, transformers.BartForConditionalGeneration)


MODELS = {"llama": lambda: tiny_models.llama(num_hidden_layers=3), "bart": bart}


def rewritten(kind: str, *specs: str) -> str:
    """Why the passes are refused, one after another, the model being as before; "" where it has come through every check."""
    torch.manual_seed(0)
    model, refusal = MODELS[kind](), None
    before = {name: (id(parameter), parameter.detach().clone()) for name, parameter in model.named_parameters()}
    data = torch.randint(3, 60, (8, 16)) if any(as_pass(spec).needs_calibration for spec in specs) else None
    try:
        retrofit.apply(model, *specs, calibration=data)
    except DoesNotFitError as error:
        refusal = error
    if refusal is None:
        recipe, given = retrofit.recipe(model) or (), tuple(map(as_pass, specs))
        assert recipe == given or (data is not None and [one.name for one in recipe] == [one.name for one in given])
        return ""
    after = dict(model.named_parameters())
    assert list(before) == list(after) and retrofit.recipe(model) is None
    assert all(id(after[name]) == key and torch.equal(after[name], value) for name, (key, value) in before.items())
    assert refusal.remedy, "a refusal names the fix"
    return f"{refusal.what} {refusal.why}"


def pairs() -> list[Any]:
    return [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.long, id="-then-".join(case))
        for case in itertools.product(MODELS, SPECS, SPECS)
        if case[0] == "bart" or MERGE not in case or case[2] == "altup"
    ]


def test_every_pass_is_in_a_pair_of_every_run_of_the_tests() -> None:
    assert {name for _, *two in QUICK for name in two} == set(SPECS) == set(pass_names())


@pytest.mark.first(4)
@pytest.mark.parametrize(("kind", "first", "second"), pairs())
def test_two_passes_come_through_every_check_or_are_refused(kind: str, first: str, second: str) -> None:
    said = rewritten(kind, SPECS[first], SPECS[second])
    refused = REFUSED | REFUSED_ON[kind]
    expected = NO_CROSS if kind == "llama" and MERGE in (first, second) else refused.get((first, second), "")
    assert expected in said and bool(said) == bool(expected), said


@pytest.mark.long
def test_on_two_streams_a_feed_forward_is_refused_with_the_order_that_works() -> None:
    said = rewritten("llama", "reversible(scheme=terraformer)", "sparse-ffn(sparsity=4)")
    assert "two streams" in said


@pytest.mark.long
@pytest.mark.parametrize("behind", ["sparse-ffn(sparsity=4)", "shared-moe(experts=3)", "recurrence(rank=2)"])
@pytest.mark.parametrize("kind", ["llama", "bart"])
def test_feed_forwards_of_strided_layers_are_rewritten_like_others(kind: str, behind: str) -> None:
    assert not rewritten(kind, "sequence-altup(k=2, layers=all)", behind)
    strided = retrofit.apply(MODELS[kind](), "sequence-altup(k=2)", verify=False)
    plans = [retrofit.plan_of(model, behind).passes[0].plan for model in (strided, MODELS[kind]())]
    assert len(plans[0].sites) == len(plans[1].sites) and not plans[0].near_misses


@pytest.mark.long
def test_a_strided_layer_whose_padding_does_not_show_gets_no_recurrence() -> None:
    """In chunks of padded rows its state would go on by the anchors of other rows."""
    model = zoo.build(zoo.entry("causal/gemma2"))
    retrofit.apply(model, "sequence-altup(k=2)", "recurrence(rank=2)")  # verified, with the layers that are not strided
    account = rewrites(model)
    assert account is not None
    misses = account[-1].skipped
    assert [one.name for one in misses] == ["model.layers.1", "model.layers.2"] and all("padding" in one.why for one in misses)


@pytest.mark.long
def test_tables_beside_feed_forwards_of_strided_layers_are_refused_with_the_order_that_works() -> None:
    assert "a nested layer" in rewritten("llama", "sequence-altup(k=2, layers=all)", "memory(lookup=softmax, beside=ffns)")


@pytest.mark.long
def test_a_layer_inside_a_strided_one_is_strided_already() -> None:
    assert "strided already" in rewritten("llama", SKIPPING, "sequence-altup(k=2)")
    assert not rewritten("llama", SKIPPING, "sequence-altup(k=2, layers=all)")  # the others


def forms(name: str) -> st.SearchStrategy[tuple[str, str]]:
    return st.tuples(st.just(name), st.sampled_from((SPECS[name], *OTHERWISE.get(name, ()))))


@pytest.mark.long
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@example(kind="llama", recipe=[("shared-moe", "shared-moe(experts=3)"), ("memory", "memory"), ("altup", "altup(k=2)")])
@example(kind="bart", recipe=[("memory", "memory(beside=ffns)"), ("shared-moe", "shared-moe(experts=3)"), ("sum", "sum")])
@example(kind="bart", recipe=[("sparse-qkv", "sparse-qkv(kernel=1)"), ("sequence-altup", SKIPPING), ("altup", "altup(k=2)")])
@example(kind="llama", recipe=[("shared-moe", SHARING), ("sparse-qkv", "sparse-qkv"), ("sparse-loss", "sparse-loss(modules=4)")])
@example(kind="bart", recipe=[("shared-moe", SHARING), ("sparse-qkv", "sparse-qkv(kernel=1)"), ("sum", "sum")])  # tied biases
@example(kind="bart", recipe=[("sparse-qkv", "sparse-qkv(kernel=1)"), ("shared-moe", SHARING), ("sum", "sum")])
@example(kind="bart", recipe=[("sequence-altup", SKIPPING), ("merge-cross-attention", "merge-cross-attention"), ("sum", "sum")])
@given(
    kind=st.sampled_from(sorted(MODELS)),
    recipe=st.lists(st.sampled_from(sorted(SPECS)).flatmap(forms), min_size=3, max_size=3, unique_by=lambda one: one[0]),
)
def test_three_passes_are_refused_only_where_two_of_them_are(kind: str, recipe: list[tuple[str, str]]) -> None:
    said = rewritten(kind, *(spec for _, spec in recipe))
    refused = REFUSED | REFUSED_ON[kind]
    two = [(refused[one[0], other[0]], SPECS[one[0]] == one[1], SPECS[other[0]] == other[1])
           for one, other in itertools.combinations(recipe, 2) if (one[0], other[0]) in refused]  # fmt: skip
    given_forms = itertools.combinations([spec for _, spec in recipe], 2)
    two += [(REFUSED_FORMS[one], False, False) for one in given_forms if one in REFUSED_FORMS]
    if kind == "llama" and any(name == MERGE for name, _ in recipe):
        two.append((NO_CROSS, True, True))
    assert not said or any(reason in said for reason, *_ in two), said
    assert said or not any(first and second for _, first, second in two), "two of these forms are refused by themselves"


@pytest.mark.long
@pytest.mark.first(1)
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "gpt_neox", "opt", "granite", "cohere"])
def test_convolutions_in_strided_layers_go_on_behind_the_anchors_of_their_row(family: str) -> None:
    """Rows padded on the left reach their anchors at different steps, and tokens are taken back: each row is what it is alone.

    A convolution's filters begin at zero for earlier tokens, so the parameters have moved.
    """
    model = zoo.build(zoo.entry(f"causal/{family}"), num_hidden_layers=2)
    found = verdict(model, "sequence-altup(k=4, layers=1)", "sparse-qkv(layers=1)", nudge=True)
    assert found.status == "passed", found.why
    moved(model)
    pads, total = (3, 0, 1), 14
    ids = torch.randint(3, 60, (len(pads), total), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(total) >= torch.tensor(pads).unsqueeze(1)).long()
    numbered = {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)} if accepts(model, "position_ids") else {}
    cache, parts = DynamicCache(config=model.config), []
    cache.activate_past_recording()

    def decoded(start: int, end: int) -> torch.Tensor:
        chunk = {name: value[:, start:end] for name, value in numbered.items()}
        return model(ids[:, start:end], attention_mask=mask[:, :end], past_key_values=cache, **chunk).logits  # type: ignore[no-any-return]

    with torch.no_grad():
        for start, end in itertools.pairwise((0, 6, 7, 8, 11, 14)):
            parts.append(decoded(start, end))
            if start:
                cache.crop(start - end)
                parts[-1] = decoded(start, end)
        for row, pad in enumerate(pads):
            alone = model(ids[row : row + 1, pad:], use_cache=False).logits[0]
            torch.testing.assert_close(torch.cat(parts, 1)[row, pad:], alone, rtol=1e-4, atol=1e-4)


@pytest.mark.long
@pytest.mark.first(1)
@pytest.mark.parametrize("spec", ["sparse-qkv(output=mult-conv)", "recurrence"])
@pytest.mark.parametrize("how", [{"num_beams": 3}, {"cache_implementation": "static"}], ids=["beams", "static"])
def test_beams_and_static_caches_keep_what_modules_in_strided_layers_remember(how: dict[str, Any], spec: str) -> None:
    model = tiny_models.llama(num_hidden_layers=3)
    model = moved(retrofit.apply(model, "sequence-altup(k=2)", spec, verify=False).double())
    ids = torch.randint(3, tiny_models.VOCABULARY, (3, 9), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(9) >= torch.tensor([[3], [0], [1]])).long()
    given = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 9, "min_new_tokens": 9, "pad_token_id": 0}
    expected = model.generate(ids, use_cache=False, num_beams=how.get("num_beams", 1), **given)
    assert torch.equal(model.generate(ids, **given, **how), expected)


@pytest.mark.long
def test_biases_that_are_tied_while_their_weights_are_gone_keep_their_size(tmp_path: Path) -> None:
    model = tiny_models.llama(attention_bias=True)
    retrofit.apply(model, SHARING, "sparse-qkv(kernel=1)", verify=False)
    assert any(name.endswith("q_proj.bias") for name in model.all_tied_weights_keys)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    ids = torch.arange(12)[None]
    assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_modules_that_layers_share_do_not_hide_that_ids_are_handed_down() -> None:
    """A tracer calls stand-ins of shared modules and of all around them; the layers are found to get the ids all the same."""
    model = tiny_models.llama()
    retrofit.apply(model, "shared-moe(experts=3)", "memory", verify=False)
    assert not any(isinstance(vars(module).get("forward"), InjectingForward) for module in model.modules())
    (stack,) = retrofit.inspect(model).stacks
    assert [layer.name for layer in stack.layers] == ["model.layers.0", "model.layers.1"]


@pytest.mark.long
def test_the_calls_of_a_module_are_told_apart_behind_a_binding() -> None:
    """Bloom does not hand its ids down, and its layers share a mixture: the tracer begins the paths of its norms anew."""
    config = transformers.BloomConfig(vocab_size=tiny_models.VOCABULARY, hidden_size=16, n_layer=2, n_head=2)
    model = tiny_models.built(config, transformers.BloomForCausalLM)
    retrofit.apply(model, "memory", "shared-moe(experts=3)", "altup(k=2)", verify=False)
    program = capture(model, named_inputs(model))
    owners = {call for node in program.graph.nodes if node in program.owner for call in program.owner[node].chain}
    assert {call.index for call in owners if call.path == "transformer.ln_f.layer"} == {0, 1}


@pytest.mark.parametrize("order", [("shared-moe(groups=0)", "memory"), ("memory", "shared-moe(groups=0)"), ("memory", "memory")])
def test_ids_reach_the_tables_whoever_stands_around_the_forward_of_the_model(order: tuple[str, ...]) -> None:
    """The model runs its layers itself and hands nothing down, so its own forward is where ids are bound and losses added."""
    torch.manual_seed(0)
    model = Model(8, Plain(8, 24, "relu", True), Plain(8, 24, "relu", True)).eval()
    expected = model(IDS)
    retrofit.apply(model, *order, example_inputs={"ids": IDS}, verify=False)
    torch.testing.assert_close(model(IDS), expected)
    tables = [module for module in model.modules() if isinstance(module, ExternalMemory)]
    assert len(tables) == 2 * order.count("memory")
    for table in tables:
        before = model(IDS)
        with torch.no_grad():
            table.b[IDS[0, 3]] += 1.0
        moved = (model(IDS) - before).abs().amax(-1) > 1e-6
        assert moved[0, 3] and not moved[0, :3].any() and not moved[1].any(), "that token's row, and what attends to it"
