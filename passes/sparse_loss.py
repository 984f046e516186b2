"""Sparse loss: the output layer d → V becomes a multiplicative layer with S modules.

    logits[s·M + m] = Σ_i x_i D[i,s] E[i,m]        M = ⌈V/S⌉, the places beyond V are cut off

Sparse is Enough in Scaling Transformers (NeurIPS 2021), §3.3.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from torch import Tensor, nn

from retrofit.passes.multiplicative import Multiplicative
from retrofit.sdk import CAST, LAYOUT, Anatomy, DoesNotFitError, Edit, Pass, Rewrite, Site, op, option, weight_product


class MultiplicativeHead(nn.Module):
    """The logits of V tokens from a multiplicative layer whose S·M places are at least as many, and the dense head's bias."""

    def __init__(self, width: int, vocabulary: int, modules: int, bias: nn.Parameter | None, like: Tensor) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.product = Multiplicative(width, modules, -(-vocabulary // modules), like.device, like.dtype)
        self.register_parameter("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.product(x).flatten(-2)[..., : self.vocabulary]
        return logits if self.bias is None else logits + self.bias

    @property
    def weight(self) -> Tensor:
        """The dense matrix that the head stands for, (V, d), made anew: some models ask their head for it."""
        return self.product.matrix().t()[: self.vocabulary]

    def fit(self, weight: Tensor) -> None:
        """The nearest layer to the dense head's weight, (V, d)."""
        modules, size = self.product.modules_and_size
        self.product.fit(nn.functional.pad(weight.t(), (0, modules * size - self.vocabulary)))

    def extra_repr(self) -> str:
        return f"vocabulary={self.vocabulary}"


@dataclasses.dataclass(frozen=True)
class SparseLoss(Pass):
    """Replace the output head with a multiplicative layer of S modules: d·(S + ⌈V/S⌉) parameters instead of d·V."""

    name: ClassVar[str] = "sparse-loss"
    summary: ClassVar[str] = "replace the output layer with a multiplicative one, which reads far fewer weights a token"
    paper: ClassVar[str] = "Sparse is Enough in Scaling Transformers, §3.3"

    modules: int = option(16, "S, the number of modules the vocabulary is divided into", minimum=1)

    @property
    def exact(self) -> bool:
        return False

    def rewrite(self, anatomy: Anatomy, edit: Edit) -> Rewrite:
        head, model = anatomy.head, anatomy.model
        if head is None:
            raise DoesNotFitError(
                "sparse-loss: the model has no output head",
                why="no product with a weight makes its first output",
                remedy="apply it to a model with a language-modelling head",
            )
        weight = model.get_parameter(head.parameter)
        bias = self.bias_of(anatomy)
        vocabulary, width = weight.shape if self.is_out_first(anatomy) else weight.shape[::-1]
        if self.modules > vocabulary:
            raise DoesNotFitError(
                f"sparse-loss: modules={self.modules} is more than the head's {vocabulary} outputs",
                remedy=f"choose modules near the square root of the vocabulary, {round(vocabulary**0.5)}",
            )
        made = MultiplicativeHead(width, vocabulary, self.modules, bias, weight)
        made.fit(weight if self.is_out_first(anatomy) else weight.t())
        tied = any(head.parameter in names for names in anatomy.tied)
        edit.replace_module(head.name, made)
        if not tied:
            edit.drop_parameter(weight, "a multiplicative layer fitted to it stands in its place")
        size = made.product.modules_and_size[1]
        count = Multiplicative.count(width, self.modules, size)
        notes = (
            ("the head was tied to the embedding: the embedding keeps the table, the head has weights of its own",) if tied else ()
        )
        return Rewrite(
            self.spec(),
            False,
            (Site(head.name, f"{width} → {vocabulary:,} by {self.modules} modules of {size:,}"),),
            new_parameters=count,
            formula=f"d·(S + ⌈V/S⌉) = {width}·({self.modules} + {size:,}) = {count:,}",
            notes=notes,
        )

    @staticmethod
    def product(anatomy: Anatomy) -> Any:
        assert anatomy.head is not None
        nodes = anatomy.flow.named
        return nodes[anatomy.head.node]

    def is_out_first(self, anatomy: Anatomy) -> bool:
        """Whether the head's weight is stored (V, d)."""
        assert anatomy.head is not None
        return anatomy.head.shape[0] == self.columns_of(anatomy)

    def columns_of(self, anatomy: Anatomy) -> int:
        """V."""
        found = weight_product(self.product(anatomy), anatomy.flow)
        assert found is not None
        return found.out_features

    def bias_of(self, anatomy: Anatomy) -> nn.Parameter | None:
        """The head's bias; raises `DoesNotFitError` where the head is no module of its own."""
        assert anatomy.head is not None
        node, program, flow = self.product(anatomy), anatomy.program, anatomy.flow
        call = program.owner.get(node, program.root)
        inside = [one for one, owner in program.owner.items() if call.encloses(owner) and one in flow.depends]
        added = [one for one in inside if op(one) == "add" and any(part in program.parameters for part in one.all_input_nodes)]
        work = [one for one in inside if one not in (node, *added) and op(one) not in LAYOUT | CAST]
        read = {name for one in inside for part in one.all_input_nodes if (name := program.parameters.get(part)) is not None}
        others = [anatomy.model.get_parameter(name) for name in sorted(read - {anatomy.head.parameter})]
        columns = self.columns_of(anatomy)
        alone = not others or (len(others) == 1 and others[0].numel() == others[0].shape[-1] == columns)  # (V,) or (1, V)
        if not call.path or work or not alone:
            raise DoesNotFitError(
                f"sparse-loss: the head {anatomy.head.parameter} is applied in the code of {call.path or 'the model'}",
                why="there is no module that is nothing but the head",
                remedy="give the head a module of its own, such as nn.Linear",
            )
        return others[0] if others else None


__all__ = ["MultiplicativeHead", "SparseLoss"]
