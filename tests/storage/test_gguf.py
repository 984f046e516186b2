"""GGUF files: loaded as the model they were made from, rewritten, saved as ordinary directories; what is none is refused."""

from __future__ import annotations

import math
import struct
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.gguf_files import BYTES, tiny_llama, tokens, write_llama, write_settings
from support.refusals import refused
from torch import nn

import retrofit
from retrofit.errors import CheckpointError, TrainingError, VerificationError
from retrofit.files.headers import read_gguf_header
from retrofit.passbase.calibration import tokenize_texts
from retrofit.passbase.tokenization import codec_for, read_tokenizer
from retrofit.surgery.dequantization import TRACES, has_plain_weights
from retrofit.training.continued_pretraining import continue_pretraining
from retrofit.training.settings import Settings

gguf = pytest.importorskip("gguf")

IDS = torch.randint(BYTES, (2, 11), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def dense() -> Any:
    return tiny_llama()


@pytest.fixture(scope="module")
def file(dense: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("gguf") / "tiny.gguf", dense)


@pytest.fixture(scope="module")
def packed(dense: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("gguf") / "tiny.Q8_0.gguf", dense, "Q8_0", vocabulary=False)


def stock(path: Path) -> Any:
    """The model as transformers itself loads it, and not retrofit."""
    return transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    out: torch.Tensor = model(IDS, use_cache=False).logits
    return out


# ── Loading ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_float_file_is_the_model_it_was_made_from(dense: Any, file: Path) -> None:
    model: Any = retrofit.load(file)
    torch.testing.assert_close(logits(model), logits(dense), atol=1e-5, rtol=1e-5)
    assert type(model) is type(dense) and model.dtype == torch.float32 and not model.training
    assert not any(name in vars(model) for name in TRACES) and "quantization_config" not in model.config.to_dict()


def test_packed_weights_are_unpacked_to_the_numbers_they_stand_for(dense: Any, packed: Path) -> None:
    model: Any = retrofit.load(packed)
    kind = gguf.GGMLQuantizationType.Q8_0
    for part in ("mlp.up_proj", "self_attn.v_proj"):
        weight = dense.get_parameter(f"model.layers.1.{part}.weight").detach().numpy()
        expected = torch.from_numpy(gguf.dequantize(gguf.quantize(weight, kind), kind))
        assert torch.equal(model.get_parameter(f"model.layers.1.{part}.weight"), expected)
    assert not torch.equal(model.model.layers[1].mlp.up_proj.weight, dense.model.layers[1].mlp.up_proj.weight)


@pytest.mark.parametrize(("asked", "given"), [(None, torch.float16), ("bfloat16", torch.bfloat16)])
def test_a_half_precision_file_keeps_its_dtype_unless_another_is_asked_for(
    dense: Any, tmp_path: Path, asked: str | None, given: torch.dtype
) -> None:
    model: Any = retrofit.load(write_llama(tmp_path / "half.gguf", dense, "F16", vocabulary=False), dtype=asked)
    assert {parameter.dtype for parameter in model.parameters()} == {given}


def test_a_tied_head_stays_tied(tmp_path: Path) -> None:
    model: Any = retrofit.load(write_llama(tmp_path / "tied.gguf", tiny_llama(tied=True), vocabulary=False))
    assert model.lm_head.weight is model.model.embed_tokens.weight


# ── Rewriting ────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


LLAMA_3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def divisors_of_llama_3(base: float, head: int) -> list[float]:
    """What llama.cpp's converter writes to `rope_freqs.weight`, frequency by frequency."""
    divisors = []
    for index in range(0, head, 2):
        wavelength = 2 * math.pi * base ** (index / head)
        smooth = min(1.0, max(0.0, (8192 / wavelength - 1.0) / 3.0))
        divisors.append(1 / ((1 - smooth) / 8.0 + smooth))
    return divisors


@pytest.mark.parametrize(
    ("more", "tensors", "rope"),
    [
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}, {}, {"rope_type": "linear", "factor": 4.0}),
        ({"llama.rope.scale_linear": 4.0}, {}, {"rope_type": "linear", "factor": 4.0}),
        ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}, {}, {}),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 32,
                "llama.rope.scaling.yarn_beta_fast": 2.0,
            },
            {},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 2.0},
        ),
        ({}, {"rope_freqs.weight": divisors_of_llama_3(10000.0, 16)}, {"rope_type": "llama3", **LLAMA_3}),
        ({}, {"rope_freqs.weight": [1.0] * 8}, {}),
    ],
)
def test_rotary_positions_are_stretched_as_the_file_says(
    more: dict[str, int | float | str], tensors: dict[str, Any], rope: dict[str, Any], dense: Any, tmp_path: Path
) -> None:
    config = transformers.LlamaConfig.from_dict({**dense.config.to_dict(), "rope_parameters": {"rope_theta": 10000.0, **rope}})
    stretched = transformers.LlamaForCausalLM(config).eval()
    stretched.load_state_dict(dense.state_dict())
    assert (rope != {}) == bool((logits(stretched) - logits(dense)).abs().max() > 1e-2)
    model: Any = retrofit.load(write_llama(tmp_path / "model.gguf", dense, vocabulary=False, more=more, tensors=tensors))
    torch.testing.assert_close(logits(model), logits(stretched), atol=1e-4, rtol=1e-4)


