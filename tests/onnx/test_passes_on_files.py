"""Every pass is exported to ONNX, from a decoder with its cache, an encoder and an encoder-decoder, and read back.

What is imported from a file is rewritten, learns, and is exported again.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from support import retrofitted, tiny_models
from support.onnx_files import decode_greedily, translate

import retrofit
from retrofit.inputs.probes import resized
from retrofit.numerics.distances import distance
from retrofit.onnx.exporter.export_parts import OnnxSession
from retrofit.onnx.importer import from_onnx
from retrofit.onnx.importer.weights import argument_name
from retrofit.passbase.protocol import parse_recipe
from retrofit.provenance import provenance_of

NEW = 8  # tokens decoded
PARITY = 1e-4
LAYERS = {"num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 64}
PASSES = [
    "altup(k=2)",
    "sum()",
    "sequence-altup(k=2)",
    "sequence-altup(k=4,method=stride-and-skip,layers=all)",
    "sparse-ffn(sparsity=8)",
    "recurrence(rank=4)",
    "reversible",
    "shared-moe()",
    "memory(lookup=token-id)",
    "memory(lookup=softmax,buckets=8,rank=2)",
    "memory(lookup=lsh,buckets=8)",
    "sparse-qkv()",
    "sparse-loss(modules=4)",
]
MODELS = {
    "decoder": lambda: tiny_models.llama(**LAYERS),
    "encoder": lambda: tiny_models.bert(**LAYERS),
    "encoder-decoder": lambda: tiny_models.t5(num_layers=3, d_model=32, d_kv=16, d_ff=64),
}


def rewritten(form: str, spec: str) -> Any:
    model = MODELS[form]()
    retrofit.apply(model, *parse_recipe([spec]), verify=False)
    if hasattr(model, "generation_config"):
        model.generation_config.eos_token_id = None  # with a least number of tokens it would be left out of the choice
    return retrofitted.moved(model)


def ids(batch: int, length: int) -> torch.Tensor:
    return torch.randint(3, tiny_models.VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(5))


@pytest.mark.long
@pytest.mark.parametrize("spec", PASSES)
@pytest.mark.parametrize("form", MODELS)
def test_every_pass_is_exported_and_decodes_the_same(form: str, spec: str, tmp_path: Path) -> None:
    model = rewritten(form, spec)
    made = retrofit.export_onnx(model, tmp_path / "model.onnx", "none" if form == "encoder" else "past")
    assert all(file.gap is not None and file.gap < PARITY for file in made.files)
    running = [OnnxSession(file.path, 1) for file in made.files]
    how = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    tokens, mask = ids(3, 7), torch.ones(3, 7, dtype=torch.long)
    if form == "decoder":
        mask[0, :3] = mask[1, :1] = 0
        assert torch.equal(decode_greedily(running[0], tokens, NEW, mask), model.generate(tokens, attention_mask=mask, **how))
    elif form == "encoder-decoder":
        mask[1, 4:] = 0
        expected = model.generate(input_ids=tokens, attention_mask=mask, **how)
        assert torch.equal(translate(running, {"input_ids": tokens, "attention_mask": mask}, 0, NEW), expected)
    else:
        mask[0, 4:] = 0
        given = {"input_ids": tokens, "attention_mask": mask, "token_type_ids": torch.zeros_like(tokens)}
        with torch.no_grad():
            assert distance(running[0](given)["logits"], model(**given).logits) < PARITY
    for file, here in zip(made.files, running, strict=True):
        comes_back(file.path, here)


def comes_back(path: Path, running: OnnxSession) -> None:
    """The file as a module, states and all, computes what ONNX Runtime does, on few tokens and on many."""
    back = from_onnx(path, "past")
    names = {argument_name(name): name for name in running.inputs}
    examples = provenance_of(back).examples
    with torch.no_grad():
        for rows in (1, 2):
            given = {name: value[:rows] for name, value in examples.items()}
            expected = running({names[name]: value for name, value in given.items()})
            found = back(**given)
            assert max(distance(found[argument_name(name)], value) for name, value in expected.items()) < PARITY


# ── In, rewritten, trained, out ──────────────────────────────────────────────────────────────────────────────────────────────────

FORMS = {
    "decoder": (lambda: tiny_models.llama(), "model.onnx"),
    "encoder": (lambda: tiny_models.bert(), "model.onnx"),
    "image model": (lambda: tiny_models.vit(num_hidden_layers=2), "model.onnx"),
    "encoder of an encoder-decoder": (lambda: tiny_models.t5(num_layers=2), "encoder_model.onnx"),
    "decoder of an encoder-decoder": (lambda: tiny_models.t5(num_layers=2), "decoder_model.onnx"),
}
TRAINED = [
    "altup(k=2)",
    "sparse-ffn(sparsity=8)",
    "memory(lookup=softmax,buckets=8,rank=2)",
    "shared-moe(experts=2, k=1)",
    "recurrence(rank=4)",
]
FAST = ("encoder", "sparse-ffn(sparsity=8)")
STEPS = 4


@pytest.mark.long
@pytest.mark.parametrize(
    ("form", "spec"), [pytest.param(*one, marks=[pytest.mark.long] * (one != FAST)) for one in itertools.product(FORMS, TRAINED)]
)
def test_a_file_comes_in_is_rewritten_learns_and_goes_out(form: str, spec: str, tmp_path: Path) -> None:
    build, file = FORMS[form]
    retrofit.export_onnx(build(), tmp_path / "model.onnx")
    model = retrofit.apply(from_onnx(tmp_path / file), spec, verify=False)
    examples = provenance_of(model).examples
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    losses = learnt(model, examples)
    assert losses[-1] < losses[0]
    assert sum(not torch.equal(value, before[name]) for name, value in model.named_parameters()) > len(before) / 2
    made = retrofit.export_onnx(model.eval(), tmp_path / "out.onnx")
    running = OnnxSession(made.files[0].path, 1)
    other = resized(model, examples, 3, 5, seed=1)
    with torch.no_grad():
        expected = model(**other)
    found = running({name: value for name, value in other.items() if name in running.inputs})
    assert found.keys() == expected.keys()
    assert max(distance(found[name], expected[name]) for name in found) < PARITY


def learnt(model: Any, inputs: dict[str, torch.Tensor]) -> list[float]:
    """The losses of a few steps towards outputs drawn at random."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    target, losses = None, []
    for _ in range(STEPS):
        output = next(iter(model.train()(**inputs).values()))
        target = torch.randn(output.shape, generator=torch.Generator().manual_seed(0)) if target is None else target
        loss = (output - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
