"""The command line, as a process: what it prints, and that bad input is one line on stderr and exit code 2."""

import inspect
import json
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest

import anisoscope as an
from anisoscope import __version__
from anisoscope.commands.theory import listed
from anisoscope.measures import table
from anisoscope.theory.registry import experiments

HEAVY = {
    "torch",
    "numpy",
    "scipy",
    "transformers",
    "tokenizers",
    "pandas",
    "plotly",
    "matplotlib",
    "jinja2",
    "jaxtyping",
}
ROWS = np.random.default_rng(0).standard_normal((600, 6)) * [3.0, 2, 1, 1, 1, 0.5]


# One thread, warnings are errors, and a terminal wide enough not to break lines.
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "160", "PYTHONWARNINGS": "error"}


def run(*arguments, cwd=None, **settings):
    """Exit code, stdout and stderr of a process of its own."""
    command = [sys.executable, "-m", "anisoscope.cli", *map(str, arguments)]
    done = subprocess.run(command, env=ENVIRONMENT | settings, cwd=cwd, capture_output=True, check=False)
    return done.returncode, done.stdout.decode("utf-8", "replace"), done.stderr.decode("utf-8", "replace")


# Imports take longer than refusing a file: this process makes them once and forks one child for each case.
FORKS = """
import importlib, json, os, sys, traceback
import torch
from anisoscope import cli

for name in sys.argv[1:]:
    importlib.import_module(name)
results = {}
for case, arguments in json.load(sys.stdin).items():
    child = os.fork()
    if child == 0:
        for stream, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{case}.{name}", os.O_CREAT | os.O_TRUNC | os.O_WRONLY), stream)
        sys.argv = ["anisoscope", *arguments]
        code = 0
        try:
            cli.main()
        except SystemExit as exit:
            code = exit.code
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code or 0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    results[case] = (code, open(f"{case}.out").read(), open(f"{case}.err").read())
json.dump(results, sys.stdout)
"""


def run_many(cases, cwd, *ahead):
    """The same for a dictionary of argument lists; modules that most of them need are imported ahead."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore::ResourceWarning", "-c", FORKS, *ahead],
        input=json.dumps(cases),
        env=ENVIRONMENT,
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Files of every sort."""
    path = tmp_path_factory.mktemp("files")
    np.save(path / "rows.npy", ROWS)
    np.save(path / "one axis.npy", ROWS[0])
    np.save(path / "empty.npy", ROWS[:0])
    np.save(path / "width 0.npy", ROWS[:, :0])
    np.save(path / "text.npy", ROWS.astype(str))
    np.save(path / "objects.npy", np.array([[1, None], [{}, 2]], dtype=object), allow_pickle=True)
    np.save(path / "constant.npy", np.ones((600, 6)))
    np.savez(path / "archive.npz", rows=ROWS)
    bad = ROWS.copy()
    bad[[17, 303]] = np.nan
    np.save(path / "nan.npy", bad)
    (path / "nothing.npy").touch()
    (path / "not an array.npy").write_text("measure\nme\n")
    (path / "pickle.npy").write_bytes(pickle.dumps([1, 2, 3]))
    whole = (path / "rows.npy").read_bytes()
    (path / "cut short.npy").write_bytes(whole[:5000])
    (path / "cut in the header.npy").write_bytes(whole[:40])
    (path / "folder.npy").mkdir()
    return path


