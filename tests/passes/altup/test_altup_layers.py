"""AltUp's modules against the algorithms as the papers write them, block by block in plain loops."""

from __future__ import annotations

import collections
import copy
import operator
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.refusals import refused
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.gemma3n.configuration_gemma3n import Gemma3nTextConfig
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextAltUp

from retrofit.errors import DoesNotFitError
from retrofit.passes.altup.layers import (
    COEFFICIENTS,
    AltUpLayer,
    BlockScale,
    Blockwise,
    DenseAltUpLayer,
    DivideAndProject,
    DynamicAltUpLayer,
    Replicated,
    combine_blocks,
    contract,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def algorithm_1(x: list[Tensor], p: Tensor, g: Tensor, j: int, layer: Callable[[Tensor], Tensor]) -> list[Any]:
    """altup.txt, Algorithm 1, line by line."""
    k = len(x)
    predicted = [sum(p[i, m] * x[m] for m in range(k)) for i in range(k)]
    computed = layer(x[j])
    return [predicted[i] + g[i] * (computed - predicted[j]) for i in range(k)]


def algorithm_2(x: Tensor, p: Tensor, g: Tensor, j: int, layer: nn.Module) -> Tensor:
    """external-memory.txt, Algorithm 2, on one token's vector."""
    d = g.shape[1]
    predicted = p @ x
    computed = layer(x[j * d : (j + 1) * d])
    return predicted + g @ (computed - predicted[j * d : (j + 1) * d])


class Layer(nn.Module):
    """A d-wide layer that is not linear."""

    def __init__(self, width: int, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, dtype=dtype)
        self.attention_type = "full"

    def forward(self, hidden_states: Tensor, mask: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
        return hidden_states + scale * torch.tanh(self.linear(hidden_states))


def randomised(layer: AltUpLayer, seed: int = 0) -> AltUpLayer:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
    return layer


sizes = st.fixed_dictionaries({"k": st.integers(1, 5), "d": st.integers(1, 6), "seed": st.integers(0, 99), "j": st.integers(0, 4)})


@settings(max_examples=60, deadline=None)
@given(size=sizes, expand=st.booleans(), rotate=st.booleans(), combine=st.booleans())
def test_algorithm_1_with_every_option(size: dict[str, int], expand: bool, rotate: bool, combine: bool) -> None:
    k, d, j = size["k"], size["d"], size["j"] % size["k"]
    torch.manual_seed(size["seed"])
    weights = torch.randn(k).tolist()
    altup = randomised(
        AltUpLayer(Layer(d), d, k, j, expand=expand, rotate=rotate, combine=weights if combine else None), size["seed"]
    )
    x = torch.randn(2, 3, d if expand else k * d, dtype=torch.float64)
    blocks = [x] * k if expand else list(x.chunk(k, -1))
    expected = algorithm_1(blocks, altup.p, altup.g, j, altup.layer)
    if rotate:
        expected = expected[1:] + expected[:1]
    wide = sum(weight * block for weight, block in zip(weights, expected, strict=True)) if combine else torch.cat(expected, -1)
    torch.testing.assert_close(altup(x), wide, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [2, 4])
def test_algorithm_1_in_the_streams_dtype(dtype: torch.dtype, k: int) -> None:
    torch.manual_seed(0)
    altup = randomised(AltUpLayer(Layer(8, dtype), 8, k, 1))
    x = torch.randn(2, 5, k * 8, dtype=dtype)
    with torch.no_grad():
        computed = altup.layer(x.chunk(k, -1)[1]).double()
        expected = algorithm_1(list(x.double().chunk(k, -1)), altup.p.double(), altup.g.double(), 1, lambda _: computed)
        new = altup(x)
    assert new.dtype == dtype
    scale = torch.cat(expected, -1).abs().max().item()
    assert (new.double() - torch.cat(expected, -1)).abs().max() < 8 * k * torch.finfo(dtype).eps * scale


@pytest.mark.parametrize("options", [{}, {"expand": True}, {"combine": (0.3, -0.7, 1.1)}, {"rotate": True}], ids=str)
def test_gradients_are_those_of_the_plain_loop(options: dict) -> None:
    torch.manual_seed(0)
    altup = randomised(AltUpLayer(Layer(4), 4, 3, 2, **options))
    x = torch.randn(2, 5, 4 if "expand" in options else 12, dtype=torch.float64, requires_grad=True)
    inputs = [x, *altup.parameters()]
    blocks = algorithm_1([x] * 3 if "expand" in options else list(x.chunk(3, -1)), altup.p, altup.g, 2, altup.layer)
    blocks = blocks[1:] + blocks[:1] if "rotate" in options else blocks
    weights = options.get("combine")
    expected = sum(w * b for w, b in zip(weights, blocks, strict=True)) if weights else torch.cat(blocks, -1)
    probe = torch.randn_like(expected)
    ours = torch.autograd.grad(altup(x), inputs, probe)
    for mine, theirs in zip(ours, torch.autograd.grad(expected, inputs, probe), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("per_token", [False, True])
def test_the_contraction_passes_gradcheck_twice(per_token: bool) -> None:
    torch.manual_seed(0)
    lead = (2, 3) if per_token else ()
    shapes = [(2, 3, 8), (2, 3, 2), (*lead, 3, 4), (*lead, 3, 1)]  # x, y, a, g
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    assert torch.autograd.gradcheck(contract, inputs)
    assert torch.autograd.gradgradcheck(contract, inputs)


@pytest.mark.parametrize("position", range(4))
def test_a_single_required_gradient_is_the_one_computed(position: int) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(shape, dtype=torch.float64) for shape in [(5, 6), (5, 2), (3, 3), (3, 1)]]
    inputs[position].requires_grad_()
    assert torch.autograd.gradcheck(contract, inputs)


def kept_alive(function, *inputs: Tensor) -> int:
    """How many elements a forward pass keeps for its backward pass, views of one storage counted once."""
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() // tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function(*inputs).sum().backward()
    return sum(storages.values())


@pytest.mark.parametrize("k", [2, 4])
def test_only_the_stream_and_the_layers_output_stay_alive(k: int) -> None:
    x, y = torch.randn(4, 64, k * 32, requires_grad=True), torch.randn(4, 64, 32, requires_grad=True)
    p, g = torch.randn(k, k, requires_grad=True), torch.randn(k, 1, requires_grad=True)
    assert kept_alive(contract, x, y, p, g) == x.numel() + y.numel() + p.numel() + g.numel()
    assert kept_alive(contract, x, y, p.detach(), g.detach()) == p.numel() + g.numel()


def test_a_layer_keeps_no_block_twice() -> None:
    altup = AltUpLayer(nn.Linear(32, 32, bias=False), 32, 4, 1)
    x = torch.randn(4, 64, 128, requires_grad=True)
    coefficients = 4 * (altup.p.numel() + altup.g.numel())  # A and what it was made of
    assert kept_alive(altup, x) <= x.numel() + x.numel() // 4 + altup.layer.weight.numel() + coefficients


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=25, deadline=None)
@given(k=st.integers(2, 6), j=st.integers(0, 5), seed=st.integers(0, 999))
def test_lockstep_starts_bit_for_bit(dtype: torch.dtype, k: int, j: int, seed: int) -> None:
    torch.manual_seed(seed)
    layer = Layer(7, dtype)
    x = (torch.randn(2, 3, 7) * 10 ** torch.empty(2, 3, 7).uniform_(-3, 3)).to(dtype)
    altup = AltUpLayer(layer, 7, k, j % k)
    wide = torch.cat([x] * k, -1)
    assert torch.equal(altup(wide), torch.cat([layer(wide.chunk(k, -1)[j % k])] * k, -1))
    altup = AltUpLayer(layer, 7, k, j % k, expand=True)
    assert torch.equal(altup(x), torch.cat([layer(x)] * k, -1))


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=25, deadline=None)
@given(k=st.integers(1, 6), j=st.integers(0, 5), n=st.integers(0, 5), seed=st.integers(0, 999))
def test_hop_starts_bit_for_bit(dtype: torch.dtype, k: int, j: int, n: int, seed: int) -> None:
    torch.manual_seed(seed)
    j, n = j % k, n % k
    layer = Layer(7, dtype)
    x = (torch.randn(2, 3, 7 * k) * 10 ** torch.empty(2, 3, 7 * k).uniform_(-3, 3)).to(dtype)
    altup = AltUpLayer(layer, 7, k, j)
    altup.start("hop", n)
    old, new = x.chunk(k, -1), altup(x).chunk(k, -1)
    assert torch.equal(new[n], layer(old[j]))
    for i in {*range(k)} - {n}:
        assert torch.equal(new[i], old[n] if i == j else old[i])
    altup.combine = tuple(float(i == n) for i in range(k))
    assert torch.equal(altup(x), layer(old[j]))


