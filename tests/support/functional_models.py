"""Transformers whose parts are no modules: one function over a list of weights, and layers whose insides are code."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY, WIDTH, HIDDEN, HEADS = 61, 32, 96, 4


def weights(*shapes: tuple[int, ...], seed: int) -> nn.ParameterList:
    generator = torch.Generator().manual_seed(seed)
    return nn.ParameterList(nn.Parameter(0.2 * torch.randn(*shape, generator=generator)) for shape in shapes)


LAYER = (
    (WIDTH,),
    (3 * WIDTH, WIDTH),
    (WIDTH, WIDTH),
    (WIDTH,),
    (HIDDEN, WIDTH),
    (HIDDEN,),
    (WIDTH, HIDDEN),
    (WIDTH,),
)


def layer(x: Tensor, w: list[Tensor], p: float, training: bool) -> Tensor:
    """A causal pre-norm layer, (batch, length, d) to the same."""
    batch, length, _ = x.shape
    y = F.layer_norm(x, (WIDTH,), w[0])
    q, k, v = (y @ w[1].t()).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p if training else 0.0)
    x = x + F.dropout(attended.transpose(1, 2).reshape(batch, length, -1) @ w[2].t(), p, training)
    y = F.layer_norm(x, (WIDTH,), w[3])
    return x + (F.gelu(y @ w[4].t() + w[5]) @ w[6].t() + w[7])


class Functional(nn.Module):
    """One forward over a list of weight tensors."""

    def __init__(self, layers: int = 3, p: float = 0.0) -> None:
        super().__init__()
        self.p = p
        self.emb, self.pos, self.norm, self.out = weights((VOCABULARY, WIDTH), (64, WIDTH), (WIDTH,), (VOCABULARY, WIDTH), seed=1)
        self.w = weights(*LAYER * layers, seed=2)

    def forward(self, ids: Tensor) -> Tensor:
        x = F.embedding(ids, self.emb) + self.pos[: ids.shape[1]]
        for first in range(0, len(self.w), len(LAYER)):
            x = layer(x, list(self.w)[first : first + len(LAYER)], self.p, self.training)
        return F.layer_norm(x, (WIDTH,), self.norm) @ self.out.t()


class Recurrent(Functional):
    """One layer's weights at every depth."""

    def __init__(self, depths: int = 3) -> None:
        super().__init__(layers=1)
        self.depths = depths

    def forward(self, ids: Tensor) -> Tensor:
        x = F.embedding(ids, self.emb) + self.pos[: ids.shape[1]]
        for _ in range(self.depths):
            x = layer(x, list(self.w), self.p, self.training)
        return F.layer_norm(x, (WIDTH,), self.norm) @ self.out.t()


class Flattened(Functional):
    """The same with the tokens laid one after another wherever they are multiplied by a matrix, as exporters write it."""

    def forward(self, ids: Tensor) -> Tensor:
        batch, length = ids.shape

        def times(x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
            return F.linear(x.reshape(-1, x.shape[-1]), matrix, bias).view(batch, length, -1)

        x = F.embedding(ids, self.emb) + self.pos[:length]
        for first in range(0, len(self.w), len(LAYER)):
            w = list(self.w)[first : first + len(LAYER)]
            q, k, v = times(F.layer_norm(x, (WIDTH,), w[0]), w[1]).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
            x = x + times(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2), w[2])
            x = x + times(F.gelu(times(F.layer_norm(x, (WIDTH,), w[3]), w[4], w[5])), w[6], w[7])
        return times(F.layer_norm(x, (WIDTH,), self.norm), self.out)


class Block(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.w = weights(*LAYER, seed=seed)

    def forward(self, x: Tensor) -> Tensor:
        return layer(x, list(self.w), 0.0, self.training)


class Blocks(nn.Module):
    """Layers are modules; what is in them is code."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block(seed) for seed in range(layers))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for one in self.layers:
            x = one(x)
        logits: Tensor = self.head(x)
        return logits


class Encoder(nn.Module):
    """torch's own encoder between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        one = nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, dropout=0.1, batch_first=True, activation="gelu")
        self.encoder = nn.TransformerEncoder(one, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.encoder(self.embedding(ids)))
        return logits
