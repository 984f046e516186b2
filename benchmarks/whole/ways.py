"""Ways to run a decoder on a CPU: torch as it is, compiled, in bfloat16, in int8; ONNX Runtime, and its own or our int8 and int4.

Each has the same three calls, for one sequence: the logits of a prompt, the state after it, and the logits of the next token.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers import DynamicCache, StaticCache

import retrofit
from retrofit.onnx.exporter.export_parts import OnnxSession, next_step_states

ROOM = 192  # tokens behind the prompt in a static cache: as many as are decoded in all rounds
INT8_FILE = "int8.onnx"
WEIGHTS = ("int8", "int4")  # of `retrofit export --weights`


class Running(Protocol):
    """A model that is ready to be run in some way."""

    def logits(self, ids: Tensor) -> Tensor:
        """Those of a prompt, (1, length), as (1, length, V)."""

    def begin(self, ids: Tensor) -> Any:
        """The state after a prompt."""

    def step(self, token: Tensor, state: Any) -> tuple[Tensor, Any]:
        """The logits after one more token, (1, 1), as (1, 1, V), and the state then."""


class InTorch:
    """A module, called."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def logits(self, ids: Tensor) -> Tensor:
        found: Tensor = self.model(ids, use_cache=True).logits
        return found

    def begin(self, ids: Tensor) -> Any:
        cache = DynamicCache(config=self.model.config)
        self.model(ids, past_key_values=cache, logits_to_keep=1)
        return cache

    def step(self, token: Tensor, state: Any) -> tuple[Tensor, Any]:
        return self.model(token, past_key_values=state).logits, state


class Compiled(InTorch):
    """Compiled calls; tokens are decoded in a static cache, as compiling asks for."""

    def __init__(self, model: Any, **how: Any) -> None:
        super().__init__(model)
        self.whole = torch.compile(model, dynamic=False, **how)
        self.one = torch.compile(model, dynamic=False, **how)
        self.state: Any = None

    def logits(self, ids: Tensor) -> Tensor:
        found: Tensor = self.whole(ids, use_cache=False).logits
        return found

    def begin(self, ids: Tensor) -> Any:
        if self.state is None:  # one for all: another would be compiled for again
            self.state = StaticCache(config=self.model.config, max_cache_len=ids.shape[1] + ROOM)
            self.model(ids, past_key_values=self.state, logits_to_keep=1)
        return self.state

    def step(self, token: Tensor, state: Any) -> tuple[Tensor, Any]:
        return self.one(token, past_key_values=state).logits, state


class InOnnxRuntime:
    """A file of `retrofit.export_onnx`, with its cache."""

    def __init__(self, path: Path, threads: int, *, spinning: bool = True) -> None:
        self.session = OnnxSession(path, threads, spinning=spinning)

    def outputs(self, ids: Tensor, states: Any, before: int) -> Any:
        numbers = torch.arange(before, before + ids.shape[1])[None]
        mask = torch.ones(1, before + ids.shape[1], dtype=torch.long)
        return self.session({"input_ids": ids, "attention_mask": mask, "position_ids": numbers, **states})

    def logits(self, ids: Tensor) -> Tensor:
        found: Tensor = self.outputs(ids, self.session.empty_states(1), 0)["logits"]
        return found

    def begin(self, ids: Tensor) -> Any:
        return next_step_states(self.outputs(ids, self.session.empty_states(1), 0)), ids.shape[1]

    def step(self, token: Tensor, state: Any) -> tuple[Tensor, Any]:
        states, before = state
        outputs = self.outputs(token, states, before)
        return outputs["logits"], (next_step_states(outputs), before + 1)


def in_int8(model: nn.Module, dense: nn.Module) -> nn.Module:
    """The model with int8 weights in the linear layers that the dense model has too, masked or not, by torch's own quantization.

    Layers that a pass has put in read some rows of a matrix only, which a quantized layer cannot give: they stay as they are.
    """
    known = {name: module.weight.shape for name, module in dense.named_modules() if type(module) is nn.Linear}
    plain = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    same = {name for name, module in plain.items() if known.get(name.removesuffix(".layer")) == module.weight.shape}
    setting = torch.ao.quantization.default_dynamic_qconfig
    found: nn.Module = torch.ao.quantization.quantize_dynamic(copy.deepcopy(model), dict.fromkeys(sorted(same), setting))
    return found


def write_int8(path: Path, target: Path) -> None:
    """The ONNX file at `path` with int8 weights, by ONNX Runtime's dynamic quantization, at `target`."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    part = target.with_suffix(".part")
    quantize_dynamic(path, part, weight_type=QuantType.QUInt8, per_channel=True, extra_options={"EnableSubgraph": True})
    part.replace(target)


class Files(NamedTuple):
    """Where a model is: for torch, also in bfloat16, and for ONNX Runtime, also in its own int8."""

    torch: Path
    bfloat16: Path
    onnx: Path
    int8: Path


def files_of(folder: Path, name: str) -> Files:
    return Files(*(folder / f"{name}.{end}" for end in ("pt", "bfloat16.pt", "onnx", INT8_FILE)))


def packed_file(folder: Path, name: str, weights: str) -> Path:
    """Where a model is for ONNX Runtime with weights that `retrofit export --weights` packed."""
    return folder / f"{name}.weights-{weights}.onnx"


def loaded(folder: Path, name: str) -> nn.Module:
    return retrofit.load(files_of(folder, name).torch).eval()


def loaded_bfloat16(folder: Path, name: str) -> nn.Module:
    """From a file of its own: memory that a model in float32 took before it was converted would count."""
    return retrofit.load(files_of(folder, name).bfloat16).eval()


def ways(threads: int, dense: str, backend: dict[str, Any]) -> dict[str, Callable[[Path, str], Running]]:
    """How a model of a folder is made ready, by the name of the way; `dense` is the name of the dense one."""
    return {
        "torch": lambda folder, name: InTorch(loaded(folder, name)),
        "torch, compiled": lambda folder, name: Compiled(loaded(folder, name), **backend),
        "torch, bfloat16": lambda folder, name: InTorch(loaded_bfloat16(folder, name)),
        "torch, bfloat16, compiled": lambda folder, name: Compiled(loaded_bfloat16(folder, name), **backend),
        "torch, int8": lambda folder, name: InTorch(in_int8(loaded(folder, name), loaded(folder, dense))),
        "ONNX Runtime": lambda folder, name: InOnnxRuntime(files_of(folder, name).onnx, threads),
        "ONNX Runtime, int8": lambda folder, name: InOnnxRuntime(files_of(folder, name).int8, threads),
        **{
            f"ONNX Runtime, --weights {weights}": functools.partial(
                lambda weights, folder, name: InOnnxRuntime(packed_file(folder, name, weights), threads), weights
            )
            for weights in WEIGHTS
        },
        "ONNX Runtime, --weights int8, no spinning": lambda folder, name: InOnnxRuntime(
            packed_file(folder, name, "int8"), threads, spinning=False
        ),
    }