def test_one_rotating_layer_alternates_through_the_blocks() -> None:
    k, layer = 3, Layer(4)
    shared = AltUpLayer(layer, 4, k, 0, rotate=True)
    shared.start("hop", 1)
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    wide = torch.cat([x, torch.randn(2, 3, 8, dtype=torch.float64)], -1)
    for _ in range(5):
        wide, x = shared(wide), layer(x)
    torch.testing.assert_close(wide[..., :4], x, rtol=0, atol=1e-14)


@settings(max_examples=20, deadline=None)
@given(size=sizes, expand=st.booleans(), rotate=st.booleans(), combine=st.booleans())
def test_algorithm_2(size: dict[str, int], expand: bool, rotate: bool, combine: bool) -> None:
    k, d, j = size["k"], size["d"], size["j"] % size["k"]
    weights = [1.0 / (i + 1) for i in range(k)]
    altup = randomised(
        DenseAltUpLayer(Layer(d), d, k, j, expand=expand, rotate=rotate, combine=weights if combine else None), size["seed"]
    )
    x = torch.randn(2, 3, d if expand else k * d, dtype=torch.float64)
    for token, new in zip(x.flatten(0, 1), altup(x).flatten(0, 1), strict=True):
        expected = algorithm_2(torch.cat([token] * k) if expand else token, altup.p, altup.g, j, altup.layer)
        expected = torch.cat([expected[d:], expected[:d]]) if rotate else expected
        if combine:
            expected = torch.stack([weight * block for weight, block in zip(weights, expected.chunk(k), strict=True)]).sum(0)
        torch.testing.assert_close(new, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("init", ["lockstep", "hop"])
@pytest.mark.parametrize("kind", [DenseAltUpLayer, DynamicAltUpLayer])
@pytest.mark.parametrize("n", [1, 2])
def test_every_kind_of_coefficients_starts_as_the_scalars_do(kind: type[AltUpLayer], init: str, n: int) -> None:
    torch.manual_seed(0)
    layer, x = Layer(4), torch.randn(2, 3, 12, dtype=torch.float64)
    scalar, other = AltUpLayer(layer, 4, 3, 2), kind(layer, 4, 3, 2)
    scalar.start(init, n)
    other.start(init, n)
    torch.testing.assert_close(other(x), scalar(x), rtol=0, atol=1e-14)


@pytest.mark.parametrize("kind", COEFFICIENTS)
def test_the_formula_counts_the_added_parameters(kind: str) -> None:
    altup = COEFFICIENTS[kind](Layer(6), 6, 3)
    added = sum(parameter.numel() for parameter in altup.parameters()) - sum(p.numel() for p in altup.layer.parameters())
    assert added == COEFFICIENTS[kind].count(6, 3)


def gemma(k: int, active: int) -> Gemma3nTextAltUp:
    config = Gemma3nTextConfig(hidden_size=16, altup_num_inputs=k, altup_active_idx=active, altup_coef_clip=1e9)
    module = Gemma3nTextAltUp(config).double().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
        module.modality_router.weight.mul_(16)
    return module


@pytest.mark.parametrize(("k", "active"), [(2, 0), (2, 1), (4, 0), (4, 3)])
@pytest.mark.parametrize("training", [False, True])
def test_dynamic_coefficients_are_gemma_3ns(k: int, active: int, training: bool) -> None:
    torch.manual_seed(0)
    theirs = gemma(k, active).train(training)
    altup = DynamicAltUpLayer(Layer(16), 16, k, active).train(training)
    missing, unexpected = altup.load_state_dict(theirs.state_dict(), strict=False)
    assert unexpected == ["correct_output_scale"]
    assert {name for name in missing if not name.startswith("layer.")} == {"base_p", "base_g"}
    x = torch.randn(2, 5, k * 16, dtype=torch.float64)
    with torch.no_grad():
        ours = altup(x)
        predictions = theirs.predict(torch.stack(x.chunk(k, -1)))
        corrected = theirs.correct(predictions, altup.layer(x.chunk(k, -1)[active]))
    # Gemma's tanh is taken in float32, hence the tolerance
    torch.testing.assert_close(ours, torch.cat(corrected.unbind(0), -1), rtol=1e-5, atol=1e-5)


def test_dynamic_coefficients_train() -> None:
    torch.manual_seed(0)
    altup = DynamicAltUpLayer(Layer(8), 8, 2)
    x, goal = torch.randn(2, 5, 16, dtype=torch.float64), torch.randn(2, 5, 16, dtype=torch.float64)
    optimizer = torch.optim.SGD(altup.parameters(), lr=0.1)
    idle = []
    for _ in range(2):
        optimizer.zero_grad()
        (altup(x) - goal).square().mean().backward()
        idle.append({name for name, parameter in altup.named_parameters() if parameter.grad.abs().sum() == 0})
        optimizer.step()
    assert idle == [set(altup.second_step), set()]


Named = collections.namedtuple("Named", ["extra", "stream"])


class Returns(nn.Module):
    """A layer that returns what `shape` makes of its result and of the arguments it saw."""

    def __init__(self, shape) -> None:
        super().__init__()
        self.shape = shape

    def forward(self, mask, hidden_states, memory=None, **kwargs):
        return self.shape(2 * hidden_states, (mask, memory, kwargs))


@pytest.mark.parametrize(
    ("shape", "stream_out", "kind"),
    [
        (lambda y, seen: (y, seen), 0, tuple),
        (lambda y, seen: (seen, y), 1, tuple),
        (lambda y, seen: [seen, y], -1, list),
        (lambda y, seen: Named(seen, y), 1, Named),
        (lambda y, seen: {"seen": seen, "y": y}, "y", dict),
        (lambda y, seen: BaseModelOutput(last_hidden_state=y, hidden_states=seen), "last_hidden_state", BaseModelOutput),
        (lambda y, seen: BaseModelOutput(last_hidden_state=y, hidden_states=seen), 0, BaseModelOutput),
    ],
)
@pytest.mark.parametrize("stream_in", [1, "hidden_states"])
@pytest.mark.parametrize("by_keyword", [False, True])
def test_calls_and_results_keep_their_form(shape, stream_out, kind, stream_in, by_keyword: bool) -> None:
    altup = AltUpLayer(Returns(shape), 2, 2, 1, stream_in=stream_in, stream_out=stream_out, narrow={"memory": 0})
    x, memory = torch.randn(1, 3, 4), torch.randn(1, 3, 4)
    call = {"hidden_states": x, "memory": memory} if by_keyword else {}
    output = altup("mask", *(() if by_keyword else (x, memory)), flag=True, **call)
    assert type(output) is kind
    values = list(output.values()) if isinstance(output, dict) else list(output)
    stream = next(value for value in values if isinstance(value, Tensor))
    assert torch.equal(stream, AltUpLayer(Doubled(), 2, 2, 1)(x))
    mask, seen_memory, kwargs = next(value for value in values if not isinstance(value, Tensor))
    assert mask == "mask" and torch.equal(seen_memory, memory[..., :2]) and kwargs == {"flag": True}
    assert isinstance(output, BaseModelOutput) is (kind is BaseModelOutput)


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def test_a_narrow_argument_may_be_none_and_the_stream_may_not_be_left_out() -> None:
    altup = AltUpLayer(Returns(lambda y, seen: (y, seen)), 2, 2, stream_in=1, stream_out=0, narrow={2: 1})
    assert altup("mask", torch.ones(1, 4), None)[1] == ("mask", None, {})
    with refused(DoesNotFitError, "hidden_states"):
        altup("mask")


def test_public_attributes_show_through() -> None:
    altup = AltUpLayer(Layer(4), 4, 2)
    assert altup.attention_type == "full" and altup.linear is altup.layer.linear
    altup.layer._private = 1
    assert not hasattr(altup, "_private") and not hasattr(altup, "nowhere")
    altup.layer.p = "the layer's own"
    assert altup.p.shape == (2, 2) and AltUpLayer(altup.layer, 4, 3).p.shape == (3, 3)
    altup.attention_type = "sliding"
    assert (altup.attention_type, altup.layer.attention_type) == ("sliding", "full")


@pytest.mark.parametrize("kind", COEFFICIENTS)
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))], ids=["deepcopy", "pickle"])
def test_copies_compute_the_same(kind: str, copied) -> None:
    altup = COEFFICIENTS[kind](Layer(4), 4, 2, 1, combine=(0.5, 0.5))
    x = torch.randn(1, 3, 8, dtype=torch.float64)
    twin = copied(altup)
    assert torch.equal(twin(x), altup(x))
    assert twin.layer is not altup.layer


