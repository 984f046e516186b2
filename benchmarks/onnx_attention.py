"""What attention on a cache costs in an exported file: a step of one token, each way of writing it beside the others.

    python benchmarks/onnx_attention.py --past 64 256 1024

A Llama of SmolLM2-135M's sizes, with random weights and fewer layers (three queries share a head of keys), float32, is exported
three times: without ONNX Runtime's own operators, with them but keys and values repeated for every query, and as `retrofit export`
writes it. The files take turns in every round; medians, and the median over the rounds of the ratio.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import tempfile
import time
from pathlib import Path
from unittest import mock

import torch
import transformers

import retrofit
from retrofit.onnx.exporter import optimization
from retrofit.onnx.exporter.export_parts import OnnxSession, next_step_states

FORMS = ("no fused operators", "keys repeated", "as it is exported")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--past", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sessions = {form: exported(form, Path(folder) / f"{place}.onnx", options) for place, form in enumerate(FORMS)}
    print(f"{options.layers} layers of SmolLM2's sizes, {options.threads} thread(s), ms a token, median of {options.rounds} rounds")
    for past in options.past:
        steps = {form: step_of(session, past) for form, session in sessions.items()}
        times: dict[str, list[float]] = {form: [] for form in FORMS}
        for turn in range(options.rounds + 1):
            for form in FORMS[turn % 3 :] + FORMS[: turn % 3]:
                start = time.perf_counter()
                for _ in range(4):
                    sessions[form](steps[form])
                if turn:
                    times[form].append((time.perf_counter() - start) / 4)
        for form in FORMS:
            faster = statistics.median(base / mine for base, mine in zip(times["keys repeated"], times[form], strict=True))
            print(f"{past:>5} before  {form:<20}{1e3 * statistics.median(times[form]):8.2f}  x{faster:.2f}", flush=True)


def exported(form: str, path: Path, options: argparse.Namespace) -> OnnxSession:
    without = form == "keys repeated"
    with (
        mock.patch.object(optimization, "attend_on_cache", none_found if without else optimization.attend_on_cache),
        mock.patch.object(optimization, "rotate_by_token", none_found if without else optimization.rotate_by_token),
    ):
        made = retrofit.export_onnx(dense(options.layers), path, fuse=form != "no fused operators")
    print(form, made.files[0].nodes, "nodes", flush=True)
    return OnnxSession(path, options.threads)


def none_found(model: object) -> int:
    """A fusion that finds nothing."""
    return 0


@functools.cache
def dense(layers: int) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3}
    config = transformers.LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=layers, tie_word_embeddings=True, **heads
    )
    return transformers.LlamaForCausalLM(config).eval()


def step_of(session: OnnxSession, past: int) -> dict[str, torch.Tensor]:
    """The inputs of the token after `past` others."""
    ids = torch.randint(49152, (1, past + 1), generator=torch.Generator().manual_seed(1))

    def given(start: int, end: int) -> dict[str, torch.Tensor]:
        mask = torch.ones(1, end, dtype=torch.int64)
        return {"input_ids": ids[:, start:end], "attention_mask": mask, "position_ids": torch.arange(start, end)[None]}

    outputs = session({**given(0, past), **session.empty_states(1)})
    return {**given(past, past + 1), **next_step_states(outputs)}


if __name__ == "__main__":
    main()
