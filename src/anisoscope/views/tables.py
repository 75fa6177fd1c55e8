"""Tables for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich import box
from rich.markup import escape
from rich.table import Table

from anisoscope.estimate import Estimate
from anisoscope.runs.records import Probe, Record, site_order
from anisoscope.views.series import FIRST_SLICE, Series, measure_group, measure_order, plain

SURPRISE = 4.0  # standard errors from the truth that call for a second look


@dataclass(frozen=True, slots=True)
class Check:
    """A record beside the truth it should show; ``tolerance`` is the relative bias known for this setting."""

    record: Record
    truth: float
    tolerance: float = 0.0

    @property
    def surprise(self) -> float | None:
        """Distance to the truth beyond the tolerated bias, in standard errors; None without an error bar."""
        e = self.record.estimate
        if e.stderr is None or e.stderr == 0:
            return None
        return max(0.0, abs(e.value - self.truth) - self.tolerance * abs(self.truth)) / e.stderr

    @property
    def agrees(self) -> bool:
        """Whether the estimate is where it should be."""
        e = self.record.estimate
        if self.surprise is None:
            return abs(e.value - self.truth) <= max(self.tolerance, 0.02) * abs(self.truth)
        return self.surprise <= SURPRISE


def truth_table(title: str, checks: Sequence[Check]) -> Table:
    """Truth beside estimate, one measure a line."""
    table = Table(box=box.SIMPLE_HEAD, title=escape(title), title_justify="left", title_style="bold", min_width=78)
    table.add_column("measure", no_wrap=True, min_width=25)
    for name in ("truth", "estimate", "± stderr", "off by"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for check in checks:
        e = check.record.estimate
        if check.surprise is None or check.tolerance:
            off = f"{(e.value - check.truth) / check.truth:+.1%}"
        else:
            off = f"{(e.value - check.truth) / (e.stderr or 1):+.1f} se"
        mark = "[green]ok[/]" if check.agrees else "[red]off[/]"
        stderr = "none" if e.stderr is None else f"{e.stderr:.2g}"
        table.add_row(escape(check.record.measure), f"{check.truth:.5g}", f"{e.value:.5g}", stderr, off, mark)
    return table


def estimate_table(estimates: Mapping[str, Estimate], title: str) -> Table:
    """Estimates by name, with intervals."""
    table = Table(box=box.SIMPLE_HEAD, title=escape(title), title_justify="left")
    table.add_column("measure")
    for name in ("value", "± stderr", "95 % interval", "n"):
        table.add_column(name, justify="right")
    table.add_column("method and notes")
    for name, e in estimates.items():
        interval = e.interval()
        text = "" if interval is None else f"{interval[0]:.5g} … {interval[1]:.5g}"
        stderr = "" if e.stderr is None else f"{e.stderr:.2g}"
        remarks = escape("\n".join((e.method, *e.notes)))
        table.add_row(escape(name), f"{e.value:.6g}", stderr, text, f"{e.n:,}", remarks)
        for part, value in e.parts.items():
            part_stderr = "" if value.stderr is None else f"{value.stderr:.2g}"
            table.add_row(
                f"  {escape(part)}", f"{value.value:.6g}", part_stderr, "", "", escape(value.method), style="dim"
            )
    return table


def layer_table(series: Series) -> Table:
    """Sites by measures of one model at its last step, over all tokens. Errors stand in the report: here is no room.

    For the same reason a watched training shows its geometry alone, not its gradients and its tangent analysis.
    """
    every = [record for record in series.last() if record.slice == FIRST_SLICE]
    records = [r for r in plain(series).last() if r.slice == FIRST_SLICE and measure_group(r.measure) != "gradients"]
    records = records or every
    names = sorted({record.measure for record in records}, key=measure_order)
    sites = sorted({record.site for record in records}, key=site_order)
    found = {(record.site, record.measure): record.estimate for record in records}
    step = f", step {series.steps[-1]:,}" if series.steps and series.steps[-1] else ""
    table = Table(
        box=box.SIMPLE_HEAD,
        title=escape(f"{series.label}{step}"),
        title_justify="left",
        title_style="bold",
        padding=0,
    )
    table.add_column("site", no_wrap=True)
    for name in names:
        table.add_column(escape(name.replace("_", "\n")), justify="right", no_wrap=True)
    for site in sites:
        cells = [f"{found[site, name].value:.3g}" if (site, name) in found else "-" for name in names]
        table.add_row(escape(site), *cells)
    return table


def cost_line(probe: Probe) -> str | None:
    """What a profile cost: seconds in the model and in the geometry, and the largest memory, where they were noted."""
    info = probe.info
    if "forward_seconds" not in info or "geometry_seconds" not in info:
        return None
    forward, geometry = float(info["forward_seconds"]), float(info["geometry_seconds"])
    line = f"{probe.cell or probe.run}: forward passes {forward:.1f} s, geometry {geometry:.1f} s"
    return f"{line}, peak memory {float(info['peak_mb']):,.0f} MB" if "peak_mb" in info else line
