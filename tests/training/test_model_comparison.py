"""Models next to their dense original: the figures are those of plain loops over the same windows."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from support.refusals import refused
from support.training_runs import TEXTS, bert, llama, t5
from torch import nn
from torch.nn import functional as F
from training.test_curves import ink

import retrofit
from retrofit.cli import main
from retrofit.errors import TrainingError
from retrofit.passbase.tokenization import codec_for, windows_of
from retrofit.training.model_comparison import Figures, compare_models, draw_comparison, generated
from retrofit.training.runs import COLOURS

torch.set_num_threads(1)


@torch.no_grad()
def test_the_figures_are_those_of_a_plain_loop() -> None:
    dense = llama()
    for parameter in dense.parameters():
        parameter.mul_(8 if parameter.dim() > 1 else 1)  # so that the choice of units matters
    model = retrofit.apply(copy.deepcopy(dense), "sparse-ffn(sparsity=8)", verify=False)
    first, second = compare_models({"dense": dense, "sparse": model}, TEXTS, length=32, most=500)
    losses, apart, same, tokens = 0.0, 0.0, 0.0, 0
    windows = windows_of(TEXTS, codec_for(dense), 32).long()
    for ids in windows:
        ours, theirs = model(ids[None]).logits[0].double(), dense(ids[None]).logits[0].double()
        losses += float(F.cross_entropy(ours[:-1], ids[1:]))
        apart += float(F.kl_div(ours.log_softmax(-1), theirs.log_softmax(-1), reduction="sum", log_target=True))
        same += float((ours.argmax(-1) == theirs.argmax(-1)).sum())
        tokens += len(ids)
    assert second.loss == pytest.approx(losses / len(windows), rel=1e-5)
    assert second.bits_per_byte == pytest.approx(second.loss / math.log(2), rel=1e-6)  # its tokens are bytes
    assert second.divergence == pytest.approx(apart / tokens, rel=1e-3)
    assert second.agreement == pytest.approx(same / tokens)
    assert (first.divergence, first.agreement) == (0.0, 1.0)
    assert second.parameters == sum(parameter.numel() for parameter in model.parameters()) > first.parameters
    assert first.prefill > 0 and first.decode is not None and first.flops > 0
    assert second.memory > first.memory > 4 * first.parameters


def test_masked_tokens_have_no_bits_a_byte_and_an_encoder_decodes_nothing() -> None:
    dense = bert()
    (figures,) = compare_models({"dense": dense}, TEXTS, length=32, most=3)
    assert figures.bits_per_byte is None and figures.decode is None
    assert figures.loss == pytest.approx(math.log(300), abs=1.0)


def test_corrupted_spans_have_no_bits_a_byte() -> None:
    dense = t5()
    (figures,) = compare_models({"dense": dense}, TEXTS, length=32, most=3)
    assert figures.bits_per_byte is None


@pytest.mark.long
def test_a_decoder_starts_as_in_training_where_the_config_does_not_say() -> None:
    dense = t5()
    assert dense.generation_config.decoder_start_token_id is dense.generation_config.bos_token_id is None
    starts: list[int] = []
    dense.decoder.register_forward_pre_hook(lambda _, args, given: starts.append(int(given["input_ids"][0, 0])), with_kwargs=True)
    window = {"input_ids": torch.arange(5, 13)[None], "decoder_input_ids": torch.tensor([[7, 8, 9]])}
    generated(dense, window, 2)
    assert starts[0] == 7
    (figures,) = compare_models({"dense": dense}, TEXTS, length=32, most=3)
    assert figures.decode is not None


def test_a_model_that_takes_more_than_ids_is_compared_too() -> None:
    class Graph(nn.Module):
        """As a file's graph: every input is required, and there is no config."""

        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
            return self.model(input_ids, attention_mask=attention_mask, position_ids=position_ids).logits  # type: ignore[no-any-return]

    dense = llama()
    first, second = compare_models({"dense": dense, "graph": Graph(dense)}, TEXTS, length=32, most=3)
    assert second.loss == pytest.approx(first.loss, rel=1e-5) and second.agreement == 1.0
    assert second.memory >= 4 * second.parameters and second.decode is None


def test_models_of_other_origin_are_refused() -> None:
    with refused(TrainingError, "other", "dense", "3 × 32 × 300", "3 × 32 × 259", code="other-model"):
        compare_models({"dense": llama(), "other": bert()}, TEXTS, length=32, most=3)
    small = llama()
    small.model.embed_tokens = nn.Embedding(3, 16)
    with refused(TrainingError, "small", code="does-not-run"):
        compare_models({"dense": llama(), "small": small}, TEXTS, length=32, most=3)


def test_the_picture_has_a_point_for_each_model(tmp_path: Path) -> None:
    one = Figures("dense", 2.0, None, 0.0, 1.0, 100, 100, 400, 0.1, None)
    two = dataclasses.replace(one, name="sparse", loss=2.1, prefill=0.05)
    for figures in ([one], [one, two]):
        path = draw_comparison(tmp_path / f"{len(figures)}.png", figures)
        assert [ink(path, colour) > 20 for colour in COLOURS[:2]] == [True, len(figures) == 2]


@pytest.mark.long
def test_the_command_prints_a_table_or_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dense = llama()
    retrofit.save(dense, tmp_path / "dense.pt")
    model = retrofit.apply(copy.deepcopy(dense), "sparse-ffn(sparsity=8)", verify=False)
    retrofit.save(model, tmp_path / "sparse.pt")
    (tmp_path / "text.txt").write_text(TEXTS[0])
    words = [
        "compare",
        str(tmp_path / "dense.pt"),
        str(tmp_path / "sparse.pt"),
        "--data",
        str(tmp_path / "text.txt"),
        "--length",
        "32",
    ]
    picture = tmp_path / "compared.png"
    assert main([*words, "--windows", "2", "--picture", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert all(str(path) in printed for path in (tmp_path / "dense.pt", tmp_path / "sparse.pt")) and "(×1.00)" in printed
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main([*words, "--windows", "2", "--picture", str(picture)]) != 0
    assert "--force" in capsys.readouterr().err
    assert main([*words, "--windows", "2", "--json"]) == 0
    assert [one["name"] for one in json.loads(capsys.readouterr().out)] == [str(tmp_path / "dense.pt"), str(tmp_path / "sparse.pt")]
    assert main([*words[:2], str(tmp_path / "gone.pt"), *words[3:]]) == 2
    assert "gone.pt" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("how", "option", "named"),
    [({"length": 64}, "data", "64 tokens"), ({"length": 0}, "length", "--length 0"), ({"most": 0}, "windows", "--windows 0")],
    ids=["text", "length", "windows"],
)
def test_a_text_too_short_to_compare_on_is_refused(how: dict[str, int], option: str, named: str) -> None:
    model = llama()
    with refused(TrainingError, named, option=option):
        compare_models({"one": model, "other": model}, ["short"], **{"length": 8, **how})
