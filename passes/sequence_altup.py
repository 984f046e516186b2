"""Sequence-AltUp: a layer computes every k-th token, and its correction is handed on to the tokens between.

    predict   ŷ_i = a1 x_i + a2 x_{⌊i/k⌋k}
    compute   ỹ_0, ỹ_k, … = layer(x_0, x_k, …)
    correct   y_i = ŷ_i + b (ỹ_{⌊i/k⌋k} − ŷ_{⌊i/k⌋k})

With the anchor's x and ỹ collected, y_i = a1 x_i + c_{⌊i/k⌋k} where c = b ỹ + (a2 − b (a1 + a2)) x: one vector an anchor is all
that is spread over its window, and all that decoding has to remember. a1 = 1, a2 = 0, b = 1 at the start, which makes k = 1 the
dense layer.

The papers' baselines: stride-and-skip, y_i = ỹ_i at anchors and x_i between them; average-pooling, every token of a window is given
what the layer makes of the window's mean (layers in a row pool once, for the mean of equal tokens is the token).

Alternating Updates for Efficient Transformers (NeurIPS 2023), §4.2, §5.4 and supplement E, Alg. 2. Which tokens are anchors is in
`striding`, how what else the layer is handed follows them in `handed`, what decoding keeps in `anchor_cache`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, fx, nn
from transformers.cache_utils import Cache

from retrofit.anatomy import Anatomy, Layer, Stack
from retrofit.caching import cache_among
from retrofit.capture import Call, Program, capture
from retrofit.dataflow import Dataflow
from retrofit.depths import depths
from retrofit.edit import Edit
from retrofit.errors import CaptureError, DoesNotFitError
from retrofit.inputs import forward_parameters, named_inputs
from retrofit.ops import shape
from retrofit.passes.anchor_cache import AnchorLayer, copied, give_back, keep, moved_on, recalled, seen_through
from retrofit.passes.beside import (
    Crossing,
    crossings,
    handed_over,
    hears_of_padding,
    is_made_of_ids,
    reads_by_another_way,
    reads_some_only,
    tells_padding,
)
from retrofit.passes.handed import Anchors, Follows, Handed, Path, as_mask, learn, name_arguments, names_of, path_of, tensors_in
from retrofit.passes.numbering import is_numbering, is_same_of_anchors, tables_of
from retrofit.passes.striding import CountedAnchors, EvenAnchors
from retrofit.probes import accepts
from retrofit.protocol import NearMiss, Pass, Rewrite, Site, option
from retrofit.wrapping import Wrapper, replaced

# ── The layers ───────────────────────────────────────────────────────────────────────────────────────────────────────────────────


class StridedLayer(Wrapper):
    """`layer` sees every `k`-th token of the stream, its anchors; a subclass says what becomes of the tokens between.

    The stream, (batch, T, d), enters by the argument `stream_in` and leaves by `stream_out`, an index or key of what the layer
    returns (None: the value itself). `follows` says how other arguments follow the tokens; `returns` which of them the layer
    hands back, by its output's index; `unread` which it passes on without looking into them. `name` is what the layer's memories
    go by in a cache.
    """

    def __init__(
        self,
        layer: nn.Module,
        k: int,
        *,
        name: str = "",
        stream_in: int | str = 0,
        stream_out: int | str | None = None,
        follows: Mapping[Path, Follows] | None = None,
        returns: Mapping[int | str, Path] | None = None,
        unread: Collection[int | str] = (),
    ) -> None:
        super().__init__(layer)
        self.k, self.name, self.stream_out = k, name, stream_out
        self.names = names_of(layer)
        self.stream: Path = path_of(layer, stream_in)
        self.follows, self.returns, self.unread = dict(follows or {}), dict(returns or {}), frozenset(unread)
        like = next((parameter for parameter in layer.parameters() if parameter.is_floating_point()), torch.empty(()))
        self.add_coefficients(like.device, like.dtype)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        handed = Handed.of(args, kwargs, self.names, self.stream, self.follows, self.unread)
        cache = cache_among(args, kwargs)
        if cache is not None:
            return self.decode(handed, cache)
        real = handed.real(0, 0)
        anchors = EvenAnchors(0, handed.x.shape[1], self.k) if real is None else CountedAnchors(real, self.k)
        x = self.seen(handed.x, anchors)
        given, keywords = handed.strided(x, anchors, None, 0)
        output = self.layer(*given, **keywords)
        out = None if isinstance(output, Tensor) else self.stream_out
        made = self.correction(x, output if out is None else output[out])
        return replaced(handed.restored(output, self.returns), out, self.update(handed.x, made, anchors, None))

    @torch.compiler.disable
    def decode(self, handed: Handed, cache: Cache) -> Any:
        """The call on a cache: the layer runs where there are anchors among the new tokens."""
        x, held = handed.x, recalled(cache, self.name) or AnchorLayer(self.name, self.k)
        offset = held.offset(x.shape[1])
        real = handed.real(held.tokens, offset)
        anchors = held.anchors(x.shape[1], real, x.shape[0])
        earlier, corrections = held.earlier, None
        if anchors.count:
            output, corrections, out = self.run(handed, cache, held, anchors, offset)
            held.template = self.template(output, out)
        else:
            output, out = self.rebuilt(held.template, handed, cache)
        y = self.update(x, x.new_zeros(x.shape[0], 0, x.shape[2]) if corrections is None else corrections, anchors, earlier)
        held.advance(anchors, real, x.shape[1], corrections)
        keep(cache, held)
        return replaced(output, out, y)

    def run(
        self, handed: Handed, cache: Cache, held: AnchorLayer, anchors: Anchors, offset: int
    ) -> tuple[Any, Tensor, int | str | None]:
        """What the layer returns for the anchors, their corrections, and the stream's place in what it returned."""
        x = self.seen(handed.x, anchors)
        args, kwargs = handed.strided(x, anchors, held, offset)
        view = seen_through(cache, held)
        args = [view if value is cache else value for value in args]
        kwargs = {key: view if value is cache else value for key, value in kwargs.items()}
        before = copied(cache) if held.recurrent is None else {}
        moving = anchors.valid.any(1) if anchors.valid is not None and held.recurrent else None
        if moving is not None and anchors.valid is not None and anchors.count > 1 and not bool(anchors.valid.all()):
            raise DoesNotFitError(
                "a strided recurrent layer was handed several tokens at once, of which rows have different numbers of anchors",
                why="its states would move on by the anchors of other rows",
                remedy="after the prompt, go on one token at a time",
            )
        resting = copied(cache, held.recurrent) if moving is not None and held.recurrent else {}
        held.mask = handed.mask or held.mask
        if held.keys is not None and isinstance(anchors, CountedAnchors) and not handed.tells and not held.sees_all(anchors):
            if held.mask is None:
                raise DoesNotFitError(
                    "a strided layer was handed no mask for a batch whose rows differ in length",
                    why="its keys of shorter rows have to be hidden",
                    remedy="pass attention_mask with every step, or use attn_implementation='sdpa'",
                )
            handed.put(
                args, kwargs, held.mask[0], as_mask(held.visible(anchors), held.mask[1])
            )  # none is due where padding is gone
        output = self.layer(*args, **kwargs)
        if moving is not None:
            give_back(cache, resting, moving)
        if held.recurrent is None:
            held.recurrent = moved_on(before, cache)
        out = None if isinstance(output, Tensor) else self.stream_out
        corrections = self.correction(x, output if out is None else output[out])
        return handed.restored(output, self.returns), corrections, out

    def template(self, output: Any, out: int | str | None) -> Any:
        """What is needed to make an output like this one without running the layer."""
        if out is None:
            return None
        items = output.items() if isinstance(output, Mapping) else enumerate(output)
        held = {key: "cache" if isinstance(value, Cache) else None for key, value in items}
        return type(output), held, out

    def rebuilt(self, template: Any, handed: Handed, cache: Cache) -> tuple[Any, int | str | None]:
        """An output like the layer's last: arguments that it hands back are there, what it would have computed is None."""
        if template is None:
            return None, None
        kind, held, out = template
        items = {key: cache if value == "cache" else None for key, value in held.items()}
        for key, path in self.returns.items():
            if key in items:
                items[key] = handed.argument(path)
        if issubclass(kind, Mapping):
            return kind(**items), out
        values = list(items.values())
        return (kind(*values) if hasattr(kind, "_fields") else kind(values)), out

    # What a method says.

    def add_coefficients(self, device: torch.device, dtype: torch.dtype) -> None:
        """The method's own parameters are there."""

    def seen(self, x: Tensor, anchors: Anchors) -> Tensor:
        """What the layer is to work on: (batch, anchors, d)."""
        return anchors.pick(x)

    def correction(self, x: Tensor, y: Tensor) -> Tensor:
        """What each anchor hands on to its window, from what the layer saw and what it made of it: (batch, anchors, d)."""
        return y

    def update(self, x: Tensor, made: Tensor, anchors: Anchors, earlier: Tensor | None) -> Tensor:
        """The stream after the layer, from that before and what the anchors hand on; `earlier` is that of the last one before."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        return f"k={self.k}"


class SequenceAltUpLayer(StridedLayer):
    """y_i = ŷ_i + b (ỹ − ŷ) at its anchor, ŷ_i = a1 x_i + a2 x at its anchor: `a1`, `a2` and `b` are scalars, (1,) each."""

    def add_coefficients(self, device: torch.device, dtype: torch.dtype) -> None:
        for name, value in (("a1", 1.0), ("a2", 0.0), ("b", 1.0)):
            setattr(self, name, nn.Parameter(torch.full((1,), value, device=device, dtype=dtype)))

    def correction(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.b * y + (self.a2 - self.b * (self.a1 + self.a2)) * x).to(x.dtype)

    def update(self, x: Tensor, made: Tensor, anchors: Anchors, earlier: Tensor | None) -> Tensor:
        return (self.a1 * x + anchors.spread(made, earlier)).to(x.dtype)


class StrideAndSkipLayer(StridedLayer):
    """Tokens that are no anchors pass the layer by."""

    def update(self, x: Tensor, made: Tensor, anchors: Anchors, earlier: Tensor | None) -> Tensor:
        if not anchors.count:
            return x
        return torch.where(anchors.are(x), anchors.spread(made, earlier), x).to(x.dtype)


class AveragePoolingLayer(StridedLayer):
    """Every token of a window gets what the layer makes of the window's mean. It looks ahead, so that it keeps no cache."""

    def seen(self, x: Tensor, anchors: Anchors) -> Tensor:
        return anchors.mean(x)

    def update(self, x: Tensor, made: Tensor, anchors: Anchors, earlier: Tensor | None) -> Tensor:
        return anchors.spread(made, earlier).to(x.dtype)