def test_what_the_reader_would_leave_out_is_refused(dense: Any, tmp_path: Path) -> None:
    def said(more: dict[str, int | float | str], tensors: dict[str, Any]) -> str:
        return refusal(write_llama(tmp_path / "model.gguf", dense, vocabulary=False, more=more, tensors=tensors))

    assert "blk.0.attn_q.bias" in said({}, {"blk.0.attn_q.bias": [1.0] * 64})
    assert "rope.scaling.type = longrope" in said({"llama.rope.scaling.type": "longrope"}, {})
    assert "rope.scaling.attn_factor = 2.0" in said({"llama.rope.scaling.attn_factor": 2.0}, {})
    assert "Llama 3" in said({}, {"rope_freqs.weight": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]})


SIZES = {
    "vocab_size": BYTES, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "initializer_range": 0.3,
}  # fmt: skip
ROTATED: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}
BASE: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}


@pytest.mark.parametrize(
    ("kind", "options", "settings"),
    [
        ("starcoder2", BASE, {"rope.freq_base": 1e6, "attention.layer_norm_epsilon": 1e-5}),
        ("phi3", ROTATED, {"rope.dimension_count": 4, "attention.layer_norm_rms_epsilon": 1e-5}),
        ("phi3", {"sliding_window": 4}, {"attention.sliding_window": 4, "attention.layer_norm_rms_epsilon": 1e-5}),
        ("stablelm", ROTATED, {"rope.dimension_count": 4, "attention.layer_norm_epsilon": 1e-5}),
        ("nemotron", {**ROTATED, "norm_eps": 0.1}, {"rope.dimension_count": 4, "attention.layer_norm_epsilon": 0.1}),
        ("gemma2", {"attn_logit_softcapping": 1.0}, {"attention.key_length": 256, "attn_logit_softcapping": 1.0}),
        ("gemma2", {"final_logit_softcapping": 2.0}, {"attention.key_length": 256, "final_logit_softcapping": 2.0}),
        ("qwen3", {"head_dim": 16}, {"attention.key_length": 16, "attention.layer_norm_rms_epsilon": 1e-6}),
    ],
)
def test_numbers_that_the_reader_leaves_out_are_in_the_config(
    kind: str, options: dict[str, Any], settings: dict[str, int | float], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **SIZES, **options)).eval()
    path = write_settings(tmp_path / "model.gguf", kind, model, settings, norms_from_one=kind in ("nemotron", "gemma2"))
    loaded: Any = retrofit.load(path)
    torch.testing.assert_close(logits(loaded), logits(model), atol=1e-4, rtol=1e-4)
    loaded.save_pretrained(tmp_path / "saved")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.equal(logits(again), logits(loaded))


def test_a_model_of_which_the_file_does_not_say_everything_is_refused(dense: Any, tmp_path: Path) -> None:
    llama = write_llama(tmp_path / "llama.gguf", dense, vocabulary=False, more={"llama.attention.sliding_window": 8})
    assert all(part in refusal(llama) for part in ("llama.attention.sliding_window = 8", "LlamaConfig"))
    wide = write_llama(tmp_path / "wide.gguf", dense, vocabulary=False, more={"llama.attention.sliding_window": 64})
    torch.testing.assert_close(logits(retrofit.load(wide)), logits(dense), atol=1e-5, rtol=1e-5)
    torch.manual_seed(0)
    gemma = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**SIZES, head_dim=8, query_pre_attn_scalar=12))
    path = write_settings(tmp_path / "gemma.gguf", "gemma2", gemma, {"attention.key_length": 8}, norms_from_one=True)
    assert all(part in refusal(path) for part in ("√256", "Gemma2Config", "8 wide"))
    half = write_llama(tmp_path / "half.gguf", dense, vocabulary=False, more={"llama.attention.key_length": 32})
    assert all(part in refusal(half) for part in ("model.layers.0.self_attn.q_proj.weight", "[64, 64]", "[128, 64]"))


