"""Kernels by Triton's interpreter on the CPU, without what it does in vain; as a script, a process that runs others.

Triton decides when it is imported whether kernels are compiled or interpreted: scripts of cases import this before any
kernel, and are no part of the process of the tests. Nearly all the time of an interpreted kernel is Python around
operations on a few numbers. What is left out here changes none of them: integers added and multiplied a second time
for a check of overflow whose answer nobody reads, the language made ready anew for each function that a kernel calls,
types and shapes worked out again that are known. Where a version of Triton has other parts, it is taken as it is.
"""

import contextlib
import dataclasses
import json
import os
import runpy
import signal
import sys
import tempfile
import traceback

os.environ["TRITON_INTERPRET"] = "1"

import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

LONGEST = 300  # seconds of a script


def without_overflow():
    """Without ``debug`` the interpreter asserts nothing, and what would be asserted is worked out for nobody."""
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        yield builder, "options", dataclasses.replace(builder.options, sanitize_overflow=False)


def made_ready_once():
    """The language is made ready when a kernel begins, and stays so until that ends."""
    make_ready, done = interpreter._patch_lang, set()

    class Scope(interpreter._LangPatchScope):
        def restore(self):
            done.clear()
            super().restore()

    def once(fn):
        seen = tuple(any(value is lang for value in fn.__globals__.values()) for lang in (tl, tl.core))
        if seen in done:
            return Scope()
        done.add(seen)
        scope = make_ready(fn)
        scope.__class__ = Scope
        return scope

    yield interpreter, "_patch_lang", once


def known_types():
    """Which type of numpy a type of Triton is, and all that a shape says."""
    plain, of_block, of_tensor = interpreter._get_np_dtype, tl.block_type.__init__, tl.tensor.__init__
    numpy_types, blocks, shapes = {}, {}, {}

    def numpy_type(given):
        if type(given) is not tl.dtype:
            return plain(given)
        if given.name not in numpy_types:
            numpy_types[given.name] = plain(given)
        return numpy_types[given.name]

    def block(self, element_ty, shape):
        key = element_ty.name, *shape
        if not all(type(size) is int for size in key[1:]):
            return of_block(self, element_ty, shape)
        if key not in blocks:
            of_block(self, element_ty, shape)
            blocks[key] = self.shape, self.numel, self.name
        self.element_ty = element_ty
        self.shape, self.numel, self.name = blocks[key]

    def tensor(self, handle, type):
        key = tuple(type.shape.values) if type.is_block() else ()
        if key not in shapes:
            of_tensor(self, handle, type)
            shapes[key] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shapes[key]

    yield interpreter, "_get_np_dtype", numpy_type
    yield tl.block_type, "__init__", block
    yield tl.tensor, "__init__", tensor


def broadcast_at_once():
    """Two blocks of as many axes, of which each gets the shape of both unless it has it."""
    plain = TritonSemantic.broadcast_impl_value

    def spread(semantic, given, shape):
        if given.type.shape.values == shape:
            return given
        made = semantic.builder.create_broadcast(given.handle, shape)
        return semantic.tensor(made, tl.block_type(given.type.scalar, shape))

    def broadcast(self, lhs, rhs):
        if not (lhs.type.is_block() and rhs.type.is_block()):
            return plain(self, lhs, rhs)
        one, two = lhs.type.shape.values, rhs.type.shape.values
        if len(one) != len(two) or any(a != b and 1 not in (a, b) for a, b in zip(one, two, strict=True)):
            return plain(self, lhs, rhs)
        shape = [max(a, b) for a, b in zip(one, two, strict=True)]
        return spread(self, lhs, shape), spread(self, rhs, shape)

    yield TritonSemantic, "broadcast_impl_value", broadcast


def short_cuts():
    """All that this version of Triton has the parts for: owner, name, what is there, what is to be there."""
    found = []
    for some in (without_overflow, made_ready_once, known_types, broadcast_at_once):
        with contextlib.suppress(AttributeError, TypeError):
            assert tl.block_type(tl.int32, [1, 2]).shape.values == [1, 2]
            found += [(owner, name, getattr(owner, name), new) for owner, name, new in some()]
    return found


SHORT_CUTS = short_cuts()


def take(*, short=True):
    """Short cuts, or the interpreter as it is."""
    for owner, name, old, new in SHORT_CUTS:
        setattr(owner, name, new if short else old)


take()


def child(script, *words):
    """One script in a copy of this process: what it changes is its own, and nothing need be imported again."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        born = os.fork()
        if not born:
            code = 1
            try:
                signal.alarm(LONGEST)
                for file, number in ((out, 1), (err, 2)):
                    os.dup2(file.fileno(), number)
                sys.argv = [script, *words]
                runpy.run_path(script, run_name="__main__")
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(born, 0)[1])
        out.seek(0), err.seek(0)
        return code, out.read(), err.read()


def main():
    """A line asks for a script with its words, a line answers: exit code, what it said and what it complained of."""
    import anisoscope.measures.stacked
    import anisoscope.tangent.stacked  # noqa: F401

    sys.modules["interpreted"] = sys.modules["__main__"]  # scripts must find this one, and no second
    for line in sys.stdin:
        print(json.dumps(child(*json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
