"""Activation sparsity on whole models: against the dense model with hooks that mask what its linear layers read, entry by entry."""

from __future__ import annotations

import copy
import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import tiny_models, zoo
from support.refusals import refused
from torch import Tensor, nn

import retrofit
from retrofit.errors import DoesNotFitError, SpecError
from retrofit.inputs.probes import resized
from retrofit.onnx.importer import from_onnx
from retrofit.passes import ActivationSparsity
from retrofit.passes.activation_sparsity.levels import LayerPath, Magnitudes, Masks, RowSample, steps_of
from retrofit.passes.activation_sparsity.masked_products import ActivationMask, MaskedCode, MaskedProjection
from retrofit.passes.activation_sparsity.sites import MaskedWeight
from retrofit.provenance import provenance_of
from retrofit.rewriting import apply_reported

VOCABULARY = tiny_models.VOCABULARY


def mixtral() -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = transformers.MixtralConfig(vocab_size=VOCABULARY, num_local_experts=4, num_experts_per_tok=2, **sizes)
    return tiny_models.built(config, transformers.MixtralForCausalLM)


BUILD = {
    "llama": tiny_models.llama,
    "gpt2": tiny_models.gpt2,  # Conv1D, queries, keys and values in one matrix
    "bert": tiny_models.bert,
    "t5": tiny_models.t5,  # cross-attention
    "vit": tiny_models.vit,
    "bart": lambda: zoo.build(zoo.entry("seq2seq/bart"), encoder_layers=1, decoder_layers=1),
    "albert": lambda: zoo.build(zoo.entry("masked/albert")),  # one layer at every depth
    "phi3": lambda: zoo.build(zoo.entry("causal/phi3"), num_hidden_layers=2),  # gate and up in one matrix
    "gptj": lambda: zoo.build(zoo.entry("causal/gptj"), n_layer=2),  # beside the attention
    "mixtral": mixtral,
}
PLAIN = [name for name in BUILD if name != "mixtral"]
QUICK = ("llama", "gpt2", "t5", "mixtral")


def each(names: Any = BUILD) -> list[Any]:
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in names]


def ids(batch: int = 12, length: int = 16, seed: int = 0) -> Tensor:
    return torch.randint(5, 40, (batch, length), generator=torch.Generator().manual_seed(seed))


def inputs_of(name: str, **how: Any) -> dict[str, Tensor]:
    if name == "vit":
        return {"pixel_values": torch.randn(12, 3, 8, 8, generator=torch.Generator().manual_seed(how.get("seed", 0)))}
    both = {"decoder_input_ids": ids(**how)} if dense(name).config.is_encoder_decoder else {}
    return {"input_ids": ids(**how), **both}


@functools.cache
def dense(name: str) -> Any:
    return BUILD[name]().eval()


@functools.cache
def rewritten(name: str, options: str = "") -> Any:
    model = copy.deepcopy(dense(name))
    return retrofit.apply(model, f"activation-sparsity({options})", calibration=[inputs_of(name)], verify=False)


@torch.no_grad()
def logits(model: Any, **inputs: Tensor) -> Tensor:
    return zoo.logits(model.eval()(**inputs))


def masks(model: nn.Module) -> dict[str, ActivationMask]:
    """The masks of a model, by path."""
    return {path: module for path, module in model.named_modules() if isinstance(module, ActivationMask)}


def by_hand(x: Tensor, threshold: float, centre: Tensor | None = None) -> Tensor:
    """Every entry looked at by itself."""
    flat = x.reshape(-1, x.shape[-1]).clone()
    for row in flat:
        for feature, value in enumerate(row.tolist()):
            middle = 0.0 if centre is None else float(centre[feature])
            if abs(value - middle) < threshold:
                row[feature] = middle
    return flat.view(x.shape)


