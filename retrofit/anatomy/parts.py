"""The parts of a transformer, the findings in one model, and the places that a pass rewrites or leaves alone."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, Literal

from retrofit.errors import DoesNotFitError, Remedy, joined, listed

if TYPE_CHECKING:
    import networkx
    from torch import fx, nn

    from retrofit.program.dataflow import Dataflow
    from retrofit.program.program import Program


class NoStream(enum.Enum):
    """Type of `Layer.stream_in` and `Layer.stream_out` if no argument, or no output, of the layer is the stream."""

    NO_STREAM = "no stream"


NO_STREAM: Final = NoStream.NO_STREAM

NO_OWNER = Remedy("emit='graph' makes modules of such code", "graph")

Role = Literal["self-attention", "cross-attention", "ffn", "moe", "other mixer"]


@dataclasses.dataclass(frozen=True)
class Projection:
    """A weight matrix of a branch and its role."""

    name: str  # the parameter's name, "" if the weight is computed
    role: str  # q, k, v, qkv, out, gate, up, gate_up, down, router, projection
    in_features: int
    out_features: int


@dataclasses.dataclass(frozen=True)
class Branch:
    """A residual branch: the function that is added to the stream, and its module."""

    role: Role
    name: str  # path of the innermost module that computes it, and perhaps more: see `Anatomy.sites` for owners
    projections: tuple[Projection, ...]
    parameters: int  # elements, shared ones counted once
    source: str  # graph node where the branch leaves the stream
    output: str  # graph node that is added back
    add: str  # graph node of the residual addition
    heads: int | None = None
    gated: bool = False  # FFN with a multiplicative gate (GLU, SwiGLU, GEGLU)


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer of a stack: a module call that takes the stream as an argument and returns it."""

    name: str  # module path; "" if no module owns the layer
    call: int  # which call of that module this is (0 unless the module is shared across depth)
    branches: tuple[Branch, ...]
    norms: tuple[str, ...]  # paths (or nodes) of the normalisations
    parameters: int
    stream_in: int | str | NoStream  # position or keyword of the argument that is the stream
    stream_out: int | str | NoStream | None  # index or key of the stream in the output, None: the output itself
    entry: str  # graph node of the stream at entry
    exit: str  # graph node of the stream at exit

    def stream_places(self) -> tuple[int | str, int | str | None]:
        """Return `stream_in` and `stream_out` of a layer that can be wrapped; raises `DoesNotFitError` for any other."""
        if self.name and not isinstance(self.stream_in, NoStream) and not isinstance(self.stream_out, NoStream):
            return self.stream_in, self.stream_out
        raise DoesNotFitError(
            f"layer {self.name or self.exit} cannot be wrapped",
            why="the module does not take the stream as an argument and return it"
            if self.name
            else "the residual additions are in the model's own code, no module owns a layer",
            remedy="write each layer as a module that takes the stream and returns it",
            site=self.name,
            code="no-owner",
        )

    @property
    def attentions(self) -> tuple[Branch, ...]:
        return tuple(branch for branch in self.branches if branch.role in ("self-attention", "cross-attention"))

    @property
    def ffns(self) -> tuple[Branch, ...]:
        return tuple(branch for branch in self.branches if branch.role in ("ffn", "moe"))


@dataclasses.dataclass(frozen=True)
class Stack:
    """A residual stream and its layers."""

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

    name: str  # module path; the parameter's name if no module owns it
    parameter: str  # name of the weight
    shape: tuple[int, ...]
    node: str  # graph node of the look-up or the product

    def __str__(self) -> str:
        return self.name


WITHOUT_GRADIENT = "no gradient reaches it: the outputs depend on it through comparisons only"  # for parts without training


@dataclasses.dataclass(frozen=True)
class Findings:
    """The parts found in a model, their places, and the parts not found."""

    stacks: tuple[Stack, ...]
    embedding: Part | None  # token embedding; None if the model takes no ids
    embeddings: tuple[Part, ...]  # every table looked up by token ids
    head: Part | None  # product that computes the per-token logits
    stem: tuple[str, ...]  # modules between the inputs and the first layers
    tail: tuple[str, ...]  # modules between the last layers and the outputs
    tied: tuple[tuple[str, ...], ...]  # names of one parameter each
    parameters: int
    notes: tuple[str, ...]  # what could not be placed, and why
    flow: Dataflow  # of its program
    model: nn.Module

    @property
    def program(self) -> Program:
        """The captured program that was analysed."""
        return self.flow.program

    @functools.cached_property
    def graph(self) -> networkx.DiGraph:
        """The data flow as a `networkx` graph: nodes by name, with operation, shape and module path."""
        return self.flow.graph()

    def node(self, name: str) -> fx.Node:
        """Return the node of the program called `name`, as parts of the anatomy name it."""
        return self.flow.node(name)

    def is_trained(self, layer: Layer) -> bool:
        """Return whether the layer's output gets a gradient from an output of the model."""
        return self.node(layer.exit) in self.flow.trained

    @property
    def width(self) -> int:
        """The stream's width, d_model, of the last stack, which computes the outputs."""
        return self.stacks[-1].width

    def deepest(self, kind: str = "all") -> int:
        """Return the number of layers of the deepest stack, of the given kind if any; 0 if there is none."""
        return max((len(stack.layers) for stack in self.stacks if kind in ("all", stack.kind)), default=0)

    @property
    def layers(self) -> Iterator[Layer]:
        return (layer for stack in self.stacks for layer in stack.layers)


@dataclasses.dataclass(frozen=True)
class Site:
    """A place that a pass rewrites: the module's path and the change."""

    name: str
    what: str


@dataclasses.dataclass(frozen=True)
class NearMiss:
    """A place that a pass leaves alone, and the reason."""

    name: str  # module path; "" for the model as a whole
    why: str
    remedies: str | Sequence[str] = ()  # alternatives, each sufficient; a tuple after construction
    in_any_form: bool = False  # holds for the model's graph too: the reason is in the computation, or an option
    code: str = ""  # the kind of reason, like an error's

    def __post_init__(self) -> None:
        object.__setattr__(self, "remedies", listed(self.remedies))

    @staticmethod
    def not_selected(stack: Stack, stacks: str) -> NearMiss:
        """Return the near miss of a stack that the option `stacks` excludes."""
        return NearMiss(stack.name, f"it is the {stack.kind}, and stacks={stacks}", in_any_form=True, code="not-selected")

    @property
    def remedy(self) -> str:
        """The remedies as one text; "" if there are none."""
        return joined(listed(self.remedies))


def first_of_each(near_misses: Iterable[NearMiss]) -> list[NearMiss]:
    """Return the first near miss of each name: several depths may share a module."""
    found: dict[str, NearMiss] = {}
    for miss in near_misses:
        found.setdefault(miss.name, miss)
    return list(found.values())


@contextlib.contextmanager
def collect_near_miss(name: str, near_misses: list[NearMiss]) -> Iterator[None]:
    """Turn a `DoesNotFitError` raised within this context into a near miss called `name`, appended to `near_misses`."""
    try:
        yield
    except DoesNotFitError as error:
        near_misses.append(NearMiss(name, error.why or error.what, error.remedies, error.in_any_form, error.code))


def unfit(why: str, remedy: str | Sequence[str] = "", *, in_any_form: bool = False, code: str = "does-not-fit") -> DoesNotFitError:
    """Return the refusal of one place, to be raised within `collect_near_miss`, which names the place."""
    return DoesNotFitError("a place cannot be rewritten", why=why, remedy=remedy, in_any_form=in_any_form, code=code)
