"""The matrix of a feed-forward's output with the row of each hidden unit contiguous, as a layer of transformers' kind.

Imported where such a layer is built or tested for, because it imports transformers, which is slow.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D


class RowMajor(Conv1D):
    """y = h W + b with W stored (d_ff, d), so that the row of a hidden unit is contiguous; the bias is optional."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        nn.Module.__init__(self)
        self.nx, self.nf = weight.shape
        self.weight = weight
        self.register_parameter("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.t(), self.bias)
