"""What retrofit achieves on one architecture of the zoo, column by column, with the reason where it falls short."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect as signatures
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import transformers
from support import zoo
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

import retrofit
from retrofit.anatomy import Anatomy
from retrofit.anatomy.parts import Stack
from retrofit.errors import CaptureError, RetrofitError, VerificationError
from retrofit.passbase.protocol import parse_spec
from retrofit.rewriting import apply_reported

TOLERANCE = 1e-5  # of the largest dense logit
NEW_TOKENS = 6
STEPS = 3
AUTO = {
    "causal": transformers.AutoModelForCausalLM,
    "masked": transformers.AutoModelForMaskedLM,
    "seq2seq": transformers.AutoModelForSeq2SeqLM,
    "image": transformers.AutoModelForImageClassification,
}
COLUMNS = ("captured", "anatomy", "exact", "generates", "trains", "saved")
Inputs = dict[str, Any]


@dataclasses.dataclass
class Row:
    """One line of the table; a cell begins with `yes`, `no`, `refused`, `dense cannot` or is `—`."""

    id: str
    captured: str = "—"
    anatomy: str = "—"
    exact: str = "—"
    generates: str = "—"
    trains: str = "—"
    saved: str = "—"
    transformer: bool = False  # some stack has attentions and feed-forwards
    dense: str = ""  # how the dense model itself misbehaves
    seconds: float = 0.0


def assess(name: str, spec: str) -> Row:
    """The row of the architecture `name` under the pass `spec`."""
    entry = zoo.entry(name)
    row = Row(name)
    if reason := zoo.skip_reason(entry):
        row.captured = f"dense cannot: {reason}"
        return row
    model = zoo.build(entry)
    example = zoo.inputs(entry, model)
    try:
        anatomy = retrofit.inspect(model, example_inputs=example)
    except CaptureError as error:
        row.captured = f"no: {one_line(error)}"
        return row
    except RetrofitError as error:
        row.captured, row.anatomy = "yes", f"no: {one_line(error)}"
        return row
    row.captured, row.anatomy = "yes", f"yes: {describe_stacks(anatomy)}"
    row.transformer = any(is_transformer(stack) for stack in anatomy.stacks)
    before = Behaviour.of(entry, model)
    row.dense = before.complaint
    dense_shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    note = ""
    try:
        retrofit.apply(model, spec, example_inputs=example, verify=False)
    except RetrofitError as error:
        row.exact = f"refused: {one_line(error)}"
        if "embedding=recycled" not in getattr(error, "remedy", ""):
            return row
        note = f", recycled only: {one_line(error)}"
        try:  # the fix that the refusal names
            retrofit.apply(model, "altup(embedding=recycled)", example_inputs=example, verify=False)
        except RetrofitError:
            return row
    row.exact = attempt(lambda: agreement(before, Behaviour.logits_of(entry, model))) + note
    row.generates = attempt(lambda: generation(before, Behaviour.tokens_of(entry, model)))
    row.saved = attempt(lambda: round_trip(entry, model))
    new = [(name, one) for name, one in model.named_parameters() if is_new(name, one, dense_shapes)]
    row.trains = attempt(lambda: training(entry, model, new))
    return row


def assess_pass(name: str, spec: str) -> str:
    """How the pass `spec` fares on the architecture `name`: `yes` where the rewritten model comes through every check."""
    entry = zoo.entry(name)
    if reason := zoo.skip_reason(entry):
        return f"dense cannot: {reason}"
    model = zoo.build(entry)
    example = zoo.inputs(entry, model)
    try:
        data = [zoo.inputs(entry, model, batch=8, seed=1)] if parse_spec(spec).needs_calibration else None
        applied = apply_reported(model, spec, example_inputs=example, calibration=data, count_flops=False)
    except VerificationError as error:
        return f"no: {'; '.join(f'{check.name}: {check.why or check.measured}' for check in error.report.failed)}"
    except CaptureError as error:
        return f"not captured: {one_line(error)}"
    except RetrofitError as error:
        return f"refused: {one_line(error)}"
    assert applied.report is not None
    (rewrite,) = applied.rewrites
    left = f", {len(rewrite.skipped)} left alone ({rewrite.skipped[0].why})" if rewrite.skipped else ""
    return f"yes: {len(rewrite.sites)} sites{left}; {applied.report['function'].measured}"


def attempt(check: Callable[[], str]) -> str:
    """The check's verdict, or what it raised."""
    try:
        return check()
    except Exception as error:
        return f"no: {one_line(error)}"


def one_line(error: BaseException) -> str:
    """An error in one line."""
    first = next(iter(str(error).strip().splitlines()), "")
    text = first if isinstance(error, RetrofitError) else f"{type(error).__name__}: {first}"
    why = getattr(error, "why", "")
    return f"{text} ({why.splitlines()[0]})" if why else text


