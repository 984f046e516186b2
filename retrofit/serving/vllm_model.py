"""The class by which vLLM builds a rewritten model: the rewritten skeleton in vLLM's Transformers backend.

vLLM's backend builds a base model from a config, replaces its attentions by vLLM's, and has its own head. Here it gets the
rewritten base, of any width, and the head is the model's own code: the generating model, with its base replaced by the base's
output. So rewritten embeddings and heads, scales and caps are the same as in transformers.

The layers' states of earlier tokens are in a table (`slot_tables`), which is a layer without heads in vLLM's own cache: vLLM sizes
and allocates it with the keys and values. The width of a row is determined in the model's first run, before vLLM needs it.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModel, PreTrainedConfig
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_gather,
    tensor_model_parallel_all_reduce,
)
from vllm.forward_context import get_forward_context, is_forward_context_available, set_forward_context
from vllm.lora.layers.utils import LoRAMapping
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.models.interfaces_base import VllmModelForTextGeneration
from vllm.model_executor.models.transformers import vllm_attention_forward
from vllm.model_executor.models.transformers.base import Base
from vllm.model_executor.models.transformers.fusers.attention import VLLM_ATTN_IMPL, interface_call
from vllm.model_executor.models.transformers.utils import can_enable_torch_compile, init_on_device_without_buffers
from vllm.v1.attention.backend import AttentionBackend, AttentionMetadataBuilder
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec

from retrofit.anatomy.feed_forwards import FeedForwardBlock, TensorShare
from retrofit.errors import CheckpointError, DoesNotFitError, first_few, first_line
from retrofit.serving import CLASSES, RECIPE
from retrofit.serving.slot_tables import Places, RowLayout, SlotCache
from retrofit.storage.filling import transformers_class
from retrofit.surgery.row_tables import RowTables
from retrofit.surgery.transformers_bookkeeping import shared_names
from retrofit.surgery.wrappers import Wrapper

logger = logging.getLogger(__name__)

# ── The table of states ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class KeptMetadata(AttentionMetadataBuilder[Any]):
    """The metadata of a batch, as vLLM has it for all its layers."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        return common_attn_metadata


class TableBackend(AttentionBackend):
    """The backend of a table, without attention."""

    @staticmethod
    def get_name() -> str:
        return "RETROFIT_SLOTS"

    @staticmethod
    def get_impl_cls() -> Any:
        raise NotImplementedError("a table of states does not attend")

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder[Any]]:
        return KeptMetadata

    @classmethod
    def supports_kv_connector(cls) -> bool:
        return False


class SlotTable(AttentionLayerBase):
    """A row for each slot of vLLM's cache. `run_once` runs the model, which determines the `layout` of a row."""

    supports_dcp = False

    def __init__(self, name: str, layout: RowLayout, run_once: Callable[[], None]) -> None:
        self.name, self.layout, self.run_once = name, layout, run_once
        self.kv_cache: Tensor = torch.empty(0)

    def get_attn_backend(self) -> type[AttentionBackend]:
        return TableBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec | None:
        """Return the size of the table; None if no layer stores a state."""
        if not self.layout.is_final:
            self.run_once()
            self.layout.is_final = True
        if not self.layout.width:
            return None
        size = vllm_config.cache_config.block_size
        return FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=self.layout.width, head_size_v=0, dtype=torch.uint8)

    @property
    def is_used(self) -> bool:
        """Return whether a layer stores a state; True until the model has run once."""
        return bool(self.layout.width) or not self.layout.is_final

    def places(self, positions: Tensor) -> Places | None:
        """Return the places of the current batch's tokens; None before there is a table."""
        metadata = getattr(get_forward_context() if is_forward_context_available() else None, "attn_metadata", None)
        batch = metadata.get(self.name) if isinstance(metadata, dict) and self.kv_cache.numel() else None
        if batch is None:
            return None
        starts, blocks = batch.query_start_loc[: batch.num_reqs + 1], batch.block_table_tensor
        return Places(self.kv_cache, positions, batch.slot_mapping, starts, blocks)