METHODS: dict[str, type[StridedLayer]] = {
    "sequence-altup": SequenceAltUpLayer,
    "stride-and-skip": StrideAndSkipLayer,
    "average-pooling": AveragePoolingLayer,
}


# ── The pass ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclasses.dataclass(frozen=True)
class SequenceAltUp(Pass):
    """Layers compute every k-th token; predict and correct carry what they find to the tokens between."""

    name: ClassVar[str] = "sequence-altup"
    summary: ClassVar[str] = "layers compute every k-th token only, and hand their correction on to the tokens between"
    paper: ClassVar[str] = "Alternating Updates for Efficient Transformers, §4.2 and supplement Alg. 2"

    k: int = option(4, "the stride: one token in k is computed", minimum=1)
    method: str = option(
        "sequence-altup", "what the other tokens get: the anchor's correction, nothing, the window's output", choices=tuple(METHODS)
    )
    layers: str = option("inner", "depths to stride, e.g. 1-3+5; inner: all but the first and the last; or all")
    stacks: str = option("all", "stacks whose layers are strided", choices=("all", "encoder", "decoder"))

    @property
    def exact(self) -> bool:
        return self.k == 1

    def rewrite(self, anatomy: Anatomy, edit: Edit) -> Rewrite:
        return Application(self, anatomy, edit).run()


