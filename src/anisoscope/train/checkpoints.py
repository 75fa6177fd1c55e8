"""Checkpoints: a model folder that anybody can load, and beside it what a run needs to go on bit for bit.

``step000100/`` holds the weights after 100 updates with configuration and tokenizer, in the manner of transformers, and
``step000100/training/`` the optimiser, the random generators and the counters. A folder is there whole or not at all.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from anisoscope.errors import RunError
from anisoscope.models.library import quiet_transformers
from anisoscope.runs.files import explained, sync_folder
from anisoscope.train.recipe import CheckpointSpec

STEP_FOLDER = re.compile(r"step([0-9]{6,})")
TRAINING = "training"
STATES = "states.safetensors"
COUNTERS = "counters.json"
GENERATOR, DEVICE_GENERATOR = "generator.cpu", "generator.cuda"
VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Progressed:
    """How far a training is, beside its tensors."""

    step: int
    tokens: int
    seconds: float
    settings: Mapping[str, Any]
    """What must be the same for a run to go on: data, model, optimisation, seed."""


def checkpoint_steps(spec: CheckpointSpec, steps: int) -> set[int]:
    """The steps after which weights are written, the last one always among them."""
    wanted = {steps}
    if spec.every is not None:
        wanted |= set(range(spec.every, steps + 1, spec.every))
    if spec.log_spaced:
        wanted |= {0} | {1 << power for power in range(steps.bit_length())}
    return wanted


def step_folder(folder: Path, step: int) -> Path:
    """Where the checkpoint after ``step`` updates lies; the number is wide enough to sort as text."""
    return folder / f"step{step:06d}"


def save_checkpoint(
    target: Path,
    model: nn.Module,
    optimiser: torch.optim.Optimizer,
    tokenizer: Any,
    progressed: Progressed,
) -> Path:
    """Write a checkpoint; a reader sees nothing or all of it. An older one of the same name is replaced."""
    beside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    with explained(target):
        shutil.rmtree(beside, ignore_errors=True)
        (beside / TRAINING).mkdir(parents=True)
        try:
            with quiet_transformers():
                model.save_pretrained(beside)  # type: ignore[operator]
                tokenizer.save_pretrained(beside)
            _write_states(beside / TRAINING, model, optimiser, progressed)
            for file in beside.rglob("*"):
                _sync(file)
            if target.exists():
                # Two renames: whoever looks in between finds no checkpoint, and never half of one.
                aside = beside.with_suffix(".old")
                os.replace(target, aside)
                os.replace(beside, target)
                shutil.rmtree(aside, ignore_errors=True)
            else:
                os.replace(beside, target)
        except BaseException:
            shutil.rmtree(beside, ignore_errors=True)
            raise
        sync_folder(target.parent)
    return target


def drop_states(folder: Path, but: Path) -> None:
    """Remove optimiser and generators from every checkpoint but one: they weigh twice as much as the model."""
    for _, found in checkpoints_in(folder):
        if found != but:
            shutil.rmtree(found / TRAINING, ignore_errors=True)


def checkpoints_in(folder: Path) -> list[tuple[int, Path]]:
    """Checkpoints in a folder by step."""
    if not folder.is_dir():
        return []
    found = ((STEP_FOLDER.fullmatch(one.name), one) for one in folder.iterdir() if (one / "config.json").exists())
    return sorted((int(match.group(1)), one) for match, one in found if match)


def newest_resumable(folder: Path) -> Path:
    """The checkpoint with the most steps that still has optimiser and generators."""
    found = [one for _, one in checkpoints_in(folder) if (one / TRAINING / COUNTERS).exists()]
    if not found:
        raise RunError(f"{folder} has no checkpoint to resume from; start again without resume")
    return found[-1]


def load_checkpoint(
    source: Path, model: nn.Module, optimiser: torch.optim.Optimizer, settings: Mapping[str, Any]
) -> Progressed:
    """Put weights, optimiser and generators back as they were, after checking that the training is the same."""
    from safetensors.torch import load_file, load_model

    try:
        counters = json.loads((source / TRAINING / COUNTERS).read_text(encoding="utf-8"))
        if counters["version"] != VERSION:
            raise RunError(f"{source} is of version {counters['version']}; this anisoscope reads {VERSION}")
        _same_settings(source, counters["settings"], json.loads(json.dumps(settings)))
        load_model(model, source / "model.safetensors")
        states = load_file(source / TRAINING / STATES)
    except RunError:
        raise
    except Exception as error:  # of the disk, JSON, safetensors and torch: all mean that this folder is damaged
        raise RunError(f"{source} cannot be resumed from: {type(error).__name__}: {_first_line(error)}") from error
    generators = {name: states.pop(name) for name in (GENERATOR, DEVICE_GENERATOR) if name in states}
    _fill_optimiser(model, optimiser, states)
    torch.set_rng_state(generators[GENERATOR])
    device = next(model.parameters()).device
    if device.type == "cuda" and DEVICE_GENERATOR in generators:
        torch.cuda.set_rng_state(generators[DEVICE_GENERATOR], device)
    return Progressed(**{name: counters[name] for name in ("step", "tokens", "seconds", "settings")})


def _write_states(folder: Path, model: nn.Module, optimiser: torch.optim.Optimizer, progressed: Progressed) -> None:
    from safetensors.torch import save_file

    names = {id(parameter): name for name, parameter in model.named_parameters()}
    states: dict[str, Tensor] = {GENERATOR: torch.get_rng_state()}
    device = next(model.parameters()).device
    if device.type == "cuda":
        states[DEVICE_GENERATOR] = torch.cuda.get_rng_state(device)
    for parameter, state in optimiser.state.items():
        for key, value in state.items():
            states[f"{names[id(parameter)]}:{key}"] = value.detach().cpu().contiguous()
    save_file(states, folder / STATES)
    counters = {"version": VERSION} | {
        name: getattr(progressed, name) for name in ("step", "tokens", "seconds", "settings")
    }
    (folder / COUNTERS).write_text(json.dumps(counters, indent=1), encoding="utf-8")


def _fill_optimiser(model: nn.Module, optimiser: torch.optim.Optimizer, states: Mapping[str, Tensor]) -> None:
    parameters = dict(model.named_parameters())
    optimiser.state.clear()
    for label, value in states.items():
        name, _, key = label.rpartition(":")
        parameter = parameters[name]
        # The count of steps stays where the optimiser itself keeps it: beside the weights only if it is fused.
        fused = bool(optimiser.param_groups[0].get("fused"))
        place = parameter.device if key != "step" or fused else torch.device("cpu")
        optimiser.state[parameter][key] = value.to(place)


def _same_settings(source: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    for key in sorted({*before, *now}):
        if before.get(key) != now.get(key):
            raise RunError(
                f"{source} was trained with {key}={before.get(key)!r}, the recipe says {now.get(key)!r}; "
                "resume with the recipe of the run, or choose another folder"
            )


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0]
