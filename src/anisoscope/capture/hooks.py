"""Hooks: read sites of a model during a forward pass. Nothing else in the package registers hooks.

    with record(model, sites) as seen:
        model(input_ids=ids)
    seen["resid.3"]  # (b, t, d)

Its hooks only look. What goes wrong in one is kept and raised by ``record`` afterwards, so the forward pass of the
model is the same with and without them, and they are gone when the ``with`` ends, whatever happens inside. With
``keep_graph=True`` what was seen can enter a loss. ``steer`` is the one that changes what goes on from a site.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from anisoscope.errors import OptionError, SiteError, SiteSilentError, unknown_name
from anisoscope.models.sites import Site, site_by_path

KEYWORDS = ("hidden_states", "input", "x", "inputs_embeds", "query", "src")
"""Names under which models hand a hidden state to a module when they do not hand it over by position."""

CAUSES = (
    "the module is not used in this forward pass (another side, a fused path, a layer dropped in training), or the "
    "model was compiled before the hooks came: pass the model from before torch.compile"
)


@dataclass
class _Slot:
    """What the hooks of one site saw."""

    site: Site
    fired: int = 0
    tensor: Tensor | None = None
    version: int = 0
    lead: tuple[int, ...] | None = None
    problem: str | None = None


@dataclass
class Seen(Mapping[str, Tensor]):
    """What each site held, by name, as ``(b, t, d)``. Complete when the ``with`` of ``record`` has ended."""

    keep_graph: bool = False
    _slots: dict[str, _Slot] = field(default_factory=dict)

    def __getitem__(self, name: str | Site) -> Float[Tensor, "b t d"]:
        slot = self._slot(name)
        _check_fired(slot)
        return _arrange(self._stored(slot), slot)

    def __contains__(self, name: object) -> bool:  # asking for a name must not ask whether it fired
        return name in self._slots

    def __iter__(self) -> Iterator[str]:
        return iter(self._slots)

    def __len__(self) -> int:
        return len(self._slots)

    def gradients(self, loss: Tensor, *, retain_graph: bool = False) -> dict[str, Float[Tensor, "b t d"]]:
        """Gradient of ``loss`` with respect to what stood at each site. Parameters' ``.grad`` stay as they are."""
        if not self.keep_graph:
            raise OptionError("the sites were recorded without their graph; use record(model, sites, keep_graph=True)")
        stored = {name: self._stored(slot) for name, slot in self._slots.items()}
        for name, tensor in stored.items():
            if not tensor.requires_grad:
                raise SiteError(
                    f"site {name!r} carries no gradient: the forward ran under no_grad (so does re-entrant "
                    "gradient checkpointing), or no parameter before the site requires one"
                )
        try:
            grads = torch.autograd.grad(loss, list(stored.values()), retain_graph=retain_graph, allow_unused=True)
        except RuntimeError as error:
            if "use_reentrant" not in str(error):
                raise
            raise SiteError(
                "re-entrant gradient checkpointing hides what lies inside it; enable it with use_reentrant=False"
            ) from None
        for name, grad in zip(stored, grads, strict=True):
            if grad is None:
                raise SiteError(f"the loss does not depend on site {name!r}; take it out, or use another loss")
        return {name: _arrange(grad, self._slots[name]) for name, grad in zip(stored, grads, strict=True)}

    def check(self) -> None:
        """Raise unless every site fired as often as it should and gave a batch of hidden states."""
        for slot in self._slots.values():
            _check_fired(slot)
            _arrange(self._stored(slot), slot)

    def _slot(self, name: str | Site) -> _Slot:
        key = name.name if isinstance(name, Site) else name
        if key not in self._slots:
            raise unknown_name("recorded site", key, self._slots)
        return self._slots[key]

    def _stored(self, slot: _Slot) -> Tensor:
        tensor = slot.tensor
        if tensor is None:
            raise _silent(slot)
        if self.keep_graph and tensor._version != slot.version:
            raise SiteError(
                f"site {slot.site.name!r} was overwritten in place after {slot.site.module!r} had fired, so what is "
                "held is not what stood there; record without keep_graph, or read the input of the next module"
            )
        return tensor