@dataclasses.dataclass(frozen=True)
class Observation:
    """What the layers were handed in one capture."""

    program: Program
    flow: Dataflow
    batch: int
    length: int  # of the token ids, 0 where there are none
    masks: frozenset[str]  # the inputs that say which tokens are real
    shapes: dict[tuple[str, int], dict[Path, torch.Size]]  # by layer and call
    objects: dict[str, dict[int | str, str]]  # by layer: arguments that are neither tensors nor plain, and their types


class Application:
    """One rewrite of one model."""

    def __init__(self, how: SequenceAltUp, anatomy: Anatomy, edit: Edit) -> None:
        self.how, self.anatomy, self.edit = how, anatomy, edit
        self.model = anatomy.model
        self.skipped: list[NearMiss] = []
        self.sites: list[Site] = []
        self.looked_up = False  # whether the values of a table in a layer decided anything

    def run(self) -> Rewrite:
        chosen = list(self.chosen())
        if chosen:
            paths = [layer.name for _, layer in chosen]
            one, other = self.observe(paths, 0), self.observe(paths, 1)
            known = [(layer, self.follows(stack, layer, one, other)) for stack, layer in chosen]
            for layer, found in self.agreed(known, other):
                self.stride(layer, found, other)
        if not self.sites:
            raise DoesNotFitError(
                f"{self.how.name}: no layer of the model can be strided",
                why="; ".join(dict.fromkeys(f"{miss.name or 'the stack'}: {miss.why}" for miss in self.skipped[:4])),
                remedy="name layers that are modules of their own with layers=, or use another pass",
            )
        strided, each = len(self.sites), 3 if self.how.method == "sequence-altup" else 0
        late = ("a2",) if self.how.k > 1 else ("a1", "a2")
        names = tuple(f"{site.name}.{name}" for site in self.sites for name in late) if each else ()
        return Rewrite(
            self.resolved().spec(),
            self.how.exact,
            tuple(self.sites),
            tuple(self.skipped),
            new_parameters=each * strided,
            formula=f"{each} · {strided} layers = {each * strided}",
            second_step=names,  # at b = 1 what a2 (with k = 1: a1 too) adds to the prediction the correction takes back
        )

    # Which layers.

    def chosen(self) -> Iterator[tuple[Stack, Layer]]:
        """The layers that the options name, each module once; what cannot be strided is noted with the reason."""
        taken: set[str] = set()
        for stack in self.anatomy.stacks:
            if self.how.stacks not in ("all", stack.kind):
                self.skipped.append(NearMiss(stack.name, f"it is the {stack.kind}, and stacks={self.how.stacks}"))
                continue
            if self.how.method == "average-pooling" and stack.causal and self.how.k > 1:
                raise DoesNotFitError(
                    f"sequence-altup: average-pooling does not fit the {stack.kind} {stack.name}",
                    why="it is causal, and the mean over a window looks ahead",
                    remedy="use method=sequence-altup, or stacks=encoder where that is not causal",
                )
            depth = self.depths(stack)
            if not depth:
                self.skipped.append(NearMiss(stack.name, f"it has {len(stack.layers)} layers, none between the first and the last"))
            for number, layer in enumerate(stack.layers):
                if number in depth and layer.name not in taken:
                    why = self.obstacle(stack, layer, depth)
                    if why:
                        self.skipped.append(NearMiss(layer.name or layer.exit, why))
                        continue
                    taken.add(layer.name)
                    yield stack, layer

    def depths(self, stack: Stack) -> set[int]:
        count = len(stack.layers)
        return set(range(1, count - 1)) if self.how.layers == "inner" else depths(self.how.layers, count, self.how.name)

    def obstacle(self, stack: Stack, layer: Layer, chosen: set[int]) -> str:
        """Why the layer's module cannot be strided, as far as the anatomy says; "" where it can."""
        if not layer.name:
            return "no module owns the layer: its additions stand in the model's own code"
        if layer.stream_in in (-1, None) or layer.stream_out == -1:
            return "the module does not take the stream as an argument and return it"
        if any(isinstance(part, StridedLayer) for part in self.model.get_submodule(layer.name).modules()):
            return "it is strided already"
        others = [number for number, other in enumerate(stack.layers) if other.name == layer.name]
        if not chosen.issuperset(others):
            return "its module runs at other depths too, which are not to be strided; layers=all strides it everywhere"
        if stack.causal and len(others) > 1:
            return "its module runs at several depths, and what it remembers when decoding would be mixed up"
        return ""

    # How what they are handed follows the tokens.

    def observe(self, paths: list[str], number: int) -> Observation:
        """What the layers are handed in a capture: the first of its length, the second of another batch and length."""
        plain = self.inputs(number)
        masked = self.with_masks(plain)
        masks = frozenset(name for name in masked if name.endswith("attention_mask"))
        for inputs, known in ((self.with_positions(masked), masks), (masked, masks)):
            with contextlib.suppress(CaptureError):
                return self.observed(inputs, known, paths)
        return self.observed(plain, frozenset(), paths)

    def inputs(self, number: int) -> dict[str, Any]:
        """Inputs like those the model was captured with; with `number` 1, of another batch and length."""
        values = {name: node.meta["val"] for node, name in self.anatomy.program.inputs.items()}
        tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        rows = next(int(value.shape[0]) for value in tensors.values() if value.dim())
        length = max((int(value.shape[1]) for value in tensors.values() if is_per_token(value)), default=0)
        made: dict[str, Any] = {}
        for name, value in tensors.items():
            size = list(map(int, value.shape))
            if number and size and size[0] % rows == 0:
                size[0] *= 2
            if number and len(size) > 1 and (is_per_token(value) or (length and size[1] == length)):
                size[1] += 8
            made[name] = torch.ones(size, dtype=value.dtype)
        return named_inputs(self.model, made)

    def with_masks(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """The inputs, and masks beside the token ids where the model takes any and none is given."""
        known, made = forward_parameters(self.model), dict(inputs)
        for name, value in inputs.items():
            if isinstance(value, Tensor) and is_per_token(value) and name.endswith("input_ids"):
                mask = name.replace("input_ids", "attention_mask")
                if mask in known:
                    made.setdefault(mask, torch.ones(value.shape, dtype=torch.long, device=value.device))
        return made

    def with_positions(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """The inputs, and positions where the model takes any and none are given."""
        ids = inputs.get("input_ids")
        if ids is None or ids.dim() != 2 or not accepts(self.model, "position_ids"):
            return inputs
        return {"position_ids": torch.arange(ids.shape[1], device=ids.device).expand(ids.shape), **inputs}

    def observed(self, inputs: dict[str, Any], masks: frozenset[str], paths: list[str]) -> Observation:
        shapes: dict[tuple[str, int], dict[Path, torch.Size]] = {}
        objects: dict[str, dict[int | str, str]] = {}
        counts: dict[str, int] = {}

        def note(path: str, names: tuple[str, ...]) -> Any:
            def hook(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
                call = counts.get(path, 0)
                counts[path] = call + 1
                found: dict[Path, torch.Size] = {}
                for name, value in name_arguments(args, kwargs, names):
                    try:
                        found.update((where, tensor.shape) for where, tensor in tensors_in(value, (name,)))
                    except DoesNotFitError:
                        objects.setdefault(path, {})[name] = type(value).__name__
                shapes[path, call] = found

            return hook

        handles = []
        for path in paths:
            module = self.model.get_submodule(path)
            handles.append(module.register_forward_pre_hook(note(path, names_of(module)), with_kwargs=True))
        try:
            program = capture(self.model, inputs)
        finally:
            for handle in handles:
                handle.remove()
        tensors = [value for value in inputs.values() if isinstance(value, Tensor)]
        batch = next(int(value.shape[0]) for value in tensors if value.dim())
        length = max((int(value.shape[1]) for value in tensors if is_per_token(value)), default=0)
        return Observation(program, Dataflow(program), batch, length, masks, shapes, objects)

    def agreed(
        self, known: list[tuple[Layer, dict[Path, Follows] | str]], seen: Observation
    ) -> Iterator[tuple[Layer, dict[Path, Follows]]]:
        """The layers that can be strided together, and how what each is handed follows the tokens; why not of others is noted."""
        calls = self.layer_calls(seen)
        between = crossings(seen.flow, calls)
        left = {layer.name: found for layer, found in known if not isinstance(found, str)}
        whys = {layer.name: found for layer, found in known if isinstance(found, str)}
        while why := next(filter(None, (self.alone(name, between, left) for name in left)), None):
            left.pop(why[0])
            whys[why[0]] = why[1]
        self.skipped += [NearMiss(layer.name, whys[layer.name]) for layer, _ in known if layer.name in whys]
        for layer, _ in known:
            if layer.name not in left:
                continue
            found = dict(left[layer.name])
            for key, maker in handed_over(seen.flow, call_of(seen, layer), calls).items():
                path = path_of(self.model.get_submodule(layer.name), key) if key is not None else ()
                if maker.path in left and path in found:  # it is of the anchors already
                    found[path] = dataclasses.replace(found[path], positions=(), tells=False)
            yield layer, found

    def layer_calls(self, seen: Observation) -> dict[Call, fx.Node]:
        """Every call of a layer's module, and the stream it returns."""
        places = {layer.name: layer.stream_out for layer in self.anatomy.layers if layer.name}
        return {
            call: call.outputs[places[call.path]]
            for call in seen.program.calls
            if call.path in places and places[call.path] in call.outputs
        }

    def alone(self, name: str, between: list[Crossing], left: Collection[str]) -> tuple[str, str] | None:
        """The layer and why it cannot be strided, as those around it that are not need something of it for every token."""
        for crossing in between:
            if crossing.maker.path != name:
                continue
            if crossing.reader is None:
                return name, "what it hands on beside the stream enters the outputs, which need it of every token"
            if crossing.reader.path not in left or not crossing.plain:
                return name, f"what it hands on beside the stream is read by {crossing.reader.path}, which needs it of every token"
        return None

    def stride(self, layer: Layer, found: dict[Path, Follows], other: Observation) -> None:
        """The layer's module is strided."""
        module = self.model.get_submodule(layer.name)
        call = call_of(other, layer)
        wrapper = METHODS[self.how.method](
            module,
            self.how.k,
            name=layer.name,
            stream_in=layer.stream_in if layer.stream_in is not None else 0,
            stream_out=layer.stream_out,
            follows=found,
            returns=handed_back(call, module, layer),
            unread=tuple(other.objects.get(layer.name, ())),
        )
        self.edit.replace_module(layer.name, wrapper)
        self.sites.append(Site(layer.name, f"computes one token in {self.how.k} ({self.how.method})"))

    def follows(self, stack: Stack, layer: Layer, one: Observation, other: Observation) -> dict[Path, Follows] | str:
        """How the layer's arguments follow the tokens, or why it cannot be strided."""
        module, key = self.model.get_submodule(layer.name), (layer.name, layer.call)
        stream = path_of(module, layer.stream_in if layer.stream_in is not None else 0)
        first, second = one.shapes.get(key, {}), other.shapes.get(key, {})
        if stream not in first or stream not in second:
            return "it is not handed the stream by the same argument every time"
        if len(first[stream]) != 3 or first[stream][0] * other.batch != second[stream][0] * one.batch:
            return f"its stream {tuple(first[stream])} is not laid out as (batch, tokens, width)"
        if self.how.k > 1 and second[stream][1] == 1:
            return "with the example inputs it is handed one token only: give larger example_inputs="
        if other.length - one.length < second[stream][1] - first[stream][1] and other.length:
            return "its stream has several positions a token, and which of them are anchors is not defined"
        call = call_of(other, layer)
        entry, exit_ = call.inputs.get(layer.stream_in), call.outputs.get(layer.stream_out)
        if entry is None or exit_ is None or shape(entry) != shape(exit_):
            return "it hands on a stream of another shape"
        for name, kind in other.objects.get(layer.name, {}).items():
            if reads_by_another_way(other.flow, call, {tuple(size) for size in second.values()}):
                return f"it is handed {name}, a {kind}, and what that holds of each token is unknown"
        if why := self.obstacle_in(stack, layer, call, other, second[stream][1]):
            return why
        found = learn(first, second, stream)
        found.pop(stream)
        nodes = {path_of(module, name): node for name, node in call.inputs.items() if name is not None}
        flow, masks = other.flow, [node for node, name in other.program.inputs.items() if name in other.masks]
        for path, how in list(found.items()):
            if not how.positions:
                continue
            if len(how.positions) > 2:
                return f"{path[0]} follows the tokens along {len(how.positions)} dimensions"
            node = nodes.get(path)
            if node is None:  # inside a container, where the graph has no name for it
                tells = len(how.positions) == 2 and how.rank == 4
            else:
                tells = tells_padding(flow, node, masks) or (len(how.positions) == 2 and is_made_of_ids(flow, node))
            found[path] = dataclasses.replace(how, tells=tells)
        if any(how.tells and len(how.positions) == 2 for how in found.values()):  # what is said of queries alone is not of keys
            silent = [path for path, how in found.items() if how.rank == 4 and how.positions == (2,)]
            found |= {path: dataclasses.replace(found[path], tells=False) for path in silent}
        if self.how.k > 1 and not any(how.tells for how in found.values()) and self.others_hear(stack, layer, other, masks):
            return "it is handed no mask, and would count padding among the tokens where other layers do not"
        return found

    def others_hear(self, stack: Stack, layer: Layer, seen: Observation, masks: list[fx.Node]) -> bool:
        """Whether other layers of the stack are told what is padding."""
        for other in stack.layers:
            if other.name in ("", layer.name):
                continue
            call = call_of(seen, other)
            if other.stream_in in call.inputs and hears_of_padding(seen.flow, call, call.inputs[other.stream_in], masks):
                return True
        return False

    def obstacle_in(self, stack: Stack, layer: Layer, call: Call, seen: Observation, length: int) -> str:
        """Why the layer cannot be strided, as far as its code and what reads it say; "" where it can."""
        if self.how.k == 1:
            return ""
        exit_ = call.outputs[layer.stream_out]
        if layer.exit == stack.layers[-1].exit and reads_some_only(seen.flow, exit_):
            return "some of its tokens only are read in the end, and those between anchors would be read by nothing"
        return self.counts_itself(layer, call, seen, length)

    def counts_itself(self, layer: Layer, call: Call, seen: Observation, length: int) -> str:
        """Why not, where the layer numbers the tokens itself, by how many it is handed: those kept would lose their positions."""
        exit_ = call.outputs[layer.stream_out]
        inside = [node for node in seen.flow.nodes if node.op == "call_function" and call.encloses(seen.flow.call_of(node))]
        for node in inside:
            if (
                is_numbering(node, seen.flow, length)
                and seen.flow.reaches(node, exit_)
                and not self.says_the_same(node, seen, length)
            ):
                return "its own code numbers the tokens it is handed, so that the kept ones would lose their positions"
        return ""

    def says_the_same(self, node: fx.Node, seen: Observation, length: int) -> bool:
        """Whether what the layer cuts from its tables, for as many tokens as it is handed, is the same of anchors.

        Where a recipe is replayed on a model without values it names the layers of which that was so.
        """
        tables = tables_of(node, seen.flow, length)
        if tables is None:
            return False
        self.looked_up = True
        if any(table.is_meta for table, _ in tables):
            return self.how.layers not in ("all", "inner")
        return all(is_same_of_anchors(table, dims, self.how.k) for table, dims in tables)

    def resolved(self) -> SequenceAltUp:
        """The options by which a model without values gets the same layers strided."""
        if not self.looked_up:
            return self.how
        names = {site.name for site in self.sites}
        found: dict[str, set[tuple[int, ...]]] = {}
        for stack in self.anatomy.stacks:
            if self.how.stacks in ("all", stack.kind):
                depth = tuple(number for number, layer in enumerate(stack.layers) if layer.name in names)
                found.setdefault(stack.kind, set()).add(depth)
        strided = {kind: depths for kind, depths in found.items() if depths != {()}}
        which = set().union(*strided.values())
        if len(which) > 1 or (len(strided) < len(found) and len(strided) > 1):
            raise DoesNotFitError(
                f"{self.how.name}: other depths of one stack than of another can be strided",
                why="that hangs on the values of tables, so the recipe has to name them, and it names the same for all stacks",
                remedy="apply it once with stacks=encoder and once with stacks=decoder",
            )
        stacks = self.how.stacks if len(strided) == len(found) else next(iter(strided))
        return dataclasses.replace(self.how, layers="+".join(map(str, *which)), stacks=stacks)


def is_per_token(value: Tensor) -> bool:
    """Whether an input holds one integer a token: (batch, length)."""
    return value.dim() == 2 and not value.is_floating_point()


def call_of(seen: Observation, layer: Layer) -> Call:
    return next(call for call in seen.program.calls if (call.path, call.index) == (layer.name, layer.call))


def handed_back(call: Call, module: nn.Module, layer: Layer) -> dict[int | str, Path]:
    """Which arguments the layer returns as they are, by the index of the output."""
    entered = {node: path_of(module, key) for key, node in call.inputs.items() if key is not None}
    return {
        key: entered[node] for key, node in call.outputs.items() if key is not None and key != layer.stream_out and node in entered
    }
