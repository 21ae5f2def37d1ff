"""Jinja's immutable sandbox with the limits it lacks: time, size and steps.

In: template source and variables. Out: text, or an exception of Jinja's family. A template may
not walk to Python's insides, include files, loop or recurse past a deadline, or build texts of
any size. Every limit is enforced here; the chat dialect itself is `template.py`'s.

How: loops, macro calls and operators are the only ways to repeat work in Jinja. Each loop's
source is wrapped to count its turns, calls and operators pass through the sandbox's hooks,
and results that can double are measured.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateRuntimeError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderLimits:
    """What one render may take.

    `max_output_chars` also bounds every text made on the way, `max_items` every list. Over the
    whole render `CHURN` times as much may be made and dropped again. The time leaves half a second
    of the two that a request may lose to a template for finding out what it takes.
    """

    timeout_s: float = 1.3
    max_output_chars: int = 32 * 1024 * 1024
    max_items: int = 1_000_000
    max_steps: int = 5_000_000


#: Sixteen lists of a million items are more than half a gigabyte.
CHURN = 16


class _Budget:
    """What is left of one render's limits."""

    __slots__ = ("deadline", "limits", "made", "steps")

    def __init__(self, limits: RenderLimits) -> None:
        self.limits = limits
        self.deadline = time.monotonic() + limits.timeout_s
        self.steps = 0
        self.made = {"text": 0, "list": 0}

    def step(self) -> None:
        self.steps += 1
        if self.steps > self.limits.max_steps:
            raise TemplateRuntimeError(
                f"it took more than {self.limits.max_steps} loop turns and calls"
            )
        if time.monotonic() > self.deadline:
            raise TemplateRuntimeError(f"it ran longer than {self.limits.timeout_s:g} s")

    def check_size(self, size: int, what: str = "text") -> None:
        limit = self.limits.max_output_chars if what == "text" else self.limits.max_items
        if size > limit:
            raise TemplateRuntimeError(f"it makes a {what} of {size}; the limit is {limit}")
        if self.made[what] + size > CHURN * limit:
            raise TemplateRuntimeError(
                f"it makes {what}s of more than {CHURN * limit} altogether, {CHURN} times the limit"
            )

    def measured(self, value: Any) -> Any:
        what = "text" if isinstance(value, str) else "list"
        if isinstance(value, (str, list, tuple)):
            self.check_size(len(value), what)
            self.made[what] += len(value)
        return value


#: The running render's budget. At compile time, when Jinja folds constants, the default holds.
_budget: ContextVar[_Budget | None] = ContextVar("render_budget", default=None)


def _current() -> _Budget:
    return _budget.get() or _Budget(RenderLimits())


_MAX_RANGE = 100_000
_MAX_WIDTH = 100_000  #: paddings, indents and batches beyond this serve no prompt
_LITERAL_WIDTH = re.compile(r"\d{5,}")
_COMPUTED_WIDTH = re.compile(r"%[^a-zA-Z%]*\*|\{[^{}]*\{")
_WIDTH_FUNCTIONS = frozenset(
    {"center", "ljust", "rjust", "zfill", "expandtabs", "indent", "wordwrap", "batch", "slice"}
    | {"truncate", "tojson"}
)
_MEASURED_FILTERS = ("join", "replace", "format", "list", "sum", "map", "string", "urlize")


def _check_arguments(function: str, subject: Any, arguments: list[Any]) -> None:
    """Widths and repeats are checked before the work: afterwards the memory is already taken."""
    if function in _WIDTH_FUNCTIONS:
        _check_widths(function, arguments)
    if not isinstance(subject, str):
        return
    if function in ("format", "format_map"):
        if _LITERAL_WIDTH.search(subject):
            raise TemplateRuntimeError("a format has a width of five digits or more")
        if _COMPUTED_WIDTH.search(subject):
            _check_widths(function, arguments)
    elif function == "replace" and len(arguments) > 1 and isinstance(arguments[1], str):
        _current().check_size(subject.count(str(arguments[0])) * len(arguments[1]))
    elif function == "join" and arguments and hasattr(arguments[0], "__len__"):
        _current().check_size(len(subject) * len(arguments[0]))


