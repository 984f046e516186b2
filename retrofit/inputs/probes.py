"""Short inputs to run a model on, and its outputs for them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from retrofit.errors import RetrofitError
from retrofit.inputs.example_inputs import forward_parameters, special_ids
from retrofit.inputs.model_state import preserve_state
from retrofit.process import set_variable

Inputs = Mapping[str, Any]


# ── Inputs ───────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def is_per_token(value: Any) -> bool:
    """Return whether an input holds one integer per token: (batch, length)."""
    return isinstance(value, torch.Tensor) and value.dim() == 2 and not value.is_floating_point()


def is_token_ids(value: Any) -> bool:
    """Return whether an input holds token ids: one integer per token, and neither a mask nor position numbers."""
    if not is_per_token(value) or value.dtype == torch.bool or value.numel() == 0 or int(value.max()) <= 1:
        return False
    return value.unique().numel() > 1 and not is_numbering(value)


def is_floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def is_numbering(value: torch.Tensor) -> bool:
    return value.shape[1] > 1 and bool((value == torch.arange(value.shape[1], device=value.device)).all())


def extent_of(inputs: Inputs) -> tuple[int, int]:
    """Return batch size and length of the inputs; the length is that of the longest input of token ids, 0 if there is none."""
    batch = next((value.shape[0] for value in inputs.values() if isinstance(value, torch.Tensor) and value.dim()), 1)
    return batch, max((value.shape[1] for value in inputs.values() if is_token_ids(value)), default=0)


def resized(model: nn.Module, inputs: Inputs, batch: int, length: int, seed: int = 0) -> dict[str, Any]:
    """Return new inputs of the same kinds for a batch size and length: new token ids, masks and positions extended, others redrawn.

    Placeholder tokens for another input stay where they are, if the length leaves room for all of them.
    """
    old_batch, old_length = extent_of(inputs)
    generator = torch.Generator().manual_seed(seed)
    fresh: dict[str, Any] = {}
    for name, value in inputs.items():
        if not isinstance(value, torch.Tensor) or value.dim() == 0 or value.shape[0] != old_batch:
            fresh[name] = value
        elif is_per_token(value) and old_length:
            held, pool = placeholders(inputs, name).nonzero().flatten(), ordinary_ids(model, inputs, name)
            fresh[name] = resized_tokens(value, batch, max(1, value.shape[1] + length - old_length), pool, generator)
            if len(held) and held.max() < fresh[name].shape[1]:
                fresh[name][:, held] = value[0, held]
        else:
            fresh[name] = redrawn(value, batch, length if old_length and value.shape[1:2] == (old_length,) else None, generator)
    return fresh


def resized_like(model: nn.Module, inputs: Inputs, batch: int, seed: int) -> dict[str, Any]:
    """Return new inputs of the same kinds and length for another batch size."""
    return resized(model, inputs, batch, extent_of(inputs)[1], seed)


def resized_tokens(value: torch.Tensor, batch: int, length: int, pool: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if is_token_ids(value):
        return pool[drawn(len(pool), batch, length, generator)].to(value)
    if is_numbering(value):
        return torch.arange(length).to(value).expand(batch, length).contiguous()
    rows, columns = torch.arange(batch) % value.shape[0], torch.arange(length) % value.shape[1]
    return value[rows.to(value.device)][:, columns.to(value.device)]


def placeholders(inputs: Inputs, name: str) -> torch.Tensor:
    """Return the positions at which tokens are placeholders for another input, such as an image's patches: (length,).

    At a run of such positions every row has the same id, and the inputs include floating-point numbers; never all positions.
    """
    ids = inputs[name]
    found = torch.zeros(ids.shape[1], dtype=torch.bool, device=ids.device)
    if is_token_ids(ids) and any(map(is_floating, inputs.values())):
        first = ids[:1]
        repeats = (ids[:, 1:] == first[:, :-1]).all(0) & (ids[:, :-1] == first[:, :-1]).all(0)  # the id before, in all rows
        found[1:] |= repeats
        found[:-1] |= repeats
    return found


def drawn(count: int, batch: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """Return numbers below `count`, (batch, length), distinct in each row if possible: rounding would decide ties."""
    if length > count:
        return torch.randint(count, (batch, length), generator=generator)
    return torch.rand(batch, count, generator=generator).argsort(-1)[:, :length]


def ordinary_ids(model: nn.Module, inputs: Inputs, name: str) -> torch.Tensor:
    """Return the ids between the least and the greatest of an input, without special ones and placeholders."""
    ids = inputs[name]
    special = special_ids(model).union(ids[:, placeholders(inputs, name)].flatten().tolist())
    low, high = int(ids.min()), int(ids.max())
    return torch.tensor([token for token in range(low, min(high, low + 4096) + 1) if token not in special] or [low, high])


def redrawn(value: torch.Tensor, batch: int, length: int | None, generator: torch.Generator) -> torch.Tensor:
    rows = value[(torch.arange(batch) % value.shape[0]).to(value.device)]
    if length is not None:
        rows = rows[:, (torch.arange(length) % value.shape[1]).to(value.device)]
    if not value.is_floating_point():
        return rows
    noise = torch.randn(rows.shape, generator=generator, dtype=torch.float32).to(value)
    spread = value.float().std() if value.numel() > 1 else torch.tensor(1.0)
    return value.float().mean().to(value) + spread.to(value) * noise


def describe(inputs: Inputs) -> str:
    """Return the shapes of the inputs, `input_ids 2×11`."""
    tensors = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    return ", ".join(f"{name} {'×'.join(map(str, value.shape))}" for name, value in tensors.items())


def accepts(model: nn.Module, name: str) -> bool:
    """Return whether the model's forward names the argument `name`, or, for a model with a config, accepts any argument."""
    parameters = forward_parameters(model)
    if name in parameters:
        return True
    return hasattr(model, "config") and all(
        parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) for parameter in parameters.values()
    )


