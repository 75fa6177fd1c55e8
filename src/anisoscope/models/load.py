"""Load a model with its tokenizer from a Hugging Face name, a folder, a GGUF or llama2.c file, or an installed package.

No code of a model is run unless ``trust_remote_code=True`` says so; weights come from safetensors, else through torch's
loader for plain tensors; a checkpoint that does not fill the whole model is an error and never filled with noise.
"""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from anisoscope.errors import ModelError, OptionError, unknown_name
from anisoscope.meanwhile import Meanwhile
from anisoscope.models.gguf_files import quick_gguf
from anisoscope.models.library import quiet_transformers
from anisoscope.models.llama2c import find_tokenizer, load_llama2c, load_tokenizer, read_header
from anisoscope.models.sources import Source, fingerprint, first_line, resolve

HEADS = (
    ("ForCausalLM", "AutoModelForCausalLM"),
    ("LMHeadModel", "AutoModelForCausalLM"),
    ("ForMaskedLM", "AutoModelForMaskedLM"),
    ("ForPreTraining", "AutoModelForPreTraining"),
    ("ForConditionalGeneration", "AutoModelForSeq2SeqLM"),
    ("ForSequenceClassification", "AutoModelForSequenceClassification"),
    ("ForTokenClassification", "AutoModelForTokenClassification"),
    ("ForQuestionAnswering", "AutoModelForQuestionAnswering"),
)
"""How the class that a checkpoint was saved from ends, and the loader that builds the same one."""

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.txt",
    "vocab.json",
    "spiece.model",
    "sentencepiece.bpe.model",
)
SPARE_PARTS = ("pooler.",)
"""Parts that sentence encoders drop when they are saved and that no site looks at."""

OnTokenizer = Callable[[Any], None]
"""What is called with a tokenizer as soon as it is there."""


@dataclass(frozen=True)
class LoadedModel:
    """A model in eval mode, its tokenizer, and what is needed to load the very same again."""

    model: nn.Module
    tokenizer: Any
    """A transformers tokenizer, or None where the source has none."""
    name: str
    revision: str | None
    """Commit of a Hugging Face model, version of a package, None for files."""
    family: str
    kind: str
    """One of "encoder", "decoder", "encoder-decoder" and "other"."""
    parameters: int
    source_hash: str
    """SHA-256 over the files that the model and the tokenizer were read from."""
    notes: tuple[str, ...] = ()


def load_model(
    source: str | Path,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    on_tokenizer: OnTokenizer = lambda tokenizer: None,
) -> LoadedModel:
    """Load a model and its tokenizer. The state of every random generator is left as it was.

    ``source`` is a Hugging Face name, a folder with ``config.json``, a ``.gguf`` file, a llama2.c ``.bin`` file or the
    folder around one, or ``pip:package``. ``revision`` is a branch, tag or commit of a Hugging Face model.
    ``on_tokenizer`` is given the tokenizer, where there is one, before the weights are read: it may begin something.
    """
    place = _device(device)
    found = resolve(source, revision=revision, trust_remote_code=trust_remote_code)
    unsaid = warnings.catch_warnings(action="ignore", category=DeprecationWarning)
    with _untouched_generators(), Meanwhile("hash") as hashing, quiet_transformers(), unsaid:
        source_hash = hashing.begin(fingerprint, _files(found))  # takes as long as to read them
        if found.kind == "gguf":
            model, tokenizer, notes = _from_gguf(found, dtype, on_tokenizer)
        elif found.kind == "llama2c":
            model, tokenizer, notes = _from_llama2c(found, dtype, on_tokenizer)
        else:
            model, tokenizer, notes = _from_folder(found, dtype, trust_remote_code, on_tokenizer)
        model = model.eval().to(place)
        return LoadedModel(
            model=model,
            tokenizer=tokenizer,
            name=found.name,
            revision=found.revision,
            family=str(model.config.model_type),
            kind=model_kind(model),
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            source_hash=source_hash(),
            notes=tuple(notes),
        )


