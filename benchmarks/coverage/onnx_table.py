"""Writes benchmarks/results/onnx_coverage.json: every architecture, exported by `export_onnx`, read back by `from_onnx`.

    PYTHONPATH=tests python benchmarks/coverage/onnx_table.py
        [--only PATTERN] [--limit SECONDS] [--minutes N] -o benchmarks/results/onnx_coverage.json

One architecture after another, in an order that is the same in every run and mixes the tasks, each in a worker process under a time
limit. Results are kept in a JSON file as they come: a run that was interrupted goes on where it stopped, and `--again` does anew
what `--only` selects. ONNX Runtime's decoding is compared with `generate`, greedy, from a prompt padded on the left.
"""

from __future__ import annotations

import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sweeping import Row, Task, all_ids, parser_of, sweep

STEPS = 6
LIMIT = 1e-4  # how far an imported file may lie from ONNX Runtime
HEADINGS = ("architecture", "files", "cache", "from torch", "tokens", "read back", "layers found", "fused")


def main() -> int:
    return sweep(tasks(), find, page, parser_of(__doc__, "onnx_coverage").parse_args(), failed)


def tasks() -> list[Task]:
    return [(name, "") for name in sorted(all_ids(), key=lambda name: zlib.crc32(name.encode()))]


def find(task: Task) -> Row:
    """What became of one architecture, or what was raised."""
    try:
        return attempt(task[0])
    except Exception as error:
        return {"why": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]}


def failed(task: Task, why: str) -> Row:
    """The row of an architecture whose worker died or took too long."""
    return {"why": why}


def attempt(name: str) -> Row:
    """What became of one architecture."""
    from support import zoo

    import retrofit
    from retrofit.errors import RetrofitError

    entry = zoo.entry(name)
    if reason := zoo.skip_reason(entry):
        return {"why": f"not built: {reason}"}
    model = zoo.build(entry)
    inputs = zoo.inputs(entry, model)
    with tempfile.TemporaryDirectory() as folder:
        try:
            made = retrofit.export_onnx(model, Path(folder) / "model.onnx", example_inputs=inputs)
        except RetrofitError as error:
            return {"why": f"{error.what}; {error.why}"[:240]}
        fused = {step.name for file in made.files for step in file.steps if step.kept}
        refused = {
            f"{step.name}: {step.why}" for file in made.files for step in file.steps if not step.kept and "nothing" not in step.why
        }
        return {
            "files": len(made.files),
            "cached": made.cached,
            "why_no_cache": made.why_no_cache.replace("\n", "; ")[:240],
            "gap": max((file.gap for file in made.files if file.gap is not None), default=None),
            "tokens": same_tokens(model, made) if made.cached else None,
            "read": said(read_back, model, made, inputs),
            "layers": said(layers_found, model, made, inputs) if len(made.files) == 1 else None,
            "fused": sorted(fused),
            "refused": sorted(refused),
        }


def said(question: Callable[..., Any], *about: Any) -> Any:
    """The answer, or what was raised in one line."""
    try:
        return question(*about)
    except Exception as error:
        why = str(getattr(error, "why", "") or "")
        first = str(getattr(error, "what", "") or error).splitlines() or [""]
        return f"{type(error).__name__}: {first[0]}{'; ' + why if why else ''}"[:240]


def read_back(model: Any, made: Any, inputs: dict[str, Any]) -> float:
    """How far the files as modules, states and all, lie from ONNX Runtime on fresh inputs of another shape."""
    import torch

    from retrofit.inputs.example_inputs import named_inputs
    from retrofit.numerics.distances import distance
    from retrofit.onnx.exporter import other_sizes, plan_export
    from retrofit.onnx.exporter.export_parts import OnnxSession
    from retrofit.onnx.importer import from_onnx
    from retrofit.onnx.importer.weights import argument_name

    parts = plan_export(model, named_inputs(model, inputs), "past" if made.cached else "none").parts
    gaps = []
    for part, file in zip(parts, made.files, strict=True):
        session, module = OnnxSession(file.path, 1), from_onnx(file.path, "past")
        for seed, sizes in enumerate(other_sizes(part), start=11):
            given = {name: value for name, value in part.example(sizes, seed).items() if name in session.inputs}
            with torch.no_grad():
                found = module(**{argument_name(name): value for name, value in given.items()})
            gaps += [distance(found[argument_name(name)], value) for name, value in session(given).items()]
    return max(gaps)


def layers_found(model: Any, made: Any, inputs: dict[str, Any]) -> list[list[int]]:
    """The layers in each stack that are found in the file, and in the model; none in what is no transformer."""
    import retrofit
    from retrofit.errors import NoTransformerError

    found: list[list[int]] = []
    for one, given in ((retrofit.from_onnx(made.files[0].path), None), (model, inputs)):
        try:
            found.append([len(stack.layers) for stack in retrofit.inspect(one, given).stacks])
        except NoTransformerError:
            found.append([])
    return found


