"""A teacher's predictions for a text, computed once and kept on disk, for any number of runs that learn from them."""

from __future__ import annotations

import dataclasses
import hashlib
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from retrofit.errors import RetrofitWarning, TrainingError
from retrofit.files.atomic_writes import held, is_held, require_place
from retrofit.files.model_folders import is_file_name
from retrofit.inputs.example_inputs import vocabulary_of
from retrofit.inputs.model_memory import value_of
from retrofit.inputs.model_state import evaluation_mode
from retrofit.inputs.usable_models import require_module
from retrofit.passbase.tokenization import Codec, text_codec, windows_of
from retrofit.training.distillation import LargestPredictions
from retrofit.training.objectives import (
    IGNORED,
    Collator,
    Objective,
    add_loss,
    embeds_sentences,
    list_of,
    objective_for,
    token_logits,
    without_labels,
)
from retrofit.training.settings import check_values
from retrofit.training.teacher import placed_on
from retrofit.training.teacher_cache import RECORD, SHARDS, TENSORS, Facts, KeptPredictions, difference, read_facts, write_facts
from retrofit.training.trainers import trains_on_cpu
from retrofit.training.windows import beyond_positions, numbered_windows, require_windows, window_seed

SAMPLES = 64  # hashed values of a parameter
UNRELATED = ("transformers_version", "dtype", "architectures")  # fields of a config without effect on the outputs


def hash_windows(windows: torch.Tensor) -> str:
    return short_hash(windows.contiguous().numpy().tobytes())


def hash_example(example: Mapping[str, torch.Tensor]) -> str:
    """Return a hash of a window's inputs and targets."""
    digest = b"".join(name.encode() + example[name].long().contiguous().numpy().tobytes() for name in sorted(example))
    return short_hash(digest)


def hash_tokenizer(codec: Codec, tokenizer: Any = None) -> str:
    """Return a hash of the tokenizer's words and ids, or of the conversion of bytes to ids without a tokenizer."""
    words = [codec.name] if tokenizer is None else sorted(f"{word} {index}" for word, index in tokenizer.get_vocab().items())
    return hash_lines(words)