def model_kind(model: nn.Module) -> str:
    """What a transformers model is: "encoder", "decoder", "encoder-decoder" or "other"."""
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

    config: Any = getattr(model, "config", None)
    if config is None:
        return "other"
    if getattr(config, "is_encoder_decoder", False):
        return "encoder-decoder"
    if type(config) in AutoModelForMaskedLM._model_mapping and not getattr(config, "is_decoder", False):
        return "encoder"
    return "decoder" if type(config) in AutoModelForCausalLM._model_mapping else "other"


def _files(source: Source) -> list[Path]:
    """The files that a model and its tokenizer are read from."""
    if source.kind == "gguf":
        return [source.path]
    if source.kind == "llama2c":
        beside = find_tokenizer(source.path, read_header(source.path).vocabulary)
        return [source.path] if beside is None else [source.path, beside]
    named = [source.path / name for name in ("config.json", *TOKENIZER_FILES)]
    return [*(file for file in named if file.is_file()), *_weights(source.path)]


def _weights(folder: Path) -> list[Path]:
    """Files of weights in a folder; safe ones, where there are any."""
    return sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))


def _from_folder(
    source: Source, dtype: torch.dtype, trust_remote_code: bool, on_tokenizer: OnTokenizer
) -> tuple[Any, Any, list[str]]:
    """A folder in the manner of transformers: config.json, weights, tokenizer."""
    import transformers

    folder = source.path
    config = _config(folder, trust_remote_code)
    weights = _weights(folder)
    if not weights:
        raise ModelError(f"{folder} has a config.json but no weights: no *.safetensors and no pytorch_model*.bin")
    loader = _loader(config)
    options = {"local_files_only": True, "trust_remote_code": trust_remote_code}
    tokenizer = None
    if any((folder / name).is_file() for name in TOKENIZER_FILES):
        with _named(f"the tokenizer in {folder}"):
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **options)
        on_tokenizer(tokenizer)
    with _named(f"the weights in {folder}"):
        model, report = getattr(transformers, loader).from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            use_safetensors=weights[0].suffix == ".safetensors",
            weights_only=True,
            output_loading_info=True,
            **options,
        )
    notes = _check_complete(folder, report)
    if tokenizer is None:
        notes.append("no tokenizer lies beside the weights")
    return model, tokenizer, notes


def _config(folder: Path, trust_remote_code: bool) -> Any:
    """The configuration in a folder, or an error that names what is wrong with it."""
    from transformers import CONFIG_MAPPING, AutoConfig

    try:
        raw = json.loads((folder / "config.json").read_text())
    except (ValueError, OSError) as error:
        raise ModelError(f"{folder / 'config.json'} cannot be read: {first_line(error)}") from None
    family = raw.get("model_type") if isinstance(raw, dict) else None
    if not isinstance(family, str):
        raise ModelError(f"{folder / 'config.json'} names no model_type, so nobody can tell what to build")
    if family not in CONFIG_MAPPING and not trust_remote_code:
        if "auto_map" in raw:
            raise ModelError(
                f"{folder} is of the family {family!r}, which runs code of its own; read that code, then pass "
                "trust_remote_code=True"
            )
        unknown = unknown_name("model family", family, CONFIG_MAPPING)
        hint = str(unknown).partition("; ")[2]
        raise ModelError(
            f"{folder / 'config.json'}: transformers knows no family {family!r}"
            + (f"; {hint}" if hint.startswith("did you mean") else "; a newer transformers may")
        )
    with _named(str(folder / "config.json")):
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)


def _loader(config: Any) -> str:
    """The name of the transformers class that builds what the checkpoint was saved from."""
    import transformers

    saved_from = (getattr(config, "architectures", None) or [""])[0]
    for ending, loader in HEADS:
        if saved_from.endswith(ending) and type(config) in getattr(transformers, loader)._model_mapping:
            return loader
    return "AutoModel"


