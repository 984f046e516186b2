"""Mutants: faults put into the sources, one at a time, and the models that a mutated pass is applied to.

A mutant replaces one text of one source file, which must be there exactly once. Each breaks something that the method says, and
not the syntax.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


@dataclasses.dataclass(frozen=True)
class Trial:
    """A pass applied to a tiny model, with every check; `options` are `calibrated` and `onnx`."""

    model: str
    spec: str
    options: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join((self.model, self.spec, *self.options))


def on(models: str, spec: str, *options: str) -> tuple[Trial, ...]:
    """The pass on each of the models: on("gpt2 llama", "altup(k=2)")."""
    return tuple(Trial(model, spec, options) for model in models.split())


@dataclasses.dataclass(frozen=True)
class Mutant:
    """`old`, which `path` has once, becomes `new`, and with that something is wrong; the trials lead through the changed code."""

    method: str  # the pass
    path: str  # of the file, in the repository
    wrong: str
    old: str
    new: str
    trials: tuple[Trial, ...] = dataclasses.field(kw_only=True)
    test: str = dataclasses.field(default="", kw_only=True)  # that fails, where no check reports it
    equivalent: str = dataclasses.field(default="", kw_only=True)  # why nothing is wrong after all

    @property
    def name(self) -> str:
        return f"{self.method}: {self.wrong}"

    def mutated(self, root: Path = ROOT) -> str:
        """The text of the mutated file; raises `ValueError` where the old text is not in it exactly once."""
        text = (root / self.path).read_text(encoding="utf-8")
        found = text.count(self.old)
        if found != 1:
            raise ValueError(f"{self.name}: its text is in {self.path} {found} times, not once:\n{self.old}")
        return text.replace(self.old, self.new)


def models() -> dict[str, Callable[[], Any]]:
    """How each model is built, by name."""
    import transformers
    from support.tiny_models import VOCABULARY, bert, built, gpt2, llama, t5

    def gpt_neox() -> Any:
        """Decoder, whose queries, keys and values lie head by head in one matrix."""
        sizes = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
        given = {"vocab_size": VOCABULARY, "max_position_embeddings": 32, "initializer_range": 0.3, **sizes}
        return built(transformers.GPTNeoXConfig(**given), transformers.GPTNeoXForCausalLM)

    def bart() -> Any:
        """Encoder and decoder, whose masks say what is visible, and whose causal calls have none."""
        sizes = {"encoder_layers": 1, "decoder_layers": 2, "d_model": 16, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24}
        heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "decoder_start_token_id": 2}
        given = {"vocab_size": VOCABULARY, "max_position_embeddings": 32, "init_std": 0.3, **sizes, **heads}
        return built(transformers.BartConfig(**given), transformers.BartForConditionalGeneration)

    def mixtral() -> Any:
        """Decoder with a mixture of experts in every layer."""
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
        experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 1}
        given = {"vocab_size": VOCABULARY, "max_position_embeddings": 32, **sizes, **experts}
        return built(transformers.MixtralConfig(**given), transformers.MixtralForCausalLM)

    def deepseek() -> Any:
        """Decoder whose cache contains latents, from which keys and values are computed."""
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "kv_lora_rank": 8}
        heads = {"num_key_value_heads": 2, "q_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 8}
        given = {"vocab_size": VOCABULARY, "max_position_embeddings": 32, "first_k_dense_replace": 2, **sizes, **heads}
        return built(transformers.DeepseekV3Config(**given), transformers.DeepseekV3ForCausalLM)

    return {
        "gpt2": gpt2,
        "gpt2-4-layers": lambda: gpt2(n_layer=4),
        "gpt2-eager": lambda: gpt2(attn_implementation="eager"),  # whose masks are added to the scores
        "llama": llama,
        "llama-3-layers": lambda: llama(num_hidden_layers=3),
        "llama-4-layers": lambda: llama(num_hidden_layers=4),
        "t5": t5,
        "t5-gated": lambda: t5(feed_forward_proj="gated-gelu", num_layers=2),
        "t5-without-dropout": lambda: t5(num_layers=2, d_model=64, d_kv=32, d_ff=64, dropout_rate=0.0),
        "bert": bert,
        "gpt-neox": gpt_neox,
        "bart": bart,
        "mixtral": mixtral,
        "deepseek": deepseek,
    }
