"""The anatomy against what is known of each model: its config and its module tree."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from support import zoo
from support.own_models import Asking, Block, Own
from support.refusals import refused
from torch import nn

import retrofit
from retrofit.anatomy import Anatomy, rows
from retrofit.anatomy.outline import surroundings
from retrofit.anatomy.parts import NO_STREAM
from retrofit.errors import CaptureError, DoesNotFitError, NoTransformerError


def anatomy(identity: str, **overrides: object) -> Anatomy:
    entry = next(entry for entry in zoo.entries() if entry.id == identity)
    model = zoo.build(entry, device="meta", **overrides)
    inputs = {name: value.to("meta") for name, value in zoo.inputs(entry, zoo.build(entry)).items()}
    return retrofit.inspect(model, inputs)


def roles(layer) -> list[str]:
    return [branch.role for branch in layer.branches]


ATTENTION_FFN = ["self-attention", "ffn"]

SINGLE_STACKS = {  # norm layout, projections, heads: what the papers of these models say
    "causal/llama": ("decoder", True, ATTENTION_FFN, ["q", "k", "v", "out"], True),
    "causal/gpt2": ("decoder", True, ATTENTION_FFN, ["qkv", "out"], False),
    "causal/gptj": ("decoder", True, ATTENTION_FFN, ["q", "k", "v", "out"], False),  # attention and FFN in parallel
    "causal/gpt_neox": ("decoder", True, ATTENTION_FFN, ["qkv", "out"], False),  # parallel, fused
    "causal/gemma2": ("decoder", True, ATTENTION_FFN, ["q", "k", "v", "out"], True),  # norms before and after each branch
    "causal/falcon": ("decoder", True, ATTENTION_FFN, ["qkv", "out"], False),  # multi-query
    "causal/bloom": ("decoder", True, ATTENTION_FFN, ["qkv", "out"], False),  # ALiBi, baddbmm
    "causal/opt": ("decoder", True, ATTENTION_FFN, ["q", "k", "v", "out"], False),
    "causal/doge": ("decoder", True, ATTENTION_FFN, None, True),  # scaled residuals
    "masked/bert": ("encoder", False, ATTENTION_FFN, ["q", "k", "v", "out"], False),  # norms after, FFN over two modules
    "masked/deberta-v2": ("encoder", False, ATTENTION_FFN, None, False),  # relative positions inside the scores
    "masked/mpnet": ("encoder", False, ATTENTION_FFN, ["q", "k", "v", "out"], False),
    "image/vit": ("encoder", False, ATTENTION_FFN, ["q", "k", "v", "out"], False),
}


@pytest.mark.first(2)
@pytest.mark.parametrize("identity", SINGLE_STACKS)
def test_one_stack_of_attention_and_ffn(identity: str) -> None:
    kind, causal, branches, projections, gated = SINGLE_STACKS[identity]
    found = anatomy(identity)
    (stack,) = found.stacks
    config = found.model.config
    assert (stack.kind, stack.causal) == (kind, causal)
    assert len(stack.layers) == config.num_hidden_layers
    assert stack.width == config.hidden_size
    assert len({layer.name for layer in stack.layers}) == len(stack.layers)
    for layer in stack.layers:
        assert roles(layer) == branches
        assert isinstance(found.model.get_submodule(layer.name), nn.Module)
        assert layer.stream_in == 0 and layer.stream_out in (0, None)
        assert layer.parameters == sum(parameter.numel() for parameter in found.model.get_submodule(layer.name).parameters())
        attention, ffn = layer.branches
        if projections is not None:
            assert [item.role for item in attention.projections] == projections
        assert ffn.gated is gated
        assert ffn.projections[-1].role == "down" and ffn.projections[-1].out_features == stack.width


@pytest.mark.long
def test_an_encoder_and_a_decoder() -> None:
    found = anatomy("seq2seq/t5")
    encoder, decoder = found.stacks
    assert (encoder.kind, encoder.causal, decoder.kind, decoder.causal) == ("encoder", False, "decoder", True)
    assert all(roles(layer) == ATTENTION_FFN for layer in encoder.layers)
    assert all(roles(layer) == ["self-attention", "cross-attention", "ffn"] for layer in decoder.layers)
    assert {item.role for item in decoder.layers[0].attentions[1].projections} == {"q", "k", "v", "out"}
    assert {part.parameter for part in found.embeddings} == {found.head.parameter}  # one table, tied to the head
    assert any("lm_head.weight" in group and "shared.weight" in group for group in found.tied)


def test_layers_shared_across_depth() -> None:
    (stack,) = anatomy("masked/albert").stacks
    assert len({layer.name for layer in stack.layers}) == 1
    assert [layer.call for layer in stack.layers] == list(range(len(stack.layers)))


def test_a_factorised_embedding_is_not_the_streams_width() -> None:
    found = anatomy("masked/electra")
    assert found.embedding.shape[1] == found.model.config.embedding_size


class Placeholders(Own):
    """Embeds another token in place of those that stand for an image."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        text = x.clone()
        text[x == 49] = 0
        return super().forward(text)


