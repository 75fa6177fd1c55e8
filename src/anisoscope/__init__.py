"""anisoscope: the geometry of learning in language models.

    import anisoscope as an
    an.two_nn(X)                                  # any tensor or array, gives an Estimate
    an.measure(X, ["two_nn", "spectral_ratio"])   # several at once, sharing the work
    an.profile("path-or-name", text="file.txt")   # every layer of a model, stored as a run

Names load on first use, so that reading stored results needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "anisoscope.estimate": ("Estimate",),
    "anisoscope.errors": ("AnisoscopeError",),
    "anisoscope.measures.anisotropy": (
        "effective_rank",
        "effective_rank_lambda",
        "isoscore",
        "isoscore_star",
        "mean_cosine",
        "participation_ratio",
        "spectral_ratio",
        "spectral_ratio_l1",
        "stable_rank",
    ),
    "anisoscope.measures.base": ("Needs", "Workspace", "register", "unregister"),
    "anisoscope.measures.table": ("measure", "measure_names"),
    "anisoscope.measures.curvature": ("curvature",),
    "anisoscope.measures.dimension": ("gride", "mle", "two_nn"),
    "anisoscope.measures.frames": ("local_tangents",),
    "anisoscope.measures.local": ("local_isotropy", "local_pca_dimension"),
    "anisoscope.measures.neighbors": ("nearest_neighbors",),
    "anisoscope.measures.partition": ("partition_isotropy",),
    "anisoscope.measures.paths": ("linearity", "turning_angle"),
    "anisoscope.stats.counts": ("BinMoments",),
    "anisoscope.stats.moments": ("Moments",),
    "anisoscope.stats.reservoir": ("Reservoir",),
    "anisoscope.stats.sketch": ("Sketch",),
    "anisoscope.distributed": ("merge_across_ranks",),
    "anisoscope.models.load": ("load_model",),
    "anisoscope.models.sites": ("Site", "discover"),
    "anisoscope.capture.hooks": ("record",),
    "anisoscope.monitor": ("Monitor",),
    "anisoscope.monitoring.tangents": ("TangentAnalysis",),
    "anisoscope.profiling": ("ProfileOptions",),
    "anisoscope.schedule": ("by_tokens", "either", "every", "log_spaced", "until", "wall_share"),
    "anisoscope.tangent.energy": ("energy_share", "energy_test"),
    "anisoscope.tangent.proxies": ("fit_proxy",),
    "anisoscope.runs.export": ("export",),
    "anisoscope.runs.store": ("RunReader", "RunWriter", "open_runs"),
    "anisoscope.sweep": ("profile",),
    "anisoscope.text.corpus": ("load_corpus",),
    "anisoscope.train.recipe": ("load_recipe",),
    "anisoscope.views.report": ("write_report",),
    "anisoscope.watching.study": ("run_study",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
_MODULES = {"regularizers": "anisoscope.train.regularizers"}

__all__ = ["__version__", *sorted((*_HOME_OF, *_MODULES))]  # noqa: PLE0604 - all strings, from the tables above


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(_MODULES[name])
    if name not in _HOME_OF:
        from anisoscope.errors import unknown_name

        raise AttributeError(str(unknown_name("name in anisoscope:", name, __all__)))
    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)


if TYPE_CHECKING:
    from anisoscope.capture.hooks import record as record
    from anisoscope.distributed import merge_across_ranks as merge_across_ranks
    from anisoscope.errors import AnisoscopeError as AnisoscopeError
    from anisoscope.estimate import Estimate as Estimate
    from anisoscope.measures.anisotropy import effective_rank as effective_rank
    from anisoscope.measures.anisotropy import effective_rank_lambda as effective_rank_lambda
    from anisoscope.measures.anisotropy import isoscore as isoscore
    from anisoscope.measures.anisotropy import isoscore_star as isoscore_star
    from anisoscope.measures.anisotropy import mean_cosine as mean_cosine
    from anisoscope.measures.anisotropy import participation_ratio as participation_ratio
    from anisoscope.measures.anisotropy import spectral_ratio as spectral_ratio
    from anisoscope.measures.anisotropy import spectral_ratio_l1 as spectral_ratio_l1
    from anisoscope.measures.anisotropy import stable_rank as stable_rank
    from anisoscope.measures.base import Needs as Needs
    from anisoscope.measures.base import Workspace as Workspace
    from anisoscope.measures.base import register as register
    from anisoscope.measures.base import unregister as unregister
    from anisoscope.measures.curvature import curvature as curvature
    from anisoscope.measures.dimension import gride as gride
    from anisoscope.measures.dimension import mle as mle
    from anisoscope.measures.dimension import two_nn as two_nn
    from anisoscope.measures.frames import local_tangents as local_tangents
    from anisoscope.measures.local import local_isotropy as local_isotropy
    from anisoscope.measures.local import local_pca_dimension as local_pca_dimension
    from anisoscope.measures.neighbors import nearest_neighbors as nearest_neighbors
    from anisoscope.measures.partition import partition_isotropy as partition_isotropy
    from anisoscope.measures.paths import linearity as linearity
    from anisoscope.measures.paths import turning_angle as turning_angle
    from anisoscope.measures.table import measure as measure
    from anisoscope.measures.table import measure_names as measure_names
    from anisoscope.models.load import load_model as load_model
    from anisoscope.models.sites import Site as Site
    from anisoscope.models.sites import discover as discover
    from anisoscope.monitor import Monitor as Monitor
    from anisoscope.monitoring.tangents import TangentAnalysis as TangentAnalysis
    from anisoscope.profiling import ProfileOptions as ProfileOptions
    from anisoscope.runs.export import export as export
    from anisoscope.runs.store import RunReader as RunReader
    from anisoscope.runs.store import RunWriter as RunWriter
    from anisoscope.runs.store import open_runs as open_runs
    from anisoscope.schedule import by_tokens as by_tokens
    from anisoscope.schedule import either as either
    from anisoscope.schedule import every as every
    from anisoscope.schedule import log_spaced as log_spaced
    from anisoscope.schedule import until as until
    from anisoscope.schedule import wall_share as wall_share
    from anisoscope.stats.counts import BinMoments as BinMoments
    from anisoscope.stats.moments import Moments as Moments
    from anisoscope.stats.reservoir import Reservoir as Reservoir
    from anisoscope.stats.sketch import Sketch as Sketch
    from anisoscope.sweep import profile as profile
    from anisoscope.tangent.energy import energy_share as energy_share
    from anisoscope.tangent.energy import energy_test as energy_test
    from anisoscope.tangent.proxies import fit_proxy as fit_proxy
    from anisoscope.text.corpus import load_corpus as load_corpus
    from anisoscope.train import regularizers as regularizers
    from anisoscope.train.recipe import load_recipe as load_recipe
    from anisoscope.views.report import write_report as write_report
    from anisoscope.watching.study import run_study as run_study