@pytest.mark.parametrize("kind", COEFFICIENTS)
def test_a_layer_built_on_meta_is_whole_once_its_weights_are_loaded(kind: str) -> None:
    altup = randomised(COEFFICIENTS[kind](Layer(4), 4, 2, 1, combine=(0.25, 0.75)))
    with torch.device("meta"):
        empty = COEFFICIENTS[kind](Layer(4), 4, 2, 1, combine=(0.25, 0.75))
    assert all(parameter.is_meta for parameter in empty.parameters())
    empty.load_state_dict(altup.state_dict(), assign=True)
    x = torch.randn(1, 3, 8, dtype=torch.float64)
    assert torch.equal(empty(x), altup(x))


@pytest.mark.parametrize("kind", COEFFICIENTS)
def test_coefficients_have_the_layers_dtype(kind: str) -> None:
    altup = COEFFICIENTS[kind](Layer(4, torch.bfloat16), 4, 2)
    assert {value.dtype for value in altup.state_dict().values()} == {torch.bfloat16}


class Checkpointed(GradientCheckpointingLayer):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Layer(4)

    def forward(self, hidden_states: Tensor, scale: float = 1.0) -> Tensor:
        return self.inner(hidden_states, scale=scale)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("whole", [False, True], ids=["the layer", "altup and the layer"])
