"""`retrofit generate` from every form of a model, held against transformers' own `generate`; `retrofit convert` into them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from support import gguf_files, tiny_models

import retrofit
from retrofit.cli import main

PROMPT, TOKENS = "the quick brown fox", 6


@pytest.fixture(scope="module")
def llama() -> transformers.LlamaForCausalLM:
    """A Llama that reads bytes; its ids are those of UTF-8, no end among them."""
    torch.manual_seed(1)
    ends = dict.fromkeys(["bos_token_id", "eos_token_id", "pad_token_id"])
    return tiny_models.llama(vocab_size=256, num_hidden_layers=1, initializer_range=0.3, **ends).eval()


@pytest.fixture(scope="module")
def program(llama, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Llama as an exported program; nobody writes there."""
    path = tmp_path_factory.mktemp("program") / "model.pt2"
    retrofit.save(llama, path)
    return path


def bytes_of(text: str) -> torch.Tensor:
    return torch.tensor(list(text.encode()))[None]


def greedy(model: transformers.PreTrainedModel, prompt: str = PROMPT) -> str:
    """The prompt and what the dense model adds, token by token without a cache."""
    ids = bytes_of(prompt)
    for _ in range(TOKENS):
        with torch.no_grad():
            ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    return prompt + bytes(ids[0, len(prompt.encode()) :].tolist()).decode(errors="replace")


def said(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    assert main(["generate", *map(str, arguments), "--tokens", str(TOKENS)]) == 0
    out = capsys.readouterr().out
    return out[: out.rindex("\n\ngenerated")]


def shown(text: str) -> str:
    """The text as a terminal is shown it."""
    from retrofit.cli.terminal import printable

    return printable(text, lines=True)


@pytest.mark.first(2)
@pytest.mark.parametrize("form", ["directory", ".pt", ".pt2", ".onnx", ".onnx without a cache"])
def test_every_form_goes_on_alike(
    form: str, llama, request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    suffix = form.partition(" ")[0].removeprefix("directory")
    path = tmp_path / f"model{suffix}"
    if suffix == ".pt2":
        path = request.getfixturevalue("program")
    elif suffix == ".onnx":
        retrofit.export_onnx(llama, path, cache="none" if " " in form else "past")
    else:
        retrofit.save(llama, path)
    assert said(capsys, path, PROMPT) == shown(greedy(llama))


def test_a_rewritten_model_goes_on_as_the_dense_one(llama, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    retrofit.save(llama, tmp_path / "dense")
    model = retrofit.apply(retrofit.load(tmp_path / "dense"), "altup(k=2, init=lockstep)", verify=False)
    retrofit.save(model, tmp_path / "wide")
    assert said(capsys, tmp_path / "wide", PROMPT) == shown(greedy(llama))


@pytest.mark.long
@pytest.mark.parametrize("cache", ["past", "none"])
def test_an_encoder_and_a_decoder_in_files(cache: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    model = tiny_models.t5(vocab_size=300, decoder_start_token_id=7, eos_token_id=299, pad_token_id=0).eval()
    model.save_pretrained(tmp_path / "dense")
    retrofit.export_onnx(model, tmp_path / "t5.onnx", cache=cache)
    whole = said(capsys, tmp_path / "dense", PROMPT)
    assert whole.startswith(f"{PROMPT} → ")
    assert said(capsys, tmp_path / "t5.onnx", PROMPT, "--config", tmp_path / "dense") == whole
    assert said(capsys, tmp_path / "decoder_t5.onnx", PROMPT, "--config", tmp_path / "dense") == whole


@pytest.mark.long
def test_draws_are_the_same_with_the_same_seed(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawn = [said(capsys, program, PROMPT, "--temperature", "3", "--seed", seed) for seed in "001"]
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize("kind", ["bert", "vit", "words"])
def test_what_goes_on_from_no_text_is_refused(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = {
        "bert": lambda: tiny_models.bert(vocab_size=300),
        "vit": lambda: tiny_models.vit(),
        "words": lambda: tiny_models.llama(vocab_size=2000),
    }
    made[kind]().eval().save_pretrained(tmp_path / "model")
    assert main(["generate", str(tmp_path / "model"), PROMPT]) == 2
    assert "fix: " in capsys.readouterr().err


@pytest.mark.parametrize("mistake", [["--tokens", "0"], ["--temperature", "-1"], ["--temperature", "nan"]])
def test_options_out_of_bounds(mistake: list[str], tmp_path: Path) -> None:
    assert main(["generate", str(tmp_path), PROMPT, *mistake]) == 2


# ── convert ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_a_gguf_file_becomes_a_directory_that_transformers_loads(kind: str, tmp_path: Path) -> None:
    source = gguf_files.write_llama(tmp_path / "model.gguf", gguf_files.tiny_llama(), kind)
    assert main(["convert", str(source), "-o", str(tmp_path / "out")]) == 0
    expected = retrofit.load(source)
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = torch.arange(3, 19)[None]
    assert torch.equal(found(ids).logits, expected(ids).logits)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out")("the dog")["input_ids"]
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


@pytest.mark.first(1)
@pytest.mark.parametrize("suffix", ["", ".pt", ".pt2"])
def test_a_recipe_stays(suffix: str, llama, tmp_path: Path) -> None:
    retrofit.save(llama, tmp_path / "dense")
    rewritten = retrofit.apply(retrofit.load(tmp_path / "dense"), "altup(k=2)", verify=False)
    retrofit.save(rewritten, tmp_path / "wide.pt")
    out = tmp_path / f"out{suffix}"
    assert main(["convert", str(tmp_path / "wide.pt"), "-o", str(out)]) == 0
    found = retrofit.load(out)
    assert [one.spec() for one in retrofit.recipe(found) or ()] == [one.spec() for one in retrofit.recipe(rewritten) or ()]
    ids = bytes_of(PROMPT)
    logits = found(ids)["logits"] if suffix == ".pt2" else found(ids).logits
    torch.testing.assert_close(logits, rewritten(ids).logits, atol=1e-5, rtol=1e-5)


def test_a_dry_run_of_apply_says_what_inspect_does_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    retrofit.save(tiny_models.llama(), tmp_path / "model")
    wanted = ["--pass", "altup", "--k", "2", str(tmp_path / "model")]
    assert main(["inspect", *wanted]) == 0
    plan = capsys.readouterr().out
    assert main(["apply", "--dry-run", *wanted]) == 0
    *lines, written = capsys.readouterr().out.splitlines()
    assert lines == plan.splitlines() and written.endswith("model.altup")
    assert [one.name for one in tmp_path.iterdir()] == ["model"]


def test_a_graph_becomes_no_directory(tmp_path: Path, program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(program), "-o", str(tmp_path / "out")]) == 2
    assert not (tmp_path / "out").exists()
    assert ".pt2" in capsys.readouterr().err


def test_a_model_is_not_replaced_by_itself(tmp_path: Path, llama) -> None:
    retrofit.save(llama, tmp_path / "model")
    before = (tmp_path / "model" / "model.safetensors").read_bytes()
    assert main(["convert", str(tmp_path / "model"), "-o", str(tmp_path / "model"), "--force"]) == 2
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == before
