"""Merged attention, key by key: the reference for the check `method`."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from retrofit.sdk import Observed, Problems, SiteCall, argument_at
from retrofit.sdk.data import float_tensors, watched
from retrofit.sdk.modules import FUSED_ARGUMENTS

HIDDEN = -1e4  # an additive mask below this hides
CLOSE = 1e-3  # tolerance relative to the largest value: the model may compute in half precision


def joint_attention(call: SiteCall) -> Tensor:
    """Return for each query the softmax over the keys of both sets: Σ_j softmax_j(scale · q·k_j + mask_j + log w_j) v_j."""
    module: Any = call.module
    heads = module.heads
    # torch's attention counts as an operation that draws random numbers, but recorded calls have no dropout
    call.draws = [draw for draw in call.draws if not draw.operation.startswith("_scaled_dot_product")]
    own = {name: call.argument((place, name), None) for place, name in enumerate(FUSED_ARGUMENTS)}
    own["scale"] = call.kwargs.get("scale")
    other = call.kwargs.get("other")
    sets = [own] if other is None else [own, {**other, "query": own["query"] if other["query"] is None else other["query"]}]
    size = own["query"].shape
    queries = [keyset["query"].reshape(len(keyset["query"]), heads, -1, keyset["query"].shape[-1]) for keyset in sets]
    tokens = queries[0].shape[2]
    visible, bias = zip(*(visibility(keyset, len(queries[0]), heads, tokens) for keyset in sets), strict=True)
    decoder = 1 if module.encoder_is_own else 0
    first = call.options.positions == "first" and other is not None
    rows = []
    for b in range(len(queries[0])):
        for h in range(heads):
            for i in range(tokens):
                scores, values = [], []
                for number, keyset in enumerate(sets):
                    shared = heads // keyset["key"].shape[1]
                    k, v = keyset["key"][b, h // shared], keyset["value"][b, h // shared]
                    q = queries[decoder if first else number][b, h, i]
                    scale = q.shape[-1] ** -0.5 if keyset.get("scale") is None else keyset["scale"]
                    added = torch.zeros((), dtype=torch.float64)
                    if number == 1 and module.log_weight is not None:
                        added = module.log_weight[h]
                    if first and number != decoder and bool(visible[decoder][b, h, i, 0]):
                        added = added + bias[decoder][b, h, i, 0]
                    shown = visible[number][b, h, i]
                    scores.append(scale * (k[shown] @ q) + bias[number][b, h, i, shown] + added)
                    values.append(v[shown])
                rows.append(torch.cat(scores).softmax(-1) @ torch.cat(values))  # zero if it sees no key
    seen = torch.stack([shown.any(-1) for shown in visible]).any(0)
    call.irrelevant = (~seen).reshape(size[:-1])
    return torch.stack(rows).reshape(*size[:-1], own["value"].shape[-1])


def joint_softmax(call: SiteCall) -> Tensor:
    """Return, for each query, the weights of its own keys and of the others: softmax over s_j and t_j + log w, in this order."""
    module: Any = call.module
    scores, other = call.argument((0, "scores")), call.kwargs.get("other")
    sets = [scores] if other is None else [scores, other["scores"]]
    parts = [values.reshape(-1, *values.shape[-2:]) for values in sets]  # (batch · heads, tokens, keys)
    if module.log_weight is not None:
        added = module.log_weight.repeat(len(parts[0]) // module.heads)[:, None, None]
        parts = [parts[0], *(values + added for values in parts[1:])]
    joint = torch.cat(parts, -1)
    call.irrelevant = (joint.amax(-1) < HIDDEN).reshape(scores.shape[:-1])
    return joint.softmax(-1).reshape(*scores.shape[:-1], -1)


def visibility(given: Mapping[str, Any], batch: int, heads: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Return the visibility of each key to each query, and the bias of the mask: (batch, heads, tokens, keys) each."""
    keys = given["key"].shape[2]
    size = (batch, heads, tokens, keys)
    visible, bias, mask = torch.ones(size, dtype=torch.bool), torch.zeros(size, dtype=torch.float64), given.get("attn_mask")
    if mask is not None:
        mask = mask if mask.dim() < 4 or mask.shape[1] in (1, heads) else mask.reshape(len(mask), heads, -1, keys)
        visible = (mask if mask.dtype == torch.bool else mask > HIDDEN).expand(size)
        bias = bias if mask.dtype == torch.bool else mask.expand(size)
    return (visible.tril() if given.get("is_causal") else visible), bias