# ── Attention ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────────

ATTENTION = "retrofit_vllm"  # the name in transformers' attention interface


def attention_by_heads(module: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **keywords: Any) -> tuple[Tensor, None]:
    """Attend by vLLM, (batch, heads, tokens, width) each; return (batch, tokens, heads, width), as models expect.

    Where its projections are not divided among processes, each process attends with its heads of all.
    """
    heads = module.attn.num_heads
    if is_whole := query.shape[1] > heads:
        query = own_heads(query, heads)
        key, value = (own_heads(x, module.attn.num_kv_heads) for x in (key, value))
    found, _ = vllm_attention_forward(module, query, key, value, *rest, **keywords)
    found = found.view(query.shape[0], query.shape[2], heads, -1)
    return tensor_model_parallel_all_gather(found, 2) if is_whole else found, None


def own_heads(x: Tensor, count: int) -> Tensor:
    """Return this process's heads of all: (batch, heads, tokens, width) to (batch, count, tokens, width)."""
    return x.narrow(1, get_tensor_model_parallel_rank() * x.shape[1] // get_tensor_model_parallel_world_size(), count)


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attention_by_heads)


# ── The skeleton ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────


class SkeletonConfig(PreTrainedConfig):
    """Identifies a model that is already built to transformers' AutoModel, by which vLLM builds its models."""

    model_type = "retrofit-skeleton"


class Skeleton:
    """The class that AutoModel returns for a `SkeletonConfig`."""

    @classmethod
    def _from_config(cls, config: Any, **keywords: Any) -> Any:
        return config.model


AutoModel.register(SkeletonConfig, Skeleton, exist_ok=True)  # type: ignore[arg-type]


@dataclasses.dataclass
class OnlyStates(BaseModelOutputWithPast):
    """The output of a base model in which everything except the last states is None, whatever a head reads."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class ReturnedStates(nn.Module):
    """Replaces a base model, and any module in it: returns the states that it is called with."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.replaced = frozenset(name for module in base.modules() for name, _ in module.named_children())

    def forward(self, *arguments: Any, inputs_embeds: Tensor, **keywords: Any) -> OnlyStates:
        return OnlyStates(last_hidden_state=inputs_embeds)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return self if name in self.__dict__.get("replaced", ()) else super().__getattr__(name)


def built_skeleton(config: Any) -> Any:
    """Return the rewritten model for a config that vLLM read, without weights.

    Raises `DoesNotFitError` unless it is a decoder that generates text.
    """
    entry = getattr(config, RECIPE)
    classes = getattr(config, CLASSES) or [entry.get("architecture")]
    own = copy.deepcopy(config)
    for name in (RECIPE, CLASSES):
        delattr(own, name)
    own.architectures, own.quantization_config = classes, copy.deepcopy(entry)
    kind = transformers_class(str(classes[0]))
    model: Any = None if kind is None or config.is_encoder_decoder else kind._from_config(own)
    if model is None or model.base_model is model or model.get_output_embeddings() is None:
        raise DoesNotFitError(
            f"{classes[0]} does not run in vLLM with a recipe",
            why="only rewritten decoders that generate text do",
            remedy="serve it with transformers, or in ONNX Runtime",
            code="not-served",
        )
    return model.eval()


class HeadLinear(nn.Linear):
    """A linear layer of a head, computed as vLLM computes its own heads: on a CPU from a packed copy of the weight."""

    quant_method: UnquantizedEmbeddingMethod

    def forward(self, x: Tensor) -> Tensor:
        return self.quant_method.apply(self, x, self.bias)


def pack_head(head: nn.Module) -> None:
    """Make vLLM compute the linear layers of a head; their weights stay as they are, to be read or tied."""
    for module in head.modules():
        if type(module) is nn.Linear:
            module.__class__ = HeadLinear
            module.quant_method = UnquantizedEmbeddingMethod()  # type: ignore[assignment]


