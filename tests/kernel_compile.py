"""Every kernel compiled for a GPU of compute capability 9.0, which need not be there. Run by test_kernels.py."""

import importlib
import json
import pkgutil

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import anisoscope.kernels
from anisoscope.kernels import (
    band,
    chase,
    codes,
    controls,
    factors,
    forms,
    grams,
    jacobi,
    nearest,
    pairs,
    projected,
    residues,
    rows,
    shifted,
    solves,
    types,
    visits,
)
from anisoscope.measures.neighbors_fused import SHAPES

TARGETS = {kind: GPUTarget("cuda", kind, 32) for kind in (80, 89, 90)}
BUILT = set()
PARTS = {"arrive", "far_at_least", "measured", "reflection", "sorted_in", "wait"}  # called by several kernels
INTEGERS = ("n", "D", "W", "padded", "total", "stride", "length", "blocks", "sweeps", "tiles", "groups", "first_group",
            "columns", "most", "first_row", "offset", "count", "sites", "bases", "draws", "few")  # fmt: skip
STRIDES = {"site_stride": "i64", "row_stride": "i32"}
COLUMNS = {"share": "i32", "weights": "*fp64", "total": "*fp64", "most": "*fp32", **STRIDES}
AGAIN = {"places": "*i64", "own": "*i64", "left_out": "*i1", "least": "*fp64", "where": "*i32", "many": "i32"}
CENTRED = STRIDES | {"out_stride": "i64", "lengths": "*fp64", "about": "*fp64", "cell": "*i64", "place": "*i64"}
KEPT = dict.fromkeys(("kept", "kept_fine", "floor"), "fp32")
BOUNDS = {"lengths": "*fp64", "worst": "*fp64", "scale": "fp32", "floor": "fp32"}
RUNS = dict.fromkeys(("order", "back"), "*i64") | dict.fromkeys(("strides", "runs"), "*i32")
DOUBT = {"own": "*i32", "count": "*i32", "many": "i32"}
CELLS = {"bounds": "*i64", "out": "*fp64", "cells": "i32"}
CELLS |= dict.fromkeys(("row_site", "row_stride", "out_site", "out_cell"), "i64")
DOUBLES = ("gram", "inverse", "free", "mean", "factor", "squares", "lost")
PACE = {"GROW": 1.2, "SHRINK": 1.2, "GROW_LIMIT": 1.01, "SURE": 0.8}
BAND = {"K": 32}
BANDS = dict.fromkeys(("band", "shifts", "weights", "least"), "*fp64") | dict.fromkeys(("N", "quads"), "i32")
TRIDIAGONAL = {
    band.factor_panel: {"PP": 32, "K": 32, "R": 128, "W": 64},
    shifted.bisect: {"HALVINGS": 55, "G": shifted.GROUP, "B": 64},
}


def wide(kernel):
    """Types where all is float64 but for a counter and the rows."""
    other = {"counter": "*i32", "rows": "*fp32"} | dict.fromkeys((*INTEGERS, "first", "S", "P"), "i32")
    return {name: other.get(name, "*fp64") for name in kernel.arg_names}


def kernels():
    """Names of all kernels that are launched; what begins with an underscore is part of others."""
    names = [one.name for one in pkgutil.iter_modules(anisoscope.kernels.__path__)]
    modules = [importlib.import_module(f"anisoscope.kernels.{name}") for name in names]
    every = [one for module in modules for one in vars(module).values() if isinstance(one, triton.JITFunction)]
    return {one.fn.__name__ for one in every if not one.fn.__name__.startswith("_")} - PARTS


def compiled(kernel, constants, warps=4, stages=None, kind=90, whole=False, **types):
    """Shared memory of a compiled kernel. Arguments are float32 pointers unless their names or ``types`` say more, and
    multiples of 16 where these are ``whole``, so that loads are copied ahead of their use."""
    signature = {}
    for name in kernel.arg_names:
        plain = "i32" if name in INTEGERS else "*fp64" if name in DOUBLES else "*fp32"
        signature[name] = "constexpr" if name in constants else types.get(name, plain)
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    BUILT.add(kernel.fn.__name__)
    at = [number for number, name in enumerate(kernel.arg_names) if name not in constants]
    attrs = {(number,): [["tt.divisibility", 16]] for number in at} if whole else {}
    source = ASTSource(kernel, signature, constexprs=places, attrs=attrs)
    options = {"num_warps": warps} | ({} if stages is None else {"num_stages": stages})
    return triton.compile(source, target=TARGETS[kind], options=options).metadata.shared


