"""The command line at work on real, tiny models: what it writes. What it refuses is in `test_failing_commands.py`."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from support.command_server import CommandServer
from support.commands import APPLY, RUN, contents, gpt2, llama, only_stages
from support.functional_models import LAYER, VOCABULARY, WIDTH, Blocks, layer, weights
from torch import nn

import retrofit
from retrofit.cli import main
from retrofit.errors import RetrofitError

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
IDS = torch.arange(18).reshape(2, 9)


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


# What it does


@pytest.fixture(scope="module")
def rewritten(models: Path, server: CommandServer, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder where `retrofit apply` has rewritten model.pt, and what it printed."""
    folder = tmp_path_factory.mktemp("rewritten")
    for name in ("model.pt", "other.pt"):
        shutil.copy(models / name, folder)
    done = server.program(RUN, "apply", "--pass", "altup", "--k", "2", "model.pt", cwd=folder)
    assert done.code == 0 and only_stages(done.err) and "retrofit: verifying" in done.err.splitlines()
    return folder, done.out


def same_function(rewritten: str | Path, dense: nn.Module) -> None:
    torch.testing.assert_close(logits(retrofit.load(rewritten)), logits(dense), atol=1e-4, rtol=1e-4)


def test_apply_writes_the_rewritten_model_beside_the_dense_one(rewritten: tuple[Path, str], models: Path) -> None:
    folder, _ = rewritten
    assert sorted(os.listdir(folder)) == ["model.altup.pt", "model.pt", "other.pt"]
    assert (folder / "model.pt").read_bytes() == (models / "model.pt").read_bytes()
    assert [one.name for one in retrofit.recipe(retrofit.load(folder / "model.altup.pt"))] == ["altup"]
    same_function(folder / "model.altup.pt", gpt2())


def test_apply_ends_with_a_table_of_what_it_did(rewritten: tuple[Path, str]) -> None:
    folder, printed = rewritten
    counted = [
        sum(parameter.numel() for parameter in one.parameters()) for one in (gpt2(), retrofit.load(folder / "model.altup.pt"))
    ]
    table = dict(line.split("  ", 1) for line in printed.splitlines() if line)
    assert re.search(r"\d+ sites, the same function", table["rewritten"])
    assert table["recipe"].strip().startswith("altup(k=2")
    assert f"{counted[0]:,} → {counted[1]:,}" in table["parameters"]
    assert re.search(r"[1-9][\d,]* → [1-9][\d,]*", table["FLOPs per token"])
    assert {"function", "causality", "round trip"} <= set(table["verified"].strip().split(", "))
    assert table["verified on"].strip().startswith("input_ids 2×11") and "inputs_embeds" in table["verified on"]
    assert table["result"].strip() == "model.altup.pt"


def test_a_directory_becomes_a_directory_with_all_but_the_weights_in_it(here: Path) -> None:
    for name in ("tokenizer.json", "chat_template.jinja", "optimizer.bin"):
        Path("llama", name).write_text("as it was")
    before = contents(here)
    assert main([*APPLY, "llama/"]) == 0
    after = contents(here)
    assert {name: after[name] for name in before} == before
    assert {name.split("/")[0] for name in after.keys() - before.keys()} == {"llama.altup"}
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= set(os.listdir("llama.altup"))
    assert Path("llama.altup/tokenizer.json").read_text() == "as it was"
    assert not Path("llama.altup/optimizer.bin").exists()
    same_function("llama.altup", llama())


