"""A model whose parameters, gradients and optimizer state are divided among the processes (torch's FSDP2).

Every process holds some of the rows of each parameter. Groups of modules are gathered while they compute, and freed again. The
groups follow from the anatomy: modules that several layers call, the layers, and the rest of the model. A parameter that is used
outside its group belongs to the enclosing one.

The state is written as one file a process and read by any number of processes, each reading its own rows. A file contains tensors
by name; of a divided tensor, the rows of its process, their offset, and the size of the whole. Reading maps the file, so that a
process reads only its part, and runs no code.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from retrofit.anatomy.inspection import inspect
from retrofit.errors import RetrofitError, TrainingError
from retrofit.inputs.model_memory import without_weights
from retrofit.surgery.row_tables import tables_of
from retrofit.training import processes
from retrofit.training.checkpoints import not_whole, read_entry

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

CONTAINERS = (nn.ModuleList, nn.ModuleDict)  # modules that are never called
WHOLE = "drop --fsdp"


def sharded_copy(model: nn.Module, device: torch.device, bf16: bool) -> nn.Module:
    """Return a copy of the model on the device, of which this process reads and holds only its part.

    With `bf16` groups are gathered and computed in bfloat16; stored values and sums of gradients keep their dtype. Raises
    `TrainingError` if a parameter cannot be divided.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    require_rows(model)
    mesh = processes.mesh(device.type)
    low, returned = (torch.bfloat16, torch.float32) if bf16 else (None, None)
    inside, outside = (MixedPrecisionPolicy(low, returned, output) for output in (None, returned))
    copied = without_weights(model)
    twins = dict(zip(model.modules(), copied.modules(), strict=True))
    tables = set(tables_of(copied))  # never gathered: a lookup reads the rows of all processes
    for group in shard_groups(model):
        fully_shard(twins[group], mesh=mesh, mp_policy=inside, ignored_params=tables)
    # An optimizer made after a forward has the parts.
    fully_shard(copied, mesh=mesh, mp_policy=outside, reshard_after_forward=True, ignored_params=tables)
    fill(copied, model, device, mesh)
    return copied


def fill(sharded: nn.Module, model: nn.Module, device: torch.device, mesh: DeviceMesh) -> None:
    """Copy the values of the model: of a parameter the rows of this process, everything else whole."""
    from torch.distributed.tensor import DTensor, Shard

    placed: dict[int, nn.Parameter] = {}
    empty = dict(sharded.named_parameters(remove_duplicate=False))
    for name, full in model.named_parameters(remove_duplicate=False):
        like = empty[name]
        if id(full) not in placed:
            rows = full.detach()[own_rows(full)].to(device, copy=True)
            placements = like.placements if isinstance(like, DTensor) else (Shard(0),)
            found = DTensor.from_local(rows, mesh, placements, run_check=False, shape=full.shape, stride=full.stride())
            placed[id(full)] = nn.Parameter(found, like.requires_grad)
    values = {name: placed[id(full)] for name, full in model.named_parameters(remove_duplicate=False)}
    sharded.load_state_dict(values, strict=False, assign=True)
    moved: dict[int, Tensor] = {}
    for copied, original in zip(sharded.modules(), model.modules(), strict=True):
        for target, source in ((copied._buffers, original._buffers), (vars(copied), vars(original))):
            for name, value in list(source.items()):
                if isinstance(value, Tensor):
                    target[name] = moved.setdefault(id(value), value.detach().to(device, copy=True))


