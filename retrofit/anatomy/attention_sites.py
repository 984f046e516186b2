"""An attention of a model: its projections, its input streams, its output matrix and its mask.

    q, k, v = the columns of x W + b that become queries, keys and values         self-attention
    q of x; k, v of the other stream                                              cross-attention
    y = core(q, k, v) W_out + b_out

Positions, norms, masks and the cache lie between a projection and the core. They are the module's own code, and stay.

q, k and v may come from three modules, or from one that lays them out by chunks, by heads or by groups. To find out, the numbers of
the columns are passed through the graph's own reshapes, transposes and selections, up to the operands of the attention's core.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import torch
from torch import Tensor, fx, nn

from retrofit.anatomy.attention_cores import Attention, find_attentions
from retrofit.anatomy.causality import mask_value, shown_keys
from retrofit.anatomy.parts import Findings
from retrofit.anatomy.weights import Matrix
from retrofit.errors import CaptureError, DoesNotFitError
from retrofit.program.aten_ops import CAST, CLAMP, LAYOUT, LIKE, SELECTION, is_float, op, shape
from retrofit.program.capture import capture, missing_masks
from retrofit.program.dataflow import Dataflow
from retrofit.program.program import Call, Key

LETTERS = ("q", "k", "v")
REST = "g"  # columns of a projection with another use, such as a gate on the attention's result


@dataclasses.dataclass(frozen=True)
class SiteProjection:
    """A module that multiplies by a weight, and the columns of its result by use.

    A letter names one set of columns: "q", "k", "v"; "kv" for columns that are both keys and values; "g" for all others.
    """

    matrix: Matrix
    columns: tuple[tuple[str, tuple[int, ...]], ...]  # by letter, ascending; all columns
    stream: str  # the operand's node; projections of one stream name the same node
    stream_width: int

    @property
    def letters(self) -> tuple[str, ...]:
        return tuple(letter for letter, _ in self.columns)

    @property
    def width(self) -> int:
        """The number of columns."""
        return sum(len(places) for _, places in self.columns)


@dataclasses.dataclass(frozen=True)
class StreamReader:
    """A module inside an attention, other than its projections, that reads the stream: a gate, a router."""

    path: str
    key: Key  # the argument that is the stream


@dataclasses.dataclass(frozen=True)
class MaskArgument:
    """The argument of an attention module that determines which keys a query may see."""

    key: Key
    true_hides: bool  # whether True in a boolean mask means hidden


@dataclasses.dataclass(frozen=True)
class AttentionSite:
    """An attention of a model whose projections can be replaced.

    In self-attention all projections read the stream x. In cross-attention, queries are projections of x, keys and values
    projections of the source, another stream.
    """

    name: str  # path of the module in whose call the projections are applied
    cross: bool
    causal: bool  # whether its stack is causal, so that it may decode with a cache
    calls: int  # calls in one forward: several if depths share the module
    heads: int
    width: int  # of x
    stream_in: Key  # the argument that is x; None if no single argument is
    source_in: Key  # the argument that is the source; None if no single argument is
    projections: tuple[SiteProjection, ...]
    out: Matrix | None  # the matrix that multiplies the core's result
    out_shape: tuple[int, int]  # its columns in and out
    why_no_out: str  # why it cannot be replaced
    returns_out: bool  # whether the module returns the product with `out`, except for dropout
    out_key: Key  # where `out`'s product is in the output; meaningful only if `returns_out`
    readers: tuple[StreamReader, ...] = ()
    why_separate: str = (
        ""  # why x cannot be replaced as an argument: the module's code reads it, or projections read several streams
    )
    mask: MaskArgument | None = None
    tokens_first: bool = False  # whether x is (length, batch, width) instead of (batch, length, width)

    @property
    def widths(self) -> dict[str, int]:
        """The number of columns by letter."""
        return {letter: len(places) for projection in self.projections for letter, places in projection.columns}

    @property
    def stream_projections(self) -> tuple[SiteProjection, ...]:
        """The projections of x."""
        return tuple(projection for projection in self.projections if not self.cross or "q" in projection.letters)

    @property
    def source_projections(self) -> tuple[SiteProjection, ...]:
        """In cross-attention the projections of the source."""
        return tuple(projection for projection in self.projections if self.cross and "q" not in projection.letters)


@dataclasses.dataclass(frozen=True)
class ValueSite:
    """The projection of an attention whose result contains the values of the stream's tokens, and the columns of the values.

    The columns lie in `blocks` of equal size: in each, `width` columns from `start` on.
    """

    name: str  # path of the module that calls the projection
    projection: str  # path of the projection inside it
    heads: int  # of the values: fewer than the queries' if several share one
    features: int  # of x, the projection's input
    blocks: int
    start: int
    width: int
    tokens_first: bool  # whether x is (length, batch, features) instead of (batch, length, features)
    latent: bool  # whether x is computed by another projection of the attention, and the cache may contain x instead of values

    @property
    def columns(self) -> int:
        """The number of columns with values."""
        return self.blocks * self.width


def weights_by_letter(site: AttentionSite, model: nn.Module) -> dict[str, Tensor]:
    """Return the dense weight of each letter, (in, columns)."""
    weights = {}
    for projection in site.projections:
        weight = model.get_parameter(projection.matrix.weight).detach()
        weight = weight.t() if projection.matrix.out_first else weight
        for letter, places in projection.columns:
            weights[letter] = weight[:, list(places)]
    return weights


MOVING = LAYOUT | CAST | CLAMP | SELECTION | {"getitem"}  # operations that leave elements in their columns, or only move them


def column_letters(result: fx.Node, core: Attention, flow: Dataflow) -> list[str]:
    """Return, for each column of a projection's `result`, the letters of the operands that it becomes, "" if nothing reads it."""
    size = shape(result) or (0,)
    operands = dict(zip(LETTERS, (core.query, core.key, core.value), strict=True))
    with torch.device("cpu"):
        numbers: dict[fx.Node, Any] = {result: torch.arange(size[-1]).expand(size)}  # column numbers of the elements of each node
    reached: list[set[str]] = [set() for _ in range(size[-1])]
    for node in [result, *flow.nodes[flow.position[result] + 1 :]]:
        if node is not result:
            if op(node) not in MOVING or not node.args or node.args[0] not in numbers:
                continue
            numbers[node] = move(node, numbers | index_tensors(node, flow))
        if not isinstance(numbers[node], Tensor):
            continue
        readers = [user for user in flow.uses[node] if op(user) not in MOVING | LIKE or user.args[0] is not node]
        ends = [user for user in readers if user.op != "output"]
        letters = {letter for letter, operand in operands.items() if operand is node}
        letters |= {letter for end in ends for letter, operand in operands.items() if flow.reaches(end, operand)}
        strays = [end for end in ends if not any(flow.reaches(end, operand) for operand in operands.values())]
        if ends != readers or any(end is not core.result and not is_in_core(end, core, flow) for end in strays):
            letters.add(REST)
        for column in numbers[node].unique().tolist():
            reached[column] |= letters
    return ["".join(letter for letter in LETTERS if letter in letters) or "".join(letters) for letters in reached]


