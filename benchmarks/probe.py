"""What one look of the monitor costs: all sites, default measures, two proxies, 199 controls; on a GPU if there is one.

python benchmarks/probe.py [--tokens 16384] [--vectors 4096 16384] [--width 384] [--layers 8] [--parts] [--trace FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter

import torch

from anisoscope.capture.losses import CausalLoss
from anisoscope.measures import later
from anisoscope.models.build import ModelSpec, build_model
from anisoscope.monitor import Monitor
from anisoscope.monitoring import measuring
from anisoscope.monitoring.tangents import TangentAnalysis
from anisoscope.schedule import every
from anisoscope.text.batches import Batch
from anisoscope.text.frequency import TokenCounts

VOCABULARY, LENGTH = 16_000, 256


def zipf_ids(tokens: int, seed: int = 0) -> torch.Tensor:
    """Ids whose frequencies fall as one over their rank."""
    weights = 1 / torch.arange(1, VOCABULARY + 1, dtype=torch.float64)
    return torch.multinomial(weights, tokens, replacement=True, generator=torch.Generator().manual_seed(seed))


def batch_of(ids: torch.Tensor) -> Batch:
    """A batch of plain text: nothing padded, nothing special."""
    positions = torch.arange(ids.shape[1]).expand_as(ids).contiguous()
    return Batch(ids, torch.ones_like(ids, dtype=torch.bool), torch.zeros_like(ids, dtype=torch.bool), positions)


def trained(model: torch.nn.Module, device: torch.device, steps: int) -> None:
    """A few steps, so that activations and gradients are not those of random weights."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        ids = zipf_ids(16 * LENGTH, step + 1).view(16, LENGTH).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(input_ids=ids).logits
        torch.nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


def main() -> None:
    """Print the seconds of looks, first and later ones, and with ``--parts`` where they go."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--vectors", type=int, nargs="*", default=None)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--looks", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--no-tangent", action="store_true")
    parser.add_argument("--eigh", choices=("host", "device"), default=None, help="where matrices are decomposed")
    parser.add_argument("--parts", action="store_true")
    parser.add_argument("--trace", default=None)
    given = parser.parse_args()
    if given.eigh is not None:
        later.ENOUGH_CORES = 1 if given.eigh == "host" else 1 << 30
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    spec = ModelSpec(architecture="gpt2", layers=given.layers, width=given.width, heads=given.width // 64,
                     vocab_size=VOCABULARY, context=LENGTH, causal=True)  # fmt: skip
    model = build_model(spec, 0).to(device)
    trained(model, device, given.steps)
    ids = zipf_ids(given.tokens).view(-1, LENGTH)
    counts = TokenCounts.of(zipf_ids(2_000_000, 9), VOCABULARY).update(ids)
    where = torch.cuda.get_device_name() if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"
    print(f"{where}: {given.tokens:,} tokens, {given.layers + 1} sites, D={given.width}")
    for vectors in given.vectors or [given.tokens]:
        tangent = TangentAnalysis(counts=counts, referee="never")
        monitor = Monitor(
            model, probe=[batch_of(part) for part in ids.split(given.batch)], schedule=every(1), loss=CausalLoss(),
            sites="resid.*", analyses={} if given.no_tangent else {"tangent": tangent}, vectors=vectors,
            autocast=torch.bfloat16 if device.type == "cuda" else None, strict=True,
        )  # fmt: skip
        seconds = []
        for step in range(given.looks):
            monitor.step(step)
            seconds.append(monitor.last.info["seconds"])
        rest = seconds[1:] or seconds
        print(f"{vectors:,} vectors, looks: {' '.join(f'{one:.3f}' for one in seconds)}")
        print(f"first look {seconds[0]:.3f} s, then median {statistics.median(rest):.3f} s, least {min(rest):.3f} s")
    if given.parts:  # timers wait for the device, which slows a look down: these looks are not among the seconds
        _time_parts(device)
        for step in range(given.looks, 2 * given.looks):
            monitor.step(step)
        for name, spent in PARTS.most_common():
            print(f"  {spent / given.looks:8.4f} s  {name}")
    if given.trace:
        _trace(monitor, 2 * given.looks, given.trace, device)


PARTS: Counter[str] = Counter()


def _time_parts(device: torch.device) -> None:
    """Wrap the stages of a look in timers that wait for the device; the sum is then more than a look without them."""

    def timed(owner: object, name: str, label: str) -> None:
        plain = getattr(owner, name)

        def wrapped(*args: object, **kwargs: object) -> object:
            torch.cuda.synchronize() if device.type == "cuda" else None
            began = time.perf_counter()
            try:
                found = plain(*args, **kwargs)
                if label.startswith("tangent: ") and not isinstance(found, dict | tuple):
                    found = list(found)
                return found
            finally:
                torch.cuda.synchronize() if device.type == "cuda" else None
                PARTS[label] += time.perf_counter() - began

        setattr(owner, name, wrapped)

    from anisoscope import monitor as monitor_module
    from anisoscope.measures import table
    from anisoscope.monitoring import looks, tangents

    timed(monitor_module, "probe_look", "look: passes and rows")
    timed(looks, "gradient_pass", "  of it: forward and backward")
    timed(measuring, "_enter_states", "measures of states")
    timed(measuring, "_enter_gradients", "measures of gradients")
    plain = table.compute

    def computed(measure: object, *args: object, **kwargs: object) -> object:
        torch.cuda.synchronize() if device.type == "cuda" else None
        began = time.perf_counter()
        try:
            return plain(measure, *args, **kwargs)
        finally:
            torch.cuda.synchronize() if device.type == "cuda" else None
            PARTS[f"  of them: {measure.name}"] += time.perf_counter() - began

    table.compute = computed
    from anisoscope.monitoring import stacking, tangents_together

    timed(stacking.Stacked, "finish", "stacked: measures, waited for")
    timed(tangents.TangentAnalysis, "together", "stacked: tangent analysis")
    timed(stacking, "begin", "  of measures: begun")
    for name in ("pca_fits", "seminmf_fits", "seen_by_halves", "type_sums"):
        timed(tangents_together, name, f"  of stacked: {name}")
    for name in ("_fitted", "_facts", "_activation", "_anisotropy", "_reader", "_by_type"):
        timed(tangents.TangentAnalysis, name, f"tangent: {name}")
    timed(tangents, "crossed_tests", "  of it: crossed_tests")


def _trace(monitor: Monitor, step: int, path: str, device: torch.device) -> None:
    from torch.profiler import ProfilerActivity, profile

    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=kinds, with_stack=False) as found:
        monitor.step(step)
    table = found.key_averages().table(
        sort_by="self_cuda_time_total" if device.type == "cuda" else "self_cpu_time_total", row_limit=30
    )
    with open(path, "w", encoding="utf-8") as file:
        file.write(table)
        file.write(json.dumps({"events": len(found.events())}))
    print(table[:6000])


if __name__ == "__main__":
    main()