# ── Several processes ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
#
# vLLM divides the linear layers of transformers' own modules, by its fusions and the dense model's plan. Here hidden units, rows of
# tables and linear layers behind an element-wise mask are divided. What is left is the same in all processes.

WIDTHS = {"colwise": (0, "out_features"), "rowwise": (1, "in_features")}  # styles of a plan: what they divide of a linear layer


class SummedUnits(FeedForwardBlock):
    """A feed-forward of which each process has some hidden units."""

    def compute(self, x: Tensor) -> Tensor:
        return tensor_model_parallel_all_reduce(super().compute(x))


class SummedLinear(nn.Linear):
    """A linear layer of which each process has the columns for some inputs."""

    def forward(self, x: Tensor) -> Tensor:
        y = tensor_model_parallel_all_reduce(F.linear(x, self.weight))
        return y if self.bias is None else y + self.bias


class RowsOfAll:
    """Looks up rows in a table of which this process has those from `first` on."""

    def __init__(self, module: RowTables, first: int) -> None:
        self.read, self.first = module.plain_rows, first

    def __call__(self, table: Tensor, i: Tensor) -> Tensor:
        own = i - self.first
        rows = self.read(table, own.clamp(0, len(table) - 1))
        held = ((own >= 0) & (own < len(table))).view(*i.shape, *[1] * (rows.dim() - i.dim()))
        return tensor_model_parallel_all_reduce(rows.masked_fill(~held, 0))