def own_rows(value: Tensor) -> slice:
    """Return this process's rows of a tensor: as many as the first one has, as long as rows are left."""
    count = -(-value.shape[0] // processes.count())
    start = min(count * processes.number(), value.shape[0])
    return slice(start, min(start + count, value.shape[0]))


@torch.no_grad()
def collect(sharded: nn.Module, model: nn.Module) -> None:
    """Copy the values of a sharded copy into `model`, in the first process only."""
    targets = dict((*model.named_parameters(), *model.named_buffers()))
    for name, value in (*sharded.named_parameters(), *sharded.named_buffers()):
        full = value.full_tensor() if hasattr(value, "full_tensor") else value  # all processes send, parameter by parameter
        if processes.number() == 0:
            targets[name].copy_(full)
    processes.wait()


# Which modules are gathered together.


def shard_groups(model: nn.Module) -> list[nn.Module]:
    """Return the groups, inner before outer ones, without the model itself."""
    layers = layer_modules(model)
    candidates = [*called_by_several(layers), *layers]
    owners: dict[nn.Parameter, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, []).append(module)
    found: list[nn.Module] = []
    taken: set[nn.Parameter] = set()
    for candidate in candidates:
        inside = set(candidate.modules())
        own = [parameter for parameter in candidate.parameters() if parameter not in taken]
        if own and candidate is not model and all(set(owners[parameter]) <= inside for parameter in own):
            found.append(candidate)
            taken |= set(own)
    return found


def require_rows(model: nn.Module) -> None:
    """Raise `TrainingError` if a parameter has no rows to divide."""
    for name, parameter in model.named_parameters():
        if not parameter.dim():
            raise TrainingError(
                f"--fsdp: the parameter {name} cannot be divided",
                why="it is a single number",
                remedy=WHOLE,
                option="fsdp",
                site=name,
                code="does-not-divide",
            )


def require_one_dtype_a_group(model: nn.Module) -> None:
    """Raise `TrainingError` unless the trained parameters of each group, which is gathered as one, have one dtype."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    if len({parameter.dtype for parameter in names if parameter.requires_grad}) < 2:
        return
    taken: set[nn.Parameter] = set()
    for group in (*shard_groups(model), model):
        own = [parameter for parameter in group.parameters() if parameter not in taken]
        taken |= set(own)
        first_names = {parameter.dtype: names[parameter] for parameter in reversed(own) if parameter.requires_grad}
        if len(first_names) > 1:
            raise TrainingError(
                "--fsdp: parameters of one shard group have several dtypes",
                why=", ".join(f"{name} is in {str(dtype).removeprefix('torch.')}" for dtype, name in first_names.items()),
                remedy=f"cast all weights to float32 (--float32, model.float()), or {WHOLE}",
                code="dtypes",
                option="fsdp",
            )


def layer_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules that hold one layer of a stack each, including wrappers around it; none if there is no anatomy."""
    try:
        stacks = inspect(model).stacks
    except RetrofitError:
        return []
    named = dict(model.named_modules())
    names = list(dict.fromkeys(layer.name for stack in stacks for layer in stack.layers if layer.name in named and layer.name))
    found = [outermost(name, names, named) for name in names]
    return [module for module in dict.fromkeys(found) if module is not model and not isinstance(module, CONTAINERS)]


def outermost(name: str, layers: list[str], named: dict[str, nn.Module]) -> nn.Module:
    """Return the largest module around a layer that holds no other layer."""
    while True:
        parent = name.rpartition(".")[0]
        others = sum(layer == parent or layer.startswith(f"{parent}.") for layer in layers)
        if not parent or others > 1 or isinstance(named[parent], CONTAINERS):
            return named[name]
        name = parent


def called_by_several(layers: list[nn.Module]) -> list[nn.Module]:
    """Return the modules with parameters that are part of several layers; none of them is inside another."""
    places: dict[nn.Module, set[int]] = {}
    for number, layer in enumerate(layers):
        for module in layer.modules():
            places.setdefault(module, set()).add(number)
    shared = {module for module, numbers in places.items() if len(numbers) > 1}

    def outer(module: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():
            if child in shared and next(child.parameters(), None) is not None and not isinstance(child, CONTAINERS):
                yield child
            else:
                yield from outer(child)

    return list(dict.fromkeys(found for layer in layers for found in outer(layer)))


NAME = re.compile(r"-(\d{5})-of-(\d{5})\.pt$")
PART, START, SIZE = "part", "start", "size"


def write_parts(folder: Path, kind: str, state: Mapping[str, Any]) -> None:
    """Write this process's part of the state to its file of that kind."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = {name: own_part(value) if hasattr(value, "dim") else value for name, value in state.items()}
    torch.save(parts, folder / f"{kind}-{processes.number():05d}-of-{processes.count():05d}.pt")


def own_part(value: Tensor) -> dict[str, Any]:
    """Return this process's rows of a tensor: all of them if it is not divided."""
    local = local_rows(value).detach()
    return {PART: local.cpu().clone(), START: first_row(value), SIZE: list(value.shape)}


def local_rows(value: Tensor) -> Tensor:
    return value.to_local() if hasattr(value, "to_local") else value


def first_row(value: Tensor) -> int:
    """Return the index of this process's first row."""
    return own_rows(value).start if hasattr(value, "to_local") and value.dim() else 0


def read_parts(folder: Path, kind: str) -> list[Mapping[str, Any]]:
    """Return the files of that kind, mapped; raises `TrainingError` if one of them is missing or damaged."""
    files = sorted(file for file in folder.glob(f"{kind}-*.pt") if NAME.search(file.name))
    count = {int(match.group(2)) for file in files if (match := NAME.search(file.name))}
    if len(count) != 1 or len(files) != count.pop():
        raise not_whole(folder, f"some of the files {kind}-….pt are missing")
    return [read_entry(file) for file in files]


@torch.no_grad()
def fill_from_parts(value: Tensor, name: str, parts: list[Mapping[str, Any]], folder: Path) -> None:
    """Copy this process's rows of `value` from the files; raises `TrainingError` if rows are missing."""
    local, start = local_rows(value), first_row(value)
    for part in parts:
        require_entry(part.get(name), name, value, folder)
    if not value.dim():
        local.copy_(parts[0][name][PART])
        return
    end, filled = start + len(local), 0
    for part in parts:
        entry = part[name]
        first, rows = entry[START], entry[PART]
        low, high = max(start, first), min(end, first + len(rows))
        if low <= start + filled < high:
            local[low - start : high - start] = rows[low - first : high - first].to(local.device)
            filled = high - start
    if filled < len(local):
        raise not_whole(folder, f"rows of {name} are missing")


def require_entry(entry: Any, name: str, value: Tensor, folder: Path) -> None:
    """Raise `TrainingError` unless the entry holds rows of a tensor of the size of `value`."""
    size = list(value.shape)
    if not isinstance(entry, Mapping) or entry.get(SIZE) != size:
        held = entry.get(SIZE) if isinstance(entry, Mapping) else "nothing"
        raise not_whole(folder, f"{name} is {size}, and the files hold {held}")
    rows, start = entry.get(PART), entry.get(START)
    if not (isinstance(rows, Tensor) and type(start) is int and start >= 0 and rows.dim() == len(size)):
        raise not_whole(folder, f"{name} has no rows there, or no number of the first")
    if list(rows.shape[1:]) != size[1:] or (size and start + len(rows) > size[0]):
        raise not_whole(folder, f"the rows of {name} are not such of a tensor of {size}")
