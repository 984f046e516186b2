"""The ways in which a rewritten model runs while the calls of its sites are recorded: a few tokens, padded, on a cache.

What cannot be recorded is named with its reason, where another model of the kind would do it: one that keeps no cache, or takes no
mask, has none of these ways.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from retrofit.checks.padded_inputs import pad_both_sides, takes_padding, without_mask
from retrofit.checks.site_recording import MOST, CallRecorder, has_cache, map_tensors, same_calls
from retrofit.checks.stepping import PADDED, PLAIN, section, step_batch, ways_to_step
from retrofit.errors import RetrofitError, first_line
from retrofit.inputs.probes import Inputs, accepts, extent_of, is_per_token, output_ids_name, resized, run
from retrofit.passbase.method_reference import ModuleReference, RecordedCall

STEPS = 5  # tokens decoded one at a time: of a few in a row some are anchors and some are not
CHUNKS = (2, 3)  # tokens decoded at a time
Calls = dict[str, list[RecordedCall]]
References = Mapping[str, ModuleReference]


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to run the model: the words for it, the calls of each site; those on a cache follow each other."""

    words: str
    record: Callable[[], Calls]
    on_cache: bool = False
    trains: bool = False  # whether its calls are also made again in training mode
    spared: bool = False  # whether a large model is not run so
    matters: bool = True  # whether any site has a call to compare then


def recorded(model: nn.Module, references: References, inputs: Inputs, most: int = MOST) -> Calls:
    """The calls of the sites in a forward on these inputs, at most so many of each."""
    recorder = CallRecorder(model, references, most)
    recorder.inputs = inputs
    with recorder.recording() as calls:
        run(model, inputs)
    return calls


