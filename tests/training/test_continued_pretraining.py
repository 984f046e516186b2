"""Continued pretraining: it trains what was asked for, refuses what it cannot train, and leaves nothing behind."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy
import pytest
import torch
import transformers
from support.refusals import refused
from support.training_runs import LAYERS, MODELS, SMALL, TEXTS, Unplugged, changed, llama, same_weights, t5, unplug_at
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

import retrofit
from retrofit.cli import main
from retrofit.errors import CheckpointError, TrainingError
from retrofit.passbase.tokenization import codec_for, windows_of
from retrofit.training.continued_pretraining import continue_pretraining, require_trainable
from retrofit.training.runs import TrainingRun, folder_of, last_checkpoint
from retrofit.training.settings import Settings
from retrofit.training.teaching import teach
from retrofit.training.windows import is_held_out


@pytest.mark.first(1)
@pytest.mark.parametrize("name", MODELS)
def test_every_kind_of_model_learns(name: str) -> None:
    model = MODELS[name]()
    run = continue_pretraining(model, TEXTS, changed(steps=20, lr=1e-2, eval_every=2))
    assert run.objective == name
    assert [step for step, _ in run.eval_losses] == list(range(0, 21, 2))
    assert [step for step, _ in run.losses] == list(range(1, 21))
    assert run.eval_losses[-1][1] < run.eval_losses[0][1] - 0.5
    assert run.eval_losses[0][1] == pytest.approx(math.log(300), abs=1.0)  # nothing is known at first


@pytest.mark.long
def test_parameters_that_no_gradient_reached_are_named(tmp_path: Path) -> None:
    """A controller learns in training only, and the program of rewritten modules holds what is computed in evaluation mode."""
    rewritten = retrofit.apply(llama(), "sparse-ffn(sparsity=4)", verify=False)
    controllers = [name for name, _ in rewritten.named_parameters() if name.rpartition(".")[2] in ("c1", "c2")]
    retrofit.save(rewritten, tmp_path / "rewritten.pt2")
    run = continue_pretraining(rewritten, TEXTS, changed(steps=2))
    assert controllers and run.untrained == () and "not trained" not in str(run)
    run = continue_pretraining(retrofit.load(tmp_path / "rewritten.pt2"), TEXTS, changed(steps=2), output=tmp_path / "trained.pt2")
    assert {*controllers} <= {*run.untrained} and not any("embed" in name for name in run.untrained)
    assert f"not trained    {run.untrained[0]}, " in str(run)
    assert TrainingRun.read(tmp_path / "trained.pt2").untrained == run.untrained


def test_the_held_out_loss_is_that_of_the_held_out_windows() -> None:
    """A loop over the held-out windows, before and after, gives the losses at the first and the last step."""
    model = llama()
    windows = windows_of(TEXTS, codec_for(model), SMALL.length)
    held_out = windows[is_held_out(windows, SMALL.eval_fraction)].long()

    def measured() -> float:
        with torch.no_grad():
            return sum(float(model(input_ids=window[None], labels=window[None]).loss) for window in held_out) / len(held_out)

    before = measured()
    run = continue_pretraining(model, TEXTS, SMALL)
    assert run.held_out == len(held_out) > 1
    assert run.eval_losses[0][1] == pytest.approx(before, rel=1e-4)
    assert run.eval_losses[-1][1] == pytest.approx(measured(), rel=1e-4)


def test_the_steps_are_adamw_on_the_windows_in_their_order() -> None:
    """A plain loop over the same windows with torch's own AdamW, warm-up and clipping ends at the same weights."""
    trained, by_hand = llama(), llama()
    settings = changed(warmup=2, eval_fraction=0.0, weight_decay=0.1)
    run = continue_pretraining(trained, TEXTS, settings)
    windows = windows_of(TEXTS, codec_for(by_hand), settings.length).long()
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(settings.seed))
    norms = [parameter for name, parameter in by_hand.named_parameters() if "norm" in name]
    others = [parameter for name, parameter in by_hand.named_parameters() if "norm" not in name]
    optimizer = torch.optim.AdamW([{"params": others, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}])
    by_hand.train()
    for step in range(settings.steps):
        rate = settings.lr * (step / 2 if step < 2 else (settings.steps - step) / (settings.steps - 2))
        for group in optimizer.param_groups:
            group["lr"] = rate
        batch = windows[order[2 * step : 2 * step + 2]]
        loss = by_hand(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(by_hand.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert dict(run.losses)[step + 1] == pytest.approx(loss.item(), rel=1e-4)
        assert dict(run.rates)[step + 1] == pytest.approx(rate)
    for (name, one), other in zip(trained.named_parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5, msg=name)


def test_a_single_string_is_one_text() -> None:
    once = continue_pretraining(t5(), TEXTS[0], changed(steps=1))
    assert once.windows == continue_pretraining(t5(), TEXTS, changed(steps=1)).windows


def test_every_model_sees_the_same_windows_in_the_same_order() -> None:
    def seen(model: nn.Module, seed: int = 0) -> list[list[int]]:
        batches: list[list[int]] = []
        hook = model.register_forward_pre_hook(
            lambda module, args, kwargs: batches.append(kwargs["input_ids"].flatten().tolist()) if module.training else None,
            with_kwargs=True,
        )
        continue_pretraining(model, TEXTS, changed(steps=3, seed=seed))
        hook.remove()
        return batches

    reference = seen(llama())
    assert len(reference) == 3
    assert seen(llama(seed=1, hidden_size=32)) == reference
    assert seen(llama(), seed=1) != reference


def test_a_seed_fixes_a_run() -> None:
    one, same, other = (continue_pretraining(t5(), TEXTS, changed(seed=seed)) for seed in (3, 3, 4))
    assert one.losses == same.losses
    assert one.losses != other.losses


@pytest.mark.first(1)
@pytest.mark.parametrize("name", ["next token", "span corruption"])
def test_gradient_checkpointing_changes_no_result(name: str) -> None:
    """The same steps, fewer saved tensors, and the switch is off again afterwards."""
    plain, checkpointed = MODELS[name](), MODELS[name]()
    for model in (plain, checkpointed):
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
    expected = continue_pretraining(plain, TEXTS, SMALL)
    hooks = sum(len(module._forward_hooks) for module in checkpointed.modules())
    recomputed: list[int] = []
    layers = [module for module in checkpointed.modules() if hasattr(module, "gradient_checkpointing") and list(module.children())]
    inside = next(module for module in layers[-1].modules() if isinstance(module, nn.Linear))
    counter = inside.register_forward_pre_hook(lambda module, args: recomputed.append(1) if module.training else None)
    run = continue_pretraining(checkpointed, TEXTS, changed(gradient_checkpointing=True))
    counter.remove()
    assert len(recomputed) == 2 * SMALL.steps  # forward, and once more in backward
    assert dict(run.losses) == pytest.approx(dict(expected.losses))
    assert sum(len(module._forward_hooks) for module in checkpointed.modules()) == hooks
    assert not any(getattr(module, "gradient_checkpointing", False) for module in checkpointed.modules())


def test_nothing_of_the_trainer_is_left_on_the_model() -> None:
    model = llama()
    model.config.use_cache = True
    model.model.layers[1].train()
    config, attributes, verbosity = model.config.to_dict(), dict(vars(model)), transformers.logging.get_verbosity()
    continue_pretraining(model, TEXTS, changed(bf16=True, gradient_checkpointing=True))
    assert model.config.to_dict() == config
    assert set(vars(model)) - {"_require_grads_hooks"} == set(attributes)
    assert transformers.logging.get_verbosity() == verbosity
    assert not model.training and not model.lm_head.training and model.model.layers[1].mlp.training
    assert all(parameter.grad is None and parameter.dtype == torch.float32 for parameter in model.parameters())
    assert model(torch.arange(3, 9)[None]).logits.dtype == torch.float32


def test_bfloat16_is_close_to_float32_and_does_not_stay_on() -> None:
    exact, half = (continue_pretraining(llama(), TEXTS, changed(bf16=bf16)) for bf16 in (False, True))
    assert half.losses != exact.losses
    assert half.losses[-1][1] == pytest.approx(exact.losses[-1][1], rel=0.02)
    assert continue_pretraining(llama(), TEXTS, SMALL).losses == exact.losses


def test_a_run_leaves_a_model_its_numbers_and_a_picture(tmp_path: Path) -> None:
    model = llama()
    run = continue_pretraining(model, TEXTS, changed(steps=9), output=tmp_path / "directory")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["directory", "directory.run"]
    assert same_weights(LlamaForCausalLM.from_pretrained(tmp_path / "directory"), model)
    assert TrainingRun.read(tmp_path / "directory") == run
    record = json.loads((tmp_path / "directory.run" / "run.json").read_text())
    assert record["settings"]["lr"] == SMALL.lr
    assert [tuple(point) for point in record["eval_losses"]] == list(run.eval_losses)
    with (tmp_path / "directory.run" / "numbers.csv").open() as file:
        rows = {int(row["step"]): row for row in csv.DictReader(file)}
    assert sorted(rows) == list(range(10))
    assert {step for step, row in rows.items() if row["held_out_loss"]} == {0, 4, 8, 9}
    assert float(rows[9]["held_out_loss"]) == run.eval_losses[-1][1]
    assert float(rows[5]["training_loss"]) == dict(run.losses)[5]
    picture = matplotlib.image.imread(tmp_path / "directory.run" / "curve.png")
    assert picture.shape[0] > 400 and picture.shape[1] > 700
    assert picture.min() < 0.3 < 0.9 < picture.max()
    assert f"{run.eval_losses[0][1]:.4f} → {run.eval_losses[-1][1]:.4f}" in str(run)


def test_without_a_held_out_part_nothing_is_evaluated() -> None:
    run = continue_pretraining(llama(), TEXTS, changed(eval_fraction=0.0))
    assert run.eval_losses == () and run.held_out == 0
    assert len(run.losses) == SMALL.steps
    assert "held-out loss" not in str(run)


def test_a_loss_that_is_no_number_stops_the_run_and_leaves_nothing(tmp_path: Path) -> None:
    model = llama()
    with torch.no_grad():
        model.lm_head.weight[5] = float("nan")
    with refused(TrainingError, "nan", "step 0", "--lr", code="diverged"):
        continue_pretraining(model, TEXTS, SMALL, output=tmp_path / "model.pt")
    assert list(tmp_path.iterdir()) == []
    assert not model.training


def test_nothing_is_overwritten_unasked(tmp_path: Path) -> None:
    output = tmp_path / "model.pt"
    first = continue_pretraining(llama(), TEXTS, SMALL, output=output)
    weights = output.read_bytes()
    with refused(TrainingError, "model.pt", "--force", code="exists", option=""):
        continue_pretraining(llama(), TEXTS, SMALL, output=output)
    output.unlink()
    with refused(TrainingError, "--resume", code="exists", option="resume"):
        continue_pretraining(llama(), TEXTS, SMALL, output=output)
    with refused(TrainingError, code="missing", option="resume"):
        continue_pretraining(llama(), TEXTS, SMALL, output=tmp_path / "other.pt", resume=True)
    again = continue_pretraining(llama(), TEXTS, SMALL, output=output, force=True)
    assert again.losses == first.losses
    assert len(output.read_bytes()) == len(weights)
    (tmp_path / "mine.run").mkdir()
    (tmp_path / "mine.run" / "thesis.txt").write_text("years of work")
    with refused(TrainingError, "mine.run", code="occupied"):
        continue_pretraining(llama(), TEXTS, SMALL, output=tmp_path / "mine.pt", force=True)
    assert (tmp_path / "mine.run" / "thesis.txt").read_text() == "years of work"


def test_an_output_that_could_not_be_saved_is_refused_before_any_step(tmp_path: Path) -> None:
    steps: list[str] = []
    with refused(CheckpointError, ".gguf", code="name"):
        continue_pretraining(llama(), TEXTS, SMALL, output=tmp_path / "model.gguf", progress=steps.append)
    assert not steps


@pytest.mark.long
def test_a_compiled_model_is_trained_saved_and_resumed(tmp_path: Path) -> None:
    def compiled() -> Any:
        return torch.compile(llama(), backend="eager")

    model = compiled()
    continue_pretraining(model, TEXTS, SMALL, output=tmp_path / "model")
    assert same_weights(retrofit.load(tmp_path / "model"), model)
    with pytest.raises(Unplugged):
        continue_pretraining(compiled(), TEXTS, SMALL, output=tmp_path / "other.pt", progress=unplug_at(6))
    continue_pretraining(compiled(), TEXTS, SMALL, output=tmp_path / "other.pt", resume=True)
    assert same_weights(retrofit.load(tmp_path / "other.pt"), model)


def test_adapters_are_saved_as_a_directory_and_not_as_a_file(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    given = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(llama(), given)
    continue_pretraining(model, TEXTS, SMALL, output=tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(llama(), tmp_path / "adapter")
    assert same_weights(again, model)
    inside = llama()
    inside.add_adapter(given)
    for one in (model, inside):
        with refused(CheckpointError, ".pt", code="adapters"):
            continue_pretraining(one, TEXTS, SMALL, output=tmp_path / "model.pt")
    assert not (tmp_path / "model.run").exists()


def test_a_model_without_a_loss_is_refused_before_any_file(tmp_path: Path) -> None:
    with refused(TrainingError, "BertModel", code="no-loss"):
        continue_pretraining(BertModel(BertConfig(vocab_size=300, **LAYERS)), TEXTS, SMALL, output=tmp_path / "model.pt")
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_no_step_would_train_is_refused() -> None:
    """A mean square below float16's range would be zero, and the step as long as one divided by AdamW's epsilon."""
    assert torch.tensor(1e-4).square().half() == 0
    with refused(TrainingError, "LlamaForCausalLM", code="float16"):
        continue_pretraining(llama().half(), TEXTS, SMALL)
    with refused(TrainingError, "LlamaForCausalLM", code="frozen"):
        continue_pretraining(llama().requires_grad_(False), TEXTS, SMALL)
    model = llama().half().requires_grad_(False)
    model.lm_head = model.lm_head.float().requires_grad_()
    require_trainable(model)  # what is frozen may be in float16


def test_the_trainer_is_asked_for_nothing_that_is_going_away(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        warnings.simplefilter("error", DeprecationWarning)
        warnings.simplefilter("error", UserWarning)
        continue_pretraining(llama(), TEXTS, changed(gradient_checkpointing=True), output=tmp_path / "model.pt")


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("steps", 0, "1"),
        ("steps", 10**15, "2147483647"),
        ("seed", 2**32, "4294967295"),
        ("lr", float("nan"), "finite"),
        ("schedule", "wavy", "cosine"),
        ("eval_fraction", 1.0, "0.05"),
        ("device", "abacus", "cpu"),
        ("length", 4, "8"),
        ("steps", 2.5, "integer"),
        ("warmup", "3", "integer"),
        ("lr", "1e-3", "number"),
        ("batch_size", None, "integer"),
    ],
)
def test_settings_that_make_no_sense_are_refused(option: str, value: Any, says: str) -> None:
    """By the option as it is written on the command line, with its value and what is wrong with it."""
    with refused(TrainingError, f"--{option.replace('_', '-')}", str(value), says, option=option):
        changed(**{option: value})


def test_settings_are_numbers_of_python() -> None:
    given = Settings(steps=numpy.int64(3), lr=numpy.float32(0.5), warmup=torch.tensor(2), weight_decay=1)  # type: ignore[arg-type]
    assert json.loads(json.dumps(dataclasses.asdict(given)))["steps"] == 3
    assert (type(given.steps), type(given.lr), type(given.warmup), type(given.weight_decay)) == (int, float, int, float)


def made_for_inference() -> nn.Module:
    with torch.inference_mode():
        return llama()


@pytest.mark.parametrize(
    ("make", "code", "named"),
    [
        (lambda: "model.pt", "no-model", "'model.pt'"),
        (lambda: LlamaForCausalLM, "no-model", "a class"),
        (lambda: llama().to("meta"), "no-values", "model.embed_tokens.weight"),
        (made_for_inference, "inference-mode", "torch.inference_mode()"),
    ],
    ids=["path", "class", "meta", "inference"],
)
def test_what_cannot_be_trained_is_refused(make: Callable[[], Any], code: str, named: str) -> None:
    with refused(retrofit.RetrofitError, named, code=code):
        continue_pretraining(make(), TEXTS, SMALL)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_refused() -> None:
    with refused(TrainingError, "cuda", option="device"):
        continue_pretraining(llama(), TEXTS, changed(device="cuda"))


@pytest.fixture
def on_disk(tmp_path: Path) -> Path:
    """A directory with `model.pt` and `text.txt`."""
    retrofit.save(llama(), tmp_path / "model.pt")
    (tmp_path / "text.txt").write_text(TEXTS[0])
    return tmp_path


def command(folder: Path, *more: str) -> int:
    arguments = ["train", str(folder / "model.pt"), "--data", str(folder / "text.txt"), "--steps", "8", "--length", "32"]
    return main([*arguments, "--batch-size", "2", "--lr", "3e-3", "--eval-every", "4", "--device", "cpu", *more])


def test_the_command_does_what_the_library_does(on_disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected: TrainingRun = continue_pretraining(llama(), TEXTS, SMALL)
    assert command(on_disk) == 0
    out, err = capsys.readouterr()
    assert [line for line in err.splitlines() if "held-out loss" in line] and "\x1b" not in err
    assert f"held-out loss  {expected.eval_losses[0][1]:.4f} → {expected.eval_losses[-1][1]:.4f}" in out
    for path in ("model.trained.pt", "model.trained.run/curve.png", "model.trained.run/run.json"):
        assert str(on_disk / path) in out
        assert (on_disk / path).is_file()
    record = json.loads((on_disk / "model.trained.run" / "run.json").read_text())
    assert [tuple(point) for point in record["losses"]] == list(expected.losses)
    assert command(on_disk) == 2
    assert "--force" in capsys.readouterr().err
    assert command(on_disk, "--force", "-o", str(on_disk / "model.trained.pt")) == 0


def test_a_directory_is_read_and_written_with_its_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["[UNK]", "</s>", *"the cat sat on a mat and so did dog".split()]
    core = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(words), **LAYERS))
    model.save_pretrained(tmp_path / "cat")
    PreTrainedTokenizerFast(tokenizer_object=core, unk_token="[UNK]", eos_token="</s>").save_pretrained(tmp_path / "cat")
    (tmp_path / "text.md").write_text("the cat sat on a mat and so did the dog " * 60)
    arguments = ["train", str(tmp_path / "cat"), "--data", str(tmp_path), "--steps", "8", "--length", "16", "--lr", "1e-2"]
    assert main([*arguments, "--device", "cpu"]) == 0
    assert "the model's tokenizer" in capsys.readouterr().out
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "cat.trained")
    assert tokenizer("the dog")["input_ids"] == [words.index("the"), words.index("dog")]
    assert LlamaForCausalLM.from_pretrained(tmp_path / "cat.trained").config.vocab_size == len(words)


def test_the_command_goes_on_after_an_interruption(
    on_disk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def press_ctrl_c(self: Any, stage: str) -> None:
        if stage.startswith("step 6/"):
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("retrofit.cli.terminal.Progress.__call__", press_ctrl_c)
        assert command(on_disk) == 130
    err = capsys.readouterr().err
    assert "checkpoint-4" in err and "--resume" in err
    assert not (on_disk / "model.trained.pt").exists()
    assert command(on_disk, "--resume") == 0
    assert last_checkpoint(folder_of(on_disk / "model.trained.pt")) is not None


def test_a_finished_run_says_how_to_go_on_and_how_to_start_over(on_disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(on_disk) == 0
    capsys.readouterr()
    for more in (["--resume"], ["--resume", "--force"]):
        assert command(on_disk, *more) == 2
        said = capsys.readouterr().err
        assert "done 8 steps" in said
        assert all(option in said for option in ("--steps above 8", "--force", "--resume"))
    assert command(on_disk, "--resume", "--force", "--steps", "9") == 0  # as it said
    assert command(on_disk, "--force") == 0
    assert TrainingRun.read(on_disk / "model.trained.pt").settings.steps == 8


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--data", "gone.txt"], "gone.txt: no such file"),
        (["--resume"], "no run to resume"),
        (["--schedule", "wavy"], "wavy"),
        (["--steps", "0"], "--steps 0 is below 1"),
        (["--tokenizer", "."], "holds no tokenizer"),
        (["--step", "3"], "--steps"),
    ],
)
def test_the_command_names_what_is_wrong(on_disk: Path, capsys: pytest.CaptureFixture[str], more: list[str], message: str) -> None:
    before = sorted(on_disk.iterdir())
    assert command(on_disk, *more) == 2
    assert message in capsys.readouterr().err
    assert sorted(on_disk.iterdir()) == before


def test_windows_longer_than_the_positions_of_the_config_are_told_of_before_the_first_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With rotary embeddings the model runs there."""
    model = llama(max_position_embeddings=16)
    with pytest.warns(UserWarning, match=r"\b24\b.*\b16\b.*--length 16"):
        continue_pretraining(model, TEXTS, changed(steps=1, length=24))
    with pytest.warns(UserWarning, match="--length 16"):
        teach(model, TEXTS, tmp_path / "taught", length=24)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*positions")
        continue_pretraining(model, TEXTS, changed(steps=1, length=16))
    retrofit.save(model, tmp_path / "model")
    (tmp_path / "text.txt").write_text(TEXTS[0], encoding="utf-8")
    for command in (["train", "--steps", "1", "--eval-fraction", "0"], ["teach"]):
        for length, said in (("24", True), ("16", False)):
            output = ["-o", str(tmp_path / f"{command[0]}{length}")]
            assert not main([*command, str(tmp_path / "model"), "--data", str(tmp_path / "text.txt"), "--length", length, *output])
            assert ("--length 16" in capsys.readouterr().err) is said
