"""Calibration data in every accepted form, and the inputs that a model's modules are observed on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import zoo
from support.own_models import Own
from support.refusals import refused
from torch import Tensor, nn
from torch.utils.data import DataLoader

from retrofit.errors import SpecError
from retrofit.inputs.calibration import Calibration, Enough, sample_calibration, split_calibration
from retrofit.passbase.calibration import BATCH, LENGTH, calibration_from
from retrofit.passbase.tokenization import codec_for
from retrofit.provenance import record_provenance
from retrofit.rewriting import apply

IDS = torch.arange(10, 30).repeat(3, 1)


def llama(**overrides: Any) -> Any:
    return zoo.build(zoo.entry("causal/llama"), **overrides)


class Seen:
    """Every input of a module, up to `most` tokens."""

    def __init__(self, most: int = 10**9) -> None:
        self.most, self.parts = most, []

    def __call__(self, x: Tensor) -> None:
        self.parts.append(x.clone())
        if sum(map(len, self.parts)) >= self.most:
            raise Enough

    @property
    def rows(self) -> Tensor:
        return torch.cat(self.parts)


@torch.no_grad()
def input_of(model: nn.Module, path: str, **inputs: Tensor) -> Tensor:
    """The input of the module at `path`: (batch, length, d)."""
    found: list[Tensor] = []
    handle = model.get_submodule(path).register_forward_pre_hook(lambda module, args: found.append(args[0]))
    model(**inputs)
    handle.remove()
    return found[0]


FORMS = {
    "tensor": IDS,
    "tensor of 16 bits": IDS.to(torch.uint16),
    "dictionary": {"input_ids": IDS, "labels": IDS},
    "dataloader of windows": DataLoader(IDS, batch_size=2),
    "dataloader of dictionaries": DataLoader([{"input_ids": row, "labels": row} for row in IDS], batch_size=2),
    "dataloader of tuples": DataLoader([(row, 0) for row in IDS], batch_size=3),
    "windows one by one": list(IDS),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_data_shows_the_same_inputs(form: str) -> None:
    model, seen = llama(), Seen()
    calibration_from(model, FORMS[form]).observe(model, {"model.layers.1.mlp": seen})
    torch.testing.assert_close(seen.rows, input_of(model, "model.layers.1.mlp", input_ids=IDS).flatten(0, 1))


def test_texts_are_cut_into_windows_of_bytes() -> None:
    model, seen = llama(vocab_size=300, max_position_embeddings=2 * LENGTH), Seen()
    text = "the quick brown fox " * 20
    for given in (text, [text[:200], text[200:]]):
        batches = calibration_from(model, given).batches
        ids = torch.cat([batch["input_ids"] for batch in batches])
        assert ids.shape == (len(text) // LENGTH, LENGTH)
        decoded = codec_for(model).decode(ids.flatten().tolist())
        assert text.startswith(decoded) and len(decoded) >= ids.numel() - 1  # one id may close the first text
        Calibration(batches).observe(model, {"model.layers.0.mlp": seen})
    assert len(seen.rows) == 2 * ids.numel()


def test_a_window_is_no_longer_than_the_positions_of_the_model() -> None:
    (batch,) = calibration_from(llama(vocab_size=300, max_position_embeddings=LENGTH // 4), "x" * LENGTH).batches
    assert batch["input_ids"].shape == (4, LENGTH // 4)


@pytest.mark.parametrize(("positions", "length"), [(200, LENGTH), (40, 32), (13, 11)])
def test_a_window_is_no_longer_than_a_model_without_a_config_runs_on(positions: int, length: int) -> None:
    class Counted(Own):
        def __init__(self) -> None:
            super().__init__(tokens=300)
            self.places = nn.Embedding(positions, 24)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.c(self.places(torch.arange(x.shape[1])))

    (batch, *_) = calibration_from(Counted(), "some words that fill windows. " * 50).batches
    assert batch["x"].shape[1] == length


def test_windows_go_through_in_batches() -> None:
    batches = calibration_from(llama(), IDS[:1].repeat(2 * BATCH + 1, 1)).batches
    assert [len(batch["input_ids"]) for batch in batches] == [BATCH, BATCH, 1]


def test_padding_is_not_seen() -> None:
    model, seen = llama(), Seen()
    mask = torch.ones_like(IDS)
    mask[0, :7] = 0
    mask[2, :3] = 0
    batch = {"input_ids": IDS, "attention_mask": mask}
    calibration_from(model, batch).observe(model, {"model.layers.0.mlp": seen})
    expected = input_of(model, "model.layers.0.mlp", **batch)[mask.bool()]
    assert len(seen.rows) == int(mask.sum())
    torch.testing.assert_close(seen.rows, expected)


def test_who_has_seen_enough_sees_no_more_and_nothing_is_run_for_nobody() -> None:
    model = llama()
    runs: list[int] = []
    model.register_forward_pre_hook(lambda module, args: runs.append(1))
    few, more = Seen(20), Seen(45)
    calibration_from(model, list(IDS.repeat(3, 1))).observe(model, {"model.layers.0.mlp": few, "model.layers.1.mlp": more})
    assert (len(few.rows), len(more.rows), len(runs)) == (20, 60, 3)


def test_a_module_of_several_calls_shows_them_all() -> None:
    model, seen = zoo.build(zoo.entry("masked/albert")), Seen()
    path = "albert.encoder.albert_layer_groups.0.albert_layers.0.ffn"
    calibration_from(model, IDS).observe(model, {path: seen})
    assert len(seen.parts) == model.config.num_hidden_layers


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_as_it_was(training: bool) -> None:
    model = llama(attention_dropout=0.5).train(training)
    model.model.layers[0].eval()
    before = [module.training for module in model.modules()]
    one, other = Seen(), Seen()
    for seen in (one, other):
        calibration_from(model, IDS).observe(model, {"model.layers.1.mlp": seen})
    assert torch.equal(one.rows, other.rows)  # no dropout
    assert [module.training for module in model.modules()] == before
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_failing_watcher_leaves_no_hooks_behind() -> None:
    def fails(x: Tensor) -> None:
        raise RuntimeError("no room")

    model = llama().train()
    with pytest.raises(RuntimeError, match="no room"):
        calibration_from(model, IDS).observe(model, {"model.layers.0.mlp": fails})
    assert not any(module._forward_pre_hooks for module in model.modules()) and model.training


def test_an_encoder_and_its_decoder_both_see_the_ids() -> None:
    model, encoder, decoder = zoo.build(zoo.entry("seq2seq/bart")), Seen(), Seen()
    watchers = {"model.encoder.layers.0.fc1": encoder, "model.decoder.layers.0.fc1": decoder}
    calibration_from(model, IDS).observe(model, watchers)
    assert len(encoder.rows) == len(decoder.rows) == IDS.numel()


def test_images_are_data_too() -> None:
    entry = zoo.entry("image/vit")
    model, seen = zoo.build(entry), Seen()
    pixels = zoo.inputs(entry, model, batch=3)["pixel_values"]
    calibration_from(model, pixels).observe(model, {mlp_of(model): seen})
    assert seen.rows.shape[1] == model.config.hidden_size and len(seen.rows) % 3 == 0


def mlp_of(model: nn.Module) -> str:
    """The first matrix that makes hidden units."""
    return next(
        path
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and module.out_features == model.config.intermediate_size
    )


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], "empty"),
        ({"labels": IDS}, "LlamaForCausalLM"),
        (IDS + 100_000, "token id"),
        (IDS - 100_000, "negative"),
        (IDS.flatten(), "(windows, length)"),
        (IDS[:, :0], "(3, 0)"),
        (IDS.float(), "ids.long()"),
        (3, "an int"),
        ([3], "an int"),
        ("too short", "one window"),
    ],
)
def test_what_cannot_be_used_is_refused_with_the_reason(given: Any, words: str) -> None:
    with refused(SpecError, option="calibration") as caught:
        calibration_from(llama(vocab_size=300), given)
    assert words in str(caught.value)


class Many(nn.Module):
    """A model whose token ids are not its first argument, and that takes other things beside them."""

    def forward(
        self,
        attention_mask: Tensor,
        input_ids: Tensor,
        token_type_ids: Tensor,
        position_ids: Tensor | None = None,
        extra: Tensor | None = None,
    ) -> Tensor:
        raise NotImplementedError


def test_what_follows_from_ids_is_given_with_them_where_the_model_cannot_do_without() -> None:
    model, ones = Many(), torch.ones(2, 4, dtype=torch.bool)
    examples = {"attention_mask": ones, "input_ids": IDS[:2, :4], "token_type_ids": torch.zeros(2, 4, dtype=torch.int32)}
    record_provenance(model, examples=examples)
    (batch,) = calibration_from(model, IDS).batches
    assert batch.keys() == examples.keys() and torch.equal(batch["input_ids"], IDS)
    assert [batch[name].dtype for name in examples] == [torch.bool, torch.long, torch.int32]
    assert batch["attention_mask"].all() and batch["attention_mask"].shape == IDS.shape and not batch["token_type_ids"].any()


def test_a_tensor_is_what_the_given_inputs_are() -> None:
    model, numbers = Own(), torch.zeros(2, 4, 5)
    with refused(SpecError, "ids.long()", option="calibration"):
        calibration_from(model, numbers)  # a model with a table of embeddings is taken for one of token ids
    (batch,) = calibration_from(model, numbers, {"x": numbers[:1]}).batches
    assert torch.equal(batch["x"], numbers)


def test_a_batch_that_lacks_an_argument_is_refused_by_its_name() -> None:
    inputs = {"input1": torch.zeros(2, 3), "input2": torch.zeros(2, 3)}
    for given in (torch.zeros(2, 3), [(torch.zeros(2, 3), 1)], {"input1": torch.zeros(2, 3)}):
        with refused(SpecError, "input2", "{'input1': …, 'input2': …}", option="calibration"):
            calibration_from(nn.Bilinear(3, 3, 3), given, inputs)
    assert len(calibration_from(nn.Bilinear(3, 3, 3), inputs).batches) == 1


def test_a_pass_that_fits_nothing_to_data_refuses_it_and_says_which_do() -> None:
    with refused(SpecError, option="calibration") as caught:
        apply(llama(), "altup(k=2)", calibration=IDS)
    assert "sequence-altup, shared-moe, sparse-ffn, sparse-loss, sparse-qkv" in str(caught.value)


class Codebooks(nn.Module):
    """Four rows of ids are one sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.projection = nn.Embedding(64, 8), nn.Linear(8, 8)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.projection(self.embedding(input_ids).unflatten(0, (-1, 4)).sum(1))