class TestGood:
    def test_version(self):
        assert run("version") == (0, f"{__version__}\n", "")

    def test_measures_lists_all(self):
        code, out, err = run("measures")
        assert (code, err) == (0, "")
        listed = [line.split()[0] for line in out.splitlines()]
        assert listed == [*table.measure_names(), "linearity"]
        assert all(len(line.split(maxsplit=1)[1]) > 20 for line in out.splitlines()), "a line on each"
        for line in out.splitlines():  # read from the sources, so nothing else holds it to the functions themselves
            name, said = line.split(maxsplit=1)
            assert said == inspect.getdoc(getattr(an, name)).splitlines()[0]

    def test_the_list_of_experiments_is_the_registry(self):
        """It is read from the sources without running them."""
        stated = [(one.name, one.question, one.seconds) for one in experiments()]
        assert [(one.name, one.question, one.seconds) for one in listed()] == stated
        assert [one.name for one in listed(["counter-example", "chords"])] == ["chords", "counter-example"]
        with pytest.raises(an.AnisoscopeError, match="did you mean 'chords'"):
            listed(["chord"])

    @pytest.mark.parametrize(
        "arguments", ["--help", "version", "train --help", "theory --help", "theory --list", "measures", "data --help"]
    )
    def test_help_and_lists_import_nothing_heavy(self, arguments):
        """A newcomer's first commands answer at once; torch alone takes more than a second to import."""
        code = (
            "import sys; from anisoscope.cli import main; sys.argv[0] = 'anisoscope'\n"
            "try: main()\n"
            "except SystemExit as done: assert not done.code\n"
            f"found = {HEAVY} & {{name.partition('.')[0] for name in sys.modules}}\n"
            "assert not found, found"
        )
        command = [sys.executable, "-c", code, *arguments.split()]
        done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()

    @pytest.mark.parametrize("heavy", ["import torch", "pass"])
    @pytest.mark.parametrize("watched", ["sys.setprofile(lambda *_: None)", "sys.settrace(lambda *_: None)", "pass"])
    def test_the_end_comes_soon_and_nothing_is_lost(self, heavy, watched, tmp_path):
        """What is to be called at the end is called, what was said is written, and only then all is dropped at once;
        not where that would save nothing, nor before the eyes of a profiler, which has something to say at the end."""
        code = (
            "import atexit, os, sys; from anisoscope.cli import leave\n"
            "exit = os._exit; os._exit = lambda code: os.write(1, b'at once') and exit(code)\n"
            "atexit.register(print, 'called')\n"
            f"{heavy}; {watched}\n"
            "print('said', end=' ')\n"
            "leave(3)"
        )
        with (tmp_path / "out").open("w") as out:  # into a file, which is written when its buffer is full
            done = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, stdout=out, check=False)
        assert done.returncode == 3
        soon = "at once" if heavy != "pass" and watched == "pass" else ""
        assert (tmp_path / "out").read_text() == f"said called\n{soon}"

    def test_a_profiler_writes_what_it_has_seen(self, folder):
        command = ["-m", "cProfile", "-o", "seen", "-m", "anisoscope.cli", "measure", "rows.npy", "spectral_ratio"]
        done = subprocess.run([sys.executable, *command], env=ENVIRONMENT, cwd=folder, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr
        assert (folder / "seen").stat().st_size > 1000

    @pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
    def test_nobody_needs_to_listen(self, folder, closed):
        command = f"{sys.executable} -m anisoscope.cli measure rows.npy spectral_ratio {closed}"
        done = subprocess.run(command, shell=True, env=ENVIRONMENT, cwd=folder, capture_output=True, check=False)
        assert (done.returncode, done.stderr) == (0, b"")

    def test_threads_end_their_work(self, tmp_path):
        code = (
            "import threading, time, torch; from concurrent.futures import ThreadPoolExecutor\n"
            "from anisoscope.cli import leave\n"
            "pool = ThreadPoolExecutor(1); pool.submit(int)\n"
            "def late(): time.sleep(0.3); open('late', 'w').close()\n"
            "threading.Thread(target=late).start(); leave(0)"
        )
        subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, cwd=tmp_path, check=True, timeout=60)
        assert (tmp_path / "late").exists()

    def test_measure(self, folder):
        """The numbers of the library on the same file, one line a measure."""
        names = ["two_nn", "spectral_ratio", "mean_cosine"]
        code, out, err = run("measure", folder / "rows.npy", *names)
        assert (code, err) == (0, "")
        expected = an.measure(np.load(folder / "rows.npy", mmap_mode="r"), names)
        for name in names:
            line = next(line for line in out.splitlines() if line.split()[:1] == [name])
            assert float(line.split()[1]) == pytest.approx(expected[name].value, rel=1e-4)
            assert "600" in line.split()

    def test_a_file_name_is_not_markup_and_a_terminal_may_lack_the_plus_minus_sign(self, folder):
        np.save(folder / "[red]x[bold].npy", ROWS)
        code, out, err = run("measure", "[red]x[bold].npy", "two_nn", cwd=folder, PYTHONIOENCODING="ascii")
        assert (code, err) == (0, "")
        assert "[red]x[bold].npy" in out

    def test_truth(self):
        """At so few rows some estimates miss their truth; then the code says so."""
        code, out, err = run("truth", "--rows", 512)
        assert err == ""
        lines = [line.split() for line in out.splitlines()]
        verdicts = [words[-1] for words in lines if words and words[-1] in ("ok", "off")]
        assert len(verdicts) >= 20
        assert f"{verdicts.count('ok')} of {len(verdicts)} agree with the truth" in out
        assert code == (0 if "off" not in verdicts else 1)
        shown = " ".join(out.split())
        for name in (*table.measure_names(), "linearity"):
            assert name in shown


