"""One state out of the states of many processes. The only module that touches torch.distributed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from anisoscope.errors import OptionError
from anisoscope.stats.reservoir import Reservoir

S = TypeVar("S")  # a mergeable state: a frozen dataclass of tensors, Python scalars and tuples of these
L = TypeVar("L")


@dataclass(frozen=True)
class _Slot:
    """Where a tensor goes when a state is put together again."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class _Header:
    """A state without the contents of its tensors: small enough to be sent as an object."""

    kind: type
    values: tuple[Any, ...]


def merge_across_ranks(state: S, group: dist.ProcessGroup | None = None) -> S:
    """The merge of all ranks' states in the order of ranks, the same bits on every rank; every rank must call it.

    Without an initialised process group, or with one process, it is the state itself. Ranks take turns, so besides
    its own state a process holds one other at a time and, on the first rank, what was merged so far. Only the first
    rank adds up, and all get its result: the same additions on two kinds of machine need not give the same bits.
    An error there, such as states that do not fit together, is raised on every rank, so that none waits for ever.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return state
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise OptionError("this process is not a member of group=; call merge_across_ranks on its members only")
    if world == 1:
        return state
    total: Any = state
    for turn in range(1, world):
        came = _from_rank(turn, state, state, group)
        if rank == 0 and not isinstance(total, Exception):
            total = _merged(total, came)
    merged: S = _from_rank(0, total, state, group)
    return merged


def _merged(total: Any, came: Any) -> Any:
    """The merge, or the error that it raised: the other ranks still have to take their turns."""
    if type(total) is not type(came):
        return OptionError(f"ranks hold different states: {type(total).__name__} and {type(came).__name__}")
    try:
        return total.merge(came)
    except Exception as error:  # whatever it is, every rank has to hear of it
        return error


def _from_rank(turn: int, mine: Any, like: Any, group: dist.ProcessGroup | None) -> Any:
    """On every rank what rank ``turn`` gave as ``mine``, its tensors on the devices of ``like``; errors are raised."""
    source = turn if group is None else dist.get_global_rank(group, turn)
    # NCCL moves device memory only; every other backend takes CPU tensors.
    nccl = dist.get_backend(group) == "nccl"
    wire = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
    sending = dist.get_rank(group) == turn
    header, tensors = _take_apart(mine) if sending else (None, [])
    envelope: list[Any] = [header]
    dist.broadcast_object_list(envelope, src=source, group=group, device=wire)
    header = envelope[0]
    if isinstance(header, Exception):
        raise header
    if not sending:
        tensors = [torch.empty(slot.shape, dtype=slot.dtype, device=wire) for slot in _leaves(header.values, _Slot)]
    tensors = [_broadcast(tensor, wire, source, group) for tensor in tensors]
    if sending:
        return mine
    devices = [tensor.device for tensor in _take_apart(like)[1]]
    if len(devices) == len(tensors):
        tensors = [tensor.to(device) for tensor, device in zip(tensors, devices, strict=True)]
    return header.kind(*_filled(header.values, iter(tensors)))


def _broadcast(tensor: Tensor, wire: torch.device, source: int, group: dist.ProcessGroup | None) -> Tensor:
    """The source's tensor on every rank. As bytes: backends differ in the dtypes they know."""
    tensor = tensor.detach().to(wire).contiguous()
    if tensor.numel():
        dist.broadcast(tensor.reshape(-1).view(torch.uint8), src=source, group=group)
    return tensor


def _take_apart(state: Any) -> tuple[_Header | Exception, list[Tensor]]:
    """The header of a state and its tensors in order; an error is its own header."""
    if isinstance(state, Exception):
        return state, []
    if not is_dataclass(state) or isinstance(state, type):
        return OptionError(f"merge_across_ranks takes a state (a dataclass), got {type(state).__name__}"), []
    if isinstance(state, Reservoir):
        state = state.compact()  # rows that left the sample need not travel
    values = tuple(getattr(state, field.name) for field in fields(state))
    return _Header(type(state), _emptied(values)), _leaves(values, Tensor)


def _leaves(value: Any, kind: type[L]) -> list[L]:
    """Everything of this kind inside nested tuples, in order."""
    if isinstance(value, tuple):
        return [leaf for part in value for leaf in _leaves(part, kind)]
    return [value] if isinstance(value, kind) else []


def _emptied(value: Any) -> Any:
    """Nested tuples with a slot in place of each tensor."""
    if isinstance(value, tuple):
        return tuple(_emptied(part) for part in value)
    return _Slot(tuple(value.shape), value.dtype) if isinstance(value, Tensor) else value


def _filled(value: Any, tensors: Iterator[Tensor]) -> Any:
    """Nested tuples with the tensors back in their slots."""
    if isinstance(value, tuple):
        return tuple(_filled(part, tensors) for part in value)
    return next(tensors) if isinstance(value, _Slot) else value
