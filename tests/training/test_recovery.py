"""A run with a teacher: what each stage begins and ends with, that it resumes, and what it refuses."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support.refusals import refused
from support.training_runs import SMALL, TEXTS, Unplugged, bert, changed, llama, same_weights, t5
from torch import nn

import retrofit
from retrofit.cli import main
from retrofit.errors import TrainingError
from retrofit.passbase.replaying import correspondence
from retrofit.passes.reversible import two_streams
from retrofit.training.continued_pretraining import continue_pretraining
from retrofit.training.layerwise import DenseSites
from retrofit.training.recovery import start_dials
from retrofit.training.runs import TrainingRun, folder_of, last_checkpoint
from retrofit.training.teacher import Teacher

torch.set_num_threads(1)

IDS = torch.arange(3, 43).view(2, 20)
WITHOUT = changed(align=0, anneal=0)


@functools.cache
def trained() -> nn.Module:
    """A dense model that has learned something."""
    model = llama()
    continue_pretraining(model, TEXTS, changed(steps=60, lr=1e-2, eval_every=60))
    return model


@functools.cache
def rewritten(*specs: str) -> nn.Module:
    return retrofit.apply(copy.deepcopy(trained()), *specs, verify=False)


def pair(*specs: str) -> tuple[nn.Module, nn.Module]:
    return copy.deepcopy(rewritten(*specs)), copy.deepcopy(trained())


def sites_of(model: nn.Module, dense: nn.Module) -> DenseSites:
    return DenseSites(model, dense, correspondence(model, dense).sites)


# ── Sites next to the dense modules ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.first(1)
@pytest.mark.parametrize(
    "spec", ["sparse-ffn(sparsity=8)", "sparse-qkv", "shared-moe(groups=1)", "sequence-altup(k=2, layers=all)"]
)
def test_a_mixture_is_dense_at_one_end_and_rewritten_at_the_other(spec: str) -> None:
    model, dense = pair(spec)
    sites, expected, alone = sites_of(model, dense), dense(IDS).logits, model(IDS).logits
    assert (alone - expected).abs().max() > 1e-3
    with sites.mixed(0.0):
        assert torch.equal(model(IDS, use_cache=False).logits, expected)
    with sites.mixed(1.0):
        assert torch.equal(model(IDS).logits, alone)
    with sites.mixed(0.5):
        half = model(IDS, use_cache=False).logits
    assert not torch.equal(half, expected) and not torch.equal(half, alone)
    assert torch.equal(model(IDS).logits, alone)  # no hook is left


def test_aligned_sites_see_the_dense_activations_and_no_gradient_passes_between_them() -> None:
    model, dense = pair("sparse-ffn(sparsity=8)")
    sites = sites_of(model, dense)
    seen: list[torch.Tensor] = []
    handle = sites.sites[1].dense.register_forward_hook(lambda module, args, output: seen.append(args[0]))
    expected = dense(IDS).logits
    with sites.aligning() as errors:
        assert torch.equal(model(IDS, use_cache=False).logits, expected)
    handle.remove()
    assert torch.equal(seen[0], seen[1])
    assert len(errors) == 2 and model.training is False
    first = list(sites.sites[0].module.parameters())
    gradients = torch.autograd.grad(errors[1], first, allow_unused=True)
    assert all(gradient is None for gradient in gradients)
    assert any(gradient is not None for gradient in torch.autograd.grad(errors[0], first, allow_unused=True))


# ── Stages ───────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_alignment_lowers_the_error_of_the_sites_and_changes_nothing_else() -> None:
    model, dense = pair("sparse-ffn(sparsity=8)")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    teacher = {name: value.clone() for name, value in dense.state_dict().items()}
    run = continue_pretraining(model, TEXTS, changed(steps=1, align=30, align_lr=3e-3, lr=0.0), teacher=dense)
    assert run.stages == {"align": 30, "anneal": 0}
    assert run.alignment[-1][1] < 0.9 * run.alignment[0][1]
    assert run.eval_losses[0][1] < run.start_loss  # type: ignore[operator]
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert moved and all(".mlp." in name for name in moved)
    assert all(torch.equal(value, teacher[name]) for name, value in dense.state_dict().items())
    assert all(parameter.requires_grad for parameter in dense.parameters())
    theirs = {parameter.data_ptr() for parameter in dense.parameters()}
    assert not any(parameter.data_ptr() in theirs for parameter in model.parameters())


@pytest.mark.long
def test_an_annealed_run_begins_at_the_dense_loss_and_ends_without_the_dense_part(tmp_path: Path) -> None:
    model, dense = pair("sparse-qkv")
    run = continue_pretraining(model, TEXTS, changed(align=0, anneal=4), teacher=dense, output=tmp_path / "model.pt")
    assert run.eval_losses[0][1] == pytest.approx(run.dense_loss, rel=1e-6)
    assert run.start_loss > run.dense_loss  # type: ignore[operator]
    loaded = retrofit.load(tmp_path / "model.pt")
    assert torch.equal(loaded(IDS).logits, model.eval()(IDS).logits)
    assert loaded.state_dict().keys() == rewritten("sparse-qkv").state_dict().keys()


def test_a_teacher_alone_is_distilled() -> None:
    """With all the weight on the teacher's predictions, one step is that of a plain loop."""
    model, dense = pair("sparse-qkv")
    by_hand = copy.deepcopy(model)
    settings = changed(WITHOUT, steps=1, warmup=0, distil=1.0, temperature=2.0, eval_fraction=0.0)
    seen: list[torch.Tensor] = []
    handle = model.register_forward_pre_hook(lambda module, args, kwargs: seen.append(kwargs["input_ids"]), with_kwargs=True)
    run = continue_pretraining(model, TEXTS, settings, teacher=dense)
    handle.remove()
    ids = seen[-1]
    student, teacher = by_hand(input_ids=ids).logits, dense(input_ids=ids).logits
    log_q, log_p = (2.0**-1 * student).log_softmax(-1), (2.0**-1 * teacher).log_softmax(-1)
    expected = 4.0 * (log_p.exp() * (log_p - log_q)).sum(-1).mean()
    assert run.losses[0][1] == pytest.approx(expected.item(), rel=1e-4)