def product(shape, kind):
    """The product of the search for neighbours."""
    sizes = {"D": 768, "B": nearest.TILE, "K": shape.depth}
    types = {"rows": "*fp16", "tiles": "*i32"}
    return compiled(nearest.three_least_of_tiles, sizes, shape.warps, shape.stages, kind, True, **types)


def cell_grams(cut):
    sizes = {"B": cut.columns, "K": cut.rows, "W": cut.window, "PART": grams.PART}
    return compiled(grams.cell_grams, sizes, cut.warps, **CELLS)


def half_grams(cut):
    """The pass that measures columns, the one that takes rows apart, and the products."""
    types = CELLS | {"places": "*i32", "sizes": "*i32", "units": "*fp64", "halves": "*fp16", "part": "i64"}
    block = {"K": cut.rows, "C": cut.columns}
    tile = {"K": cut.rows, "B": cut.columns, "W": cut.window}
    return {
        "column_sizes": compiled(grams.column_sizes, block, 8, **types),
        "halves_of_rows": compiled(grams.halves_of_rows, block, 8, **types),
        "half_grams": compiled(grams.half_grams, tile, cut.warps, **types | {"total_rows": "i32"}),
    }


def residue_grams(cut):
    """The pass that measures columns, the one that forms remainders, their products, and what puts these together."""
    types = CELLS | {"places": "*i32", "units": "*fp64", "squares": "*fp64", "residues": "*i8", "moduli": "*i32"}
    types |= {"total_rows": "i32", "part": "i64"}
    tile = {"K": cut.rows, "B": cut.columns, "W": cut.window}
    measured = {"R": cut.squared, "C": cut.columns, "SHARES": 8}
    joined = types | {"residues": "*u8"}
    return {
        "column_squares": compiled(residues.column_squares, measured, **types),
        "residues_of_rows": compiled(residues.residues_of_rows, {"K": cut.rows, "C": cut.block}, **types),
        "residue_grams": compiled(residues.residue_grams, tile, cut.warps, **types | {"out": "*u8"}),
        "joined_grams": compiled(residues.joined_grams, {"B": cut.joined}, **joined),
    }


def projections():
    """Projectors and moments in halves, their products, and forms of images."""
    steps = ("part", "left_row", "right_row", "left_low", "right_low", "site_stride", "group_stride")
    tile, types = {"T": projected.TILE}, {"tiles": "*i32", "out": "*fp16"} | dict.fromkeys(steps, "i64")
    halves = types | {"left": "*fp16", "right": "*fp16", "out": "*fp32"}
    halves |= dict.fromkeys(("lefts", "rights", "first"), "i32")
    sizes = {"L": 4096, "M": projected.SIDE, "N": projected.SIDE, "K": projected.DEPTH, "W": projected.WINDOW}
    small = dict.fromkeys(("sizes", "once", "twice"), "*fp64") | {"first": "i32"}
    return {
        "projectors": compiled(projected.projectors, tile | {"K": 16, "P": 16}, **types),
        "moment_tiles": compiled(projected.moment_tiles, tile, moments="*fp64", factors="*fp64", **types),
        "long_products": compiled(projected.long_products, sizes, 8, **halves | {"weights": "*fp32"}),
        "image_forms": compiled(projected.image_forms, {"K": 16, "P": 16, "C": projected.CHUNK}, 1, **small),
    }


def type_distances(width, row="*fp32"):
    tile = types.tiling(width)
    sizes = {"SAME": 1e-12} | {name: tile[name] for name in ("R", "K")}
    other = dict.fromkeys(("order", "begins", "names"), "*i64") | dict.fromkeys(("types", "often"), "i32")
    return compiled(types.type_distances, sizes, tile["num_warps"], rows=row, out="*fp64", **other, **STRIDES)


