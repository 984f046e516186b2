"""The calls of the modules that passes installed, recorded in forwards of the model: arguments, results, and calls of children.

The model runs on a few tokens, on many, padded, and with a cache. A way that cannot be recorded is reported with its reason, unless
the kind of model excludes it: no cache, or no mask.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import Tensor, nn

from retrofit.checks.cache import PADDED, PLAIN, section, step_batch, ways_to_step
from retrofit.checks.subject import pad_both_sides, takes_padding, without_mask
from retrofit.errors import RetrofitError, first_line
from retrofit.inputs.model_state import same_bits
from retrofit.inputs.module_calls import CallRecorder, RecordedCall, tensors_in
from retrofit.inputs.probes import Inputs, accepts, extent_of, is_per_token, output_ids_name, resized, run
from retrofit.passbase.method_reference import ModuleReference

MOST = 2  # calls of a module that are kept per forward; a module shared across depth has many


def recorder_of(model: nn.Module, references: Mapping[str, ModuleReference], most: int = MOST) -> CallRecorder:
    """Return a recorder for the calls of the sites at the paths of `references` and of their given children."""
    return CallRecorder(model, {path: reference.given for path, reference in references.items()}, most=most, first=True)


def same_calls(*both: Sequence[RecordedCall]) -> bool:
    """Return whether inputs and outputs of two lists of calls are bitwise equal."""
    first, second = (tensors_in([(call.args, call.kwargs, call.output) for call in calls]) for calls in both)
    return len(first) == len(second) and all(map(same_bits, first, second))


# ── Ways to run the model ────────────────────────────────────────────────────────────────────────────────────────────────────────


STEPS = 5  # tokens decoded one at a time: among a few in a row, some are anchors and some are not
CHUNKS = (2, 3)  # tokens decoded at a time
Calls = dict[str, list[RecordedCall]]
References = Mapping[str, ModuleReference]


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to run the model: its name, and the calls of each site; calls with a cache follow each other."""

    words: str
    record: Callable[[], Calls]
    on_cache: bool = False
    trains: bool = False  # whether its calls are repeated in training mode too
    spared: bool = False  # whether a large model skips it
    matters: bool = True  # whether any site then has a call to compare


