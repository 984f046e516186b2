"""The reference of strided layers, token by token, with which the check `method` compares the pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from retrofit.sdk import Inside, Observed, OneOf, Problems, SiteCall, Wrapper


def strided_layer(call: SiteCall) -> Tensor:
    """Return each token's value from its anchor: the last token at or before it whose position is a multiple of k."""
    layer: Any = call.module
    options = call.options
    stream = call.argument(place_of(call, layer))
    x = stream.transpose(0, 1) if layer.tokens_first else stream
    before = sum(past.kept["tokens"] for past in call.before)
    batch, tokens = x.shape[:2]
    call.kept["tokens"] = tokens
    real = real_tokens(call, batch, before + tokens)
    anchors = [anchor_columns(real[row].tolist(), options.k) for row in range(batch)]
    given = call_layer(call, layer, x, anchors, before)
    y = torch.stack([torch.stack([token(call, x, given, anchors, row, before, t) for t in range(tokens)]) for row in range(batch)])
    call.irrelevant = ~real[:, before:]
    return y.transpose(0, 1) if layer.tokens_first else y


def place_of(call: SiteCall, layer: Any) -> tuple[int | None, str | None]:
    """Return the place of the stream: `stream` is its path, a name or a position."""
    name = layer.stream[0]
    if isinstance(name, int):
        return name, None
    names = list(layer.names)
    return (names.index(name) if name in names else None), name


def real_tokens(call: SiteCall, batch: int, tokens: int) -> Tensor:
    """Return the mask of real tokens so far, from the model's input: (batch, tokens)."""
    for name, value in call.inputs.items():
        if name.endswith("attention_mask") and isinstance(value, Tensor) and value.shape == (batch, tokens):
            return value.bool()
    return torch.ones(batch, tokens, dtype=torch.bool)


def anchor_columns(real: list[bool], k: int) -> list[int]:
    """Return the column of each column's anchor, −1 before the first: positions count the real tokens."""
    position, last, found = 0, -1, []
    for column, is_real in enumerate(real):
        if is_real:
            if position % k == 0:
                last = column
            position += 1
        found.append(last)
    return found


def call_layer(
    call: SiteCall, layer: Any, x: Tensor, anchors: list[list[int]], before: int
) -> dict[tuple[int, int], tuple[Tensor, Tensor]]:
    """Return the layer's inputs and results for the new anchors and those of earlier calls, by row and column."""
    known: dict[tuple[int, int], tuple[Tensor, Tensor]] = dict(call.before[-1].kept["anchors"]) if call.before else {}
    new, slots = slots_of(call, anchors, before, x.shape[1])
    count = len(slots[0])
    if count:
        rows = [torch.stack([layer_input(call, x, anchors, row, c, before) for c in columns]) for row, columns in enumerate(slots)]
        inputs = torch.stack(rows)
        if call.options.method == "average-pooling":  # the filled slots come last, as means of nothing
            inputs = torch.stack(
                [
                    F.pad(packed_row[: len(columns)], (0, 0, 0, count - len(columns)))
                    for packed_row, columns in zip(rows, new, strict=True)
                ]
            )
        is_full = all(len(columns) == count for columns in new)
        packed = inputs.transpose(0, 1) if layer.tokens_first else inputs
        others = strided_arguments(call, slots[0], x) if is_full and not call.cached else None
        y = call.given("layer", {place_of(call, layer): packed}, layer.stream_out, others)
        y = y.transpose(0, 1) if layer.tokens_first else y
        for row, columns in enumerate(new):
            for slot, column in enumerate(columns, start=count - len(columns) if fills_first(call) else 0):
                known[row, column] = inputs[row, slot], y[row, slot]
    call.kept["anchors"] = known
    return known


