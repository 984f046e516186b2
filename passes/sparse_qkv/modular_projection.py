"""A projection with few weights: a multiplicative layer, a convolution over tokens and modules, or both in sequence.

    mult:  m[t,s,n] = Σ_i x[t,i] D[i,s] E[i,n]                              S modules of size M, shared by all the convolutions
    conv:  y[t,s,n] = b[n] + Σ_τ g[t,τ] Σ_o Σ_m m[t−τ, r·s+o−⌊F/2⌋, m] W[o,τ,m,n]      o, τ = 0 … F−1     W: `weight`, b: `bias`

The convolution reads F modules of the last F tokens, with zeros before the first token and outside the S modules. g[t,τ] is 1 if
token t may see token t−τ, else 0; g[t,0] = 1. With a stride r the output has S/r modules: the key or value heads of a model in
which r query heads share one, each read around the first module of its group.

Sparse is Enough in Scaling Transformers (NeurIPS 2021), §3.2.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from retrofit.passes.multiplicative import Multiplicative
from retrofit.sdk.modules import holds_one_way

FEW = 8  # up to this many tokens in a row, the F·F neighbours of each are concatenated; for more that takes too much memory


class ModularConvolution(nn.Module):
    """y of the formula above: (batch, F−1+tokens, S, M) gives (batch, tokens, S/r, N)."""

    def __init__(self, kernel: int, size: int, filters: int, stride: int, like: Tensor) -> None:
        super().__init__()
        self.kernel, self.stride = kernel, stride
        self.weight = nn.Parameter(torch.empty(kernel, kernel, size, filters, device=like.device, dtype=like.dtype))
        self.bias = nn.Parameter(torch.empty(filters, device=like.device, dtype=like.dtype))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the weight such that y has the variance of m; set the bias to zero."""
        kernel, _, size, _ = self.weight.shape
        self.weight.normal_(std=(kernel * kernel * size) ** -0.5)
        self.bias.zero_()

    def forward(self, m: Tensor, gates: Tensor | None, inputs: Tensor | None = None) -> Tensor:
        """Return y. `m` starts with the F−1 tokens before the first; `gates`, (batch or 1, tokens, F−1), are g[t,1] …; None: all
        ones.

        `inputs` is the result of `convolution_inputs` if several convolutions share it.
        """
        inputs = convolution_inputs(m, gates, self.kernel, self.stride) if inputs is None else inputs
        y = self.in_one_product(inputs) if is_few(m.shape[1] - self.kernel + 1) else self.tap_by_tap(inputs, gates)
        return y + self.bias.to(y.dtype)

    def in_one_product(self, inputs: Tensor) -> Tensor:
        """Return y by one product for all F·F inputs of a module."""
        return inputs @ self.weight.flatten(0, 2).to(inputs.dtype)

    def tap_by_tap(self, inputs: Tensor, gates: Tensor | None) -> Tensor:
        """Return y by each token's contributions to itself and the next F−1: backward saves F·S·M numbers a token, not F²·S·M."""
        contributions = inputs @ self.weight.transpose(1, 2).flatten(2).flatten(0, 1).to(inputs.dtype)
        taps = contributions.unflatten(-1, (self.kernel, -1)).unbind(-2)
        y = delayed(taps[0], 0, self.kernel)
        for tau in range(1, self.kernel):
            y = y + gated(delayed(taps[tau], tau, self.kernel), gates, tau)
        return y

    def extra_repr(self) -> str:
        return f"kernel={self.kernel}, size={self.weight.shape[2]}, filters={self.weight.shape[3]}, stride={self.stride}"

    @staticmethod
    def count(kernel: int, size: int, filters: int) -> int:
        """Return the number of parameters: F²M² + M if the size stays M."""
        return kernel * kernel * size * filters + filters


def convolution_inputs(m: Tensor, gates: Tensor | None, kernel: int, stride: int) -> Tensor:
    """Return what a convolution multiplies by its weight.

    For few tokens all F·F inputs of a module, by o, then τ: (batch, tokens, S/r, F·F·M). For many the F inputs of one token,
    including tokens before the first: (batch, F−1+tokens, S/r, F·M).
    """
    if not is_few(m.shape[1] - kernel + 1):
        return neighbours(m, kernel, stride)
    taps = [gated(delayed(m, tau, kernel), gates, tau) for tau in range(kernel)]
    return neighbours(torch.cat(taps, -1), kernel, stride)


def is_few(tokens: int) -> bool:
    """Return whether the F·F inputs of a module are concatenated for this many tokens."""
    return not holds_one_way() and tokens <= FEW


def delayed(values: Tensor, tau: int, kernel: int) -> Tensor:
    """Return, for each token with F−1 before it, the values of τ tokens earlier."""
    return values.narrow(1, kernel - 1 - tau, values.shape[1] - kernel + 1)


