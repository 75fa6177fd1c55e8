"""Ride: rows of activations and of their gradients from a training step's own forward and backward pass.

    ride = Ride(model, sites, vectors=4096, seed=0)   # hooks are on from here
    loss = model(...).loss; loss.backward()           # as often as the step accumulates
    taken = ride.end()                                # hooks are off; a Taken, or an error that names the cause

Hooks only look: they copy a sample of rows when a site fires and the same rows of the gradient when it comes back.
What goes wrong in one is kept and told by ``end``. Which rows are taken is a pure function of the seed and of the row's
number in the step, so no random number of the run is drawn, and the same tokens are taken at every site.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from anisoscope.capture.hooks import CAUSES, _first_input, _first_output
from anisoscope.errors import SiteError, SiteSilentError
from anisoscope.models.site import Side, Site
from anisoscope.stats.reservoir import row_keys

NO_BACKWARD = (
    "fired, but no gradient came back to it: no backward pass ran between two calls of monitor.step, or the loss does "
    "not depend on the site"
)
FROZEN = "carries no gradient: no parameter before it requires one (frozen)"


@dataclass(frozen=True)
class _Draw:
    """Which rows of one forward pass are taken: their places in it, and what stands there."""

    places: Int64[Tensor, "n"]
    keys: Int64[Tensor, "n"]
    ids: Int64[Tensor, "n"]
    positions: Int64[Tensor, "n"]
    sequences: Int64[Tensor, "n"]
    shape: tuple[int, int]


@dataclass
class _Piece:
    """Rows of one site from one forward pass, with their gradient once it has come."""

    draw: _Draw
    x: Tensor
    g: Tensor | None = None


@dataclass
class _Track:
    """What one site has given."""

    site: Site
    fired: int = 0
    again: int = 0
    """Firings inside a backward pass that had no forerunner with a graph: re-entrant checkpointing."""
    problem: str | None = None
    pieces: list[_Piece] = field(default_factory=list)


@dataclass
class _Side:
    """The forward passes of one side of a model, as its token embedding saw them."""

    draws: list[_Draw] = field(default_factory=list)
    rows: int = 0
    sequences: int = 0


@dataclass(frozen=True)
class TakenSite:
    """Sampled rows of a site in the order of the step, and what each is: row i of all belongs to one token."""

    x: Float[Tensor, "n d"]
    g: Float[Tensor, "n d"]
    ids: Int64[Tensor, "n"]
    positions: Int64[Tensor, "n"]
    sequences: Int64[Tensor, "n"]


@dataclass(frozen=True)
class Taken:
    """What a ride brought home. ``missing`` says of each absent site why it is absent."""

    sites: Mapping[str, TakenSite]
    missing: Mapping[str, str]
    tokens: int
    """Tokens that went through the model, out of which rows were sampled."""
    seconds: float
    """Time spent inside the hooks."""


class Ride:
    """Hooks on a model from construction to ``end``."""

    def __init__(self, model: nn.Module, sites: Sequence[Site], embeds: Sequence[Site], *, vectors: int, seed: int):
        self._vectors, self._seed = vectors, seed
        self._tracks = {site.name: _Track(site) for site in sites}
        self._sides = {embed.side: _Side() for embed in embeds}
        self._mask: Tensor | None = None
        self._seconds, self._open = 0.0, True
        self._handles: list[RemovableHandle] = []
        try:
            self._handles.append(model.register_forward_pre_hook(self._on_model, with_kwargs=True))
            for embed in embeds:
                module = model.get_submodule(embed.module)
                self._handles.append(module.register_forward_pre_hook(self._on_ids(embed.side), with_kwargs=True))
            for track in self._tracks.values():
                self._attach(model, track)
        except BaseException:
            self.drop()
            raise

    def drop(self) -> None:
        """Take the hooks off and forget everything."""
        self._open = False
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()

    def end(self) -> Taken:
        """Take the hooks off and give what they saw. Raises where no site at all gave rows with gradients."""
        self.drop()
        found: dict[str, TakenSite] = {}
        missing: dict[str, str] = {}
        for name, track in self._tracks.items():
            try:
                found[name] = self._join(track)
            except SiteError as error:
                missing[name] = str(error)
        self._tracks = {name: _Track(track.site) for name, track in self._tracks.items()}
        if not found:
            raise SiteSilentError(next(iter(missing.values())))
        return Taken(found, missing, max(side.rows for side in self._sides.values()), self._seconds)

    def _join(self, track: _Track) -> TakenSite:
        """The rows of all forward passes of one site; where there are more than asked, those with the smallest keys."""
        where = f"site {track.site.name!r} ({track.site.port} of module {track.site.module!r})"
        if track.problem:
            raise SiteError(f"{where} {track.problem}")
        if not track.fired and not track.again:
            raise SiteSilentError(f"{where} did not fire: {CAUSES}")
        pieces = [(piece.draw, piece.x, piece.g) for piece in track.pieces if piece.g is not None]
        if not pieces:
            raise SiteSilentError(f"{where} {NO_BACKWARD}")
        keys = torch.cat([draw.keys for draw, _, _ in pieces])
        keep = keys.argsort()[: self._vectors].sort().values
        parts = {
            name: torch.cat([getattr(draw, name) for draw, _, _ in pieces])[keep]
            for name in ("ids", "positions", "sequences")
        }
        x = torch.cat([x for _, x, _ in pieces])
        g = torch.cat([g for _, _, g in pieces])
        return TakenSite(x[keep.to(x.device)], g[keep.to(g.device)], **parts)

    def _attach(self, model: nn.Module, track: _Track) -> None:
        module = model.get_submodule(track.site.module)
        if track.site.port == "input":

            def on_input(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                if torch.is_grad_enabled():
                    self._guarded(track, lambda: self._see(track, _first_input(args, kwargs)))

            self._handles.append(module.register_forward_pre_hook(on_input, with_kwargs=True))
        else:

            def on_output(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
                if torch.is_grad_enabled():
                    self._guarded(track, lambda: self._see(track, _first_output(output)))

            self._handles.append(module.register_forward_hook(on_output))

    def _guarded(self, track: _Track | None, look: Callable[[], None]) -> None:
        """Look, and keep what goes wrong: this runs inside the user's forward or backward pass."""
        began = time.perf_counter()
        try:
            if self._open:
                with torch.no_grad():
                    look()
        except Exception as error:
            for one in self._tracks.values() if track is None else (track,):
                one.problem = one.problem or f"could not be sampled: {type(error).__name__}: {error}"
        self._seconds += time.perf_counter() - began

    def _on_model(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled() and not _in_backward():
            given = dict(zip(inspect.signature(model.forward).parameters, args, strict=False)) | kwargs
            mask = given.get("attention_mask")
            self._mask = mask if isinstance(mask, Tensor) and mask.ndim == 2 else None

    def _on_ids(self, side: Side) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def on_ids(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            # A validation pass without gradients between two steps is none of ours.
            if torch.is_grad_enabled() and not _in_backward():
                self._guarded(None, lambda: self._draw(self._sides[side], _first_input(args, kwargs)))

        return on_ids

    def _draw(self, side: _Side, ids: Any) -> None:
        """Decide which rows of this forward pass are taken."""
        if not isinstance(ids, Tensor) or ids.ndim != 2:
            shape = tuple(ids.shape) if isinstance(ids, Tensor) else type(ids).__name__
            raise SiteError(f"the token embedding was given {shape}, not ids of shape (b, t)")
        b, t = ids.shape
        keys = row_keys(self._seed, 0, side.rows, b * t)
        places = np.arange(b * t)
        if self._mask is not None and self._mask.shape == ids.shape:
            places = places[self._mask.detach().reshape(-1).cpu().numpy() != 0]
        if len(places) > self._vectors:
            places = np.sort(places[np.argpartition(keys[places], self._vectors)[: self._vectors]])
        at = torch.from_numpy(places).long()
        side.draws.append(
            _Draw(
                at,
                torch.from_numpy(keys[places]).long(),
                ids.detach().reshape(-1)[at.to(ids.device)].long().cpu(),
                at % t,
                side.sequences + at // t,
                (b, t),
            )
        )
        side.rows += b * t
        side.sequences += b

    def _see(self, track: _Track, value: Any) -> None:
        """Copy the rows of a site that are wanted, and ask for the same rows of its gradient."""
        site, side = track.site, self._sides.get(track.site.side, _Side())
        if _in_backward():
            # Checkpointing runs blocks again in the backward pass. Where the first run had a graph (the kind that is
            # not re-entrant) its tensors count and this run is thrown away; else this run is the one with a graph.
            if track.fired:
                return
            number, call = len(side.draws) - 1, site.call
            track.again += 1
        else:
            number, call = divmod(track.fired, site.calls)
            track.fired += 1
        if call != site.call:
            return
        if not 0 <= number < len(side.draws):
            raise SiteError("fired before the token embedding did, so its rows have no token ids")
        draw = side.draws[number]
        if not isinstance(value, Tensor) or not value.is_floating_point():
            raise SiteError(f"gave {type(value).__name__}, not a tensor of hidden states")
        if not value.requires_grad:
            track.problem = FROZEN
            return
        piece = _Piece(draw, _rows(value, site, draw))
        track.pieces.append(piece)

        def on_grad(grad: Tensor) -> None:
            def keep() -> None:
                piece.g = _rows(grad, site, draw)

            self._guarded(track, keep)

        self._handles.append(value.register_hook(on_grad))


def _rows(value: Tensor, site: Site, draw: _Draw) -> Float[Tensor, "n d"]:
    """A copy of the drawn rows, in float32 unless they come in float64."""
    value = value.detach()
    if site.layout == "tbd" and value.ndim == 3:
        value = value.transpose(0, 1)
    b, t = draw.shape
    if value.ndim < 2 or value.shape[:-1].numel() != b * t:
        raise SiteError(f"holds rows of shape {tuple(value.shape)} where ids had {(b, t)}")
    rows = value.reshape(b * t, value.shape[-1])[draw.places.to(value.device)]
    return rows if rows.dtype == torch.float64 else rows.float()


def _in_backward() -> bool:
    """Whether this thread is inside a backward pass, as checkpointing is when it runs a block again."""
    return bool(torch._C._current_graph_task_id() != -1)
