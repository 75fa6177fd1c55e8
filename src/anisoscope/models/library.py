"""The transformers library: imported without reading all of its sources twice, and quiet where asked."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars or logs of transformers meanwhile; as they were afterwards."""
    import_models()
    from transformers.utils import logging

    bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def import_models() -> None:
    """Import ``transformers.models``.

    Five hundred folders of sources are read for the names in them, a sixth of a second, when transformers is imported,
    and again when its models are: their list is remembered under another path, and their parts are more than its cache
    holds. Here the second question gets the first answer. A version without that function is left alone.
    """
    import transformers

    place: Any = importlib.import_module("transformers.utils.import_utils")
    if "transformers.models" in sys.modules or not hasattr(place, "create_import_structure_from_path"):
        return
    asked = place.create_import_structure_from_path
    folder = Path(transformers.__file__).parent / "models"
    again = str(folder / "__init__.py")
    place.create_import_structure_from_path = lambda path: asked(folder if str(path) == again else path)
    try:
        importlib.import_module("transformers.models")
    finally:
        place.create_import_structure_from_path = asked