def neighbours(m: Tensor, kernel: int, stride: int) -> Tensor:
    """Return the `kernel` modules around each one, at a stride, concatenated: (…, S, M) gives (…, S/stride, kernel·M)."""
    modules, before = m.shape[-2], kernel // 2
    if kernel == 1 and stride == 1:
        return m
    padded = F.pad(m, (0, 0, before, kernel - 1 - before))
    return torch.cat([padded[..., o : o + modules : stride, :] for o in range(kernel)], -1)


def gated(values: Tensor, gates: Tensor | None, tau: int) -> Tensor:
    """Return `values` of τ tokens earlier, (batch, tokens, …), set to zero if the token may not see them."""
    if gates is None or tau == 0:
        return values
    return values * gates[..., tau - 1].to(values.dtype).view(*gates.shape[:-1], *(1 for _ in values.shape[2:]))


@dataclasses.dataclass(frozen=True)
class ModularShape:
    """The layers and sizes of a `ModularProjection`, without weights."""

    variant: str  # mult-conv, mult, conv
    width: int  # d
    modules: int  # S
    size: int  # M
    strides: Mapping[str, int]  # r of each letter
    kernel: int  # F

    def count(self, *, mult: bool = True) -> int:
        """Return the number of parameters, mult d·(S + M), conv F²M² + M each; without the shared layer unless `mult`."""
        if self.variant == "mult":
            return sum(Multiplicative.count(self.width, self.modules // stride, self.size) for stride in self.strides.values())
        read = self.size if self.variant == "mult-conv" else self.width // self.modules
        shared = Multiplicative.count(self.width, self.modules, self.size) if self.variant == "mult-conv" and mult else 0
        return shared + len(self.strides) * ModularConvolution.count(self.kernel, read, self.size)

    def build(self, like: Tensor, mult: Multiplicative | None = None) -> ModularProjection:
        """Return the projection with random weights, in the dtype and on the device of `like`; `mult`, if given, is its shared
        layer.
        """
        return ModularProjection(self.variant, self.width, self.modules, self.size, self.strides, self.kernel, like, mult)


class ModularProjection(nn.Module):
    """Projects x, (batch, tokens, d), to the concatenated columns of each letter in `strides`, e.g. q, k and v of an attention.

    `variant` determines the layers. The shared multiplicative layer is `mult`, the convolutions are `conv_q`, …; without
    convolutions each letter has a multiplicative layer of its own, `mult_q`, …. The S/r modules of a letter are contiguous.
    """

    def __init__(
        self,
        variant: str,
        width: int,
        modules: int,
        size: int,
        strides: Mapping[str, int],
        kernel: int,
        like: Tensor,
        mult: Multiplicative | None = None,
    ) -> None:
        super().__init__()
        self.variant, self.width, self.size, self.strides = variant, width, size, dict(strides)
        self.module_count = modules  # S
        self.kernel = kernel if "conv" in variant else 1
        if variant == "mult-conv":
            self.mult = mult if mult is not None else Multiplicative(width, modules, size, like.device, like.dtype)
        for letter, stride in self.strides.items():
            if "conv" in variant:
                read = size if variant == "mult-conv" else width // modules
                self.add_module(f"conv_{letter}", ModularConvolution(kernel, read, size, stride, like))
            else:
                self.add_module(f"mult_{letter}", Multiplicative(width, modules // stride, size, like.device, like.dtype))

    @property
    def columns(self) -> dict[str, int]:
        """Return the number of columns of each letter."""
        return {letter: self.module_count // stride * self.size for letter, stride in self.strides.items()}

    def forward(self, x: Tensor) -> Tensor:
        """Return the columns of a whole sequence: no tokens come before it, and every token may see every earlier one."""
        return self.project(x, F.pad(self.in_modules(x), (0, 0, 0, 0, self.kernel - 1, 0)), None)

    def in_modules(self, x: Tensor) -> Tensor:
        """Return the input of the convolutions: (batch, tokens, S, M)."""
        if self.variant == "mult-conv":
            return self.mult(x)  # type: ignore[no-any-return]
        return x.unflatten(-1, (self.module_count, -1)) if self.variant == "conv" else x.unsqueeze(-2)

    def project(self, x: Tensor, m: Tensor, gates: Tensor | None) -> Tensor:
        """Return the columns of all letters, from x and from m, the convolutions' input with F−1 earlier tokens."""
        if self.variant == "mult":
            parts = [self.get_submodule(f"mult_{letter}")(x) for letter in self.strides]
        else:
            inputs = {stride: convolution_inputs(m, gates, self.kernel, stride) for stride in set(self.strides.values())}
            parts = [self.get_submodule(f"conv_{letter}")(m, gates, inputs[stride]) for letter, stride in self.strides.items()]
        return torch.cat([part.flatten(-2) for part in parts], -1) if len(parts) > 1 else parts[0].flatten(-2)

    def extra_repr(self) -> str:
        return f"{self.variant}, {self.width} → {' + '.join(f'{n} {letter}' for letter, n in self.columns.items())}"
