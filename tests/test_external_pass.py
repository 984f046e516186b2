"""A pass that is a package of its own: installed, found by its entry point, used, saved and loaded; and the page that builds it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.command_server import CommandServer

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "examples" / "external_pass"
PAGE = ROOT / "docs" / "write_a_pass.md"

USE = """
import sys, torch, transformers, retrofit
from retrofit.cli import main
assert main(["passes", "low-rank"]) == 0
torch.manual_seed(0)
config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=99, bos_token_id=0, eos_token_id=0)
model = transformers.GPT2LMHeadModel(config).eval()
ids = torch.arange(24).view(2, 12)
before = model(ids).logits
retrofit.apply(model, "low-rank(rank=3)", "altup(k=2)", verify=False)  # its own tests verify it
torch.testing.assert_close(model(ids).logits, before, atol=1e-4, rtol=1e-4)
model.save_pretrained(sys.argv[1])
again = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
assert torch.equal(again(ids).logits, model(ids).logits)
print([one.spec() for one in retrofit.recipe(again)])
"""


PYTEST = "import sys, pytest; sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', '-c', *sys.argv[1:]]))"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the package is installed in."""
    source, target = tmp_path_factory.mktemp("source") / "package", tmp_path_factory.mktemp("site")
    shutil.copytree(PACKAGE, source, ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info"))
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*command, "--target", str(target), str(source)], check=True, capture_output=True, timeout=300)
    return target


@pytest.fixture(scope="module")
def used(installed: Path, server: CommandServer, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What a program prints that uses the installed pass, and the model that it saved."""
    model = tmp_path_factory.mktemp("used") / "model"
    done = server.program(USE, model, paths=[installed])
    assert done.code == 0, done.err
    return done.out, model


def test_an_installed_pass_is_found_used_saved_and_loaded(used: tuple[str, Path]) -> None:
    printed, _ = used
    assert "--rank" in printed
    assert "low-rank(rank=3, alpha=16.0, branches=all, layers=all)" in printed


@pytest.mark.long
def test_its_own_tests_pass(installed: Path, server: CommandServer) -> None:
    done = server.program(PYTEST, os.devnull, PACKAGE / "tests", paths=[installed])
    assert done.code == 0, done.out


def test_without_its_package_a_model_says_what_is_missing(used: tuple[str, Path], server: CommandServer) -> None:
    done = server.program(f"import retrofit; retrofit.load({str(used[1])!r})")
    assert done.code != 0
    assert "unknown pass 'low-rank'" in done.err


@pytest.fixture(scope="module")
def pasted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of the page from the top, in one file."""
    path = tmp_path_factory.mktemp("pasted") / "test_pasted.py"
    path.write_text("\n\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)), encoding="utf-8")
    return path


SCALED = """
config = transformers.BertConfig(vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2)
model, dense, ids = (*(transformers.BertModel(config).eval() for _ in range(2)), torch.arange(24).view(2, 12))
dense.load_state_dict(model.state_dict())
retrofit.apply(model, Scale(), verify=False)
with torch.no_grad():
    for module in model.modules():
        if isinstance(module, Scaled):
            module.alpha.fill_(0.5)
    for layer in dense.encoder.layer:
        layer.output.dense.weight.mul_(1.5), layer.output.dense.bias.mul_(1.5)
    torch.testing.assert_close(model(ids).last_hidden_state, dense(ids).last_hidden_state)
print(sum(isinstance(module, Scaled) for module in model.modules()))
"""


def test_the_page_runs_as_pasted_and_scales_feed_forwards_alone(pasted: Path, server: CommandServer) -> None:
    done = server.program(f"{pasted.read_text(encoding='utf-8')}\n{SCALED}")
    assert done.code == 0, done.err
    assert done.out.split() == ["2"]


def test_the_tests_of_the_page_pass_as_pasted(pasted: Path, server: CommandServer) -> None:
    done = server.program(PYTEST, os.devnull, pasted)
    assert done.code == 0 and "2 passed" in done.out, done.out


def without_spaces(text: str) -> str:
    return re.sub(r"\s+", "", text)


def test_the_page_shows_the_code_of_the_package() -> None:
    code = "\n".join(path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*")) if path.suffix in (".py", ".toml"))
    blocks = re.findall(r"```(?:python|toml)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) > 5
    missing = [block for block in blocks if without_spaces(block) not in without_spaces(code)]  # the formatter outdents methods
    assert not missing, missing[0]