def test_a_rewritten_file_is_an_ordinary_directory(dense: Any, file: Path, tmp_path: Path) -> None:
    model: Any = retrofit.apply(retrofit.load(file), "altup(k=2)", verify=False)
    model.save_pretrained(tmp_path / "wide")
    again: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "wide")
    assert retrofit.recipe(again) == retrofit.recipe(model)
    torch.testing.assert_close(logits(again), logits(dense), atol=1e-4, rtol=1e-4)
    retrofit.save(model, tmp_path / "wide.pt")
    assert torch.equal(logits(retrofit.load(tmp_path / "wide.pt")), logits(model))


def test_a_model_that_transformers_loaded_is_rewritten_and_saved(dense: Any, packed: Path, tmp_path: Path) -> None:
    model = stock(packed)
    before = logits(model)
    assert vars(model)["is_quantized"], "transformers says so"
    retrofit.save(model, tmp_path / "dense.pt")
    retrofit.save(model, tmp_path / "dense")
    assert vars(model)["is_quantized"] and model.config.quantization_config is not None, "saving changes nothing"
    for saved in ("dense.pt", "dense"):
        assert torch.equal(logits(retrofit.load(tmp_path / saved)), before)
    model = retrofit.apply(model, "sum", verify=False)
    assert not any(name in vars(model) for name in TRACES)
    model.save_pretrained(tmp_path / "summed")
    again: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "summed")
    torch.testing.assert_close(logits(again), before, atol=1e-5, rtol=1e-5)


