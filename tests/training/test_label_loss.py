"""A loss for models without one: the one that transformers' own models compute from the same logits."""

from __future__ import annotations

import torch
from support.own_models import Own
from support.refusals import refused
from torch import nn
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

import retrofit
from retrofit.emitted import graph_module
from retrofit.errors import TrainingError
from retrofit.surgery.auxiliary_losses import auxiliary_losses
from retrofit.training.objectives import add_loss

SMALL = {"vocab_size": 61, "bos_token_id": 1, "eos_token_id": 2}
IDS = torch.randint(3, 61, (3, 9), generator=torch.Generator().manual_seed(0))


class Logits(nn.Module):
    """A model from ids, and a mask, to logits and nothing else."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.model(input_ids=input_ids, attention_mask=attention_mask).logits}


def test_the_loss_is_the_one_of_a_model_that_has_its_own() -> None:
    causal = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=2, **SMALL)).eval()
    following = torch.cat([IDS[:, 1:], torch.full((3, 1), -100)], 1)
    loss, logits = add_loss(Logits(causal))(IDS, labels=following)
    torch.testing.assert_close(loss, causal(IDS, labels=IDS).loss)
    torch.testing.assert_close(logits, causal(IDS).logits)

    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    masked = BertForMaskedLM(BertConfig(vocab_size=61, **shape)).eval()
    hidden = torch.where(torch.arange(9) % 3 == 0, IDS, -100)
    torch.testing.assert_close(add_loss(Logits(masked))(IDS, labels=hidden)[0], masked(IDS, labels=hidden).loss)


def test_a_model_that_takes_labels_is_left_as_it_is() -> None:
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=32, n_head=2, **SMALL))
    assert add_loss(model) is model


def test_losses_that_balance_experts_are_added_in_training_of_a_graph_too() -> None:
    graph = graph_module(Own(width=16, tokens=61), {"x": IDS})
    model = retrofit.apply(graph, "shared-moe(groups=0, experts=2, k=1, balance=0.5)", verify=False).train()
    torch.manual_seed(0)  # routers choose with noise
    with auxiliary_losses() as recorded:
        logits = model(IDS)
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), IDS.flatten()) + sum(recorded)
    assert len(recorded) == 3 and all(float(one.detach()) > 0.1 for one in recorded)
    torch.manual_seed(0)
    torch.testing.assert_close(add_loss(model)(IDS, labels=IDS)[0], expected)
    evaluated = nn.functional.cross_entropy(model.eval()(IDS).flatten(0, 1), IDS.flatten())
    torch.testing.assert_close(add_loss(model)(IDS, labels=IDS)[0], evaluated)


class TwoInputs(nn.Module):
    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return left + right


def test_a_model_whose_inputs_nobody_knows_is_refused() -> None:
    with refused(TrainingError, "TwoInputs", code="no-loss") as caught:
        add_loss(TwoInputs())
    assert "left, right" in caught.value.why
    with refused(TrainingError, "Flat", code="no-logits"):
        add_loss(Flat())(IDS)


class Flat(nn.Module):
    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return input_ids.float()