def main():
    flags = dict.fromkeys(("active", "sound", "good", "again"), "*i1")
    doubles = dict.fromkeys(("ahead", "met", "pull_sum", "second_sum", "own_sum", "met_sum"), "*fp64")
    tile = {"R": rows.ROWS, "K": 128}
    visit = {"K": 16, "P": 16, "B": visits.ROWS, "W": visits.DEPTH}
    lists = {"AHEAD": True, "SHARE": 128, "T": 16, "P": 8, "B": 64}
    small = dict.fromkeys(set(controls.controls.arg_names) - {*INTEGERS, "SUMMED", "K", "P"}, "*fp64")
    near = dict.fromkeys(("forms", "owns", "acrosses"), "*fp32")
    found = {
        "controls": compiled(controls.controls, {"SUMMED": False, "K": 16, "P": 16}, **small | near),
        "controls of 32": compiled(controls.controls, {"SUMMED": False, "K": 30, "P": 32}, **small),
        "controls, summed": compiled(controls.controls, {"SUMMED": True, "K": 16, "P": 16}, **small),
        **projections(),
        "bias_sums": compiled(pairs.bias_sums, {"B": pairs.PLACES}, values="*fp64", out="*fp64"),
        "inverse_factors": compiled(factors.inverse_factors, {"K": 32, "P": 32}, out="*fp64", least="fp32", **flags),
        "plan_filter": compiled(
            factors.plan_filter,
            {"K": 32, "P": 32},
            locked="*i1",
            nears="*i1",
            low="i32",
            most="i32",
            edge="i32",
            warm="i32",
            **dict.fromkeys(("values", "residuals", "weights", "half", "degree"), "*fp64"),
            **dict.fromkeys(("lock_at", "near_at", "growth"), "fp32"),
        ),
        "settle": compiled(
            factors.settle,
            {"K": 32, "P": 32},
            rank="i32",
            exact_at="fp32",
            least="fp32",
            **dict.fromkeys(("near", "lost", "settled"), "*i1"),
            **dict.fromkeys(("values", "residuals", "half", "degree"), "*fp64"),
        ),
        "decompose": compiled(jacobi.decompose, {"SWEEPS": 30, "K": 32, "P": 32}, **wide(jacobi.decompose)),
        "decompose of 8": compiled(jacobi.decompose, {"SWEEPS": 30, "K": 5, "P": 8}, **wide(jacobi.decompose)),
        "cell_grams": cell_grams(grams.SMALL),
        **half_grams(grams.HALVES),
        **residue_grams(residues.CUT),
        **{f"type_distances of {width}": type_distances(width) for width in (16, 768, 2048, types.WIDEST)},
        "type_distances in half precision": type_distances(2048, "*bf16"),
        "column_sums in half precision": compiled(
            rows.column_sums, tile | {"WEIGHTED": False}, **COLUMNS | {"rows": "*bf16", "weights": "*bf16"}
        ),
        "codes_of_rows": compiled(rows.codes_of_rows, tile, weights="*i64", out="*i64"),
        "copies_among": compiled(rows.copies_among, tile, codes="*i64", order="*i64", copy="*i1", clash="*i1"),
        "row_dots": compiled(rows.row_dots, tile, out="*fp64"),
        "take_rows": compiled(rows.take_rows, tile, order="*i64", m="i32", **STRIDES),
        "rounded": compiled(forms.rounded, {"B": forms.CELLS}, factors="*fp32", out="*fp16", each="i32"),
        "row_forms": compiled(
            forms.row_forms,
            {"R": forms.ROWS, "C": forms.COLUMNS, "K": forms.DEPTH},
            8,
            rows="*fp16",
            matrix="*fp16",
            m="i32",
        ),
        "in_half": compiled(rows.in_half, tile, order="*i64", half="*fp16", lengths="*fp64", **KEPT),
        "nearest_within": compiled(
            rows.nearest_within, {"W": 128, "T": 16, "R": 64, "C": 128, "K": 64}, half="*fp16", **RUNS
        ),
        "measure_within": compiled(
            rows.measure_within,
            {"T": 16, "G": 128, "R": 4, "K": 128, "C": 16, "MEND": 128},
            out="*fp64",
            **RUNS | BOUNDS,
        ),
        "column_sums": compiled(rows.column_sums, tile | {"WEIGHTED": True}, **COLUMNS),
        "centre_rows": compiled(rows.centre_rows, tile | {"PLACED": False}, out="*fp64", **CENTRED),
        "centre_rows by cell": compiled(rows.centre_rows, tile | {"PLACED": True}, **CENTRED),
        **{
            f"nearest_again, {name}": compiled(
                rows.nearest_again,
                {"MASKED": name == "masked", "R": 4, "C": 64, "K": 32},
                **AGAIN | {"share": "i32"},
            )
            for name in ("masked", "whole")
        },
        "merge_again": compiled(
            rows.merge_again, {"P": 512}, distances="*fp64", indices="*i64", settled="*i1", **AGAIN
        ),
        "warm_codes": compiled(visits.warm_codes, visit, settled="fp32"),
        "half_step": compiled(visits.half_step, visit | {"S": 4}, **flags | doubles),
        "half_step of 64": compiled(visits.half_step, visit | {"S": 4, "K": 64, "P": 64}, 8, **flags | doubles),
        "add_up": compiled(visits.add_up, {"K": 16, "P": 16, "B": visits.ADDED}, width="i32", **flags | doubles),
        **{
            f"account of {rank}": compiled(
                codes.account,
                {"K": rank, "P": rank, "W": codes.ENTRIES // rank, **PACE},
                8,
                **wide(codes.account) | flags | {"met": "*fp64", "tolerance": "fp64"},
            )
            for rank in (16, 64)
        },
        **{
            f"in_halves, {side}": compiled(
                controls.in_halves,
                {"LEFT": side == "left", "R": controls.ROWS, "B": controls.COLUMNS},
                **{"source": source, "factors": "*fp64", "out": "*fp16", "each": "i32"},
            )
            for side, source in (("left", "*fp32"), ("right", "*fp64"))
        },
        "rounds": compiled(codes.rounds, {"K": 64, "P": 64, "S": 4, "B": 32}, **flags),
        "inverses": compiled(codes.inverses, {"K": 16, "P": 16}, second="*fp64", out="*fp64", limit="fp64", **flags),
        "three_least_of_tiles": product(SHAPES[0], 90),
        "rows_in_doubt": compiled(nearest.rows_in_doubt, {"B": 1024}, 8, settled="*i1", **DOUBT),
        "nearest_of_rows": compiled(
            nearest.nearest_of_rows,
            {"D": 2048, "T": 16, "R": 32, "C": 128, "K": 64, "SUM": 512},
            rows="*fp16",
            back="*i64",
            places="*i32",
            share="i32",
            **DOUBT,
        ),
        "factor_bands": compiled(solves.factor_bands, BAND | {"WIDE": False}, 1, **BANDS),
        "factor_bands, wide": compiled(solves.factor_bands, BAND | {"WIDE": True}, 1, **BANDS | {"out": "*fp64"}),
        "sum_band_forms": compiled(solves.sum_band_forms, BAND | {"R": 128}, 8, **BANDS),
        "solve_bands": compiled(solves.solve_bands, BAND, factors="*fp64", vectors="*fp64", times="i32"),
        "keep_least": compiled(nearest.keep_least, lists, groups="*i32"),
        **{
            f"measure_nearest, {name}": compiled(
                nearest.measure_nearest,
                {"LISTED": name == "listed", "S": shares, "R": 1, "T": 16 * shares, "K": 256},
                1,
                order="*i64",
                places="*i32",
                distances="*fp64",
                indices="*i64",
                settled="*i1",
                **DOUBT | BOUNDS | dict.fromkeys(("wide", "k"), "i32"),
            )
            for name, shares in (("listed", 16), ("all", 1))
        },
    }
    found |= {kernel.__name__: compiled(kernel, sizes, **wide(kernel)) for kernel, sizes in TRIDIAGONAL.items()}
    sizes = TRIDIAGONAL[band.factor_panel] | {"R": 256}
    found["factor_panel of 256"] = compiled(band.factor_panel, sizes, 8, **wide(band.factor_panel))
    found["chase"] = compiled(chase.chase, {"B": chase.BAND, "R": 8, "C": 4}, 1, **wide(chase.chase))
    products = {kind: product(SHAPES[0], kind) for kind in (80, 89)}  # what is tried first where nothing is known
    print(json.dumps({"shared": found, "products": products, "forgotten": sorted(kernels() - BUILT)}))


if __name__ == "__main__":
    main()