def test_an_embedding_of_ids_some_of_which_are_replaced_is_one() -> None:
    found = retrofit.inspect(Placeholders(), {"x": torch.arange(38, 50).view(2, 6)})
    assert [part.parameter for part in found.embeddings] == ["a.weight"]


def test_mixtures_of_experts_and_their_routers_are_no_attention() -> None:
    found = anatomy("causal/mixtral")
    config = found.model.config
    for layer in found.layers:
        assert roles(layer) == ["self-attention", "moe"]
        router = next(item for item in layer.branches[1].projections if item.role == "router")
        assert (router.in_features, router.out_features) == (config.hidden_size, config.num_local_experts)


@pytest.mark.long
def test_other_mixers_are_named_so() -> None:
    assert {role for layer in anatomy("causal/mamba").layers for role in roles(layer)} == {"other mixer"}
    hybrid = {tuple(roles(layer)) for layer in anatomy("causal/jamba").layers}
    assert any(kinds[0] == "other mixer" for kinds in hybrid) and any(kinds[0] == "self-attention" for kinds in hybrid)


class Mixing(nn.Module):
    """Layers without attention, which mix tokens by one operation: `mix` of (batch, length, width)."""

    def __init__(self, mix: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.mix, self.a, self.c = mix, nn.Embedding(50, 24), nn.Linear(24, 50)
        self.b = nn.ModuleList(Block(24) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        for block in self.b:
            y = y + block.p(self.mix(block.m(y)))
            y = y + block.r(torch.relu(block.q(block.n(y))))
        return self.c(y)


def before(y: torch.Tensor) -> torch.Tensor:
    return nn.functional.pad(y, (0, 0, 2, 0))


@pytest.mark.first(9)
@pytest.mark.parametrize(
    ("mix", "causal"),
    [
        (lambda y: y.cumsum(1), True),
        (lambda y: before(y)[:, : y.shape[1]] * y, True),
        (lambda y: torch.fft.irfft(torch.fft.rfft(y, n=64, dim=1) ** 2, n=64, dim=1)[:, : y.shape[1]], True),  # a long convolution
        (lambda y: y.flip(1).cumsum(1).flip(1), False),
        (lambda y: torch.fft.fft(y, dim=1).real, False),
        (lambda y: y + y.roll(-1, 1), False),
        (lambda y: nn.functional.conv1d(y.mT, torch.ones(24, 1, 3), padding=1, groups=24).mT, False),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_layers_without_attention_are_causal_where_no_token_changes_earlier_ones(mix: Any, causal: bool, device: str) -> None:
    with torch.device(device):
        (stack,) = retrofit.inspect(Mixing(mix), {"x": torch.ones(2, 11, dtype=torch.long)}).stacks
    assert {role for layer in stack.layers for role in roles(layer)} == {"other mixer", "ffn"}
    assert (stack.causal, stack.kind) == (causal, "decoder" if causal else "encoder")


@pytest.mark.parametrize("at_zero", [True, False])
def test_a_decoder_of_queries_is_whole_from_its_first_layer_on(at_zero: bool) -> None:
    (stack,) = retrofit.inspect(Asking(at_zero)).stacks
    assert (stack.kind, stack.causal) == ("decoder", False)
    assert [roles(layer) for layer in stack.layers] == [["self-attention", "cross-attention", "ffn"]] * 2
    assert [(layer.name, layer.stream_in, layer.stream_out) for layer in stack.layers] == [("b.0", 0, None), ("b.1", 0, None)]


@pytest.mark.long
def test_latent_attention_keeps_its_roles() -> None:
    for layer in anatomy("causal/deepseek_v3").layers:
        assert layer.branches[0].role == "self-attention"
        assert layer.branches[0].projections[-1].role == "out"


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_every_attention_implementation_has_the_same_anatomy(implementation: str) -> None:
    (stack,) = anatomy("causal/llama", attn_implementation=implementation).stacks
    assert stack.causal and all(roles(layer) == ATTENTION_FFN for layer in stack.layers)
    assert [item.role for item in stack.layers[0].attentions[0].projections] == ["q", "k", "v", "out"]


def test_a_model_nobody_has_heard_of() -> None:
    found = retrofit.inspect(Own())
    (stack,) = found.stacks
    assert [layer.name for layer in stack.layers] == ["b.0", "b.1", "b.2"]
    assert all(roles(layer) == ATTENTION_FFN for layer in stack.layers)
    assert (found.embedding.name, found.head.name, stack.kind) == ("a", "c", "encoder")


class Probabilities(Own):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).softmax(-1)


def test_the_head_is_found_under_a_softmax() -> None:
    model = Probabilities()
    head = retrofit.inspect(model).head
    assert head is not None and head.name == "c"
    probabilities = retrofit.apply(model, "sparse-loss(modules=2)", verify=False)(torch.arange(12)[None])
    torch.testing.assert_close(probabilities.sum(-1), torch.ones(1, 12))


class Valued(Own):
    """A policy: a value for every token, then its logits."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Linear(self.c.in_features, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.a(x)
        for block in self.b:
            y = block(y)
        return {"value": self.value(y), "logits": self.c(y)}


def test_the_head_makes_the_logits_wherever_they_stand_among_the_outputs() -> None:
    model = Valued()
    head = retrofit.inspect(model).head
    assert head is not None and head.name == "c"
    rewritten = retrofit.apply(copy.deepcopy(model), "sparse-loss(modules=2)", verify=False)
    ids = torch.arange(12)[None]
    assert torch.equal(rewritten(ids)["value"], model(ids)["value"])
    assert not torch.equal(rewritten(ids)["logits"], model(ids)["logits"])


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.one, self.two = nn.Embedding(9, 8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        y = self.table(ids)
        return y + self.two(torch.relu(self.one(y)))


def test_a_refusal_says_what_the_graph_holds() -> None:
    with refused(NoTransformerError, "Perceptron") as caught:
        retrofit.inspect(Perceptron())
    assert "1 chain" in caught.value.why


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(self.table(ids).numpy())


def test_what_cannot_be_captured_says_why() -> None:
    with refused(CaptureError, "Failing") as caught:
        retrofit.inspect(Failing())
    assert caught.value.why and caught.value.remedy


class Branching(nn.Module):
    """A layer whose code branches on the values of a tensor."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.inner(hidden_states) if hidden_states.abs().sum() >= 0 else hidden_states


@pytest.mark.long
def test_code_that_branches_on_values_is_captured_with_them_and_rewritten() -> None:
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=99)).eval()
    found = retrofit.inspect(model)
    for block in model.transformer.h:
        block.mlp = Branching(block.mlp)
    branching = retrofit.inspect(model)
    assert branching.program.branches and not found.program.branches
    roles = [[branch.role for layer in one.layers for branch in layer.branches] for one in (found, branching)]
    assert roles[0] == roles[1]
    ids = torch.arange(24)[None]
    before = model(ids).logits
    rewritten = retrofit.apply(model, "altup(k=2)", verify=False)  # it could not be built again from its class
    torch.testing.assert_close(rewritten(ids).logits, before, atol=1e-5, rtol=1e-4)


def test_inspection_leaves_the_model_alone_and_copies_no_weight() -> None:
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=99)).train()
    hooks = sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())
    before = {name: (parameter.data_ptr(), parameter._version) for name, parameter in model.named_parameters()}
    retrofit.inspect(model)
    assert model.training and model.config.use_cache
    assert before == {name: (parameter.data_ptr(), parameter._version) for name, parameter in model.named_parameters()}
    assert hooks == sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def test_the_graph_is_the_data_flow() -> None:
    found = anatomy("causal/gpt2")
    graph = found.graph
    layer = found.stacks[0].layers[1]
    assert graph.has_node(layer.entry) and graph.has_node(layer.exit)
    assert graph.nodes[found.head.node]["module"] == found.head.name
    assert all(graph.nodes[name]["shape"][-1] == found.width for name in (layer.entry, layer.exit))