@contextmanager
def record(model: nn.Module, sites: Sequence[Site], *, keep_graph: bool = False) -> Iterator[Seen]:
    """Read ``sites`` during ONE forward pass of ``model``, run inside the ``with``.

    Recorded tensors are detached copies, since models may overwrite theirs. With ``keep_graph=True`` they are the
    model's own tensors with their graph, for ``Seen.gradients``. A site that did not fire raises ``SiteSilentError``.
    """
    seen = Seen(keep_graph)
    handles: list[RemovableHandle] = []
    try:
        for site in sites:
            if site.name in seen:
                raise OptionError(f"site {site.name!r} is asked for twice; names must differ")
            seen._slots[site.name] = slot = _Slot(site)
            handles += _attach(model, slot, keep_graph)
        yield seen
        seen.check()
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def steer(model: nn.Module, sites: Sequence[Site], change: Callable[[str, Tensor], Tensor]) -> Iterator[None]:
    """Let ``change(name, tensor)`` take the place of what stands at each site, in ONE forward pass inside the ``with``.

    The tensor comes as the module holds it, its last axis the width, and must keep its shape. What ``change`` raises is
    raised in the forward pass. A site that did not fire raises ``SiteSilentError``; hooks are gone when the ``with``
    ends.
    """
    slots = [_Slot(site) for site in sites]
    handles: list[RemovableHandle] = []
    try:
        for slot in slots:
            handles.append(_attach_steering(model, slot, change))
        yield
        for slot in slots:
            _check_fired(slot)
    finally:
        for handle in handles:
            handle.remove()


