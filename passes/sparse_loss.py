"""Sparse loss: the output layer d → V becomes a multiplicative layer with S modules.

    logits[s·M + m] = Σ_i x_i D[i,s] E[i,m]        M = ⌈V/S⌉; of the S·M logits the first V are returned

Sparse is Enough in Scaling Transformers (NeurIPS 2021), §3.3.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from torch import Tensor, fx, nn

from retrofit.passes import sparse_loss_reference as once_more
from retrofit.passes.multiplicative import Multiplicative
from retrofit.passes.sparse_loss_fit import TOKENS, DenseHead, fit_to_data
from retrofit.sdk import (
    CAST,
    LAYOUT,
    Anatomy,
    Calibration,
    DoesNotFitError,
    Edit,
    MethodReference,
    ModuleReference,
    Pass,
    Plan,
    Site,
    op,
    option,
    set_aside,
    split_calibration,
    weight_product,
)


class MultiplicativeHead(nn.Module):
    """The logits of V tokens from a multiplicative layer with S·M ≥ V outputs, plus the dense head's bias.

    Some dense heads receive their weight as an argument beside the stream: it is not read.
    """

    def __init__(self, width: int, vocabulary: int, modules: int, bias: nn.Parameter | None, like: Tensor) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.product = Multiplicative(width, modules, module_size(vocabulary, modules), like.device, like.dtype)
        self.register_parameter("bias", bias)

    def forward(self, x: Tensor, *unread: Any, **named: Any) -> Tensor:
        logits = self.product(x).flatten(-2)[..., : self.vocabulary]
        return logits if self.bias is None else logits + self.bias

    @property
    def weight(self) -> Tensor:
        """The dense matrix of the same product, (V, d), computed from D and E: some models' code reads their head's weight."""
        return self.product.matrix().t()[: self.vocabulary]

    def fit(self, weight: Tensor) -> None:
        """D and E are those nearest to the dense head's weight, (V, d)."""
        modules, size = self.product.modules_and_size
        self.product.fit(nn.functional.pad(weight.t(), (0, modules * size - self.vocabulary)))

    def extra_repr(self) -> str:
        return f"vocabulary={self.vocabulary}"