def test_layers_reached_through_a_slice_are_found_where_modules_are_shared() -> None:
    """One module under two names makes the tracer write down the way that the code went, slices of module lists included."""
    entry = zoo.entry("causal/llama")  # its code runs over layers[:n]
    model = zoo.build(entry)
    for layer in model.model.layers[1:]:
        layer.mlp.act_fn = model.model.layers[0].mlp.act_fn
    found = retrofit.inspect(model, example_inputs=zoo.inputs(entry, model))
    assert [layer.name for layer in found.stacks[0].layers] == [f"model.layers.{depth}" for depth in range(4)]


class KeyedBlock(Block):
    """A layer that returns the stream in a mapping, under the key −1."""

    def forward(self, y: torch.Tensor) -> dict[int, torch.Tensor]:
        return {-1: super().forward(y)}


class KeyedStack(Own):
    def __init__(self) -> None:
        super().__init__()
        self.b = nn.ModuleList(KeyedBlock(24) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        for block in self.b:
            y = block(y)[-1]
        return self.c(y)


def test_minus_one_is_a_key_like_any_other() -> None:
    layers = retrofit.inspect(KeyedStack()).stacks[0].layers
    assert [layer.stream_places() for layer in layers] == [(0, -1)] * 3


class StoringBlock(Block):
    """A layer that finds the stream in a box and leaves it there: neither an argument nor what it returns."""

    def forward(self, box: list[dict[str, torch.Tensor]]) -> None:
        box[0]["stream"] = super().forward(box[0]["stream"])


class StoringStack(Own):
    def __init__(self) -> None:
        super().__init__()
        self.b = nn.ModuleList(StoringBlock(24) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        box = [{"stream": self.a(x)}]
        for block in self.b:
            block(box)
        return self.c(box[0]["stream"])


def test_a_layer_without_the_stream_among_its_arguments_says_so() -> None:
    found = retrofit.inspect(StoringStack())
    layer = found.stacks[0].layers[0]
    assert layer.name == "b.0" and layer.stream_in is NO_STREAM and layer.stream_out is NO_STREAM
    with refused(DoesNotFitError, site="b.0") as caught:
        layer.stream_places()
    assert caught.value.why and caught.value.remedy
    data = json.loads(json.dumps(found.to_dict()))["stacks"][0]["layers"][0]
    assert data["stream_in"] == data["stream_out"] == "no stream"


def test_a_layer_that_no_module_owns_says_so() -> None:
    layer = retrofit.inspect(WrittenOut()).stacks[0].layers[0]
    assert not layer.name and layer.stream_in is NO_STREAM and layer.stream_out is NO_STREAM
    with refused(DoesNotFitError, layer.exit, site=""):
        layer.stream_places()


class WrittenOut(Own):
    """The layers' additions are in the model's own code."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        for block in self.b:
            one, two, three = block.o(block.m(y)).chunk(3, -1)
            y = y + block.p((one @ two.mT / one.shape[-1] ** 0.5).softmax(-1) @ three)
            y = y + block.r(torch.relu(block.q(block.n(y))))
        return self.c(y)


def test_the_modules_of_layers_in_code_are_no_tail() -> None:
    assert retrofit.inspect(WrittenOut()).tail == ("c",)


class NormedStem(WrittenOut):
    """A norm makes the stream that its layers in code add to."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.a = self.a, torch.nn.LayerNorm(24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.table(x))


def test_the_norm_that_a_stream_in_code_begins_with_is_of_the_stem() -> None:
    assert "a" in retrofit.inspect(NormedStem()).stem


class Added(torch.nn.Module):
    """A module that adds a branch to the stream, and computes neither."""

    def forward(self, y: torch.Tensor, stream: torch.Tensor) -> torch.Tensor:
        return y + stream


class AddedByModules(Own):
    """The layers' code is the model's own, the additions are modules'."""

    def __init__(self) -> None:
        super().__init__()
        self.add = torch.nn.ModuleList(Added() for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        for depth, block in enumerate(self.b):
            one, two, three = block.o(block.m(y)).chunk(3, -1)
            y = self.add[2 * depth](block.p((one @ two.mT / one.shape[-1] ** 0.5).softmax(-1) @ three), y)
            y = self.add[2 * depth + 1](block.r(torch.relu(block.q(block.n(y)))), y)
        return self.c(y)


def test_a_module_that_only_adds_is_no_layer() -> None:
    found = retrofit.inspect(AddedByModules())
    (stack,) = found.stacks
    assert [[branch.role for branch in layer.branches] for layer in stack.layers] == [["self-attention", "ffn"]] * 3
    assert not any(layer.name for layer in stack.layers)
    assert found.tail == ("c",)


class AddsAndAttends(nn.Module):
    """A module that adds a branch computed before it to the stream, and attends."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, y: torch.Tensor, branch: torch.Tensor) -> torch.Tensor:
        y, block = y + branch, self.block
        one, two, three = block.o(block.m(y)).chunk(3, -1)
        return y + block.p((one @ two.mT / one.shape[-1] ** 0.5).softmax(-1) @ three)


class AddingBeforeTheyAttend(Own):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(AddsAndAttends(block) for block in self.b)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        for layer, block in zip(self.layers, self.b, strict=True):
            y = layer(y, block.r(torch.relu(block.q(block.n(y)))))
        return self.c(y)


def test_a_module_that_adds_and_then_computes_is_the_layer() -> None:
    (stack,) = retrofit.inspect(AddingBeforeTheyAttend()).stacks
    assert [layer.name for layer in stack.layers] == [f"layers.{number}" for number in range(3)]
    assert [[branch.role for branch in layer.branches] for layer in stack.layers] == [["ffn", "self-attention"]] * 3
    assert [layer.stream_in for layer in stack.layers] == [0] * 3


class ReadingItsEncoding(Own):
    """The stream of the last layers is what another two began with, and they attend to what these made of it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        memory = self.b[0].n(self.b[1](self.b[0](y)))
        stream, block = self.b[0].m(y), self.b[2]
        one, (two, three) = block.o(stream)[..., :24], block.o(memory)[..., 24:].chunk(2, -1)
        stream = stream + block.p((one @ two.mT / one.shape[-1] ** 0.5).softmax(-1) @ three)
        return self.c(stream + block.r(torch.relu(block.q(block.n(stream)))))


def test_keys_of_what_another_stack_makes_of_the_same_start_are_not_its_own() -> None:
    roles = [
        [branch.role for layer in stack.layers for branch in layer.branches]
        for stack in retrofit.inspect(ReadingItsEncoding()).stacks
    ]
    assert roles == [["self-attention", "ffn"] * 2, ["cross-attention", "ffn"]]


class KeysBeforeTheNorm(Own):
    """The stream runs through the norms, queries read behind them and keys before them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        for block in self.b:
            normed = block.m(y)
            one, (two, three) = block.o(normed)[..., :24], block.o(y)[..., 24:].chunk(2, -1)
            y = normed + block.p((one @ two.mT / one.shape[-1] ** 0.5).softmax(-1) @ three)
            y = y + block.r(torch.relu(block.q(block.n(y))))
        return self.c(y)


def test_keys_of_what_the_stream_normalizes_are_its_own() -> None:
    (stack,) = retrofit.inspect(KeysBeforeTheNorm()).stacks
    assert [[branch.role for branch in layer.branches] for layer in stack.layers] == [["self-attention", "ffn"]] * 3


def test_inspection_and_its_table_build_no_networkx_graph() -> None:
    found = retrofit.inspect(Own())
    assert str(found) and found.to_dict()
    assert "graph" not in vars(found)
    assert found.graph.has_node(found.head.node) and "graph" in vars(found)


class Hearing(nn.Module):
    """Positions of a waveform are added by a convolution along it, channels second, before it is a stream of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.frames, self.positions = nn.Conv1d(1, 24, 4, 4), nn.Conv1d(24, 24, 3, padding=1, groups=4)
        self.b, self.c = nn.ModuleList(Block(24) for _ in range(3)), nn.Linear(24, 5)

    def forward(self, wave: torch.Tensor) -> torch.Tensor:
        y = self.frames(wave)
        y = (y + torch.relu(self.positions(y))).mT
        for block in self.b:
            y = block(y)
        return self.c(y)


def test_a_sum_with_the_channels_second_before_the_tokens_is_no_stack() -> None:
    found = retrofit.inspect(Hearing(), {"wave": torch.randn(2, 1, 44)})
    assert [(stack.kind, stack.width, len(stack.layers)) for stack in found.stacks] == [("encoder", 24, 3)]
    assert "positions" in found.stem and found.notes


class OneNorm(WrittenOut):
    """Its layers, whose additions are in code, share a norm."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.b:
            block.n = block.m
        self.b[1].m = self.b[1].n = self.b[0].m


def with_a_shared_weight() -> nn.Module:
    model = Own()
    model.b[1].q.weight = model.b[0].q.weight
    return model


@pytest.mark.parametrize("build", [Own, WrittenOut, OneNorm, with_a_shared_weight])
def test_the_rows_that_are_not_indented_add_up_to_the_model(build: Callable[[], nn.Module]) -> None:
    found = retrofit.inspect(build())
    top = [row for row in rows(found, surroundings(found)) if row.depth == 0]
    assert sum(row.parameters or 0 for row in top) == found.parameters == sum(one.numel() for one in found.model.parameters())
