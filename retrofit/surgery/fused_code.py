"""Code of torch that computes whole layers in one operation, past the modules they consist of: switched off around a new module.

In evaluation mode without gradients `nn.TransformerEncoder` gives its layers nested tensors, and `nn.TransformerEncoderLayer` reads
the weights of its children and calls none of them. Both look at a switch of their own first.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

SWITCHES = {"use_nested_tensor": False, "activation_relu_or_gelu": 0}  # an attribute, and its value where the code is not to run


def switched_on(model: nn.Module, inside: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """The modules of the model around `inside` whose fused code may run, each with its switch."""
    for owner in model.modules():
        names = [name for name in SWITCHES if owner.__dict__.get(name)]
        if names and owner is not inside and any(part is inside for part in owner.modules()):
            yield from ((owner, name) for name in names)
