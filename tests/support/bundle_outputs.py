"""What a model computes, for two processes to compare; as a script, where retrofit is not installed, it does so for bundles.

python bundle_outputs.py JOBS RESULTS      # JSON and a file of torch: {name: [directory, auto class, ways]}, {name: outputs}
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import transformers

transformers.utils.logging.disable_progress_bar()

FIRST_ID, LAST_ID = 16, 60  # of ordinary tokens in all the tiny models
Load = Callable[..., Any]  # a directory and options of `from_pretrained` to the model there


def inputs(model: Any) -> dict[str, torch.Tensor]:
    """A batch for the model, its second row padded on the left."""
    generator = torch.Generator().manual_seed(1)
    if model.main_input_name == "pixel_values":
        size = model.config.image_size
        return {"pixel_values": torch.randn(2, 3, size, size, generator=generator)}
    ids = torch.randint(FIRST_ID, LAST_ID + 1, (2, 12), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    given = {"input_ids": ids, "attention_mask": mask}
    if model.config.is_encoder_decoder:
        given["decoder_input_ids"] = torch.randint(FIRST_ID, LAST_ID + 1, (2, 7), generator=generator)
    return given


def outputs(model: Any) -> dict[str, Any]:
    """State, logits, ids generated greedily, without the cache and by beams, the loss and gradients of a step of training."""
    given = inputs(model)
    found: dict[str, Any] = {"state": dict(model.state_dict())}
    model.eval()
    if "pixel_values" in given:
        given = {"pixel_values": given["pixel_values"].to(model.dtype)}
    with torch.no_grad():
        found["logits"] = model(**given)[0]
        if model.can_generate():
            ids = {name: value for name, value in given.items() if name in ("input_ids", "attention_mask")}
            how = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
            found["greedy"] = model.generate(**ids, **how)
            found["uncached"] = model.generate(**ids, **how, use_cache=False)
            found["beams"] = model.generate(**ids, **how, num_beams=2)
    labels = given.get("decoder_input_ids", given.get("input_ids"))
    if labels is not None and type(model).__name__.endswith(("CausalLM", "LMHeadModel", "MaskedLM", "ConditionalGeneration")):
        model.train()
        torch.manual_seed(3)
        loss = model(**given, labels=labels).loss
        loss.backward()
        found["loss"] = loss.detach()
        found["gradients"] = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
        model.zero_grad()
        model.eval()
    return found


def after_training(model: Any) -> dict[str, Any]:
    """The weights after two steps of transformers' Trainer."""
    given = inputs(model)
    rows = [{"input_ids": row, "labels": row} for row in given["input_ids"]]
    with tempfile.TemporaryDirectory() as folder:
        settings = transformers.TrainingArguments(
            folder,
            max_steps=2,
            per_device_train_batch_size=2,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
            seed=0,
        )
        transformers.Trainer(model, settings, train_dataset=rows).train()
    return {"state": dict(model.state_dict())}


def in_ways(load: Load, directory: str, ways: Iterable[str]) -> dict[str, Any]:
    """What the model in the directory computes, by the way it is loaded or used."""
    found: dict[str, Any] = {}
    for way in ways:
        options = {"bfloat16": {"dtype": torch.bfloat16}, "placed": {"device_map": "auto"}}.get(way, {})
        model = load(directory, **options)
        if way == "saved again":
            with tempfile.TemporaryDirectory() as folder:
                model.save_pretrained(folder, max_shard_size="8KB")
                found[way] = outputs(load(folder))
        else:
            found[way] = after_training(model) if way == "trained" else outputs(model)
    return found


def main() -> None:
    jobs, results = map(Path, sys.argv[1:])
    assert importlib.util.find_spec("retrofit") is None, "retrofit can be imported"
    assert not [one for one in importlib.metadata.entry_points(group="torch.backends") if "retrofit" in one.value]
    found: dict[str, Any] = {}
    for name, (directory, auto, ways) in json.loads(jobs.read_text()).items():
        kind = getattr(transformers, auto)
        found[name] = in_ways(
            lambda path, kind=kind, **options: kind.from_pretrained(path, trust_remote_code=True, **options), directory, ways
        )
    assert not [name for name in sys.modules if name.split(".")[0] == "retrofit"]
    torch.save(found, results)


if __name__ == "__main__":
    main()
