"""The table and the drawing of real models, checked against their configs and their parameters."""

from __future__ import annotations

import functools
import itertools
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny_models
from support.drawings import apart, boxes, drawing, labels, layers_told, parameters_told, wires, within
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    JambaConfig,
    JambaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

import retrofit
from retrofit.anatomy import Anatomy
from retrofit.anatomy.inspection import inspect
from retrofit.drawing.layer_picture import STREAM, RewrittenSites
from retrofit.drawing.placement import Placement
from retrofit.passbase.replaying import rewrites

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4, "num_attention_heads": 8}


def llama() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(vocab_size=1000, num_key_value_heads=2, tie_word_embeddings=True, **SIZES))


def seven_billion() -> nn.Module:
    with torch.device("meta"):
        return MistralForCausalLM(MistralConfig())


def bert() -> nn.Module:
    return BertForMaskedLM(BertConfig(vocab_size=1000, **SIZES))


def t5() -> nn.Module:
    sizes: dict[str, Any] = {"d_model": 64, "d_kv": 16, "d_ff": 160, "num_layers": 3, "num_decoder_layers": 4, "num_heads": 4}
    return T5ForConditionalGeneration(T5Config(vocab_size=1000, **sizes))


def vit() -> nn.Module:
    return ViTForImageClassification(ViTConfig(image_size=64, patch_size=16, **SIZES))


def jamba() -> nn.Module:
    sizes: dict[str, Any] = {**SIZES, "num_hidden_layers": 8, "mamba_d_state": 4, "mamba_dt_rank": 4}
    return JambaForCausalLM(JambaConfig(vocab_size=1000, num_experts=4, num_key_value_heads=2, **sizes))


LAYERS = {llama: [4], seven_billion: [32], bert: [4], t5: [3, 4], vit: [4], jamba: [8]}
each = pytest.mark.parametrize("build", LAYERS, ids=lambda build: build.__name__)


@functools.cache
def anatomy_of(build: Callable[[], nn.Module]) -> Anatomy:
    short = {"input_ids": torch.arange(6).view(2, 3)}  # a state-space layer is as long a graph as the sequence
    return inspect(build(), short if build is jamba else None)


@pytest.mark.first(1)
@each
def test_the_table_counts_every_layer_and_every_parameter_once(build: Callable[[], nn.Module]) -> None:
    anatomy = anatomy_of(build)
    text = str(anatomy)
    total = sum(parameter.numel() for parameter in anatomy.model.parameters())
    assert layers_told(text) == LAYERS[build]
    assert parameters_told(text) == total
    assert text.startswith(f"{type(anatomy.model).__name__} · {total:,} parameters · width {anatomy.width}")
    assert max(map(len, text.split("\n"))) <= 100


@pytest.mark.long
def test_the_table_in_the_documentation_is_the_real_one() -> None:
    page = (Path(__file__).parents[2] / "docs" / "inspect.md").read_text(encoding="utf-8")
    assert textwrap.indent(str(anatomy_of(seven_billion)), "    ") in page


@pytest.mark.first(1)
@each
def test_the_drawing_has_no_collisions(build: Callable[[], nn.Module]) -> None:
    for one, other in itertools.combinations(boxes(drawing(anatomy_of(build))), 2):
        assert apart(one, other) or within(one, other) or within(other, one)


def test_what_a_person_looks_for_is_there() -> None:
    small, large, encoder_decoder = (labels(drawing(anatomy_of(build))) for build in (llama, seven_billion, t5))
    assert {"8 heads, 2 for k and v", "k, v 64→16", "gate, up 64→160", "×4", "Layers 0–3", "tied", "input_ids", "logits"} <= {
        *small
    }
    assert {"32 heads, 8 for k and v", "q, out 4096→4096", "down 14336→4096", "×32", "218 M each", "32000 × 4096"} <= {*large}
    assert {"Cross-attention", "Layers 1–2", "×2", "Layers 1–3", "×3", "decoder_input_ids", "tied"} <= {*encoder_decoder}


def test_pre_norm_and_post_norm_are_told_apart() -> None:
    before, after = (anatomy_of(build) for build in (llama, bert))
    norms = Placement(before).norms(before.stacks[0].layers[2])
    assert norms.before == {0: ("model.layers.2.input_layernorm",), 1: ("model.layers.2.post_attention_layernorm",)}
    norms = Placement(after).norms(after.stacks[0].layers[2])
    assert norms.stream == {0: ("bert.encoder.layer.2.attention.output.LayerNorm",), 1: ("bert.encoder.layer.2.output.LayerNorm",)}


