"""A forward in wider arithmetic is that of the model cast to it, with every dtype that its code names cast as well."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from support.tiny_models import VOCABULARY, bert, built, gpt2, llama, t5, vit
from torch import Tensor, nn
from torch.nn import functional as F

from retrofit.inputs.example_inputs import named_inputs
from retrofit.inputs.probes import logits_of, run
from retrofit.numerics.agreement import Arithmetic
from retrofit.numerics.distances import distance
from retrofit.numerics.precision import SLICE, SplitReductions, Widened

SIZES = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "pad_token_id": 0}
HEADS = {"num_attention_heads": 2, "intermediate_size": 24, "max_position_embeddings": 32}


def albert() -> Any:
    return built(transformers.AlbertConfig(**SIZES, **HEADS, embedding_size=8), transformers.AlbertForMaskedLM)


def mamba() -> Any:
    return built(transformers.MambaConfig(**SIZES, state_size=4), transformers.MambaForCausalLM)


def mixtral(**options: Any) -> Any:
    config = transformers.MixtralConfig(**SIZES, **HEADS, num_key_value_heads=2, num_local_experts=4, **options)
    return built(config, transformers.MixtralForCausalLM)


def whisper() -> Any:
    sides = {f"{side}_{name}": 2 for side in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    widths = {"d_model": 16, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "num_mel_bins": 8}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    lengths = {"max_source_positions": 20, "max_target_positions": 20, "suppress_tokens": None, "begin_suppress_tokens": None}
    config = transformers.WhisperConfig(vocab_size=VOCABULARY, **sides, **widths, **tokens, **lengths)
    return built(config, transformers.WhisperForConditionalGeneration)


def inputs_of(model: Any) -> dict[str, Any]:
    if isinstance(model, transformers.WhisperForConditionalGeneration):
        sound = torch.randn(2, 8, 40, generator=torch.Generator().manual_seed(1))
        return {"input_features": sound, "decoder_input_ids": torch.arange(3, 17).view(2, 7), "use_cache": False}
    return named_inputs(model)


@pytest.fixture
def float32_means_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that names float32 gets float64."""
    monkeypatch.setattr(torch, "float32", torch.float64)
    monkeypatch.setattr(torch, "float", torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


@pytest.mark.parametrize("build", [llama, gpt2, t5, bert, albert, mamba, mixtral, whisper, vit])
def test_a_model_computes_what_it_does_cast(build: Callable[[], Any], request: pytest.FixtureRequest) -> None:
    model = build()
    inputs = inputs_of(model)
    narrow = logits_of(run(model, inputs))
    with Widened():
        wide = logits_of(run(model, inputs))
    assert wide.dtype == torch.float64 and distance(narrow, wide) > 0
    assert torch.equal(narrow, logits_of(run(model, inputs)))  # it is as it was
    request.getfixturevalue("float32_means_float64")
    if build is mixtral:  # torch has no grouped product in float64
        model.set_experts_implementation("eager")
    cast = copy.deepcopy(model).double()
    for module in cast.modules():  # tables that a cast loses are computed again
        if hasattr(module, "rope_init_fn") or hasattr(module, "compute_default_rope_parameters"):
            module.inv_freq = torch.as_tensor(module.inv_freq)
    expected = logits_of(run(cast, {name: doubled(value) for name, value in inputs.items()}))
    assert distance(wide, expected) < 1e-12


def doubled(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_single(narrow: torch.dtype) -> None:
    model = llama().to(narrow)
    inputs = named_inputs(model)
    with Widened(torch.float32):
        wide = logits_of(run(model, inputs))
    expected = logits_of(run(copy.deepcopy(model).float(), inputs))
    assert wide.dtype == torch.float32 and distance(wide, expected) < 1e-6


def test_gradients_are_those_in_wide_arithmetic() -> None:
    model = llama()
    inputs = named_inputs(model)
    with Widened():
        model(**inputs).logits.square().sum().backward()
    cast = copy.deepcopy(model).double()
    cast.zero_grad()
    cast(**inputs).logits.square().sum().backward()
    theirs = dict(cast.named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float32
        assert parameter.grad is not None
        assert distance(parameter.grad, theirs[name].grad) < 5e-6, name  # the norms of the cast one are still in float32


class Writes(nn.Module):
    """Fills a buffer part by part, and reads what it wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("memory", torch.zeros(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        self.memory[:, 1:].copy_(x / 3)
        self.memory.mul_(1 / 7)
        self.memory[0].add_(x[0, 0], alpha=0.1)
        return self.memory.sum(-1)


def test_what_is_written_into_a_narrow_buffer_is_read_in_full() -> None:
    narrow, wide = Writes(), Writes().double()
    x = torch.rand(2, 2, generator=torch.Generator().manual_seed(0))
    with Widened():
        ours = narrow(x)
        assert narrow.memory.dtype == torch.float32
    assert ours.dtype == torch.float64 and distance(ours, wide(x.double())) < 1e-15
    assert torch.equal(narrow.memory, wide.memory.float())


def test_integers_are_divided_in_wide_arithmetic() -> None:
    with Widened():
        assert (torch.tensor(1) / 3).item() == 1 / 3
        assert torch.linspace(0, 1, 8).dtype == torch.float64
        assert torch.rand(3).exp().dtype == torch.float64
    assert (torch.tensor(1) / 3).dtype == torch.float32 and torch.get_default_dtype() == torch.float32


def test_random_numbers_are_those_that_are_drawn_without() -> None:
    def draw() -> list[Tensor]:
        torch.manual_seed(5)
        x = torch.full((4, 5), 0.5)
        drawn = [
            torch.rand(4),
            torch.randn(7),
            torch.rand_like(x),
            nn.functional.dropout(x),
            torch.bernoulli(x),
            torch.normal(0.0, 1.0, (3,)),
        ]
        return [*drawn, torch.empty(3).exponential_(), torch.empty(3).uniform_(-1, 1)]

    narrow = draw()
    with Widened():
        wide = draw()
    for one, other in zip(narrow, wide, strict=True):
        assert torch.equal(one.double(), other)


def test_whole_numbers_are_drawn_as_without() -> None:
    def draw() -> list[Tensor]:
        torch.manual_seed(5)
        generator = torch.Generator().manual_seed(6)
        ids = torch.arange(6)
        drawn = [torch.randint(9, (4,)), torch.randint(2, 9, (4,), generator=generator), torch.randperm(5)]
        return [*drawn, torch.randperm(5, generator=generator), torch.randint_like(ids, 9), ids[torch.randint(6, (3,))]]

    narrow = draw()
    with Widened():
        wide = draw()
    for one, other in zip(narrow, wide, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)


@pytest.mark.parametrize("rows", [3, 1])  # one is multiplied as a batch
@pytest.mark.parametrize("bias", [True, False])
def test_a_large_weight_is_widened_in_slices(bias: bool, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    linear = nn.Linear(16, 1 + SLICE // 4, bias=bias)
    x = torch.randn(rows, 5, 16, generator=torch.Generator().manual_seed(0))
    sizes: list[int] = []

    def watched(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def watching(value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            sizes.append(value.numel())
            return original(value, *args, **kwargs)

        return watching

    with monkeypatch.context() as patch, torch.no_grad(), Widened():
        patch.setattr(Tensor, "to", watched(Tensor.to))
        patch.setattr(torch, "empty_like", watched(torch.empty_like))
        ours = linear(x)
    assert SLICE / 2 < max(sizes) <= SLICE
    assert distance(ours, copy.deepcopy(linear).double()(x.double())) < 1e-14


def test_experts_without_a_kernel_in_float64() -> None:
    generator = torch.Generator().manual_seed(0)
    rows, weights = torch.randn(9, 8, generator=generator), torch.randn(3, 8, 16, generator=generator)
    ends = torch.tensor([4, 4, 9], dtype=torch.int32)
    with Widened():
        ours = nn.functional.grouped_mm(rows, weights, offs=ends)
    expected = torch.cat([rows[:4].double() @ weights[0].double(), rows[4:].double() @ weights[2].double()])
    assert distance(ours, expected) < 1e-15


@pytest.mark.parametrize("norm", [F.rms_norm, torch.rms_norm, torch.ops.aten.rms_norm.default])
@torch.no_grad()
def test_a_norm_is_given_one_width(norm: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """Several are computed too, but torch warns of them, once a process: `torch.set_warn_always` lets each say so."""
    x, weight = torch.randn(2, 8), torch.randn(8)
    expected = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings(), Widened():
            warnings.simplefilter("error")
            found = norm(x * 1, (8,), weight, 1e-5)
    finally:
        torch.set_warn_always(False)
    assert "Warning" not in capfd.readouterr().err  # an operation that a graph calls warns there
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-14)


def test_complex_tables() -> None:
    table = torch.polar(torch.ones(4), torch.arange(4.0))
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    with Widened():
        ours = torch.view_as_real(torch.view_as_complex(x.float().view(2, 4, 2)) * table).flatten(1)
    expected = torch.view_as_real(torch.view_as_complex(x.double().view(2, 4, 2)) * table.to(torch.complex128)).flatten(1)
    assert ours.dtype == torch.float64 and distance(ours, expected) < 1e-15


def test_it_works_in_inference_mode_and_under_autocast() -> None:
    linear, x = nn.Linear(4, 3), torch.full((2, 4), 1 / 3)
    expected = copy.deepcopy(linear).double()(x.double())
    with torch.inference_mode(), Widened():
        assert distance(linear(x), expected) < 1e-15
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad(), Widened():
        assert distance(linear(x), expected) < 1e-15


def test_a_narrow_number_is_read_in_full() -> None:
    with Widened():
        assert math.isclose((torch.tensor(1.0) / 3).item(), 1 / 3, rel_tol=1e-15)


@pytest.mark.parametrize("build", [llama, gpt2])
def test_split_sums_are_the_same_function_rounded_otherwise(build: Any) -> None:
    model = build().double()
    plain = logits_of(run(model, named_inputs(model)))
    with SplitReductions():
        split = logits_of(run(model, named_inputs(model)))
    assert 0.0 < distance(split, plain) < 1e-13


def test_split_sums_move_outputs_as_float32_does() -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(512, 512), nn.GELU())))
    values = torch.randn(8, 512)
    with torch.no_grad():
        plain, exact = layers(values), layers.double()(values.double())
        layers.float()
        with SplitReductions():
            split = layers(values)
    assert 0.2 < distance(split, plain) / distance(plain, exact) < 5.0


def test_inputs_are_run_once_only_while_remembering() -> None:
    model = llama()
    calls: list[Any] = []
    model.register_forward_pre_hook(lambda *args: calls.append(args))
    arithmetic, inputs = Arithmetic(model, named_inputs(model)), named_inputs(model)
    with arithmetic.remembering():
        first = arithmetic.logits(inputs)
        assert arithmetic.logits({**inputs, "input_ids": inputs["input_ids"].clone()}) is first and len(calls) == 1
        other = arithmetic.logits({**inputs, "input_ids": inputs["input_ids"].flip(0)})
        assert len(calls) == 2 and not torch.equal(first, other)
    arithmetic.logits(inputs)
    assert len(calls) == 3
