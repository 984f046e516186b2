"""The argument by which an attention module receives its mask."""

from __future__ import annotations

import contextlib
import dataclasses

import torch
from torch import fx

from retrofit.anatomy.anatomy import Anatomy
from retrofit.anatomy.attention_cores import Attention, find_attentions
from retrofit.anatomy.attention_sites import AttentionSite, MaskArgument
from retrofit.anatomy.mask_values import mask_value, shown_keys
from retrofit.errors import CaptureError
from retrofit.program.aten_ops import is_float, shape
from retrofit.program.capture import capture, missing_masks
from retrofit.program.dataflow import Dataflow
from retrofit.program.program import Call, Key


def with_mask_arguments(sites: list[AttentionSite], anatomy: Anatomy) -> list[AttentionSite]:
    """The sites, each with the argument by which its module receives a mask, where there is one.

    A model that was captured without a mask may pass none to its attentions: it is captured again with one.
    """
    masks = mask_arguments(sites, anatomy.flow)
    model, examples = anatomy.model, anatomy.program.examples
    if len(masks) < len(sites) and (missing := missing_masks(model, examples)):
        with contextlib.suppress(CaptureError):
            masks = mask_arguments(sites, Dataflow(capture(model, examples | missing))) | masks
    return [dataclasses.replace(site, mask=masks.get(site.name)) for site in sites]


def mask_arguments(sites: list[AttentionSite], flow: Dataflow) -> dict[str, MaskArgument]:
    """The mask arguments of the sites in a captured model, by the name of the site."""
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
    """The argument of a call from which `mask` is computed without any weight of the model: None where there is none.

    `streams` are its input stream, which may be (length, batch, width), and in cross-attention its source: they are no masks. Nor
    are positions, which a mask may be computed from too; of several arguments it is the one that the others lead to.
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
    last = (key for key, node in found.items() if not any(one is not node and flow.reaches(node, one) for one in found.values()))
    return next(last, None)


def numbers_tokens(node: fx.Node, flow: Dataflow) -> bool:
    """Whether the value holds the places of the tokens, one after the other."""
    value = mask_value(node, flow) if len(shape(node) or ()) == 2 and not is_float(node) else None
    return value is not None and value.dtype != torch.bool and bool((value.diff(dim=-1) == 1).all()) and value.shape[-1] > 1


def true_hides(node: fx.Node, cores: list[Attention], flow: Dataflow) -> bool:
    """Whether what is not zero means hidden in the mask at `node`, True or a large negative number, by what the attentions show.

    Where that is unknown: whether without padding it is True for no token and itself, or not for the first token. Tokens further
    right may be hidden all the same: some models fill a sequence up to a multiple of their window.
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
