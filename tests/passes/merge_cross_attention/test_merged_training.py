"""Training a merged T5 with the dense model as its teacher: its dial leads from the dense function to the method's."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.training_runs import TEXTS, Unplugged, changed, same_weights, t5, unplug_at
from torch import Tensor

import retrofit
from retrofit.cli import main
from retrofit.passes import MergeCrossAttention
from retrofit.passes.merge_cross_attention.joint_attention import AttentionToOthers
from retrofit.passes.merge_cross_attention.merged_layer import OtherTokens
from retrofit.training.continued_pretraining import continue_pretraining
from retrofit.training.recovery import start_dials
from retrofit.training.runs import TrainingRun, folder_of, last_checkpoint
from retrofit.training.teacher import Teacher

torch.set_num_threads(1)

IDS = torch.arange(3, 43).view(2, 20)
BY_ITS_DIAL = changed(steps=6, align=0, anneal=4, dial="own", save_every=2, eval_every=3, lr=1e-2)


@functools.cache
def dense() -> Any:
    return t5()


@functools.cache
def rewritten() -> Any:
    return retrofit.apply(copy.deepcopy(dense()), MergeCrossAttention(), verify=False)


def shares(model: Any) -> set[float]:
    return {module.share for module in model.modules() if isinstance(module, AttentionToOthers)}


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model.eval()(input_ids=IDS, decoder_input_ids=IDS[:, :9], use_cache=False).logits.clone()  # type: ignore[no-any-return]


def run(path: Path, **more: Any) -> TrainingRun:
    return continue_pretraining(copy.deepcopy(rewritten()), TEXTS, BY_ITS_DIAL, teacher=copy.deepcopy(dense()), output=path, **more)


@pytest.mark.long
def test_at_the_beginning_of_its_dial_it_is_the_dense_model_bit_for_bit() -> None:
    model = copy.deepcopy(rewritten())
    teacher = Teacher.of(copy.deepcopy(dense()), model)
    assert len(start_dials(teacher, lambda: logits(model))) == 2
    expected = logits(dense())
    for share in (0.0, 0.5, 1.0):
        with teacher.sites.mixed(share):
            assert torch.equal(logits(model), expected) == (share == 0.0)
    assert shares(model) == {1.0}


@pytest.mark.long
def test_a_run_by_its_dial_begins_at_the_dense_model_ends_at_the_method_and_resumes_between(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole.pt")
    assert len(whole.dials) == 2
    assert whole.eval_losses[0][1] == pytest.approx(whole.dense_loss, rel=1e-6)  # windows are summed in another order
    assert whole.start_loss != pytest.approx(whole.dense_loss, rel=1e-5)
    found = retrofit.load(tmp_path / "whole.pt")
    assert found.state_dict().keys() == rewritten().state_dict().keys()  # nothing of the dial, or of the dense model
    assert shares(found) == {1.0}
    after = logits(found)
    OtherTokens().turn(found, 0.5)
    assert not torch.equal(logits(found), after)

    with pytest.raises(Unplugged):
        run(tmp_path / "parts.pt", progress=unplug_at(3))
    checkpoint = last_checkpoint(folder_of(tmp_path / "parts.pt"))
    assert checkpoint is not None and json.loads((checkpoint / "dial.json").read_text()) == {"share": 2 / 4, "anneal": 4}
    parts = run(tmp_path / "parts.pt", resume=True)
    assert parts.losses == whole.losses and parts.eval_losses == whole.eval_losses and parts.dials == whole.dials
    assert same_weights(retrofit.load(tmp_path / "whole.pt"), retrofit.load(tmp_path / "parts.pt"))


@pytest.mark.long
def test_the_command_line_turns_the_dial(tmp_path: Path) -> None:
    retrofit.save(copy.deepcopy(rewritten()), tmp_path / "model.pt")
    retrofit.save(copy.deepcopy(dense()), tmp_path / "dense.pt")
    (tmp_path / "text.txt").write_text(TEXTS[0])
    words = ["train", str(tmp_path / "model.pt"), "--data", str(tmp_path / "text.txt"), "--steps", "4", "--length", "32"]
    words += ["--teacher", str(tmp_path / "dense.pt"), "--dial", "own", "-o", str(tmp_path / "out.pt")]
    assert main(words) == 0
    found = TrainingRun.read(tmp_path / "out.pt")
    assert len(found.dials) == 2 and found.eval_losses[0][1] == pytest.approx(found.dense_loss, rel=1e-6)
    assert found.stages["anneal"] == 2  # the first half of the steps, as the pass proposes
    assert shares(retrofit.load(tmp_path / "out.pt")) == {1.0}