def wiring(observed: Observed) -> Problems:
    """Check that the keys and values of an attention are its own matrices' products with both sets of tokens.

    If scores are written out, keys are not available, and only the other tokens' values are compared. A removed cross-attention
    must add nothing.
    """
    with streams_of(observed) as streams, added_by_gone(observed) as added:
        observed.model(**observed.inputs)
    for path, values in added.items():
        if any(bool(value.any()) for value in values):
            yield path, "the replacement of its layer's cross-attention adds values other than zero to the stream"
    for site in observed.sites:
        outer = observed.model.get_submodule(site.path.rpartition(".")[0])
        for (x, source), arguments in streams.get(site.path, []):
            module: Any = site.module
            if arguments["other"] is None:
                yield site.path, "it sees only its own keys"
                continue
            others = by_head(arguments["other"]["value"], module.heads)
            encoder, decoder = batch_first(source, x, others)
            own, other = (encoder, decoder) if module.encoder_is_own else (decoder, encoder)
            which = "decoder" if module.encoder_is_own else "encoder"
            if "scores" in arguments["other"]:
                if not any(is_product(others, part, other) for part in projections(outer)):
                    yield site.path, f"the values of the {which}'s tokens are not the product with one of its own matrices"
                continue
            for name in ("key", "value"):
                matrices = [part for part in projections(outer) if is_product(arguments["own"][name], part, own)]
                if not matrices:
                    observed.not_compared(site.path, f"no single matrix computes its {name}s")
                elif not any(is_product(arguments["other"][name], part, other) for part in matrices):
                    yield site.path, f"the {name}s of the {which}'s tokens are not the product with the matrix of its own {name}s"


@contextlib.contextmanager
def streams_of(observed: Observed) -> Iterator[dict[str, list[tuple[tuple[Tensor, Tensor], dict[str, Any]]]]]:
    """Yield, by site, the stream and the encoder's states in its layer, and the operands of each of its calls."""
    found: dict[str, list[tuple[tuple[Tensor, Tensor], dict[str, Any]]]] = {}
    open_streams: dict[str, tuple[Tensor, Tensor]] = {}

    def enter(path: str, module: Any, args: Any, kwargs: Any) -> None:
        open_streams[path] = argument_at(module.stream_in, args, kwargs), kwargs["merged"]["source"]

    def keep(path: str, module: Any, args: Any, kwargs: Any) -> None:
        own = {**dict(zip(FUSED_ARGUMENTS, args, strict=False)), **kwargs}
        found.setdefault(path, []).append((open_streams[path], {"own": own, "other": kwargs.get("other")}))

    around = {site.path: observed.model.get_submodule(site.path.rpartition(".")[0]) for site in observed.sites}
    inside = {site.path: site.module for site in observed.sites}
    with watched(around, before=enter), watched(inside, before=keep), torch.no_grad():
        yield found


@contextlib.contextmanager
def added_by_gone(observed: Observed) -> Iterator[dict[str, list[Tensor]]]:
    """Yield, by site, the outputs in the shape of the stream of the module that replaces a removed cross-attention."""
    found: dict[str, list[Tensor]] = {}

    def keep(path: str, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        size = argument_at(module.stream_in, args, kwargs).shape[:-1]
        found.setdefault(path, []).extend(part for part in float_tensors(output) if part.shape[:-1] == size)

    sites = observed.sites if observed.options.attentions == 1 else ()
    around = {site.path: observed.model.get_submodule(site.path.rpartition(".")[0]) for site in sites}
    with watched({path: outer.__dict__["cross"] for path, outer in around.items()}, after=keep):
        yield found


def by_head(values: Tensor, heads: int) -> Tensor:
    """Return values with the heads in a separate dimension."""
    return values.reshape(-1, heads, *values.shape[-2:]) if values.dim() == 3 else values


def batch_first(source: Tensor, x: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Return both as (batch, tokens, width), also if the model has tokens first."""
    is_first = len(source) == len(key)
    return (source, x) if is_first else (source.transpose(0, 1), x.transpose(0, 1))


def projections(outer: nn.Module) -> list[nn.Module]:
    """Return the modules inside an attention that have a matrix and no submodules."""
    leaves = (module for module in outer.modules() if not list(module.children()))
    return [leaf for leaf in leaves if isinstance(weight := getattr(leaf, "weight", None), Tensor) and weight.dim() == 2]


def is_product(value: Tensor, projection: nn.Module, stream: Tensor) -> bool:
    """Return whether keys or values, (batch, heads, tokens, width), have the lengths of a projection of the stream.

    Rotary positions preserve the length of a vector.
    """
    try:
        heads = projection(stream).unflatten(-1, (-1, value.shape[-1])).transpose(1, 2).norm(dim=-1)
    except (RuntimeError, IndexError, TypeError):
        return False
    lengths = value.norm(dim=-1)
    if lengths.shape[1] != heads.shape[1] and lengths.shape[1] % heads.shape[1] == 0:
        heads = heads.repeat_interleave(lengths.shape[1] // heads.shape[1], 1)
    return lengths.shape == heads.shape and bool((lengths - heads).abs().max() <= CLOSE * heads.abs().max())


def start(observed: Observed) -> Problems:
    """Check that the number of attentions is the option's, and that the weight of the other keys has its initial value."""
    expected = math.log(observed.options.weight)
    seconds = [site for site in observed.sites if getattr(site.module, "encoder_is_own", False)]
    if len(seconds) * 2 != (observed.options.attentions - 1) * len(observed.sites):
        yield observed.sites[0].path, f"{len(seconds)} of {len(observed.sites)} attentions replace a cross-attention"
    for site in observed.sites:
        weight = getattr(site.module, "log_weight", None)
        if (weight is None) != (observed.options.weight == 1):
            yield site.path, "its other keys have a trainable weight where they should not, or none where they should"
        elif weight is not None and bool((weight.detach().double() - expected).abs().max() > 1e-2 * abs(expected)):
            yield site.path, "the initial weight of its other keys is not the option's"
