"""Kill the writer at any moment: what it said it committed is there whole, nothing half is, and resuming ends alike.

The writers are real processes and die of SIGKILL. They are forked by a small process that has imported the store once,
so that a life takes milliseconds and nearly all of it is writing: two hundred deaths then fit into the default run.
"""

import json
import random
import subprocess
import sys
from collections import Counter

import answers
import pytest

KILLS = 200
CELLS = ("first", "second")
STEPS = 9

# Deterministic numbers: what a probe must hold can be said from its cell and step alone.
WORK = """
import hashlib, json, math, os, select, signal, sys, time
import fcntl, yaml
from anisoscope.estimate import Estimate
from anisoscope.runs.records import Curve
from anisoscope.runs.store import RunReader, RunWriter

CELLS, STEPS = json.loads(sys.argv[1])

def estimate(cell, step, layer):
    value = math.sin(len(cell) + 10 * step + layer) / 3
    part = Estimate(value=value / 7, stderr=None, n=layer, method="null")
    return Estimate(
        value=value, stderr=abs(value) / 9, n=step + 1, method="m", over="tokens", notes=(cell,), parts={"null": part}
    )

def fill(probe):
    for layer in range(60):
        probe.add_estimate(estimate(probe.cell, probe.step, layer), site=f"resid.{layer}", measure="m", slice="all")
    probe.fail(site="embed", measure="m", slice="rare", error=f"no rows at {probe.step}")
    x = tuple(float(i) for i in range(200))
    y = tuple(math.cos(i * (probe.step + 1)) for i in x)
    probe.add_curve(
        Curve(run=probe.run, step=probe.step, cell=probe.cell, site="embed", name="spectrum", slice="all", x=x, y=y)
    )

def plain(value):
    if hasattr(value, "__dataclass_fields__"):
        return [plain(getattr(value, name)) for name in value.__dataclass_fields__]
    if hasattr(value, "items"):
        return [[name, plain(inner)] for name, inner in value.items()]
    return repr(value)

def content(folder):
    # A digest of everything but the times, by probe. Estimates print rounded, so their fields are taken one by one.
    with RunReader(folder) as reader, reader.snapshot():
        found = {f"{probe.cell} {probe.step}": [] for probe in reader.probes()}
        for values in (reader.records(), reader.failures(), reader.curves()):
            for value in values:
                found[f"{value.cell} {value.step}"].append(plain(value))
    return {key: [len(rows), hashlib.sha256(json.dumps(rows).encode()).hexdigest()] for key, rows in found.items()}

def live(folder, say):
    recipe = {"steps": STEPS, "long": "x" * 3000}
    with RunWriter.create(folder, name="run", exist="resume", recipe=recipe, provenance={"life": 1}) as writer:
        say("open")
        done = writer.done()
        for cell in CELLS:
            for step in range(STEPS):
                if (cell, step) not in done:
                    with writer.probe(step=step, cell=cell) as probe:
                        fill(probe)
                    say(f"{cell} {step}")
    say("over")
"""

# Reads one order a line: a folder to look into, or a writer to start and how long to let it live, from its birth or
# from the moment its run is open. Answers with what is in the folder, or with what the writer said before it died.
NURSERY = (
    WORK
    + """
def life(folder, seconds, since):
    reading, writing = os.pipe()
    born = time.monotonic()
    child = os.fork()
    if child == 0:
        say = lambda words: os.write(writing, f"{words}\\n".encode())
        try:
            live(folder, say)
        except BaseException as error:
            say(f"error {type(error).__name__} {error}")
        os._exit(0)
    os.close(writing)
    heard, end = b"", (born + seconds if since == "birth" else None)
    while True:
        left = None if end is None else max(0.0, end - time.monotonic())
        if not select.select([reading], [], [], left)[0]:
            break
        piece = os.read(reading, 65536)
        if not piece:
            break
        heard += piece
        if end is None and b"open" in heard:
            end = time.monotonic() + seconds
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    while piece := os.read(reading, 65536):
        heard += piece
    os.close(reading)
    return [heard.decode().splitlines(), os.WIFSIGNALED(status)]

for line in sys.stdin:
    order = json.loads(line)
    print(json.dumps(content(*order) if len(order) == 1 else life(*order)), flush=True)
"""
)
ARGUMENTS = json.dumps([CELLS, STEPS])


