"""The reversible pass on whole models: what becomes a step and what does not, saving, generating, other passes inside."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support import own_models, tiny_models
from support.refusals import refused
from torch import Tensor, nn

import retrofit
from retrofit.errors import DoesNotFitError
from retrofit.passes import Reversible
from retrofit.passes.reversible import reference, reversible_layer
from retrofit.passes.reversible.repeated_call import KeptCache
from retrofit.passes.reversible.reversible_layer import ReversibleLayer, Step
from retrofit.rewriting import apply_reported

IDS = torch.randint(5, 40, (2, 9), generator=torch.Generator().manual_seed(0))


@functools.cache
def llama() -> Any:
    """A model that came through every check."""
    return retrofit.apply(tiny_models.llama(num_hidden_layers=4), Reversible(bits=3))


@functools.cache
def t5() -> Any:
    return retrofit.apply(tiny_models.t5(num_layers=2), Reversible(bits=3), verify=False)


def steps(loss: Tensor) -> list[list[int]]:
    """For every chain in the graph of a loss, the numbers of its steps."""
    pending, seen, chains = [loss.grad_fn], set(), {}
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        pending += [other for other, _ in node.next_functions]
        if hasattr(node, "chain"):
            chains.setdefault(id(node.chain), []).append(node.index)
    return [sorted(one) for one in chains.values()]


def loss_of(model: Any, **more: Any) -> Tensor:
    return model.train()(input_ids=IDS, labels=IDS, **more).loss  # type: ignore[no-any-return]


def test_every_stack_is_one_chain_and_evaluation_is_the_dense_models() -> None:
    assert steps(loss_of(llama())) == [[1, 2, 3, 4]]
    assert sorted(steps(loss_of(t5()))) == [[1, 2], [1, 2]]
    with torch.no_grad():
        for model, dense in ((llama(), tiny_models.llama(num_hidden_layers=4)), (t5(), tiny_models.t5(num_layers=2))):
            assert torch.equal(model.eval()(input_ids=IDS, labels=IDS).logits, dense(input_ids=IDS, labels=IDS).logits)
            assert torch.equal(model.generate(IDS, max_new_tokens=6), dense.generate(IDS, max_new_tokens=6))


def test_it_is_saved_and_loaded_as_a_model_of_transformers(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert retrofit.recipe(again) == (Reversible(bits=3),)
    torch.manual_seed(1)
    expected = loss_of(llama())
    torch.manual_seed(1)
    assert torch.equal(loss_of(again), expected)


def test_only_some_depths() -> None:
    model = retrofit.apply(tiny_models.llama(num_hidden_layers=5), "reversible(layers=0-1+3-4)", verify=False)
    assert [isinstance(layer, ReversibleLayer) for layer in model.model.layers] == [True, True, False, True, True]
    assert steps(loss_of(model)) == [[1, 2], [1, 2]]


@pytest.mark.parametrize("inside", ["shared-moe(experts=3, groups=0)", "sparse-ffn(sparsity=4)", "altup(k=2)"])
def test_other_methods_inside_have_the_gradients_of_the_formula(inside: str) -> None:
    """With noise on the decisions, and losses of their own that are recorded in the layers."""
    torch.manual_seed(0)
    model = retrofit.apply(tiny_models.llama(num_hidden_layers=3), inside, Reversible(bits=2), verify=False).double()
    sites = [
        type("Site", (), {"path": path, "module": one}) for path, one in model.named_modules() if isinstance(one, ReversibleLayer)
    ]
    observed: Any = type("Observed", (), {"sites": sites, "options": Reversible(bits=2)})

    def gradients() -> tuple[Tensor, list[Tensor | None]]:
        torch.manual_seed(7)
        loss = loss_of(model)
        return loss, list(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True))

    loss, found = gradients()
    assert [len(one) for one in steps(loss_of(model))] == [3]
    with reference.everything_kept(observed):
        expected_loss, expected = gradients()
    torch.testing.assert_close(loss, expected_loss)
    for (name, _), one, other in zip(model.named_parameters(), found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7, msg=lambda said, name=name: f"{name}: {said}")


class Odd(own_models.Own):
    """Two models in one: the first is not trained, and only a part of its stream gets to the other, which hides some outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.ModuleList(own_models.Block(24) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = self.a(x).flip(1)
            for block in self.before:
                y = block(y)
        z = self.a(x) + y.mean(1, keepdim=True)
        for block in self.b:
            z = block(z)
        hidden = torch.arange(50) < 3
        return self.c(z).masked_fill(hidden, float("-inf"))


def test_hidden_outputs_and_layers_that_are_run_without_gradients_pass_its_checks() -> None:
    model = retrofit.apply(Odd().eval(), "reversible(bits=3)")
    assert all(isinstance(layer, ReversibleLayer) for layer in (*model.before, *model.b))


# ── Refusals ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("specs", "why"),
    [
        (("reversible", "reversible"), "reversible already"),
        (("reversible", "altup(k=2)"), "whole layer"),
    ],
)
def test_what_cannot_be_reversible_is_refused_with_the_reason(specs: tuple[str, ...], why: str) -> None:
    model = copy.deepcopy(tiny_models.llama())
    with pytest.raises(DoesNotFitError) as caught:
        retrofit.apply(model, *specs, verify=False)
    assert why in str(caught.value) and caught.value.remedy
    assert not any(isinstance(one, ReversibleLayer) for one in model.modules())