@pytest.mark.parametrize("kind", COEFFICIENTS)
def test_checkpointing_changes_nothing(reentrant: bool, whole: bool, kind: str) -> None:
    torch.manual_seed(0)
    altup = randomised(COEFFICIENTS[kind](Checkpointed(), 4, 2, 1))
    x = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    inputs = [x, *altup.parameters()]
    plain = altup(x, scale=0.5)
    gradients = torch.autograd.grad(plain.square().sum(), inputs)
    calls = []
    altup.layer.inner.register_forward_pre_hook(lambda *_: calls.append(1))
    if whole:
        again = checkpoint(altup, x, 0.5, use_reentrant=reentrant)
    else:
        altup.layer.gradient_checkpointing = True
        altup.layer._gradient_checkpointing_func = lambda function, *args: checkpoint(function, *args, use_reentrant=reentrant)
        again = altup(x, scale=0.5)
    assert torch.equal(again, plain)
    again.square().sum().backward()
    assert len(calls) == 2  # once forward, once recomputed
    for tensor, gradient in zip(inputs, gradients, strict=True):
        torch.testing.assert_close(tensor.grad, gradient, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", COEFFICIENTS)
def test_autocast_leaves_the_stream_in_its_dtype(kind: str) -> None:
    torch.manual_seed(0)
    altup = randomised(COEFFICIENTS[kind](nn.Linear(8, 8), 8, 2))  # returns bfloat16
    x = torch.randn(2, 3, 16, requires_grad=True)
    reference = altup(x)
    expected = torch.autograd.grad(reference.sum(), [x, *altup.parameters()])
    with torch.autocast("cpu", torch.bfloat16):
        new = altup(x)
        assert new.dtype == torch.float32
        new.sum().backward()  # inside: backward must hold its own against autocast too
    torch.testing.assert_close(new, reference, rtol=0.05, atol=0.05)
    for tensor, gradient in zip([x, *altup.parameters()], expected, strict=True):
        assert tensor.grad.dtype == tensor.dtype
        torch.testing.assert_close(tensor.grad, gradient, rtol=0.1, atol=0.1 * gradient.abs().max().item())


def test_autocast_does_not_round_the_blocks_or_the_coefficients() -> None:
    torch.manual_seed(0)
    altup = randomised(AltUpLayer(nn.Identity(), 8, 3, 1))
    x = torch.randn(2, 3, 24, requires_grad=True)
    gradients = torch.autograd.grad(altup(x).square().sum(), [x, altup.p, altup.g])
    with torch.autocast("cpu", torch.bfloat16):
        again = torch.autograd.grad(altup(x).square().sum(), [x, altup.p, altup.g])
    assert all(torch.equal(one, other) for one, other in zip(gradients, again, strict=True))


@pytest.mark.first(1)
@pytest.mark.parametrize("kind", COEFFICIENTS)
def test_compiles_as_one_graph(kind: str) -> None:
    torch.manual_seed(0)
    torch.compiler.reset()
    altup = randomised(COEFFICIENTS[kind](Layer(8, torch.float32), 8, 2, 1))
    compiled = torch.compile(altup, backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 3, 16, requires_grad=True)
    inputs = [x, *altup.parameters()]
    torch.testing.assert_close(compiled(x), altup(x))
    ours, theirs = (torch.autograd.grad(module(x, scale=0.5).square().sum(), inputs) for module in (compiled, altup))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), altup(x))