@pytest.mark.parametrize("centred", [False, True], ids=["zero", "centre"])
@pytest.mark.parametrize("name", each(PLAIN))
def test_it_computes_what_the_dense_model_does_on_masked_inputs(name: str, centred: bool) -> None:
    model, oracle = rewritten(name, f"centre={str(centred).lower()}"), copy.deepcopy(dense(name))
    changed = []
    for path, mask in masks(model).items():
        module = oracle.get_submodule(path.removesuffix(".mask"))

        def hide(module: nn.Module, args: Any, mask: ActivationMask = mask) -> Any:
            x = by_hand(args[0], float(mask.threshold), mask.centre)
            changed.append(not torch.equal(x, args[0]))
            return x, *args[1:]

        module.register_forward_pre_hook(hide)
    given_inputs = inputs_of(name, seed=1, batch=2)
    torch.testing.assert_close(logits(model, **given_inputs), logits(oracle, **given_inputs), rtol=1e-4, atol=1e-5)
    assert changed and sum(changed) > len(changed) // 2  # in more than half of the calls something was small
    assert not torch.equal(logits(model, **given_inputs), logits(dense(name), **given_inputs))


@pytest.mark.first(1)
@pytest.mark.parametrize("name", each())
def test_every_check_passes(name: str) -> None:
    model = retrofit.apply(copy.deepcopy(dense(name)), "activation-sparsity", calibration=[inputs_of(name)])
    assert masks(model) and retrofit.recipe(model) == (ActivationSparsity(level=0.4),)


@torch.no_grad()
@pytest.mark.parametrize("how", ["eager", "batched_mm", "grouped_mm"])
def test_experts_read_masked_inputs_whichever_way_they_are_run(how: str) -> None:
    model = copy.deepcopy(rewritten("mixtral"))
    model.set_experts_implementation(how)
    wrapped: Any = model.model.layers[0].mlp.experts
    assert isinstance(wrapped, MaskedCode) and wrapped.weights == ("gate_up_proj", "down_proj")
    experts, (first, second) = wrapped.layer, (float(mask.threshold) for mask in wrapped.masks)
    assert first > 0 and second > 0
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(0))
    chosen = torch.tensor([[0, 1], [1, 2], [3, 0], [2, 3], [1, 3]])
    weights = torch.linspace(0.1, 0.9, 10).view(5, 2)
    expected = torch.zeros_like(x)
    for token in range(5):
        for place in range(2):
            expert = int(chosen[token, place])
            gate, up = (experts.gate_up_proj[expert] @ by_hand(x[token : token + 1], first)[0]).chunk(2)
            h = by_hand((nn.functional.silu(gate) * up)[None], second)[0]
            expected[token] += weights[token, place] * (experts.down_proj[expert] @ h)
    torch.testing.assert_close(wrapped(x, chosen, weights), expected, rtol=1e-4, atol=1e-5)