def move(node: fx.Node, numbers: dict[fx.Node, Any]) -> Any:
    """Return the column numbers of a node in `MOVING`, from those of its argument."""
    if op(node) in CAST | CLAMP:
        return numbers[node.args[0]]  # type: ignore[index]
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda part: numbers.get(part, part))
    operation = torch.ops.aten.reshape.default if op(node) == "view" else node.target  # the numbers may have other strides
    return operation(*args, **kwargs)  # type: ignore[operator]


def index_tensors(node: fx.Node, flow: Dataflow) -> dict[fx.Node, Tensor]:
    """Return the index tensors by which a node moves elements; they depend on no input."""
    found = {}
    for part in node.all_input_nodes:
        if part is node.args[0]:
            continue
        value = None if part in flow.depends else mask_value(part, flow)
        if value is None or not has_constant_values(part, flow):
            raise DoesNotFitError(
                "the columns of a projection cannot be separated",
                why=f"which columns are queries depends on an unknown index tensor ({node.name})",
                code="not-parsed",
            )
        found[part] = value
    return found


def has_constant_values(node: fx.Node, flow: Dataflow) -> bool:
    """Return whether the constants that a node is computed from have values."""
    names = [
        name for constant, name in flow.program.constants.items() if constant in flow.position and flow.reaches(constant, node)
    ]
    return not any(flow.program.values[name].is_meta for name in names if name in flow.program.values)


