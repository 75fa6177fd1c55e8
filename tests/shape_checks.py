"""Shapes and types of all arguments and results, checked while tests run.

Checks are those of jaxtyping's import hook. The hook's own wrapper binds arguments to their names and checks them
twice, before a call and again with what it returns: half the time of thousands of small calls. Here beartype has the
function itself, and checks each value once. Shapes of one call are still told by one set of axes; what is refused is a
jaxtyping.TypeCheckError. Three parts of jaxtyping that it calls its own are needed for that: where a version has them
no longer, its own wrapper is used.
"""

import functools
import inspect
import types
import typing

import beartype
import jaxtyping

try:
    from jaxtyping import _decorator
    from jaxtyping._decorator import _destring_annotation as destringed
    from jaxtyping._storage import pop_shape_memo as pop
    from jaxtyping._storage import push_shape_memo as push
except ImportError:
    _decorator = None

# The tower lets an int stand for a float, as type checkers do (PEP 484).
TOWER = "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))"
checked = beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True, violation_type=jaxtyping.TypeCheckError))
whole = jaxtyping.jaxtyped


def jaxtyped(fn=None, *, typechecker):
    """As ``jaxtyping.jaxtyped``; for classes, and for functions that are not plain ones, it is that."""
    if fn is None:
        return functools.partial(jaxtyped, typechecker=typechecker)
    plain = isinstance(fn, types.FunctionType) and not inspect.isgeneratorfunction(fn)
    if not plain or inspect.iscoroutinefunction(fn) or getattr(fn, "__no_type_check__", False):
        return whole(fn, typechecker=typechecker)
    return fn if fn.__globals__ is globals() else _wrapped(fn)


def _wrapped(fn):
    """The function, checked unless jaxtyping is told not to; where it names shapes, with axes of its own."""
    copy, config = _with_types(fn), jaxtyping.config
    inner = checked(copy)

    @functools.wraps(fn)
    def with_axes(*args, **kwargs):
        __tracebackhide__ = True
        if config.jaxtyping_disable:
            return fn(*args, **kwargs)
        push({})
        try:
            return inner(*args, **kwargs)
        finally:
            pop()

    @functools.wraps(fn)
    def without(*args, **kwargs):
        __tracebackhide__ = True
        return fn(*args, **kwargs) if config.jaxtyping_disable else inner(*args, **kwargs)

    return with_axes if any(map(_has_shapes, copy.__annotations__.values())) else without


def _with_types(fn):
    """A copy whose annotations are types and no strings; what cannot be found is anything, as in jaxtyping."""
    copy = types.FunctionType(fn.__code__, fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)
    functools.update_wrapper(copy, fn)
    del copy.__wrapped__  # beartype would look at that one
    copy.__kwdefaults__ = fn.__kwdefaults__
    named = fn.__annotations__.items()
    copy.__annotations__ = {name: destringed(one, fn.__globals__) for name, one in named}
    return copy


def _has_shapes(annotation):
    own = isinstance(annotation, type) and issubclass(annotation, jaxtyping.AbstractArray)
    parts = annotation if isinstance(annotation, list) else typing.get_args(annotation)  # a list: those of a Callable
    return own or any(map(_has_shapes, parts))


def install(parts):
    """Check these modules from their import on, which must be still to come."""
    if _decorator is not None:
        jaxtyping.jaxtyped = _decorator.jaxtyped = jaxtyped
    jaxtyping.install_import_hook(parts, TOWER)
