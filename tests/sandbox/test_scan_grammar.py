"""Programs outside the small language, made from a grammar of doors, spellings and contexts: none is accepted."""

from __future__ import annotations

import ast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sandbox.test_scan_evasions import refused

from tilegym_db.sandbox.scan.tables import words

DOORS = {
    "torch": "serialization.load hub.load _C._jit_set_profiling_mode cuda.Stream cuda.CUDAGraph jit.script "
    "utils.cpp_extension.load set_default_dtype is_grad_enabled cuda.memory_allocated compiler.is_compiling from_file "
    "classes.load_library nn.Parameter",
    "builtins": "eval exec open compile globals vars __import__ setattr delattr type id hash dir input breakpoint exit super",
    "functools": "singledispatch update_wrapper os",
    "math": "os sys",
    "typing": "get_type_hints ForwardRef sys",
    "dataclasses": "make_dataclass sys builtins",
    "os": "system listdir remove fork path environ.keys popen urandom",
    "subprocess": "run",
    "sys": "modules _getframe",
    "gc": "get_objects",
    "time": "time sleep",
    "ctypes": "CDLL",
    "threading": "Thread",
    "pickle": "loads",
}
VALUE_DOORS = words(
    "__class__ __dict__ __globals__ __code__ __closure__ __subclasses__ __reduce__ __builtins__ __self__ __wrapped__ gi_frame "
    "f_back tb_frame cr_frame untyped_storage requires_grad grad_fn is_leaf _version _base data_ptr is_inference tofile dump"
)
MEMBERS = [(module, name) for module, names in DOORS.items() for name in names.split()]


@st.composite
def member(draw: st.DrawFn) -> tuple[str, str]:
    """Draw the statements before, and an expression that reaches a refused member of a module."""
    module, name = draw(st.sampled_from(MEMBERS))
    first, _, rest = name.partition(".")
    half = draw(st.integers(0, len(first)))
    spellings = [
        (f"import {module}", f"{module}.{name}"),
        (f"import {module} as m", f"m.{name}"),
        (f"import {module}\nm = {module}", f"m.{name}"),
        (f"import {module}\nm = {module} if N else None", f"m.{name}"),
        (f"import {module}\nm, k = {module}, 1", f"m.{name}"),
        (f"import {module}", f"(m := {module}).{name}"),
        (f"import {module}", f"getattr({module}, '{first[:half]}' + '{first[half:]}'){'.' + rest if rest else ''}"),
        (f"import {module}\nA = '{first[:half]}'\nB = '{first[half:]}'", f"getattr({module}, f'{{A}}{{B}}')"),
        (f"import {module}", f"[m.{name} for m in ({module},)][0]"),
        (f"import {module}", f"{{'a': {module}}}['a'].{name}"),
        (f"import {module}\ndef g(m): return m.{name}", f"g({module})"),
        (f"from {module} import {first} as d", f"d{'.' + rest if rest else ''}"),
    ]
    if module == "builtins":
        spellings += [("", first), (f"f = {first}", "f"), ("", f"(lambda: {first})()")]
    return draw(st.sampled_from(spellings))


@st.composite
def attribute(draw: st.DrawFn) -> tuple[str, str]:
    """Draw an expression that takes a refused attribute from a value."""
    name = draw(st.sampled_from(sorted(VALUE_DOORS)))
    value = draw(st.sampled_from(["x", "run", "(1)", "x.shape", "(lambda: 1)", "x[0]", "(x for x in y)", "'a'"]))
    return draw(
        st.sampled_from(
            [
                ("", f"{value}.{name}"),
                ("", f"getattr({value}, '{name}')"),
                ("", f"hasattr({value}, '{name}')"),
                (f"N = '{name}'", f"getattr({value}, N, None)"),
                ("", f"'{{0.{name}}}'.format({value})"),
                ("import operator", f"operator.attrgetter('{name}')({value})"),
                (f"class A:\n    {name}: int = 0", f"{value}.{name}")
                if name.startswith("__")
                else ("", f"{value}.{name}"),
            ]
        )
    )


CONTEXTS = (
    "def run(x, y):\n    return HOLE",
    "def run(x, y):\n    if x: return [HOLE for _ in y]",
    "def run(x, y):\n    for n in y:\n        z = 1 if n else HOLE",
    "def run(x, y):\n    with HOLE: pass",
    "def run(x, y):\n    a = lambda n=HOLE: n",
    'def run(x, y):\n    return f"""{HOLE}"""',
    "def run(x, y):\n    match HOLE:\n        case n: return n",
    "class C:\n    def f(self, x, y):\n        return HOLE",
    "def run(x, y):\n    x[HOLE] = y",
    "def run(x, y):\n    def inner():\n        yield HOLE\n    return inner",
    "def run(x, y):\n    assert x, HOLE",
    "def run(x, y):\n    while (HOLE): pass",
)


def program(before: str, expression: str, context: str) -> str:
    text = f"N = 1\n{before}\n{context.replace('HOLE', expression)}\n"
    ast.parse(text)
    return text


@pytest.mark.parametrize("context", CONTEXTS)
def test_context_with_a_harmless_expression_is_accepted(context: str) -> None:
    assert refused(program("", "(x, y.shape)", context)) == []


@settings(max_examples=600, deadline=None)
@given(st.one_of(member(), attribute()), st.sampled_from(CONTEXTS), st.booleans())
def test_no_program_through_a_door_is_accepted(door: tuple[str, str], context: str, is_twice: bool) -> None:
    before, expression = door
    text = program(before, f"(x, {expression})" if is_twice else f"({expression})", context)
    assert refused(text), text
