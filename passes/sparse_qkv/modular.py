"""A projection of a few weights: a multiplicative layer, a convolution over tokens and modules, or one after the other.

    mult:  m[t,s,n] = Σ_i x[t,i] D[i,s] E[i,n]                              S modules of size M, shared by all the convolutions
    conv:  y[t,s,n] = b[n] + Σ_τ g[t,τ] Σ_o Σ_m m[t−τ, r·s+o−⌊F/2⌋, m] W[o,τ,m,n]      o, τ = 0 … F−1     W: `weight`, b: `bias`

The convolution looks at F modules of the last F tokens; beyond the first token and the outermost modules there are zeros. g[t,τ] is
1 where token t may see token t−τ, else 0; g[t,0] = 1. With a stride r it gives S/r modules: the key or value heads of a model in
which r query heads share one, each read around the first module of its group.

Sparse is Enough in Scaling Transformers (NeurIPS 2021), §3.2.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from retrofit.passes.multiplicative import Multiplicative

FEW = 8  # up to so many tokens in a row each one's F·F neighbours are laid side by side; for more, memory counts


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
        """Noise under which y has the variance of m."""
        kernel, _, size, _ = self.weight.shape
        self.weight.normal_(std=(kernel * kernel * size) ** -0.5)
        self.bias.zero_()

    def forward(self, m: Tensor, gates: Tensor | None, places: Tensor | None = None) -> Tensor:
        """`m` begins with the F−1 tokens before the first; `gates`, (batch or 1, tokens, F−1), are g[t,1] …; None: all ones.

        `places` is what `read_places` gives, where several convolutions read the same.
        """
        places = read_places(m, gates, self.kernel, self.stride) if places is None else places
        tokens = m.shape[1] - self.kernel + 1
        y = self.at_once(places) if tokens <= FEW else self.tap_by_tap(places, gates)
        return y + self.bias.to(y.dtype)

    def at_once(self, places: Tensor) -> Tensor:
        """One product for all F·F places that a module is made of."""
        return places @ self.weight.flatten(0, 2).to(places.dtype)

    def tap_by_tap(self, places: Tensor, gates: Tensor | None) -> Tensor:
        """What every token adds to itself and to the F−1 after it: backward keeps F·S·M numbers a token, not F·F·S·M."""
        added = places @ self.weight.transpose(1, 2).flatten(2).flatten(0, 1).to(places.dtype)
        taps = added.unflatten(-1, (self.kernel, -1)).unbind(-2)
        y = back(taps[0], 0, self.kernel)
        for tau in range(1, self.kernel):
            y = y + gated(back(taps[tau], tau, self.kernel), gates, tau)
        return y

    def extra_repr(self) -> str:
        return f"kernel={self.kernel}, size={self.weight.shape[2]}, filters={self.weight.shape[3]}, stride={self.stride}"

    @staticmethod
    def count(kernel: int, size: int, filters: int) -> int:
        """How many parameters the layer has: F²M² + M where it keeps the size."""
        return kernel * kernel * size * filters + filters


def read_places(m: Tensor, gates: Tensor | None, kernel: int, stride: int) -> Tensor:
    """What a convolution multiplies its weight with.

    For few tokens all that a module sees, F·F places by o, then τ: (batch, tokens, S/r, F·F·M). For many what it sees of one token,
    of those before the first as well: (batch, F−1+tokens, S/r, F·M).
    """
    tokens = m.shape[1] - kernel + 1
    if tokens > FEW:
        return neighbours(m, kernel, stride)
    taps = [gated(back(m, tau, kernel), gates, tau) for tau in range(kernel)]
    return neighbours(torch.cat(taps, -1), kernel, stride)


def back(values: Tensor, tau: int, kernel: int) -> Tensor:
    """The values τ tokens back, for each token that has F−1 before it."""
    return values.narrow(1, kernel - 1 - tau, values.shape[1] - kernel + 1)


def neighbours(m: Tensor, kernel: int, stride: int) -> Tensor:
    """The `kernel` modules around every `stride`-th one, side by side: (…, S, M) gives (…, S/stride, kernel·M)."""
    modules, before = m.shape[-2], kernel // 2
    if kernel == 1 and stride == 1:
        return m
    padded = F.pad(m, (0, 0, before, kernel - 1 - before))
    return torch.cat([padded[..., o : o + modules : stride, :] for o in range(kernel)], -1)


def gated(values: Tensor, gates: Tensor | None, tau: int) -> Tensor:
    """`values`, (batch, tokens, …), of τ tokens back, zero where they may not be seen."""
    if gates is None or tau == 0:
        return values
    return values * gates[..., tau - 1].to(values.dtype).view(*gates.shape[:-1], *(1 for _ in values.shape[2:]))


class ModularProjection(nn.Module):
    """x, (batch, tokens, d), to the columns of each letter of `strides` side by side: q, k and v of an attention, say.

    `variant` says by which layers. The shared multiplicative layer is `mult`, the convolutions are `conv_q`, …; without
    convolutions each letter has a multiplicative layer of its own, `mult_q`, …. A letter's S/r modules lie one after another.
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
        """How many columns each letter has."""
        return {letter: self.module_count // stride * self.size for letter, stride in self.strides.items()}

    def forward(self, x: Tensor) -> Tensor:
        """Of a whole sequence: nothing came before it, and every token may see every earlier one."""
        return self.joined(x, F.pad(self.in_modules(x), (0, 0, 0, 0, self.kernel - 1, 0)), None)

    def in_modules(self, x: Tensor) -> Tensor:
        """What the convolutions read: (batch, tokens, S, M)."""
        if self.variant == "mult-conv":
            return self.mult(x)  # type: ignore[no-any-return]
        return x.unflatten(-1, (self.module_count, -1)) if self.variant == "conv" else x.unsqueeze(-2)

    def joined(self, x: Tensor, m: Tensor, gates: Tensor | None) -> Tensor:
        """The columns of all letters, from x and from what the convolutions read, F−1 earlier tokens included."""
        if self.variant == "mult":
            parts = [self.get_submodule(f"mult_{letter}")(x) for letter in self.strides]
        else:
            places = {stride: read_places(m, gates, self.kernel, stride) for stride in set(self.strides.values())}
            parts = [self.get_submodule(f"conv_{letter}")(m, gates, places[stride]) for letter, stride in self.strides.items()]
        return torch.cat([part.flatten(-2) for part in parts], -1) if len(parts) > 1 else parts[0].flatten(-2)

    def extra_repr(self) -> str:
        return f"{self.variant}, {self.width} → {' + '.join(f'{n} {letter}' for letter, n in self.columns.items())}"

    def count(self, *, mult: bool = True) -> int:
        """How many parameters there are by the formula, mult d·(S + M), conv F²M² + M each; one `mult` counts once."""
        if self.variant == "mult":
            return sum(Multiplicative.count(self.width, self.module_count // stride, self.size) for stride in self.strides.values())
        read = self.size if self.variant == "mult-conv" else self.width // self.module_count
        shared = Multiplicative.count(self.width, self.module_count, self.size) if self.variant == "mult-conv" and mult else 0
        return shared + len(self.strides) * ModularConvolution.count(self.kernel, read, self.size)
