"""One call of a strided layer: its stream, the arguments that follow the tokens, and the same arguments cut down to the anchors.

At call time the extents say what the shapes at rewriting left open: while decoding, a dimension as long as the new tokens is about
these, any other is about the keys in the cache as well.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from retrofit.passes.sequence_altup.anchor_layer import AnchorLayer, MaskArgument
from retrofit.passes.sequence_altup.anchors import Anchors, Indices, hide_keys, take
from retrofit.passes.sequence_altup.argument_paths import ArgumentPath, map_tensors, named_arguments, tensors_in
from retrofit.passes.sequence_altup.token_dims import TokenDims, token_dims_at_call, unpadded_tokens
from retrofit.sdk import DoesNotFitError, with_item


@dataclasses.dataclass
class LayerCall:
    """The arguments of one call: the stream x (batch, T, d), the tensors that follow its tokens, the rest."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    names: tuple[str, ...]
    stream: ArgumentPath
    x: Tensor
    tensors: dict[ArgumentPath, tuple[Tensor, TokenDims]]

    @staticmethod
    def read(
        args: Any,
        kwargs: dict[str, Any],
        names: tuple[str, ...],
        stream: ArgumentPath,
        token_dims: Mapping[ArgumentPath, TokenDims],
        unread: Collection[int | str] = (),
    ) -> LayerCall:
        """Raises `DoesNotFitError` where an argument, `unread` ones apart, differs from those when the model was rewritten.

        New integers, (batch, T, …), for which the layer has no parameter follow the tokens: some models pass their labels to every
        layer.
        """
        found: dict[ArgumentPath, tuple[Tensor, TokenDims]] = {}
        new: dict[ArgumentPath, Tensor] = {}
        x = None
        for name, value in named_arguments(args, kwargs, names):
            for path, tensor in tensors_in(value, (name,)) if name not in unread else ():
                if path == stream:
                    x = tensor
                    continue
                dims = token_dims_at_call(tensor, token_dims.get(path))
                if dims is None:
                    new[path] = tensor
                elif dims.positions:
                    found[path] = tensor, dims
        if x is None:
            raise DoesNotFitError(f"a strided layer was called without its stream, {stream[0]}", why="it computes on nothing else")
        for path, tensor in new.items():
            if path[0] in names or path in token_dims or tensor.is_floating_point() or tensor.shape[:2] != x.shape[:2]:
                raise DoesNotFitError(
                    f"a strided layer received {path[0]} of shape {tuple(tensor.shape)}",
                    why="it received none when the model was rewritten, so how it follows the tokens is unknown",
                    remedy="rewrite with example_inputs= that lead to the same arguments",
                )
            found[path] = tensor, TokenDims(tensor.dim(), (1,), 0)
        return LayerCall(tuple(args), kwargs, names, stream, x, found)

    @property
    def shows_padding(self) -> bool:
        """Whether any of the arguments shows which tokens are padding."""
        return any(dims.shows_padding for _, dims in self.tensors.values())

    @property
    def mask(self) -> MaskArgument | None:
        """The argument that is a mask by queries and keys, and its type."""
        found = ((path, tensor.dtype) for path, (tensor, dims) in self.tensors.items() if dims.shows_padding and dims.rank == 4)
        return next((one for one in found if len(one[0]) == 1), None)

    def key_extents(self) -> list[int]:
        """By how many keys the arguments are that follow the keys; none where no mask is among them."""
        length = self.x.shape[1]
        found = [(tensor.shape[dims.positions[-1]], dims) for tensor, dims in self.tensors.values()]
        of_keys = [(extent, dims) for extent, dims in found if len(dims.positions) > 1 or extent != length]
        return [extent for extent, _ in of_keys] if any(dims.shows_padding for _, dims in of_keys) else []

    def set_argument(self, args: list[Any], kwargs: dict[str, Any], path: ArgumentPath, value: Any) -> None:
        """The argument at `path` is `value`."""
        name = path[0]
        if isinstance(name, str) and (name in kwargs or self.names.index(name) >= len(args)):
            kwargs[name] = value
        else:
            args[name if isinstance(name, int) else self.names.index(name)] = value

    def real(self, before: int, offset: int) -> Tensor | None:
        """Which of the tokens, which follow `before` others, are no padding: (1 or batch, T); None where no argument shows it."""
        batch, length = self.x.shape[:2]
        start = before - offset
        masks = [
            unpadded_tokens(mask, dims, batch, start, length)
            for mask, dims in self.tensors.values()
            if dims.shows_padding and mask.shape[dims.positions[-1]] >= start + length
        ]
        for mask in masks[1:]:
            masks[0] = masks[0] & mask
        return masks[0] if masks else None

    def strided(self, x: Tensor, anchors: Anchors, layer: AnchorLayer | None, offset: int) -> tuple[list[Any], dict[str, Any]]:
        """The arguments of the anchors, with `x` (batch, anchors, d) as the stream."""
        length = self.x.shape[1]
        position = {name: position for position, name in enumerate(self.names)}
        of_anchors: dict[ArgumentPath, Tensor] = {self.stream: x}
        for path, (tensor, dims) in self.tensors.items():
            of_anchors[path] = self.stride(tensor, dims, anchors, layer, offset, length)

        def change(path: ArgumentPath, tensor: Tensor) -> Tensor:
            return of_anchors.get(path, tensor)

        args = list(self.args)
        kwargs = dict(self.kwargs)
        for name in {path[0] for path in of_anchors}:
            if isinstance(name, str) and name in kwargs:
                kwargs[name] = map_tensors(kwargs[name], (name,), change)
            else:
                at = name if isinstance(name, int) else position[name]
                args[at] = map_tensors(args[at], (name,), change)
        return args, kwargs

    def stride(
        self, tensor: Tensor, dims: TokenDims, anchors: Anchors, layer: AnchorLayer | None, offset: int, length: int
    ) -> Tensor:
        """The part of a tensor that is about the anchors: queries are new ones, keys are also those of the cache."""
        last, batch = len(dims.positions) - 1, dims.batch
        for number, dim in enumerate(dims.positions):
            extent = tensor.shape[dim]
            if extent == 1 and length != 1 and number < last:
                continue  # one row of a mask for all queries
            is_of_queries = number < last or (last == 0 and extent == length)
            if is_of_queries or layer is None:
                indices: Indices = anchors.indices
                visible = anchors.valid
            else:
                indices, visible = layer.key_indices(anchors, offset, extent, tensor.device)
            tensor = take(tensor, dim, indices, batch)
            batch = 0 if batch is None and tensor.shape[0] == self.x.shape[0] else batch  # it has a row for each sequence now
            if dims.shows_padding and number == last and visible is not None:
                tensor = hide_keys(tensor, dim, visible, batch, dims.zero_is_real)
        return tensor if tensor.stride(-1) == 1 else tensor.contiguous()  # attention kernels want masks by rows

    def restore_arguments(self, output: Any, returned: Mapping[int | str, ArgumentPath]) -> Any:
        """`output`, in which the arguments that the layer returns, `returned` by their key in the output, are whole again."""
        for key, path in returned.items():
            if isinstance(output, (tuple, list)) and isinstance(key, int) and key < len(output) and output[key] is not None:
                output = with_item(output, key, self.argument(path))
        return output

    def argument(self, path: ArgumentPath) -> Any:
        """The argument at `path`; None where it was left out."""
        return next((value for name, value in named_arguments(self.args, self.kwargs, self.names) if name == path[0]), None)