@pytest.mark.first(1)
@pytest.mark.parametrize("kind", COEFFICIENTS)
@pytest.mark.parametrize("grad", [False, True])
def test_exports_as_plain_aten(kind: str, grad: bool) -> None:
    altup = randomised(COEFFICIENTS[kind](Layer(8, torch.float32), 8, 2, 1, rotate=True)).eval()
    batch, seq = torch.export.Dim("batch"), torch.export.Dim("seq")
    with torch.set_grad_enabled(grad):
        program = torch.export.export(altup, (torch.randn(2, 3, 16),), dynamic_shapes={"args": ({0: batch, 1: seq},)}, strict=False)
    calls = {node.target for node in program.graph.nodes if node.op == "call_function"} - {operator.getitem}
    assert all(call.namespace == "aten" for call in calls)
    x = torch.randn(3, 7, 16)
    torch.testing.assert_close(program.module()(x), altup(x))
    torch.testing.assert_close(program.run_decompositions().module()(x), altup(x))


def test_blockwise_reads_each_block_on_its_own() -> None:
    norm = nn.LayerNorm(4)
    nn.init.normal_(norm.weight)
    x = torch.randn(2, 3, 12)
    lifted = Blockwise(norm, 3)
    assert torch.equal(lifted(x), torch.cat([norm(block) for block in x.chunk(3, -1)], -1))
    assert torch.equal(lifted(input=x), lifted(x)) and lifted.weight is norm.weight
    tupled = Blockwise(Returns(lambda y, seen: (y, seen)), 3, "hidden_states")
    y, seen = tupled("mask", x, flag=1)
    assert torch.equal(y, 2 * x) and seen == ("mask", None, {"flag": 1})
    assert Blockwise(nn.Linear(4, 5), 3)(x).shape == (2, 3, 15)


