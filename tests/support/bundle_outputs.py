"""What a model computes, for two processes to compare; run as a script where retrofit is not installed, it does so for bundles.

    python bundle_outputs.py JOBS RESULTS      # files of torch: {name: (directory, auto class, inputs)}, {name: outputs}
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from collections.abc import Mapping
from typing import Any

import torch
import transformers


def outputs(model: Any, given: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Logits, generated ids (greedily, without the cache, by beams), and the loss and gradients of a step of training."""
    found: dict[str, Any] = {"state": dict(model.state_dict()), "weights": sum(one.numel() for one in model.parameters())}
    model.eval()
    with torch.no_grad():
        found["logits"] = model(**given)[0]
        if model.can_generate():
            ids = {name: value for name, value in given.items() if name in ("input_ids", "attention_mask")}
            how = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
            found["greedy"] = model.generate(**ids, **how)
            found["uncached"] = model.generate(**ids, **how, use_cache=False)
            found["beams"] = model.generate(**ids, **how, num_beams=2)
    labels = given.get("decoder_input_ids", given.get("input_ids"))
    if labels is not None:
        model.train()
        torch.manual_seed(3)
        loss = model(**given, labels=labels).loss
        loss.backward()
        found["loss"] = loss.detach()
        found["gradients"] = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
        model.zero_grad()
        model.eval()
    return found


def main() -> None:
    jobs, results = sys.argv[1:]
    assert importlib.util.find_spec("retrofit") is None, "retrofit can be imported"
    assert not [one for one in importlib.metadata.entry_points(group="torch.backends") if "retrofit" in one.value]
    found: dict[str, Any] = {}
    for name, (directory, auto, given, options) in torch.load(jobs).items():
        model = getattr(transformers, auto).from_pretrained(directory, trust_remote_code=True, **options)
        found[name] = outputs(model, given) | {"class": type(model).__name__}
    assert not [name for name in sys.modules if name.split(".")[0] == "retrofit"]
    torch.save(found, results)


if __name__ == "__main__":
    main()
