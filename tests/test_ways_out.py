"""A refusal says the fix: what the modules of a model cannot hold is rewritten on its graph, or the message names that way."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from graph_assessment import PASSES
from support import other_zoos, zoo
from support.image_models import images_among_tokens, llava
from support.refusals import refused
from torch import Tensor, fx, nn
from transformers import PretrainedConfig, PreTrainedModel

import retrofit
from retrofit import preview, rewriting
from retrofit.errors import CaptureError, DoesNotFitError, RetrofitError, without_form
from retrofit.preview import BECOMES_GRAPH, GRAPH_FIX
from retrofit.rewriting import apply_reported
from retrofit.surgery import Edit
from retrofit.surgery.wrappers import Wrapper

ARCHITECTURES = [
    "causal/beam",
    "causal/bitnet",
    "causal/mamba",
    "causal/recurrent_gemma",
    "masked/albert",
    "masked/funnel",
    "image/vit",
]
VOCABULARY, WIDTH, HEADS, HIDDEN = 61, 32, 4, 96


class Masked(nn.Module):
    """torch's encoder between an embedding and a head, told which tokens are padding."""

    def __init__(
        self, layers: int = 3, norm_first: bool = False, batch_first: bool = True, act: str = "gelu", bias: bool = True
    ) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        one = nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, 0.1, act, batch_first=batch_first, norm_first=norm_first, bias=bias)
        self.encoder = nn.TransformerEncoder(one, layers)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.embedding(input_ids)
        padding = None if attention_mask is None else attention_mask == 0
        x = x if self.batch_first else x.transpose(0, 1)
        states = self.encoder(x, src_key_padding_mask=padding)
        logits: Tensor = self.head(states if self.batch_first else states.transpose(0, 1))
        return logits


def masked(seed: int = 0, **how: object) -> Masked:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Masked(**how).eval()  # type: ignore[arg-type]