class Recurrent(nn.Module):
    """Keeps a state, which the code around it resets."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.state = nn.Parameter(torch.randn(8, 8)), None

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight
        self.state = y if self.state is None else y + self.state
        return self.state


def test_code_around_a_site_resets_its_state() -> None:
    site, x = MaskedCode(Recurrent(), ["weight"], [ActivationMask(torch.empty(0), None)]), torch.randn(2, 8)
    first, second = site(x), site(x)
    site.state = None
    assert not torch.equal(first, second) and torch.equal(site(x), first)
    assert "state" not in vars(site) and site.weights == ("weight",)


@pytest.mark.long
def test_rows_of_codebooks_are_calibrated_together() -> None:
    entry = zoo.entry("causal/musicgen_melody")
    model = zoo.shallow(entry)
    data = zoo.inputs(entry, model, batch=8, seed=1)
    retrofit.apply(
        model, "activation-sparsity(loss=0.1)", example_inputs=zoo.inputs(entry, model), calibration=[data], verify=False
    )
    assert masks(model) and all(bool(mask.threshold > 0) for mask in masks(model).values())


@pytest.mark.long
def test_speech_models_are_calibrated_on_sound() -> None:
    depths, widths = {"encoder_layers": 1, "decoder_layers": 1}, {"d_model": 16, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "pad_token_id": 0, "decoder_start_token_id": 1}
    sizes = {
        "vocab_size": VOCABULARY,
        "num_mel_bins": 8,
        "max_source_positions": 12,
        "max_target_positions": 20,
        **depths,
        **widths,
    }
    config = transformers.WhisperConfig(bos_token_id=1, eos_token_id=2, **sizes, **heads)
    model = tiny_models.built(config, transformers.WhisperForConditionalGeneration)
    sound = torch.randn(12, 8, 24, generator=torch.Generator().manual_seed(0))
    retrofit.apply(model, "activation-sparsity", calibration=[{"input_features": sound, "decoder_input_ids": ids()}])
    assert len(masks(model)) == 16 and all(bool(mask.threshold > 0) for mask in masks(model).values())


# ── Levels ───────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@torch.no_grad()
def share_below(model: Any) -> float:
    """The share of entries in the dense model that lie below the thresholds, weighed by the sizes of the weights behind them."""
    below, total = 0.0, 0

    def see(mask: ActivationMask, args: Any, size: int) -> None:
        nonlocal below, total
        below, total = below + size * float((args[0].abs() < mask.threshold).double().mean()), total + size

    model, dial = copy.deepcopy(model), ActivationSparsity.recovery.dial
    assert dial is not None
    dial.turn(model, 0.0)
    for path, mask in masks(model).items():
        size = model.get_submodule(path.removesuffix(".mask")).layer.weight.numel()
        mask.register_forward_pre_hook(functools.partial(see, size=size))
    logits(model, **inputs_of("llama"))
    return below / total


@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    level=st.floats(0.0, 0.95),
    where=st.sampled_from(("all", "ffn", "attention", "down")),
    allocation=st.sampled_from(("greedy", "uniform")),
)
def test_the_share_of_zeros_is_the_level(level: float, where: str, allocation: str) -> None:
    spec = ActivationSparsity(level=level, where=where, allocation=allocation)
    model = retrofit.apply(copy.deepcopy(dense("llama")), spec, calibration=[inputs_of("llama")], verify=False)
    assert share_below(model) == pytest.approx(level, abs=0.03)  # a window in eight is held out from the sample


@pytest.mark.parametrize(
    ("where", "ends"),
    [
        ("down", {"down_proj"}),
        ("ffn", {"gate_proj", "up_proj", "down_proj"}),
        ("attention", {"q_proj", "k_proj", "v_proj", "o_proj"}),
    ],
)
def test_where_chooses_the_layers(where: str, ends: set[str]) -> None:
    plan = retrofit.plan_of(dense("llama"), f"activation-sparsity(where={where})").passes[0].plan
    assert {site.name.rpartition(".")[2] for site in plan.sites} == ends and len(plan.sites) == 2 * len(ends)
    one = retrofit.plan_of(dense("llama"), f"activation-sparsity(where={where}, layers=1)").passes[0].plan
    assert [site.name for site in one.sites] == [site.name for site in plan.sites if ".1." in site.name]


def layer_errors(model: Any) -> Tensor:
    """The squared errors of the layers, each on what it receives in the dense model."""
    found = []
    for depth, layer in enumerate(dense("llama").model.layers):

        def see(module: nn.Module, args: Any, kwargs: Any, y: Tensor, depth: int = depth) -> None:
            now = model.model.layers[depth](*args, **kwargs)
            found.append(((now - y).square().sum() / y.square().sum()).item())

        handle = layer.register_forward_hook(see, with_kwargs=True)
        logits(dense("llama"), **inputs_of("llama"))
        handle.remove()
    return torch.tensor(found)


def test_greedy_levels_cost_less_than_equal_ones() -> None:
    errors = {how: layer_errors(rewritten("llama", f"level=0.5, allocation={how}")) for how in ("greedy", "uniform")}
    assert bool((errors["greedy"] < errors["uniform"]).all()), errors
    equal = {
        float(mask.threshold)
        for path, mask in masks(rewritten("llama", "level=0.5, allocation=uniform")).items()
        if "q_proj" in path
    }
    assert len(equal) == 2  # a threshold of its own for each layer


def test_the_greedy_path_takes_the_cheapest_step() -> None:
    """Against the formula: errors that add up, for which the cheapest next step is known."""
    cost = {"a": 1.0, "b": 3.0, "c": 0.5}
    sizes = {"a": 10, "b": 100, "c": 10}
    ordered = torch.linspace(0, 1, 1001)
    modules = {path: ActivationMask(torch.zeros(1)) for path in cost}
    weights = {path: MaskedWeight(path, "up", sizes[path], 8, path) for path in cost}
    found = Masks(modules, weights, dict.fromkeys(cost, Magnitudes(ordered, None)))

    def error() -> float:
        return sum(cost[path] * float(modules[path].threshold) ** 2 for path in cost)

    path = LayerPath(found, list(cost), error)
    path.at(0.5)
    levels = dict.fromkeys(cost, 0.0)
    for share, step in path.steps.taken[1:]:
        rises = {one: cost[one] * ((levels[one] + 0.1) ** 2 - levels[one] ** 2) / sizes[one] for one in cost if levels[one] < 0.85}
        cheapest = min(rises, key=lambda one: rises[one])
        levels[cheapest] += 0.1
        assert step == pytest.approx(levels), "another step was cheaper"
        assert share == pytest.approx(sum(levels[one] * sizes[one] for one in cost) / 120)
    between = path.at(0.333)
    assert sum(between[one] * sizes[one] for one in cost) / 120 == pytest.approx(0.333)


def test_another_level_of_the_same_layers_takes_no_step_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """And it has the same thresholds as one whose steps are its own."""

    def thresholds(level: float) -> dict[str, float]:
        model = rewritten.__wrapped__("llama", f"level={level}")
        return {path: float(mask.threshold) for path, mask in masks(model).items()}

    steps_of.cache_clear()
    alone = thresholds(0.3)
    steps_of.cache_clear()
    thresholds(0.5)
    monkeypatch.setattr(LayerPath, "rise", lambda path: pytest.fail("a step was taken again"))
    assert thresholds(0.3) == alone


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(1, 30))
def test_a_sample_of_rows_is_evenly_spaced(counts: list[int], most: int) -> None:
    sample, first = RowSample(most), 0
    for count in counts:
        sample(torch.stack([torch.arange(first, first + count).float(), torch.ones(count)], 1))
        first += count
    kept = sample.rows()
    assert kept is not None and min(first, most) == len(kept)
    steps = kept[:, 0].diff()
    assert kept[0, 0] == 0 and (len(kept) < 2 or (steps.min() > 0 and steps.max() <= 2 * steps.min() + sample.every))


def test_rows_of_zeros_are_no_sample() -> None:
    sample = RowSample()
    sample(torch.zeros(3, 2))
    assert sample.rows() is None
    sample(torch.tensor([[0.0, 0.0], [0.0, 1.0]]))
    assert torch.equal(sample.rows(), torch.tensor([[0.0, 1.0]]))


def test_a_loss_gives_the_level() -> None:
    applied = apply_reported(
        copy.deepcopy(dense("llama")), "activation-sparsity(loss=+0.05)", calibration=ids(64), verify=False, count_flops=False
    )
    (spec,) = retrofit.recipe(applied.model) or ()
    assert spec == ActivationSparsity(loss=0.05)
    held_out = ids(64)[7::8]

    def loss(model: Any) -> float:
        return float(
            nn.functional.cross_entropy(logits(model, input_ids=held_out)[:, :-1].flatten(0, 1), held_out[:, 1:].flatten())
        )

    assert any(bool(mask.threshold > 0) for mask in masks(applied.model).values())
    assert loss(applied.model) - loss(dense("llama")) <= 0.05 + 1e-4


def test_without_a_loss_the_divergence_of_predictions_gives_it() -> None:
    windows = {name: torch.cat([value, value.flip(0)]) for name, value in inputs_of("t5").items()}
    held_out = {name: value[7::8] for name, value in windows.items()}

    def divergence(**options: Any) -> float:
        spec = ActivationSparsity(allocation="uniform", **options)
        model = retrofit.apply(copy.deepcopy(dense("t5")), spec, calibration=[windows], verify=False)
        found, expected = (logits(each_model, **held_out).log_softmax(-1) for each_model in (model, dense("t5")))
        return float((expected.exp() * (expected - found)).sum(-1).mean())

    assert 0.005 < divergence(loss=0.01) <= 0.0101
    assert divergence(level=0.8) > 0.01


# ── Kept weights ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("centred", [False, True], ids=["zero", "centre"])
@pytest.mark.parametrize("name", each())
def test_at_level_zero_it_is_the_dense_model_bit_for_bit(name: str, centred: bool) -> None:
    model = retrofit.apply(copy.deepcopy(dense(name)), ActivationSparsity(level=0, centre=centred), verify=False)
    assert torch.equal(logits(model, **inputs_of(name)), logits(dense(name), **inputs_of(name)))


@pytest.mark.first(1)
@pytest.mark.parametrize("name", each(("llama", "gpt2", "mixtral", "t5")))
def test_undo_gives_the_dense_model_back(name: str) -> None:
    undone = retrofit.undo(rewritten(name))
    assert undone.state_dict().keys() == dense(name).state_dict().keys()
    assert all(torch.equal(value, dense(name).state_dict()[key]) for key, value in undone.state_dict().items())
    assert all(mask.share == 1.0 for mask in masks(rewritten(name)).values())


def test_the_gradient_passes_all_entries() -> None:
    x = torch.tensor([[3.0, -0.1, 0.2, -2.0]], requires_grad=True)
    layer = nn.Linear(4, 2)
    module = MaskedProjection(layer, (0, "input"), ActivationMask(layer.weight))
    module.mask.threshold.fill_(0.5)
    y = module(x)
    torch.testing.assert_close(y, layer(torch.tensor([[3.0, 0.0, 0.0, -2.0]])))
    y.sum().backward()
    assert x.grad is not None and layer.weight.grad is not None
    torch.testing.assert_close(x.grad, layer.weight.sum(0, keepdim=True))
    torch.testing.assert_close(layer.weight.grad, torch.tensor([[3.0, 0.0, 0.0, -2.0]]).expand(2, -1))


def test_a_dial_turns_the_thresholds() -> None:
    model, dial = copy.deepcopy(rewritten("llama")), ActivationSparsity.recovery.dial
    assert dial is not None and dial.fits(model)
    dial.turn(model, 0.0)
    assert torch.equal(logits(model, input_ids=ids()), logits(dense("llama"), input_ids=ids()))
    dial.turn(model, 1.0)
    assert torch.equal(logits(model, input_ids=ids()), logits(rewritten("llama"), input_ids=ids()))
    dial.turn(model, math.inf)
    assert all(bool((mask(torch.ones(3)) == 0).all()) for mask in masks(model).values())


@pytest.mark.parametrize("name", each(("llama", "mixtral")))
def test_a_saved_model_computes_the_same(name: str, tmp_path: Path) -> None:
    model = rewritten(name)
    model.save_pretrained(tmp_path / "folder")
    retrofit.save(model, tmp_path / "model.pt")
    for loaded in (type(model).from_pretrained(tmp_path / "folder"), retrofit.load(tmp_path / "model.pt")):
        assert torch.equal(logits(loaded, **inputs_of(name)), logits(model, **inputs_of(name)))


@pytest.mark.first(1)
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_graphs_and_onnx_files_compute_the_same(name: str, tmp_path: Path) -> None:
    """A graph instead of modules; a file that is written; a file that is read, rewritten and written again."""
    model, inputs = rewritten(name), inputs_of(name, batch=2)
    graph = retrofit.apply(
        copy.deepcopy(dense(name)), "activation-sparsity", calibration=[inputs_of(name)], emit="graph", verify=False
    )
    torch.testing.assert_close(logits(graph, **inputs), logits(model, **inputs), rtol=1e-4, atol=1e-4)
    retrofit.export_onnx(copy.deepcopy(dense(name)), tmp_path / "dense.onnx")
    read = from_onnx(tmp_path / "dense.onnx")
    examples = resized(read, provenance_of(read).examples, 12, 16, seed=1)
    read = retrofit.apply(read, "activation-sparsity", calibration=[examples], verify=False)
    assert all(float(mask.threshold) > 0 for mask in masks(read).values()) and len(masks(read)) == len(masks(model))
    for rewritten_model in (model, read):
        made = retrofit.export_onnx(copy.deepcopy(rewritten_model), tmp_path / "out.onnx", force=True)
        assert made.files[0].gap is not None and made.files[0].gap < 1e-4


@pytest.mark.parametrize("targets", ["all-linear", ["down_proj.layer"]], ids=["all", "named"])
def test_adapters_read_the_masked_input(targets: Any) -> None:
    import peft

    model = copy.deepcopy(rewritten("llama"))
    torch.manual_seed(0)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False)).eval()
    read = adapted.base_model.model.model.layers[0].mlp.down_proj
    x = torch.randn(3, 24)
    low: Any = read.layer
    expected = low.base_layer(by_hand(x, float(read.mask.threshold)))
    expected = expected + low.scaling["default"] * low.lora_B["default"](
        low.lora_A["default"](by_hand(x, float(read.mask.threshold)))
    )
    torch.testing.assert_close(read(x), expected)
    with torch.no_grad():
        before = logits(adapted, input_ids=ids())
    torch.testing.assert_close(logits(retrofit.merge_adapters(adapted), input_ids=ids()), before, rtol=1e-4, atol=1e-4)


# ── Refusals ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("options", "option", "code"),
    [
        ({"level": 1.0}, "level", "range"),
        ({"level": 0.4, "loss": 0.02}, "level", "combination"),
    ],
)
def test_a_level_that_is_none_says_why(options: dict[str, Any], option: str, code: str) -> None:
    with refused(SpecError, "activation-sparsity", option=option, code=code):
        ActivationSparsity(**options)


@pytest.mark.parametrize(
    ("options", "option"),
    [
        ({"level": -0.1}, "level"),
        ({"loss": -0.02}, "loss"),
        ({"where": "head"}, "where"),
        ({"allocation": "best"}, "allocation"),
    ],
)
def test_an_option_out_of_range_is_named(options: dict[str, Any], option: str) -> None:
    with refused(SpecError, "activation-sparsity", option=option) as caught:
        ActivationSparsity(**options)
    assert caught.value.remedy


def test_without_data_there_are_no_thresholds() -> None:
    model = copy.deepcopy(dense("llama"))
    with refused(SpecError, "activation-sparsity", option="calibration", code="no-calibration") as caught:
        retrofit.apply(model, "activation-sparsity")
    assert "--calibrate" in caught.value.remedy and retrofit.recipe(model) is None


def test_an_input_is_masked_once() -> None:
    model = copy.deepcopy(rewritten("llama", "where=ffn"))
    with refused(DoesNotFitError, "activation-sparsity"):
        retrofit.apply(model, "activation-sparsity(where=down)", calibration=ids(), verify=False)
    retrofit.apply(model, "activation-sparsity(where=attention)", calibration=ids(), verify=False)
    assert len(masks(model)) == 14


class Convolutions(nn.Module):
    """Layers without a matrix: their only weights are kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(31, 8)
        self.layers = nn.ModuleList(nn.Conv1d(8, 8, 3, padding=1) for _ in range(2))
        self.head = nn.Linear(8, 31)

    def forward(self, input_ids: Tensor) -> Any:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = x + layer(x.transpose(1, 2)).transpose(1, 2).relu()
        return self.head(x)


def test_kernels_and_the_head_are_left_alone() -> None:
    model = Convolutions().eval()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(retrofit.RetrofitError) as caught:
        retrofit.apply(model, "activation-sparsity", calibration=ids() % 31, verify=False)
    assert caught.value.remedy
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items()) and not masks(model)


def test_routers_are_left_alone_with_the_reason() -> None:
    plan = retrofit.plan_of(dense("mixtral"), "activation-sparsity").passes[0].plan
    assert sorted(miss.name for miss in plan.near_misses) == [f"model.layers.{depth}.mlp.gate.weight" for depth in range(2)]
    assert not any("gate.weight" in weight.name for site in plan.sites for weight in site.weights)
