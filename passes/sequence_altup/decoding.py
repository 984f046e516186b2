"""A strided layer's call with a cache: its anchors among the new tokens are computed, and what later tokens need is stored.

`growing_anchors` and `fixed_anchors` store it. They import transformers, so this module is imported on the first such call.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from retrofit.passes.sequence_altup.anchor_cache import (
    AnchorLayer,
    changed_states,
    copy_states,
    find_anchor_layer,
    restore_states,
    store_anchor_layer,
    view_of,
)
from retrofit.passes.sequence_altup.arguments import Anchors, CountedAnchors, LayerCall, NoAnchors, to_mask
from retrofit.passes.sequence_altup.fixed_anchors import FixedAnchorLayer, has_fixed_size
from retrofit.passes.sequence_altup.growing_anchors import GrowingAnchorLayer
from retrofit.sdk import DoesNotFitError, with_item

if TYPE_CHECKING:
    from retrofit.passes.sequence_altup.strided_layers import StridedLayer


def decode(strided: StridedLayer, call: LayerCall, cache: Cache) -> Any:
    """Return the layer's output with a cache: the layer runs if there are anchors among the new tokens."""
    if strided.dense_share:
        raise DoesNotFitError(
            "a strided layer was called with a cache during annealing",
            why="the tokens it computes change with every step",
            remedy="use use_cache=False until annealing is done",
            code="annealing",
        )
    stored = find_anchor_layer(cache, strided.name) or new_anchor_layer(strided, cache)
    compiles = isinstance(stored, FixedAnchorLayer) or not (stored.tokens or cache.is_compileable)
    return (step if compiles else uncompiled_step)(strided, call, cache, stored)


def new_anchor_layer(strided: StridedLayer, cache: Cache) -> AnchorLayer:
    """Return an empty anchor layer for this cache; token histories contain anchors only, so theirs grows."""
    if has_fixed_size(cache) and not any(getattr(module, "stores_histories", False) for module in strided.modules()):
        return FixedAnchorLayer(strided.name, strided.k, strided.mask_argument, int(cache.get_mask_sizes(1, 0)[0]))
    return GrowingAnchorLayer(strided.name, strided.k, strided.mask_argument)


@torch.compiler.disable
def uncompiled_step(strided: StridedLayer, call: LayerCall, cache: Cache, stored: AnchorLayer) -> Any:
    """Return what `step` does; how much is stored depends on the values of masks, which compiled code cannot read."""
    return step(strided, call, cache, stored)


def step(strided: StridedLayer, call: LayerCall, cache: Cache, stored: AnchorLayer) -> Any:
    """Return the layer's output and keep its anchors in `stored`."""
    x, offset = call.x, stored.offset(call.x.shape[1])
    real = strided.real(call, stored.start, offset)
    anchors = stored.anchors(x.shape[1], real, x.shape[0])
    earlier, corrections = stored.earlier, None
    if anchors.count:
        output, corrections = run(strided, call, cache, stored, anchors, offset)
        if stored.template is None:
            stored.template = output_template(output)
    else:
        output = rebuild_output(strided, stored.template, call, cache)
    nothing = x.new_zeros(x.shape[0], 0, x.shape[2])
    y = strided.update(x, nothing if corrections is None else corrections, anchors, earlier)
    y = stored.settled(y, lambda: strided.update(x, nothing, NoAnchors(), earlier))
    stored.advance(anchors, real, x.shape[1], corrections)
    store_anchor_layer(cache, stored)
    return with_item(output, strided.stream_out, strided.turn(y))


def run(
    strided: StridedLayer, call: LayerCall, cache: Cache, stored: AnchorLayer, anchors: Anchors, offset: int
) -> tuple[Any, Tensor]:
    """Return the layer's output for the anchors, and their corrections."""
    x = strided.layer_input(call.x, anchors)
    stored.make_room(anchors, call.key_extents)
    args, kwargs = call.strided(strided.turn(x), anchors, functools.partial(stored.key_indices, anchors, offset))
    view = cache if stored.is_settled else view_of(cache, stored, anchors.valid)
    args = [view if value is cache else value for value in args]
    kwargs = {key: view if value is cache else value for key, value in kwargs.items()}
    before = copy_states(cache) if stored.recurrent is None else {}
    advancing = advancing_rows(strided, anchors, stored)
    waiting = copy_states(cache, stored.recurrent) if advancing is not None and stored.recurrent else {}
    stored.mask = call.mask or stored.mask
    if stored.keys is not None and isinstance(anchors, CountedAnchors) and not call.shows_padding:
        hide_missing_keys(strided, call, args, kwargs, stored, anchors)
    output = strided.layer(*args, **kwargs)
    if advancing is not None:
        restore_states(cache, waiting, advancing)
    if stored.recurrent is None:
        stored.recurrent = changed_states(before, cache)
    corrections = strided.correction(x, strided.turn(strided.stream_of(output)))
    return call.restore_arguments(output, strided.returned), corrections


def advancing_rows(strided: StridedLayer, anchors: Anchors, stored: AnchorLayer) -> Tensor | None:
    """Return the rows (batch) with an anchor, whose recurrent states may advance; None without such states."""
    if anchors.valid is None or not stored.recurrent:
        return None
    if anchors.count > 1 and not bool(anchors.valid.all()):
        raise DoesNotFitError(
            "a strided recurrent layer received several tokens at once, with different numbers of anchors per row",
            why="its states would advance by the anchors of other rows",
            remedy="after the prompt, decode one token at a time",
            code="padding",
        )
    return anchors.valid.any(1)


def hide_missing_keys(
    strided: StridedLayer, call: LayerCall, args: list[Any], kwargs: dict[str, Any], stored: AnchorLayer, anchors: CountedAnchors
) -> None:
    """Add a mask to a call without it where rows store different numbers of anchors: models omit masks when padding is gone."""
    if stored.sees_all(anchors):
        return
    if stored.mask is None:
        raise DoesNotFitError(
            "a strided layer received no mask for rows of different length",
            why="the padding of shorter rows must be masked",
            remedy="pass attention_mask with every step, or use attn_implementation='sdpa'",
            code="no-mask",
        )
    path, dtype = stored.mask
    call.set_argument(args, kwargs, path, to_mask(stored.visible(anchors), dtype))


def rebuild_output(strided: StridedLayer, template: Any, call: LayerCall, cache: Cache) -> Any:
    """Return an output like the layer's last one: with the arguments that it returns, and None for computed values."""
    if template is None:
        return call.x
    kind, kinds = template
    items = {name: cache if value == "cache" else None for name, value in kinds.items()}
    for name, path in strided.returned.items():
        if name in items:
            items[name] = call.argument(path)
    if issubclass(kind, Mapping):
        return kind(**items)
    values = list(items.values())
    return kind(*values) if hasattr(kind, "_fields") else kind(values)


def output_template(output: Any) -> Any:
    """Return the input of `rebuild_output`: the output's type and its items that are the cache; None for a tensor."""
    if isinstance(output, Tensor):
        return None
    items = output.items() if isinstance(output, Mapping) else enumerate(output)
    return type(output), {name: "cache" if isinstance(value, Cache) else None for name, value in items}