def padded() -> dict[str, Tensor]:
    ids = torch.randint(VOCABULARY, (2, 11), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[1, 7:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def is_what_it_was(model: nn.Module, before: nn.Module) -> bool:
    state, other = model.state_dict(), before.state_dict()
    same = state.keys() == other.keys() and all(torch.equal(state[name], other[name]) for name in state)
    return same and [(name, type(one)) for name, one in model.named_modules()] == [
        (name, type(one)) for name, one in before.named_modules()
    ]


def learns(model: nn.Module, given: dict[str, Tensor]) -> bool:
    """Whether a step of training reaches the new parameters and changes the loss."""
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(2):
        torch.manual_seed(0)
        output = model(**given)
        logits = next(iter(output.values())) if isinstance(output, dict) else output
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), given["input_ids"].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses[1] < losses[0]


# ── torch's own layers ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.long
def test_what_the_layers_of_torch_cannot_hold_is_rewritten_on_their_graph() -> None:
    model, given = masked(layers=2), padded()
    before = copy.deepcopy(model)
    planned = retrofit.plan_of(model, "sparse-ffn(sparsity=4)", example_inputs=given)
    applied = apply_reported(model, "sparse-ffn(sparsity=4)", example_inputs=given)
    assert isinstance(applied.model, fx.GraphModule) and applied.report is not None and applied.report.ok
    assert BECOMES_GRAPH in applied.rewrites[0].notes[0] and "gelu" in applied.rewrites[0].notes[0]
    assert planned.fits and planned.passes[0].plan.sites == applied.rewrites[0].sites
    assert any(BECOMES_GRAPH in note for note in planned.passes[0].plan.notes)
    assert is_what_it_was(model, before)
    assert learns(applied.model, given)


@pytest.mark.long
def test_the_fused_code_of_torch_does_not_go_past_a_new_module() -> None:
    """With padding, in evaluation mode and without gradients, torch's encoder gives its layers nested tensors."""
    model, given = masked(), padded()
    with torch.no_grad():
        expected = model(**given)
    rewritten = retrofit.apply(model, "altup(k=2)", example_inputs=given)
    assert rewritten is model
    real = given["attention_mask"].bool()
    with torch.no_grad():
        found = rewritten(**given)
    torch.testing.assert_close(found[:, : expected.shape[1]][real[:, : expected.shape[1]]], expected[real[:, : expected.shape[1]]])
    assert learns(rewritten, given)


def test_switches_of_fused_code_are_those_around_a_new_module_and_come_back() -> None:
    model = masked()
    edit = Edit(model)
    edit.replace_module("encoder.layers.1.linear1", Wrapper(model.encoder.layers[1].linear1))
    first, second, _ = model.encoder.layers
    assert not model.encoder.use_nested_tensor and not second.activation_relu_or_gelu and first.activation_relu_or_gelu == 2
    edit.undo()
    assert model.encoder.use_nested_tensor and second.activation_relu_or_gelu == 2


@pytest.mark.long
@pytest.mark.parametrize("spec", ["sequence-altup(k=1)"])
def test_a_mask_by_tokens_in_which_zero_is_real(spec: str) -> None:
    model, given = masked(), padded()
    with torch.enable_grad():
        expected = model(**given)
    found = retrofit.apply(model, spec, example_inputs=given)(**given)
    real = given["attention_mask"].bool()
    torch.testing.assert_close(found[real], expected[real], rtol=1e-4, atol=1e-5)


OPTIONS = [
    {"norm_first": norm_first, "batch_first": batch_first, "act": act, "bias": bias}
    for norm_first, batch_first, (act, bias) in itertools.product((False, True), (True, False), (("gelu", True), ("relu", False)))
]


@pytest.mark.long
@pytest.mark.parametrize("how", OPTIONS, ids=str)
@pytest.mark.parametrize("one", [name for name in PASSES if name != "merge-cross-attention"])  # which is for decoders
def test_every_pass_on_every_form_of_the_encoder(how: dict[str, object], one: str) -> None:
    model, given = masked(**how), padded()
    before = copy.deepcopy(model)
    applied = apply_reported(model, PASSES[one], example_inputs=given, count_flops=False)
    assert applied.report is not None and applied.report.ok and applied.rewrites[0].sites
    assert applied.model is model or (isinstance(applied.model, fx.GraphModule) and is_what_it_was(model, before))
    assert learns(applied.model, given)


@pytest.mark.long
def test_a_padded_input_that_torch_computes_as_a_nested_tensor_is_compared() -> None:
    applied = apply_reported(masked(), "sum", example_inputs=padded(), count_flops=False)
    assert applied.report is not None and applied.report.ok and applied.report["function"].status == "passed"


class Translator(nn.Module):
    """torch's encoder and decoder in one module, which takes the token ids of both."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, batch_first=True), 2)
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(WIDTH, HEADS, HIDDEN, batch_first=True), 2)

    def forward(self, input_ids: Tensor, decoder_input_ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(decoder_input_ids.shape[1])
        read = self.encoder(self.embedding(input_ids))
        logits: Tensor = self.head(self.decoder(self.embedding(decoder_input_ids), read, tgt_mask=mask, tgt_is_causal=True))
        return logits


@pytest.mark.long
@pytest.mark.first(1)
@pytest.mark.parametrize(("spec", "graph"), [("memory", False), ("memory(beside=ffns)", True)])
def test_two_stacks_in_one_module_look_up_ids_of_their_own(spec: str, graph: bool) -> None:
    torch.manual_seed(0)
    model = Translator().eval()
    given = {"input_ids": torch.tensor([[1, 2, 3, 4, 5]]), "decoder_input_ids": torch.tensor([[6, 7, 8]])}
    expected = model(**given)
    made = retrofit.apply(model, spec, example_inputs=given, verify=False)
    assert isinstance(made, fx.GraphModule) is graph
    torch.testing.assert_close(made(**given), expected, rtol=1e-5, atol=1e-5)
    made(**given).square().sum().backward()
    tables = {name: one.grad for name, one in made.named_parameters() if len(one) == VOCABULARY and "memory" in name}
    assert len(tables) == 4
    for name, gradient in tables.items():
        assert gradient is not None
        read = gradient.abs().sum(-1).nonzero().flatten().tolist()
        assert read == given["input_ids" if "encoder" in name else "decoder_input_ids"].flatten().tolist()


class Detecting(Translator):
    """Leaves it to torch to detect that the mask is causal, which reads its values; `shown` may hide more."""

    def forward(self, input_ids: Tensor, decoder_input_ids: Tensor, shown: Tensor | None = None) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(decoder_input_ids.shape[1])
        mask = mask if shown is None else mask + shown
        logits: Tensor = self.head(self.decoder(self.embedding(decoder_input_ids), self.embedding(input_ids), tgt_mask=mask))
        return logits


@pytest.mark.long
def test_a_decoder_that_detects_its_causal_mask_is_rewritten_on_its_graph() -> None:
    torch.manual_seed(0)
    model, given = Detecting().eval(), {"input_ids": torch.arange(5)[None], "decoder_input_ids": torch.arange(7)[None] + 6}
    applied = apply_reported(model, "sparse-ffn(sparsity=4)", example_inputs=given, count_flops=False)
    assert (
        isinstance(applied.model, fx.GraphModule) and applied.report is not None and applied.report["causality"].status == "passed"
    )
    with_mask = given | {"shown": torch.zeros(7, 7)}
    for emit in ("module", "graph"):  # there the values that are read are an input's
        with pytest.raises(RetrofitError, match="data-dependent") as caught:
            retrofit.apply(model, "recurrence", example_inputs=with_mask, emit=emit)
        assert without_form(caught.value.remedies, "graph") == caught.value.remedies != ()
    assert isinstance(caught.value, CaptureError)


class OfDictionary(nn.Module):
    """torch's encoder again, its arguments in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = masked(layers=3)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        logits: Tensor = self.inside(batch["input_ids"])
        return logits


def test_where_modules_and_graph_do_not_fit_the_fix_is_neither() -> None:
    given = {"batch": {"input_ids": padded()["input_ids"]}}
    raised = {}
    for emit in ("graph", "module"):
        with pytest.raises(RetrofitError) as caught:
            retrofit.apply(OfDictionary().eval(), "sequence-altup(k=1)", example_inputs=given, emit=emit)
        raised[emit] = caught.value
    remedies = raised["graph"].remedies
    kept = without_form(copy.deepcopy(remedies), "module")
    assert isinstance(raised["graph"], CaptureError) and len(kept) == len(remedies) - 1 == 1
    assert isinstance(raised["module"], DoesNotFitError) and raised["module"].remedies == kept
    assert all(remedy in raised["graph"].remedy for remedy in remedies)


# ── The rule ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Brought(PreTrainedModel):
    """The same as somebody's own transformers model."""

    config_class = PretrainedConfig

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        self.inside = masked(layers=2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        logits: Tensor = self.inside(input_ids, attention_mask)
        return logits


@pytest.mark.long
@pytest.mark.tries_graph
def test_a_transformers_model_stays_one_and_the_refusal_names_the_graph() -> None:
    model, given = Brought(PretrainedConfig(vocab_size=VOCABULARY)).eval(), padded()
    before = copy.deepcopy(model)
    with pytest.raises(DoesNotFitError) as refused:
        retrofit.apply(model, "sparse-ffn(sparsity=4)", example_inputs=given)
    assert GRAPH_FIX in refused.value.remedies and is_what_it_was(model, before)
    planned = retrofit.plan_of(model, "sparse-ffn(sparsity=4)", example_inputs=given)
    assert not planned.fits and GRAPH_FIX in str(planned)
    made = retrofit.apply(model, "sparse-ffn(sparsity=4)", example_inputs=given, emit="graph", verify=False)
    assert isinstance(made, fx.GraphModule)


def test_an_encoder_whose_stream_is_read_before_its_end_may_stay_as_it_is() -> None:
    """Each refusal says what to add, until the model is rewritten."""
    given, ways = images_among_tokens(), ["embedding=recycled", "stacks=decoder"]
    for count, way in enumerate(ways):
        with pytest.raises(DoesNotFitError) as refused:
            retrofit.apply(llava(), f"altup({', '.join(['k=2', *ways[:count]])})", example_inputs=given, verify=False)
        assert way in str(refused.value.remedy)
    model = retrofit.apply(llava(), f"altup({', '.join(['k=2', *ways])})", example_inputs=given, verify=False)
    with torch.no_grad():
        torch.testing.assert_close(model(**given).logits, llava()(**given).logits)


def test_a_refusal_that_no_graph_changes_does_not_name_one() -> None:
    model, given = other_zoos.built("vision transformer"), other_zoos.examples("vision transformer")
    before = copy.deepcopy(model)
    with pytest.raises(DoesNotFitError) as refused:
        retrofit.apply(model, "sum", example_inputs=given)
    assert refused.value.remedy and "graph" not in str(refused.value) and is_what_it_was(model, before)


@pytest.mark.long
def test_what_no_form_of_a_model_fits_is_not_tried_as_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its experts are so in the graph too, which is the slow way to the same refusal."""
    model, spec = zoo.build(zoo.entry("causal/mixtral")).eval(), "sparse-ffn(sparsity=4)"
    with refused(DoesNotFitError, "sparse-ffn", "mixture of experts"):
        retrofit.apply(model, spec, emit="graph", verify=False)
    monkeypatch.setattr(rewriting, "fits_as_graph", lambda *known: pytest.fail("tried as a graph"))
    with refused(DoesNotFitError, "sparse-ffn", "mixture of experts") as caught:
        retrofit.apply(model, spec, verify=False)
    assert caught.value.in_any_form
    forms = []
    once = preview.plan_once
    monkeypatch.setattr(preview, "plan_once", lambda *known: forms.append(known[3]) or once(*known))
    assert not retrofit.plan_of(model, spec).fits and forms == ["module"]


def test_an_error_without_a_fix_has_no_line_for_one() -> None:
    assert str(RetrofitError("the thing", why="the reason")) == "the thing\n  why: the reason"
    assert str(RetrofitError("the thing", remedy="the remedy")) == "the thing\n  fix: the remedy"
