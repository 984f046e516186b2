"""Module calls are watched, recorded and made again as they were."""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache
from transformers.modeling_outputs import BaseModelOutput

from retrofit.inputs.module_calls import CacheMark, CallRecorder, map_tensors, real_rows, tensors_in, watched


class Block(nn.Module):
    """Doubles its argument in place, and adds what its child makes of it, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(3, 3)

    def forward(self, x: Tensor, cache: Any = None) -> Tensor:
        y = self.child(x) + self.child(x)
        x.mul_(2)
        return y + x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x.clone(), cache=DynamicCache())
        return x


def hooks_of(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


@torch.no_grad()
def test_calls_are_recorded_as_they_were_made() -> None:
    model, x = Model(), torch.randn(2, 4, 3)
    recorder = CallRecorder(model, {"blocks.0": ["child", "missing"], "blocks.1": []})
    recorder.inputs = {"attention_mask": torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])}
    with recorder.recording() as calls:
        returned = model(x)
    (first,), (second,) = calls["blocks.0"], calls["blocks.1"]
    assert torch.equal(first.args[0], x) and torch.equal(second.args[0], first.output) and torch.equal(second.output, returned)
    assert (first.number, second.number) == (0, 1)
    assert [torch.equal(call.args[0], x) for call in first.children["child"]] == [True, True] and set(first.children) == {"child"}
    assert first.children["child"][0].args[0] is first.children["child"][1].args[0]  # one copy of one tensor
    assert first.kwargs == {"cache": CacheMark(two_sided=False)} and first.had_cache and not hooks_of(model)
    assert first.real(first.output).shape == (5, 3)
    assert torch.equal(first.repeat(model.blocks[0]), first.output)


@torch.no_grad()
def test_no_more_calls_are_kept_than_wanted() -> None:
    model = Model()
    recorder = CallRecorder(model, {"blocks.0.child": ()}, most=1)
    with recorder.recording():
        model(torch.ones(1, 1, 3))
    assert len(recorder.calls["blocks.0.child"]) == 1 and recorder.begun == 2


@torch.no_grad()
def test_watchers_change_a_call_as_hooks_do_and_are_gone_after_an_error() -> None:
    model, seen = nn.Sequential(nn.Identity(), nn.Identity()), list[str]()

    def add(path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        seen.append(path)
        return (args[0] + 1,), kwargs

    def fail(path: str, module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor:
        if bool((output > 2).any()):
            raise ValueError(path)
        return 10 * output

    with watched(dict(model.named_children()), before=add):
        assert model(torch.zeros(1)).item() == 2
    with watched({"first": model[0]}, after=fail):
        assert model(torch.ones(1)).item() == 10
        with pytest.raises(ValueError, match="first"):
            model(torch.full((1,), 3.0))
    assert seen == ["0", "1"] and not hooks_of(model)


@torch.no_grad()
def test_the_first_watcher_sees_the_output_of_the_module_itself() -> None:
    module, seen = nn.Identity(), list[float]()
    module.register_forward_hook(lambda module, args, output: output + 1)
    for first in (True, False):
        with watched({"": module}, after=lambda path, module, args, kwargs, output: seen.append(output.item()), first=first):
            module(torch.zeros(1))
    assert seen == [0, 1]


Pair = collections.namedtuple("Pair", "left right")


def test_nested_values_keep_their_kinds() -> None:
    x, cache = torch.ones(2), DynamicCache()
    nested = {"pair": Pair(x, 3), "output": BaseModelOutput(last_hidden_state=x), "list": [x, (cache, "text")]}
    mapped = map_tensors(nested, lambda leaf: leaf + 1 if isinstance(leaf, Tensor) else "cache")
    assert isinstance(mapped["pair"], Pair) and isinstance(mapped["output"], BaseModelOutput)
    assert mapped["list"][1] == ("cache", "text") and mapped["pair"].right == 3
    assert [tensor.tolist() for tensor in tensors_in(mapped)] == 3 * [[2, 2]] and len(tensors_in(nested)) == 3


def test_padding_is_left_out_whichever_dimension_is_the_batch() -> None:
    mask = torch.tensor([[True, True, False], [True, False, False]])
    stream = torch.arange(24.0).view(2, 3, 4)
    expected = torch.stack([stream[0, 0], stream[0, 1], stream[1, 0]])
    assert torch.equal(real_rows(stream, [mask]), expected)
    assert len(real_rows(stream.transpose(0, 1), [mask])) == 3
    assert real_rows(torch.ones(2, 3), [mask]).shape == (2, 3)  # no stream: rows of three numbers
    assert real_rows(stream, []).shape == (6, 4)
