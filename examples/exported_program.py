"""From `.pt2` file to `.pt2` file: a model of which there is only what `torch.export.save` wrote.

    python examples/exported_program.py

torch's own encoder of random weights stands for the model somebody has as `model.pt2`. It comes in as a graph module whose weights
are parameters, gets controller-sparse feed-forwards, is checked, trained for a few steps, and goes out for anybody with torch.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import retrofit
from retrofit.passes import SparseFFN

VOCABULARY, WIDTH, STEPS = 64, 32, 40


class Tagger(nn.Module):
    """An encoder that says of each token whether it is even."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, ids: Tensor) -> Tensor:
        tags: Tensor = self.head(self.encoder(self.embedding(ids)))
        return tags


def somebodys_file(path: Path) -> Path:
    """Any batch and length: what is exported with fixed sizes has them for good."""
    free = {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}
    ids = torch.randint(VOCABULARY, (2, 11))
    torch.export.save(torch.export.export(Tagger().eval(), (ids,), dynamic_shapes=(free,), strict=False), path)
    return path


def main() -> None:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        model = retrofit.load(somebodys_file(Path(folder) / "model.pt2"))
        print(retrofit.inspect(model))
        model = retrofit.apply(model, SparseFFN(sparsity=16))

        optimizer = torch.optim.AdamW(model.train().parameters(), lr=3e-3)
        for step in range(STEPS):
            ids = torch.randint(VOCABULARY, (16, 24))
            loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten() % 2)
            if step in (0, STEPS - 1):
                print(f"step {step}: loss {loss:.4f}")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        retrofit.save(model.eval(), Path(folder) / "sparse.pt2")
        alone = torch.export.load(Path(folder) / "sparse.pt2").module()  # torch needs nothing of retrofit to run it
        ids = torch.randint(VOCABULARY, (3, 40))
        print(f"torch alone: {(alone(ids=ids).argmax(-1) == ids % 2).float().mean():.0%} of 120 tags right")
        again = retrofit.load(Path(folder) / "sparse.pt2")
        print(f"read again: {retrofit.recipe(again)}, the same bits: {torch.equal(again(ids), model(ids))}")


if __name__ == "__main__":
    main()