def test_the_decoder_reads_the_encoder() -> None:
    anatomy = anatomy_of(t5)
    placement = Placement(anatomy)
    cross = [branch for layer in anatomy.stacks[1].layers for branch in layer.branches if branch.role == "cross-attention"]
    assert [placement.stacks_read_by(1, branch) for branch in cross] == [[0]] * 4
    assert [placement.stacks_feeding(index) for index in (0, 1)] == [[], []]


def test_parameters_that_no_output_hangs_on_are_counted_elsewhere() -> None:
    model = llama()
    model.forgotten = nn.Linear(3, 5)
    assert "parameters of no part above" in str(inspect(model))
    assert parameters_told(str(inspect(model))) == sum(parameter.numel() for parameter in model.parameters())
    assert "elsewhere" not in str(anatomy_of(llama))


# ── Rewritten models ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def deep(name: str = "llama", layers: int = 6) -> Any:
    """A tiny model of so many layers, in each stack where it has two."""
    depth = {"t5": "num_layers", "gpt2": "n_layer"}.get(name, "num_hidden_layers")
    return getattr(tiny_models, name)(**{depth: layers})


REWRITES = {
    "altup(k=3)": {f"altup: works on block {number} of 3" for number in range(3)},
    "sequence-altup(k=2)": {"sequence-altup: computes one token in 2"},
    "shared-moe(groups=0, experts=4)": {"E=4 experts"},
    "sparse-ffn(sparsity=4, active=2)": {"2 hidden units of 4 active"},
    "memory(lookup=softmax)": {"memory: plus a table"},
}


MODELS = ("llama", "gpt2", "bert", "t5")
FIRST = (*zip(MODELS, REWRITES, strict=False), ("llama", "memory(lookup=softmax)"))  # every pass, and every model


@pytest.mark.first(1)
@pytest.mark.parametrize(("name", "spec"), dict.fromkeys((*FIRST, *itertools.product(MODELS, REWRITES))))
def test_a_rewritten_model_shows_what_was_done_where(name: str, spec: str, tmp_path: Path) -> None:
    """Also once it was saved and loaded."""
    model = retrofit.apply(deep(name, 3), spec, verify=False)
    model.save_pretrained(tmp_path / "saved")
    method = spec.partition("(")[0]
    for one in (model, retrofit.load(tmp_path / "saved")):
        anatomy = inspect(one)
        (account,) = rewrites(one) or ()
        done = [{"pass": method, "name": site.name, "what": site.what} for site in account.sites]
        assert done and anatomy.to_dict()["rewritten"] == done
        assert f": {method}, " in str(anatomy).partition("\nrewritten\n")[2]
        shown = drawing(anatomy)
        text = " ".join(labels(shown))
        assert [wanted for wanted in REWRITES[spec] if wanted not in text] == []
        assert f"rewritten by {method}" in text
        for box, other in itertools.combinations(boxes(shown), 2):
            assert apart(box, other) or within(box, other) or within(other, box)


@pytest.mark.long
def test_the_blocks_of_a_stream_are_lines_next_to_one_another() -> None:
    def lines_of_stream(shown: Any) -> list[float]:
        thick = max(wires(shown, STREAM), key=lambda wire: abs(wire[0][1] - wire[1][1]))
        length = abs(thick[0][1] - thick[1][1])
        return sorted({begin[0] for begin, end in wires(shown, STREAM) if abs(abs(begin[1] - end[1]) - length) < 1})

    assert len(lines_of_stream(drawing(inspect(deep())))) == 1
    for spec, blocks in (("altup(k=3, embedding=recycled)", 3), ("sum", 1)):
        model = retrofit.apply(deep(), spec, verify=False)
        shown = drawing(inspect(model))
        assert len(lines_of_stream(shown)) == blocks, spec
        assert (f"{blocks} blocks of width 16" in " ".join(labels(shown))) == (blocks > 1)


def test_layers_that_work_on_other_blocks_have_panels_of_their_own() -> None:
    shown = labels(drawing(inspect(retrofit.apply(deep(), "altup(k=2)", verify=False))))
    assert {"Layers 0, 2, 4", "Layers 1, 3, 5", "×3"} <= {*shown}


def test_what_was_done_to_one_branch_is_said_in_its_box() -> None:
    model = retrofit.apply(deep(), "sparse-ffn(sparsity=4, active=2, layers=1)", "sparse-qkv(layers=1)", verify=False)
    anatomy = inspect(model)
    sites = RewrittenSites.of(anatomy)
    (stack,) = anatomy.stacks
    assert not any(sites.at_branch(branch, stack.layers[0]) for branch in stack.layers[0].branches)
    said = {branch.role: sites.at_branch(branch, stack.layers[1]) for branch in stack.layers[1].branches}
    assert [role for role, texts in said.items() if any(text.startswith("sparse-ffn") for text in texts)] == ["moe"]
    assert not any(text.startswith("sparse-ffn") for text in said["self-attention"])
