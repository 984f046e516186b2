"""Feed-forwards in slices, each with experts and a router of its own: against the dense function, plain loops, and by hand."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from support import zoo
from support.mixtures import D, blocks, build, logits, make
from support.tiny_models import llama
from torch import Tensor, nn
from torch._dynamo.utils import detect_fake_mode
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor.compile_fx import compile_fx, record_original_output_strides
from torch._inductor.debug import DebugContext
from torch._inductor.fx_passes.post_grad import post_grad_passes
from torch._inductor.graph import GraphLowering
from torch._inductor.ir import Layout
from torch._inductor.virtualized import V
from torch.nn import functional as F
from transformers.activations import ACT2FN
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, batched_mm_experts_forward, grouped_mm_experts_forward

import retrofit
from retrofit.errors import DoesNotFitError, SpecError
from retrofit.passes import SharedMoE
from retrofit.passes.shared_moe import mixture_of_experts
from retrofit.passes.shared_moe.mixture_of_experts import ExpertsView, MixtureOfExperts, combine_in_place, expert_load
from retrofit.passes.shared_moe.slicing import correlation_inside, nearest_with_room, together
from retrofit.rewriting import apply_reported
from retrofit.surgery import Rearranged
from retrofit.surgery.auxiliary_losses import auxiliary_losses

SLICED = SharedMoE(groups=0, slices=4, experts=3)
# Gated and plain feed-forwards, both gates in one, Conv1D with biases, one set of weights for all layers, two stacks, images.
MODELS = ("causal/llama", "causal/glm", "causal/gpt2", "masked/albert", "seq2seq/bart", "image/vit")


@pytest.mark.first(1)
@pytest.mark.parametrize("identity", MODELS)
@pytest.mark.parametrize("calibrated", [False, True])
def test_slices_compute_the_dense_function_with_as_many_active_units(identity: str, calibrated: bool) -> None:
    model, inputs = build(identity)
    expected, before = logits(model, inputs), sum(parameter.numel() for parameter in model.parameters())
    units = {path: module.units for path, module in blocks(build(identity, SharedMoE(groups=0))[0]).items()}
    data = next(iter(zoo.inputs(zoo.entry(identity), model).values())) if calibrated and "image" not in identity else None
    one = apply_reported(model, SLICED, calibration=data, example_inputs=inputs, verify=False, count_flops=False).rewrites[0]
    found = logits(model, inputs)
    assert SLICED.exact and one.exact
    assert float((found - expected).abs().max()) <= 1e-5 * float(expected.abs().max())
    assert sum(parameter.numel() for parameter in model.parameters()) - before == one.new_parameters
    assert {path: block.moe.units * 4 for path, block in blocks(model).items()} == units
    moe = next(iter(blocks(model).values())).moe
    assert (moe.stacked, moe.router.weight.shape[0], moe.down.weight.shape[0]) == (12, 12, 12)
    assert sorted(moe.order.tolist()) == list(range(4 * moe.units))


def looped(moe: MixtureOfExperts, x: Tensor, hidden: Any) -> tuple[Tensor, Tensor]:
    """Token by token and slice by slice, the weight written as exp of a difference that is zero; and the balance loss."""
    e_count, y, balance = moe.experts, torch.zeros_like(x), torch.zeros(())
    capacity = math.ceil(moe.capacity * len(x) / e_count - 1e-9) if moe.training and moe.capacity is not None else len(x)
    for s in range(moe.slices):
        router = moe.router.weight[s * e_count : (s + 1) * e_count]
        filled, mean = [0] * e_count, torch.zeros(e_count)
        rows = []
        for token in x:
            logs = (router @ token).log_softmax(0)
            c = int(logs.argmax())
            filled[c] += 1
            mean = mean + logs.exp() / len(x)
            z = [
                getattr(moe, name).weight[s * e_count + c] @ token
                + (0 if getattr(moe, name).bias is None else getattr(moe, name).bias[s * e_count + c])
                for name in moe.into
            ]
            h = hidden(*(z[port.matrix][port.start :: port.step][: moe.units] for port in moe.ports))
            out = moe.down.weight[s * e_count + c] @ h
            out = out if moe.down.bias is None else out + moe.down.bias[s * e_count + c]
            weight = (logs[c] - logs[c].detach()).exp()
            rows.append(weight * out if filled[c] <= capacity else torch.zeros_like(token))
        y = y + torch.stack(rows)
        balance = balance + e_count * sum(count / len(x) * p for count, p in zip(filled, mean, strict=True))
    return y, balance


@pytest.mark.first(1)
@pytest.mark.parametrize("tokens", [1, 3, 29])
@pytest.mark.parametrize("form", [{"gated": "halves"}, {"bias": False}, {"gated": "halves", "capacity": 0.6, "bias": False}])
def test_outputs_gradients_and_balance_are_those_of_a_loop(form: dict[str, Any], tokens: int) -> None:
    moe, hidden = make(experts=3, slices=2, balance=0.1, **form)
    x = torch.randn(tokens, D, generator=torch.Generator().manual_seed(tokens))
    inputs = x.clone().requires_grad_(), x.clone().requires_grad_()
    with auxiliary_losses() as losses:
        y = moe(inputs[0], hidden)
    (y.square().sum() + sum(losses)).backward()
    ours = {name: parameter.grad.clone() for name, parameter in moe.named_parameters()}
    moe.zero_grad()
    expected, balance = looped(moe, inputs[1], hidden)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(sum(losses), 0.1 * balance)
    (expected.square().sum() + 0.1 * balance).backward()
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=1e-4, atol=1e-4)
    assert float(ours["router.weight"].abs().max()) > 0
    for name, parameter in moe.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-4, atol=1e-4)
    moe.eval()
    with torch.no_grad():
        torch.testing.assert_close(moe(x, hidden), looped(moe, x, hidden)[0], rtol=1e-4, atol=1e-5)


def test_the_start_spreads_tokens_and_is_exact_whatever_the_router_says_in_training_too() -> None:
    model, inputs = build("causal/llama", SharedMoE(groups=0, slices=4, capacity=None))
    load = expert_load(model, inputs["input_ids"])
    assert len(load.shares) == 4 * len(blocks(model)) and all(len(shares) == 4 for shares in load.shares.values())
    assert all(sum(shares) == pytest.approx(1) for shares in load.shares.values())
    assert sum(max(shares) < 0.9 for shares in load.shares.values()) > len(load.shares) / 2
    expected = logits(model, inputs)
    with torch.no_grad():
        for block in blocks(model).values():
            block.moe.router.weight.mul_(30)
            block.moe.noise = 3.0
    assert torch.allclose(logits(model, inputs), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(zoo.logits(model.train()(**inputs)), expected, rtol=1e-4, atol=1e-5)


def test_copies_come_apart_and_the_router_moves_in_training() -> None:
    model, inputs = build("causal/llama", SLICED)
    router = next(iter(blocks(model).values())).moe.router.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.train()(**inputs, labels=inputs["input_ids"]).loss.backward()
    optimizer.step()
    moe = next(iter(blocks(model).values())).moe
    first, second, _ = moe.down.weight.unflatten(0, (4, 3)).unbind(1)
    assert not torch.equal(first, second)
    assert bool((moe.router.weight != router).any(1).all())


@pytest.mark.parametrize("reinit", [0.25, 1.0])
def test_reinitialisation_leaves_the_first_expert_of_each_slice(reinit: float) -> None:
    dense, _ = build("causal/gpt2")
    old = dense.transformer.h[0].mlp.c_fc.weight.detach().clone()
    one = apply_reported(dense, SharedMoE(groups=0, slices=2, reinit=reinit), verify=False, count_flops=False).rewrites[0]
    assert not one.exact
    moe = blocks(dense)["transformer.h.0.mlp"].moe
    for s, e in ((0, 0), (1, 0), (0, 3), (1, 2)):
        part = old.t()[s * moe.units : (s + 1) * moe.units]
        assert int((moe.up.weight[s * 4 + e] != part).any(1).sum()) == (round(reinit * moe.units) if e else 0)


# ── Which units are a slice ──────────────────────────────────────────────────────────────────────────────────────────────────────


def planted(count: int, size: int, tokens: int = 400) -> tuple[Tensor, Tensor]:
    """Units in `count` groups that are strong on the same tokens, in an order at random, and the group of each."""
    generator = torch.Generator().manual_seed(0)
    group = torch.randperm(count * size, generator=generator) % count
    topic = torch.randint(count, (tokens,), generator=generator)
    return 0.2 * torch.rand(tokens, count * size, generator=generator) + (topic.unsqueeze(1) == group), group


@pytest.mark.first(1)
@pytest.mark.parametrize(("count", "size"), [(2, 8), (4, 16), (6, 5)])
def test_units_that_are_strong_together_are_one_slice(count: int, size: int) -> None:
    strength, group = planted(count, size)
    order = together(strength, count)
    assert sorted(order.tolist()) == list(range(count * size))
    assert all(len(set(group[part].tolist())) == 1 for part in order.view(count, size))


def test_units_without_a_pattern_are_divided_evenly_and_no_worse_than_as_they_lie() -> None:
    strength = torch.rand(50, 24, generator=torch.Generator().manual_seed(1))
    strength[:, 3] = 0  # a unit that is never on
    x = F.normalize(strength - strength.mean(0), dim=0)
    order = together(strength, 4)
    slices = torch.empty(24, dtype=torch.long)
    slices[order] = torch.arange(24) // 6
    assert correlation_inside(x, slices, 4) >= correlation_inside(x, torch.arange(24) // 6, 4)
    products = x.t() @ x
    inside = sum(float(products[part][:, part].sum()) for part in order.view(4, 6))
    assert correlation_inside(x, slices, 4) == pytest.approx(inside, rel=1e-4)


def test_a_full_slice_takes_no_more() -> None:
    affinity = torch.tensor([[1.0, 0.9], [2.0, 0.0], [3.0, 0.0], [0.5, 0.0]])
    assert nearest_with_room(affinity, 2).tolist() == [1, 0, 0, 1]


@pytest.mark.first(1)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("dim", "ports"), [(0, ((0, 1),)), (0, ((0, 2), (1, 2))), (1, ((0, 1),)), (1, ((6, 1), (0, 1)))])
def test_a_layout_in_slices_is_read_back_and_written(transposed: bool, dim: int, ports: tuple[tuple[int, int], ...]) -> None:
    """Against each unit's row or column, taken by hand."""
    order = torch.tensor([4, 0, 3, 1, 5, 2])
    shape = (6 * len(ports), 5) if dim == 0 else (5, 6 * len(ports))
    dense = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    layout = Rearranged((slice(0, None, 2),), transposed, "order", dim, ports, sliced=True)
    at = layout.units_dim
    new = torch.zeros(6, 2 * len(ports), 5) if at == 0 else torch.zeros(6, 5, 2 * len(ports))
    layout.put(dense, new, order)
    assert torch.equal(layout.dense(new, order), dense)
    assert not new[1::2].any()
    for s in range(3):
        for number, (first, step) in enumerate(ports):
            for unit in range(2):
                found = new[2 * s].select(at, 2 * number + unit)
                assert torch.equal(found, dense.select(dim, first + step * int(order[2 * s + unit])))


