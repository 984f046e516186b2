"""Masked layers of which columns alone are read: the same as the dense product of the masked input, wherever that is possible."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support import tiny_models, zoo
from torch import Tensor, nn
from torch._inductor.codecache import CppCodeCache

import retrofit
from retrofit.files.memory import mapped_weights
from retrofit.numerics.agreement import Choices
from retrofit.passes import compiled_products
from retrofit.passes.activation_sparsity import masked_products
from retrofit.passes.activation_sparsity.activation_sparsity import MaskedProjection
from retrofit.passes.activation_sparsity.masked_products import FEW, UNCOMPILED, ActivationMask, lay_out
from retrofit.passes.compiled_products import compiled_functions, sums_of_columns

IN, OUT = 24, 40
CLOSE: dict[torch.dtype, dict[str, Any]] = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2},
}
MOST = FEW["cpu"]
DTYPES = pytest.mark.parametrize("dtype", list(UNCOMPILED), ids=["float32", "bfloat16"])


@pytest.fixture(autouse=True)
def every_size(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(masked_products.SMALLEST, "cpu", 1)
    monkeypatch.setattr(masked_products, "UNCOMPILED", dict.fromkeys(UNCOMPILED, 1))
    yield
    compiled_functions.cache_clear()  # of `no_compiler`


@pytest.fixture(params=[True, False], ids=["compiled", "no compiler"])
def compiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if not request.param:
        no_compiler(monkeypatch)
    return bool(request.param)


def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(source: str) -> Any:
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr(CppCodeCache, "load", missing)
    compiled_functions.cache_clear()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of tokens for which columns alone were read."""
    found: list[int] = []

    def counted(x: Tensor, columns: Tensor, threshold: Tensor) -> Tensor:
        found.append(len(x))
        return sums_of_columns(x, columns, threshold)

    monkeypatch.setattr(masked_products, "sums_of_columns", counted)
    return found


def masked(layer: nn.Module | None = None, threshold: float = 0.7, dtype: torch.dtype = torch.float32) -> MaskedProjection:
    torch.manual_seed(0)
    layer = (layer or nn.Linear(IN, OUT)).to(dtype)
    module = MaskedProjection(layer, (0, None), ActivationMask(next(layer.parameters()))).eval()
    module.mask.threshold.fill_(threshold)
    return module


def tokens(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, IN, generator=torch.Generator().manual_seed(1)).to(dtype)


def expected(module: MaskedProjection, x: Tensor) -> Tensor:
    """The plain formula, in float64."""
    kept = torch.where(x.abs() < module.mask.threshold, torch.zeros_like(x), x).double()
    layer: Any = module.layer
    weight = layer.weight if isinstance(layer, transformers.pytorch_utils.Conv1D) else layer.weight.t()
    y = kept @ weight.double()
    return (y if layer.bias is None else y + layer.bias.double()).to(x.dtype)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["linear", "no bias", "conv1d"])
@DTYPES
def test_few_tokens_read_columns(kind: str, dtype: torch.dtype, calls: list[int], compiles: bool) -> None:
    assert bool(compiled_functions()) == compiles
    layers = {"linear": nn.Linear(IN, OUT), "no bias": nn.Linear(IN, OUT, bias=False)}
    module = masked(layers.get(kind) or transformers.pytorch_utils.Conv1D(OUT, IN), dtype=dtype)
    before = copy.deepcopy(module.layer.weight)
    for shape in ((1, 1), (1,), (1, MOST), (MOST, 1), (1, MOST + 1), (2, 9)):
        x = tokens(*shape, dtype=dtype)
        torch.testing.assert_close(module(x), expected(module, x), **CLOSE[dtype])
    assert calls == [1, 1, MOST, MOST]
    assert torch.equal(module.layer.weight, before) and module.layer.weight.shape == before.shape


@torch.no_grad()
def test_tokens_of_which_nothing_or_everything_is_left(calls: list[int], compiles: bool) -> None:
    module = masked()
    x = torch.stack([torch.zeros(IN), torch.full((IN,), 2.0)])
    torch.testing.assert_close(module(x), expected(module, x), **CLOSE[torch.float32])
    assert torch.equal(module(torch.zeros(1, IN)), module.layer.bias.unsqueeze(0))
    assert module(tokens(0)).shape == (0, OUT) and calls == [2, 1]


@torch.no_grad()
@DTYPES
def test_what_is_not_a_number_stays_that(dtype: torch.dtype, compiles: bool) -> None:
    module = masked(dtype=dtype)
    x = tokens(1, dtype=dtype)
    x[0, 3] = float("nan")
    assert bool(module(x).isnan().all())


