"""Sum: an extra embedding for each token."""

from __future__ import annotations

import torch
from torch import nn

from retrofit.passes.sum import SummedEmbedding


def test_tokens_added_later_get_nothing() -> None:
    torch.manual_seed(0)
    dense, extra = nn.Embedding(7, 4), nn.Embedding(5, 4)
    ids = torch.tensor([[0, 4, 5], [6, 1, 3]])
    expected = torch.stack(
        [torch.stack([dense.weight[id] + (extra.weight[id] if id < 5 else 0) for id in row]) for row in ids.tolist()]
    )
    assert torch.equal(SummedEmbedding(dense, extra)(ids), expected)


def test_the_lookup_is_one_graph_when_it_is_compiled() -> None:
    torch.compiler.reset()
    table = SummedEmbedding(nn.Embedding(7, 4), nn.Embedding(5, 4))
    ids = torch.tensor([[1, 6, 4]])
    torch.testing.assert_close(torch.compile(table, backend="eager", fullgraph=True)(ids), table(ids))