@pytest.mark.first(1)
@pytest.mark.parametrize("make", [bert, t5])
def test_other_objectives_recover_too(make: Any) -> None:
    dense = make()
    model = retrofit.apply(copy.deepcopy(dense), "sparse-ffn(sparsity=8)", verify=False)
    run = continue_pretraining(model, TEXTS, changed(steps=2, align=2, anneal=1), teacher=dense)
    assert run.eval_losses[0][1] == pytest.approx(run.dense_loss, rel=1e-6)
    assert len(run.alignment) > 1


@pytest.mark.first(1)
@pytest.mark.parametrize("stage", ["align: step 4/", "step 6/"])
def test_a_resumed_run_ends_where_an_uninterrupted_one_does(tmp_path: Path, stage: str) -> None:
    settings = changed(align=6, anneal=3, save_every=2)

    def run(path: Path, **more: Any) -> TrainingRun:
        model, dense = pair("sparse-ffn(sparsity=8)")
        return continue_pretraining(model, TEXTS, settings, teacher=dense, output=path, **more)

    def unplug(text: str) -> None:
        if text.startswith(stage):
            raise Unplugged

    whole = run(tmp_path / "whole.pt")
    with pytest.raises(Unplugged):
        run(tmp_path / "parts.pt", progress=unplug)
    parts = run(tmp_path / "parts.pt", resume=True)
    assert same_weights(retrofit.load(tmp_path / "whole.pt"), retrofit.load(tmp_path / "parts.pt"))
    assert parts.eval_losses == whole.eval_losses and parts.alignment == whole.alignment
    assert last_checkpoint(folder_of(tmp_path / "parts.pt")) is not None
    assert TrainingRun.read(tmp_path / "parts.pt").gap_closed == parts.gap_closed


