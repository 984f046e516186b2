"""Feed-forwards parsed into matrices and element-wise parts: what is rebuilt from these computes the same."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import zoo
from support.feed_forward_models import IDS, Fused, Gated, Layer, Model, Plain
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

import retrofit
from retrofit.anatomy.feed_forward_parsing import feed_forwards
from retrofit.anatomy.feed_forwards import FeedForward, FeedForwardBlock, install_feed_forward, linear
from retrofit.anatomy.weights import weight_and_bias, weight_out_first
from retrofit.inputs.model_state import evaluation_mode
from retrofit.surgery import Edit, Rearranged
from retrofit.surgery.row_major import RowMajor

# name: matrices into the hidden units, ports, bias, modules bypassed
FOUND: dict[str, tuple[tuple[str, ...], int, bool, int]] = {
    "causal/llama": (("gate", "up"), 2, False, 0),
    "causal/gpt2": (("up",), 1, True, 0),
    "causal/opt": (("up",), 1, True, 2),
    "causal/glm": (("gate_up",), 2, False, 0),
    "causal/phi": (("up",), 1, True, 0),
    "causal/gpt_neox": (("up",), 1, True, 0),
    "causal/gemma2": (("gate", "up"), 2, False, 0),
    "masked/bert": (("up",), 1, True, 2),
    "masked/albert": (("up",), 1, True, 2),
    "masked/esm": (("up",), 1, True, 1),
    "seq2seq/t5": (("up",), 1, False, 0),
    "seq2seq/bart": (("up",), 1, True, 2),
    "image/vit": (("up",), 1, True, 0),
}


class Rebuilt(FeedForwardBlock):
    """The same function from the parts alone: the weights as they are read, the ports, the element-wise part."""

    def __init__(self, site: FeedForward, old: nn.Module, model: nn.Module) -> None:
        super().__init__(site, old)
        self.hidden, self.ports = site.hidden, site.ports
        self.into = nn.ModuleList(
            linear(nn.Parameter(weight_out_first(matrix, model)), weight_and_bias(matrix, model)[1]) for matrix in site.into
        )
        self.down = RowMajor(nn.Parameter(weight_out_first(site.out, model).t()), weight_and_bias(site.out, model)[1])

    def compute(self, x: Tensor) -> Tensor:
        units = torch.arange(self.units)
        z = [matrix(x) for matrix in self.into]
        return self.down(self.hidden(*(z[port.matrix][..., port.columns(units)] for port in self.ports)))


def sites_of(model: nn.Module, inputs: dict[str, Any]) -> list[FeedForward]:
    sites, near_misses = feed_forwards(retrofit.inspect(model, inputs))
    assert not near_misses
    return sites


@torch.no_grad()
def rebuild(model: nn.Module, sites: list[FeedForward]) -> None:
    edit = Edit(model)
    for site in sites:
        install_feed_forward(site, Rebuilt(site, model.get_submodule(site.path), model), edit)


@pytest.mark.first(3)
@pytest.mark.parametrize("name", FOUND)
def test_every_feed_forward_is_found_and_rebuilt(name: str) -> None:
    entry = zoo.entry(name)
    model = zoo.build(entry)
    inputs, others = zoo.inputs(entry, model), zoo.inputs(entry, model, batch=3, length=7, seed=4)
    with torch.no_grad():
        expected = zoo.logits(model(**others))
    sites = sites_of(model, inputs)
    roles, ports, bias, passing = FOUND[name]
    for site in sites:
        assert tuple(matrix.role for matrix in site.into) == roles and site.out.role == "down"
        assert (len(site.ports), site.gated, len(site.bypassed)) == (ports, ports > 1, passing)
        assert all((matrix.bias is not None) == bias for matrix in (*site.into, site.out))
        assert weight_out_first(site.out, model).shape == (site.width, site.units)
    rebuild(model, sites)
    with torch.no_grad():
        torch.testing.assert_close(zoo.logits(model(**others)), expected, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_casts_with_tracer_assertions_are_steps() -> None:
    class Casting(Gated):
        def forward(self, x: Tensor) -> Tensor:
            return self.b((self.act(self.g(x).double()) * self.a(x).double()).to(x.dtype))

    torch.manual_seed(0)
    model = Model(8, Casting(8, 24, "silu", True)).eval()
    expected, sites = model(IDS), sites_of(model, {"ids": IDS})
    assert [(site.path, site.bypassed) for site in sites] == [("layers.0.f", ())]
    rebuild(model, sites)
    torch.testing.assert_close(model(IDS), expected)


def test_shared_layers_are_one_feed_forward() -> None:
    entry = zoo.entry("masked/albert")
    model = zoo.build(entry)
    assert model.config.num_hidden_layers > 1 and len(sites_of(model, zoo.inputs(entry, model))) == 1


@pytest.mark.parametrize("kind", ["plain", "gated", "side by side", "turns"])
def test_the_hidden_part_takes_any_choice_of_units(kind: str) -> None:
    torch.manual_seed(0)
    ffn = {"plain": Plain(8, 24, "gelu", True), "gated": Gated(8, 24, "silu", False)}.get(kind) or Fused(8, 24, kind == "turns")
    model = Model(8, ffn).eval()
    (site,) = sites_of(model, {"ids": IDS})
    steps = {"turns": [(0, 2), (1, 2)], "side by side": [(0, 1), (24, 1)]}.get(kind, [(0, 1)] * len(site.ports))
    assert [(port.start, port.step) for port in site.ports] == steps
    x, units = torch.randn(5, 8), torch.tensor([3, 17, 4])
    caught: list[Tensor] = []
    with torch.no_grad():
        handle = ffn.b.register_forward_pre_hook(lambda module, args: caught.append(args[0]))
        ffn(x)
        handle.remove()
        z = []
        for port in site.ports:
            weight, bias = weight_out_first(site.into[port.matrix], model), weight_and_bias(site.into[port.matrix], model)[1]
            columns = port.columns(units)
            z.append(F.linear(x, weight[columns], None if bias is None else bias[columns]))
        torch.testing.assert_close(site.hidden(*z), caught[0][:, units])


def test_dropout_inside_stays_and_follows_the_mode() -> None:
    class Dropping(Plain):
        def forward(self, x: Tensor) -> Tensor:
            return self.b(F.dropout(self.act(self.a(x)), 0.5, self.training))

    torch.manual_seed(0)
    model = Model(8, Dropping(8, 64, "gelu", True))
    sites = sites_of(model.train(), {"ids": IDS})
    rebuild(model, sites)
    block, x = model.layers[0].f, torch.randn(4, 8)
    with evaluation_mode(block):
        assert torch.equal(block(x), block(x))
    if sites[0].dropout:
        assert not torch.equal(block.train()(x), block(x))


class Reading(nn.Module):
    """The first half of a feed-forward, with what its own code does to the hidden units."""

    def __init__(self, kept: float) -> None:
        super().__init__()
        self.dense, self.kept = nn.Linear(8, 64), kept

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(F.gelu(self.dense(x)) * 0.5, self.kept, self.training)


class Spread(Layer):
    """A layer with a feed-forward in two modules, between which its own code drops, or does something else, too."""

    def __init__(self, kept: float, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__(8, nn.Identity())
        self.reading, self.writing, self.between = Reading(kept), nn.Linear(64, 8), between

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unsqueeze(1) for part in self.qkv(self.m(x)).chunk(3, -1))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1))
        h = self.reading(self.n(x))
        return x + self.writing(F.dropout(self.between(h), 0.4, self.training))


def spread(between: Callable[[Tensor], Tensor]) -> Model:
    torch.manual_seed(0)
    model = Model(8, nn.Identity(), nn.Identity())
    model.layers = nn.ModuleList(Spread(0.25, between) for _ in range(2))
    return model.eval()


@torch.no_grad()
def test_code_in_the_module_that_reads_is_part_of_the_feed_forward() -> None:
    model = spread(lambda h: h)
    sites, expected = sites_of(model, {"ids": IDS}), model(IDS)
    assert [(site.bypassed, site.path, site.dropout) for site in sites] == [
        ((f"layers.{depth}.reading",), f"layers.{depth}.writing", 0.4) for depth in range(2)
    ]
    z = torch.rand(200, 64) + 1
    dropped = (sites[0].hidden.train()(z) == 0).float().mean()
    assert 0.2 < float(dropped) < 0.3, "the module's dropout still applies to the hidden units, the layer's does not"
    sites[0].hidden.eval()
    rebuild(model, sites)
    torch.testing.assert_close(model(IDS), expected)


def test_code_of_the_layer_itself_is_no_part_of_it() -> None:
    _, near_misses = feed_forwards(retrofit.inspect(spread(torch.tanh), {"ids": IDS}))
    assert len(near_misses) == 2 and all("tanh" in miss.why for miss in near_misses)


class Scaled(nn.Module):
    """A projection that returns a scale with its result, as quantized ones do."""

    def __init__(self, width: int, columns: int) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.randn(width, columns) / 8), nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x @ self.weight, self.scale * 2


class Scaling(Spread):
    """A layer whose projections return scales."""

    def __init__(self, dropout: float) -> None:
        super().__init__(dropout, lambda h: h)
        self.reading, self.act, self.writing = Scaled(8, 64), nn.ReLU(), Scaled(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unsqueeze(1) for part in self.qkv(self.m(x)).chunk(3, -1))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1))
        h, scale = self.reading(self.n(x))
        y, _ = self.writing(self.act(h))
        return x + y / scale


def test_modules_that_return_more_than_one_tensor_stay() -> None:
    model = Model(8, nn.Identity(), nn.Identity())
    model.layers = nn.ModuleList(Scaling(0.0) for _ in range(2))
    sites, near_misses = feed_forwards(retrofit.inspect(model.eval(), {"ids": IDS}))
    assert not sites and len(near_misses) == 2
    assert all("reading" in miss.why for miss in near_misses)


@torch.no_grad()
def test_constants_that_the_code_creates_are_part_of_it() -> None:
    """As importers write GELU: ½ is a tensor that the graph creates."""

    class Written(Plain):
        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            return self.b(h * (torch.full((), 0.5) * (torch.erf(h / 2**0.5) + 1)))

    model = Model(8, Written(8, 24, "relu", True)).eval()
    sites, expected = sites_of(model, {"ids": IDS}), model(IDS)
    z = torch.randn(5, 24)
    torch.testing.assert_close(sites[0].hidden(z), F.gelu(z))
    empty, _ = feed_forwards(retrofit.inspect(copy.deepcopy(model).to("meta"), {"ids": IDS.to("meta")}))
    torch.testing.assert_close(empty[0].hidden(z), F.gelu(z))  # parsed without weights, it runs with them
    rebuild(model, sites)
    torch.testing.assert_close(model(IDS), expected)


def test_branches_of_another_form_are_near_misses_with_the_reason() -> None:
    class Mixing(Plain):
        def forward(self, x: Tensor) -> Tensor:
            h = self.act(self.a(x))
            return self.b(h * h.softmax(-1))

    class Deep(Plain):
        def __init__(self) -> None:
            super().__init__(8, 24, "relu", True)
            self.middle = nn.Linear(24, 24)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.act(self.middle(self.act(self.a(x)))))

    torch.manual_seed(0)
    model = Model(8, Mixing(8, 24, "relu", True), Plain(8, 24, "relu", True), Deep()).eval()
    sites, near_misses = feed_forwards(retrofit.inspect(model, {"ids": IDS}))
    assert [site.path for site in sites] == ["layers.1.f"]
    assert {miss.name for miss in near_misses} == {"layers.0.f", "layers.2.f"}
    reasons = {miss.name: miss.why for miss in near_misses}
    assert "softmax" in reasons["layers.0.f"] and "softmax" not in reasons["layers.2.f"]


def test_only_feed_forwards_at_the_selected_depths() -> None:
    model = Model(8, *(Plain(8, 24, "relu", True) for _ in range(3))).eval()
    sites, _ = feed_forwards(retrofit.inspect(model, {"ids": IDS}), [0, 2])
    assert [site.path for site in sites] == ["layers.0.f", "layers.2.f"]


@torch.no_grad()
@pytest.mark.parametrize("bias", [True, False])
def test_row_major_is_the_linear_map_and_a_conv1d(bias: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(12, 5, bias=bias)
    ours = RowMajor(nn.Parameter(plain.weight.t().contiguous()), plain.bias)
    x = torch.randn(2, 3, 12)
    torch.testing.assert_close(ours(x), plain(x))
    assert isinstance(ours, Conv1D) and (ours.nx, ours.nf) == (12, 5) and ours.weight[4].is_contiguous()
    assert torch.equal(copy.deepcopy(ours)(x), ours(x))


@pytest.mark.parametrize(
    ("shape", "dim", "ports", "transposed"),
    [
        ((6, 4), 0, ((0, 1),), False),
        ((4, 6), 1, ((0, 1),), True),
        ((12, 4), 0, ((0, 1), (6, 1)), False),
        ((4, 12), 1, ((0, 2), (1, 2)), True),
        ((12,), 0, ((0, 1), (6, 1)), False),
    ],
)
def test_a_rearranged_parameter_is_found_again(
    shape: tuple[int, ...], dim: int, ports: tuple[tuple[int, int], ...], transposed: bool
) -> None:
    order = torch.tensor([4, 0, 5, 2, 1, 3])
    dense = torch.randn(*shape)
    layout = Rearranged(transposed=transposed, order="order", dim=dim, ports=ports)
    placed = layout.ordered(dense, order)
    for start, step in ports:
        for unit, old in enumerate(order.tolist()):
            assert torch.equal(placed.select(dim, start + step * unit), dense.select(dim, start + step * old))
    new = placed.t().contiguous() if transposed else placed
    assert torch.equal(layout.dense(new, order), dense)


def test_a_feed_forward_bound_to_a_copy_of_the_model_calls_the_copys_modules() -> None:
    torch.manual_seed(0)
    ffns = [Plain(8, 24, "relu", True), Gated(8, 24, "silu", True)]
    model = Model(8, *ffns)
    for ffn in ffns:
        ffn.act = nn.PReLU()
    sites = sites_of(model.eval(), {"ids": IDS})
    twin = copy.deepcopy(model)
    for layer, other, site in zip(model.layers, twin.layers, sites, strict=True):
        assert site.hidden_paths == (("act", f"{site.path}.act"),) and site.hidden.get_submodule("act") is layer.f.act
        bound = site.bound_to(twin)
        assert bound.hidden.get_submodule("act") is other.f.act and site.hidden.get_submodule("act") is layer.f.act
        with torch.no_grad():
            other.f.act.weight.fill_(-1.0)
        z = [torch.randn(3, 24) for _ in site.ports]
        assert not torch.equal(bound.hidden(*z), site.hidden(*z))
        torch.testing.assert_close(bound.hidden(*z), z[0].abs() * (z[1] if len(z) > 1 else 1))
    with torch.no_grad():
        rebuild(twin, [site.bound_to(twin) for site in sites])
        changed = copy.deepcopy(model)
        for layer in changed.layers:
            layer.f.act.weight.fill_(-1.0)
        torch.testing.assert_close(twin(IDS), changed(IDS))