def test_a_failed_rewrite_leaves_a_loaded_model_as_it_was(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = stock(packed)
    config, quantizer = model.config.quantization_config, model.hf_quantizer

    def failing(*args: Any, **kwargs: Any) -> Any:
        raise VerificationError("no")

    monkeypatch.setattr("retrofit.rewriting.check_rewrite", failing)
    measured = types.SimpleNamespace(optional=(), parameters=None)
    monkeypatch.setattr("retrofit.rewriting.Reference.of", lambda *args, **kwargs: measured)
    with pytest.raises(VerificationError):
        retrofit.apply(model, "sum")
    assert model.config.quantization_config is config and model.hf_quantizer is quantizer and model.is_quantized
    assert retrofit.recipe(model) is None


# ── What is quantized and what only came through a quantizer ─────────────────────────────────────────────────────────────────────


def said_to_be_quantized(**config: Any) -> Any:
    model = tiny_llama()
    model.config.quantization_config = {"quant_method": "fp8", **config}
    return model


def test_the_weights_decide() -> None:
    assert has_plain_weights(said_to_be_quantized())
    packed = said_to_be_quantized(dequantize=True)
    packed.model.layers[0].mlp.up_proj.weight = nn.Parameter(torch.zeros(8, dtype=torch.int8), requires_grad=False)
    assert not has_plain_weights(packed)
    scaled = said_to_be_quantized()
    scaled.model.layers[0].mlp.up_proj.weight_scale = nn.Parameter(torch.ones(1))
    assert not has_plain_weights(scaled), "a scale next to a float weight that the class does not have"
    replaced = said_to_be_quantized()
    replaced.model.layers[0].mlp.up_proj = type("Packed", (nn.Linear,), {})(64, 96, bias=False)
    assert not has_plain_weights(replaced)
    told = said_to_be_quantized(dequantize=True)
    told.model.layers[0].mlp.up_proj = type("Unpacked", (nn.Linear,), {})(64, 96, bias=False)
    assert has_plain_weights(told), "its quantizer unpacked it"


# ── Tokenizers ───────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_file_brings_its_tokenizer(file: Path, packed: Path) -> None:
    text = "a text, of bytes"
    codec = codec_for(tiny_llama(), read_tokenizer(file))
    assert codec.encode(text).tolist() == list(text.encode()) and codec.decode(codec.encode(text)) == text
    assert codec.end == tokens().index("</s>") and codec.encode("th").tolist() == [BYTES]
    assert read_tokenizer(packed) is None
    with refused(TrainingError, packed.name, code="missing", option="tokenizer"):
        read_tokenizer(packed, required=True)


def test_texts_are_calibration_data_for_a_model_from_a_file(file: Path) -> None:
    text = "calibration " * 40
    for model in (retrofit.load(file), stock(file)):
        assert tokenize_texts(model, [text]).flatten()[:128].tolist() == list(text.encode())[:128]


# ── Refusals ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_header_says_where_the_tensors_are(file: Path) -> None:
    header, reader = read_gguf_header(file), gguf.GGUFReader(file)
    assert [one.name for one in header.tensors] == [one.name for one in reader.tensors]
    assert [header.data + one.offset for one in header.tensors] == [one.data_offset for one in reader.tensors]
    assert header.architecture == "llama" and header.metadata["llama.block_count"] == 2
    assert header.metadata["tokenizer.ggml.tokens"] == len(tokens())


def refusal(path: Path, **options: Any) -> str:
    """Everything the refusal of the file says, and its code."""
    with pytest.raises(CheckpointError) as error:
        retrofit.load(path, **options)
    assert path.name in error.value.what and error.value.remedy
    return f"{error.value}\n{error.value.code}{error.value.option}"


@pytest.mark.parametrize("length", [4, 30, 200, 0.5, 0.999])
def test_a_file_cut_short_is_refused(file: Path, tmp_path: Path, length: float) -> None:
    content = file.read_bytes()
    (tmp_path / "cut.gguf").write_bytes(content[: int(length if length > 1 else length * len(content))])
    assert refusal(tmp_path / "cut.gguf").endswith("unreadable")


def test_other_files_are_refused(file: Path, tmp_path: Path) -> None:
    content = file.read_bytes()
    for name, replaced, said in (
        ("text.gguf", b"once upon a time", "unreadable"),
        ("empty.gguf", b"", "unreadable"),
        ("future.gguf", b"GGUF" + struct.pack("<I", 9) + content[8:], "version 9"),
        ("unknown.gguf", content.replace(b"llama", b"lhama"), "'lhama'"),
    ):
        (tmp_path / name).write_bytes(replaced)
        assert said in refusal(tmp_path / name)
    assert refusal(file, config=tmp_path).endswith("config")


def test_parts_and_vocabularies_are_refused(dense: Any, tmp_path: Path) -> None:
    assert "--merge" in refusal(write_llama(tmp_path / "part.gguf", dense, more={"split.count": 3}))
    writer = gguf.GGUFWriter(tmp_path / "words.gguf", "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert refusal(tmp_path / "words.gguf").endswith("missing")


def test_a_missing_tensor_is_named(dense: Any, tmp_path: Path) -> None:
    file = write_llama(tmp_path / "gap.gguf", dense, vocabulary=False)
    file.write_bytes(file.read_bytes().replace(b"blk.1.ffn_up.weight", b"blk.9.ffn_up.weight"))
    assert "model.layers.1.mlp.up_proj.weight" in refusal(file)


def test_without_the_package_the_extra_is_named(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("retrofit.storage.gguf_file.is_gguf_available", lambda: False)
    assert "pip install 'retrofit-transformers[gguf]'" in refusal(file)


def test_nothing_is_saved_as_gguf(tmp_path: Path) -> None:
    with refused(CheckpointError, ".gguf", code="name"):
        retrofit.save(tiny_llama(), tmp_path / "model.gguf")


def test_what_transformers_loads_from_a_file_is_trained(file: Path) -> None:
    model = stock(file)
    before = {name for name in TRACES if name in vars(model)}
    settings = Settings(steps=2, batch_size=2, length=16, eval_every=2, device="cpu")
    run = continue_pretraining(model, ["a line of text\n" * 40], settings, tokenizer=read_tokenizer(file, required=True))
    assert run.eval_losses[-1][1] < run.eval_losses[0][1]
    assert before == {name for name in TRACES if name in vars(model)}


def test_packed_weights_are_not_trained() -> None:
    model = transformers.LlamaForCausalLM(tiny_llama().config)
    model.is_quantized = True
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.data.to(torch.int8), requires_grad=False)
    with refused(TrainingError, "LlamaForCausalLM", code="quantized"):
        continue_pretraining(model, ["a line of text\n" * 40], Settings(steps=2, length=16, device="cpu"))
