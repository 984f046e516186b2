"""LoRA adapters of PEFT that were trained on a rewritten model, merged into its weights."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from retrofit.errors import CheckpointError, VerificationError, first_few, first_line
from retrofit.files.headers import extents_in
from retrofit.inputs.example_inputs import named_inputs
from retrofit.inputs.model_state import preserve_random_state
from retrofit.inputs.probes import logits_of, run
from retrofit.inputs.usable_models import require_no_prompt
from retrofit.numerics.agreement import Arithmetic
from retrofit.numerics.precision import as_stored
from retrofit.process import quiet, serialized

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
IMPORTS = "megatron_config"  # the entry in which an adapter names a module for PEFT to import
TRAINED_ON = "name the model that it was trained on: --base DIR"
BASE, CLASSES = "base_model_name_or_path", "auto_mapping"  # an adapter's entries about the model that it was trained on
ELSEWHERE = "train the adapter on modules that the model calls: their names are in retrofit inspect"


@serialized
def merge_adapters(model: nn.Module, *, example_inputs: Any = None) -> nn.Module:
    """Return the model inside a `PeftModel` of LoRA adapters, with their products added to its weights.

    The model is changed in place and returned without any module of PEFT. Raises `CheckpointError` for a model without adapters,
    and `VerificationError` if the merged model would compute another function; the adapters are then still there.
    """
    require_no_prompt(model)
    merge = getattr(model, "merge_and_unload", None)
    inside: Any = getattr(model, "base_model", None)
    if merge is None or inside is None:
        raise CheckpointError(
            f"{type(model).__name__} holds no adapters",
            why="it is not a PEFT model with mergeable adapters",
            remedy="pass the result of peft.get_peft_model or PeftModel.from_pretrained",
            code="no-adapters",
        )
    model.eval()
    inputs = named_inputs(inside.model, example_inputs)
    with preserve_random_state():
        arithmetic = Arithmetic(model, inputs)

        def ways() -> tuple[Tensor, Tensor]:
            expected = logits_of(run(model, inputs))
            with merged_for_now(inside):
                return logits_of(run(model, inputs)), expected

        found = arithmetic.compare(ways)
    if not found.agrees:
        raise VerificationError(
            "the adapters cannot be merged: the merged model computes another function",
            why=f"{found.measured} apart; an adapted module is read instead of called, or its weight is shared",
            remedy=ELSEWHERE,
            code="differs",
        )
    with quiet():
        merged: nn.Module = merge(safe_merge=True)
    return merged.eval()


@contextlib.contextmanager
def merged_for_now(inside: Any) -> Iterator[None]:
    """Within this context the adapters are merged into the weights; afterwards the weights are restored, bit for bit."""
    with as_stored(), torch.no_grad():
        kept = {name: parameter.detach().clone() for name, parameter in inside.model.named_parameters()}
    inside.merge_adapter(safe_merge=True)
    try:
        yield
    finally:
        inside.unmerge_adapter()
        with as_stored():
            for name, parameter in inside.model.named_parameters():
                if name in kept:
                    parameter.data = kept[name]  # a merge in a wider dtype left a wider tensor there


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """Return `adapter_config.json`. Raises `CheckpointError` if it or the weights are missing, or it names code to import."""
    file = folder / CONFIG
    if not file.is_file():
        raise CheckpointError(
            f"{folder} holds no adapter",
            why=f"there is no {CONFIG} in it",
            remedy="use a directory written by PEFT's save_pretrained",
            code="no-adapters",
        )
    if not (folder / WEIGHTS).is_file():
        raise CheckpointError(f"{folder} has no {WEIGHTS}", why="an adapter's weights are read as safetensors only", code="missing")
    try:
        config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        imports = config.get(IMPORTS)
    except (ValueError, AttributeError) as error:
        raise CheckpointError(f"{file} is not an adapter config", why=first_line(error), code="unreadable") from error
    if imports:
        raise CheckpointError(
            f"{file} names a module to import", why=f"{IMPORTS} has PEFT do so", remedy="remove that entry", code="untrusted"
        )
    return config


def other_base(folder: Path, base: Path, why: str, remedy: str) -> CheckpointError:
    return CheckpointError(
        f"the adapter in {folder} belongs to another model than {base}", why=why, remedy=remedy, code="other-model"
    )


def load_adapted(folder: Path, model: nn.Module) -> nn.Module:
    """Return `model` with the adapter in `folder`. Raises `CheckpointError` if it does not fit, or PEFT is not installed."""
    read_adapter_config(folder)
    try:
        from peft import PeftModel, set_peft_model_state_dict
    except ImportError as error:
        raise CheckpointError(
            f"{folder} is an adapter of PEFT", why=first_line(error), remedy="pip install peft", code="not-installed"
        ) from error
    extents_in(folder / WEIGHTS)  # raises if the file is damaged
    base = {id(parameter) for parameter in model.parameters()}
    try:
        with quiet():
            adapted: Any = PeftModel.from_pretrained(model, str(folder), local_files_only=True)
            found: Any = set_peft_model_state_dict(adapted, load_file(folder / WEIGHTS))  # again: only this result lists the rest
    except Exception as error:  # of any type, from PEFT
        raise CheckpointError(
            f"the adapter in {folder} does not fit {type(model).__name__}",
            why=first_line(error),
            remedy=TRAINED_ON,
            code="other-model",
        ) from error
    if adapted.active_peft_config.is_prompt_learning:
        raise CheckpointError(
            f"the adapter in {folder} cannot be merged",
            why=f"{adapted.peft_type.value} adds virtual tokens and changes no weight",
            remedy="load it with the model: PeftModel.from_pretrained(model, DIR)",
            code="prompt",
        )
    added = {name for name, parameter in adapted.named_parameters() if id(parameter) not in base}
    if left := [*found.unexpected_keys, *sorted(added.intersection(found.missing_keys))]:
        raise CheckpointError(
            f"the adapter in {folder} belongs to another model than this {type(model).__name__}",
            why=f"not both in the adapter and in the model: {first_few(left, 1)}",
            remedy=TRAINED_ON,
            code="other-model",
        )
    whole: nn.Module = adapted
    return whole
