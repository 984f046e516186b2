"""Anatomies written by hand, with data-flow graphs to match: what `inspect` would find in six kinds of model.

Nothing here needs torch, so that a test can also show that drawing needs none.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import networkx

from retrofit.anatomy import Anatomy
from retrofit.anatomy.parts import Branch, Layer, Part, Projection, Role, Stack

Matrix = tuple[str, str, int, int]  # module within the branch, role, in, out


@dataclasses.dataclass(frozen=True)
class Plan:
    """A branch to be sketched: its role, its module within the layer, its matrices, its norms and how many heads it has."""

    role: Role
    name: str
    matrices: tuple[Matrix, ...]
    before: str = ""
    after: str = ""
    inside: str = ""
    stream: str = ""  # a norm on the stream after the addition
    heads: int | None = None
    gated: bool = False


Plans = Plan | tuple[Plan, ...]


def attention(
    width: int, heads: int, kv: int | None = None, name: str = "self_attn", role: Role = "self-attention", **norms: Any
) -> Plan:
    narrow = width if kv is None else width * kv // heads
    matrices = (
        ("q_proj", "q", width, width),
        ("k_proj", "k", width, narrow),
        ("v_proj", "v", width, narrow),
        ("o_proj", "out", width, width),
    )
    return Plan(role, name, matrices, heads=heads, **norms)


def feed_forward(width: int, hidden: int, gated: bool = False, name: str = "mlp", **norms: Any) -> Plan:
    up: tuple[Matrix, ...] = (("up_proj", "up", width, hidden), ("down_proj", "down", hidden, width))
    gate: tuple[Matrix, ...] = (("gate_proj", "gate", width, hidden),) if gated else ()
    return Plan("ffn", name, gate + up, gated=gated, **norms)


def flow_of(graph: networkx.DiGraph) -> Any:
    """A data flow of which no more is known than its graph; its nodes are their names, and read no parameters."""

    def call_of(name: str) -> SimpleNamespace:
        return SimpleNamespace(path=graph.nodes.get(name, {}).get("module", ""))

    reads = {"between": lambda first, last: [], "parameters_of": lambda nodes: {}}
    return SimpleNamespace(graph=lambda: graph, program=None, node=lambda name: name, call_of=call_of, **reads)


class Sketch:
    """A model in the making: every call adds to its graph, `anatomy` closes it."""

    def __init__(self, name: str) -> None:
        self.graph: networkx.DiGraph = networkx.DiGraph()
        self.model = types.new_class(name)()
        self.stacks: list[Stack] = []
        self.stem: list[str] = []
        self.tail: list[str] = []
        self.embeddings: list[Part] = []
        self.head_part: Part | None = None
        self.total = 0

    def node(self, *parents: str, name: str = "", module: str = "", **attributes: Any) -> str:
        """A new node computed from `parents`."""
        name = name or f"n{len(self.graph)}"
        self.graph.add_node(name, module=module, **{"parameter": None, "depends": True, **attributes})
        self.graph.add_edges_from((parent, name) for parent in parents)
        return name

    def weight(self, name: str) -> str:
        return self.node(parameter=name, depends=False)

    def embedding(self, module: str, rows: int, width: int, source: str, parameter: str = "") -> str:
        parameter = parameter or f"{module}.weight"
        node = self.node(source, self.weight(parameter), module=module)
        if all(part.parameter != parameter for part in self.embeddings):
            self.total += rows * width
        self.embeddings.append(Part(module, parameter, (rows, width), node))
        self.stem.append(module)
        return node

    def before(self, module: str, *parents: str) -> str:
        self.stem.append(module)
        return self.node(*parents, module=module)

    def after(self, module: str, *parents: str) -> str:
        self.tail.append(module)
        return self.node(*parents, module=module)

    def head(self, module: str, rows: int, width: int, source: str, parameter: str = "") -> None:
        node = self.node(source, self.weight(parameter or f"{module}.weight"), module=module)
        self.head_part = Part(module, parameter or f"{module}.weight", (rows, width), node)
        self.tail.append(module)
        self.total += 0 if parameter else rows * width

    def stack(
        self,
        name: str,
        width: int,
        count: int,
        plans: Callable[[int], Sequence[Plans]],
        source: str,
        causal: bool,
        memory: str = "",
    ) -> str:
        """A stack of `count` layers, `plans(i)` the branches of the i-th; plans in one tuple are parallel; returns its exit."""
        stream, layers = source, []
        for index in range(count):
            layer = self.layer(f"{name}.layers.{index}", plans(index), stream, memory)
            layers.append(layer)
            stream = layer.exit
        self.stacks.append(Stack("decoder" if causal or memory else "encoder", name, width, tuple(layers), causal, source, stream))
        return stream

    def layer(self, name: str, plans: Sequence[Plans], stream: str, memory: str) -> Layer:
        entry = stream
        branches: list[Branch] = []
        self.norms: list[str] = []
        for group in plans:
            made = [self.branch(name, plan, stream, memory) for plan in (group if isinstance(group, tuple) else (group,))]
            add = self.node(stream, *(branch.output for branch in made), module=name)
            branches += [dataclasses.replace(branch, add=add) for branch in made]
            stream = add
            if isinstance(group, Plan) and group.stream:
                stream = self.norm(f"{name}.{group.stream}", stream)
        size = sum(branch.parameters for branch in branches)
        self.total += size
        return Layer(name, 0, tuple(branches), tuple(dict.fromkeys(self.norms)), size, 0, None, entry, stream)

    def norm(self, path: str, source: str) -> str:
        """The normalisation of `source` by the module `path`; asked for twice, it is the same node."""
        self.norms.append(path)
        known = [node for node in self.graph.succ[source] if self.graph.nodes[node]["module"] == path]
        return known[0] if known else self.node(source, module=path)

    def branch(self, layer: str, plan: Plan, source: str, memory: str) -> Branch:
        path = f"{layer}.{plan.name}" if plan.name else layer
        value = self.norm(f"{layer}.{plan.before}", source) if plan.before else source
        projections = []
        for module, role, rows, columns in plan.matrices:
            weight = f"{path}.{module}.weight"
            projections.append(Projection(weight, role, rows, columns))
            read = memory if plan.role == "cross-attention" and role in ("k", "v") else ""
            value = self.node(value, self.weight(weight), *filter(None, [read]), module=f"{path}.{module}")
            if plan.inside and len(projections) == 1:
                value = self.norm(f"{path}.{plan.inside}", value)
        if plan.after:
            value = self.norm(f"{layer}.{plan.after}", value)
        size = sum(one.in_features * one.out_features for one in projections)
        return Branch(plan.role, path, tuple(projections), size, source, value, "", plan.heads, plan.gated)

    def anatomy(self, tied: tuple[tuple[str, ...], ...] = (), notes: tuple[str, ...] = ()) -> Anatomy:
        return Anatomy(
            stacks=tuple(self.stacks),
            embedding=self.embeddings[0] if self.embeddings else None,
            embeddings=tuple(self.embeddings),
            head=self.head_part,
            stem=tuple(dict.fromkeys(self.stem)),
            tail=tuple(self.tail),
            tied=tied,
            parameters=self.total,
            notes=notes,
            flow=flow_of(self.graph),
            model=cast(Any, self.model),
        )


def grouped_query_decoder(layers: int = 4, width: int = 64, hidden: int = 160, heads: int = 8, kv: int | None = 2) -> Anatomy:
    """As in Llama: norms before the branches, a gated FFN, fewer heads for keys and values, tied embedding."""
    sketch = Sketch("GroupedQueryDecoder")
    stream = sketch.embedding("model.embed_tokens", 1000, width, sketch.node(name="input_ids"))
    plans = (attention(width, heads, kv, before="input_norm"), feed_forward(width, hidden, gated=True, before="post_norm"))
    stream = sketch.stack("model", width, layers, lambda _: plans, stream, causal=True)
    sketch.head("lm_head", 1000, width, sketch.after("model.norm", stream), parameter="model.embed_tokens.weight")
    return sketch.anatomy(tied=(("model.embed_tokens.weight", "lm_head.weight"),))


def seven_billion() -> Anatomy:
    """Thirty-two layers of width 4096."""
    return grouped_query_decoder(layers=32, width=4096, hidden=11008, heads=32, kv=None)


def post_norm_encoder() -> Anatomy:
    """As in BERT: the stream itself is normalised after every addition; the FFN belongs to no module but the layer."""
    sketch = Sketch("PostNormEncoder")
    word = sketch.embedding("bert.embeddings.word", 1000, 64, sketch.node(name="input_ids"))
    plans = (attention(64, 4, name="attention", stream="attention.norm"), feed_forward(64, 256, name="", stream="norm"))
    stream = sketch.stack("bert.encoder", 64, 4, lambda _: plans, sketch.before("bert.embeddings", word), causal=False)
    sketch.head("cls.decoder", 1000, 64, sketch.after("cls", stream))
    return sketch.anatomy()


def encoder_decoder() -> Anatomy:
    """As in T5: both stacks begin with one embedding, the decoder attends to the normalised result of the encoder."""
    sketch = Sketch("EncoderDecoder")
    table = "shared.weight"
    stream = sketch.embedding("encoder.embed_tokens", 1000, 64, sketch.node(name="input_ids"), table)
    plans = (attention(64, 4, before="norm1"), feed_forward(64, 160, before="norm2"))
    memory = sketch.after("encoder.final_norm", sketch.stack("encoder", 64, 3, lambda _: plans, stream, causal=False))
    stream = sketch.embedding("decoder.embed_tokens", 1000, 64, sketch.node(name="decoder_input_ids"), table)
    cross = attention(64, 4, name="cross_attn", role="cross-attention", before="norm3")
    stream = sketch.stack("decoder", 64, 4, lambda _: (plans[0], cross, plans[1]), stream, causal=True, memory=memory)
    sketch.head("lm_head", 1000, 64, sketch.after("decoder.final_norm", stream), parameter=table)
    return sketch.anatomy(tied=(("shared.weight", "lm_head.weight"),))


def image_encoder() -> Anatomy:
    """As in ViT: no token ids, a stem that cuts the image into patches, a classifier."""
    sketch = Sketch("ImageEncoder")
    plans = (attention(64, 4, before="norm1"), feed_forward(64, 256, before="norm2"))
    stream = sketch.before("vit.embeddings", sketch.node(name="pixel_values"))
    stream = sketch.stack("vit", 64, 4, lambda _: plans, stream, causal=False)
    sketch.head("classifier", 10, 64, sketch.after("vit.norm", stream))
    return sketch.anatomy()


def hybrid() -> Anatomy:
    """As in Jamba: seven state-space layers to one attention, a mixture of experts in every second layer."""
    sketch = Sketch("Hybrid")
    matrices = (("in_proj", "gate_up", 64, 256), ("x_proj", "projection", 128, 24), ("out_proj", "out", 128, 64))
    mixer = Plan("other mixer", "mamba", matrices, before="input_norm", inside="dt_norm")
    experts = (("router", "router", 64, 4), *(("expert", "experts", 64, 96) for _ in range(4)))
    moe = Plan("moe", "moe", experts, before="post_norm")
    ffn = feed_forward(64, 96, gated=True, before="post_norm")

    def plans(index: int) -> Sequence[Plan]:
        return attention(64, 4, 2, before="input_norm") if index % 8 == 4 else mixer, moe if index % 2 else ffn

    stream = sketch.embedding("model.embed_tokens", 1000, 64, sketch.node(name="input_ids"))
    stream = sketch.stack("model", 64, 16, plans, stream, causal=True)
    sketch.head("lm_head", 1000, 64, sketch.after("model.norm", stream))
    return sketch.anatomy(notes=("2 residual additions in the code of model itself: add_1, add_2",))


def parallel_decoder() -> Anatomy:
    """As in GPT-J: attention and FFN leave the stream together, behind one norm."""
    sketch = Sketch("ParallelDecoder")
    stream = sketch.embedding("wte", 1000, 64, sketch.node(name="input_ids"))
    both = (attention(64, 4, before="norm"), feed_forward(64, 256, before="norm"))
    sketch.stack("h", 64, 3, lambda _: (both,), stream, causal=True)
    return sketch.anatomy()


def sandwich_decoder() -> Anatomy:
    """As in Gemma 2: a norm before and one after every branch."""
    sketch = Sketch("SandwichDecoder")
    stream = sketch.embedding("embed", 1000, 64, sketch.node(name="input_ids"))
    plans = (attention(64, 4, before="norm1", after="norm2"), feed_forward(64, 256, before="norm3", after="norm4"))
    sketch.stack("model", 64, 2, lambda _: plans, stream, causal=True)
    return sketch.anatomy()


def picture_reader() -> Anatomy:
    """As in LLaVA: an image encoder whose projected result is put among the token embeddings of a decoder."""
    sketch = Sketch("PictureReader")
    plans = (attention(32, 4, before="norm1"), feed_forward(32, 64, before="norm2"))
    stream = sketch.before("vision.patches", sketch.node(name="pixel_values"))
    seen = sketch.before("projector", sketch.stack("vision", 32, 3, lambda _: plans, stream, causal=False))
    words = sketch.embedding("text.embed_tokens", 1000, 64, sketch.node(name="input_ids"))
    plans_text = (attention(64, 4, before="norm1"), feed_forward(64, 160, before="norm2"))
    stream = sketch.stack("text", 64, 4, lambda _: plans_text, sketch.node(words, seen), causal=True)
    sketch.head("lm_head", 1000, 64, stream)
    return sketch.anatomy()


SIX = (grouped_query_decoder, post_norm_encoder, encoder_decoder, image_encoder, hybrid, seven_billion)
ALL = (*SIX, parallel_decoder, sandwich_decoder, picture_reader)