@pytest.mark.parametrize(
    ("start", "end", "words"),
    [
        (4.0, 3.5, "50%"),
        (4.0, 4.1, "-10%"),
        (4.0, 2.75, "all, 0.2500 below the dense model"),
        (3.0001, 2.0, "no gap"),
        (2.9, 2.0, "no gap"),
    ],
)
def test_the_gap_is_told_as_a_part_of_what_there_was(start: float, end: float, words: str) -> None:
    run = TrainingRun(changed(), "", "", 1, 1, 1, (), ((0, start), (9, end)), (), 0.0, dense_loss=3.0, start_loss=start)
    assert [line.split(None, 2)[2] for line in str(run).splitlines() if line.startswith("gap")] == [words]


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("specs", "dial"),
    [(("sparse-qkv",), "mixture"), (("reversible(scheme=terraformer)",), "own"), (("sparse-ffn(sparsity=8)",), "own")],
)
def test_layers_that_are_computed_again_for_their_gradients_are_mixed_as_they_were(specs: tuple[str, ...], dial: str) -> None:
    """At every place of the dial, in every stage."""
    settings = changed(align=1, anneal=2, steps=3, dial=dial, distil_hidden=0.5, eval_fraction=0.0)
    (plain, dense), (checkpointed, _) = pair(*specs), pair(*specs)
    expected = continue_pretraining(plain, TEXTS, settings, teacher=dense)
    given = dataclasses.replace(settings, gradient_checkpointing=True)
    found = continue_pretraining(checkpointed, TEXTS, given, teacher=dense)
    assert dict(found.losses) == pytest.approx(dict(expected.losses), rel=1e-5)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(checkpointed.get_parameter(name), parameter, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.long
def test_sites_in_layers_that_are_reversed_learn_in_every_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """As they do where two streams are added and nothing is reversed."""
    specs = ("sparse-qkv", "reversible(scheme=terraformer)")
    settings = changed(align=1, anneal=2, steps=3, distil_hidden=0.5, eval_fraction=0.0)
    runs, models = [], []
    for reverse in (True, False):
        model, dense = pair(*specs)
        if not reverse:
            monkeypatch.setattr(two_streams, "two_stream_call", lambda *call: NotImplemented)
        runs.append(continue_pretraining(model, TEXTS, settings, teacher=dense))
        models.append(model)
    assert dict(runs[0].losses) == pytest.approx(dict(runs[1].losses), rel=1e-4)
    for name, parameter in models[1].named_parameters():
        torch.testing.assert_close(models[0].get_parameter(name), parameter, rtol=1e-3, atol=1e-5, msg=name)


# ── A pass's own dial ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@functools.cache
def calibrated() -> nn.Module:
    """Its output matrices are fitted to data: they are not the dense ones, reordered."""
    return retrofit.apply(copy.deepcopy(trained()), "sparse-ffn(sparsity=8, active=2, scale=true)", calibration=IDS, verify=False)


def test_a_dial_of_active_units_begins_at_the_dense_function_and_ends_at_the_method() -> None:
    model, dense = copy.deepcopy(calibrated()), copy.deepcopy(trained())
    teacher = Teacher.of(dense, model)
    blocks = [site.module for site in teacher.sites.sites]
    expected, controller = dense(IDS).logits, [block.c1.clone() for block in blocks]
    with torch.no_grad():
        blocks[0].down.weight.add_(0.1)  # what the align stage has changed
    fitted = model(IDS).logits
    names = start_dials(teacher, lambda: model(IDS))
    assert names == [site.name for site in teacher.sites.sites]
    assert [block.active for block in blocks] == [2, 2]
    assert not torch.equal(model(IDS).logits, fitted)
    torch.testing.assert_close(model(IDS).logits, by_masks(model, dense), atol=1e-5, rtol=1e-4)
    for share, active in ((0.0, 8), (0.1, 7), (0.5, 5), (0.99, 2)):
        with teacher.sites.mixed(share):
            assert [block.active for block in blocks] == [active, active]
            logits = model(IDS).logits
        assert torch.allclose(logits, expected, atol=1e-5) == (share == 0.0)
    assert [block.active for block in blocks] == [2, 2]
    assert all(torch.equal(block.c1, before) for block, before in zip(blocks, controller, strict=True))


@pytest.mark.long
def test_a_dial_of_computed_tokens_begins_at_the_dense_function_and_ends_at_the_method() -> None:
    model, dense = pair("sequence-altup(k=3, layers=all)")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith((".a1", ".a2", ".b")):
                parameter.add_(0.1)
    teacher = Teacher.of(dense, model)
    rewritten, expected = model(IDS, use_cache=False).logits, dense(IDS).logits
    assert start_dials(teacher, lambda: model(IDS, use_cache=False)) == [site.name for site in teacher.sites.sites]
    assert len(teacher.sites.sites) == len(dense.model.layers)  # type: ignore[union-attr, arg-type]
    far = []
    for share in (0.0, 0.3, 1.0):
        with teacher.sites.mixed(share):
            far.append(float((model(IDS, use_cache=False).logits - expected).abs().max().detach()))
    assert far[0] < 1e-5 < far[1] < far[2]
    assert torch.equal(model(IDS, use_cache=False).logits, rewritten)


def by_masks(model: nn.Module, dense: nn.Module) -> torch.Tensor:
    """The logits of the dense model with a mask on its hidden units: the two of each block whose controller logits are largest."""
    dense = copy.deepcopy(dense)
    for layer, sparse in zip(dense.model.layers, model.model.layers, strict=True):  # type: ignore[arg-type, union-attr]
        chosen: list[torch.Tensor] = []

        def choose(module: nn.Module, args: Any, sparse: Any = sparse.mlp, chosen: Any = chosen) -> None:
            logits = (args[0] @ sparse.c1 @ sparse.c2 + sparse.bias).unflatten(-1, (-1, 8))
            mask = torch.zeros_like(logits).scatter(-1, logits.topk(2).indices, 2.0).flatten(-2)  # √(8 / 2)
            chosen[:] = [torch.empty_like(mask).index_copy(-1, sparse.order, mask)]

        layer.mlp.register_forward_pre_hook(choose)
        layer.mlp.down_proj.register_forward_pre_hook(lambda module, args, chosen=chosen: (args[0] * chosen[0],))
    logits: torch.Tensor = dense(IDS).logits
    return logits


def test_sites_that_a_dial_does_not_make_dense_are_mixtures() -> None:
    model, dense = copy.deepcopy(calibrated()), copy.deepcopy(trained())
    teacher = Teacher.of(dense, model)
    unknown = dataclasses.replace(teacher, parts=dataclasses.replace(teacher.parts, fates={}))  # fitted values stay
    before = model(IDS).logits
    assert start_dials(unknown, lambda: model(IDS)) == []
    assert torch.equal(model(IDS).logits, before)
    with teacher.sites.mixed(0.0):
        assert torch.equal(model(IDS, use_cache=False).logits, dense(IDS).logits)
    weighted, dense = pair("sparse-ffn(sparsity=8, multiply_by_controller=true)")
    assert start_dials(Teacher.of(dense, weighted), lambda: weighted(IDS)) == []


@pytest.mark.long
def test_a_run_with_a_dial_resumes_where_it_stood(tmp_path: Path) -> None:
    settings = changed(align=2, anneal=6, dial="own", save_every=2)

    def run(path: Path, **more: Any) -> TrainingRun:
        model, dense = copy.deepcopy(calibrated()), copy.deepcopy(trained())
        return continue_pretraining(model, TEXTS, settings, teacher=dense, output=path, **more)

    def unplug(text: str) -> None:
        if text.startswith("step 5/"):
            raise Unplugged

    whole = run(tmp_path / "whole.pt")
    assert whole.eval_losses[0][1] == pytest.approx(whole.dense_loss, rel=1e-5)
    assert whole.eval_losses[1][1] != pytest.approx(whole.eval_losses[0][1], rel=1e-5)
    assert len(whole.dials) == 2
    with pytest.raises(Unplugged):
        run(tmp_path / "parts.pt", progress=unplug)
    checkpoint = last_checkpoint(folder_of(tmp_path / "parts.pt"))
    assert checkpoint is not None and json.loads((checkpoint / "dial.json").read_text()) == {"share": 4 / 6, "anneal": 6}
    parts = run(tmp_path / "parts.pt", resume=True)
    assert same_weights(retrofit.load(tmp_path / "whole.pt"), retrofit.load(tmp_path / "parts.pt"))
    assert parts.losses == whole.losses and parts.dials == whole.dials
    loaded = retrofit.load(tmp_path / "parts.pt")
    assert loaded.get_submodule(parts.dials[0]).active == 2


# ── Refusals ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_does_not_fit_is_refused() -> None:
    model, dense = pair("sparse-ffn(sparsity=8)")
    with refused(TrainingError, "--teacher", option="align"):
        continue_pretraining(model, TEXTS, changed(align=3))
    with refused(TrainingError, code="other-vocabulary", option="teacher"):
        continue_pretraining(model, TEXTS, SMALL, teacher=bert())
    with refused(TrainingError, code="other-model", option="teacher"):
        continue_pretraining(model, TEXTS, SMALL, teacher=llama(hidden_size=24))
    with refused(TrainingError, code="not-rewritten"):
        continue_pretraining(dense, TEXTS, SMALL, teacher=dense)


@pytest.mark.long
def test_sites_and_dense_modules_of_two_dtypes_are_refused_where_both_are_computed() -> None:
    model, dense = pair("sparse-qkv")
    settings = changed(steps=1, anneal=0, eval_fraction=0.0)
    with refused(TrainingError, "float32", "bfloat16", code="dtypes", option="teacher"):
        continue_pretraining(model.bfloat16(), TEXTS, dataclasses.replace(settings, align=1), teacher=dense)
    run = continue_pretraining(model, TEXTS, dataclasses.replace(settings, align=0), teacher=dense)
    assert math.isfinite(run.losses[-1][1])


@pytest.mark.long
def test_sites_that_are_frozen_are_not_aligned() -> None:
    model, dense = pair("sparse-qkv")
    model.requires_grad_(False)
    model.get_parameter("lm_head.weight").requires_grad_()
    settings = changed(steps=1, anneal=0, eval_fraction=0.0, distil=0.5)
    run = continue_pretraining(model, TEXTS, dataclasses.replace(settings, align=None), teacher=dense)
    assert run.stages == {"align": 0, "anneal": 0}
    with refused(TrainingError, "--align 1", "requires_grad_()", option="align"):
        continue_pretraining(model, TEXTS, dataclasses.replace(settings, align=1), teacher=dense)


@pytest.mark.long
def test_on_the_command_line_weights_may_be_held_in_float32(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, dense = pair("sparse-qkv")
    retrofit.save(model.half(), tmp_path / "model.pt")
    retrofit.save(dense.bfloat16(), tmp_path / "dense.pt")
    (tmp_path / "text.txt").write_text(TEXTS[0])
    given = [str(tmp_path / "model.pt"), "--data", str(tmp_path / "text.txt"), "--teacher", str(tmp_path / "dense.pt")]
    words = ["train", *given, "--steps", "2", "--length", "32", "--batch-size", "2", "--align", "1", "--anneal", "1"]
    assert main(words) == 2
    assert "--float32" in capsys.readouterr().err
    assert main([*words, "--float32"]) == 0
    assert retrofit.load(tmp_path / "model.trained.pt").dtype == torch.float32


def test_an_interruption_while_sites_are_aligned_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def press_ctrl_c(self: Any, stage: str) -> None:
        if stage.startswith("align: step 3/"):
            raise KeyboardInterrupt

    model, dense = pair("sparse-ffn(sparsity=4)")
    retrofit.save(model, tmp_path / "model.pt")
    retrofit.save(dense, tmp_path / "dense.pt")
    (tmp_path / "text.txt").write_text(TEXTS[0])
    given = ["train", str(tmp_path / "model.pt"), "--teacher", str(tmp_path / "dense.pt"), "--data", str(tmp_path / "text.txt")]
    short = ["--steps", "2", "--align", "4", "--anneal", "0", "--batch-size", "2", "--length", "32", "--device", "cpu"]
    with monkeypatch.context() as patched:
        patched.setattr("retrofit.cli.terminal.Progress.__call__", press_ctrl_c)
        assert main([*given, *short]) == 130
    assert f"align{os.sep}checkpoint-3 " in (said := capsys.readouterr().err) and "--resume" in said
    assert main([*given, *short, "--resume"]) == 0


@pytest.mark.parametrize("option", ["--align-lr 0.1", "--dial own", "--distil 0.5", "--temperature 2"])
def test_on_the_command_line_what_needs_a_teacher_is_not_ignored_without_one(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    retrofit.save(pair("sparse-ffn(sparsity=8)")[0], tmp_path / "model.pt")
    (tmp_path / "text.txt").write_text(TEXTS[0])
    given = ["train", str(tmp_path / "model.pt"), "--data", str(tmp_path / "text.txt"), "--steps", "4", *option.split()]
    assert main(given) == 2
    assert f"{option.split()[0]} " in (said := capsys.readouterr().err) and "--teacher" in said
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["model.pt", "text.txt"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--eval-fraction 0 --eval-every 1", "--eval-every 1 has no effect with --eval-fraction 0"),
        ("--teacher model.pt --distil 0 --temperature 2", "--temperature 2 has no effect with --distil 0"),
        ("--teacher model.pt --align 0 --align-lr 0.1", "--align-lr 0.1 has no effect with --align 0"),
        ("--teacher model.pt --anneal 0 --dial own", "--dial own has no effect with --anneal 0"),
    ],
)
def test_on_the_command_line_what_has_no_effect_is_refused(
    options: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.pt").touch()
    assert main(["train", "model.pt", "--data", "text.txt", "--steps", "4", *options.split()]) == 2
    assert said in capsys.readouterr().err


def test_the_command_line_names_the_teacher(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, dense = pair("sparse-ffn(sparsity=8)")
    retrofit.save(model, tmp_path / "model.pt")
    retrofit.save(dense, tmp_path / "dense.pt")
    (tmp_path / "text.txt").write_text(TEXTS[0])
    words = ["train", str(tmp_path / "model.pt"), "--data", str(tmp_path / "text.txt"), "--steps", "4", "--length", "32"]
    assert (
        main(
            [
                *words,
                "--batch-size",
                "2",
                "--teacher",
                str(tmp_path / "dense.pt"),
                "--align",
                "2",
                "--anneal",
                "2",
                "--lr-new",
                "0.001",
            ]
        )
        == 0
    )
    assert "the dense model" in capsys.readouterr().out
    assert (tmp_path / "model.trained.run" / "curve.png").exists()
    assert main([*words, "--anneal", "5", "--teacher", str(tmp_path / "dense.pt"), "--force"]) == 2
    assert "--anneal 5 " in capsys.readouterr().err