@torch.no_grad()
def test_what_observes_operations_sees_the_choice(calls: list[int]) -> None:
    """A check forces the choices of one arithmetic on another."""
    module, x = masked(), tokens(1)
    with Choices() as seen:
        found = module(x)
    assert calls == [] and [choice.tolist() for choice in seen.made] == [(x.abs() < module.mask.threshold).tolist()]
    torch.testing.assert_close(module(x), found)
    assert calls == [1]


def test_what_a_search_laid_out_is_by_rows_where_no_threshold_is_left() -> None:
    """As in a model that is loaded: products of many tokens then round alike."""
    data = {"input_ids": torch.arange(64).view(4, 16) % tiny_models.VOCABULARY}
    model = retrofit.apply(tiny_models.llama(), "activation-sparsity(level=0.05)", calibration=[data], verify=False)
    layers = [
        (float(module.mask.threshold) > 0, module.layer) for module in model.modules() if isinstance(module, MaskedProjection)
    ]
    assert {above for above, _ in layers} == {True, False}
    assert all(layer.weight.t().is_contiguous() == above for above, layer in layers)


def test_without_a_compiler_only_larger_weights_are_read_by_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masked_products, "UNCOMPILED", dict.fromkeys(UNCOMPILED, IN * OUT + 1))
    assert lay_out(masked()) and compiled_functions()
    no_compiler(monkeypatch)
    assert not lay_out(masked())