class Division:
    """Keeps one process's part of a model; the parts of all processes compute the model.

    `shares` has what it keeps of tensors; `plan` the styles by which vLLM divides linear layers, by path; `own` the linear layers
    that vLLM must leave as they are.
    """

    def __init__(self, base: Any, part: int, parts: int, head_size: int) -> None:
        self.base, self.part, self.parts, self.head_size = base, part, parts, head_size
        self.dense_plan: dict[str, str] = base.tp_plan
        self.plan: dict[str, str] = {}
        self.shares, self.own = list[TensorShare](), list[nn.Linear]()
        around: dict[nn.Module, bool | None] = {}  # modules in a wrapper: its `is_by_entry`
        for path, module in list(base.named_modules()):
            if isinstance(module, Wrapper):
                around[module.layer] = around.get(module) if module.is_by_entry is None else module.is_by_entry
            if isinstance(module, FeedForwardBlock):
                self.divide_units(module, around.get(module) is not False)
            elif isinstance(module, RowTables):
                self.divide_tables(module)
            elif is_stock(module):
                self.divide_linears(path, module)

    def divide_units(self, block: FeedForwardBlock, is_free: bool) -> None:
        """Divide the hidden units of a feed-forward."""
        shares = block.keep_share(self.part, self.parts) if is_free and block.keep_share is not None else None
        if shares is not None:
            self.shares += shares
            block.__class__ = type(type(block).__name__, (SummedUnits, type(block)), {"__module__": type(block).__module__})

    def divide_tables(self, module: RowTables) -> None:
        """Divide the tables that are looked up by ids by their rows."""
        for name in module.tables():
            each = -(-len(module.get_parameter(name)) // self.parts)
            self.keep(TensorShare(module, name, self.part, 0, slice(self.part * each, (self.part + 1) * each)))
            module.reader = RowsOfAll(module, self.part * each)  # type: ignore[misc]

    def divide_linears(self, path: str, module: nn.Module) -> None:
        """Divide the linear layers of one of transformers' modules by the dense model's plan; none where one cannot be."""
        children: dict[str, Any] = dict(module.named_children())
        styles = {name: self.style(path, name) for name in children}
        names = [name for name, child in children.items() if isinstance(child, (nn.Linear, Wrapper)) or styles[name] in WIDTHS]
        plain = [children[name] for name in names if isinstance(children[name], nn.Linear)]
        if len(plain) == len(names):
            self.plan |= {re.escape(f"{path}.{name}") + "$": styles[name] for name in names if styles[name]}
            return
        linears = {name: masked_linear(children[name]) for name in names}
        size = self.head_size if interface_call(type(module).forward) is not None else 1
        if WIDTHS.keys() <= {styles[name] for name in names} and all(
            linear is not None and styles[name] in WIDTHS and getattr(linear, WIDTHS[styles[name]][1]) % (self.parts * size) == 0
            for name, linear in linears.items()
        ):
            for name, linear in linears.items():
                self.divide_linear(linear, styles[name])
        self.own += plain

    def style(self, path: str, name: str) -> str:
        """Return how the dense model's plan divides a module, in whose path there were no wrappers; "" if not at all."""
        module, steps = self.base, list[str]()
        for step in f"{path}.{name}".strip(".").split("."):
            if not (isinstance(module, Wrapper) and step == "layer"):
                steps.append(step)
            module = module.get_submodule(step)
        return next((style for pattern, style in self.dense_plan.items() if re.match(pattern, ".".join(steps))), "")

    def divide_linear(self, linear: Any, style: str) -> None:
        dim, width = WIDTHS[style]
        each = getattr(linear, width) // self.parts
        for name, value in list(linear.named_parameters()):
            if dim < value.dim():
                self.keep(TensorShare(linear, name, self.part, dim, slice(self.part * each, (self.part + 1) * each)))
        setattr(linear, width, each)
        if style == "rowwise":
            linear.__class__ = SummedLinear

    def keep(self, share: TensorShare) -> None:
        share.install()
        self.shares.append(share)

    def set_loaders(self) -> None:
        """Make vLLM load what this process keeps of each tensor in a file."""
        for share in self.shares:
            getattr(share.module, share.name).weight_loader = functools.partial(load_share, share)


def load_share(share: TensorShare, kept: Tensor, whole: Tensor) -> None:
    kept.data.copy_(share.of(whole))


def masked_linear(module: nn.Module) -> nn.Linear | None:
    """Return a linear layer, or the one in a wrapper that changes what it reads entry by entry."""
    while isinstance(module, Wrapper) and module.is_by_entry:
        module = module.layer
    return module if type(module) is nn.Linear else None


class KeptLinear(nn.Module):
    """A linear layer while vLLM builds the model: vLLM neither fuses nor replaces it."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


def keep_from_fusions(model: nn.Module, own: Iterable[nn.Linear], packs: bool) -> list[tuple[nn.Module, type[nn.Module]]]:
    """Keep vLLM from replacing linear layers whose weights a pass may read or that are `own`, and from fusing wrapped ones.

    Return these layers and their classes, to be restored after vLLM has built the model: on a CPU vLLM's own layers lose their
    weights. vLLM fuses by the class of the module that calls the projections, and the names of its children: each module of
    transformers with children that are neither transformers' nor torch's gets a class of its own. If vLLM `packs` weights, it gets
    layers whose wrapper reads the weight only to be faster: packed ones are, for several tokens.
    """
    kept: list[tuple[nn.Module, type[nn.Module]]] = []

    def keep(linear: nn.Module) -> None:
        if isinstance(linear, nn.Linear):
            kept.append((linear, type(linear)))
            linear.__class__ = KeptLinear  # type: ignore[assignment]

    for linear in own:
        keep(linear)
    for module in list(model.modules()):
        parts: Iterable[nn.Module] = () if is_stock(module) else held_modules(module)
        if isinstance(module, Wrapper) and (module.opens_layer or (packs and type(module).arrange is not Wrapper.arrange)):
            parts = module.layer.modules() if module.opens_layer else ()
        for part in parts:
            keep(part)
        kind = type(module)
        if is_stock(module) and not all(map(is_stock, module.children())):
            module.__class__ = type(kind.__name__, (kind,), {"__module__": kind.__module__})
    return kept


def held_modules(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the children of a module, and those in containers that it has."""
    for child in module.children():
        yield child
        if isinstance(child, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            yield from held_modules(child)


def is_stock(module: nn.Module) -> bool:
    """Return whether a module's class is from transformers or torch."""
    return type(module).__module__.partition(".")[0] in ("transformers", "torch")


def persistent_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and persistent buffers, under every name."""
    yield from module.named_parameters(remove_duplicate=False)
    for path, part in module.named_modules(remove_duplicate=False):
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                yield f"{path}.{name}".strip("."), buffer


@support_torch_compile(dynamic_arg_dims={"input_ids": 0, "positions": -1, "inputs_embeds": 0}, enable_if=can_enable_torch_compile)
class Body(nn.Module):
    """The part of a model that vLLM compiles, unless layers store states: all except the head, with the hooks of its modules."""

    def __init__(self, model: RetrofittedForCausalLM, *, vllm_config: VllmConfig) -> None:
        super().__init__()
        self.__dict__["model"] = model

    @property
    def is_compiled(self) -> bool:
        return self.__dict__.get("compiled", False) or self.__dict__.get("aot_compiled_fn") is not None

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
        **keywords: Any,
    ) -> Any:
        return self.__dict__["model"].last_states(input_ids, positions, intermediate_tensors, inputs_embeds, **keywords)


class RetrofittedForCausalLM(VllmModelForTextGeneration, Base):
    """A rewritten decoder in vLLM."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        parallel = vllm_config.parallel_config
        if max(parallel.pipeline_parallel_size, parallel.decode_context_parallel_size) > 1:
            raise DoesNotFitError(
                "the layers of a rewritten model run in vLLM on the same devices",
                why="what a recipe adds reads values of other layers, and tables of states are not divided by tokens",
                remedy="use tensor parallelism: tensor_parallel_size=N",
                code="not-served",
            )
        with init_on_device_without_buffers("meta"):  # type: ignore[arg-type]
            whole = built_skeleton(vllm_config.model_config.hf_config)
        whole.config._attn_implementation = VLLM_ATTN_IMPL
        base, own = whole.base_model, whole.base_model_prefix
        ties = [
            [served_name(name, own) for name in names] for names in shared_names(whole.named_parameters(remove_duplicate=False))
        ]
        division = None
        if (parts := parallel.tensor_parallel_size) > 1:
            division = Division(base, get_tensor_model_parallel_rank(), parts, vllm_config.model_config.get_head_size())
        packs = vllm_config.device_config.device_type == "cpu" and division is None
        kept = keep_from_fusions(base, () if division is None else division.own, packs)
        kind = type(base)  # another model of this class may be compiled, and vLLM then calls the class without its hooks
        base.__class__ = type(kind.__name__, (kind,), {"__module__": kind.__module__, "__call__": nn.Module.__call__})
        if division is not None:
            base._tp_plan = division.plan
        self.__dict__["known"] = {name for name, _ in persistent_tensors(whole)}
        self.__dict__["ignored"] = tuple(base._keys_to_ignore_on_load_unexpected or ())
        base._keys_to_ignore_on_load_unexpected = None  # a pattern that matches a name of the model's own would drop it
        self.__dict__["skeleton"] = base
        super(VllmModelForTextGeneration, self).__init__(vllm_config=vllm_config, prefix=prefix)
        del self.__dict__["skeleton"]
        for layer, kind in kept:
            layer.__class__ = kind
        whole.config._attn_implementation = ATTENTION  # vLLM checks its own only while it builds
        setattr(whole, own, ReturnedStates(base))
        self.head = whole
        pack_head(whole)
        self.init_parameters(self.head)
        self.ties = self.tie(ties)
        self.fill_buffers()
        if division is not None:
            division.set_loaders()
        attentions = [(path, part) for path, part in self.named_modules() if isinstance(part, AttentionLayerBase)]
        self.given = {f"{path}.{name}" for path, part in attentions for name, _ in persistent_tensors(part)}
        self.states = SlotCache(RowLayout())
        self.table = SlotTable(f"slots.{self.text_config.num_hidden_layers}", self.states.layout, self.run_once)
        vllm_config.compilation_config.static_forward_context[self.table.name] = self.table
        self.__dict__["body"] = Body(self, vllm_config=vllm_config)

    @property
    def _from_config_kwargs(self) -> dict[str, Any]:  # type: ignore[override]
        config = SkeletonConfig()
        config.__dict__["model"] = self.__dict__["skeleton"]
        return {"config": config}

    def _decorate_for_torch_compile(self) -> None:
        """Leave the model's class unchanged: vLLM compiles `Body`."""

    def _vocab_embeddings(self) -> set[nn.Embedding]:
        return set()  # tables stay as they are: the head may read them

    def tie(self, groups: Iterable[Iterable[str]]) -> list[list[str]]:
        """Tie the parameters in each group of names; return the groups without the names that vLLM's fusions took."""
        named = dict(self.named_parameters(remove_duplicate=False))
        found = [[name for name in names if name in named] for names in groups]
        for first, *others in filter(None, found):
            for name in others:
                owner, _, leaf = name.rpartition(".")
                setattr(self.get_submodule(owner), leaf, named[first])
        return found

    def fill_buffers(self) -> None:
        """Move every buffer to the device; persistent ones are empty until they are loaded."""
        device = self.device_config.device
        for module in self.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = torch.empty_like(buffer, device=device) if buffer.is_meta else buffer.to(device)

    def run_once(self) -> None:
        """Run the model on two tokens, in which its layers declare the states that they store."""
        tokens = torch.zeros(2, dtype=torch.long, device=self.device_config.device)
        if (adapters := getattr(self, "lora_manager", None)) is not None:
            adapters.set_adapter_mapping(LoRAMapping((0, 0), (0, 0), is_prefill=True))  # none
        with set_forward_context(None, self.vllm_config, num_tokens=2, skip_compiled=True), torch.inference_mode():
            self(tokens, torch.arange(2, device=tokens.device))

    def forward(self, input_ids: Tensor | None, positions: Tensor, *arguments: Any, **keywords: Any) -> Any:
        self.states.begin(positions, self.table.places(positions))
        if self.table.is_used:
            return self.last_states(input_ids, positions, *arguments, past_key_values=self.states, **keywords)
        body = self.__dict__["body"]
        try:
            return body(input_ids, positions, *arguments, **keywords)
        except Exception as error:
            if body.do_not_compile or body.is_compiled:
                raise
            logger.warning("%s does not compile, and runs uncompiled: %s", type(self.model).__name__, first_line(error))
            body.do_not_compile = True
            return body(input_ids, positions, *arguments, **keywords)

    def last_states(self, *arguments: Any, **keywords: Any) -> Any:
        """Return the states that the head reads, computed without compiling."""
        return super().forward(*arguments, **keywords)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        logits: Tensor = self.head.forward(inputs_embeds=hidden_states.unsqueeze(0), use_cache=False).logits  # without its guards
        return logits.squeeze(0)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load the model from the tensors of its files; return the loaded names. Raises `CheckpointError` if any is missing."""
        outside = dict(persistent_tensors(self.head))
        loaded = set[str]()

        def inside() -> Iterator[tuple[str, Tensor]]:
            for name, value in weights:
                if name in outside:
                    outside[name].data.copy_(value)
                    loaded.add(f"head.{name}")
                elif name in self.known or not any(re.search(pattern, name) for pattern in self.ignored):
                    yield name, value

        loaded |= super().load_weights(inside())
        loaded |= {name for names in self.ties if loaded & set(names) for name in names}
        missing = sorted({name for name, _ in persistent_tensors(self)} - loaded - self.given)
        if missing:
            raise CheckpointError(
                f"{len(missing)} tensors of the rewritten model are in none of its files",
                why=f"the recipe makes {first_few(missing)}",
                remedy="load the directory with transformers: its error says more",
                code="missing",
            )
        for module in self.modules():
            if module._non_persistent_buffers_set and hasattr(module, "rebuild_buffers"):
                module.rebuild_buffers()
            if isinstance(module, Wrapper):
                module.arrange()
        return loaded


def served_name(name: str, own: str) -> str:
    """Return the name in vLLM of the tensor `name` in the model of transformers, whose base is `own`."""
    inner = name.removeprefix(f"{own}.")
    return f"head.{name}" if inner == name else f"model.{inner}"