BAD = {
    "missing": (["nowhere.npy", "two_nn"], "no such file: nowhere.npy"),
    "folder": (["folder.npy", "two_nn"], "no such file: folder.npy"),
    "one axis": (["one axis.npy", "two_nn"], "shape (6,); rows need two axes"),
    "empty": (["empty.npy", "two_nn"], "no row is left to measure"),
    "width 0": (["width 0.npy", "two_nn"], "width 0"),
    "text": (["text.npy", "two_nn"], "rows are real numbers"),
    "objects": (["objects.npy", "two_nn"], "objects.npy is not a .npy file of numbers"),
    "pickle": (["pickle.npy", "two_nn"], "pickle.npy is not a .npy file of numbers: numpy.save writes one"),
    "not an array": (["not an array.npy", "two_nn"], "not an array.npy is not a .npy file of numbers"),
    "no bytes": (["nothing.npy", "two_nn"], "nothing.npy is not a .npy file of numbers"),
    "cut short": (["cut short.npy", "two_nn"], "cut short.npy is not a .npy file of numbers"),
    "cut in the header": (["cut in the header.npy", "two_nn"], "is not a .npy file of numbers"),
    "archive": (["archive.npz", "two_nn"], "archive.npz is an archive"),
    "NaN": (["nan.npy", "two_nn"], "rows 17 and 303 hold NaN or infinity"),
    "NaN, moments": (["nan.npy", "spectral_ratio"], "rows 17 and 303 hold NaN or infinity"),
    "constant": (["constant.npy", "two_nn"], "3 distinct rows, got 1"),
    "unknown": (["rows.npy", "twonn"], "unknown measure 'twonn'; did you mean 'two_nn'?"),
    "one unknown of two": (["rows.npy", "two_nn", "spectral_ration"], "did you mean 'spectral_ratio'?"),
    "two layers": (["rows.npy", "linearity"], "linearity compares two layers"),
}


USAGE = {
    "command": ["nonsense"],
    "rows": ["truth", "--rows", "10"],
    "file": ["measure"],
    "names": ["measure", "rows.npy"],
}


@pytest.fixture(scope="module")
def answers(folder):
    return run_many(
        {case: ["measure", *arguments] for case, (arguments, _) in BAD.items()} | USAGE,
        folder,
        "anisoscope.measures.table",
    )


def check_refusal(answer, message):
    code, out, err = answer
    assert code == 2, err
    assert out == ""
    assert err.count("\n") == 1 and err.endswith("\n"), err
    assert err.startswith("anisoscope: ")
    assert message in err


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_code_2(answers, case):
    check_refusal(answers[case], BAD[case][1])


@pytest.mark.parametrize("case", ["missing", "pickle", "unknown"])
def test_the_same_in_a_process_of_its_own(folder, case):
    arguments, message = BAD[case]
    check_refusal(run("measure", *arguments, cwd=folder), message)


@pytest.mark.parametrize("case", USAGE)
def test_wrong_usage_is_code_2_without_a_traceback(answers, case):
    code, _, err = answers[case]
    assert code == 2
    assert "Usage" in err
    assert "Traceback" not in err