def module_size(vocabulary: int, modules: int) -> int:
    """M = ⌈V/S⌉."""
    return -(-vocabulary // modules)


@dataclasses.dataclass(frozen=True)
class OutputHead:
    """The output head of a model: a module that multiplies by one weight, adds a bias if it has one, and does nothing else."""

    module: str  # path
    weight: str  # parameter name
    bias: str | None  # parameter name
    out_first: bool  # the weight is stored (V, d), as nn.Linear stores it, and not (d, V)
    width: int  # d
    vocabulary: int  # V


def find_output_head(anatomy: Anatomy) -> OutputHead:
    """The model's output head; raises `DoesNotFitError` where it has none, or none with a module of its own."""
    head, flow, program = anatomy.head, anatomy.flow, anatomy.program
    if head is None:
        raise DoesNotFitError(
            "sparse-loss: the model has no output head",
            why="its first output is not a product with a weight",
            remedy="apply it to a model with a language-modelling head",
            in_any_form=True,
        )
    node = anatomy.node(head.node)
    product = weight_product(node, flow)
    assert product is not None
    call = program.owner.get(node, program.root)
    inside = [one for one, owner in program.owner.items() if call.encloses(owner) and one in flow.depends]
    if sparse := [one.path for one in call.chain if isinstance(anatomy.model.get_submodule(one.path), MultiplicativeHead)]:
        raise DoesNotFitError(
            f"sparse-loss: the head {sparse[0]} is sparse already",
            why="another modules= needs the dense head",
            remedy="apply sparse-loss once, to a model that was not rewritten so",
            in_any_form=True,
        )
    operand = next((part for part in node.all_input_nodes if reads(part, head.parameter, anatomy)), None)
    if operand is None or not is_stored(operand, anatomy):
        parts = sorted(anatomy.flow.parameters_of([part for part in node.all_input_nodes if part not in flow.depends]))
        raise DoesNotFitError(
            f"sparse-loss: the weight of the head {call.path or 'in the code of the model'} is computed in every forward",
            why=f"from {' and '.join(parts)}; a weight that is stored is replaced, and this may be a sparse head already",
            remedy="apply sparse-loss once, to a model whose head is a module such as nn.Linear",
            in_any_form=True,
        )
    parameter_adds = [one for one in inside if op(one) == "add" and any(part in program.parameters for part in one.all_input_nodes)]
    other_work = [one for one in inside if one not in (node, *parameter_adds) and op(one) not in LAYOUT | CAST]
    read = {name for one in inside for part in one.all_input_nodes if (name := program.parameters.get(part)) is not None}
    biases = sorted(read - {head.parameter})
    shapes = [anatomy.model.get_parameter(name).shape for name in biases]
    fitting = [
        shape[-1:] == (product.out_features,) and shape.numel() == product.out_features for shape in shapes
    ]  # (V,) or (1, V)
    if not call.path or other_work or fitting not in ([], [True]):
        raise DoesNotFitError(
            f"sparse-loss: the head {head.parameter} is applied in the code of {call.path or 'the model'}",
            why="no module does only what the head does",
            remedy="give the head a module of its own, such as nn.Linear",
        )
    return OutputHead(
        module=head.name,
        weight=head.parameter,
        bias=biases[0] if biases else None,
        out_first=head.shape[0] == product.out_features,
        width=product.in_features,
        vocabulary=product.out_features,
    )


def reads(node: fx.Node, parameter: str, anatomy: Anatomy) -> bool:
    """Whether a value that depends on no input is the parameter, or computed from it."""
    if node in anatomy.flow.depends:
        return False
    return anatomy.program.parameters.get(node) == parameter or parameter in anatomy.flow.parameters_of([node])


def is_stored(node: fx.Node, anatomy: Anatomy) -> bool:
    """Whether a value is a parameter, in whatever layout and dtype."""
    while node not in anatomy.program.parameters and op(node) in LAYOUT | CAST and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node in anatomy.program.parameters


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparseLossPlan(Plan):
    """The output head that is replaced."""

    head: OutputHead
    tied: bool  # its weight is also the embedding's, which keeps it


@dataclasses.dataclass(frozen=True)
class SparseLoss(Pass[SparseLossPlan]):
    """Replace the output head with a multiplicative layer of S modules: d·(S + ⌈V/S⌉) parameters instead of d·V."""

    name: ClassVar[str] = "sparse-loss"
    summary: ClassVar[str] = "replace the output layer with a multiplicative one, which reads far fewer weights a token"
    paper: ClassVar[str] = "Sparse is Enough in Scaling Transformers, §3.3"
    calibrates: ClassVar[bool] = True
    rewrites: ClassVar[str] = "output head"
    places_by: ClassVar[tuple[str, ...]] = ()
    already: ClassVar[str] = "the head is sparse already"
    candidates: ClassVar[tuple[str, ...]] = ("modules=16", "modules=64")
    reference: ClassVar[MethodReference] = MethodReference(
        {MultiplicativeHead: ModuleReference(once_more.multiplicative_head)}, start=once_more.start
    )

    modules: int = option(16, "S, the number of modules the vocabulary is divided into", minimum=1, weights="within")

    @property
    def exact(self) -> bool:
        return False

    def plan(self, anatomy: Anatomy) -> SparseLossPlan:
        head = find_output_head(anatomy)
        if self.modules > head.vocabulary:
            raise DoesNotFitError(
                f"sparse-loss: modules={self.modules} is more than the head's {head.vocabulary} outputs",
                why="the outputs are divided among the modules, and some would have none",
                remedy=f"choose modules near the square root of the vocabulary, {round(head.vocabulary**0.5)}",
                in_any_form=True,
            )
        tied = any(head.weight in names for names in anatomy.tied)
        size = module_size(head.vocabulary, self.modules)
        count = Multiplicative.count(head.width, self.modules, size)
        untied = "the head was tied to the embedding: the embedding keeps the table, the head has weights of its own"
        return SparseLossPlan(
            sites=(Site(head.module, f"{head.width} → {head.vocabulary:,} by {self.modules} modules of {size:,}"),),
            new_parameters=count,
            formula=f"d·(S + ⌈V/S⌉) = {head.width}·({self.modules} + {size:,}) = {count:,}",
            notes=(untied,) if tied else (),
            head=head,
            tied=tied,
        )

    def apply(self, plan: SparseLossPlan, edit: Edit) -> None:
        head = plan.head
        weight = edit.model.get_parameter(head.weight)
        bias = None if head.bias is None else edit.model.get_parameter(head.bias)
        replacement = MultiplicativeHead(head.width, head.vocabulary, self.modules, bias, weight)
        replacement.fit(weight if head.out_first else weight.t())
        self.fit_to_data(replacement, head, weight if head.out_first else weight.t(), edit)
        edit.replace_module(head.module, replacement)
        if not plan.tied:
            edit.drop_parameter(weight, "a multiplicative layer fitted to it replaces it")

    def fit_to_data(self, replacement: MultiplicativeHead, head: OutputHead, weight: Tensor, edit: Edit) -> None:
        """With calibration data `replacement` predicts what the dense head, of `weight` (V, d), predicts; the distance is noted."""
        if edit.calibration is None or weight.is_meta:
            return
        x, held_out = (record_inputs(edit.model, head.module, part) for part in split_calibration(edit.calibration, TOKENS))
        bias = None if head.bias is None else edit.model.get_parameter(head.bias).detach().float().flatten()
        dense = DenseHead(weight.detach().t().float(), bias)
        before, after = fit_to_data(replacement.product, dense, x, held_out)
        edit.note(f"KL divergence from the dense head on tokens held out, in nats: {before:.3f} → {after:.3f}")


def record_inputs(model: nn.Module, path: str, calibration: Calibration) -> Tensor:
    """What the module at `path` receives on calibration data, in float32: (tokens, d)."""
    rows: list[Tensor] = []
    calibration.observe(model, {path: lambda x: rows.append(set_aside(x.float()))})
    return torch.cat(rows)


__all__ = ["MultiplicativeHead", "SparseLoss"]