class SiteWays:
    """The ways in which the calls of some sites are recorded, besides the plain one."""

    def __init__(self, model: nn.Module, references: References, inputs: Inputs, logits: Tensor, *, is_large: bool = False) -> None:
        """Prepare the ways; a large model, whose every forward reads all its weights, skips chunks.

        If no site keeps anything in the cache, it skips padded sequences and steps too.
        """
        self.is_large = is_large
        self.model, self.references, self.inputs, self.logits = model, references, inputs, logits
        self.missing: list[tuple[str, str]] = []  # omissions and their reasons
        self.raised: dict[str, str] = {}  # name of a way → error of the model's own code
        self.uncached: set[str] = set()  # sites without a cache although the model decoded with one

    def ways(self) -> Iterator[Way]:
        """Yield the ways that the inputs and the sites allow."""
        batch, length = extent_of(self.inputs)
        idle = not any(reference.cached for reference in self.references.values())
        if length > 1:
            yield Way(" on one token", lambda: self.record(resized(self.model, self.inputs, 1, 1, seed=11)))
        if takes_padding(self.model, self.inputs):
            yield Way(" where sequences are padded", self.padded, trains=True, spared=idle)
        if length > 1 and accepts(self.model, "use_cache"):
            plans = {"step by step on a cache": (PLAIN, (1,) * STEPS), "in chunks on a cache": (PLAIN, CHUNKS)}
            if PADDED in ways_to_step(self.model, self.inputs):
                plans["in chunks on a cache of padded sequences"] = (PADDED, CHUNKS)
            for words, plan in plans.items():
                calls = functools.partial(self.on_cache, words, *plan)
                yield Way(f" {words}", calls, on_cache=True, spared=idle or plan[1] == CHUNKS, matters=not idle)
        most = max((reference.tokens for reference in self.references.values()), default=0)
        if length > 1 and most > batch * length:
            rows = -(-(most + 1) // length)
            large = self.references_where(lambda reference: reference.tokens > batch * length)
            yield Way(
                f" on {rows * length} tokens",
                lambda: self.record(resized(self.model, self.inputs, rows, length, 13), large),
                trains=True,
            )
        shortest = min((value.shape[1] for value in self.inputs.values() if is_per_token(value)), default=0)
        for_longer = self.references_where(lambda reference: reference.length >= shortest > 1)
        if for_longer:
            total = length + 1 + max(reference.length for reference in for_longer.values()) - shortest
            yield Way(
                f" on {total} tokens",
                lambda: self.record(resized(self.model, self.inputs, 1, total, 19), for_longer),
                trains=True,
            )

    def calls(self) -> Iterator[tuple[Way, Calls]]:
        """Return the calls recorded in each way; reasons for omissions are kept in `missing`."""
        for way in self.ways():
            if self.is_large and way.spared:
                if way.matters:
                    self.missing.append((f"no module was compared{way.words}", "the model is large, so it is run in fewer ways"))
                continue
            try:
                found = way.record()
            except Exception as error:  # the model's own code may raise anything; other checks report it
                self.missing.append((f"no module was compared{way.words}", first_line(error)))
                if not isinstance(error, RetrofitError):  # a refusal otherwise
                    self.raised[way.words] = first_line(error)
                continue
            yield way, {path: calls if way.on_cache else calls[:1] for path, calls in found.items() if calls}

    def references_where(self, matter: Callable[[ModuleReference], bool]) -> References:
        """Return the references that matter, with those of modules that run others on fewer tokens; none if none matters."""
        if not any(map(matter, self.references.values())):
            return {}
        return {path: reference for path, reference in self.references.items() if matter(reference) or reference.inside is not None}

    def record(self, inputs: Inputs, references: References | None = None) -> Calls:
        """Return the calls of the sites, or of those with these references, in a forward with these inputs."""
        recorder = recorder_of(self.model, self.references if references is None else references)
        recorder.inputs = inputs
        with recorder.recording() as calls:
            run(self.model, inputs)
        return calls

    def padded(self) -> Calls:
        """Return the calls with padded sequences; for a module that is not shown the padding, those without masked tokens."""
        inputs = pad_both_sides(self.model, self.inputs)
        masked, unmasked = (self.record(given) for given in (inputs, without_mask(inputs)))
        return {path: unmasked[path] if same_calls(calls, unmasked[path]) else calls for path, calls in masked.items()}

    def on_cache(self, words: str, kind: str, lengths: tuple[int, ...]) -> Calls:
        """Return the calls of a batch whose last tokens are decoded so many at a time; none if the model keeps no cache."""
        batch = step_batch(self.model, self.inputs, kind).inputs
        name = output_ids_name(batch, self.logits)
        if name is None:
            return {}
        total = batch[name].shape[1]
        if total <= sum(lengths) + 1:
            self.missing.append((f"no module was compared {words}", f"the inputs are {total} tokens long"))
            return {}
        cached = {path: reference for path, reference in self.references.items() if reference.cached}
        recorder, cache, count = recorder_of(self.model, cached, len(lengths) + 2), None, len(lengths) + 1
        with recorder.recording() as calls:
            for start, stop in itertools.pairwise((0, *itertools.accumulate((total - sum(lengths), *lengths)))):
                recorder.inputs = chunk = {**section(batch, name, start, stop), "use_cache": True}
                output = run(self.model, chunk, past_key_values=cache) if cache is not None else run(self.model, chunk)
                cache = getattr(output, "past_key_values", None)
                if cache is None:
                    return {}
        return {path: found for path, found in calls.items() if self.is_decoding(path, found, count, words)}

    def is_decoding(self, path: str, calls: list[RecordedCall], count: int, words: str) -> bool:
        """Return whether these are the calls of one sequence with one cache; a module whose inputs do not grow (an encoder) has
        none.

        A module inside a strided layer has fewer calls: a step without an anchor does not call it.
        """
        strided = any(reference.inside is not None and path.startswith(f"{outer}.") for outer, reference in self.references.items())
        if (len(calls) == count or (strided and 0 < len(calls) < count)) and all(call.had_cache for call in calls):
            return True
        shapes = [[tensor.shape for tensor in tensors_in((call.args, call.kwargs))[:1]] for call in (*calls[:1], *calls[-1:])]
        if calls and shapes[0] != shapes[-1]:
            is_shared = len(calls) > count
            why = "several depths share it" if is_shared else "it receives no cache"
            self.uncached |= set() if is_shared else {path}
            self.missing.append((f"{path} was not compared {words}", why))
        return False