# ── On the way: undo, saving, refusals, compilers ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.first(1)
@pytest.mark.parametrize("identity", ["causal/llama", "causal/gpt2", "causal/glm"])
def test_a_sliced_model_is_saved_loaded_and_undone(identity: str, tmp_path: Path) -> None:
    dense, inputs = build(identity)
    before = {name: parameter.detach().clone() for name, parameter in dense.named_parameters()}
    retrofit.apply(dense, SLICED, calibration=inputs["input_ids"], verify=False)
    expected = logits(dense, inputs)
    dense.save_pretrained(tmp_path)
    loaded = retrofit.load(tmp_path)
    assert torch.equal(logits(loaded, inputs), expected)
    undone = retrofit.undo(loaded)
    assert all(torch.equal(parameter, before[name]) for name, parameter in undone.named_parameters())


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("identity", "spec"),
    [
        ("causal/llama", SharedMoE(groups=0, slices=4)),
        ("causal/gpt2", SharedMoE(groups=0, slices=2, experts=3, capacity=0.8)),
        ("seq2seq/bart", SharedMoE(groups=0, slices=4, experts=2, noise=0.0)),
        ("causal/llama", SharedMoE(groups=0, slices=1, experts=2)),
        ("image/vit", SharedMoE(groups=0, slices=2, experts=1, balance=0.0)),
    ],
)
def test_verification_passes(identity: str, spec: SharedMoE) -> None:
    """Function, causality, padding, cache, gradients, the method's reference, save and load, parameters and cost."""
    model, inputs = build(identity)
    report = apply_reported(model, spec, example_inputs=inputs).report
    assert report is not None and report.ok


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("options", "option"),
    [
        ({"slices": 4}, "groups"),
        ({"slices": 4, "groups": 2}, "groups"),
        ({"slices": 4, "groups": 0, "k": 2}, "k"),
        ({"slices": 0, "groups": 0}, "slices"),
    ],
)
def test_options_that_contradict_slices_are_named(options: dict[str, Any], option: str) -> None:
    with pytest.raises(SpecError) as refused:
        SharedMoE(**options)
    assert refused.value.option == option and refused.value.remedies


