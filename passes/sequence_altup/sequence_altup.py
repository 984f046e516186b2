"""The sequence-altup pass: which layers can see every k-th token only, and how what they are handed follows the tokens.

What the layers then compute is in `strided_layers`, what they are handed is seen in `observing`, what stands in the way of a layer
in `beside` and `numbering`.

Alternating Updates for Efficient Transformers (NeurIPS 2023), §4.2, §5.4 and supplement E, Alg. 2.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Iterator
from typing import ClassVar

import torch
from torch import fx, nn

from retrofit.passes.sequence_altup.crossings import (
    Crossing,
    crossings,
    handed_over,
    hears_of_padding,
    is_made_of_ids,
    learns,
    reads_by_another_way,
    reads_some_only,
    tells_padding,
)
from retrofit.passes.sequence_altup.layer_arguments import Follows, Path, learn, path_of, unknown_on_a_cache
from retrofit.passes.sequence_altup.numbering import is_numbering, is_same_of_anchors, tables_of
from retrofit.passes.sequence_altup.observation import Observation, Watch
from retrofit.passes.sequence_altup.strided_layers import METHODS, StridedLayer
from retrofit.sdk import (
    NO_STREAM,
    Anatomy,
    Call,
    DoesNotFitError,
    Edit,
    Layer,
    NearMiss,
    Pass,
    Rewrite,
    Site,
    Stack,
    accepts,
    option,
    refuse_state_inputs,
    selected_depths,
    shape,
)


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


class Application:
    """One rewrite of one model."""

    def __init__(self, how: SequenceAltUp, anatomy: Anatomy, edit: Edit) -> None:
        self.how, self.anatomy, self.edit = how, anatomy, edit
        self.model = anatomy.model
        self.skipped: list[NearMiss] = []
        self.sites: list[Site] = []
        self.hangs_on_values = False  # whether which layers are strided hangs on what a model without values cannot tell

    def run(self) -> Rewrite:
        if self.how.k > 1:
            refuse_state_inputs(self.anatomy.program, self.how.name)
        chosen = list(self.chosen())
        if chosen:
            paths = [layer.name for _, layer in chosen]
            watch = Watch(self.model, self.anatomy.program.examples, paths)
            other = watch.larger
            lost = self.lost_when_decoding(other)
            known = [(layer, lost.get(layer.name) or self.follows(stack, layer, watch)) for stack, layer in chosen]
            for layer, found in self.agreed(known, other):
                self.stride(layer, found, watch)
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
        return set(range(1, count - 1)) if self.how.layers == "inner" else selected_depths(self.how.layers, count, self.how.name)

    def obstacle(self, stack: Stack, layer: Layer, chosen: set[int]) -> str:
        """Why the layer's module cannot be strided, as far as the anatomy says; "" where it can."""
        if not layer.name:
            return "no module owns the layer: its additions stand in the model's own code"
        if NO_STREAM in (layer.stream_in, layer.stream_out):
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

    def lost_when_decoding(self, seen: Observation) -> dict[str, str]:
        """By layer why it could not decode: what it remembers from token to token is handed to it as tensors, not in a cache."""
        inputs = self.anatomy.program.examples
        without_values = any(parameter.is_meta for parameter in self.model.parameters())
        if without_values or not accepts(self.model, "use_cache"):
            return {}
        found: dict[str, str] = {}
        with contextlib.suppress(Exception):  # a model that does not run on a cache
            known = {path: tensors for (path, call), tensors in seen.tensors.items() if not call}
            found = unknown_on_a_cache(self.model, inputs, known)
        self.hangs_on_values |= bool(found)
        return {
            path: f"decoding, it is handed {name}, and what that holds of each token is unknown" for path, name in found.items()
        }

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
            for key, maker in handed_over(seen.flow, seen.call_of(layer), calls).items():
                path = path_of(self.model.get_submodule(layer.name), key) if key is not None else ()
                if maker.path in left and path in found:  # it is of the anchors already
                    found[path] = dataclasses.replace(found[path], positions=(), tells=False)
            yield layer, found

    def layer_calls(self, seen: Observation) -> dict[Call, fx.Node]:
        """Every call of a layer's module, and the stream it returns."""
        layers = [layer for layer in self.anatomy.layers if layer.name and NO_STREAM not in (layer.stream_in, layer.stream_out)]
        places = {layer.name: layer.stream_places()[1] for layer in layers}
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

    def stride(self, layer: Layer, found: dict[Path, Follows], watch: Watch) -> None:
        """The layer's module is strided."""
        module = self.model.get_submodule(layer.name)
        call = watch.larger.call_of(layer)
        stream_in, stream_out = layer.stream_places()
        wrapper = METHODS[self.how.method](
            module,
            self.how.k,
            name=layer.name,
            stream_in=stream_in,
            stream_out=stream_out,
            follows=found,
            returns=handed_back(call, module, layer),
            unread=tuple(watch.larger.objects.get(layer.name, ())),
            tokens_first=watch.tokens_first(layer, stream_of(module, layer)) is True,
        )
        self.edit.replace_module(layer.name, wrapper)
        self.sites.append(Site(layer.name, f"computes one token in {self.how.k} ({self.how.method})"))

    def follows(self, stack: Stack, layer: Layer, watch: Watch) -> dict[Path, Follows] | str:
        """How the layer's arguments follow the tokens, or why it cannot be strided."""
        one, other = watch.first, watch.larger
        module = self.model.get_submodule(layer.name)
        stream = stream_of(module, layer)
        first, second = one.shapes(layer), other.shapes(layer)
        if stream not in first or stream not in second:
            return "it is not handed the stream by the same argument every time"
        if any(isinstance(size, torch.SymInt) for size in (*first[stream], *second[stream])):
            return "how many tokens it is handed hangs on the values of tensors"
        tokens_first = watch.tokens_first(layer, stream)
        if tokens_first is None:
            return f"its stream {tuple(first[stream])} is not laid out as (batch, tokens, width)"
        before, length = (size[0 if tokens_first else 1] for size in (first[stream], second[stream]))
        if self.how.k > 1 and length == 1:
            return "with the example inputs it is handed one token only: give larger example_inputs="
        if other.length - one.length < length - before and other.length:
            return "its stream has several positions a token, and which of them are anchors is not defined"
        call = other.call_of(layer)
        stream_in, stream_out = layer.stream_places()
        entry, exit_ = call.inputs.get(stream_in), call.outputs.get(stream_out)
        if entry is None or exit_ is None or shape(entry) != shape(exit_):
            return "it hands on a stream of another shape"
        for name, kind in other.objects.get(layer.name, {}).items():
            if reads_by_another_way(other.flow, call, {tuple(size) for size in second.values()}):
                return f"it is handed {name}, a {kind}, and what that holds of each token is unknown"
        if why := self.obstacle_in(stack, layer, call, other, length):
            return why
        found = learn(first, second, stream, tokens_first)
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
                tells = watch.is_mask(layer, path, how)
            else:
                tells = tells_padding(flow, node, masks) or (len(how.positions) == 2 and is_made_of_ids(flow, node))
            found[path] = dataclasses.replace(how, tells=tells)
        if any(how.tells and len(how.positions) == 2 for how in found.values()):  # what is said of queries alone is not of keys
            silent = [path for path, how in found.items() if how.rank == 4 and how.positions == (2,)]
            found |= {path: dataclasses.replace(found[path], tells=False) for path in silent}
        if unclear := [path for path, how in found.items() if how.tells and not watch.says_real(nodes.get(path), how)]:
            self.hangs_on_values |= any(watch.tables(nodes.get(path)) for path in unclear)
            return f"what it is handed as {unclear[0][0]} says which tokens are padding in a way of its own"
        if self.how.k > 1 and not any(how.tells for how in found.values()) and self.others_hear(stack, layer, other, masks):
            return "it is handed no mask, and would count padding among the tokens where other layers do not"
        return found

    def others_hear(self, stack: Stack, layer: Layer, seen: Observation, masks: list[fx.Node]) -> bool:
        """Whether other layers of the stack are told what is padding."""
        for other in stack.layers:
            if other.name in ("", layer.name):
                continue
            call = seen.call_of(other)
            if other.stream_in in call.inputs and hears_of_padding(seen.flow, call, call.inputs[other.stream_in], masks):
                return True
        return False

    def obstacle_in(self, stack: Stack, layer: Layer, call: Call, seen: Observation, length: int) -> str:
        """Why the layer cannot be strided, as far as its code and what reads it say; "" where it can."""
        exit_ = call.outputs[layer.stream_places()[1]]
        if not learns(seen.flow, exit_):
            return "the outputs hang on it by choices only, so that nothing would be learnt"
        if self.how.k == 1:
            return ""
        if layer.exit == stack.layers[-1].exit and reads_some_only(seen.flow, exit_):
            return "some of its tokens only are read in the end, and those between anchors would be read by nothing"
        return self.counts_itself(layer, call, seen, length)

    def counts_itself(self, layer: Layer, call: Call, seen: Observation, length: int) -> str:
        """Why not, where the layer numbers the tokens itself, by how many it is handed: those kept would lose their positions."""
        exit_ = call.outputs[layer.stream_places()[1]]
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
        self.hangs_on_values = True
        if any(table.is_meta for table, _ in tables):
            return self.how.layers not in ("all", "inner")
        return all(is_same_of_anchors(table, dims, self.how.k) for table, dims in tables)

    def resolved(self) -> SequenceAltUp:
        """The options by which a model without values gets the same layers strided."""
        if not self.hangs_on_values:
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
                why="a model without values cannot tell them, so the recipe has to name them, and it names the same for all stacks",
                remedy="apply it once with stacks=encoder and once with stacks=decoder",
            )
        stacks = self.how.stacks if len(strided) == len(found) else next(iter(strided))
        return dataclasses.replace(self.how, layers="+".join(map(str, *which)), stacks=stacks)


def stream_of(module: nn.Module, layer: Layer) -> Path:
    """The argument by which the layer's module is handed the stream."""
    return path_of(module, layer.stream_places()[0])


def handed_back(call: Call, module: nn.Module, layer: Layer) -> dict[int | str, Path]:
    """Which arguments the layer returns as they are, by the index of the output."""
    entered = {node: path_of(module, key) for key, node in call.inputs.items() if key is not None}
    return {
        key: entered[node] for key, node in call.outputs.items() if key is not None and key != layer.stream_out and node in entered
    }
