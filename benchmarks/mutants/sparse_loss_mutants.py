"""Faults of sparse-loss and of the multiplicative layer that it shares with sparse-qkv."""

from __future__ import annotations

import functools

from mutant import Mutant, on

MODELS = "gpt2 llama t5 bert"
HEAD = on(MODELS, "sparse-loss(modules=4)")

head = functools.partial(Mutant, "sparse-loss", "passes/sparse_loss.py", trials=HEAD)
product = functools.partial(Mutant, "sparse-loss", "passes/multiplicative.py", trials=HEAD)

MUTANTS = [
    head(
        "the padded logits surface",
        ".flatten(-2)[..., : self.vocabulary]\n        return logits if",
        ".flatten(-2)\n        return logits if",
        trials=on("gpt2 llama t5", "sparse-loss(modules=4)"),
    ),
    head(
        "the padding is cut off at the beginning, so that every logit is another token's",
        "self.product(x).flatten(-2)[..., : self.vocabulary]",
        "self.product(x).flatten(-2)[..., -self.vocabulary :]",
    ),
    head(
        "logits come module by module within a position, not position by position within a module",
        "self.product(x).flatten(-2)",
        "self.product(x).transpose(-1, -2).flatten(-2)",
    ),
    head(
        "the head's bias is left out",
        "return logits if self.bias is None else logits + self.bias",
        "return logits",
        trials=on("bert", "sparse-loss(modules=4)"),
    ),
    head(
        "the head's bias is taken away",
        "None else logits + self.bias\n",
        "None else logits - self.bias\n",
        trials=on("bert", "sparse-loss(modules=4)"),
    ),
    head(
        "the logits are scaled by 1/√d",
        "return logits if self.bias is None",
        "logits = logits * x.shape[-1] ** -0.5\n        return logits if self.bias is None",
    ),
    head(
        "the fit to the dense head is never made",
        "        replacement.fit(weight if head.out_first else weight.t())\n",
        "",
    ),
    head(
        "the fit counts the padding at the beginning",
        "nn.functional.pad(weight.t(), (0, modules * size - self.vocabulary))",
        "nn.functional.pad(weight.t(), (modules * size - self.vocabulary, 0))",
    ),
    product(
        "for few tokens the modules have each other's weights",
        "(x.unsqueeze(-2) * d.t()) @ e",
        "(x.unsqueeze(-2) * d.t().flip(0)) @ e",
    ),
    product(
        "for many tokens the positions within a module are in inverse order",
        "return (x @ self.matrix().to(x.dtype)).unflatten(-1, self.modules_and_size)",
        "return (x @ self.matrix().to(x.dtype)).unflatten(-1, self.modules_and_size).flip(-1)",
    ),
    product(
        "the dense matrix is D + E, where it should be their product",
        "(d.unsqueeze(-1) * e.unsqueeze(-2)).flatten(1)",
        "(d.unsqueeze(-1) + e.unsqueeze(-2)).flatten(1)",
    ),
    product(
        "E gets no gradient for many tokens",
        "(d.unsqueeze(-1) * e.unsqueeze(-2)).flatten(1)",
        "(d.unsqueeze(-1) * e.detach().unsqueeze(-2)).flatten(1)",
    ),
    product(
        "the fit leaves out the singular value's second root",
        "return (u * root).squeeze(-1).to(",
        "return u.squeeze(-1).to(",
    ),
    product(
        "the fit takes the direction in which the rows differ least",
        "eigenvectors[..., -1:]",
        "eigenvectors[..., :1]",
    ),
    product(
        "the fit takes the eigenvectors of the absolute values",
        "wide @ wide.mT",
        "wide.abs() @ wide.abs().mT",
    ),
    product(
        "D is fitted with the opposite sign",
        "self.d[part : part + ROWS].copy_(d)",
        "self.d[part : part + ROWS].copy_(-d)",
    ),
]