def test_k_is_two_and_with_slices_one() -> None:
    assert (SharedMoE().chosen, SharedMoE(k=3).chosen, SLICED.chosen, SharedMoE(groups=0, slices=4, k=1).chosen) == (2, 3, 1, 1)
    assert SharedMoE(groups=0, slices=4, k=1, balance=0.0).exact  # its router has a gradient without a balance loss


@pytest.mark.parametrize("identity", ["causal/llama", "causal/gpt2"])
def test_units_that_have_no_such_slices_are_refused_with_a_number_that_does(identity: str) -> None:
    model, inputs = build(identity)
    with pytest.raises(DoesNotFitError) as refused:
        retrofit.apply(model, "shared-moe(groups=0, slices=5)", example_inputs=inputs, verify=False)
    assert refused.value.option == "slices"
    assert not blocks(model)


def test_a_hidden_function_with_numbers_for_each_unit_is_not_divided() -> None:
    from support.feed_forward_models import IDS, Model, Plain

    class Scaled(Plain):
        def __init__(self) -> None:
            super().__init__(8, 24, "gelu", True)
            self.scale = nn.Parameter(torch.rand(24))

        def forward(self, x: Tensor) -> Tensor:
            return self.b(F.gelu(self.a(x)) * self.scale)  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model = Model(8, Scaled(), Plain(8, 24, "gelu", True)).eval()
    (one,) = apply_reported(model, SLICED, example_inputs={"ids": IDS}, verify=False, count_flops=False).rewrites
    assert [site.name for site in one.sites] == ["layers.1.f"]
    assert [miss.name for miss in one.skipped] == ["layers.0.f"]


