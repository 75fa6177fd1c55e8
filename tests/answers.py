"""A process of a test that does what it is told, a line of JSON for each order and for each answer."""

import json
import subprocess


def begun(command, **options):
    """The process, and what asks it; an order that it does not survive fails the test."""
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **options)

    def ask(*words):
        process.stdin.write(json.dumps(words) + "\n")
        process.stdin.flush()
        answer = process.stdout.readline()
        assert answer, f"{command[:2]} died of the last order"
        return json.loads(answer)

    return process, ask
