"""`is_exporting` says whether a program is exported, on every supported torch: not while it is compiled."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from retrofit.sdk.modules import is_exporting


class Says(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if is_exporting() else x


@pytest.mark.parametrize("strict", [False, True])
def test_while_a_program_is_exported_and_only_then(strict: bool) -> None:
    module, x = Says(), torch.zeros(2)
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    assert not is_exporting() and not module(x).any() and not compiled(x).any()
    assert torch.export.export(module, (x,), strict=strict).module()(x).all()
    assert not compiled(x).any() and not is_exporting()