def _check_widths(function: str, arguments: list[Any]) -> None:
    for value in arguments:
        if isinstance(value, int) and value > _MAX_WIDTH:
            raise TemplateRuntimeError(
                f"{function} is asked for {value}; the limit is {_MAX_WIDTH}"
            )


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment: refuses at the attempt, not when a refused value is used."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.filters["_counted"] = _counted
        self.filters["_measured"] = _measured
        for name in (*_WIDTH_FUNCTIONS & self.filters.keys(), *_MEASURED_FILTERS):
            self.filters[name] = guarded_filter(name, self.filters[name])
        self.globals["range"] = _short_range
        del self.globals["lipsum"]

    def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
        raise SecurityError(f"access to {attribute!r} of {type(obj).__name__!r} is not allowed")

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        subject, name = value.__self__, value.__name__

        def checked(*args: Any, **kwargs: Any) -> str:
            _check_arguments(name, subject, [*args, *kwargs.values()])
            return wrapped(*args, **kwargs)

        return checked

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        budget = _current()
        budget.step()
        if isinstance(owner := getattr(obj, "__self__", None), str):
            _check_arguments(getattr(obj, "__name__", ""), owner, [*args, *kwargs.values()])
        return budget.measured(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = _current()
        budget.step()
        if operator == "*":
            _check_repeat(budget, left, right)
        elif operator == "**":
            _check_power(left, right)
        elif operator == "%" and isinstance(left, str):
            _check_arguments("format", left, list(right) if isinstance(right, tuple) else [right])
        return budget.measured(super().call_binop(context, operator, left, right))


def _check_repeat(budget: _Budget, left: Any, right: Any) -> None:
    for value, times in ((left, right), (right, left)):
        if isinstance(value, (str, list, tuple)) and isinstance(times, int):
            budget.check_size(len(value) * times, "text" if isinstance(value, str) else "list")
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())


def _check_power(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() * abs(right))


def _check_bits(bits: int) -> None:
    if bits > 4096:
        raise TemplateRuntimeError("it computes with numbers of more than 4096 bits")


def _short_range(*args: int) -> range:
    """Jinja's own function has the same limit; `len` of a longer one than `ssize_t` overflows."""
    found = range(*args)
    if len(found) > _MAX_RANGE:
        raise TemplateRuntimeError(f"a range of {len(found)}; the limit is {_MAX_RANGE}")
    return found


@jinja2.pass_context
def _counted(context: Context, source: Iterable[Any]) -> Iterator[Any]:
    """A loop's source, each turn of which costs a step."""
    budget = _current()
    for item in source:
        budget.step()
        yield item


def _measured(value: Any) -> Any:
    return _current().measured(value)


def guarded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter with its arguments checked before and its result after.

    `wraps` carries over the marks by which Jinja passes context or environment first.
    """
    num_hidden = int(hasattr(function, "jinja_pass_arg"))

    @wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        budget = _current()
        budget.step()
        shown = args[num_hidden:]
        _check_arguments(name, shown[0] if shown else None, [*shown[1:], *kwargs.values()])
        return budget.measured(function(*args, **kwargs))

    return guarded


_OTHER_FILES = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)


def compile_limited(environment: Sandbox, source: str) -> jinja2.Template:
    """Parse, refuse tags that load other files, put counters into loops, compile."""
    tree = environment.parse(source)
    for found in tree.find_all(_OTHER_FILES):
        raise SecurityError(f"it loads another template (line {found.lineno})")
    for loop in list(tree.find_all(nodes.For)):
        loop.iter = _filtered(loop.iter, "_counted")
    for join in list(tree.find_all(nodes.Concat)):
        # Wrapped from inside: the parent's field that holds `join` need not be known.
        join.nodes = [_filtered(nodes.Concat(join.nodes, lineno=join.lineno), "_measured")]
    for block in list(tree.find_all(nodes.AssignBlock)):
        block.filter = _filtered(block.filter, "_measured")
    code = environment.compile(tree)
    return environment.template_class.from_code(
        environment, code, environment.make_globals(None), None
    )


def _filtered(node: nodes.Node | None, name: str) -> nodes.Filter:
    lineno = getattr(node, "lineno", 1)
    return nodes.Filter(node, name, [], [], None, None, lineno=lineno)


def render_limited(
    template: jinja2.Template, variables: Mapping[str, Any], limits: RenderLimits
) -> str:
    """Render under `limits`. Raises Jinja's errors and whatever the template provokes."""
    budget = _Budget(limits)
    token = _budget.set(budget)
    try:
        pieces: list[str] = []
        size = 0
        for piece in template.generate(variables):
            size += len(piece)
            budget.check_size(size)
            pieces.append(piece)
        return "".join(pieces)
    finally:
        _budget.reset(token)