class SiteWays:
    """The ways in which the calls of some sites of a model are recorded, but for the plain one."""

    def __init__(self, model: nn.Module, references: References, inputs: Inputs, logits: Tensor, *, is_large: bool = False) -> None:
        """Of a large model, whose every forward reads all its weights, neither padding nor chunks are recorded.

        Nor are steps where no site keeps anything in the cache.
        """
        self.is_large = is_large
        self.model, self.references, self.inputs, self.logits = model, references, inputs, logits
        self.missing: list[tuple[str, str]] = []  # what was not recorded, and why
        self.raised: dict[str, str] = {}  # by the words of a way: the error that the model's own code raised
        self.uncached: set[str] = set()  # sites that received no cache though the model decoded on one

    def ways(self) -> Iterator[Way]:
        batch, length = extent_of(self.inputs)
        if length > 1:
            yield Way(" on one token", lambda: self.plain(resized(self.model, self.inputs, 1, 1, seed=11)))
        pads = takes_padding(self.model, self.inputs)
        if pads:
            yield Way(" where sequences are padded", self.padded, trains=True, spared=True)
        if length > 1 and accepts(self.model, "use_cache"):
            plans = {"step by step on a cache": (PLAIN, (1,) * STEPS), "in chunks on a cache": (PLAIN, CHUNKS)}
            if PADDED in ways_to_step(self.model, self.inputs):
                plans["in chunks on a cache of padded sequences"] = (PADDED, CHUNKS)
            for words, plan in plans.items():
                calls = functools.partial(self.on_cache, words, *plan)
                idle = not any(one.cached for one in self.references.values())
                yield Way(f" {words}", calls, on_cache=True, spared=idle or plan[1] == CHUNKS, matters=not idle)
        most = max((one.tokens for one in self.references.values()), default=0)
        if length > 1 and most > batch * length:
            rows = -(-(most + 1) // length)
            large = self.those(lambda one: one.tokens > batch * length)
            many = lambda: recorded(self.model, large, resized(self.model, self.inputs, rows, length, 13))  # noqa: E731
            yield Way(f" on {rows * length} tokens", many, trains=True)
        shortest = shortest_of(self.inputs)
        for_longer = self.those(lambda one: one.length >= shortest > 1)
        if for_longer:
            total = length + 1 + max(one.length for one in for_longer.values()) - shortest
            long = lambda: recorded(self.model, for_longer, resized(self.model, self.inputs, 1, total, 19))  # noqa: E731
            yield Way(f" on {total} tokens", long, trains=True)

    def calls(self) -> Iterator[tuple[Way, Calls]]:
        """What was recorded in each way; what stopped one is kept in `missing`."""
        for way in self.ways():
            if self.is_large and way.spared:
                if way.matters:
                    self.missing.append((f"no module was compared{way.words}", "the model is large, so it is run in fewer ways"))
                continue
            try:
                found = way.record()
            except Exception as error:  # what a model's own code raises; the other checks say so where it should run
                self.missing.append((f"no module was compared{way.words}", first_line(error)))
                if not isinstance(error, RetrofitError):  # that would be a refusal
                    self.raised[way.words] = first_line(error)
                continue
            yield way, {path: calls if way.on_cache else calls[:1] for path, calls in found.items() if calls}

    def those(self, matter: Callable[[ModuleReference], bool]) -> References:
        """The references that matter, and those of modules that run others on fewer tokens; nothing where none matters."""
        if not any(map(matter, self.references.values())):
            return {}
        return {path: one for path, one in self.references.items() if matter(one) or one.inside is not None}

    def plain(self, inputs: Inputs) -> Calls:
        return recorded(self.model, self.references, inputs)

    def padded(self) -> Calls:
        """The calls where sequences are padded; of a module that is not shown the padding those with inputs that hide no token."""
        inputs = pad_both_sides(self.model, self.inputs)
        masked, unmasked = (self.plain(one) for one in (inputs, without_mask(inputs)))
        return {path: unmasked[path] if same_calls(calls, unmasked[path]) else calls for path, calls in masked.items()}

    def on_cache(self, words: str, kind: str, lengths: tuple[int, ...]) -> Calls:
        """The calls of a batch whose last tokens are decoded so many at a time; none where the model keeps no cache."""
        whole = step_batch(self.model, self.inputs, kind).whole
        name = output_ids_name(whole, self.logits)
        if name is None:
            return {}
        total = whole[name].shape[1]
        if total <= sum(lengths) + 1:
            self.missing.append((f"no module was compared {words}", f"the inputs are {total} tokens long"))
            return {}
        cached = {path: one for path, one in self.references.items() if one.cached}
        recorder, cache, count = CallRecorder(self.model, cached, len(lengths) + 2), None, len(lengths) + 1
        with recorder.recording() as calls:
            for start, stop in itertools.pairwise((0, *itertools.accumulate((total - sum(lengths), *lengths)))):
                recorder.inputs = chunk = {**section(whole, name, start, stop), "use_cache": True}
                output = run(self.model, chunk, past_key_values=cache) if cache is not None else run(self.model, chunk)
                cache = getattr(output, "past_key_values", None)
                if cache is None:
                    return {}
        return {path: found for path, found in calls.items() if self.is_decoding(path, found, count, words)}

    def is_decoding(self, path: str, calls: list[RecordedCall], count: int, words: str) -> bool:
        """Whether these are the calls of one sequence on one cache; one whose inputs do not grow (an encoder) has none.

        Inside a strided layer there are fewer: a step without an anchor does not call it.
        """
        strided = any(one.inside is not None and path.startswith(f"{outer}.") for outer, one in self.references.items())
        if (len(calls) == count or (strided and 0 < len(calls) < count)) and all(map(has_cache, calls)):
            return True
        if calls and first_shape(calls[0]) != first_shape(calls[-1]):
            is_shared = len(calls) > count
            why = "several depths share it" if is_shared else "it receives no cache"
            self.uncached |= set() if is_shared else {path}
            self.missing.append((f"{path} was not compared {words}", why))
        return False


def shortest_of(inputs: Inputs) -> int:
    """The length of the shortest side of the inputs; 0 where none has tokens."""
    return min((value.shape[1] for value in inputs.values() if is_per_token(value)), default=0)


def first_shape(call: RecordedCall) -> Any:
    """The shape of the first tensor among the arguments of a call."""
    found: list[Any] = []

    def collect(value: Any) -> Any:
        if isinstance(value, Tensor):
            found.append(value.shape)
        return value

    map_tensors((call.args, call.kwargs), collect)
    return found[0] if found else None