@torch.no_grad()
@DTYPES
@pytest.mark.parametrize(("threads", "rows", "bags"), [(1, 99, 1), (2, 99, 2), (99, 99, 13), (1, 5, 3), (4, 5, 4)])
def test_columns_are_summed_in_bags(
    threads: int, rows: int, bags: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []

    def counted(columns: Tensor, kept: Tensor, starts: Tensor, *more: Any) -> Any:
        found.append(len(starts))
        return embedding_bag(columns, kept, starts, *more)

    embedding_bag = torch.embedding_bag
    monkeypatch.setattr(torch, "embedding_bag", counted)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(compiled_products, "LONG", OUT)
    monkeypatch.setattr(compiled_products, "BAG", rows)
    module, x = masked(dtype=dtype), tokens(1, 1, dtype=dtype)
    assert int((x.abs() >= module.mask.threshold).sum()) == 13
    no_compiler(monkeypatch)
    torch.testing.assert_close(module(x), expected(module, x), **CLOSE[dtype])
    assert found == [bags]


def test_training_reads_rows_again(calls: list[int]) -> None:
    module = masked()
    parameter, dense = module.layer.weight, module.layer.weight.detach().clone()
    with torch.inference_mode():
        module(tokens(1, 1))
    assert module.layer.weight is parameter and parameter.t().is_contiguous() and calls == [1]
    module(tokens(1, 1))  # a gradient is recorded
    assert calls == [1]
    module.train()
    assert parameter.is_contiguous() and torch.equal(parameter, dense)
    module(tokens(1, 1)).sum().backward()
    assert parameter.grad is not None and calls == [1]


@torch.no_grad()
def test_a_batch_in_bfloat16_stays_by_rows(calls: list[int]) -> None:
    module = masked(dtype=torch.bfloat16)
    module(tokens(2, 1, dtype=torch.bfloat16))
    assert module.layer.weight.is_contiguous() and calls == []
    module(tokens(1, 7, dtype=torch.bfloat16))  # a prompt, after which tokens are decoded one by one
    module(tokens(2, 1, dtype=torch.bfloat16))
    assert module.layer.weight.t().is_contiguous() and calls == [2]


def hooked(module: MaskedProjection) -> None:
    module.layer.register_forward_hook(lambda layer, args, y: y + 1)


def of_its_own(module: MaskedProjection) -> None:
    module.layer.forward = lambda x: nn.functional.linear(x, module.layer.weight, module.layer.bias) + 1


def shared(module: MaskedProjection) -> None:
    module.layer.weight.data.share_memory_()


def no_threshold(module: MaskedProjection) -> None:
    module.mask.threshold.fill_(0.0)


def turned_off(module: MaskedProjection) -> None:
    module.mask.share = 0.0


@torch.no_grad()
@pytest.mark.parametrize("change", [hooked, of_its_own, shared, no_threshold, turned_off])
def test_whatever_else_a_layer_does_it_is_called(change: Any, calls: list[int]) -> None:
    module = masked()
    change(module)
    y = module.layer(module.mask(tokens(1, 1)))
    assert torch.equal(module(tokens(1, 1)), y) and calls == [] and module.layer.weight.is_contiguous()


@torch.no_grad()
def test_other_kinds_of_calls_are_dense(calls: list[int]) -> None:
    module = masked()
    with mapped_weights():
        module(tokens(1, 1))
    assert module.layer.weight.is_contiguous()
    with torch.autocast("cpu", torch.bfloat16):
        assert module(tokens(1, 1)).dtype == torch.bfloat16
    centred = MaskedProjection(nn.Linear(IN, OUT), (0, None), ActivationMask(torch.zeros(1), IN)).eval()
    centred.mask.threshold.fill_(0.7)
    centred(tokens(1, 1))
    masked(dtype=torch.float64)(tokens(1, 1).double())
    torch.export.export(masked(), (tokens(1, 1),))
    assert calls == []


@torch.no_grad()
def test_compiled_layers_read_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    module = masked()
    module(tokens(1, 1))
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for shape in ((1, 1), (1, 3), (2, 9)):
        torch.testing.assert_close(compiled(tokens(*shape)), expected(module, tokens(*shape)), **CLOSE[torch.float32])
    graphs: list[str] = []

    def see(graph: Any, inputs: Any) -> Any:
        graphs.append(graph.code)
        return graph

    torch.compile(module, fullgraph=True, backend=see)(tokens(1, 1))
    by_rows = masked()
    torch.compile(by_rows, fullgraph=True, backend=see)(tokens(1, 1))
    assert ["masked_product" in code for code in graphs] == [True, False] and by_rows.layer.weight.is_contiguous()


@torch.no_grad()
def test_a_graph_for_any_number_of_tokens_chooses_at_each_call(calls: list[int]) -> None:
    module, graphs = masked(), []
    module(tokens(1, 1))
    calls.clear()

    def see(graph: Any, inputs: Any) -> Any:
        graphs.append(graph.code)
        return graph

    compiled = torch.compile(module, fullgraph=True, backend=see, dynamic=True)
    for count in (9, 2, MOST, MOST + 1):
        x = tokens(count)
        torch.testing.assert_close(compiled(x), expected(module, x), **CLOSE[torch.float32])
    assert len(graphs) == 1 and calls == [2, MOST]


def test_the_operation_is_as_torch_wants_it() -> None:
    for count in (0, 1, MOST + 1):
        torch.library.opcheck(torch.ops.retrofit.masked_product, (tokens(count), torch.randn(IN, OUT), torch.tensor(0.7)))


# ── Whole models ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def ids(batch: int, length: int) -> Tensor:
    return torch.randint(5, 40, (batch, length), generator=torch.Generator().manual_seed(0))


def rewritten(name: str = "llama", **options: Any) -> Any:
    model = {"llama": tiny_models.llama, "gpt2": tiny_models.gpt2}[name]().eval()
    return retrofit.apply(model, "activation-sparsity", calibration=ids(12, 16), **options)


def layouts(model: nn.Module) -> set[bool]:
    """Whether the weights of masked linear layers lie by rows."""
    found = [module.layer for module in model.modules() if isinstance(module, MaskedProjection)]
    return {layer.weight.is_contiguous() for layer in found}


@pytest.mark.first(1)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_model_decodes_what_it_computes_at_once(name: str, calls: list[int]) -> None:
    model = rewritten(name)  # every check is made
    calls.clear()
    prompt = ids(1, 5)
    with torch.no_grad():
        decoded = model.generate(prompt, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert calls and set(calls) == {1}
        at_once = zoo.logits(model(decoded)).argmax(-1)
    assert torch.equal(decoded[:, 5:], at_once[:, 4:-1])


def test_files_hold_the_weights_as_they_were(tmp_path: Path, calls: list[int]) -> None:
    model = rewritten(verify=False)
    assert layouts(model) == {False}
    dense = tiny_models.llama().eval()
    model.save_pretrained(tmp_path / "folder")
    retrofit.save(model, tmp_path / "model.pt")
    for loaded in (type(model).from_pretrained(tmp_path / "folder"), retrofit.load(tmp_path / "model.pt"), copy.deepcopy(model)):
        assert all(torch.equal(value, loaded.state_dict()[key]) for key, value in model.state_dict().items())
        with torch.no_grad():
            torch.testing.assert_close(zoo.logits(loaded.eval()(ids(1, 7))), zoo.logits(model(ids(1, 7))))
    undone = retrofit.undo(model)
    assert all(parameter.is_contiguous() for parameter in undone.parameters())
    assert torch.equal(zoo.logits(undone(ids(2, 7))), zoo.logits(dense(ids(2, 7))))


def test_a_rewrite_that_is_taken_back_leaves_the_layout() -> None:
    from retrofit.surgery import Edit

    model = tiny_models.llama().eval()
    edit = Edit(model)
    linear = model.model.layers[0].mlp.up_proj
    module = MaskedProjection(linear, (0, "input"), ActivationMask(linear.weight))
    module.mask.threshold.fill_(0.5)
    edit.replace_module("model.layers.0.mlp.up_proj", module)
    with torch.no_grad():
        model(ids(1, 1))
    assert not linear.weight.is_contiguous()
    edit.undo()
    assert model.model.layers[0].mlp.up_proj is linear and linear.weight.is_contiguous()
