"""Work of known kind under the sampler of benchmarks/shares.py. Run by test_shares.py.

A process of its own: idle threads that other tests have left would be sampled too.
"""

import importlib.util
import json
import sys
import threading
import time
from pathlib import Path

import torch

from anisoscope.measures.neighbors import nearest_neighbors

SECONDS = 0.4


def load():
    """The script as a module."""
    script = Path(__file__).parents[1] / "benchmarks" / "shares.py"
    spec = importlib.util.spec_from_file_location("shares", script)
    module = importlib.util.module_from_spec(spec)
    sys.modules["shares"] = module
    spec.loader.exec_module(module)
    return module


WORK = {
    "product": ("BLAS", lambda a, network: a @ a),
    "decomposition": ("BLAS", lambda a, network: torch.linalg.eigh(a)),
    "elementwise": ("TENSORS", lambda a, network: a.sin().exp().add_(1)),
    "functional": ("TENSORS", lambda a, network: torch.nn.functional.softmax(a, dim=1)),
    "passes": ("MODEL", lambda a, network: network(a).sum().backward()),
    "search": ("NEIGHBORS", lambda a, network: nearest_neighbors(a, 2)),
    "plain_python": ("PYTHON", lambda a, network: sum(i * i for i in range(20_000))),
}


def watched(shares, act):
    """Seconds by kind while ``act`` runs in a thread that is not the main one, whose stack is full of imports."""
    watch = shares.Watch(processor=False)
    with watch.watching():
        thread = threading.Thread(target=act)
        thread.start()
        thread.join()
    kinds = {}
    for (kind, _, _), seconds in watch.seconds.items():
        kinds[kind] = kinds.get(kind, 0.0) + seconds
    return kinds


def main():
    shares = load()
    a = torch.randn(400, 400, generator=torch.Generator().manual_seed(0))
    a = a + a.T
    network = torch.nn.Sequential(torch.nn.Linear(400, 400), torch.nn.Tanh(), torch.nn.Linear(400, 400))
    found = {}
    for name, (kind, work) in WORK.items():
        work(a, network)

        def go(work=work):
            over = time.perf_counter() + SECONDS
            while time.perf_counter() < over:
                work(a, network)

        kinds = watched(shares, go)
        found[name] = kinds.get(getattr(shares, kind), 0.0) / sum(kinds.values())
    kinds = watched(shares, lambda: threading.Event().wait(SECONDS))
    found["waiting"] = kinds.get(shares.WAITING, 0.0) / sum(kinds.values())
    print(json.dumps(found))


if __name__ == "__main__":
    main()