def same_tokens(model: Any, made: Any) -> bool | str:
    """Whether ONNX Runtime decodes the tokens that `generate` does."""
    import torch
    from support.onnx_files import decode_greedily, translate

    from retrofit.inputs.example_inputs import token_ids
    from retrofit.onnx.exporter.export_parts import OnnxSession

    ids = token_ids(model, 2, 6, seed=3)
    mask = torch.ones_like(ids)
    how = {"max_new_tokens": STEPS, "min_new_tokens": STEPS, "do_sample": False, "num_beams": 1, "pad_token_id": 0}
    how |= {"forced_eos_token_id": None, "forced_bos_token_id": None}
    model.generation_config.eos_token_id = None  # with a least number of tokens it would be left out of the choice
    sessions = [OnnxSession(file.path, 1) for file in made.files]
    try:
        if len(sessions) == 1:
            mask[0, :2] = 0
            expected = model.generate(input_ids=ids, attention_mask=mask, **how)
            made_tokens = decode_greedily(sessions[0], ids, STEPS, mask)
            if torch.equal(made_tokens, expected):
                return True
            return "the full forward's, not generate's" if torch.equal(made_tokens, of_forwards(model, ids, mask)) else False
        start = model.generation_config.decoder_start_token_id
        expected = model.generate(input_ids=ids, attention_mask=mask, **how)
        made_tokens = translate(sessions, {"input_ids": ids, "attention_mask": mask}, start, STEPS)
        return bool(torch.equal(made_tokens, expected))
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:120]


def of_forwards(model: Any, ids: Any, mask: Any) -> Any:
    """The greedy tokens of the model's forward of everything so far, without a cache and without `generate`."""
    import torch

    for _ in range(STEPS):
        with torch.no_grad():
            new = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
        ids, mask = torch.cat([ids, new], 1), torch.cat([mask, torch.ones_like(new)], 1)
    return ids


def page(results: dict[str, Row]) -> str:
    """The Markdown page: counts, a line an architecture, then what was not exported and why."""
    done = {name: row for name, row in sorted(results.items()) if not row.get("why", "").startswith("not built")}
    exported = {name: row for name, row in done.items() if "gap" in row}
    cached = [row for row in exported.values() if row["cached"]]
    read = [row["read"] for row in exported.values() if row["read"] is not None]
    found = [row["layers"] for row in exported.values() if row["layers"] is not None]
    lines = [
        "# ONNX, out and back in, for every architecture",
        "",
        "Written by `PYTHONPATH=tests python benchmarks/coverage/onnx_table.py`. One tiny random model an architecture, dense;",
        "float32, one thread. `from torch`:",
        "the largest difference on inputs of other batch sizes and lengths than traced, relative to the largest output. `tokens`:",
        "ONNX Runtime's greedy decoding on the exported cache against `generate`. `read back`: how far `from_onnx` of the files,",
        "with their states, lies from ONNX Runtime on fresh inputs of other shapes. `layers found`: whether `inspect` finds as",
        "many layers in the file as in the model.",
        "",
        f"Tried: {len(results)} of {len(tasks())}. Exported: {len(exported)} of {len(done)} that can be built; {len(cached)} with",
        f"their cache, of which {sum(row['tokens'] is True for row in cached)} decode `generate`'s tokens. Read back within",
        f"{LIMIT:g}: {sum(map(close, read))} of {len(read)} tried; {sum(map(same_layers, found))} of {len(found)} files of whole",
        "models show the model's layers.",
        "",
        f"| {' | '.join(HEADINGS)} |",
        f"| {' | '.join('---' for _ in HEADINGS)} |",
    ]
    for name, row in exported.items():
        cache = "yes" if row["cached"] else f"no: {row['why_no_cache']}" if row["why_no_cache"] else ""
        tokens = {True: "the same", False: "differ", None: ""}.get(row["tokens"], row["tokens"])
        gap, back = (f"{row[key]:.1e}" if isinstance(row[key], float) else row[key] or "not tried" for key in ("gap", "read"))
        layers = "" if row["layers"] is None else "the same" if same_layers(row["layers"]) else said_layers(row["layers"])
        cells = (name, str(row["files"]), cache, gap, str(tokens), back, layers, ", ".join(row["fused"]))
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    lines += ["", "## Not exported", "", "| architecture | why |", "| --- | --- |"]
    lines += [f"| {name} | {row['why'].replace('|', chr(92) + '|')} |" for name, row in done.items() if "gap" not in row]
    return "\n".join([*lines, ""])


def close(gap: Any) -> bool:
    return isinstance(gap, float) and gap <= LIMIT


def same_layers(layers: Any) -> bool:
    return isinstance(layers, list) and layers[0] == layers[1]


def said_layers(layers: Any) -> str:
    return layers if isinstance(layers, str) else f"{layers[0]}, not {layers[1]}"


if __name__ == "__main__":
    raise SystemExit(main())