def test_rows_that_a_model_takes_together_are_one_window() -> None:
    calibration = calibration_from(Codebooks(), [{"input_ids": torch.arange(32)[:, None].repeat(1, 5)}])
    fitted, held_out = split_calibration(calibration, 1000)
    sample = sample_calibration(calibration, 15)
    for part, count in ((fitted, 7), (held_out, 1), (sample, 3)):
        windows = [window["input_ids"][:, 0] for window in part.windows()]
        assert len(windows) == count
        assert all(torch.equal(rows, 4 * (rows[0] // 4) + torch.arange(4)) for rows in windows)
    part.observe(Codebooks(), {"projection": (seen := Seen())})
    assert len(seen.rows) == 15
    assert calibration_from(llama(), IDS).rows == 1


def test_nested_values_are_divided_by_rows_too() -> None:
    rows = torch.arange(9.0).unsqueeze(1)
    calibration = Calibration(({"x": rows, "states": {"shared": (rows.clone(), torch.tensor(3.0), "full")}},))
    fitted, held_out = split_calibration(calibration, 1000)
    assert [len(batch["x"]) for part in (fitted, held_out) for batch in part.batches] == [8, 1]
    for batch in (*fitted.batches, *held_out.batches):
        values, number, name = batch["states"]["shared"]
        assert torch.equal(values, batch["x"]) and (float(number), name) == (3.0, "full")
