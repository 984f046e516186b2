"""Sum: an extra embedding for each token, and the embedding in the hands of transformers and PEFT."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from support.tiny_models import VOCABULARY, gpt2, llama, t5
from torch import Tensor, nn

import retrofit
from retrofit.errors import DoesNotFitError
from retrofit.passes.sum import SummedEmbedding, summed

IDS = torch.arange(3, 19)[None]


def trained(model: Any, *passes: str) -> Any:
    """`model` with an extra embedding that is not zero."""
    model = retrofit.apply(model, "sum", *passes, verify=False)
    extra: Any = model.get_input_embeddings().extra
    with torch.no_grad():
        extra.weight.normal_(generator=torch.Generator().manual_seed(1))
    return model


def logits(model: Any) -> Tensor:
    more = {"decoder_input_ids": IDS} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        found: Tensor = model.eval()(input_ids=IDS, **more).logits
    return found


def test_tokens_added_later_get_nothing() -> None:
    torch.manual_seed(0)
    dense, extra = nn.Embedding(7, 4), nn.Embedding(5, 4)
    ids = torch.tensor([[0, 4, 5], [6, 1, 3]])
    expected = torch.stack(
        [torch.stack([dense.weight[id] + (extra.weight[id] if id < 5 else 0) for id in row]) for row in ids.tolist()]
    )
    assert torch.equal(SummedEmbedding(dense, extra)(ids), expected)


def test_the_lookup_is_one_graph_when_it_is_compiled() -> None:
    torch.compiler.reset()
    table = summed(nn.Embedding(7, 4), nn.Embedding(5, 4))
    ids = torch.tensor([[1, 6, 4]])
    torch.testing.assert_close(torch.compile(table, backend="eager", fullgraph=True)(ids), table(ids))


@pytest.mark.first(1)
@pytest.mark.parametrize("rows", [VOCABULARY + 3, VOCABULARY - 13])
@pytest.mark.parametrize("make", [llama, gpt2, t5])
def test_a_table_of_another_size(make: Any, rows: int, tmp_path: Path) -> None:
    """Old tokens are what they were, new ones get a row of zeros, and the model is saved and loaded so."""
    model = trained(make())
    before, both = logits(model), min(rows, VOCABULARY)
    model.resize_token_embeddings(rows)
    embedding = model.get_input_embeddings()
    assert isinstance(embedding, nn.Embedding) and embedding.num_embeddings == rows
    assert len(embedding.extra.weight) == rows and not embedding.extra.weight[VOCABULARY:].any()  # type: ignore[union-attr,index,arg-type]
    assert torch.equal(logits(model)[..., :both], before[..., :both])
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(type(model).from_pretrained(tmp_path)), logits(model))


def test_a_widened_table_of_another_size(tmp_path: Path) -> None:
    """AltUp after sum widens both embeddings: the loaded model has them as they were."""
    model = trained(llama(), "altup(k=2)")
    model.resize_token_embeddings(VOCABULARY - 13)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(type(model).from_pretrained(tmp_path)), logits(model))


def test_padding_that_a_smaller_table_has_no_row_for() -> None:
    model = trained(llama(pad_token_id=VOCABULARY - 1))
    model.resize_token_embeddings(VOCABULARY - 13)
    assert model.get_input_embeddings().padding_idx is None and logits(model).isfinite().all()


def test_adapters_on_the_table() -> None:
    """They are added to what the whole embedding returns, and merged into its table."""
    model = trained(llama())
    plain = logits(model)
    names = ["embed_tokens"]
    torch.testing.assert_close(logits(peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(target_modules=names))), plain)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=names, init_lora_weights=False))
    expected = logits(adapted)
    assert (expected - plain).abs().max() > 1e-3
    torch.testing.assert_close(logits(adapted.merge_and_unload()), expected, rtol=1e-4, atol=1e-4)


def test_single_trained_tokens() -> None:
    """PEFT looks them up in the table alone: refused where the extra embedding is not zero."""
    config = peft.LoraConfig(target_modules=["q_proj"], trainable_token_indices=[5, 6])
    fresh = retrofit.apply(llama(), "sum", verify=False)
    plain = logits(fresh)
    adapted = peft.get_peft_model(fresh, config)
    torch.testing.assert_close(logits(adapted), plain)
    with torch.no_grad():
        adapted.get_input_embeddings().token_adapter.trainable_tokens_delta["default"].add_(1.0)
    changed = (logits(adapted) - plain).abs().amax((0, 2))
    assert (changed[:2] == 0).all() and changed[2] > 1e-3  # ids 3 and 4 come before them
    with pytest.raises(DoesNotFitError) as refusal:
        peft.get_peft_model(trained(llama()), config)
    assert "trainable_token_indices" in refusal.value.what and refusal.value.remedy


def test_gradients_at_the_input() -> None:
    """What Trainer and PEFT do where only adapters are trained and layers are checkpointed."""
    model = trained(llama())
    model.requires_grad_(False)
    model.enable_input_require_grads()
    assert model.get_input_embeddings()(IDS).requires_grad
    model.set_input_embeddings(model.get_input_embeddings())
    assert isinstance(model.get_input_embeddings(), SummedEmbedding)