def describe_stacks(anatomy: Anatomy) -> str:
    return "; ".join(f"{stack.kind} {len(stack.layers)} × ({kinds(stack)})" for stack in anatomy.stacks)


def kinds(stack: Stack) -> str:
    """The roles of the layers' branches, alternatives separated by a slash."""
    return " / ".join(dict.fromkeys(" + ".join(branch.role for branch in layer.branches) for layer in stack.layers))


def is_transformer(stack: Stack) -> bool:
    return any(layer.attentions for layer in stack.layers) and any(layer.ffns for layer in stack.layers)


def is_new(name: str, parameter: nn.Parameter, dense: dict[str, torch.Size]) -> bool:
    """A coefficient of the pass, or a dense parameter that has grown."""
    return name.rpartition(".")[2] in ("p", "g") if name not in dense else dense[name] != parameter.shape


@dataclasses.dataclass
class Behaviour:
    """What a model does: logits on several batches, tokens it generates with and without a cache."""

    logits: dict[str, torch.Tensor | str]
    tokens: dict[str, torch.Tensor | str]

    @classmethod
    def of(cls, entry: zoo.Entry, model: PreTrainedModel) -> Behaviour:
        return cls(cls.logits_of(entry, model), cls.tokens_of(entry, model))

    @staticmethod
    @torch.no_grad()
    def logits_of(entry: zoo.Entry, model: PreTrainedModel) -> dict[str, torch.Tensor | str]:
        """Logits of other batches than the captured one, plain, padded, of larger images; the reason where there are none."""
        fresh = zoo.inputs(entry, model, batch=3, length=9, seed=5)
        found = {"plain": outcome_of(lambda: zoo.logits(model(**fresh)))}
        if "pixel_values" in fresh and fresh["pixel_values"].dim() == 4:
            larger = functional.interpolate(fresh["pixel_values"], scale_factor=1.5)
            found["larger"] = outcome_of(lambda: zoo.logits(model(**{**fresh, "pixel_values": larger})))
        if entry.task != "image":
            mask = padding_mask(entry, 3, 9)
            found["padded"] = outcome_of(lambda: unpadded_logits(zoo.logits(model(**fresh, attention_mask=mask)), mask, entry))
        return found

    @staticmethod
    @torch.no_grad()
    def tokens_of(entry: zoo.Entry, model: Any) -> dict[str, torch.Tensor | str]:
        """Greedy continuations by whether a cache is used; the reason where there are none."""
        if entry.task not in ("causal", "seq2seq"):
            return {}
        prompt = zoo.inputs(entry, model, batch=2, length=7, seed=6)
        prompt.pop("decoder_input_ids", None)
        options = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False, "num_beams": 1}
        return {
            "with a cache": outcome_of(lambda: model.generate(**prompt, use_cache=True, **options)),
            "without": outcome_of(lambda: model.generate(**prompt, use_cache=False, **options)),
        }

    @property
    def complaint(self) -> str:
        """How the model itself misbehaves; empty where it does not."""
        needed = {name: result for name, result in (self.logits | self.tokens).items() if name != "larger"}
        failing = [f"{name}: {result}" for name, result in needed.items() if isinstance(result, str)]
        cached, uncached = self.tokens.get("with a cache"), self.tokens.get("without")
        if torch.is_tensor(cached) and torch.is_tensor(uncached) and not torch.equal(cached, uncached):
            failing.append("generates other tokens with a cache than without")
        return "; ".join(failing)


def outcome_of(compute: Callable[[], Any]) -> torch.Tensor | str:
    """The tensor computed, or why it could not be."""
    try:
        result = compute()
    except Exception as error:
        return one_line(error)
    tensor = result if torch.is_tensor(result) else result.sequences
    return tensor if torch.isfinite(tensor).all() else "not finite"


def padding_mask(entry: zoo.Entry, batch: int, length: int) -> torch.Tensor:
    """A mask that hides up to half of each row, on the left for causal models, on the right for the others."""
    mask = torch.ones(batch, length, dtype=torch.long)
    for row in range(1, batch):
        hidden = row * length // (2 * batch)
        mask[row, slice(hidden) if entry.task == "causal" else slice(length - hidden, length)] = 0
    return mask


def unpadded_logits(logits: torch.Tensor, mask: torch.Tensor, entry: zoo.Entry) -> torch.Tensor:
    """The logits of the positions that are not padding, where the logits are of those positions."""
    return logits[mask.bool()] if logits.shape[:2] == mask.shape else logits


