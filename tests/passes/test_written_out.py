"""Passes find their way where code writes out what others have modules for, as the files of ONNX exporters do."""

from __future__ import annotations

import pytest
import torch
from support import tiny_models
from torch import Tensor, nn
from torch.nn import functional as F

import retrofit
from retrofit.emitted import graph_module
from retrofit.numerics.distances import distance
from retrofit.rewriting import apply_reported

VOCABULARY, NARROW, WIDTH, HIDDEN, HEADS, LAYERS = 31, 8, 16, 24, 2, 2
LAYER = ((3 * WIDTH, WIDTH), (WIDTH, WIDTH), (WIDTH,), (HIDDEN, WIDTH), (WIDTH, HIDDEN), (WIDTH,))


class WrittenOut(nn.Module):
    """One function: its norm is means and products, its first layer makes the mask, its branches are scaled, its head has a row."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Module()
        shapes = {"table": (VOCABULARY, NARROW), "gain": (NARROW,), "into": (WIDTH, NARROW), "out": (VOCABULARY, WIDTH)}
        torch.manual_seed(0)
        for name, shape in {**shapes, "row": (1, VOCABULARY)}.items():
            setattr(self.inner, name, nn.Parameter(0.3 * torch.randn(shape)))
        self.w = nn.ParameterList(nn.Parameter(0.3 * torch.randn(shape)) for shape in LAYER * LAYERS)

    def forward(self, ids: Tensor) -> Tensor:
        held, mask = self.inner, None
        x = F.embedding(ids, held.table)
        x = x - x.mean(-1, keepdim=True)
        x = F.linear(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * held.gain, held.into)
        for depth in range(LAYERS):
            qkv, out, scale, up, down, other = list(self.w)[depth * len(LAYER) : (depth + 1) * len(LAYER)]
            y = F.rms_norm(x, (WIDTH,))
            q, k, v = F.linear(y, qkv).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
            if mask is None:
                mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device).tril()
            read = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(-2)
            x = x + F.linear(read, out) * scale
            x = x + F.linear(F.gelu(F.linear(F.rms_norm(x, (WIDTH,)), up)), down) * other
        return F.linear(x, held.out) + held.row


def example(batch: int = 2, length: int = 7) -> Tensor:
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(length))


def test_a_mask_that_the_first_layer_makes_is_handed_to_it_as_to_the_others() -> None:
    made = graph_module(WrittenOut(), example())
    for layer in made.get_submodule("layers").children():
        (result,) = (node.args[0] for node in layer.graph.nodes if node.op == "output")
        assert not isinstance(result, (tuple, list))
        assert [len(node.meta["val"].shape) for node in layer.graph.nodes if node.op == "placeholder"] == [3, 2]


@pytest.mark.first(1)
@pytest.mark.parametrize("spec", ["altup(k=2)", "sum"])
def test_what_stands_before_the_layers_is_widened(spec: str) -> None:
    model = WrittenOut()
    rewritten = retrofit.apply(model, spec, example_inputs=example(), verify=False)
    other = example(3, 5)
    with torch.no_grad():
        assert distance(rewritten(other), model(other)) < 1e-5


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("spec", "sites"),
    [
        ("sparse-ffn(sparsity=4)", LAYERS),
        ("sequence-altup(k=2, layers=all)", LAYERS),
        ("sparse-qkv(kernel=2)", LAYERS),
        ("sparse-loss(modules=2)", 1),
    ],
)
def test_what_scales_a_product_is_no_part_of_it(spec: str, sites: int) -> None:
    applied = apply_reported(WrittenOut(), spec, example_inputs=example(), verify=False, count_flops=False)
    assert len(applied.rewrites[0].sites) == sites
    assert applied.model(example(3, 5)).isfinite().all()


@pytest.mark.long
def test_layers_of_as_many_tokens_as_the_code_was_captured_with_see_fewer() -> None:
    """A picture has as many patches as it has, so its layers' code is captured with that number written out."""
    model, spec = tiny_models.vit(num_hidden_layers=2), "sequence-altup(k=2, layers=0)"
    images = {"pixel_values": torch.randn(2, 3, 8, 8)}
    strided = retrofit.apply(model, spec, example_inputs=images, emit="graph", verify=False)
    tree = retrofit.apply(model, spec, example_inputs=images, verify=False)
    with torch.no_grad():
        assert distance(strided(**images).logits, tree(**images).logits) < 1e-5