@pytest.mark.long
@pytest.mark.first(1)
@pytest.mark.parametrize("spec", [SLICED, SharedMoE(groups=0, experts=3, k=1), SharedMoE(experts=3)])
def test_training_and_decoding_compile_without_a_graph_break(spec: SharedMoE) -> None:
    model = retrofit.apply(llama(), spec, verify=False)
    ids = torch.arange(3, 27).view(2, 12)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.manual_seed(0)
    ours = model.train()(input_ids=ids, labels=ids, use_cache=False).loss
    torch.manual_seed(0)
    theirs = compiled(input_ids=ids, labels=ids, use_cache=False).loss
    theirs.backward()
    assert all(block.moe.router.weight.grad is not None for block in blocks(model).values())
    assert float(ours) == pytest.approx(float(theirs), rel=0.05)  # the noise is drawn otherwise
    model.eval()
    torch._dynamo.reset()
    with torch.no_grad():
        step = torch.compile(model, fullgraph=True, backend="aot_eager")
        for length in (1, 24):  # gathered matrices, and grouped products
            one = ids.flatten()[None, :length]
            torch.testing.assert_close(step(input_ids=one).logits, model(input_ids=one).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("has_compiler", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
@pytest.mark.parametrize(
    ("form", "tokens"),
    [
        ({"slices": 3, "experts": 2, "gated": "halves"}, 1),
        ({"slices": 3, "experts": 4, "gated": "halves", "bias": False}, 4),
        ({"k": 2, "gated": "two"}, 2),
        ({"k": 1, "bias": False, "renormalize": False}, 3),
    ],
)
def test_a_few_tokens_on_a_cpu_copy_no_matrix(
    form: dict[str, Any],
    tokens: int,
    dtype: torch.dtype,
    tolerance: float,
    has_compiler: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same as the other ways, and no operation makes as many numbers as a matrix of one expert has, but for the units."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            held = {value.untyped_storage().data_ptr() for value in args if isinstance(value, Tensor)}
            if isinstance(result, Tensor) and result.untyped_storage().data_ptr() not in held:
                self.numel = max(self.numel, result.numel())
            return result

    if not has_compiler:
        monkeypatch.setattr(mixture_of_experts, "products_of_matrices", lambda *_: None)
    moe, hidden = make(**form, units=16, dtype=dtype)
    x = torch.randn(tokens, D).to(dtype)
    gates, selected = moe.eval().route(x)
    with torch.no_grad(), Largest() as largest:
        y = combine_in_place(moe, x, gates, selected, hidden)
    assert largest.numel < D * 16 or largest.numel == selected.numel() * moe.units * len(moe.ports)
    assert y.dtype == dtype and y.shape == x.shape
    close: dict[str, Any] = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(y, moe.combine_gathered(x, gates, selected, hidden), **close)
    torch.testing.assert_close(y, moe.combine_every(x, gates, selected, hidden), **close)


@pytest.mark.first(1)
@pytest.mark.parametrize("form", [{"slices": 3, "experts": 2, "gated": "halves"}, {"k": 2, "gated": "two"}, {"k": 1}])
def test_one_token_compiled_copies_no_matrix(form: dict[str, Any]) -> None:
    """Of what Inductor would run, nothing is written that is as large as a matrix of one expert; and it is few kernels."""
    sizes: list[int] = []

    def record(graph: torch.fx.GraphModule, inputs: list[Any], **given: Any) -> Any:
        with V.set_fake_mode(detect_fake_mode(inputs)):
            record_original_output_strides(graph)
            post_grad_passes(graph, True)
            lowered = GraphLowering(graph, example_inputs=inputs)
            with V.set_graph_handler(lowered), V.set_debug_handler(DebugContext()):
                lowered.run(*inputs)
                sizes.extend(buffer.get_numel() for buffer in lowered.buffers if isinstance(buffer.maybe_get_layout(), Layout))
        return make_boxed_func(graph.forward)

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.moe, self.hidden = make(units=16, **form)

        def forward(self, x: Tensor) -> Tensor:
            return self.moe(x, self.hidden)

    torch.compiler.reset()
    whole, x = Whole().eval(), torch.randn(1, D)
    with torch.no_grad():
        compiled = torch.compile(whole, backend=lambda *given: compile_fx(*given, inner_compile=record), fullgraph=True)
        torch.testing.assert_close(compiled(x), whole(x))
    assert 0 < max(sizes) < D * 16
    assert len(sizes) < 16


@pytest.mark.long
def test_a_sliced_mixture_is_exported(tmp_path: Path) -> None:
    """For few tokens and for many; the exporter compares it with torch."""
    model = retrofit.apply(llama(), SLICED, verify=False)
    retrofit.export_onnx(model, tmp_path / "model.onnx")


@pytest.mark.long
def test_no_architecture_has_slices() -> None:
    model = retrofit.apply(llama(), SLICED, verify=False)
    with pytest.raises(DoesNotFitError) as refused:
        retrofit.to_native(model, "mixtral")
    assert "4 slices" in refused.value.why


# ── transformers' interface of experts ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def plugged() -> Iterator[list[Any]]:
    """A function in transformers' interface, called "plugged", which runs its own for few rows; the experts that it was given."""
    given: list[Any] = []

    def function(self: Any, *args: Tensor) -> Tensor:
        given.append(self)
        return batched_mm_experts_forward(self, *args)

    ALL_EXPERTS_FUNCTIONS.register("plugged", function)
    yield given
    ALL_EXPERTS_FUNCTIONS._global_mapping.pop("plugged")


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("identity", "spec", "activation"),
    [
        ("causal/llama", SLICED, "silu"),
        ("causal/glm", SharedMoE(groups=0, experts=3), "silu"),
        ("causal/gpt2", SharedMoE(experts=3), "gelu_new"),
    ],
)
def test_a_function_of_transformers_interface_computes_the_experts(
    identity: str, spec: SharedMoE, activation: str, plugged: list[Any], tmp_path: Path
) -> None:
    model, inputs = build(identity, spec)
    expected = logits(model, inputs)
    assert not plugged
    model.save_pretrained(tmp_path)
    for name in ("plugged", "batched_mm"):
        loaded = type(model).from_pretrained(tmp_path, experts_implementation=name)
        torch.testing.assert_close(logits(loaded, inputs), expected, rtol=1e-4, atol=1e-5)
    assert len(plugged) == len(blocks(model))
    experts = plugged[0]
    assert ACT2FN[experts.config.hidden_act](torch.ones(1)) == ACT2FN[activation](torch.ones(1))
    assert experts.down_proj.shape == (experts.num_experts, experts.hidden_dim, experts.intermediate_dim)


@pytest.mark.first(1)
@pytest.mark.parametrize("function", [batched_mm_experts_forward, grouped_mm_experts_forward])
@pytest.mark.parametrize("form", [{"gated": "halves", "slices": 2}, {"slices": 3, "bias": False}, {"gated": "turns", "k": 2}])
def test_transformers_own_functions_compute_the_same_in_training_too(function: Any, form: dict[str, Any]) -> None:
    moe, hidden = make(experts=3, units=16, capacity=0.8, **form)
    x = torch.randn(21, D)
    gates, selected = moe.route(x)
    ours = torch.autograd.grad(moe.combine(x, gates, selected, hidden).square().sum(), moe.down.weight, retain_graph=True)[0]
    found = function(ExpertsView(moe, hidden), x, selected, gates)
    torch.testing.assert_close(found, moe.combine(x, gates, selected, hidden), rtol=1e-4, atol=1e-5)
    theirs = torch.autograd.grad(found.square().sum(), moe.down.weight)[0]
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-4)


def test_a_plugged_function_is_compiled_in_one_graph(plugged: list[Any]) -> None:
    model = retrofit.apply(llama(), SLICED, verify=False).eval()
    ids = torch.arange(3, 27).view(2, 12)
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        model.config._experts_implementation = "batched_mm"
        step = torch.compile(model, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(step(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-4)


def test_adapters_of_the_experts_are_part_of_what_is_computed(plugged: list[Any]) -> None:
    """A function that is given bare matrices would leave them out."""
    model = retrofit.apply(llama(), SLICED, verify=False)
    names = {"target_modules": ["router"], "target_parameters": ["moe.gate_up.weight", "moe.down.weight"]}
    torch.manual_seed(0)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, init_lora_weights=False, **names)).eval()
    ids = torch.arange(3, 27).view(2, 12)
    with torch.no_grad():
        expected = adapted(input_ids=ids).logits
        model.config._experts_implementation = "plugged"
        torch.testing.assert_close(adapted(input_ids=ids).logits, expected)
        assert not plugged
        adapted.config._experts_implementation = None
        first = adapted(input_ids=ids[:1, :1]).logits  # whose experts are read in place
        torch.testing.assert_close(first, expected[:1, :1], rtol=1e-4, atol=1e-5)
        adapted.config._experts_implementation = "plugged"
        merged = retrofit.merge_adapters(adapted)
        torch.testing.assert_close(merged(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-4)
    assert plugged