def _attach_steering(model: nn.Module, slot: _Slot, change: Callable[[str, Tensor], Tensor]) -> RemovableHandle:
    site = slot.site
    site_by_path(model, site.module)  # names the nearest path where this model has no such module
    module = model.get_submodule(site.module)

    def on_input(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        whole = _first_input(args, kwargs)
        new = _changed(slot, whole, change)
        if new is whole:
            return None
        if args:
            return (new, *args[1:]), kwargs
        return args, {name: new if value is whole else value for name, value in kwargs.items()}

    def on_output(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        whole = _first_output(output)
        new = _changed(slot, whole, change)
        return None if new is whole else _with_first(output, new)

    if site.port == "input":
        return module.register_forward_pre_hook(on_input, with_kwargs=True)
    return module.register_forward_hook(on_output)


def _changed(slot: _Slot, value: Any, change: Callable[[str, Tensor], Tensor]) -> Any:
    """What goes on in place of ``value`` if this is the firing that is wanted."""
    _see(slot, value, True)
    if slot.tensor is None or slot.fired != slot.site.call + 1:
        return value
    slot.tensor = None  # nothing of the pass is kept
    new = change(slot.site.name, value)
    if new.shape != value.shape:
        raise SiteError(
            f"site {slot.site.name!r} was to be changed from shape {tuple(value.shape)} to {tuple(new.shape)}; keep it"
        )
    return new


def _with_first(output: Any, new: Tensor) -> Any:
    """An output whose hidden state is another one; the counterpart of ``_first_output``."""
    if isinstance(output, Mapping):
        made = type(output)(output)  # type: ignore[call-arg]
        made[next(iter(output))] = new  # type: ignore[index]
        return made
    if isinstance(output, tuple | list):
        parts = [_with_first(output[0], new), *output[1:]]
        return type(output)(*parts) if hasattr(output, "_fields") else type(output)(parts)
    return new


def _attach(model: nn.Module, slot: _Slot, keep_graph: bool) -> list[RemovableHandle]:
    """Register the hooks of one site."""
    site = slot.site
    site_by_path(model, site.module)  # names the nearest path where this model has no such module
    module = model.get_submodule(site.module)

    def on_input(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        _see(slot, _first_input(args, kwargs), keep_graph)

    def on_output(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        _see(slot, _first_output(output), keep_graph)

    def on_parent(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        whole = _first_input(args, kwargs)
        slot.lead = tuple(whole.shape[:-1]) if isinstance(whole, Tensor) else None

    handles = []
    if site.layout == "flat":  # the block around still knows sequences from tokens
        parent = model.get_submodule(site.module.rpartition(".")[0])
        handles.append(parent.register_forward_pre_hook(on_parent, with_kwargs=True))
    if site.port == "input":
        handles.append(module.register_forward_pre_hook(on_input, with_kwargs=True))
    else:
        handles.append(module.register_forward_hook(on_output))
    return handles


def _see(slot: _Slot, value: Any, keep_graph: bool) -> None:
    """Store what came if it is the firing that is wanted. Never raises: it runs inside the model's forward pass."""
    wanted = slot.fired == slot.site.call
    slot.fired += 1
    if not wanted:
        return
    if not isinstance(value, Tensor):
        slot.problem = f"gave {type(value).__name__}, not a tensor"
    elif value.layout != torch.strided or value.is_nested:
        slot.problem = "gave a sparse or nested tensor"
    elif not value.is_floating_point():
        slot.problem = f"gave {value.dtype}, not real numbers"
    elif keep_graph:
        slot.tensor = value
        slot.version = 0 if value.is_inference() else value._version
    else:
        slot.tensor = value.detach().clone()


def _first_input(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The hidden state that a module is called with: its first argument, or the one with a usual name."""
    if args:
        return args[0]
    for name in KEYWORDS:
        if name in kwargs:
            return kwargs[name]
    return next((value for value in kwargs.values() if isinstance(value, Tensor)), None)


def _first_output(output: Any) -> Any:
    """The hidden state that a module returns: its output, or the first part of it."""
    if isinstance(output, Mapping):
        return next(iter(output.values()), None)
    if isinstance(output, tuple | list) and not hasattr(output, "batch_sizes"):  # a packed sequence is a tuple too
        return _first_output(output[0]) if output else None
    return output


def _check_fired(slot: _Slot) -> None:
    site = slot.site
    if slot.fired != site.calls:
        raise _silent(slot)
    if slot.problem is not None:
        raise SiteError(
            f"site {site.name!r}: the {site.port} of module {site.module!r} {slot.problem}; "
            "choose a module or port that carries hidden states"
        )


def _silent(slot: _Slot) -> SiteSilentError:
    site = slot.site
    where = f"site {site.name!r} ({site.port} of module {site.module!r})"
    if slot.fired == 0:
        return SiteSilentError(f"{where} did not fire: {CAUSES}")
    return SiteSilentError(
        f"{where} fired {slot.fired} times where {site.calls} was expected: run one forward pass in each record; "
        "gradient checkpointing and chunked feed-forward fire a module more than once"
    )


def _arrange(tensor: Tensor, slot: _Slot) -> Float[Tensor, "b t d"]:
    """Bring what was seen into the order (b, t, d)."""
    site = slot.site
    if site.layout == "flat" and tensor.ndim == 2:
        lead = slot.lead
        if lead is None or len(lead) != 2 or lead[0] * lead[1] != len(tensor):
            raise SiteError(
                f"site {site.name!r} holds {len(tensor):,} rows, the module around it {lead}: padding was taken out, "
                "so rows cannot be told apart; use another attention implementation"
            )
        return tensor.reshape(*lead, tensor.shape[-1])
    if tensor.ndim != 3:
        raise SiteError(
            f"site {site.name!r}: the {site.port} of module {site.module!r} has shape {tuple(tensor.shape)}, "
            "not (b, t, d); if its rows are those of all sequences glued together, say layout='flat'"
        )
    return tensor.transpose(0, 1) if site.layout == "tbd" else tensor
