"""Broken variants of the source that the suite must catch: `make mutants`.

Each mutant is one realistic mistake: a wrong factor, a lost term, a swapped convention, a bound that does not hold.
It is applied to a copy of the source, the tests named beside it run against that copy, and they must fail. A mutant
that survives means that some sentence about the software is not held by any test.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
ORACLES, TRUTHS, HOSTILE = "tests/test_oracles.py", "tests/test_truths.py", "tests/test_hostile.py"
STATES, INVARIANCES, INPUTS = "tests/test_states.py", "tests/test_invariances.py", "tests/test_inputs.py"
COVER = "tests/test_calibration.py"
SEMINMF = "tests/test_seminmf.py"


@dataclass(frozen=True)
class Mutant:
    """One mistake: in ``file``, ``old`` becomes ``new``; ``tests`` are what should notice."""

    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    only: str = ""


A, D, N = "measures/anisotropy.py", "measures/dimension.py", "measures/search.py"
U, C, P, B = "measures/uncertainty.py", "measures/curvature.py", "measures/paths.py", "measures/base.py"
ENERGY, CROSSED, TANGENTS = "tests/test_energy.py", "tests/test_crossed.py", "tests/test_tangents.py"
DRAWN, CONTROLS, KERNEL_CONTROLS = "tests/test_drawn.py", "tests/test_controls.py", "tests/test_stacked_controls.py"
PROFILE, SWEEP, STORE = "tests/test_profile.py", "tests/test_sweep.py", "tests/test_store.py"
TERMS, ZIPF, PROBES = "tests/test_regularizers.py", "tests/test_interventions.py", "tests/test_quality.py"
THEORY, RECOVERY, PAIRS = "tests/test_theory.py", "tests/test_theory_recovery.py", "tests/test_quality_report.py"
CAUSAL, KERNELS, STACKED = "tests/test_causal_report.py", "tests/test_kernels.py", "tests/test_stacked.py"
LEADING, TRIDIAGONAL, BANDED = "tests/test_leading.py", "tests/test_tridiagonal.py", "tests/test_banded.py"
CHASED = "tests/test_chased.py"
JACOBI, GRAMS = "tests/test_small_eigh.py", "tests/test_grams.py"
WAITS, TYPES = "tests/test_waits.py", "tests/test_type_kernel.py"
SHARING, BANDS = "tests/test_stacked_sharing.py", "tests/test_band_forms.py"
RESIDUES, INTEGERS = "tests/test_residues.py", "tests/test_integers.py"
SHAPES, LOADING, KEPT = "tests/test_figures.py", "tests/test_models_load.py", "tests/test_shares.py"
CORPUS, BESIDE = "tests/test_text_corpus.py", "tests/test_beside.py"
CUTS = "tests/test_shapes.py"
CODED, ALL = "measures/integers.py", "measures/all_pairs.py"
MUTANTS = [
    Mutant(A, "value = lead.first / lead.total", "value = (lead.first / lead.total) ** 0.5", (ORACLES,)),
    Mutant(A, "(float(total @ total) - n) / (n * (n - 1))", "float(total @ total) / n**2", (ORACLES,)),
    Mutant(A, "(n * n - 3 * n + 1)", "(n * n - 3 * n + 2)", (ORACLES,)),
    Mutant(A, "float(moments.fourth / unit**2) / (n - 1)", "float(moments.fourth / unit**2) / n", (ORACLES,)),
    Mutant(A, "    sigma = scaled.values.sqrt()", "    sigma = scaled.values", (ORACLES,)),
    Mutant(A, "value=(ratio.value - 1) * scale", "value=ratio.value / work.moments.width", (ORACLES,)),
    Mutant(A, "zeta * trace / width * torch.eye", "zeta * torch.eye", (COVER, TRUTHS), "isoscore_star"),
    Mutant(A, "(1 - keep**2) * square / width", "zeta**2 * square / width", (ORACLES,)),
    Mutant(A, "bar.scaled(value**2)", "bar.scaled(value)", (COVER,), "stable_rank"),
    Mutant("measures/bars.py", "TOLERATED_BIAS = 0.25", "TOLERATED_BIAS = 1e9", (COVER,), "biased_settings"),
    Mutant("measures/bars.py", "rest = share * (2 * value / n) ** 2", "rest = 0.0", (COVER,), "white"),
    Mutant(A, "degenerate = 2 * _variance_of_pairs(", "degenerate = 0 * _variance_of_pairs(", (COVER,), "isotropic"),
    Mutant("measures/spectrum.py", "* GRAM_LIMIT:", "* -1.0:", (HOSTILE,)),
    Mutant("measures/spectrum.py", "own @ right.T], dim=1)", "own], dim=1)", (HOSTILE,), "TestSpectra"),
    Mutant(
        "measures/spectrum.py",
        "again < values[0] * RESOLVED**2",
        "again < values[0] * SMALL",
        (HOSTILE,),
        "TestSpectra",
    ),
    Mutant("measures/spectrum.py", "and MOST_SMALL * small <= width", "and small < 0", (HOSTILE,), "TestSpectra"),
    Mutant("measures/spectrum.py", "/ (moments.count - 1)", "/ moments.count", (HOSTILE,), "TestSpectra"),
    Mutant("measures/spectrum.py", "sigma.square() / (n - 1)", "sigma.square() / n", (ORACLES, TRUTHS, HOSTILE)),
    Mutant("measures/partition.py", "(-along).logsumexp(dim=0)", "along.logsumexp(dim=0)", (ORACLES,)),
    Mutant("measures/partition.py", "along.logsumexp(dim=0), ", "along.exp().sum(dim=0).log(), ", (HOSTILE,)),
    Mutant("stats/moments.py", "self.count * other.count / count)", "self.count * other.count / count**2)", (STATES,)),
    Mutant("stats/moments.py", "+ 4 * (self.third @ d)", "- 4 * (self.third @ d)", (STATES,)),
    Mutant("stats/moments.py", ".sub_(rough.double())", ".sub_(0 * rough.double())", (STATES, HOSTILE)),
    Mutant("stats/moments.py", "alpha=-n)", "alpha=0)", (STATES, HOSTILE)),
    Mutant("stats/moments.py", "whole = count - count % BLOCK_ROWS if", "whole = count // 2 if", (STATES,), "one_step"),
    Mutant("stats/moments.py", "act(*(one[whole:] for one in tensors)).double()", "0.0", (STATES,), "one_step"),
    Mutant("stats/memory.py", "block * (1 if device", "block * (2 if device", (STATES,), "a_step"),
    Mutant("stats/moments.py", "if not parted and multiplies", "if multiplies", (STATES,), "as_fast"),
    Mutant("stats/precision.py", "not in ((8, 0), (9, 0))", "< (8, 0)", (STATES,), "as_fast"),
    Mutant("stats/precision.py", 'not {"H20", "H800"} &', 'not {"H20"} &', (STATES,), "as_fast"),
    Mutant(
        "views/interactive.py", "        begin_packing.cache_clear()  #", "        pass  #", ("tests/test_report.py",)
    ),
    Mutant("views/interactive.py", "after_in_child=begin_packing", "before=begin_packing", ("tests/test_report.py",)),
    Mutant("stats/turns.py", "return not bool(short.any()) or not bool(steps[short].any())", "return True", (HOSTILE,)),
    Mutant(
        "stats/reservoir.py", "capacity - 1)[capacity - 1]", "capacity - 2)[capacity - 2]", ("tests/test_reservoir.py",)
    ),
    Mutant(N, "strip.add_(size[at:end, None])", "strip.add_(2 * size[at:end, None])", (ORACLES, HOSTILE)),
    Mutant(
        "measures/bars.py",
        "torch.mm(part, axes, out=out).square_()",
        "torch.mm(part, axes, out=out).abs_()",
        (COVER,),
        "effective_rank",
    ),
    Mutant("stats/directions.py", "return not (float(low) < small or float(high) > large)", "return True", (HOSTILE,)),
    Mutant("stats/turns.py", "torch.rad2deg(angle.double())", "(180 - torch.rad2deg(angle.double()))", (ORACLES,)),
    Mutant("stats/turns.py", "keep[:, :-2] & keep[:, 1:-1] & ", "keep[:, :-2] & ", (INVARIANCES, INPUTS, ORACLES)),
    Mutant(
        "stats/turns.py",
        "torch.cat([self.tail, paths], dim=1)",
        "torch.cat([paths[:, :0], paths], dim=1)",
        (INPUTS, ORACLES),
    ),
    Mutant("stats/reservoir.py", "[: self.capacity]\n        after", "[-self.capacity :]\n        after", (STATES,)),
    Mutant("stats/sketch.py", "shrinkage=self.shrinkage + delta)", "shrinkage=self.shrinkage)", (STATES,)),
    Mutant(
        "rows.py",
        "return flat if self.keep is None else flat[self.keep.reshape(-1)]",
        "return flat",
        (INVARIANCES, INPUTS),
    ),
    Mutant("rows.py", "                _check_finite(chunk)\n", "", (HOSTILE,)),
    Mutant(D, "FACCO_KEPT = 0.9 ", "FACCO_KEPT = 0.95 ", (ORACLES,)),
    Mutant(D, "torch.arange(1, int(FACCO_KEPT * n) + 1,", "torch.arange(0, int(FACCO_KEPT * n),", (ORACLES,)),
    Mutant(D, "torch.arange(1 + left_out, 1 + left_out + kept,", "torch.arange(1, 1 + kept,", (ORACLES, TRUTHS)),
    Mutant(D, "return (len(ratios) - 1) / total", "return len(ratios) / total", (ORACLES,)),
    Mutant(D, "logs[:, : k - 1].mean(dim=1)", "logs[:, :k].mean(dim=1)", (ORACLES,)),
    Mutant(D, "- (2 * n - 1) * total", "- 2 * n * total", (ORACLES,)),
    Mutant(N, "<= own[:, None], torch.inf", "< own[:, None], torch.inf", (ORACLES,)),
    Mutant(
        N,
        "for column in range(start, n, TILE_COLUMNS)",
        "for column in range(start + TILE_ROWS, n, TILE_COLUMNS)",
        (ORACLES,),
    ),
    Mutant(N, "self.allowance = 4 * (axes + 16) * FLOAT32_UNIT", "self.allowance = -1e-2", (ORACLES,)),
    Mutant(
        "measures/plan.py",
        "torch.linalg.vector_norm(centred.sub_(lead @ basis.T), dim=1)",
        "2 * torch.linalg.vector_norm(centred.sub_(lead @ basis.T), dim=1)",
        (ORACLES,),
    ),
    Mutant(N, ".copy_(one[: len(a)])", ".copy_(one[: len(a)].half())", (ORACLES,)),
    Mutant(N, "            j.append(rows[a])", "            j.append(rows[a].roll(1))", (ORACLES,)),
    Mutant(B, "(part + 0.0).contiguous()", "part.contiguous()", (HOSTILE,)),
    Mutant(B, "is_copy[order[suspects + 1]] = True", "is_copy[order[suspects]] = True", (HOSTILE, INPUTS, ORACLES)),
    Mutant(U, "/ count * (influence.numel() / self.n)", "/ count", (ORACLES,)),
    Mutant(U, "math.sqrt(length / n)", "1.0", (COVER,), "two_nn"),
    Mutant(U, "/ math.sqrt(len(values))", "/ len(values)", (COVER,), "curvature"),
    Mutant("estimate.py", "else stdtrit(self.dof, tail)", "else ndtri(tail)", (ORACLES,)),
    Mutant(
        C, "torch.where(square, 4.0, 2.0)", "torch.where(square, 1.0, 2.0)", (TRUTHS,), "curvature or circle or sphere"
    ),
    Mutant(C, "form2 = form2 - noise *", "form2 = form2 - 0 * noise *", (TRUTHS, ORACLES)),
    Mutant(C, "scale = radius.reshape(-1) ** -4", "scale = radius.reshape(-1) ** -2", (TRUTHS,)),
    Mutant(P, "(n - 1) / (n - 1 - rank)", "(n - 1) / (n - rank)", (ORACLES,)),
    Mutant(P, "float(s.sum()) ** 2 / (size * total)", "float(s.square().sum()) / (size * total)", (ORACLES,)),
    Mutant(
        "measures/local.py",
        "(values >= FUKUNAGA_OLSEN * values[:, :1])",
        "(values >= FUKUNAGA_OLSEN)",
        (ORACLES, INVARIANCES),
    ),
    Mutant(
        "measures/frames.py",
        "unit.double().square() / (members - 1)",
        "unit.double().square() / members",
        (ORACLES,),
    ),
    Mutant(N, "difference -= self.rows[i].double()[:, None]", "difference -= self.rows[i].half()[:, None]", (ORACLES,)),
    Mutant(N, "return part[value[:, -1] < self._limit(part)]", "return part[:0]", (ORACLES, HOSTILE)),
    Mutant(N, "bound.scatter_(1, part[:, None], torch.inf)", "pass", (ORACLES,)),
    Mutant(N, "(limit * (1 + 2.0**-22)).float() + 1e-36", "(limit * (1 + 2.0**-22)).float()", (HOSTILE,)),
    Mutant(N, "d2 < 1e-7 * (size", "d2 < 0 * (size", (HOSTILE, ORACLES, INPUTS)),
    Mutant("measures/frames.py", "gram -= gram.mean(dim=2, keepdim=True)", "pass", (ORACLES,)),
    Mutant("stats/directions.py", "here.reciprocal()", "here.reciprocal().square_()", (ORACLES,)),
    Mutant("slices.py", "MASSIVE = 100.0", "MASSIVE = 1e9", (PROFILE,)),
    Mutant("slices.py", "if where == ALL:", "if where != ALL:", (PROFILE,)),
    Mutant("profiling.py", "chosen_rows(in_order, rest)", "in_order", (PROFILE,)),
    Mutant("profiling.py", "/ len(found) if len(bars)", "if len(bars)", (PROFILE,)),
    Mutant("sampling.py", "mask = measured_mask(batch)", "mask = batch.mask", (PROFILE,)),
    Mutant("profiling.py", "statistics.stdev(values)", "statistics.pstdev(values)", (PROFILE,)),
    Mutant("sweep.py", "if (cell.name, cell.step) not in done", "if True", (SWEEP,)),
    Mutant("sweep.py", "            _same_recipe(folder, recipe)", "            pass", (SWEEP,)),
    Mutant("runs/reader.py", "ORDER BY parts.id", "ORDER BY parts.path DESC", (STORE,)),
    Mutant("capture/rows.py", "batch.mask & ~batch.special", "batch.mask", ("tests/test_capture_rows.py",)),
    Mutant("tangent/units.py", "return (1 + int(", "return (int(", (ENERGY,)),
    Mutant("tangent/crossed.py", "np.maximum(bottom - top, 0)", "bottom", (CROSSED,)),
    Mutant("tangent/crossed.py", "bases[name][1 - half]", "bases[name][half]", (CROSSED,)),
    Mutant(
        "tangent/crossed.py", "mean_of_draws(normals[0], normals[1]", "mean_of_draws(normals[0], normals[0]", (CROSSED,)
    ),
    Mutant("tangent/nulls.py", "draws, seed, rows))", "draws, 2 * seed + other, rows))", (CROSSED,)),
    Mutant("tangent/units.py", "away = each - mean", "away = as_array(one) - mean", (CROSSED,)),
    Mutant("tangent/controls.py", "found[..., : q.shape[-1], :] = left * root", "pass", (CONTROLS,)),
    Mutant(
        "tangent/controls.py",
        "columns = mirror @ (-mirror[k:].T @ few)",
        "columns = mirror @ (-mirror[k:].T @ few) / 2",
        (CONTROLS,),
    ),
    Mutant(
        "tangent/controls.py",
        "orthonormal(bases.double()), bases.shape[2]",
        "bases.double(), bases.shape[2]",
        (CONTROLS,),
    ),
    Mutant("tangent/drawn.py", "- 2 * (mixer * across)", "- (mixer * across)", (ENERGY,)),
    Mutant("tangent/drawn.py", "self.inner + _own(self.head)", "self.inner", (DRAWN,)),
    Mutant("tangent/drawn.py", "at.stop - at.start :] *= 2", "at.stop - at.start :] *= 1", (DRAWN,)),
    Mutant("tangent/drawn.py", "held - mirror @ (mirror.mT @ held) / 2\n        one", "held\n        one", (DRAWN,)),
    Mutant(
        "tangent/drawn.py",
        "(width, *head.shape[:2], whole, self.seed, tail.dtype)",
        "(width, *head.shape[:2], whole, 0, tail.dtype)",
        (DRAWN,),
    ),
    Mutant("tangent/drawn.py", "return 3 * rank > width", "return False", (ENERGY,)),
    Mutant("tangent/drawn.py", "part = form / 2 - c.mT @ across", "part = form / 2 - c.mT @ across / 2", (DRAWN,)),
    Mutant("tangent/drawn.py", "not few and bases * REFLECTED * rank + reading < draws * rank", "not few", (DRAWN,)),
    Mutant("tangent/anisotropy.py", "- 2 * second + both, whole)", "- 2 * second, whole)", (ENERGY,)),
    Mutant("tangent/energy.py", ".clamp_min(0) * (k / (d - k))", ".clamp_min(0) * (k / d)", (ENERGY, CROSSED)),
    Mutant("tangent/nulls.py", "left_top = top - 2 *", "left_top = top - 1 *", (ENERGY,)),
    Mutant("tangent/nulls.py", "+ (both - own) *", "+ 0 * (both - own) *", (TANGENTS,)),
    Mutant("tangent/verify.py", "steps.flip(0).cummin(dim=0).values.flip(0)", "steps", ("tests/test_verify.py",)),
    Mutant("tangent/anisotropy.py", "- 2 * image.square()", "- image.square()", (ENERGY,)),
    Mutant("tangent/frequency.py", "(of_type / (of_type - 1)).sqrt()", "1.0", ("tests/test_tangent_frequency.py",)),
    Mutant("tangent/descending.py", "concepts, beta=-2)", "concepts, beta=-1)", (SEMINMF,), "is_that_of"),
    Mutant("tangent/descent.py", "axes = vectors.div_(column)", "axes = vectors", (SEMINMF,), "normal_equations"),
    Mutant("rows.py", " or bool(torch.isfinite(numbers).all())", "", (INPUTS,), "overflows"),
    Mutant("tangent/descent.py", "            relu_(codes)\n", "            pass\n", ("tests/test_seminmf.py",)),
    Mutant("train/regularizers.py", "1 - (total**2 / size - 1) / (d - 1)", "(total**2 / size - 1) / (d - 1)", (TERMS,)),
    Mutant("train/regularizers.py", " & kept[:, 1:-1] & kept[:, 2:]", " & kept[:, 1:-1]", (TERMS,), "padding"),
    Mutant("train/damping.py", "normal * wide + (tangent - normal)", "tangent * wide + (normal - tangent)", (TERMS,)),
    Mutant("train/local_fits.py", " @ grads[0]) / gaps)", " @ grads[0]) * gaps)", (TERMS,), "gradients_are"),
    Mutant(
        "train/penalised.py", "torch.stack(terms).mean() / parts", "torch.stack(terms).mean()", (TERMS,), "accumulation"
    ),
    Mutant(
        "train/loop.py",
        "            self.regularized.restore(self.folder, self.step, self.device)",
        "            pass",
        (TERMS,),
        "stopped",
    ),
    Mutant("train/interventions.py", " - (torch.logsumexp(power * f, 0) - total.log()))", ")", (ZIPF,)),
    Mutant(
        "train/interventions.py",
        "p = p[torch.from_numpy(np.random.default_rng([DEALT]).permutation(len(p)))]",
        "pass",
        (ZIPF,),
    ),
    Mutant("train/interventions.py", "        if self.law is not None:", "        if False:", (ZIPF,)),
    Mutant(
        "train/interventions.py",
        "np.minimum(drawn, len(order) - 1)[order]",
        "np.minimum(drawn, len(order) - 1)",
        (ZIPF,),
    ),
    Mutant("watching/binned.py", "ids[:, 1:], NOT_SCORED)", "ids[:, :-1], NOT_SCORED)", (ZIPF,), "losses_by"),
    Mutant("monitoring/linear_probes.py", "rest = quarter % 2 != half", "rest = quarter % 2 == half", (PROBES,)),
    Mutant(
        "monitoring/quality.py",
        "torch.unique(ids, dim=0, return_inverse=True)[1])",
        "torch.arange(len(ids)))",
        (PROBES,),
    ),
    Mutant("views/associations.py", "(without_course(np.diff(x, axis=1)) for", "(np.diff(x, axis=1) for", (PAIRS,)),
    Mutant("views/associations.py", "        found[at] = least\n", "        found[at] = ps[at]\n", (PAIRS,)),
    Mutant(
        "views/causal.py",
        "* table[seed] for x, table in tables)",
        "* table[seeds[(i + seeds.index(seed)) % len(seeds)]] for i, (x, table) in enumerate(tables))",
        (CAUSAL,),
        "straight_line",
    ),
    Mutant("theory/chords.py", "by_arc, -(kappa**2) / 12)", "by_arc, kappa**2 / 12)", (THEORY,), "chords"),
    Mutant("theory/chords.py", "by_arc = limit(near, -lack", "by_arc = limit(near, lack", (THEORY,), "chords"),
    Mutant("theory/visible.py", "(away - along @ tangent.T)", "away", (THEORY,), "visible"),
    Mutant("theory/recovery_laws.py", "(2 * d + 8) * size2", "(2 * d + 4) * size2", (RECOVERY,), "moments or little"),
    Mutant("measures/row_kernels.py", "1 - 2.0**-20 - CUT_OFF * one", "1.0 - one * 0", (KERNELS,), "half_precision"),
    Mutant("kernels/nearest.py", "- 2 * (floor + share * length)", "", (KERNELS,), "neighbours"),
    Mutant(
        "kernels/nearest.py", "total += tl.sum(doubt, axis=0)", "total = tl.sum(doubt, axis=0)", (KERNELS,), "again"
    ),
    Mutant("kernels/nearest.py", "(others >= limit) | (limit <= 0)", "(others < limit) | True", (KERNELS,), "again"),
    Mutant("kernels/nearest.py", "tl.minimum(out, tl.min(new, axis=0))", "out", (KERNELS,), "neighbours or again"),
    Mutant("kernels/nearest.py", "(slots < k)[None, :]", "(slots < 1)[None, :]", (KERNELS,), "neighbours or again"),
    Mutant("kernels/nearest.py", "mine[None, :] == c[:, None]", "mine[None, :] < 0", (KERNELS,), "again"),
    Mutant("kernels/nearest.py", "whole += total", "whole = total", (KERNELS,), "again"),
    Mutant("kernels/rows.py", "((others >= second) | (second <= 0))", "(second > 0)", (KERNELS,), "within"),
    Mutant("kernels/rows.py", "out = tl.minimum(out, tl.min(bound, axis=1))", "pass", (KERNELS,), "within"),
    Mutant("kernels/rows.py", "(slots // 3)[None, :] + groups *", "(slots // 3)[None, :] +", (KERNELS,), "within"),
    Mutant(
        "kernels/rows.py",
        "end = tl.minimum((part + 1) * share, n)\n    rows +=",
        "end = (part + 1) * share\n    rows +=",
        (KERNELS,),
        "visits",
    ),
    Mutant("kernels/rows.py", "sums += one * tl.load(right", "sums += tl.load(right", (KERNELS,), "visits"),
    Mutant("measures/stacked_sums.py", "torch.maximum(sums.most, -sums.least)", "sums.most", (KERNELS,), "visits"),
    Mutant("measures/banded.py", "(small.mT @ vectors)", "(small @ vectors)", (BANDED,), "plain"),
    Mutant("kernels/rows.py", "tl.where(values == 0.0, 0.0, values)", "values", (KERNELS,), "copies"),
    Mutant(
        "kernels/rows.py",
        "tl.minimum(after, tl.maximum(best, apart))",
        "tl.minimum(after, apart)",
        (KERNELS,),
        "within",
    ),
    Mutant("kernels/visits.py", "row = tl.where(p == k, 0.0, row)", "row = row", (KERNELS,), "visit"),
    Mutant("kernels/visits.py", "tl.where((gain > 0)[None, :], z, 0.0)", "z * 0.0", (KERNELS,), "visit"),
    Mutant(
        "measures/neighbors_fused.py",
        'size[:, : rows.shape[1]].masked_fill_(left_out[:, ready.order], kernels_of("nearest").FAR / 4)',
        "pass",
        (KERNELS,),
        "marked",
    ),
    Mutant("measures/leading.py", "DEGREES = (2, 4, 16)", "DEGREES = (16, 16, 16)", (LEADING,)),
    Mutant("measures/leading.py", "ritz.values - lowest, 0.0)", "ritz.values * 0, 0.0)", (LEADING,)),
    Mutant("measures/leading.py", "FRESH = 4", "FRESH = 0", (LEADING,)),
    Mutant("tangent/stacked_controls.py", "c[:, -1] = -drawn.head.mT", "c[:, -1] = drawn.head.mT", (KERNEL_CONTROLS,)),
    Mutant("tangent/stacked_controls.py", "beta=1.5, alpha=-0.5", "beta=1.0, alpha=0.0", (KERNEL_CONTROLS,)),
    Mutant(
        "tangent/stacked_controls.py",
        "cosines > LEAST_COSINE, cosines, torch.nan",
        "cosines > 0, cosines, 1.0",
        (KERNEL_CONTROLS,),
    ),
    Mutant("tangent/stacked_controls.py", "left = _orthonormal(left)", "pass", (KERNEL_CONTROLS,)),
    Mutant("tangent/wide_controls.py", "BITS - torch.frexp", "40 - torch.frexp", (KERNEL_CONTROLS,)),
    Mutant("tangent/wide_controls.py", "1.0 if i == j else 2.0", "2.0", (KERNEL_CONTROLS,)),
    Mutant(
        "tangent/wide_controls.py", "factors[at : at + step] * DRAW_SIZE", "factors * DRAW_SIZE", (KERNEL_CONTROLS,)
    ),
    Mutant(
        "tangent/wide_controls.py", "weights, sums, at, len(some)", "weights, sums, 0, len(some)", (KERNEL_CONTROLS,)
    ),
    Mutant(
        "kernels/projected.py",
        "rest = tl.dot(a, tl.load(right + right_low",
        "_ = tl.dot(a, tl.load(right + right_low",
        (KERNEL_CONTROLS,),
    ),
    Mutant("kernels/projected.py", "b % draws * K", "b % 2 * K", (KERNEL_CONTROLS,)),
    Mutant("kernels/projected.py", "square / size / size", "square / size", (KERNEL_CONTROLS,)),
    Mutant("kernels/controls.py", "tl.where(p == bases, draws, 0)", "0", (KERNEL_CONTROLS,)),
    Mutant("tangent/stacked_controls.py", "moments.n.contiguous()", "moments.n", (KERNEL_CONTROLS,)),
    Mutant("kernels/forms.py", "for i in range(0, j + C, K)", "for i in range(0, j, K)", (KERNELS,), "taken"),
    Mutant(
        "measures/row_kernels.py", "of_matrices[:, None] / 2, out", "of_matrices[:, None], out", (KERNELS,), "taken"
    ),
    Mutant("monitoring/tangents_together.py", "bases.flip(2).permute(", "bases.permute(", (STACKED,)),
    Mutant("tangent/stacked_types.py", "torch.where(unit > 0, spread, torch.nan)", "spread", (TYPES,)),
    Mutant("tangent/stacked_types.py", "spread.masked_fill_(alike.mT, torch.nan)", "spread", (TYPES,)),
    Mutant("kernels/controls.py", "tl.store(place, high if LEFT else low", "tl.store(place, high", (KERNEL_CONTROLS,)),
    Mutant("kernels/visits.py", "if left > 2:", "if True:", (KERNELS,), "half_steps"),
    Mutant(
        "kernels/visits.py",
        "tl.maximum(z + share * (z - before), 0.0)",
        "z + share * (z - before)",
        (KERNELS,),
        "half_s",
    ),
    Mutant("kernels/visits.py", "range(tl.where(redo, 0, S))", "range(S)", (KERNELS,), "half_steps"),
    Mutant("kernels/visits.py", "reach / scale.to(tl.float64)", "reach", (KERNELS,), "half_steps"),
    Mutant("kernels/visits.py", "_added(own, own_sum", "_added(second, own_sum", (KERNELS,), "half_steps"),
    Mutant("tangent/descending.py", "SURE if momentum <= MOMENTUM else 0.0", "SURE", (SEMINMF,), "momentum"),
    Mutant("kernels/codes.py", "back = went & (now > most)", "back = went & (now > before)", (KERNELS,), "account"),
    Mutant("kernels/codes.py", "tl.store(fresh_gram + places, former, mask=inside)", "pass", (KERNELS,), "account"),
    Mutant("kernels/codes.py", "tl.where(back, speed / SHRINK, faster)", "faster", (KERNELS,), "account"),
    Mutant("kernels/codes.py", "tl.maximum(SURE * value, 1.0)", "1.0", (KERNELS,), "account"),
    Mutant(
        "kernels/codes.py",
        "((before - now > least) | back) & fine",
        "(before - now > least) & fine",
        (KERNELS,),
        "plain_p",
    ),
    Mutant("tangent/visits.py", "stays = back | ~active", "stays = ~active", (SEMINMF,), "many_fits"),
    Mutant("tangent/visits.py", "now > torch.minimum(reached, before)", "now > before", (SEMINMF,), "together"),
    Mutant("tangent/visits.py", "(sure * worth).clamp_min(1.0)", "1.0", (SEMINMF,), "plateau"),
    Mutant(
        "tangent/visits.py",
        "book.copy_(torch.where(active, entry, book))",
        "book.copy_(entry)",
        (SEMINMF,),
        "many_fits",
    ),
    Mutant(
        "tangent/stacked_fits.py",
        "torch.where(books.again[:, None, None], last, codes), books",
        "codes, books",
        (SEMINMF,),
        "many_fits",
    ),
    Mutant("tangent/stacked_fits.py", "books.active & ~books.again)", "books.active)", (SEMINMF,), "together"),
    Mutant("tangent/descending.py", "z, worth = last, 1.0", "z = last", (SEMINMF,), "together"),
    Mutant("tangent/seminmf.py", "of_plain=concepts is not None", "of_plain=False", (SEMINMF,), "together"),
    Mutant(
        "tangent/seminmf.py", "few is not None or concepts is not None", "few is not None", (SEMINMF,), "earlier_fit"
    ),
    Mutant("tangent/stacked_fits.py", "rows[:, half, len(at) :] = 0", "pass", (STACKED,)),
    Mutant("measures/leading.py", "self.earlier[:, :rank].sum(dim=1) <=", "captured <=", (LEADING,)),
    Mutant("measures/banded.py", "vectors, alpha=-0.5", "vectors, alpha=-0.4", (BANDED,)),
    Mutant("stats/gram_matrices.py", "exponent.clamp_min(15) - 14", "exponent.clamp_min(15) - 10", (GRAMS,)),
    Mutant("kernels/types.py", "tl.sqrt(size / (size - 1))", "1.0", (TYPES,)),
    Mutant("tangent/stacked.py", "bases.flip(2).unbind(dim=2)", "bases.unbind(dim=2)", (STACKED,)),
    Mutant("tangent/stacked.py", "vars(both[sites:])", "vars(both[:sites])", (STACKED,)),
    Mutant("tangent/stacked.py", "layout.counts[half].expand(sites)", "layout.counts[0].expand(sites)", (STACKED,)),
    Mutant("tangent/stacked.py", "_mean_and_sd((one + two) / 2)", "_mean_and_sd(one)", (STACKED,)),
    Mutant("tangent/stacked_controls.py", "- 2 * second + both", "- second + both", (STACKED,)),
    Mutant("tangent/stacked_controls.py", "form[:, 0] - n * along", "form[:, 0] - along", (STACKED,)),
    Mutant(
        "monitoring/looks.py", "held.loss is loss and _same(held.batches, batches)", "True", ("tests/test_monitor.py",)
    ),
    Mutant("stats/gram_matrices.py", ".add_(across).add_(across.T)", ".add_(across)", (STACKED,), "tensor_cores"),
    Mutant(
        "stats/gram_matrices.py",
        "            out[at:, at : at + strip] = part.T\n    return out.add_",
        "    return out.add_",
        (STACKED,),
        "tensor_cores",
    ),
    Mutant("measures/stacked.py", "flags.append(unseen <= LOST", "flags.append(unseen >= 0 * LOST", (STACKED,)),
    Mutant(
        "measures/stacked.py",
        "values *= values > values[:, :1] * GRAM_LIMIT",
        "values *= values > -1",
        (STACKED,),
    ),
    Mutant("measures/stacked.py", "torch.add(held.log(), inner, alpha=2)", "torch.add(held.log(), inner)", (STACKED,)),
    Mutant(
        "measures/stacked_spectra.py", "addcmul(a[:, None], b[:, None]", "addcmul(a[:, None], -b[:, None]", (STACKED,)
    ),
    Mutant("measures/stacked_spectra.py", "self.vectors[:, :, -1:]", "self.vectors[:, :, :1]", (STACKED,)),
    Mutant(
        "kernels/nearest.py",
        "others, length, site, worst, factor, floor)",
        "others, length, site, worst, factor, floor) * scale * scale",
        (KERNELS,),
        "units",
    ),
    Mutant("measures/tridiagonal.py", "STEP = 0.59", "STEP = 0.72", (TRIDIAGONAL,), "rational"),
    Mutant("measures/tridiagonal.py", "STEP = 0.59", "STEP = 0.1", (TRIDIAGONAL,), "rational"),
    Mutant("measures/tridiagonal.py", "MARGIN = 3.3", "MARGIN = 1.0", (TRIDIAGONAL,)),
    Mutant("kernels/band.py", "(j % 2) * (PP + 1) * K", "0", (BANDED,), "widths"),
    Mutant("kernels/band.py", "tl.where(k < j, along, 0.0)", "tl.where(k > j, along, 0.0)", (BANDED,)),
    Mutant("kernels/band.py", "tl.where(k > j, tau", "tl.where(k != j, tau", (BANDED,)),
    Mutant("kernels/band.py", "(i <= j) & (i < n)", "i < j", (BANDED,)),
    Mutant("kernels/meeting.py", "tl.where(alpha > 0, -size, size)", "size", (BANDED,)),
    Mutant("kernels/chase.py", "tl.minimum(step + 2, before)", "tl.minimum(step + 1, before)", (CHASED,), "share"),
    Mutant("kernels/chase.py", "(0.5 * tau * tau", "(0.5 * tau", (CHASED,), "spectrum"),
    Mutant("kernels/chase.py", "tl.where(step > 0, 0, (2 * B - 1) * (B - 1))", "0", (CHASED,), "spectrum"),
    Mutant("kernels/chase.py", "flat = tail <= TINY", "flat = tail < -1", (CHASED,), "spectrum"),
    Mutant("kernels/chase.py", "tl.cdiv(D - 1 - sweep, B)", "(D - 1 - sweep) // B", (CHASED,), "blocks"),
    Mutant("measures/row_kernels.py", "_built.add((rows.device, n, width))", "pass", (KERNELS,), "copies_are_marked"),
    Mutant("kernels/solves.py", "tl.where(pivot < small, small, pivot)", "pivot", (BANDS,), "kernels or pivot"),
    Mutant("kernels/solves.py", "- _times(m12, tl.trans(m12))", "", (BANDS,), "kernels"),
    Mutant("kernels/solves.py", "tl.where(j < D, shift, 1.0)", "0.0", (BANDS,), "kernels"),
    Mutant("kernels/solves.py", "_rounded((x - high.to(tl.float64)).to(tl.float32))", "0 * high", (BANDS,), "kernels"),
    Mutant("kernels/solves.py", "z - z_high, high, found", "0 * z, high, found", (BANDS,), "kernels"),
    Mutant("kernels/solves.py", "tl.maximum(k - 1, 0)", "tl.maximum(k - 2, 0)", (BANDS,), "kernels"),
    Mutant("measures/band_forms.py", "ABOVE = 64", "ABOVE = 0", (BANDS,), "kernels"),
    Mutant("kernels/factors.py", "(1 / tl.sqrt(pivots))", "pivots", (KERNELS,), "triangular"),
    Mutant("kernels/factors.py", "tl.where(pivot > limit, 1, 0)", "1", (KERNELS,), "triangular"),
    Mutant("kernels/factors.py", "tl.where(tl.load(lost + at), 0, sure)", "sure", (KERNELS,), "triangular"),
    Mutant("kernels/factors.py", "growth = (power + 1 / power) / 2", "growth = power", (KERNELS,), "triangular"),
    Mutant(
        "kernels/factors.py", "1, 0), axis=0)\n    captured", "1, 1), axis=0)\n    captured", (KERNELS,), "triangular"
    ),
    Mutant("kernels/jacobi.py", 'tl.where(finite, own * unit, float("nan"))', "own * unit", (JACOBI,), "not_finite"),
    Mutant(
        "kernels/jacobi.py",
        "a += 0.5 * tl.load(matrix + columns * K + rows",
        "a += 0.5 * tl.load(matrix + rows * K + columns",
        (JACOBI,),
        "one_side",
    ),
    Mutant(
        "measures/small_eigh.py", "torch.where(finite[:, None], values, torch.nan)", "values", (JACOBI,), "not_finite"
    ),
    Mutant(
        "measures/stacked_sums.py",
        "(count - 1, count + 1))[:, :, :-1]",
        "(count - 1, count + 1))",
        (STACKED,),
        "together",
    ),
    Mutant("measures/stacked.py", 'ratio[:, None] * here["radius means"]', "ratio[:, None]", (STACKED,), "together"),
    Mutant(
        "tangent/stacked_types.py",
        "torch.stack([weights, self.w",
        "torch.stack([self.weights[1], self.w",
        (STACKED,),
        "together",
    ),
    Mutant("tangent/stacked_types.py", "y - y @ counts.moments[:, 0, :, None]", "y", (TYPES,)),
    Mutant("tangent/stacked_fits.py", "1 - on.double()", "on.double()", (STACKED,), "together"),
    Mutant("kernels/jacobi.py", "0.5 + 0.375 * error", "0.5", (JACOBI,), "eigenpairs"),
    Mutant("kernels/jacobi.py", "swap = turns & (apart > 0)", "swap = turns & (apart < 0)", (JACOBI,), "eigenpairs"),
    Mutant("kernels/jacobi.py", "(other == own) & (columns < rows)", "other != other", (JACOBI,), "eigenpairs"),
    Mutant("kernels/pairs.py", "tl.where(i[:, None] == j[None, :], 2.0, 1.0)", "1.0", (KERNELS,), "biases"),
    Mutant("kernels/pairs.py", "tl.where(close, -0.25 / bend, first / apart)", "first / apart", (KERNELS,), "biases"),
    Mutant("kernels/grams.py", "(total - (both - back)) + (new - back)", "0.0 * back", (GRAMS,), "grow"),
    Mutant("kernels/grams.py", "rest = tl.dot(a1, b1, rest)", "rest = rest", (GRAMS,), "float64_says"),
    Mutant("kernels/grams.py", "tiles - 1 + tiles % 2 - line", "tiles - 1 - line", (GRAMS,), "float64_says"),
    Mutant("kernels/residues.py", "left + NEAREST", "left + 0.5 + NEAREST", (RESIDUES,), "integers"),
    Mutant(
        "kernels/residues.py",
        "        found = _from_zero(found, modulus)",
        "    found = _from_zero(found, modulus)",
        (RESIDUES,),
        "31_bits",
    ),
    Mutant("kernels/residues.py", "tl.where(x < 0, x + modulus, x)", "x", (RESIDUES,), "integers"),
    Mutant("stats/residues.py", "(1023 - 31)", "(1023 - 32)", (RESIDUES,), "integers"),
    Mutant("stats/residues.py", "torch.where(exponent < 2047, units, torch.nan)", "units", (RESIDUES,), "no_number"),
    Mutant(
        "stats/gram_matrices.py", "rows.dtype == torch.float32 and residues", "residues", (RESIDUES,), "must_be_exact"
    ),
    Mutant("kernels/controls.py", "inverses + (p * draws + b) * K * K", "inverses + b * K * K", (KERNEL_CONTROLS,)),
    Mutant("kernels/controls.py", "n = tl.load(numbers + s)", "n = tl.load(numbers)", (KERNEL_CONTROLS,)),
    Mutant("kernels/early.py", "if _begun or not torch", "if not torch", ("tests/test_early.py",)),
    Mutant(
        "monitoring/stacking.py",
        "        if not no_room(error):\n            raise",
        "        raise",
        (STACKED,),
        "room",
    ),
    Mutant("monitoring/untouched.py", "    gc.disable()", "    pass", ("tests/test_monitor.py",), "collected"),
    Mutant(
        "train/loop.py",
        "        self.optimiser.zero_grad(set_to_none=True)  # here",
        "        pass  # here",
        ("tests/test_train.py",),
    ),
    Mutant("monitoring/tangents.py", "view.step == self.steps", "view.step > self.steps", (TANGENTS,)),
    Mutant("monitoring/tangents.py", "sum(nulls) / 2", "sum(nulls)", (TANGENTS,)),
    Mutant(
        "monitoring/untouched.py", "            module.training = mode", "            pass", ("tests/test_monitor.py",)
    ),
    Mutant("monitoring/untouched.py", "        torch.set_rng_state(cpu)", "        pass", ("tests/test_monitor.py",)),
    Mutant(
        "models/llama2c.py",
        ".transpose(1, 2).reshape(rows, width)",
        ".reshape(rows, width)",
        ("tests/test_models_llama2c.py",),
    ),
    Mutant("monitoring/tangents_together.py", "    if None in scales:", "    if False:", (STACKED,)),
    Mutant(
        "monitoring/tangents_together.py", "        g *= sent(factors, g)", "        g = sent(factors, g)", (STACKED,)
    ),
    Mutant("monitoring/stacking.py", "        rows *= sent(", "        rows * sent(", (SHARING,)),
    Mutant(
        "monitoring/tangents_told.py",
        "            asked._keep(views[site], kind, pair)",
        "            pass",
        (STACKED,),
    ),
    Mutant(
        "monitoring/measuring.py",
        "        return partial(_at_each, views, error.with_traceback(None))",
        "        return None",
        ("tests/test_monitor.py", STACKED),
    ),
    Mutant("measures/leading.py", "ritz.values, 0, plan,", "ritz.values, 0, None,", (LEADING,)),
    Mutant("measures/leading.py", "CHANCE = 0.1 ", "CHANCE = 1e9 ", (LEADING,)),
    Mutant("measures/leading.py", "(FRESH if warm else 0)", "0", (LEADING,)),
    Mutant("measures/leading.py", "none_missing &= ~self.lost", "pass", (LEADING,)),
    Mutant("measures/leading.py", "ritz.values, lost=self.lost)", "ritz.values)", (LEADING,)),
    Mutant("kernels/factors.py", "tl.where(near, edge, K - 1)", "edge", (KERNELS,)),
    Mutant("kernels/factors.py", "(value > low * lowest) & there", "there", (KERNELS,)),
    Mutant("measures/later.py", "(at := at + math.prod(shape))", "(at := at + len(shape))", (STACKED,)),
    Mutant(
        "tangent/kmeans.py",
        "            marks[empty] = sample[far[: int(empty.sum())]]\n",
        "",
        ("tests/test_seminmf.py",),
    ),
    Mutant(
        "tangent/kmeans.py",
        "gap <= 16 * torch.finfo(rows.dtype).eps * (own[:, None] + size)",
        "gap <= 0 * own[:, None]",
        ("tests/test_seminmf.py",),
    ),
    Mutant("tangent/descending.py", "(second @ fresh - 2 * pull)", "(second @ fresh - pull)", (KERNELS,)),
    Mutant("tangent/stacked.py", "b @ right - a @ along", "b @ right - a @ right", (STACKED,)),
    Mutant("stats/gram_matrices.py", "        out[..., at:, at : at + strip] = part.mT", "        pass", (GRAMS,)),
    Mutant("measures/leading.py", "for degree in degrees[:least]", "for degree in degrees[1:least]", (LEADING,)),
    Mutant("tangent/stacked_fits.py", "wait = iteration % CHECK_EVERY == 0", "wait = False", (WAITS,)),
    Mutant("tangent/stacked_fits.py", "(wait or self.asked.there()) and not", "not", (WAITS,)),
    Mutant("monitoring/tangents_told.py", "ordinary = np.isfinite(drawn[1", "ordinary = np.isfinite(drawn[0", (WAITS,)),
    Mutant("monitoring/tangents_told.py", "[next(each) if good else None for", "[next(each, None) for", (WAITS,)),
    Mutant("kernels/rows.py", "(c[None, :] != here[:, None])", "(c[None, :] >= 0)", (STACKED,), "by_a_kernel"),
    Mutant(
        "kernels/rows.py",
        "near_at, tl.where(value < far, first + slot, far_at)",
        "near_at, far_at",
        (STACKED,),
        "by_a_kernel",
    ),
    Mutant("measures/neighbors_gpu.py", "settled | left_out[at]", "settled", (STACKED,), "by_a_kernel"),
    Mutant("kernels/rows.py", "site * count + tl.load(cell", "tl.load(cell", (KERNELS,), "visits"),
    Mutant("kernels/rows.py", "to = tl.load(place + at", "tl.load(place + at", (KERNELS,), "visits"),
    Mutant("measures/cells.py", "- begins[number] + number * max(counts)", "", (SHARING,)),
    Mutant("measures/stacked_sums.py", "    whole.baddbmm_(apart.mT, apart)", "    pass", (SHARING,)),
    Mutant("measures/stacked_sums.py", "cells.counts.sqrt()[:, None]", "1.0", (SHARING,)),
    Mutant(
        "measures/stacked_sums.py",
        "torch.sub(blocks, seen.mean[:, None, None], out=some)",
        "some.copy_(_runs(centred.rows))",
        (SHARING,),
    ),
    Mutant("measures/stacked_sums.py", "torch.maximum(seen.size, largest.float())", "seen.size", (KERNELS,), "visits"),
    Mutant("monitoring/tangents_together.py", "sums.by_cell.cells is not cells else", "False else", (SHARING,)),
    Mutant("monitoring/tangents_together.py", "by_half = by_half.of_sites(some)", "pass", (SHARING,)),
    Mutant(
        "monitoring/tangents_together.py",
        "0 < longest[place] < math.inf",
        "0 < longest[place] <= math.inf",
        (SHARING,),
    ),
    Mutant("monitoring/stacking.py", "min(-math.frexp(one)[1], MOST_EXPONENT)", "-math.frexp(one)[1]", (SHARING,)),
    Mutant("monitoring/stacking.py", "shared, self.shared = self.shared, None", "shared = self.shared", (SHARING,)),
    Mutant(CODED, "left + SLACK * size", "0.5 * left", (INTEGERS,)),
    Mutant(CODED, ".clamp_(-LARGEST, LARGEST)\n", ".clamp_(-100, 100)\n", (INTEGERS,)),
    Mutant(CODED, ".mul_(signs)", "", (INTEGERS,), "close"),
    Mutant(CODED, "a.shape[1] > 1 and ", "", (INTEGERS,)),
    Mutant(CODED, "tile.mul_(self.steps[columns].mul(-2))", "tile.mul_(self.steps[columns].mul(-1))", (INTEGERS,)),
    Mutant(ALL, "errors = codes.errors[own] + codes.errors[others].max()", "errors = codes.errors[own]", (INTEGERS,)),
    Mutant(ALL, "<= own[:, None], torch.inf", "< own[:, None], torch.inf", (INTEGERS,)),
    Mutant(ALL, "place[which] + member * (level.shape[1] // FEW)", "place[which] * FEW + member", (INTEGERS,)),
    Mutant(ALL, "        with self._entering:\n", "        if True:\n", (INTEGERS,), "one_core_at_a_time"),
    Mutant(N, "            with self._merging:\n", "            if True:\n", (INTEGERS,), "one_core_at_a_time"),
    Mutant(ALL, "            list(self)\n", "            pass\n", (INTEGERS,)),
    Mutant(CODED, "torch.empty(size >> times, dtype=torch.float32)", "torch.empty(size >> times)", (INTEGERS,)),
    Mutant(N, "max(1e-4, self.rows.shape[1] * FLOAT32_UNIT)", "1e-4", (INTEGERS,)),
    Mutant("measures/neighbors.py", "len(rows), rows.detach()", "len(rows), rows", (INTEGERS,)),
    Mutant("stats/precision.py", 'switch.fp32_precision = "ieee"', "pass", (HOSTILE,), "precision"),
    Mutant("measures/table.py", "@in_full_precision\n", "", (HOSTILE,), "precision"),
    Mutant("measures/base.py", "with full_precision(device_of(rows)):", "if True:", (HOSTILE,), "precision"),
    Mutant(
        ALL,
        "            self._measure(left, doubtful=True)",
        "            self._measure(left, doubtful=False)",
        (INTEGERS,),
    ),
    Mutant(N, "torch.float32) * (1 - margin)", "torch.float32) * (1 + 1e-1)", (INTEGERS,)),
    Mutant("stats/precision.py", "initializer=torch.set_num_threads, initargs=(1,)", "", (INTEGERS,)),
    Mutant(ALL, ".sqrt_().add_(errors[:, None])", ".sqrt_()", (INTEGERS,)),
    Mutant(ALL, "self._measure(left.where(likely), doubtful=False)", "pass", (INTEGERS,)),
    Mutant(ALL, "            self._measure(left, doubtful=True)\n", "            pass\n", (INTEGERS,)),
    Mutant(ALL, "range(12, -6, -1)", "range(12, 11, -1)", (INTEGERS,)),
    Mutant(ALL, " and rows.shape[1] <= MOST_COLUMNS", "", (INTEGERS,)),
    Mutant("stats/precision.py", "        torch.set_num_threads(before)", "        pass", (INTEGERS,)),
    Mutant("measures/plan.py", "k <= MOST_IN_INTEGERS and ", "", (INTEGERS,)),
    Mutant(
        "measures/plan.py",
        "axes + SCAN + begin + survivors * (PAIR + ",
        "axes + SCAN + begin + survivors * (",
        (INTEGERS,),
    ),
    Mutant("measures/plan.py", "axes + SCAN + begin + survivors", "axes + SCAN + survivors", (INTEGERS,), "paid_for"),
    Mutant("measures/plan.py", "    begin = look + ROW * n / (n * n / 2)", "    begin = 0.0", (INTEGERS,), "paid_for"),
    Mutant("measures/plan.py", "        return best, None  # axes", "        pass  # axes", (INTEGERS,)),
    Mutant("measures/neighbors.py", "k <= SWEPT_NEIGHBORS and ", "", (INTEGERS,)),
    Mutant(
        CODED,
        "return torch.equal(_by_instructions(a, a, room[0]), _by_float64(a, a, room[1]))",
        "return True",
        (INTEGERS,),
    ),
    Mutant(CODED, "self.values[order], self.steps[order]", "self.values[order], self.steps", (INTEGERS,)),
    Mutant(ALL, "return codes + sign * (errors[i] + errors[j])", "return codes", (INTEGERS,)),
    Mutant(ALL, ".masked_fill_(known == 0, -torch.inf)", "", (INTEGERS,)),
    Mutant(ALL, "            each(_Visitor.settle_all, visitors)\n", "", (INTEGERS,)),
    Mutant(ALL, "plan.integers and search.scale == 1", "plan.integers", (INTEGERS,)),
    Mutant(CODED, "TINY = 1e-36", "TINY = 0.0", (INTEGERS,)),
    Mutant("measures/spectrum.py", "divided.diagonal() @", "0.5 * divided.diagonal() @", (ORACLES,), "trace_function"),
    Mutant("measures/spectrum.py", "+ 2 * (divided[:, own:]", "+ (divided[:, own:]", (ORACLES,), "trace_function"),
    Mutant("measures/spectrum.py", "gap.abs() < 1e-5 * both", "gap.abs() < 0 * both", (ORACLES,), "trace_function"),
    Mutant(
        "measures/spectrum.py", "divided[close] = bend(", "divided[close] = 0 * bend(", (ORACLES,), "trace_function"
    ),
    Mutant("measures/bars.py", "(1 - total / size * values)", "(2 - total / size * values)", (PROFILE,)),
    Mutant("measures/bars.py", "torch.sub(part.to(dtype), high, out=here)", "here.copy_(part)", (INVARIANCES,), "bars"),
    Mutant(A, "unit = trace / (n - 1)", "unit = trace / n", (ORACLES,)),
    Mutant(D, "(tied + float(rising.sum()))", "float(rising.sum())", (ORACLES,), "gride"),
    Mutant("views/shape.py", "means[0] = -np.inf", "means[0] = 0.0", (SHAPES,)),
    Mutant("views/shape.py", "total[live] += wu * wl / joint", "total[live] += wu", (SHAPES,)),
    Mutant("views/shape.py", "top[live] = at = below", "at = below", (SHAPES,)),
    Mutant("sampling.py", "            alike.discard(site.name)\n", "", (PROFILE,)),
    Mutant("sampling.py", "and _same(paths, seen[before.name])", "and True", (PROFILE,)),
    Mutant("sampling.py", "(one.dtype, one.device) == (other.dtype, other.device) and ", "", (PROFILE,)),
    Mutant("profiling.py", "contextlib.closing(pool", "contextlib.nullcontext(pool", (PROFILE,), "somebody_stops"),
    Mutant("profiling.py", "last.of_site(name) if name in again", "last if name in again", (PROFILE,)),
    Mutant(
        "profiling.py", "        other.curves += (replace(one, site=site) for one in self.curves)\n", "", (PROFILE,)
    ),
    Mutant("meanwhile.py", "        self._over.set()\n", "", ("tests/test_meanwhile.py",)),
    Mutant("meanwhile.py", "cancel_futures=True", "cancel_futures=False", ("tests/test_meanwhile.py",)),
    Mutant("models/sources.py", "digest.update(room[:size])", "digest.update(room)", (LOADING,), "hashed"),
    Mutant(
        "models/sources.py", "                if given_up():\n", "                if False:\n", (LOADING,), "hashed"
    ),
    Mutant("models/load.py", "        on_tokenizer(tokenizer)\n    with", "    with", (LOADING,), "told_of"),
    Mutant("text/batches.py", "if ids is None else ids", "", ("tests/test_text_batches.py",), "ids_that_are_known"),
    Mutant(
        "text/batches.py", "            if given_up():\n", "            if False:\n", ("tests/test_text_batches.py",)
    ),
    Mutant(
        "views/interactive.py", "@functools.cache", "@functools.lru_cache(0)", ("tests/test_report.py",), "packed_once"
    ),
    Mutant("models/gguf_files.py", 'str(value, "utf-8")', 'str(value, "latin-1")', (LOADING,), "gguf"),
    Mutant(
        "models/gguf_files.py", "                setattr(module, name, plain)\n", "                pass\n", (LOADING,)
    ),
    Mutant("commands/common.py", 'os.environ["GOMP_SPINCOUNT"] = str(SPINS)', "pass", (KEPT,), "sleep"),
    Mutant("commands/common.py", "cores() > FEW_CORES or", "", (KEPT,), "sleep"),
    Mutant("commands/common.py", "    wait_asleep()\n", "", (KEPT,), "sleep"),
    Mutant("cli.py", "    long_work()\n    from anisoscope.demo", "    from anisoscope.demo", (KEPT,), "ask_for_it"),
    Mutant("cli.py", "    long_work()\n    import anisoscope", "    import anisoscope", (KEPT,), "ask_for_it"),
    Mutant("commands/common.py", " or any(name in os.environ for name in WAITING_WISHES)", "", (KEPT,), "sleep"),
    Mutant("commands/common.py", '"torch" in sys.modules or ', "", (KEPT,), "wished"),
    Mutant("commands/common.py", "M_TRIM_THRESHOLD: KEPT_BYTES, ", "", (KEPT,), "keep"),
    Mutant(
        "commands/common.py", "if any(name in os.environ for name in ALLOCATOR_WISHES)", "if False", (KEPT,), "keep"
    ),
    Mutant("text/embedded.py", '"-P", "-c"', '"-c"', (CORPUS,), "process"),
    Mutant("text/embedded.py", "if reader.returncode == 0 else ()", "", (CORPUS,), "process"),
    Mutant(
        "text/embedded.py",
        "        reader.kill()\n        reader.communicate()\n",
        "        pass\n",
        (CORPUS,),
        "process",
    ),
    Mutant("text/embedded.py", "_read_beside() or ", "", (CORPUS,), "process"),
    Mutant(
        "measures/bars.py", "scores2 @ one.to(scores2.dtype)", "scores2.bfloat16() @ one.bfloat16()", (HOSTILE,), "bars"
    ),
    Mutant("stats/gram_matrices.py", "part += times_transposed", "part = times_transposed", (GRAMS,), "onednn"),
    Mutant("stats/gram_matrices.py", "out[at:, at : at + strip] = part.T", "pass", (GRAMS,), "onednn"),
    Mutant(
        "stats/products.py", "return torch.equal(times_transposed(a, b), a @ b.T)", "return True", (GRAMS,), "onednn"
    ),
    Mutant("stats/products.py", "with full_precision(a.device):", "if True:", (GRAMS,), "onednn"),
    Mutant("text/embedded.py", " or cores() < 2", "", (CORPUS,), "one_core"),
    Mutant("text/embedded.py", "communicate(timeout=LONGEST_S)", "communicate()", (CORPUS,), "process_fails"),
    Mutant("models/gguf_files.py", "np.asarray(mapped(path))", "mapped(path)", (LOADING,), "gguf"),
    Mutant("cli.py", "or sys.getprofile() is not None", "", ("tests/test_cli.py",), "profiler_writes"),
    Mutant("views/summary.py", "@lru_cache(maxsize=512)", "@lru_cache(maxsize=0)", ("tests/test_figures.py",)),
    Mutant("stats/products.py", " and not rows.requires_grad", "", (GRAMS,), "onednn"),
    Mutant(
        "measures/search.py", "block[part].mul_(-2), block, size)", "block[part], block, size)", (GRAMS,), "few_rows"
    ),
    Mutant("measures/search.py", "mul_(-2), block, size)", "mul_(-2), block)", (GRAMS,), "few_rows"),
    Mutant(
        "models/library.py",
        "folder if str(path) == again else path",
        "path",
        ("tests/test_models_load.py",),
        "sources_of",
    ),
    Mutant(
        "models/library.py",
        "_path = asked\n",
        "_path = lambda path: {}\n",
        ("tests/test_models_load.py",),
        "sources_of",
    ),
    Mutant("stats/products.py", ' or processor_maker() != "AuthenticAMD"', "", (GRAMS,), "onednn"),
    Mutant("cli.py", "        atexit._run_exitfuncs()\n", "", ("tests/test_cli.py",), "soon"),
    Mutant("cli.py", "and not _is_watched():", "and True:", ("tests/test_cli.py",), "soon"),
    Mutant("cli.py", "        threading._shutdown()", "        pass", ("tests/test_cli.py",), "threads_end"),
    Mutant("cli.py", "if stream is not None", "if True", ("tests/test_cli.py",), "nobody_needs"),
    Mutant("capture/beside.py", "and _is_exact() and", "and", (BESIDE,), "may_go"),
    Mutant("capture/beside.py", "and not _is_watched()", "", (BESIDE,), "may_go"),
    Mutant("capture/beside.py", "        return False", "        return True", (BESIDE,), "may_go"),
    Mutant("capture/beside.py", "torch.set_autocast_cache_enabled(False)", "pass", (BESIDE,), "told_by"),
    Mutant("capture/beside.py", "torch.set_autocast_enabled(kind, enabled)", "pass", (BESIDE,), "told_by"),
    Mutant("capture/beside.py", "            wait([task])", "            pass", (BESIDE,), "an_error"),
    Mutant("capture/beside.py", "            del task", "            pass", (BESIDE,), "nothing_stays"),
    Mutant("capture/beside.py", "under_way.pop()", "under_way[0]", (BESIDE,), "nothing_stays"),
    Mutant("capture/gradients.py", "            meanwhile(states)\n", "            pass\n", (BESIDE,)),
    Mutant("capture/gradients.py", "    if meanwhile is None:\n", "    if True:\n", (BESIDE,)),
    Mutant("monitoring/looks.py", "and at == len(batches) - 1 and", "and", (BESIDE,), "find_the_same"),
    Mutant("monitoring/early.py", "x.shape[1] >= PARTED_WIDTH or ", "", (BESIDE,), "wide_or_many"),
    Mutant("monitoring/early.py", " or len(views) * x.numel() > EARLY_CELLS", "", (BESIDE,), "wide_or_many"),
    Mutant("monitoring/early.py", ", left_alone():", ":", (BESIDE,), "no_switch"),
    Mutant("monitoring/early.py", "self._until_the_end.enter_context(", "str(", (BESIDE,), "keep_to"),
    Mutant("monitoring/early.py", "cells is None and any(", "False and any(", (BESIDE,), "cannot_say"),
    Mutant("monitoring/early.py", "        self.drop()\n", "", (BESIDE,), "keep_to"),
    Mutant("monitoring/looks.py", "                meanwhile.drop()\n", "", (BESIDE,), "without_room"),
    Mutant("monitoring/measuring.py", "if states is None else states.cells", "", (BESIDE,), "cannot_say"),
    Mutant(
        "monitoring/stacking.py",
        "rest = cls() if states is None else",
        "rest = cls() if True else",
        (BESIDE,),
        "no_room",
    ),
    Mutant("monitoring/stacking.py", "states or States.of(", "States.of(", (BESIDE,), "begun_before"),
    Mutant(
        "monitoring/tangents.py", "ready is not None and there else", "ready is not None else", (SHARING,), "halves_are"
    ),
    Mutant("monitoring/stacking.py", "        _bring_near(rows, longest)\n", "", (SHARING,)),
    Mutant(
        "monitoring/stacking.py", "np.append(True, steps > 0)", "np.append(True, steps >= 0)", (SHARING,), "by_sequence"
    ),
    Mutant("monitoring/measuring.py", "and place not in taken:", "and True:", ("tests/test_monitor.py",)),
    Mutant("tangent/stacked_types.py", "without *= self.left", "pass", (STACKED,)),
    Mutant("tangent/stacked_types.py", "(count - 1) / count * spread", "spread", (STACKED,)),
    Mutant("tangent/stacked_types.py", "len(at) < FEWEST or ", "", (TYPES,), "by_bin"),
    Mutant("tangent/stacked_types.py", "if not len(cell.at) else", "if False else", (TYPES,), "by_bin"),
    Mutant("slices.py", "rows[:, first : first + end - begin]", "rows[:, begin:end]", (PROFILE,), "gathered"),
    Mutant("models/gguf_files.py", "return value.item()", "return float(value.item())", (LOADING,), "quick_gguf"),
    Mutant("kernels/shapes.py", "min(shapes", "max(shapes", (CUTS,)),
    Mutant("kernels/shapes.py", "if math.isfinite(taken[found]):", "if True:", (CUTS,)),
    Mutant("kernels/shapes.py", "hashlib.sha256(name.encode())", 'hashlib.sha256(b"")', (CUTS,)),
    Mutant("kernels/shapes.py", "if list(astuple(one)) == kept", "if kept", (CUTS,)),
    Mutant("kernels/shapes.py", ", ValueError, KeyError, TypeError)", ")", (CUTS,)),
    Mutant("kernels/shapes.py", "except (OSError, RuntimeError):  #", "except ValueError:  #", (CUTS,)),
    Mutant("kernels/shapes.py", "    except Exception:", "    except ValueError:", (CUTS,)),
    Mutant("measures/neighbors_fused.py", "    if kind in KNOWN:", "    if False:", (CUTS,)),
    Mutant("measures/neighbors_fused.py", "{torch.cuda.get_device_name(device)} ", "", (CUTS,)),
    Mutant("kernels/nearest.py", "range(0, D, K)", "range(0, D - K, K)", (KERNELS,), "brute_force"),
    Mutant("kernels/nearest.py", "left += K", "left += 64", (KERNELS,), "shape_of_the_product"),
]


def survives(mutant: Mutant) -> str | None:
    """None if the tests noticed, else what went wrong."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "src"
        shutil.copytree(ROOT / "src", copy, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        target = copy / "anisoscope" / mutant.file
        text = target.read_text()
        if text.count(mutant.old) < 1:
            return "the line to break is gone: the mutant must be rewritten"
        target.write_text(text.replace(mutant.old, mutant.new))
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *mutant.tests]
        command += ["-k", mutant.only] if mutant.only else []
        environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if found.returncode == 1:
        return None
    return "survived" if found.returncode == 0 else f"pytest ended with {found.returncode}: {found.stdout[-300:]}"


def main() -> int:
    """Run all mutants, two at a time, and say which survived."""
    wanted = [m for m in MUTANTS if len(sys.argv) < 2 or any(word in m.file + m.old for word in sys.argv[1:])]
    left = 0
    with ThreadPoolExecutor(2) as pool:
        for at, (mutant, outcome) in enumerate(zip(wanted, pool.map(survives, wanted), strict=True), 1):
            left += outcome is not None
            mark = "caught  " if outcome is None else "SURVIVED"
            print(
                f"{at:3}/{len(wanted)} {mark} {mutant.file}: {mutant.old.strip()[:60]} -> {mutant.new.strip()[:50]}",
                flush=True,
            )
            if outcome not in (None, "survived"):
                print(f"        {outcome}")
    print(f"{len(wanted) - left} of {len(wanted)} mutants caught")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
