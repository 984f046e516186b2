"""The causality check: changing later tokens never changes an earlier output of a causal model."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from retrofit.checks.cache import keeps_cache
from retrofit.checks.departure import Departure, at, first_departure, recorded
from retrofit.runtime.example_inputs import special_ids
from retrofit.runtime.outcomes import Finding, failed, passed, skipped
from retrofit.runtime.probes import Inputs, is_token_ids, logits_of, ordinary_ids, resized_like, run, scale_of, tolerance_of

if TYPE_CHECKING:
    from retrofit.checks.subject import Subject

BIDIRECTIONAL = 0.9  # of the earlier outputs, the share that moves when a model reads both ways


@dataclasses.dataclass(frozen=True)
class Leak:
    """How much of the earlier outputs moved when later tokens changed."""

    gap: float  # the largest move, relative to the outputs' scale
    share: float  # of the earlier outputs, how many moved
    where: str  # one of them


def check(subject: Subject) -> Finding:
    if subject.reference is not None and subject.reference.leaks is None:
        return skipped("the dense model does not run on other tokens")
    found = leaks(subject.model, subject.inputs)
    if not found:
        return skipped("its outputs do not stand for tokens one by one")
    causal = [name for name, leak in found.items() if must_be_causal(subject, name, leak)]
    if not causal:
        return skipped(
            "the dense model is not causal" if subject.reference is not None else "it reads both ways, and keeps no cache"
        )
    measured = ", ".join(
        f"{name}: {found[name].share:.0%} of the earlier outputs moved, by at most {found[name].gap:.1e}" for name in causal
    )
    leaking = next((name for name in causal if found[name].share), None)
    if leaking is None:
        return passed(measured)
    departure = departure_by_future(subject.model, subject.inputs, leaking)
    return failed(measured, f"{found[leaking].where}\n{departure.said(subject.placed)}")


def must_be_causal(subject: Subject, name: str, leak: Leak) -> bool:
    """Whether the dense model is causal in that input; without one, whether this one is meant to be."""
    if subject.reference is not None:
        return name in subject.reference.causal
    return leak.share < BIDIRECTIONAL or keeps_cache(subject.model, subject.inputs, name)


def leaks(model: nn.Module, inputs: Inputs) -> dict[str, Leak]:
    """For each input of token ids that the outputs stand one a token for: what changing later tokens did to earlier outputs."""
    outputs = logits_of(run(model, inputs))
    if outputs.dim() != 3 or outputs.shape[1] < 2:
        return {}
    names = [name for name, value in inputs.items() if is_token_ids(value) and value.shape[1] == outputs.shape[1]]
    return {name: leak_of(model, inputs, name) for name in names}


def leak_of(model: nn.Module, inputs: Inputs, name: str) -> Leak:
    base, changed, early = leak_runs(model, inputs, name)
    before, after = logits_of(run(model, base)), logits_of(run(model, changed))
    moves = (before - after).abs().amax(-1).float().nan_to_num(float("inf")) / scale_of(before)  # (rows, length)
    leaking = early & (moves > tolerance_of(before) / 10)
    where = ""
    if bool(leaking.any()):
        row, position = leaking.nonzero()[0].tolist()
        where = f"changing {name} from position {int(early[row].sum())} on moved the output at position {position}"
    return Leak(float(moves[early].max()), float(leaking.sum() / early.sum()), where)


def leak_runs(model: nn.Module, inputs: Inputs, name: str) -> tuple[dict[str, Any], dict[str, Any], torch.Tensor]:
    """Sequences, the same with their later tokens changed, each from another position on, and which positions are earlier."""
    length = inputs[name].shape[1]
    places = sorted({1, length // 2, length - 1} - {0})
    base = resized_like(model, inputs, len(places), seed=11)
    ids = base[name]
    early = torch.arange(length, device=ids.device) < torch.tensor(places, device=ids.device)[:, None]  # (rows, length)
    pool = ordinary_ids(inputs[name], special_ids(model)).to(ids)
    others = pool[((pool == ids[..., None]).int().argmax(-1) + 1) % len(pool)]  # for each id the next one
    return base, {**base, name: torch.where(early, ids, others)}, early


def departure_by_future(model: nn.Module, inputs: Inputs, name: str) -> Departure:
    """The first module whose earlier outputs move when later tokens change."""
    base, changed, early = leak_runs(model, inputs, name)
    with recorded(model) as before:
        tolerance = tolerance_of(logits_of(run(model, base))) / 10
    with recorded(model) as after:
        run(model, changed)
    return first_departure(at(after, early), at(before, early), tolerance)