@pytest.fixture
def nursery():
    process, order = answers.begun([sys.executable, "-c", NURSERY, ARGUMENTS])
    yield order
    process.stdin.close()
    process.stdout.close()
    assert process.wait(timeout=30) == 0


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The run as it comes out when nobody kills anybody."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    code = WORK + "live(sys.argv[2], lambda words: None)\nprint(json.dumps(content(sys.argv[2])))"
    command = [sys.executable, "-c", code, ARGUMENTS, str(folder)]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert len(found) == len(CELLS) * STEPS and {count for count, _ in found.values()} == {62}
    assert len({digest for _, digest in found.values()}) == len(found), "mixing probes up would pass"
    return found


def test_two_hundred_deaths(tmp_path, undisturbed, nursery):
    draw = random.Random(0)
    deaths, fates, finished = 0, Counter(), 0
    folder, promised = tmp_path / "run-0", set()
    while deaths < KILLS:
        # A third die while starting (folder, lock, tables, recipe), the others while probing.
        since = draw.choice(["birth", "open", "open"])
        heard, killed = nursery(str(folder), draw.uniform(0, 0.012 if since == "birth" else 0.025), since)
        assert not [line for line in heard if line.startswith("error")], heard
        promised |= {line for line in heard if " " in line}
        deaths += killed
        fates["open" if "open" in heard else "before"] += killed
        if "open" in heard or promised:
            found = nursery(str(folder))
            assert promised <= set(found), "a probe was reported as committed and is lost"
            assert found == {key: undisturbed[key] for key in found}, "a probe is there, but not whole"
            fates["unsaid"] += set(found) != promised  # killed after the commit and before it could say so
            promised = set(found)
        if "over" in heard or draw.random() < 0.05:
            # In the end, and now and then before it: a last life finishes what the others began.
            heard, killed = nursery(str(folder), 60.0, "birth")
            assert heard[-1] == "over" and not killed, heard
            assert nursery(str(folder)) == undisturbed
            finished += 1
            folder, promised = tmp_path / f"run-{finished}", set()
    # The draw must have reached every kind of moment, or the test has become a formality.
    assert fates["before"] >= 5 and fates["open"] >= 80 and finished >= 5, (dict(fates), finished)
    print(dict(fates), finished)


def test_a_probe_killed_half_way_is_invisible(tmp_path, undisturbed, nursery):
    """Not left to chance: the writer dies with every row inserted, pages of them in the log, and no commit."""
    code = (
        WORK
        + """
from anisoscope.runs.probe import ProbeWriter

log = sys.argv[2] + "/records.sqlite-wal"
writer = RunWriter.create(sys.argv[2], name="run")
with writer.probe(step=0, cell="first") as probe:
    fill(probe)
writer._connection.execute("PRAGMA cache_size = 1")  # pages spill into the log long before the commit
before, write = os.path.getsize(log), ProbeWriter.write

def cut_short(self, connection):
    write(self, connection)
    print(before, os.path.getsize(log), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

ProbeWriter.write = cut_short
with writer.probe(step=1, cell="first") as probe:
    fill(probe)
"""
    )
    command = [sys.executable, "-c", code, ARGUMENTS, str(tmp_path / "run")]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == -9
    before, after = map(int, done.stdout.split())
    assert after > before, "nothing of the half probe had reached the log, so the test would show nothing"
    assert nursery(str(tmp_path / "run")) == {"first 0": undisturbed["first 0"]}
    heard, _ = nursery(str(tmp_path / "run"), 60.0, "birth")
    assert heard[:2] == ["open", "first 1"] and nursery(str(tmp_path / "run")) == undisturbed