def slots_of(call: SiteCall, anchors: list[list[int]], before: int, tokens: int) -> tuple[list[list[int]], list[list[int]]]:
    """Return the columns of each row's new anchors, and the layer's slots: as many in each row, some of them filled in."""
    new = [sorted({column for column in row[before:] if column >= before}) for row in anchors]
    count = max(map(len, new)) if call.cached else -(-tokens // call.options.k)
    slots = []
    for columns in new:
        filled = [columns[0] if columns else before] * (count - len(columns))
        slots.append([*filled, *columns] if fills_first(call) else [*columns, *filled])
    return new, slots


def fills_first(call: SiteCall) -> bool:
    """Return whether the filled slots come first: in the first call with a cache that has no earlier tokens."""
    return call.cached and not call.before


def inside(call: SiteCall) -> Inside:
    """Return the model's inputs as modules inside the layer see them: only the new anchors, and the mask of earlier ones too.

    The filled slots do not belong to the sequence afterwards: each row continues after its own anchors.
    """
    layer: Any = call.module
    stream = call.argument(place_of(call, layer))
    tokens, batch = (stream.shape[0], stream.shape[1]) if layer.tokens_first else (stream.shape[1], stream.shape[0])
    before = sum(past.kept["tokens"] for past in call.before)
    real = real_tokens(call, batch, before + tokens)
    anchors = [anchor_columns(row.tolist(), call.options.k) for row in real]
    new, slots = slots_of(call, anchors, before, tokens)
    shown = [[True] * len(columns) for columns in new]
    hidden = [[False] * (len(row) - len(columns)) for columns, row in zip(new, slots, strict=True)]
    pairs = zip(hidden, shown, strict=True) if fills_first(call) else zip(shown, hidden, strict=True)
    staying = torch.tensor([[*first, *second] for first, second in pairs], device=stream.device).bool().reshape(batch, -1)
    counts = torch.tensor([len({column for column in row[:before] if column >= 0}) for row in anchors], device=stream.device)
    earlier = torch.arange(int(counts.max()), 0, -1, device=stream.device) <= counts.unsqueeze(1)  # rows end together
    call.kept["tokens"] = tokens
    places = torch.tensor(slots, device=stream.device).long().reshape(batch, -1) - before
    inputs = dict(call.inputs)
    for name, value in call.inputs.items():
        if not isinstance(value, Tensor) or value.dim() != 2 or len(value) != batch or value.is_floating_point():
            continue
        if name.endswith("attention_mask") and value.shape[1] == before + tokens:
            inputs[name] = torch.cat([earlier, staying], 1).to(value)
        elif value.shape[1] == tokens:
            inputs[name] = value.gather(1, places)
    return Inside(inputs, staying if call.cached else None)


def layer_input(call: SiteCall, x: Tensor, anchors: list[list[int]], row: int, column: int, before: int) -> Tensor:
    """Return the layer's input for an anchor: the token, or the mean of its window."""
    if call.options.method != "average-pooling":
        return x[row, column - before]
    real = real_tokens(call, len(x), before + x.shape[1])[row]
    window = [c for c, anchor in enumerate(anchors[row]) if anchor == column and bool(real[c])]
    return torch.stack([x[row, c - before] for c in window]).mean(0) if window else x[row, column - before]


def strided_arguments(call: SiteCall, columns: list[int], x: Tensor) -> Mapping[Any, Any]:
    """Return every other argument unchanged, or cut down to the anchors along each dimension as long as the sequence.

    One row for the whole batch may have become a row for each sequence; the width of (batch, tokens, width) may be that number too.
    """
    rows, tokens = x.shape[:2]

    def cut(value: Any, expands: bool = False, has_width: bool = False) -> Any:
        if isinstance(value, Tensor):
            if expands and value.dim() and value.shape[0] == 1:
                value = value.expand(rows, *value.shape[1:])
            for dim, size in enumerate(value.shape):
                is_width = has_width and value.dim() == 3 and dim == 2 and value.is_floating_point()
                if size == tokens and not is_width:
                    value = value.index_select(dim, torch.tensor(columns, device=value.device))
            return value
        if isinstance(value, (tuple, list)):
            return [cut(item, expands, has_width) for item in value]
        return {key: cut(item, expands, has_width) for key, item in value.items()} if isinstance(value, dict) else value

    arguments: dict[Any, Any] = {**dict(enumerate(call.args)), **call.kwargs}
    return {
        key: OneOf((cut(value), cut(value, True), cut(value, False, True), cut(value, True, True), value))
        for key, value in arguments.items()
    }


def token(
    call: SiteCall,
    x: Tensor,
    given: dict[tuple[int, int], tuple[Tensor, Tensor]],
    anchors: list[list[int]],
    row: int,
    before: int,
    t: int,
) -> Tensor:
    """Return y_i = ŷ_i + b (ỹ − ŷ) at its anchor, ŷ_i = a1 x_i + a2 x at its anchor; for the papers' baselines, their value."""
    column = before + t
    anchor = anchors[row][column]
    if anchor < 0:
        return torch.zeros_like(x[row, t])  # padding, which nobody reads
    seen, y = given[row, anchor]
    if call.options.method == "average-pooling":
        return y
    if call.options.method == "stride-and-skip":
        return y if column == anchor else x[row, t]
    layer: Any = call.module
    predicted = layer.a1 * x[row, t] + layer.a2 * seen
    of_anchor = layer.a1 * seen + layer.a2 * seen
    corrected: Tensor = predicted + layer.b * (y - of_anchor)
    return corrected


def wiring(observed: Observed) -> Problems:
    """Check that all layers of a stack but the first and the last are strided, where the option says so."""
    if observed.options.layers != "inner":
        return
    kinds = {type(unwrapped(site.module)) for site in observed.sites}
    for site in observed.sites:
        layers = layers_beside(site.path, observed.model, kinds)
        if layers and site.path in (layers[0], layers[-1]):
            yield (
                site.path,
                f"it is layer {layers.index(site.path)} of {len(layers)} and strided, "
                "and the method leaves the first and the last as they are",
            )


def layers_beside(path: str, model: nn.Module, kinds: set[type[nn.Module]]) -> list[str]:
    """Return the layers of all lists in the owner of this layer's list (two halves of a U, for example); none without a list."""
    steps = path.split(".")
    if not isinstance(model.get_submodule(".".join(steps[:-1])), nn.ModuleList):
        return []
    outer = next(n for n in range(len(steps)) if isinstance(model.get_submodule(".".join(steps[:n])), nn.ModuleList))
    owner = ".".join(steps[: max(outer - 1, 0)])
    modules = model.get_submodule(owner).named_modules(prefix=owner)
    lists = [(name, module) for name, module in modules if isinstance(module, nn.ModuleList)]
    return [f"{name}.{index}" for name, held in lists for index, layer in enumerate(held) if type(unwrapped(layer)) in kinds]


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module inside all its wrappers."""
    while isinstance(module, Wrapper):
        module = module.layer
    return module


def start(observed: Observed) -> Problems:
    """Check that with k = 1 it begins as the dense layer: a1 = 1, a2 = 0, b = 1."""
    for site in observed.sites:
        if observed.options.method == "sequence-altup" and not observed.is_calibrated:
            found = tuple(float(getattr(site.module, name)) for name in ("a1", "a2", "b"))
            if found != (1.0, 0.0, 1.0):
                yield site.path, f"a1, a2, b begin as {found} and not as (1, 0, 1)"
