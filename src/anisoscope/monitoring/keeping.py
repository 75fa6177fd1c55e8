"""Keeping what was found: into a run store while training goes on, with patience where the disk refuses."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from anisoscope.profiling import Findings
from anisoscope.runs.provenance import provenance
from anisoscope.runs.store import RunWriter

PATIENCE = 32
"""Looks that are held back in memory while the store refuses them, the oldest given up first."""


class Keeper:
    """Writes findings to a run. What could not be written is tried again with the next look, and at the end."""

    def __init__(self, writer: RunWriter | None, own: bool, cell: str, complain: Callable[[str], None]) -> None:
        self.writer, self.cell = writer, cell
        self._own, self._complain = own, complain
        self._waiting: list[tuple[int, Findings]] = []
        self._done = set() if writer is None else {step for name, step in writer.done() if name == cell}

    @classmethod
    def at(
        cls,
        run: str | os.PathLike[str] | RunWriter | None,
        *,
        cell: str,
        exist: str,
        recipe: Mapping[str, Any],
        seed: int,
        device: str,
        model: str,
        complain: Callable[[str], None],
    ) -> Keeper:
        """A keeper for a folder, which it opens and closes itself, for an open writer, or for nothing."""
        if run is None or isinstance(run, RunWriter):
            return cls(run, False, cell, complain)
        origin = provenance(seeds=[seed], device=device, model=model)
        resumed = exist == "resume" and (Path(run) / "records.sqlite").exists()
        writer = RunWriter.create(run, recipe=None if resumed else recipe, provenance=origin, exist=exist)
        return cls(writer, True, cell, complain)

    @property
    def run(self) -> str:
        """The name of the run, or an empty one."""
        return "" if self.writer is None else self.writer.name

    def has(self, step: int) -> bool:
        """Whether this step is kept already, as in a resumed run."""
        return step in self._done

    def keep(self, step: int, found: Findings) -> None:
        """Write a look, and those that wait before it."""
        self._done.add(step)
        if self.writer is None:
            return
        self._waiting.append((step, found))
        self._write()
        while len(self._waiting) > PATIENCE:
            lost, _ = self._waiting.pop(0)
            self._complain(f"the look at step {lost} could not be stored and was given up")

    def close(self) -> None:
        """Try once more what waits, and close the store if it was opened here."""
        if self.writer is None:
            return
        self._write()
        for step, _ in self._waiting:
            self._complain(f"the look at step {step} could not be stored and is lost")
        self._waiting = []
        if self._own:
            self.writer.close()

    def _write(self) -> None:
        while self._waiting:
            step, found = self._waiting[0]
            try:
                self._commit(step, found)
            except Exception as error:  # whatever the disk does, the training is not the victim
                self._complain(f"the run cannot be written: {type(error).__name__}: {error}")
                return
            self._waiting.pop(0)

    def _commit(self, step: int, found: Findings) -> None:
        assert self.writer is not None
        with self.writer.probe(step=step, cell=self.cell, info=found.info) as probe:
            for record in found.records:
                place = {"site": record.site, "measure": record.measure, "slice": record.slice}
                probe.add_estimate(record.estimate, **place)
            for failure in found.failures:
                probe.fail(site=failure.site, measure=failure.measure, slice=failure.slice, error=failure.error)
            for curve in found.curves:
                probe.add_curve(curve)