def _check_complete(folder: Path, report: Any) -> list[str]:
    """Refuse weights that are not in the checkpoint: transformers would fill them with noise and say so in a log."""
    missing = sorted(report["missing_keys"])
    needed = [key for key in missing if not any(part in key for part in SPARE_PARTS)]
    if needed:
        shown = ", ".join(needed[:3]) + (f" and {len(needed) - 3} more" if len(needed) > 3 else "")
        raise ModelError(f"the weights in {folder} do not fill the model: {shown} are missing")
    notes = [f"{len(missing)} weights of a part that no site reads are missing: {missing[0]} ..."] if missing else []
    unused = sorted(report["unexpected_keys"])
    return [*notes, f"{len(unused)} weights have no place in the model: {unused[0]} ..."] if unused else notes


def _from_gguf(source: Source, dtype: torch.dtype, on_tokenizer: OnTokenizer) -> tuple[Any, Any, list[str]]:
    """A GGUF file: weights are dequantised, so what is measured is the model that the quantised one stands for."""
    from importlib.util import find_spec

    from transformers import AutoModelForCausalLM, AutoTokenizer

    if find_spec("gguf") is None or find_spec("accelerate") is None:
        raise ModelError(f"{source.path} needs two more packages; pip install 'anisoscope[gguf]'")
    folder, file = source.path.parent, source.path.name
    # A progress bar that asks no one whether it is wanted is drawn there.
    with quick_gguf(), contextlib.redirect_stderr(io.StringIO()):
        with _named(str(source.path)):
            tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file, local_files_only=True)
        on_tokenizer(tokenizer)
        with _named(str(source.path)):
            model = AutoModelForCausalLM.from_pretrained(
                folder, gguf_file=file, dtype=dtype, local_files_only=True, **_dequantised()
            )
    return model, tokenizer, ["weights were dequantised from GGUF"]


def _dequantised() -> dict[str, Any]:
    """Newer transformers leave weights of some families packed, for kernels that they fetch and run: not here."""
    import transformers

    config = getattr(transformers, "GgufConfig", None)
    return {} if config is None else {"quantization_config": config(dequantize=True)}


def _from_llama2c(source: Source, dtype: torch.dtype, on_tokenizer: OnTokenizer) -> tuple[Any, Any, list[str]]:
    """A llama2.c file, with the tokenizer that lies beside it."""
    beside = find_tokenizer(source.path, read_header(source.path).vocabulary)
    if beside is None:
        notes = ["no tokenizer of this many tokens (tok*.bin) lies beside the model"]
        return load_llama2c(source.path).to(dtype), None, notes
    tokenizer = load_tokenizer(beside)
    on_tokenizer(tokenizer)
    return load_llama2c(source.path).to(dtype), tokenizer, []


def _device(device: torch.device | str) -> torch.device:
    """A device that is really there."""
    try:
        place = torch.device(device)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError) as error:
        raise OptionError(f"device={str(device)!r} cannot be used here: {first_line(error)}") from None
    return place


@contextlib.contextmanager
def _named(what: str) -> Iterator[None]:
    """Turn whatever transformers, safetensors and torch raise for bad files into one line that names the file."""
    try:
        yield
    except pickle.UnpicklingError as error:
        raise ModelError(
            f"{what} are pickled with more than tensors in them, which could run code; refused. "
            f"Convert them to safetensors where you trust them ({first_line(error)})"
        ) from None
    except ModelError:
        raise
    except Exception as error:  # many libraries, many classes: all of them mean that these files do not load
        raise ModelError(f"{what} cannot be loaded: {type(error).__name__}: {first_line(error)}") from error


@contextlib.contextmanager
def _untouched_generators() -> Iterator[None]:
    """Building a model draws weights before they are overwritten; give every generator its state back."""
    plain, arrays = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []):
            yield
    finally:
        random.setstate(plain)
        np.random.set_state(arrays)
