"""A regulariser inside the training loop: sites caught or steered in the step's own forward pass, and its state."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from anisoscope.capture.hooks import record, steer
from anisoscope.errors import NonFiniteError, RunError
from anisoscope.models.sites import discover, select
from anisoscope.runs.files import explained, replacing
from anisoscope.train.regularizer_spec import RegularizerSpec
from anisoscope.train.regularizers import DAMPING, TangentDamping, penalty

FOLDER = "regularizer"
"""Beside the checkpoints: the fitted bases at each of them, written before it, so that none is without."""
SUFFIX = ".safetensors"
SEED_STRIDE = 1 << 20  # draws of different seeds do not meet in any training of fewer updates


class Regularized:
    """What a recipe's ``regularizer:`` does to the updates of one model. Made once for a training.

    ``catching`` goes around one forward pass, ``added`` gives the loss with the term of that pass. Validation, looks
    and the loss that is reported know nothing of it.
    """

    def __init__(self, spec: RegularizerSpec, model: nn.Module, seed: int) -> None:
        self.spec, self.seed = spec, seed
        self._model, self._sites = model, select(discover(model), spec.sites)
        self._damping: dict[str, TangentDamping] = {}
        if spec.name == DAMPING:
            self._damping = {site.name: TangentDamping(**spec.options, seed=seed) for site in self._sites}
        self._seen: Mapping[str, Tensor] = {}
        self._sum = 0.0

    @contextlib.contextmanager
    def catching(self, step: int) -> Iterator[None]:
        """Around the forward pass of a part of update ``step``."""
        if self._damping:
            with steer(self._model, self._sites, lambda name, h: self._damped(name, h, step)):
                yield
        else:
            with record(self._model, self._sites, keep_graph=True) as seen:
                yield
            self._seen = seen

    def added(self, loss: Tensor, step: int, parts: int) -> Tensor:
        """The loss of a part with its term: the mean over sites, and over the parts that a batch is cut into."""
        if self._damping:
            return loss
        options = dict(self.spec.options)
        if self.spec.name == "local_curvature":
            options["seed"] = self.seed * SEED_STRIDE + step
        assert self.spec.weight is not None  # the recipe was checked
        seen, self._seen = self._seen, {}
        terms = [self._term(h, self.spec.weight, options) for h in seen.values()]
        term = torch.stack(terms).mean() / parts
        self._sum += float(term.detach())
        return loss + term

    def _damped(self, name: str, h: Tensor, step: int) -> Tensor:
        try:
            return self._damping[name](h, step)
        except NonFiniteError:  # as in ``_term``
            return h

    def _term(self, h: Tensor, weight: float, options: Mapping[str, Any]) -> Tensor:
        try:
            return penalty(self.spec.name, h, weight, **options)
        except NonFiniteError:
            # The loop has its own way to end a training that diverges, with the state that did it.
            return (h.sum() * torch.nan).float()

    def taken(self) -> dict[str, float]:
        """The term of the update that was just done, for its line of metrics, and a fresh start for the next."""
        found, self._sum = self._sum, 0.0
        return {} if self._damping else {"penalty": found}

    def write(self, folder: Path, step: int, keep_all: bool) -> None:
        """Keep what a resumed run needs beside the weights of this step: fitted bases, if there are any."""
        from safetensors.torch import save

        states = {f"{name}:{key}": v for name, one in self._damping.items() for key, v in one.state().items()}
        if not states:
            return
        place = folder / FOLDER
        with explained(place):
            place.mkdir(parents=True, exist_ok=True)
            with replacing(place / f"{step}{SUFFIX}") as file:
                file.write(save({name: value.cpu().contiguous() for name, value in states.items()}))
            # The one before stays: until the checkpoint of this step is there, a run resumes from that.
            old = sorted((int(one.stem) for one in place.glob(f"*{SUFFIX}") if one.stem.isdigit()), reverse=True)
            for number in () if keep_all else old[2:]:
                (place / f"{number}{SUFFIX}").unlink(missing_ok=True)

    def restore(self, folder: Path, step: int, device: torch.device) -> None:
        """Take up what was written for this step."""
        if not self._damping or step == 0:
            return
        from safetensors.torch import load_file

        file = folder / FOLDER / f"{step}{SUFFIX}"
        if not file.exists():
            raise RunError(
                f"{file} is missing: without its basis tangent damping cannot go on bit for bit; start again"
            )
        with explained(file, reading=True):
            states = load_file(file)
        for name, one in self._damping.items():
            own = {key.partition(":")[2]: v for key, v in states.items() if key.partition(":")[0] == name}
            one.restore(own, device)