def is_in_core(node: fx.Node, core: Attention, flow: Dataflow) -> bool:
    """Return whether the node lies between the operands of the core and its result."""
    follows = any(flow.reaches(operand, node) for operand in (core.query, core.key, core.value))
    return follows and flow.reaches(node, core.result)


def with_mask_arguments(sites: list[AttentionSite], anatomy: Findings) -> list[AttentionSite]:
    """Return the sites, each with its module's mask argument if there is one.

    A model captured without a mask may pass none to its attentions: it is captured again with one.
    """
    masks = mask_arguments(sites, anatomy.flow)
    model, examples = anatomy.model, anatomy.program.examples
    if len(masks) < len(sites) and (missing := missing_masks(model, examples)):
        with contextlib.suppress(CaptureError):
            masks = mask_arguments(sites, Dataflow(capture(model, examples | missing))) | masks
    return [dataclasses.replace(site, mask=masks.get(site.name)) for site in sites]


def mask_arguments(sites: list[AttentionSite], flow: Dataflow) -> dict[str, MaskArgument]:
    """Return the mask arguments of the sites in a captured model, by the name of the site."""
    program = flow.program
    cores = find_attentions(flow)
    first_calls: dict[str, Call] = {}
    for call in program.calls:
        first_calls.setdefault(call.path, call)
    found: dict[str, MaskArgument] = {}
    for site in sites:
        owner = first_calls.get(site.name, program.root)
        own = [core for core in cores if owner.encloses(flow.call_of(core.result))]
        masks = [mask for core in own for mask in core.masks]
        streams = site.stream_in, site.source_in
        keys = [key for mask in masks if (key := mask_key(owner, mask, streams, site.tokens_first, flow)) is not None]
        if owner is not program.root and keys:
            found[site.name] = MaskArgument(keys[0], true_hides(owner.inputs[keys[0]], own, flow))
    return found


def mask_key(call: Call, mask: fx.Node, streams: tuple[Key, Key], tokens_first: bool, flow: Dataflow) -> Key:
    """Return the argument of a call from which `mask` is computed without any weight of the model: None if there is none.

    The attention's `streams`, the input, which may be (length, batch, width), and in cross-attention the source, are no masks. Nor
    are positions, which a mask may also be computed from; of several arguments it is the one that the others lead to.
    """
    weights = [node for node in flow.program.parameters if node in flow.position]
    stream = shape(call.inputs.get(streams[0]))
    found: dict[Key, fx.Node] = {}
    for key, node in call.inputs.items():
        size = shape(node) or ()
        if key in (None, *streams) or len(size) not in (2, 4):
            continue
        if len(size) == 2 and stream is not None and size[0] not in (1, stream[tokens_first]):
            continue  # it is (queries, keys), the same for every row of the batch
        is_learned = any(flow.reaches(weight, node) for weight in weights)
        if flow.reaches(node, mask) and not is_learned and not numbers_tokens(node, flow):
            found[key] = node
    last = (
        key for key, node in found.items() if not any(other is not node and flow.reaches(node, other) for other in found.values())
    )
    return next(last, None)


def numbers_tokens(node: fx.Node, flow: Dataflow) -> bool:
    """Return whether the value contains the positions of the tokens, in order."""
    value = mask_value(node, flow) if len(shape(node) or ()) == 2 and not is_float(node) else None
    return value is not None and value.dtype != torch.bool and bool((value.diff(dim=-1) == 1).all()) and value.shape[-1] > 1


def true_hides(node: fx.Node, cores: list[Attention], flow: Dataflow) -> bool:
    """Return whether True, or a large negative number, in the mask at `node` hides a key, by the keys that the attentions show.

    If that is unknown: whether without padding it is True for no token and itself, or not for the first token. Tokens further right
    may still be hidden: some models pad a sequence to a multiple of their window.
    """
    with torch.device("cpu"):
        for core in cores:
            if any(flow.reaches(node, mask) for mask in core.masks):
                of_zeros, of_ones = (shown_keys(core, node, fill, flow) for fill in (0, 1))
                if of_zeros is not None and of_ones is not None and (of_zeros != of_ones or (of_zeros and is_float(node))):
                    return of_zeros >= of_ones
        value = mask_value(node, flow)
    if value is None or value.dim() < 2:
        return False
    if value.shape[-1] == value.shape[-2]:
        return value.dtype == torch.bool and not bool(value.diagonal(dim1=-2, dim2=-1).any())
    return value.dim() == 2 and not bool(value[:, 0].any())