class Block(nn.Module):
    """A layer that reads a table of the model's, and leaves its sum of squares to whoever wants it."""

    def __init__(self, owners: list[Any], seen: list[Tensor]) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.owners, self.seen = owners, seen

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one.unsqueeze(1) for one in self.qkv(x).chunk(3, -1))
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1))
        h = self.up(x).relu()
        for one in self.owners:
            h = h * one.scale
        self.seen.append(h.square().mean())
        return x + self.down(h)  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self, table: bool, seen: bool, between: bool = False) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(40, 8), nn.Linear(8, 40)
        self.scale = nn.Parameter(torch.ones(16))
        self.seen: list[Tensor] = []
        self.blocks = nn.ModuleList(Block([self] * table, self.seen) for _ in range(3))
        self.adds, self.between = seen, between

    def forward(self, ids: Tensor) -> Tensor:
        self.seen.clear()
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x) * 1.5 if self.between else block(x)
        return self.head(x) + sum(self.seen) if self.adds else self.head(x)  # type: ignore[no-any-return]


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("model", "why"),
    [
        (Model(True, False), "scale"),
        (Model(False, True), "a value inside it"),
        (Model(False, False, between=True), "changes the stream"),
    ],
)
def test_a_gradient_that_would_get_lost_is_found_in_the_data_flow(model: Any, why: str) -> None:
    if model.between:
        with refused(DoesNotFitError, why):
            retrofit.apply(model, Reversible(), example_inputs={"ids": IDS}, verify=False)
        return
    plan = Reversible().plan(retrofit.inspect(model, {"ids": IDS}))
    assert not plan.sites and len(plan.near_misses) == 3 and all(why in miss.why for miss in plan.near_misses)


class Remembering(Block):
    """Adds what it gave the last token in the call before."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        before = self.__dict__.get("before", torch.zeros(()))
        self.before = y[:, -1:]
        return y + before


class Sorting(Model):
    """Its first block only decides which tokens the others get doubled."""

    def forward(self, ids: Tensor) -> Tensor:
        first, *others = self.blocks
        x = self.embedding(ids)
        x = torch.where(self.head(first(x)).amax(-1, keepdim=True) > 0.5, 2 * x, x)
        for block in others:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def test_a_layer_that_keeps_something_of_its_tokens_in_its_module_is_no_step() -> None:
    model = Model(False, False)
    model.blocks[1] = Remembering([], model.seen)
    plan = Reversible().plan(retrofit.inspect(model, {"ids": IDS}))
    assert [site.name for site in plan.sites] == ["blocks.0", "blocks.2"]
    assert "before of blocks.1" in plan.near_misses[0].why


def test_a_layer_that_only_decides_something_is_no_step() -> None:
    plan = Reversible().plan(retrofit.inspect(Sorting(False, False), {"ids": IDS}))
    assert [site.name for site in plan.sites] == ["blocks.1", "blocks.2"]
    assert "no gradient" in plan.near_misses[0].why and plan.near_misses[0].name == "blocks.0"


class Stepping(Block):
    """Adds a state, and returns what it makes the next one of."""

    def forward(self, x: Tensor, state: list[Tensor]) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        y = super().forward(x + state[0].tanh())
        self.seen.clear()
        return y, y[:, -1:]


class States(Model):
    """Keeps the states of its layers in tensors of its own, which it writes to; it returns them with its logits."""

    def forward(self, ids: Tensor, use_cache: bool = True) -> dict[str, Any]:  # type: ignore[override]
        x = self.embedding(ids)
        states = [x.new_zeros(len(ids), 1, 8) for _ in self.blocks]
        for block, state in zip(self.blocks, states, strict=True):
            x, after = block(x, [state])
            if use_cache:
                state.copy_(after)
        return {"logits": self.head(x), "states": states if use_cache else None}


def test_of_arguments_that_the_model_writes_to_once_a_layer_has_run_a_step_keeps_a_copy() -> None:
    torch.manual_seed(0)
    model = States(False, False)
    model.blocks = nn.ModuleList(Stepping([], model.seen) for _ in range(3))
    report = apply_reported(model, Reversible(), example_inputs={"ids": IDS}).report
    assert report is not None and report["method"].status == "passed"
    assert [block.written for block in model.blocks] == [(1,)] * 3
    model.train()(IDS)["logits"].sum().backward()
    assert all(one.grad is not None for one in model.blocks[0].parameters())


def test_as_a_graph_such_layers_return_what_others_read() -> None:
    model: Any = retrofit.apply(Model(False, True), Reversible(), example_inputs={"ids": IDS}, verify=False)
    loss = model.train()(IDS).sum()
    assert steps(loss) == [[1, 2, 3]]
    loss.backward()
    assert all(one.grad is not None and one.grad.any() for name, one in model.named_parameters() if name != "scale")


# ── The check ────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def method(model: Any) -> Any:
    return next(check for check in retrofit.verify(model.eval()).checks if check.name == "method")


@pytest.mark.long
def test_the_check_method_finds_a_wrong_step_and_a_wrong_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    for layer in model.model.layers:
        layer.bits = 2
    try:
        assert "in training" in str(method(model))
    finally:
        for layer in model.model.layers:
            layer.bits = 3

    def without_the_past(ctx: Any, *gradients: Any) -> Any:
        found = list(backward(ctx, *gradients))
        return (*found[:4], None, *found[5:])

    backward = Step.backward
    with monkeypatch.context() as patch:
        patch.setattr(Step, "backward", staticmethod(without_the_past))
        assert "the gradient of" in str(method(model))
    with monkeypatch.context() as patch:
        patch.setattr(KeptCache, "copied", lambda self, values: self.cache)
        assert "in training" in str(method(model))
    with monkeypatch.context() as patch:
        patch.setattr(reversible_layer, "reversible_call", lambda layer, *_: layer(*_[-2], **_[-1]))
        assert "in training" in str(method(model))
