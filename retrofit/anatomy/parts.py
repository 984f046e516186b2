"""The parts of a transformer: projections, branches, layers, stacks, and what lies around them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    pass


Role = Literal["self-attention", "cross-attention", "ffn", "moe", "other mixer"]


@dataclasses.dataclass(frozen=True)
class Projection:
    """One weight matrix inside a branch and what it projects."""

    name: str  # the parameter's name, "" where the weight is computed
    role: str  # q, k, v, qkv, out, gate, up, gate_up, down, router, projection
    in_features: int
    out_features: int


@dataclasses.dataclass(frozen=True)
class Branch:
    """One residual branch: what is added to the stream, by whom."""

    role: Role
    name: str  # path of the module that owns it; "" where no module does
    projections: tuple[Projection, ...]
    parameters: int  # elements, shared ones counted once
    source: str  # graph node the branch leaves the stream at
    output: str  # graph node that is added back
    add: str  # graph node of the residual addition
    heads: int | None = None
    gated: bool = False  # FFN with a multiplicative gate (GLU, SwiGLU, GEGLU)


@dataclasses.dataclass(frozen=True)
class Layer:
    """One layer of a stack: a module call that takes the stream in and hands it on."""

    name: str  # module path; "" where no module owns the layer
    call: int  # which call of that module this is (0 unless the module is shared across depth)
    branches: tuple[Branch, ...]
    norms: tuple[str, ...]  # paths (or nodes) of the normalisations
    parameters: int
    stream_in: int | str | None  # positional index or keyword the stream enters by
    stream_out: int | str | None  # index into the returned tuple, key of the returned mapping, None: the value itself
    entry: str  # graph node of the stream at entry
    exit: str  # graph node of the stream at exit

    @property
    def attentions(self) -> tuple[Branch, ...]:
        return tuple(branch for branch in self.branches if branch.role in ("self-attention", "cross-attention"))

    @property
    def ffns(self) -> tuple[Branch, ...]:
        return tuple(branch for branch in self.branches if branch.role in ("ffn", "moe"))


@dataclasses.dataclass(frozen=True)
class Stack:
    """One residual stream and the layers it runs through."""

    kind: Literal["encoder", "decoder"]  # decoder: its self-attention is causal, or it reads another stack
    name: str  # path of the module whose code runs the layers
    width: int
    layers: tuple[Layer, ...]
    causal: bool
    entry: str  # graph node of the stream before the first layer
    exit: str  # graph node of the stream after the last layer


@dataclasses.dataclass(frozen=True)
class Part:
    """A module outside the stacks: an embedding, a head."""

    name: str  # module path; the parameter's name where no module owns it
    parameter: str  # name of the weight
    shape: tuple[int, ...]
    node: str  # graph node of the look-up or the product

    def __str__(self) -> str:
        return self.name
