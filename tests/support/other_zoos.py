"""Transformers as other libraries write them: torch's own modules, a GPT of one file, a vision transformer, layers in loops."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from support.functional_models import HEADS, HIDDEN, LAYER, VOCABULARY, WIDTH, Block, Blocks, Encoder, Functional, layer, weights

IMAGE, PATCH = 16, 4


class Seq2Seq(nn.Module):
    """`torch.nn.Transformer` between two embeddings and a head, its decoder causal."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.target_embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.transformer = nn.Transformer(WIDTH, HEADS, layers, layers, HIDDEN, dropout=0.1, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        ahead = torch.full((target.shape[1], target.shape[1]), float("-inf"), device=target.device).triu(1)
        states = self.transformer(self.embedding(source), self.target_embedding(target), tgt_mask=ahead, tgt_is_causal=True)
        logits: Tensor = self.head(states)
        return logits


class PreNormEncoder(nn.Module):
    """torch's encoder with the norms before the branches and learned positions, on (batch, T, d) or on (T, batch, d)."""

    def __init__(self, layers: int = 2, batch_first: bool = True) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(64, WIDTH)
        one = nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, 0.1, F.gelu, batch_first=batch_first, norm_first=True)
        self.encoder = nn.TransformerEncoder(one, layers, norm=nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.embedding(ids) + self.positions(positions)
        states = self.encoder(x) if self.batch_first else self.encoder(x.transpose(0, 1)).transpose(0, 1)
        logits: Tensor = self.head(states)
        return logits


class Decoder(nn.Module):
    """`torch.nn.TransformerDecoder` reading the states of another model."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        one = nn.TransformerDecoderLayer(WIDTH, HEADS, HIDDEN, dropout=0.0, batch_first=True, norm_first=True)
        self.decoder = nn.TransformerDecoder(one, layers, norm=nn.LayerNorm(WIDTH))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, states: Tensor) -> Tensor:
        ahead = torch.full((ids.shape[1], ids.shape[1]), float("-inf"), device=ids.device).triu(1)
        logits: Tensor = self.head(self.decoder(self.embedding(ids), states, tgt_mask=ahead, tgt_is_causal=True))
        return logits


class Looped(nn.Module):
    """The weights of all layers in one tensor of each kind, (layers, …), gone through in a loop."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.emb, self.norm = weights((VOCABULARY, WIDTH), (WIDTH,), seed=1)
        self.stacked = weights(*((layers, *shape) for shape in LAYER), seed=2)

    def forward(self, ids: Tensor) -> Tensor:
        x = F.embedding(ids, self.emb)
        for depth in range(len(self.stacked[0])):
            x = layer(x, [one[depth] for one in self.stacked], 0.0, self.training)
        return F.layer_norm(x, (WIDTH,), self.norm) @ self.emb.t()


class Recurrent(nn.Module):
    """One layer's weights at every depth, as in a Universal Transformer."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers = layers
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.block = Block(seed=3)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for _ in range(self.layers):
            x = self.block(x)
        logits: Tensor = self.head(x)
        return logits


class CausalAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.c_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.size()
        q, k, v = (one.view(batch, length, HEADS, -1).transpose(1, 2) for one in self.c_attn(x).split(width, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.c_proj(y.transpose(1, 2).contiguous().view(batch, length, width))
        return out


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_fc = nn.Linear(WIDTH, 4 * WIDTH)
        self.gelu = nn.GELU()
        self.c_proj = nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.dropout(self.c_proj(self.gelu(self.c_fc(x))))
        return out


class GptBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(WIDTH), CausalAttention()
        self.ln_2, self.mlp = nn.LayerNorm(WIDTH), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Gpt(nn.Module):
    """GPT in one file: modules in a dictionary, learned positions, the head tied to the embedding, a loss for targets."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCABULARY, WIDTH),
                "wpe": nn.Embedding(64, WIDTH),
                "drop": nn.Dropout(0.1),
                "h": nn.ModuleList(GptBlock() for _ in range(layers)),
                "ln_f": nn.LayerNorm(WIDTH),
            }
        )
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Any:
        positions = torch.arange(idx.size(1), device=idx.device)
        x = self.transformer["drop"](self.transformer["wte"](idx) + self.transformer["wpe"](positions))
        for block in self.transformer["h"]:
            x = block(x)
        logits = self.lm_head(self.transformer["ln_f"](x))
        loss = None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss


class LayerScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(0.5 + 0.1 * torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class VitAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).reshape(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4).unbind(0)
        weights = (q @ k.transpose(-2, -1) * (width // HEADS) ** -0.5).softmax(-1)
        out: Tensor = self.proj((weights @ v).transpose(1, 2).reshape(batch, length, width))
        return out


class VitBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn, self.ls1 = nn.LayerNorm(WIDTH), VitAttention(), LayerScale()
        self.norm2, self.ls2 = nn.LayerNorm(WIDTH), LayerScale()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.ls1(self.attn(self.norm1(x)))
        return x + self.ls2(self.mlp(self.norm2(x)))


class VisionTransformer(nn.Module):
    """A vision transformer as model zoos write it: patches by a convolution, a class token, layer scale, one head."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.cls_token = nn.Parameter(0.1 * torch.randn(1, 1, WIDTH))
        self.pos_embed = nn.Parameter(0.1 * torch.randn(1, 1 + (IMAGE // PATCH) ** 2, WIDTH))
        self.blocks = nn.Sequential(*(VitBlock() for _ in range(layers)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1) + self.pos_embed
        x = self.norm(self.blocks(x))
        logits: Tensor = self.head(x[:, 0])
        return logits


MODELS: dict[str, Callable[[], nn.Module]] = {
    "functional": Functional,
    "functional layers": Blocks,
    "looped": Looped,
    "recurrent": Recurrent,
    "nn.TransformerEncoder": Encoder,
    "nn.TransformerEncoder, norm first": PreNormEncoder,
    "nn.TransformerEncoder, tokens first": functools.partial(PreNormEncoder, batch_first=False),
    "nn.TransformerDecoder": Decoder,
    "nn.Transformer": Seq2Seq,
    "one-file GPT": Gpt,
    "vision transformer": VisionTransformer,
}


def built(kind: str) -> nn.Module:
    """The model, in evaluation mode, its weights always the same."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MODELS[kind]().eval()


def examples(kind: str, batch: int = 2, length: int = 11, seed: int = 0) -> dict[str, Tensor]:
    """Inputs of the model by argument name."""
    generator = torch.Generator().manual_seed(seed)

    def ids(size: int) -> Tensor:
        return torch.randint(VOCABULARY, (batch, size), generator=generator)

    if kind == "vision transformer":
        return {"x": torch.randn(batch, 3, IMAGE, IMAGE, generator=generator)}
    if kind == "nn.Transformer":
        return {"source": ids(length), "target": ids(length - 4)}
    if kind == "nn.TransformerDecoder":
        return {"ids": ids(length), "states": torch.randn(batch, 7, WIDTH, generator=generator)}
    return {"idx" if kind == "one-file GPT" else "ids": ids(length)}
