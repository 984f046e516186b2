"""The analysis of what a K·d-wide stream does to a model outside its layers: one small model for each decision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.own_models import Block, Own
from support.refusals import refused
from torch import Tensor, nn

import retrofit
from retrofit.errors import DoesNotFitError
from retrofit.passes.altup.widening import WideningPlan, WideProduct, WidthPropagation

WIDTH, DEPTH, TOKENS = 24, 3, 50


class Stem(nn.Module):
    """A module around what happens to an embedding: a norm and a projection, both d wide."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.project = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, y: Tensor) -> Tensor:
        return self.project(self.norm(y))


class Surrounded(Own):
    """`Own` with code before and after the layers that the test writes, and modules for it to call."""

    def __init__(
        self,
        before: Callable[[Any, Tensor, Tensor], Tensor] = lambda model, y, ids: y,
        after: Callable[[Any, Tensor], Tensor] = lambda model, y: model.c(y),
    ) -> None:
        super().__init__(WIDTH, DEPTH, TOKENS)
        self.before, self.after = before, after
        self.norm, self.stem, self.positions = nn.LayerNorm(WIDTH), Stem(), nn.Embedding(99, WIDTH)
        self.offsets = nn.Parameter(torch.randn(99, WIDTH))
        self.register_buffer("waves", torch.randn(99, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(self, self.a(x), x)
        for block in self.b:
            y = block(y)
        return self.after(self, y)


def widening(model: Own, wide_end: bool = True) -> WideningPlan:
    """The plan for the stack of `model`, the stream of which hops between two blocks."""
    anatomy = retrofit.inspect(model)
    (stack,) = anatomy.stacks
    look_ups = [node for node in anatomy.flow.nodes if node.name == anatomy.embedding.node]
    return WidthPropagation(anatomy, [stack], {stack.entry: [0, 1, 0, 0]}, look_ups, {stack.entry: wide_end}).run()


def outside(plan: WideningPlan) -> dict[str, Any]:
    """What the plan does beyond the token table, the head and the layers."""
    found = {"blockwise": plan.blockwise, "replicated": plan.replicated, "buffers": plan.buffers, "parameters": plan.parameters}
    return {name: value for name, value in found.items() if value}


def test_a_table_layers_and_a_head_are_all_there_is() -> None:
    plan = widening(Own(WIDTH, DEPTH, TOKENS))
    assert plan.tables == {"a.weight": ["a"]}
    assert plan.heads == {"c.weight": WideProduct(dim=1, path="c")}
    assert plan.narrow == {("b.0", 0): {}, ("b.1", 0): {}, ("b.2", 0): {}}
    assert outside(plan) == {}


LIFTED = {
    "a norm before the layers": ({"before": lambda m, y, ids: m.norm(y)}, {"norm": 0}),
    "a norm after them": ({"after": lambda m, y: m.c(m.norm(y))}, {"norm": 0}),
    "the outermost module": ({"before": lambda m, y, ids: m.stem(y)}, {"stem": 0}),
    "a keyword": ({"before": lambda m, y, ids: m.stem(y=y)}, {"stem": "y"}),
    "both ends": ({"before": lambda m, y, ids: m.stem(y), "after": lambda m, y: m.c(m.norm(y))}, {"stem": 0, "norm": 0}),
}


@pytest.mark.first(1)
@pytest.mark.parametrize("case", LIFTED)
def test_a_module_that_reads_across_the_width_is_applied_block_by_block(case: str) -> None:
    code, expected = LIFTED[case]
    assert outside(widening(Surrounded(**code))) == {"blockwise": expected}


def number(ids: Tensor) -> Tensor:
    return torch.arange(ids.shape[1], device=ids.device)


ADDED = {
    "a module's output": (lambda m, y, ids: y + m.positions(number(ids)), {"replicated": ["positions"]}),
    "a scaled output": (lambda m, y, ids: y + 0.5 * m.positions(number(ids))[None], {"replicated": ["positions"]}),
    "a parameter": (lambda m, y, ids: y + m.offsets[: ids.shape[1]], {"parameters": ["offsets"]}),
    "a parameter made as large as the stream": (lambda m, y, ids: y + m.offsets[0].expand_as(y), {"parameters": ["offsets"]}),
    "a buffer": (lambda m, y, ids: y + m.waves[: ids.shape[1]], {"buffers": ["waves"]}),
    "one number a token": (lambda m, y, ids: y * (ids > 0).unsqueeze(-1), {}),
    "the tokens in another order": (lambda m, y, ids: y.flip(1).roll(2, 1), {}),
    "a number": (lambda m, y, ids: y * WIDTH**0.5, {}),
}


@pytest.mark.first(5)
@pytest.mark.parametrize("case", ADDED)
def test_a_contribution_of_the_dense_width_is_replicated_where_it_comes_from(case: str) -> None:
    before, expected = ADDED[case]
    assert outside(widening(Surrounded(before))) == expected


def test_a_stream_that_leaves_its_stack_narrow_widens_nothing_after_it() -> None:
    plan = widening(Surrounded(after=lambda m, y: m.c(m.norm(y))), wide_end=False)
    assert plan.heads == {} and outside(plan) == {} and plan.tables == {"a.weight": ["a"]}


def test_a_table_that_is_read_as_a_parameter_is_repeated() -> None:
    model = Surrounded(lambda m, y, ids: y + m.positions.weight[: ids.shape[1]])
    ids = torch.arange(22).view(2, 11)
    retrofit.apply(model, "altup(k=2)", example_inputs=ids)  # verified: no noise is expected of it, as of a token table
    weight = model.positions.weight
    assert torch.equal(weight[:, :WIDTH], weight[:, WIDTH:])


class ReturningTheStream(Own):
    """Returns what the head reads as well, as an output of its own or in a list of all that the layers returned."""

    def __init__(self, in_a_list: bool) -> None:
        super().__init__(WIDTH, DEPTH, TOKENS)
        self.in_a_list = in_a_list

    def forward(self, x: Tensor) -> dict[str, Any]:
        states = [self.a(x)]
        for block in self.b:
            states.append(block(states[-1]))
        return {"logits": self.c(states[-1]), "hidden": states if self.in_a_list else states[-1]}


def test_an_output_that_would_be_wide_is_refused_by_name_and_what_is_listed_is_wide() -> None:
    with refused(DoesNotFitError, "hidden", code="width") as caught:
        widening(ReturningTheStream(in_a_list=False))
    assert "embedding=recycled" in caught.value.remedy
    assert widening(ReturningTheStream(in_a_list=True)).heads
    narrow = retrofit.apply(ReturningTheStream(in_a_list=False), "altup(k=2, embedding=recycled)")
    assert narrow(torch.arange(3)[None])["hidden"].shape == (1, 3, WIDTH)


class Valued(Own):
    """Returns a value of each token, and of each row, beside the logits."""

    def __init__(self) -> None:
        super().__init__(WIDTH, DEPTH, TOKENS)
        self.value, self.pool, self.of_row = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.a(x)
        for block in self.b:
            y = block(y)
        rows = self.of_row(torch.tanh(self.pool(y[:, 0])))
        return {"logits": self.c(y), "value": self.value(y).squeeze(-1), "rows": rows}


@pytest.mark.first(1)
@pytest.mark.parametrize("init", ["hop", "lockstep"])
def test_every_product_that_makes_an_output_reads_the_wide_stream(init: str) -> None:
    torch.manual_seed(0)
    model = Valued()
    plan, ids = widening(model), torch.arange(10).view(2, 5)
    assert plan.heads == {f"{name}.weight": WideProduct(dim=1, path=name) for name in ("c", "value", "of_row")}
    assert outside(plan) == {"blockwise": {"pool": 0}}
    dense = model(ids)
    wide = retrofit.apply(model, f"altup(k=2, init={init})")(ids)  # verified: lockstep is the dense model exactly
    assert {name: one.shape for name, one in wide.items()} == {name: one.shape for name, one in dense.items()}
    if init == "lockstep":
        torch.testing.assert_close(wide, dense)


class Remembering(Block):
    """A layer that reads the embedded tokens as well."""

    def forward(self, y: Tensor, embedded: Tensor | None = None) -> Tensor:
        return super().forward(y) + 0.1 * torch.tanh(embedded)


class Recalling(Own):
    def __init__(self) -> None:
        super().__init__(WIDTH, DEPTH, TOKENS)
        self.b = nn.ModuleList(Remembering(WIDTH) for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        embedded = y = self.a(x)
        for block in self.b:
            y = block(y, embedded=embedded)
        return self.c(y)


def test_another_wide_argument_of_a_layer_is_narrowed_to_its_own_home_block() -> None:
    narrow = widening(Recalling()).narrow
    assert narrow["b.1", 0] == narrow["b.2", 0] == {"embedded": 0}


REFUSED = {
    "flips the width": (lambda m, y, ids: y.flip(-1), "flip"),
    "rolls the width": (lambda m, y, ids: y.roll(3, -1), "roll"),
    "rolls everything": (lambda m, y, ids: y.roll(3), "roll"),
    "reorders the width": (lambda m, y, ids: y.index_select(-1, torch.arange(24).roll(1)), "index_select"),
    "takes some columns": (lambda m, y, ids: torch.cat([y[..., 12:], y[..., :12]], -1), "slice"),
    "a matrix in the model's own code": (lambda m, y, ids: y @ m.stem.project.weight, "matmul"),
    "positions read twice": (
        lambda m, y, ids: y + m.positions(number(ids)) + m.positions(number(ids)).flip(-1).mean(),
        "positions",
    ),
}


@pytest.mark.first(4)
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_decided_is_refused_with_the_reason(case: str) -> None:
    before, at_fault = REFUSED[case]
    with refused(DoesNotFitError, at_fault, code="width") as caught:
        widening(Surrounded(before))
    assert "embedding=recycled" in caught.value.remedy


def test_a_table_with_another_reader_is_refused() -> None:
    with refused(DoesNotFitError, "a.weight", code="width"):
        widening(Surrounded(after=lambda m, y: m.c(y) + m.a.weight.sum()))


class LastTokenAlone(Own):
    """Its head, tied to the embedding, reads the last token only."""

    def __init__(self, keeps_dimension: bool) -> None:
        super().__init__(WIDTH, DEPTH, TOKENS)
        self.c = nn.Linear(WIDTH, TOKENS, bias=False)
        self.c.weight, self.last = self.a.weight, [-1] if keeps_dimension else -1

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        for block in self.b:
            y = block(y)
        return self.c(y[:, self.last])


@pytest.mark.parametrize("spec", ["altup(k=2)", "altup(k=3, init=lockstep)"])
@pytest.mark.parametrize("keeps_dimension", [True, False])
def test_a_tied_head_that_reads_some_tokens_reads_the_wide_stream(keeps_dimension: bool, spec: str) -> None:
    torch.manual_seed(0)
    model = LastTokenAlone(keeps_dimension).eval()
    ids = torch.arange(22).view(2, 11)
    dense = model(ids)
    assert retrofit.apply(model, spec, verify=False) is model
    torch.testing.assert_close(model(ids), dense)
    assert model.a.weight.shape == (TOKENS, WIDTH * (3 if "k=3" in spec else 2))


class Seeing(Own):
    """`Own` that puts the projected parts of an image in the places of the last id."""

    def __init__(self, expands: bool) -> None:
        super().__init__(WIDTH, DEPTH, TOKENS)
        self.project, self.expands = nn.Linear(7, WIDTH), expands

    def forward(self, x: Tensor, image: Tensor | None = None) -> Tensor:
        y = self.a(x)
        if image is not None:
            places = (x == TOKENS - 1)[..., None]
            y = y.masked_scatter(places.expand_as(y) if self.expands else places, self.project(image))
        for block in self.b:
            y = block(y)
        logits: Tensor = self.c(y)
        return logits


def with_image() -> dict[str, Tensor]:
    ids = torch.arange(22).view(2, 11)
    ids[:, 3:7] = TOKENS - 1
    return {"x": ids, "image": torch.randn(2, 4, 7, generator=torch.Generator().manual_seed(0))}


@pytest.mark.parametrize("init", ["hop", "lockstep"])
@pytest.mark.parametrize("expands", [True, False])
def test_an_image_among_the_tokens_is_put_into_every_block(expands: bool, init: str) -> None:
    model, inputs = Seeing(expands), with_image()
    before, text = model(**inputs), model(inputs["x"])
    retrofit.apply(model, f"altup(k=2, init={init})", example_inputs=inputs, verify=False)
    torch.testing.assert_close(model(**inputs), before, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(model(inputs["x"]), text, atol=1e-5, rtol=1e-5)


def test_an_image_that_the_inputs_leave_out_is_no_reason_to_guess() -> None:
    model = Seeing(expands=True)
    with pytest.raises(DoesNotFitError) as caught:
        retrofit.apply(model, "altup(k=2)", verify=False)
    assert "image" in caught.value.what and "example_inputs=" in caught.value.remedy and "recycled" in caught.value.remedy
    planned = retrofit.plan_of(model, "altup(k=2)")
    assert not planned.fits and "example_inputs=" in planned.passes[0].plan.near_misses[-1].remedy
    assert retrofit.plan_of(model, "altup(k=2)", example_inputs=with_image()).fits
    before = model(**with_image())
    retrofit.apply(model, "altup(k=2, embedding=recycled)", verify=False)
    torch.testing.assert_close(model(**with_image()), before, atol=1e-5, rtol=1e-5)
