"""The parts of a transformer: projections, branches, layers, stacks, and what lies around them."""

from __future__ import annotations

import dataclasses
import enum
from typing import Final, Literal

from retrofit.errors import DoesNotFitError


class NoStream(enum.Enum):
    """What `Layer.stream_in` and `Layer.stream_out` are where no argument, or no output, of the layer is the stream."""

    NO_STREAM = "no stream"


NO_STREAM: Final = NoStream.NO_STREAM

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
    name: str  # path of the innermost module that computes it, and perhaps more: `Anatomy.sites` has those that own it
    projections: tuple[Projection, ...]
    parameters: int  # elements, shared ones counted once
    source: str  # graph node the branch leaves the stream at
    output: str  # graph node that is added back
    add: str  # graph node of the residual addition
    heads: int | None = None
    gated: bool = False  # FFN with a multiplicative gate (GLU, SwiGLU, GEGLU)


@dataclasses.dataclass(frozen=True)
class Layer:
    """One layer of a stack: a module call that takes the stream as an argument and returns it."""

    name: str  # module path; "" where no module owns the layer
    call: int  # which call of that module this is (0 unless the module is shared across depth)
    branches: tuple[Branch, ...]
    norms: tuple[str, ...]  # paths (or nodes) of the normalisations
    parameters: int
    stream_in: int | str | NoStream  # position or keyword of the argument that is the stream
    stream_out: int | str | NoStream | None  # index or key of the stream in what is returned, None: the returned value itself
    entry: str  # graph node of the stream at entry
    exit: str  # graph node of the stream at exit

    def stream_places(self) -> tuple[int | str, int | str | None]:
        """`stream_in` and `stream_out` of a layer that a wrapper can be put around; raises `DoesNotFitError` for any other."""
        if self.name and not isinstance(self.stream_in, NoStream) and not isinstance(self.stream_out, NoStream):
            return self.stream_in, self.stream_out
        raise DoesNotFitError(
            f"layer {self.name or self.exit} cannot be wrapped",
            why="the module does not take the stream as an argument and return it"
            if self.name
            else "the residual additions are in the model's own code, no module owns a layer",
            remedy="write each layer as a module that takes the stream and returns it",
        )

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
