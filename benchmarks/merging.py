"""Processes that each hold moments and merge them: a hot path of `cost.py` that needs more than one process."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
from hot_paths import CHUNK, decaying
from laws import At

from anisoscope.distributed import merge_across_ranks
from anisoscope.stats.moments import Moments

PATIENCE = timedelta(seconds=60)


def merging(at: At) -> Merging:
    """A merge of exact moments of width D over P processes, of which this one is the first."""
    return Merging(at["P"], at["D"])


class Merging:
    """Called, it merges once. The other processes do nothing else, on one core each, until this is closed."""

    def __init__(self, processes: int, width: int) -> None:
        self._folder = tempfile.mkdtemp()
        spawn = multiprocessing.get_context("spawn")
        ranks = range(1, processes)
        self._others = [spawn.Process(target=_merge_on, args=(i, processes, width, self._folder)) for i in ranks]
        for one in self._others:
            one.start()
        self._state = _joined(0, processes, width, self._folder)

    def __call__(self) -> Moments:
        return merge_across_ranks(self._state)

    def close(self) -> None:
        """End the group, and with it the others."""
        dist.destroy_process_group()
        for one in self._others:
            one.join(PATIENCE.total_seconds())
            one.kill()
        shutil.rmtree(self._folder)


def _joined(rank: int, processes: int, width: int, folder: str) -> Moments:
    """Moments of some rows of this process's own, after all have met."""
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=processes, timeout=PATIENCE)
    return Moments.of(decaying(CHUNK, width))


def _merge_on(rank: int, processes: int, width: int, folder: str) -> None:
    torch.set_num_threads(1)
    state = _joined(rank, processes, width, folder)
    with contextlib.suppress(RuntimeError):  # the first process has left
        while True:
            merge_across_ranks(state)
    os._exit(0)  # threads of the broken group would complain at an orderly end
