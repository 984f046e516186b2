"""A transformer that is one function over a list of tensors, widened by AltUp: no module of it is a layer, and none has to be.

    python examples/functional_model.py

The graph says where the layers, attentions and feed-forwards are; each becomes a module of an FX graph module, on the model's own
parameters. That is widened with every check and learns a sequence by heart; the model itself stays as it was.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import retrofit
from retrofit.passes import AltUp

VOCABULARY, WIDTH, HEADS, LAYERS, STEPS = 64, 32, 4, 3, 60


class OneFunction(nn.Module):
    """Every weight in one list; the layers are a loop over slices of it."""

    def __init__(self) -> None:
        super().__init__()
        layer = [(WIDTH,), (3 * WIDTH, WIDTH), (WIDTH, WIDTH), (WIDTH,), (4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH)]
        shapes = [(VOCABULARY, WIDTH), (32, WIDTH), *LAYERS * layer, (WIDTH,), (VOCABULARY, WIDTH)]
        self.weights = nn.ParameterList(torch.ones(shape) if len(shape) == 1 else 0.1 * torch.randn(shape) for shape in shapes)

    def forward(self, ids: Tensor) -> Tensor:
        tokens, positions, *layers, norm, head = self.weights
        x = F.embedding(ids, tokens) + positions[: ids.shape[1]]
        for first in range(0, len(layers), 6):
            norm1, qkv, out, norm2, up, down = layers[first : first + 6]
            q, k, v = (F.layer_norm(x, (WIDTH,), norm1) @ qkv.t()).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
            x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2) @ out.t()
            x = x + F.gelu(F.layer_norm(x, (WIDTH,), norm2) @ up.t()) @ down.t()
        return F.layer_norm(x, (WIDTH,), norm) @ head.t()


def main() -> None:
    torch.manual_seed(0)
    model, text = OneFunction().eval(), torch.randint(VOCABULARY, (1, 24))
    wide = retrofit.apply(model, AltUp(k=2), example_inputs=text)
    print(retrofit.inspect(wide))
    print("parameters of layer 0:", ", ".join(name for name, _ in wide.named_parameters() if name.startswith("layers.0.")))
    dense = model(text)
    print(f"farthest from the dense logits: {(wide(text) - dense).abs().max():.1e}")

    optimizer = torch.optim.AdamW(wide.parameters(), lr=3e-3)
    for step in range(STEPS):
        loss = F.cross_entropy(wide(text)[:, :-1].flatten(0, 1), text[:, 1:].flatten())
        if step in (0, STEPS - 1):
            print(f"step {step}: loss {loss:.4f}")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"{int((wide(text).argmax(-1)[:, :-1] == text[:, 1:]).sum())} of {text.shape[1] - 1} tokens right")


if __name__ == "__main__":
    main()
