"""ONNX files of the zoo's models, as torch's two exporters, ONNX Runtime's optimizer and this project's own exporter write them.

Of files with a cache also the loops that decode greedily.
"""

from __future__ import annotations

import functools
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import retrofit
from retrofit.onnx.exporter.export_parts import OnnxSession, next_step_states
from support import zoo

FOLDER = tempfile.TemporaryDirectory(prefix="retrofit-test-")
FREE = {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}
Exporter = Callable[[str, Path], None]  # the name of an architecture, and where its file goes


class Plain(nn.Module):
    """A transformers model from tensors to logits, as people wrap it to export it."""

    def __init__(self, model: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *given: torch.Tensor) -> torch.Tensor:
        return self.model(**dict(zip(self.names, given, strict=True))).logits


def built(name: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    entry = zoo.entry(name)
    model = zoo.shallow(entry).eval()
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False
    return model, {key: value for key, value in zoo.inputs(entry, model).items() if isinstance(value, torch.Tensor)}


def by_tracing(version: int, fused_attention: bool = True) -> Exporter:
    """torch's older exporter; a decoder gets a mask, because without one its code looks for packed sequences."""

    def exporter(name: str, path: Path) -> None:
        model, inputs = built(name)
        if name.startswith("causal/"):
            inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        if not fused_attention:
            model.set_attn_implementation("eager")  # type: ignore[operator]
        names = tuple(inputs)
        axes = {key: {0: "batch", 1: "length"} if value.dim() == 2 else {0: "batch"} for key, value in inputs.items()}
        torch.onnx.export(
            Plain(model, names),
            tuple(inputs.values()),
            str(path),
            input_names=list(names),
            output_names=["logits"],
            dynamic_axes=axes,
            opset_version=version,
            dynamo=False,
        )

    return exporter


def by_exporting(version: int) -> Exporter:
    """torch's newer exporter."""

    def exporter(name: str, path: Path) -> None:
        model, inputs = built(name)
        sizes = tuple(FREE if value.dim() == 2 else {0: torch.export.Dim.AUTO} for value in inputs.values())
        torch.onnx.export(
            Plain(model, tuple(inputs)),
            tuple(inputs.values()),
            str(path),
            input_names=list(inputs),
            output_names=["logits"],
            dynamic_shapes=(sizes,),
            opset_version=version,
            dynamo=True,
            verbose=False,
        )

    return exporter


def fused_by_runtime(name: str, path: Path) -> None:
    """ONNX Runtime's own fusions, SkipLayerNormalization and BiasGelu among them."""
    optimizer = pytest.importorskip("onnxruntime.transformers.optimizer")
    by_tracing(17)(name, path)
    kind = name.partition("/")[2]
    optimizer.optimize_model(str(path), model_type=kind, num_heads=4, hidden_size=64, opt_level=0).save_model_to_file(str(path))


def with_cache(name: str, path: Path) -> None:
    """This project's exporter: fused operators, the cache as inputs and outputs."""
    entry = zoo.entry(name)
    model = zoo.shallow(entry).eval()
    retrofit.export_onnx(model, path, example_inputs=zoo.inputs(entry, model), force=True)


def unfused(name: str, path: Path) -> None:
    retrofit.export_onnx(zoo.shallow(zoo.entry(name)).eval(), path, fuse=False, force=True)


def part(file: str) -> Exporter:
    """One of the files that this project's exporter writes of an encoder-decoder."""

    def exporter(name: str, path: Path) -> None:
        with tempfile.TemporaryDirectory() as folder:
            with_cache(name, Path(folder) / "model.onnx")
            shutil.copy(Path(folder) / file, path)

    return exporter


SOURCES: dict[str, Exporter] = {
    "traced": by_tracing(17),
    "traced, set 13": by_tracing(13, fused_attention=False),
    "exported, set 18": by_exporting(18),
    "exported, set 23": by_exporting(23),
    "fused by ONNX Runtime": fused_by_runtime,
    "with its cache": with_cache,
    "with its cache, not fused": unfused,
    "its encoder": part("encoder_model.onnx"),
    "its decoder": part("decoder_model.onnx"),
}


@functools.cache
def file_of(source: str, name: str) -> Path:
    """The file of the architecture `name` as `source` writes it."""
    path = Path(FOLDER.name) / f"{source}-{name}.onnx".replace("/", "-").replace(" ", "-")
    with torch.no_grad():
        SOURCES[source](name, path)
    return path


def decode_greedily(model: OnnxSession, ids: Tensor, steps: int, mask: Tensor | None = None) -> Tensor:
    """The prompt (batch, length) and `steps` greedy tokens after it; rows may be padded on the left, as in `mask`."""
    mask = torch.ones_like(ids) if mask is None else mask
    tokens, states, done = ids, model.empty_states(len(ids)), 0
    for _ in range(steps):
        numbers = (mask.cumsum(-1) - 1).clamp(min=0)
        for start in range(done, tokens.shape[1], model.tokens_per_step or tokens.shape[1]):
            done = min(start + (model.tokens_per_step or tokens.shape[1]), tokens.shape[1])
            given = {"input_ids": tokens[:, start:done], "position_ids": numbers[:, start:done]}
            outputs = model({**given, "attention_mask": mask[:, :done], **states})
            states = next_step_states(outputs)
        new = greedy_tokens(outputs)
        tokens, mask = torch.cat([tokens, new], 1), torch.cat([mask, torch.ones_like(new)], 1)
    return tokens


def translate(parts: Sequence[OnnxSession], source: Mapping[str, Tensor], start: int, steps: int) -> Tensor:
    """`steps` greedy tokens after the start token, from an encoder, a decoder's first step and its next ones."""
    encoder, first, following = parts
    hidden = encoder(source)["last_hidden_state"]
    fixed = {"encoder_hidden_states": hidden, "encoder_attention_mask": source["attention_mask"]}
    new = torch.full((len(hidden), 1), start)
    tokens, states = new, dict[str, Tensor]()
    for step in range(steps):
        outputs = (following if step else first)({"input_ids": new, **fixed, **states})
        new, states = greedy_tokens(outputs), states | next_step_states(outputs)
        tokens = torch.cat([tokens, new], 1)
    return tokens


def greedy_tokens(outputs: Mapping[str, Tensor]) -> Tensor:
    """The likeliest next token of each row: (batch, 1)."""
    return outputs["logits"][:, -1].argmax(-1, keepdim=True)
