"""ONNX models run by ONNX Runtime on named tensors, one step after another on the states that each step returns."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import Tensor

from retrofit.errors import RetrofitError, first_line
from retrofit.onnx.exporter.export_parts import PAST_KEY_VALUES, PRESENT

if TYPE_CHECKING:
    import onnxruntime

LATER_RUNTIME = "install a later onnxruntime, or use a complete file"
SIZES_OF_FILE = "use inputs of the types and sizes that its file declares"
Tensors = Mapping[str, Tensor]
DTYPES = {
    "tensor(float)": torch.float32,
    "tensor(float16)": torch.float16,
    "tensor(double)": torch.float64,
    "tensor(int64)": torch.int64,
    "tensor(int32)": torch.int32,
    "tensor(bool)": torch.bool,
}


def missing_packages(*packages: str) -> list[str]:
    """Return those of the packages that are missing here."""
    return [name for name in packages if importlib.util.find_spec(name) is None]


def import_onnxruntime() -> Any:
    """ONNX Runtime, which reports to nobody; raises `RetrofitError` where it is not installed."""
    if missing_packages("onnxruntime"):
        raise RetrofitError(
            "ONNX Runtime is not installed",
            why="it runs the exported model",
            remedy="pip install 'retrofit-transformers[onnx]'",
            code="not-installed",
        )
    import onnxruntime

    onnxruntime.disable_telemetry_events()
    return onnxruntime


class OnnxSession:
    """An ONNX model, from its file or its bytes, that maps named tensors to named tensors on the CPU.

    Its threads wait for work in a loop (`spinning`), or sleep. `weights` are those that its bytes only name, as external data.
    """

    def __init__(
        self,
        model: str | Path | bytes,
        threads: int | None = None,
        *,
        optimize: bool = True,
        spinning: bool = True,
        weights: Mapping[str, numpy.ndarray] | None = None,
    ) -> None:
        ort = import_onnxruntime()
        options = ort.SessionOptions()
        options.log_severity_level = 3  # errors, which are raised as well
        if threads is not None:
            options.intra_op_num_threads = options.inter_op_num_threads = threads
        if not spinning:
            options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        if not optimize:
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        self.weights = {name: ort.OrtValue.ortvalue_from_numpy(value) for name, value in (weights or {}).items()}  # no copies
        options.add_external_initializers(list(self.weights), list(self.weights.values()))
        if weights is not None:
            options.add_session_config_entry("session.disable_prepacking", "1")  # a third copy, for a few short runs
        given = model if isinstance(model, bytes) else str(model)
        try:
            self.session: onnxruntime.InferenceSession = ort.InferenceSession(given, options, providers=["CPUExecutionProvider"])
        except Exception as error:
            raise RetrofitError(
                "ONNX Runtime cannot load the model", why=first_line(error), remedy=LATER_RUNTIME, code="does-not-load"
            ) from error
        self.inputs = {argument.name: argument for argument in self.session.get_inputs()}
        self.outputs = [argument.name for argument in self.session.get_outputs()]

    def __call__(self, inputs: Tensors) -> dict[str, Tensor]:
        """Return the outputs; inputs that the model does not take are left out. Raises `RetrofitError` where it does not run."""
        if lacking := [name for name in self.inputs if name not in inputs]:
            raise RetrofitError(f"the model also takes {', '.join(lacking)}", remedy="pass every input that its file declares")
        feed = {name: inputs[name].detach().cpu().contiguous().numpy() for name in self.inputs}
        try:
            results = self.session.run(None, feed)
        except Exception as error:
            raise RetrofitError(
                "ONNX Runtime cannot run the model", why=first_line(error), remedy=SIZES_OF_FILE, code="does-not-run"
            ) from error
        return {name: torch.from_numpy(value) for name, value in zip(self.outputs, results, strict=True)}

    @property
    def tokens_per_step(self) -> int | None:
        """Return how many tokens a step takes; None where it may be any number."""
        extent = self.inputs["input_ids"].shape[1]
        return extent if isinstance(extent, int) else None

    def empty_states(self, batch: int) -> dict[str, Tensor]:
        """Return the states before any token: keys and values of none, memories of zeros."""
        states = {}
        for name, argument in self.inputs.items():
            if name.startswith(PAST_KEY_VALUES):
                dynamic = iter((batch, 0))
                shape = [extent if isinstance(extent, int) else next(dynamic) for extent in argument.shape]
                states[name] = torch.zeros(shape, dtype=DTYPES[argument.type])
        return states


def next_step_states(outputs: Tensors) -> dict[str, Tensor]:
    """Return the states among a step's outputs, as the next step's inputs."""
    return {PAST_KEY_VALUES + name.removeprefix(PRESENT): value for name, value in outputs.items() if name.startswith(PRESENT)}