def test_passes_are_applied_in_the_order_given(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    passes = ["--pass", "sum", "--pass", "altup", "--k", "3", "--selection", "same"]
    assert main(["apply", "--no-verify", "--seed", "3", *passes, "model.pt"]) == 0
    assert re.search(r"^verified +nothing$", capsys.readouterr().out, re.MULTILINE)
    rewritten = retrofit.load("model.sum.altup.pt")
    assert [one.name for one in retrofit.recipe(rewritten)] == ["sum", "altup"]
    assert (retrofit.recipe(rewritten)[1].k, retrofit.recipe(rewritten)[1].selection) == (3, "same")
    torch.testing.assert_close(logits(rewritten), logits(gpt2()), atol=1e-4, rtol=1e-4)


@pytest.mark.long
def test_verify_tells_the_dense_model_from_another(
    rewritten: tuple[Path, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(rewritten[0])
    assert main(["verify", "model.altup.pt", "--against", "model.pt"]) == 0
    assert re.search(r"^function +passed", capsys.readouterr().out, re.MULTILINE)
    assert main(["verify", "--checks", "quick", "model.altup.pt", "--against", "other.pt"]) == 1
    assert re.search(r"^function +failed", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.long
def test_quick_checks_are_named_with_those_left_out(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["apply", "--pass", "sum", "--checks", "quick", "model.pt"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^verified +graph, function, round trip$", out, re.MULTILINE)
    assert re.search(r"^not verified +.*causality.*cache.*gradients", out, re.MULTILINE)
    assert main(["verify", "--checks", "quick", "model.sum.pt", "--against", "model.pt"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("3 passed")


@pytest.mark.parametrize("other", ["--no-verify", "--stream"])
def test_a_choice_of_checks_without_these_checks_is_refused(other: str, refused: Callable[..., str], untouched: None) -> None:
    assert other in refused("apply", "--pass", "sum", "--checks", "quick", other, "model.pt")


def test_inspect_shows_prints_and_draws(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "llama"]) == 0
    assert "model.layers" in capsys.readouterr().out
    assert main(["inspect", "llama", "--json", "--svg", "llama.svg"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [len(stack["layers"]) for stack in found["stacks"]] == [3]
    assert ElementTree.parse("llama.svg").getroot().tag.endswith("svg")
    assert main(["inspect", "llama", "--svg", "llama.svg"]) == 2
    assert main(["inspect", "llama", "--svg", "llama.svg", "--force"]) == 0


def retrofit_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", RUN, *arguments], capture_output=True, text=True, timeout=300)


@pytest.mark.long
def test_inspect_with_a_pass_says_what_it_would_do_and_does_nothing(here: Path) -> None:
    before = contents(here)
    done = retrofit_command("inspect", "model.pt", "--pass", "sum")
    assert done.returncode == 0 and only_stages(done.stderr), done.stderr
    table = dict(line.split("  ", 1) for line in done.stdout.splitlines() if line)
    assert table["recipe"].strip() == "sum()"
    assert table["would rewrite"].strip() == "1 site, the same function at step 0"
    dense, extra = sum(parameter.numel() for parameter in gpt2().parameters()), 300 * 32
    assert f"{extra:,} parameters" in table["adds"]
    assert f"{dense:,} → {dense + extra:,}" in table["parameters"]
    assert re.search(r"[1-9][\d,]* → [1-9][\d,]*", table["FLOPs per token"])
    assert contents(here) == before


@pytest.mark.long
def test_a_plan_as_json_is_that_of_the_library(here: Path) -> None:
    Path("passes.txt").write_text("sum\nsum\n")
    done = retrofit_command("inspect", "gpt2", "--json", "--recipe", "passes.txt")
    assert done.returncode == 0 and only_stages(done.stderr), done.stderr
    assert json.loads(done.stdout) == retrofit.plan_of(gpt2(), "sum", "sum").to_dict()


@pytest.mark.long
def test_a_pass_that_fits_nowhere_is_planned_and_counted_as_bad_input(here: Path) -> None:
    config = transformers.ViTConfig(
        image_size=16, patch_size=8, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48
    )
    transformers.ViTForImageClassification(config).save_pretrained("vit")
    done = retrofit_command("inspect", "--pass", "sum", "vit")
    assert done.returncode == 2
    table = dict(line.split("  ", 1) for line in done.stdout.splitlines() if line)
    assert table["would rewrite"].strip() == "no site: apply would refuse it"
    assert "no token embedding" in table["leaves alone"]
    assert done.stderr.splitlines()[-1].startswith("retrofit: sum: apply would refuse")
    assert main(["apply", "--pass", "sum", "vit"]) == 2


@pytest.mark.long
def test_a_recipe_does_what_its_passes_do_and_both_start_from_the_seed(here: Path) -> None:
    Path("passes.txt").write_text("sum  # first\naltup(k=3, selection=same)\n")
    assert main(["apply", "--no-verify", "--seed", "3", "--recipe", "passes.txt", "model.pt"]) == 0
    passes = ["--pass", "sum", "--pass", "altup", "--k", "3", "--selection", "same"]
    assert main(["apply", "--no-verify", "--seed", "3", *passes, "model.pt", "-o", "one_by_one.pt"]) == 0
    assert Path("model.sum.altup.pt").read_bytes() == Path("one_by_one.pt").read_bytes()
    assert main(["apply", "--no-verify", "--pass", "sum", "gpt2"]) == 0
    assert main(["apply", "--no-verify", "--recipe", "gpt2.sum/config.json", "gpt2", "-o", "as_the_other"]) == 0
    assert contents(Path("as_the_other")) == contents(Path("gpt2.sum"))


def test_a_bare_state_dict_needs_its_config(here: Path, refused: Callable[..., str], untouched: None) -> None:
    assert "--config" in refused(*APPLY, "bare.pt")
    assert main([*APPLY, "--config", "gpt2", "bare.pt"]) == 0
    same_function("bare.altup.pt", gpt2())


def test_a_pickled_module_is_loaded_where_allowed(here: Path, refused: Callable[..., str], untouched: None) -> None:
    assert "--allow-pickle" in refused(*APPLY, "pickled.pt")
    assert main([*APPLY, "--allow-pickle", "pickled.pt"]) == 0
    same_function("pickled.altup.pt", gpt2())


class InCode(nn.Module):
    """Layers that are no modules, but code of the class that a config builds."""

    def __init__(self, config: dict[str, int]) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.w = weights(*LAYER * config["layers"], seed=0)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for first in range(0, len(self.w), len(LAYER)):
            x = layer(x, list(self.w)[first : first + len(LAYER)], 0.0, self.training)
        return self.head(x)


def without_config() -> nn.Module:
    model = InCode({"layers": 2})
    del model.config
    return model


@pytest.mark.long
@pytest.mark.first(1)
@pytest.mark.parametrize("build", [Blocks, without_config])
def test_modules_that_no_file_of_tensors_can_rebuild_become_a_graph_that_trains(
    build: Callable[[], nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    dense = build()
    torch.save(dense, "own.pt")
    assert main([*APPLY, "--allow-pickle", "own.pt", "--dry-run"]) == 0
    assert "own.altup.pt2, a graph" in capsys.readouterr().out and os.listdir() == ["own.pt"]
    assert main([*APPLY, "--allow-pickle", "own.pt", "-o", "named.pt"]) == 2
    assert "capturing" not in capsys.readouterr().err and os.listdir() == ["own.pt"]
    assert main([*APPLY, "--allow-pickle", "own.pt"]) == 0
    rewritten = retrofit.load("own.altup.pt2")
    assert [one.name for one in retrofit.recipe(rewritten) or ()] == ["altup"]
    torch.testing.assert_close(rewritten(IDS), dense(IDS), atol=1e-4, rtol=1e-4)


class Pipeline(nn.Module):
    """Takes a dict, so that only the model inside can be captured; the head is not in that graph."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.head = gpt2(), nn.Linear(1, 2)

    def forward(self, features: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.head(self.model(features["input_ids"]).logits[..., :1])


@pytest.mark.parametrize("output", [[], ["-o", "own.pt2"]])
def test_the_model_inside_a_pipeline_is_not_written_in_its_place(
    output: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(Pipeline(), "pipeline.pt")
    assert main([*APPLY, "--allow-pickle", "pipeline.pt", *output]) == 2
    assert os.listdir() == ["pipeline.pt"]


@pytest.mark.long
def test_a_model_that_becomes_a_graph_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    retrofit.save(InCode({"layers": 2}), "own.pt")
    assert main([*APPLY, "own.pt", "-o", "named.pt"]) == 0
    assert "named.pt2" in capsys.readouterr().err
    assert sorted(os.listdir()) == ["named.pt2", "own.pt"]


@pytest.mark.parametrize(("model", "output"), [("model.pt", "other.pt"), ("gpt2", "narrow")])
def test_an_output_is_replaced_only_with_force(
    model: str, output: str, here: Path, refused: Callable[..., str], untouched: None
) -> None:
    assert "--force" in refused(*APPLY, model, "-o", output)
    assert main([*APPLY, model, "-o", output, "--force"]) == 0
    same_function(output, gpt2())


@pytest.mark.long
@pytest.mark.parametrize("output", ["x.pt2", pytest.param("x.onnx", marks=pytest.mark.long)])
def test_a_directory_becomes_the_file_that_its_output_is_named_as(output: str, here: Path, untouched: None) -> None:
    assert main([*APPLY, "gpt2", "-o", output]) == 0
    assert Path(output).is_file()
    assert sum(parameter.numel() for parameter in retrofit.load(output).parameters()) >= 300 * 32


@pytest.mark.parametrize("output", ["x.safetensors", "x.gguf", "x.ONNX"])
def test_a_kind_of_output_that_is_not_written_is_refused_before_any_work(output: str, refused: Callable[..., str]) -> None:
    assert output in refused(*APPLY, "gpt2", "-o", output)


def test_force_replaces_models_only_and_keeps_what_else_is_there(
    here: Path, refused: Callable[..., str], untouched: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("thesis").mkdir()
    Path("thesis/chapter.tex").write_text("years of work")
    assert "thesis" in refused(*APPLY, "gpt2", "-o", "thesis", "--force")
    monkeypatch.chdir("llama")
    assert "fix: choose another name" in refused(*APPLY, "../gpt2", "-o", ".", "--force")
    monkeypatch.chdir("..")
    Path("llama/notes.txt").write_text("years of work")
    assert main([*APPLY, "gpt2", "-o", "llama", "--force"]) == 0
    assert Path("llama/notes.txt").read_text() == "years of work"
    same_function("llama", gpt2())


@pytest.mark.parametrize(
    ("arguments", "work"),
    [
        (["train", "--steps", "1"], "training.continued_pretraining.continue_pretraining"),
        (["teach"], "training.teaching.teach"),
        (["compare", "model.pt"], "training.model_comparison.compare_models"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_text_for_a_bare_state_dict_goes_through_the_tokenizer_beside_its_config(
    arguments: list[str], work: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "fox": 1}, unk_token="[UNK]"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(here / "gpt2")
    (here / "text.txt").write_text("fox " * 50)
    read: list[Any] = []

    def enough(*given: Any, tokenizer: Any, **options: Any) -> None:
        read.append(tokenizer)
        raise RetrofitError("enough")

    monkeypatch.setattr(f"retrofit.{work}", enough)
    command, *more = arguments
    assert main([command, "bare.pt", *more, "--config", "gpt2/config.json", "--data", "text.txt"]) == 2
    assert read[0].get_vocab() == {"[UNK]": 0, "fox": 1}


@pytest.mark.long
def test_a_config_is_for_the_bare_weights_among_several_models(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A directory beside them says itself how it is built, and is not refused for it."""
    assert main(["apply", "--pass", "sum", "gpt2", "-o", "rewritten", "--no-verify"]) == 0
    for command in (["verify", "--checks", "quick", "rewritten", "--against", "bare.pt"], ["diff", "bare.pt", "rewritten"]):
        assert main([*command, "--config", "gpt2"]) in (0, 1), capsys.readouterr().err
    assert main(["verify", "rewritten", "--config", "gpt2"]) == 2 and "drop config" in capsys.readouterr().err


def test_calibration_text_reaches_the_passes_as_ids(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[torch.Tensor] = []

    def remembering(model: nn.Module, *passes: object, calibration: torch.Tensor, **options: object) -> None:
        given.append(calibration)
        raise RetrofitError("enough")

    monkeypatch.setattr("retrofit.rewriting.apply_reported", remembering)
    Path("text.txt").write_text("ab" * 200)
    assert main(["apply", "--pass", "sparse-ffn", "--sparsity", "4", "--calibrate", "text.txt", "model.pt"]) == 2
    (windows,) = given
    assert windows.ndim == 2 and windows.numel() > 300
    a, b = windows[0, :2].tolist()
    assert (b - a, windows[0].tolist()) == (1, [a, b] * (windows.shape[1] // 2))
    Path("other.txt").write_text("cd" * 200)
    apply = ["apply", "--pass", "sparse-ffn", "--sparsity", "4", "model.pt"]
    assert main([*apply, "--calibrate", "text.txt", "--calibrate", "other.txt"]) == 2
    assert set(given[-1].flatten().tolist()) >= {a, b, a + 2, a + 3}, "both files are read"
    assert main([*apply, "--calibrate", "text.txt", "--calibrate", "nowhere.txt"]) == 2 and len(given) == 2
    Path("long.txt").write_text("abcdefgh" * 2000)
    assert main([*apply, "--calibrate", "long.txt"]) == 2
    length = given[-1].shape[1]
    assert main([*apply, "--calibrate", "long.txt", "--tokens", str(5 * length + 1)]) == 2
    assert given[-1].shape == (5, length)
    assert main([*apply, "--calibrate", "long.txt", "--tokens", "1"]) == 2 and given[-1].shape == (1, length)


# The README


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def test_the_commands_of_the_readme_work(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gpt2(layers=1).save_pretrained("model")
    Path("text.txt").write_text(README * 20, encoding="utf-8")
    Path("held.txt").write_text(README, encoding="utf-8")
    lines = [shlex.split(line, comments=True) for block in blocks("sh") for line in block.splitlines()]
    assert {"inspect", "apply", "train", "compare", "export"} <= {line[1] for line in lines}
    for line in lines:
        assert line[0] == "retrofit"
        arguments = ["2" if argument == "200" else argument for argument in line[1:]]  # that it works, not how well
        if arguments[0] in ("train", "compare"):
            arguments += ["--length", "16"]
        assert main(arguments) == 0, (line, capsys.readouterr().err)


def test_the_python_of_the_readme_works(here: Path, server: CommandServer) -> None:
    """Pasted from the top; the pass of one's own is applied."""
    gpt2(layers=1).save_pretrained("smollm2")
    words = {word: index for index, word in enumerate(["[UNK]", "The", "capital", "of", "France", "is"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained("smollm2")
    code = "".join(blocks("python"))
    code += """
dense = AutoModelForCausalLM.from_pretrained("smollm2")
before = dense(**prompt).logits
assert (retrofit.apply(dense, HalveFFN(), verify=False)(**prompt).logits - before).abs().max() > 1e-3
"""
    done = server.program(code)
    assert done.code == 0, done.err
    assert "width" in done.out and Path("smollm2.altup").is_dir()
