"""Work in another thread: its result, its errors, and nobody waits for work that nobody wants."""

import threading
import time

import pytest

from anisoscope.meanwhile import Meanwhile


def told(number, text, given_up):
    return number, text, threading.current_thread().name, given_up()


def endless(started, given_up):
    started.set()
    until = time.monotonic() + 20
    while not given_up() and time.monotonic() < until:
        time.sleep(0.001)
    return given_up()


def test_results_are_waited_for():
    with Meanwhile("words") as meanwhile:
        first, second = meanwhile.begin(told, 3, "three"), meanwhile.begin(told, 4, "four")
        number, text, thread, given_up = first()
        assert (number, text, given_up) == (3, "three", False) and thread.startswith("anisoscope-words")
        assert second()[:2] == (4, "four") and first()[0] == 3, "asked twice"


def test_errors_come_where_the_result_is_asked_for():
    with Meanwhile("words") as meanwhile:
        broken = meanwhile.begin(lambda given_up: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            broken()
        assert meanwhile.begin(told, 1, "")()[0] == 1, "the thread goes on"


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_work_is_given_up_on_leaving(error):
    started, ran = threading.Event(), []
    with pytest.raises(error), Meanwhile("words") as meanwhile:
        result = meanwhile.begin(endless, started)
        meanwhile.begin(lambda given_up: ran.append(1))
        assert started.wait(20)
        raise error
    assert result() is True and ran == [], "what had not begun never begins"