def has_two_sides(inputs: Inputs) -> bool:
    """Return whether the inputs are those of an encoder and a decoder, by Hugging Face's names."""
    return any(map(is_decoder_side, inputs))


def is_decoder_side(name: str) -> bool:
    return name.startswith("decoder_")


def ids_name(inputs: Inputs, decoder: bool = False) -> str | None:
    """Return the argument with the token ids of the encoder or decoder side."""
    return next((name for name, value in inputs.items() if is_token_ids(value) and is_decoder_side(name) == decoder), None)


def can_generate(model: nn.Module, inputs: Inputs) -> bool:
    """Return whether the model claims to support generation and accepts token ids to continue."""
    says = getattr(model, "can_generate", None)
    return ids_name(inputs) is not None and callable(says) and bool(says())


def filler_id(model: nn.Module) -> int:
    """Return the padding token's id."""
    config = getattr(model, "config", None)
    pad, size = getattr(config, "pad_token_id", None), getattr(config, "vocab_size", None)
    return pad if isinstance(pad, int) and pad >= 0 and (not isinstance(size, int) or pad < size) else 0


# ── Outputs ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


GIVEN: ContextVar[set[str] | None] = ContextVar("given", default=None)


@contextlib.contextmanager
def recording_arguments() -> Iterator[set[str]]:
    """Within this context the names of the arguments that models are run with are recorded."""
    names: set[str] = set()
    with set_variable(GIVEN, names):
        yield names


def record_arguments(inputs: Inputs) -> None:
    """Record the names of the arguments, except those that are None, if arguments are recorded."""
    names = GIVEN.get()
    if names is not None:
        names.update(name for name, value in inputs.items() if value is not None)


@torch.no_grad()
def run(model: nn.Module, inputs: Inputs, **more: Any) -> Any:
    """Return the model's output for the inputs."""
    given = {**inputs, **more}
    record_arguments(given)
    return model(**given)


def named_outputs(output: Any) -> dict[str, torch.Tensor]:
    """Return the floating-point tensors of a model's output, by key or position, without nested ones."""
    if isinstance(output, torch.Tensor):
        return {"output": output}
    if isinstance(output, (tuple, list)):
        output = dict(enumerate(output))
    items = (output if isinstance(output, Mapping) else vars(output)).items()
    return {str(key): value for key, value in items if isinstance(value, torch.Tensor) and value.is_floating_point()}


def output_ids_name(inputs: Inputs, outputs: torch.Tensor) -> str | None:
    """Return the argument of token ids with one output per token; None if there is none."""
    name = ids_name(inputs, decoder=has_two_sides(inputs))
    return name if name is not None and outputs.dim() == 3 and inputs[name].shape[1] == outputs.shape[1] else None


def logits_of(output: Any) -> torch.Tensor:
    """Return a model's main output: its logits, else its last hidden state, else the first floating-point tensor."""
    outputs = named_outputs(output)
    for name in ("logits", "last_hidden_state", *outputs):
        if name in outputs:
            return outputs[name]
    raise RetrofitError(
        "the model returned no floating-point tensor",
        why=f"it returned {type(output).__name__}",
        remedy="wrap it in a module that returns a tensor or a mapping of tensors",
        code="no-tensors",
    )


def distinct_lengths(model: nn.Module, inputs: Inputs) -> dict[str, Any]:
    """Return the inputs; if both sides have the same length, the second is one token longer, provided the model accepts that.

    The sides are inferred: they are the two arguments with token ids, and the arguments with names similar to the second's. Inputs
    without values (on the meta device) are returned unchanged.
    """
    second = second_side(inputs)
    longer = {name: one_token_longer(value) if name in second else value for name, value in inputs.items()}
    try:
        if second:
            with preserve_state(model), torch.no_grad():
                run(model, longer)
    except Exception:  # of any type, from the model's own code: it accepts only equal lengths
        return dict(inputs)
    return longer


def second_side(inputs: Inputs) -> set[str]:
    """Return the arguments that may belong to the second side; empty unless there are two sides of equal length."""
    ids = [name for name, value in inputs.items() if isinstance(value, torch.Tensor) and not value.is_meta and is_token_ids(value)]
    if len(ids) != 2 or inputs[ids[0]].shape != inputs[ids[1]].shape:
        return set()
    shape = inputs[ids[0]].shape
    named = [name for name, value in inputs.items() if isinstance(value, torch.Tensor) and value.shape[:2] == shape]
    return {name for name in named if likeness(name, ids[1]) > likeness(name, ids[0])}


def likeness(name: str, other: str) -> int:
    """Return the length of the names' common prefix."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(name, other, strict=False)))


def one_token_longer(value: torch.Tensor) -> torch.Tensor:
    """Return the values with the first token's repeated at the end; position numbers continue."""
    if is_per_token(value) and is_numbering(value):
        return torch.arange(value.shape[1] + 1).to(value).expand(len(value), -1).contiguous()
    return torch.cat([value, value[:, :1]], 1)