def test_replicated_and_combined_are_inverse() -> None:
    x = torch.randn(2, 3, 4)
    wide = Replicated(Doubled(), 4)(x)
    assert torch.equal(wide, torch.cat([2 * x] * 4, -1))
    torch.testing.assert_close(combine_blocks(wide, [0.25] * 4), 2 * x)
    a, b = torch.randn(2, 3, 4).chunk(2, -1)
    torch.testing.assert_close(combine_blocks(torch.cat([a, b], -1), (1.0, 3.0)), a + 3 * b)
    y, seen = Replicated(Returns(lambda y, seen: (y, seen)), 2)("mask", x)
    assert torch.equal(y, torch.cat([2 * x, 2 * x], -1)) and seen == ("mask", None, {})


@pytest.mark.parametrize("learnable", [False, True])
def test_block_scale_goes_before_a_head(learnable: bool) -> None:
    scale = BlockScale([0.5, 2.0], learnable=learnable)
    assert list(scale.state_dict()) == [name for name, _ in scale.named_parameters()] == ["scale"] * learnable
    head, x = nn.Linear(8, 3, bias=False), torch.randn(2, 8)
    expected = x[:, :4] / 2 @ head.weight[:, :4].T + 2 * x[:, 4:] @ head.weight[:, 4:].T
    head.register_forward_pre_hook(scale.before)
    torch.testing.assert_close(head(x), expected)
    torch.testing.assert_close(copy.deepcopy(head)(x), expected)


def test_a_fixed_scale_is_exact_in_float64_whatever_the_dtype_of_the_model_was() -> None:
    scale, x = BlockScale([1 / 3] * 3).half().double(), torch.randn(5, 6, dtype=torch.float64)
    assert torch.equal(scale(x), x * (1 / 3))


def test_an_extra_width_is_divided_and_projected() -> None:
    project = DivideAndProject(6, 3, 4)
    x = torch.randn(2, 5, 6)
    expected = [x[..., :3] @ project.weight[0].T, x[..., 3:] @ project.weight[1].T]
    torch.testing.assert_close(project(x), torch.cat(expected, -1))


def test_a_tied_head_of_an_extra_width_scores_the_widened_rows() -> None:
    project, rows, stream = DivideAndProject(6, 3, 4), torch.randn(9, 10), torch.randn(2, 5, 12)
    table, head = nn.Embedding(9, 10), nn.Linear(10, 9, bias=False)
    table.weight = head.weight = nn.Parameter(rows)
    table.register_forward_hook(project.after)
    head.register_forward_pre_hook(project.before)
    wide = table(torch.arange(9))
    assert torch.equal(wide[:, :4], rows[:, :4])
    torch.testing.assert_close(head(stream), stream @ wide.T, rtol=1e-4, atol=1e-4)
