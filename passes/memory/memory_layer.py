"""A layer, or a feed-forward, whose output a memory is added to."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from retrofit.passes.memory.external_memory import ExternalMemory
from retrofit.passes.memory.token_ids import TOKEN_IDS, reads_token_ids
from retrofit.sdk import Wrapper, argument_place, find_argument, with_item


class MemoryLayer(Wrapper):
    """`layer(x) + memory(x, ids)`.

    x is the argument `stream_in`; the sum replaces `stream_out` in what the layer returns: an index or a key, None for the value
    itself. `token_ids` is the memory's keyword; the layer receives it only where a memory inside it reads it.
    """

    def __init__(
        self, layer: nn.Module, memory: ExternalMemory, *, stream_in: int | str = 0, stream_out: int | str | None = None
    ) -> None:
        super().__init__(layer)
        self.memory, self.forwards_ids = memory, reads_token_ids(layer)
        self.stream_in, self.stream_out = argument_place(layer, stream_in), stream_out

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        arguments, keywords = list(args), dict(kwargs)
        ids = keywords.get(TOKEN_IDS)
        if not self.forwards_ids:
            keywords.pop(TOKEN_IDS, None)
        container, key = find_argument(self.stream_in, arguments, keywords)
        x = container[key]
        output = self.layer(*arguments, **keywords)
        out = None if isinstance(output, Tensor) else self.stream_out
        y = output if out is None else output[out]
        return with_item(output, out, y + self.memory(x, ids).to(y.dtype))
