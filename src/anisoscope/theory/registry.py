"""Every experiment, by name. Their modules are imported when the list is asked for, not before."""

from __future__ import annotations

from collections.abc import Iterable

from anisoscope.errors import unknown_name
from anisoscope.theory.experiment import Experiment


def experiments() -> tuple[Experiment, ...]:
    """All experiments, in the order in which they are best read."""
    from anisoscope.theory import chords, counterexample, layer_gradient, learning, recovery, visible

    return (
        *chords.EXPERIMENTS,
        *visible.EXPERIMENTS,
        *layer_gradient.EXPERIMENTS,
        *counterexample.EXPERIMENTS,
        *recovery.EXPERIMENTS,
        *learning.EXPERIMENTS,
    )


def choose_experiments(names: Iterable[str]) -> tuple[Experiment, ...]:
    """Those with these names, each once, in reading order; all of them where no name is given."""
    known = {one.name: one for one in experiments()}
    wanted = list(names)
    for name in wanted:
        if name not in known:
            raise unknown_name("experiment", name, known)
    return tuple(one for name, one in known.items() if not wanted or name in wanted)