def agreement(before: Behaviour, after: dict[str, torch.Tensor | str]) -> str:
    worst, where = 0.0, "plain"
    for name, dense in before.logits.items():
        rewritten = after[name]
        if isinstance(dense, str):
            continue
        if isinstance(rewritten, str):
            return f"no: {name}: {rewritten}"
        if dense.shape != rewritten.shape:
            return f"no: {name}: logits of shape {tuple(rewritten.shape)}, dense ones {tuple(dense.shape)}"
        error = ((dense - rewritten).abs().max() / dense.abs().max()).item()
        worst, where = max((worst, where), (error, name))
    return f"yes ({worst:.0e})" if worst <= TOLERANCE else f"no: {where} logits differ by {worst:.0e}"


def generation(before: Behaviour, after: dict[str, torch.Tensor | str]) -> str:
    if not before.tokens:
        return "—"
    usable = {name: tokens for name, tokens in before.tokens.items() if torch.is_tensor(tokens)}
    if not usable:
        return f"dense cannot: {before.tokens['with a cache']}"
    for name, dense in usable.items():
        rewritten = after[name]
        if isinstance(rewritten, str):
            return f"no: {name}: {rewritten}"
        if not torch.equal(dense, rewritten):
            return f"no: other tokens than the dense model {name}"
    return "yes" if len(usable) == 2 and not before.complaint else "yes, as the dense model does"


def round_trip(entry: zoo.Entry, model: PreTrainedModel) -> str:
    """Saved and loaded through the stock auto class, the logits are the same bits."""
    verdict = reload_and_compare(entry, model)
    if verdict == "yes":
        return verdict
    dense = reload_and_compare(entry, zoo.build(entry))
    return f"dense cannot: {dense}" if dense != "yes" else f"no: {verdict}"


@torch.no_grad()
def reload_and_compare(entry: zoo.Entry, model: PreTrainedModel) -> str:
    fresh = zoo.inputs(entry, model, batch=3, length=9, seed=5)
    expected = zoo.logits(model(**fresh))
    try:
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            found = zoo.logits(AUTO[entry.task].from_pretrained(folder)(**fresh))
    except Exception as error:
        return one_line(error)
    if expected.shape == found.shape and torch.equal(expected, found):
        return "yes"
    return (
        f"logits differ by {(expected - found).abs().max() / expected.abs().max():.0e}"
        if expected.shape == found.shape
        else "other shape"
    )


def training(entry: zoo.Entry, model: PreTrainedModel, new: list[tuple[str, nn.Parameter]]) -> str:
    """Every new parameter gets a finite gradient, and a few steps lower the loss."""
    verdict = train_a_few_steps(entry, model, new)
    if verdict == "yes":
        return verdict
    dense = train_a_few_steps(entry, zoo.build(entry), [])
    return f"dense cannot: {dense}" if dense != "yes" else f"no: {verdict}"


def train_a_few_steps(entry: zoo.Entry, model: PreTrainedModel, new: list[tuple[str, nn.Parameter]]) -> str:
    given = with_labels(entry, model)
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-3)
    losses = []
    model.train()
    try:
        for _ in range(STEPS + 1):
            optimizer.zero_grad()
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)  # the same dropout at every step, so that the losses compare
                loss = loss_of(model, given)
            loss.backward()
            losses.append(loss.item())
            for name, parameter in new if len(losses) == 1 else ():
                if parameter.requires_grad and (parameter.grad is None or not parameter.grad.isfinite().all()):
                    return f"{name} gets no finite gradient"
            optimizer.step()
    except Exception as error:
        return one_line(error)
    finally:
        optimizer.zero_grad()
        model.eval()
    return "yes" if losses[-1] < losses[0] else f"the loss went from {losses[0]:.3f} to {losses[-1]:.3f}"


def with_labels(entry: zoo.Entry, model: PreTrainedModel) -> Inputs:
    """Inputs with labels as the task has them."""
    given = zoo.inputs(entry, model, seed=7)
    if entry.task == "image":
        labels = torch.arange(2) % zoo.LABELS
    else:
        labels = given.get("decoder_input_ids", given.get("input_ids", torch.full((2, 12), zoo.FIRST_FREE_ID)))
    return {**given, "labels": labels.clone()}


def loss_of(model: PreTrainedModel, given: Inputs) -> torch.Tensor:
    """The model's own loss; the cross-entropy of its logits where it has none for these labels."""
    if "labels" in signatures.signature(model.forward).parameters:
        with contextlib.suppress(ValueError):  # of logits and labels that do not match in number
            loss = model(**given).get("loss")
            if loss is not None:
                return loss
    rows = zoo.logits(model(**{name: value for name, value in given.items() if name != "labels"})).flatten(0, -2)
    labels = given["labels"].flatten()
    count = min(len(rows), len(labels))
    return functional.cross_entropy(rows[:count], labels[:count])