def hash_weights(model: nn.Module | None) -> str:
    """Return the architecture of a model and a hash of samples of its weights; "" without a model."""
    if model is None:
        return ""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        value = value_of(model, name) if parameter.is_meta else parameter.detach()
        digest.update(value.flatten()[:: max(1, value.numel() // SAMPLES)].float().cpu().numpy().tobytes())
    return f"{hash_architecture(model)} {digest.hexdigest()[:16]}"


def hash_architecture(model: nn.Module) -> str:
    """Return the class of a model and a hash of its parameters' names and shapes."""
    shapes = [f"{name} {tuple(parameter.shape)}" for name, parameter in model.named_parameters()]
    return f"{type(model).__name__} {hash_lines(shapes)}"


def hash_trained(model: nn.Module) -> str:
    """Return the number of trainable parameters and a hash of their names."""
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    return f"{len(names)} {hash_lines(names)}"


def hash_settings(model: nn.Module) -> str:
    """Return a hash of a model's settings besides its weights: dtypes, config, attention kernel."""
    config = getattr(model, "config", None)
    given = config.to_dict() if config is not None and hasattr(config, "to_dict") else {}
    kept = {name: value for name, value in given.items() if name[0] != "_" and name not in UNRELATED}
    kernel = getattr(config, "_attn_implementation", None)
    dtypes = sorted({str(parameter.dtype) for parameter in model.parameters()})
    return hash_lines([f"{dtypes} {kernel} {sorted(kept.items(), key=lambda item: item[0])}"])


def hash_lines(lines: Sequence[str]) -> str:
    return short_hash("\n".join(lines).encode(errors="surrogatepass"))


def short_hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


# ── Predictions for a text ────────────────────────────────────────────────────────────────────────────────────────────────────────


SHARD_BYTES = 1 << 22  # of a file, about
SMALL_IDS = 1 << 16  # size of a vocabulary whose ids fit into 16 bits


def teach(
    dense: nn.Module,
    texts: Sequence[str],
    folder: str | Path,
    *,
    tokenizer: Any = None,
    length: int = 256,
    top: int = 64,
    temperature: float = 1.0,
    seed: int = 0,
    batch_size: int = 8,
    bf16: bool = False,
    device: str = "auto",
    name: str = "",
    force: bool = False,
    progress: Callable[[str], None] = lambda stage: None,
) -> KeptPredictions:
    """Write the predictions of `dense` for all windows of the texts into `folder`, file by file, each completely or not at all.

    The `top` largest probabilities of a token and the sum of the others are kept. Existing files are not computed again. `name` is
    recorded as the teacher's. Raises `TrainingError` if the folder holds something else and `force` is not given.
    """
    folder = Path(folder)
    if is_file_name(folder):
        raise TrainingError(
            f"{folder} cannot hold predictions", why="they are written as a directory", remedy=f"name it {folder.stem}", code="name"
        )
    require_module(dense)
    check_values(length=length, top=top, seed=seed, batch_size=batch_size, temperature=temperature)
    if embeds_sentences(dense):
        raise TrainingError(
            "a sentence-transformers model does not predict tokens",
            why="it returns one vector per text",
            remedy="use the dense model as the teacher",
            code="no-logits",
        )
    codec = text_codec(dense, tokenizer)
    windows = windows_of(texts, codec, length)
    require_windows(windows)
    if beyond := beyond_positions(dense, length):
        warnings.warn(beyond, RetrofitWarning, stacklevel=2)
    learner = add_loss(dense)
    objective = objective_for(learner, codec, windows[0].long())
    facts = facts_of(dense, codec, tokenizer, objective, windows, seed=seed, temperature=temperature)
    top = min(top, facts.vocabulary)
    tokens = objective.example(windows[0].long(), torch.Generator().manual_seed(seed))["labels"].numel()
    shard = max(1, min(len(windows), SHARD_BYTES // (tokens * (top * 4 + 2))))
    facts = dataclasses.replace(facts, teacher=name, top=top, bf16=bf16, shard=shard)
    kept = KeptPredictions(folder, facts)
    prepare_folder(kept, force=force)
    data = numbered_windows(windows, torch.arange(len(windows)), seed)
    collator = Collator(objective)
    target = torch.device("cpu" if trains_on_cpu(device) else torch.accelerator.current_accelerator() or "cpu")
    missing = kept.missing()
    began = time.monotonic()
    with held(folder), evaluation_mode(dense), torch.no_grad(), placed_on(target, dense):
        for done, number in enumerate(missing):
            numbers = range(number * shard, min((number + 1) * shard, len(windows)))
            parts = []
            for start in range(numbers.start, numbers.stop, batch_size):
                end = min(start + batch_size, numbers.stop)
                examples = collator([data[index] for index in range(start, end)])
                batch = {key: value.to(target) for key, value in examples.items()}
                parts.append(predicted(learner, batch, objective.shift, facts))
                left = remaining(began, done + (end - numbers.start) / len(numbers), len(missing))
                progress(f"window {end:,}/{len(windows):,}{left}")
            kept.write(number, {key: torch.cat([part[key] for part in parts]) for key in parts[0]})
    return kept


def facts_of(
    model: nn.Module,
    codec: Codec,
    tokenizer: Any,
    objective: Objective,
    windows: Tensor,
    *,
    seed: int,
    temperature: float,
) -> Facts:
    """Return the facts that a model's predictions for these windows depend on, without those of their storage."""
    example = objective.example(windows[0].long(), torch.Generator().manual_seed(window_seed(seed, 0)))
    return Facts(
        teacher="",
        weights=hash_weights(model),
        vocabulary=vocabulary_of(model),
        tokenizer=hash_tokenizer(codec, tokenizer),
        objective=objective.name,
        example=hash_example(example),
        length=windows.shape[1],
        windows=len(windows),
        text=hash_windows(windows),
        top=0,
        temperature=temperature,
        seed=seed,
        bf16=False,
        shard=1,
    )


def prepare_folder(kept: KeptPredictions, *, force: bool) -> None:
    """Create the folder with its record; raise `TrainingError` where it is for something else."""
    folder, facts = kept.folder, kept.facts
    if is_held(folder):
        raise TrainingError(
            f"{folder} is being written by another process", remedy="wait until it is done, or choose another -o", code="busy"
        )
    before = read_facts(folder)
    if before is not None and not any(folder.glob(SHARDS)):
        (folder / RECORD).unlink()  # no shard was written
        before = None
    if folder.exists() and before is None and (not folder.is_dir() or any(folder.iterdir())):
        raise TrainingError(
            f"{folder} exists already",
            why="it does not hold predictions of retrofit teach",
            remedy="choose another -o",
            code="occupied",
        )
    if before is not None and before != dataclasses.replace(facts, teacher=before.teacher):
        if not force:
            if (found := difference(before, facts)) is not None:
                why = f"they are of {found.what}: {found.why}"
            else:
                fields = [field.name for field in dataclasses.fields(Facts)]
                names = [name for name in fields if getattr(before, name) != getattr(facts, name)]
                shown = [name for name in names if name in ("top", "seed", "bf16", "weights")] or names
                why = "; ".join(f"its {name} is {getattr(before, name)}, not {getattr(facts, name)}" for name in shown)
            raise TrainingError(
                f"{folder} holds other predictions", why=why, remedy="choose another -o, or start over with --force", code="exists"
            )
        for file in (*folder.glob(SHARDS), folder / RECORD):  # the record last: it identifies the folder
            file.unlink()
        before = None
    if before is None:
        require_place(folder)
        folder.mkdir(exist_ok=True)
        write_facts(folder, facts)


def predicted(learner: nn.Module, batch: dict[str, Tensor], shift: int, facts: Facts) -> dict[str, Tensor]:
    """Return a teacher's predictions for a batch of windows in their stored form."""
    with torch.autocast(batch["labels"].device.type, torch.bfloat16, enabled=facts.bf16):
        outputs = learner(**without_labels(learner, batch), labels=batch["labels"])
    loss, logits = float(list_of(outputs)[0]), token_logits(outputs)
    if logits.shape[-1] != facts.vocabulary:
        raise TrainingError(
            f"the teacher's logits are {logits.shape[-1]:,} numbers a token",
            why=f"its vocabulary has {facts.vocabulary:,} tokens",
            remedy="use the dense model as the teacher",
            code="other-vocabulary",
        )
    stored: dict[str, list[Tensor]] = {name: [] for name in TENSORS}
    for row, labels in zip(logits, batch["labels"], strict=True):
        largest = LargestPredictions.of(row, facts.top, facts.temperature)
        targets = F.pad(labels[shift:], (0, shift), value=IGNORED)
        stored["ids"].append(largest.ids.to(torch.uint16 if facts.vocabulary <= SMALL_IDS else torch.int32).cpu())
        stored["log_probabilities"].append(largest.log_p.half().cpu())
        stored["log_rest"].append(largest.log_rest.half().cpu())
        stored["loss"].append(F.cross_entropy(row.float(), targets).cpu())
    stacked = {name: torch.stack(values) for name, values in stored.items()}
    stacked["loss"] += loss - stacked["loss"].mean()  # the model's own loss may have further terms
    return stacked


def remaining(began: float, done: float, total: int) -> str:
    """Return the remaining time as text."""
    left = round((time.monotonic() - began) * (total - done) / done)
    return f"  {left // 60}:{left % 60:02d} left"
