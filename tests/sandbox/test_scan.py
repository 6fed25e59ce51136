"""Every rule of the static scan with a snippet that it catches and a harmless neighbour that it leaves alone."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

import pytest
from docs_site.reference_pages import reference_pages
from shipped_records import CATALOG

from tilegym_db.catalog import Catalog
from tilegym_db.paths import shipped_root
from tilegym_db.records import Solution
from tilegym_db.sandbox.scan import RULES, Finding, Severity, hard_findings, rule_table, scan_definition, scan_sources

KERNEL = {
    "python": "",
    "triton": "import triton\n@triton.jit\ndef _kernel(x): pass\n",
    "tilelang": "import tilelang\nimport tilelang.language as T\n@tilelang.jit\ndef _kernel(): pass\n",
    "cutile": "import cuda.tile as ct\n@ct.kernel\ndef _kernel(x): pass\n",
}


@dataclass(frozen=True)
class Case:
    """``caught`` breaks the rule; ``clean`` is near it and breaks no rule (``noted`` ones aside)."""

    caught: str
    clean: str
    language: str = "python"


def solution(language: str = "python", paths: tuple[str, ...] = ("kernel.py",), dependencies=()) -> Solution:
    spec = {"language": language, "entry_point": "kernel.py::run", "dependencies": list(dependencies)}
    sources = [{"path": path} for path in paths]
    return Solution.from_dict(
        {"name": "mine", "definition": "row_scale", "author": "tests", "spec": spec, "sources": sources}, "test"
    )


def scan(text: str, language: str = "python", **others: str) -> tuple[Finding, ...]:
    sources = {"kernel.py": textwrap.dedent(text).lstrip("\n").encode()}
    sources |= {f"{name}.py": textwrap.dedent(content).encode() for name, content in others.items()}
    return scan_sources(solution(language, tuple(sources)), sources)


def rules(findings: tuple[Finding, ...]) -> set[str]:
    return {finding.rule for finding in findings}


def hard(findings: tuple[Finding, ...]) -> list[str]:
    return [str(finding) for finding in hard_findings(findings)]


CASES = {
    "unparsable-source": Case("def run(x:\n", "def run(x): pass"),
    "hidden-text": Case('x = "a\u202eb"', 'x = "a\u00e9b"'),
    "imports-introspection": Case("import inspect", "import itertools"),
    "imports-native-code": Case("import ctypes", "import math"),
    "imports-concurrency": Case("import threading", "import typing"),
    "imports-network": Case("from urllib import request", "from math import inf"),
    "imports-files": Case("from pathlib import Path", "from dataclasses import dataclass"),
    "imports-loader": Case("import importlib", "import functools"),
    "imports-serialisation": Case("import pickle", "import itertools"),
    "imports-clock": Case("import time", "import math"),
    "imports-unknown": Case("import flash_attn", "import torch"),
    "star-import": Case("from torch import *", "from torch import float32"),
    "smuggled-module": Case("import torch\ntorch.os.getpid()", "import torch\ntorch.float16"),
    "dynamic-code": Case("eval('1')", "import torch\nf = torch.compile(len)"),
    "dynamic-attribute": Case(
        "def f(x, name): return getattr(x, name)", "import torch\ngetattr(torch, 'float8_e4m3fn', None)"
    ),
    "namespace-access": Case("globals()['f'] = 1", "f = 1"),
    "dunder-access": Case("def run(x): pass\nrun.__globals__", "def run(x): pass\nrun.__name__"),
    "frame-access": Case("def f(error): return error.tb_frame", "def f(x): return x.dtype"),
    "module-as-value": Case("import torch\ndef f(m): pass\nf(torch)", "import torch\ndef f(m): pass\nf(torch.float32)"),
    "foreign-assignment": Case(
        "import torch\ntorch.equal = lambda a, b: True", "class A:\n    def f(self): self.equal = 1"
    ),
    "private-member": Case("import torch\ntorch._tensor_str", "import torch\ntorch._check(True)"),
    "unlisted-member": Case("import functools\nfunctools.RLock", "import functools\nfunctools.partial"),
    "question": Case("def f(x): return x.requires_grad", "def f(x): return x.is_contiguous()"),
    "object-hooks": Case("def f(x): x.__class__ = 1", "class A:\n    def __init__(self): pass"),
    "reads-files": Case("def run(x): open('a')", "def run(x): return x.shape"),
    "ends-process": Case("def run(x): raise SystemExit", "def run(x): raise ValueError('no')"),
    "os-call": Case("import os\nos.fork()", "import os\nos.cpu_count()"),
    "environment": Case("import os\nprint(os.environ)", "import os\nos.environ.get('TRITON_INTERPRET')"),
    "stream-or-graph": Case("import torch\ntorch.cuda.Stream()", "import torch\ntorch.cuda.current_stream()"),
    "native-extension": Case(
        "import torch.utils.cpp_extension", "from triton.tools.tensor_descriptor import TensorDescriptor", "triton"
    ),
    "compiler-flags": Case(
        "@tilelang.jit(compile_flags=['-include/etc/passwd'])\ndef f(): pass",
        "@tilelang.jit(compile_flags=['-O3', '--fmad=false'])\ndef f(): pass",
        "tilelang",
    ),
    "dispatch-override": Case(
        "import torch\nL = torch.library.Library('aten', 'IMPL')",
        "import torch\n@torch.library.custom_op('mine::f', mutates_args=())\ndef f(x: torch.Tensor) -> None: pass",
    ),
    "tensor-subclass": Case("import torch\ntorch.Tensor._make_subclass(int, 1)", "import torch\ntorch.empty_like"),
    "unchecked-memory": Case("import torch\ntorch.frombuffer(b'1')", "import torch\ntorch.empty(1)"),
    "outside-language": Case(
        "class A(dict): pass", "from typing import NamedTuple\nclass Tile(NamedTuple):\n    rows: int = 1"
    ),
    "process-state": Case("import torch\ntorch.set_num_threads(1)", "import torch\ntorch.no_grad()"),
    "persists-l2": Case(
        "def f(x): T.annotate_l2_hit_ratio({x: 0.9})", "def f(x): T.annotate_layout({x: 1})", "tilelang"
    ),
    "torch-compute": Case(
        "import torch\ndef run(x, out): torch.mm(x, x, out=out)",
        "import torch\ndef run(x, out): torch.empty(3, dtype=torch.float32).view(3).zero_()",
        "triton",
    ),
    "tensor-arithmetic": Case(
        "import torch\ndef run(x: torch.Tensor, out): _kernel(x * 2)",
        "import torch\ndef run(x: torch.Tensor, out): _kernel(x.shape[0] * 2)",
        "triton",
    ),
    "prints": Case("def run(x): print(x.shape)", "def run(x): return f'{x.shape}'"),
    "unordered": Case(
        "NAMES = {'a', 'b'}\ndef run(x):\n    for name in NAMES: x.add_(1)",
        "NAMES = {'a', 'b'}\ndef run(x):\n    for name in sorted(NAMES):\n        if name in NAMES: x.add_(1)",
    ),
    "cached-function": Case(
        "import functools\n@functools.cache\ndef f(n): pass", "import functools\nfunctools.partial"
    ),
    "tunes-itself": Case(
        "import triton\n@triton.autotune([triton.Config({})], key=[])\n@triton.jit\ndef k(n): pass",
        "import triton\n@triton.jit\ndef k(n): pass",
        "triton",
    ),
    "keeps-state": Case("seen = {}\ndef run(x): seen[0] = x", "def run(x):\n    seen = {}\n    seen[0] = x"),
    "address": Case("def run(x): return x.storage_offset()", "def run(x): return x.dtype"),
    "address-as-value": Case("def run(x): return x.data_ptr()", "def run(x): return x.data_ptr() % 16"),
    "imports-os": Case("import os", "import operator"),
    "imports-random": Case("import random", "import math"),
    "copies-with-torch": Case("def run(x, out): out.copy_(x)", "def run(x, out): out.view(-1)", "triton"),
    "long-constant": Case(f"x = {'a' * 2500!r}", f"def run(x):\n    {'a' * 2500!r}"),
}


@pytest.mark.parametrize("rule", CASES)
def test_a_rule_catches_its_snippet_and_not_the_neighbour(rule: str) -> None:
    case = CASES[rule]
    kernel = KERNEL[case.language]
    assert rule in rules(scan(kernel + case.caught, case.language))
    neighbour = scan(kernel + case.clean, case.language)
    assert rule not in rules(neighbour)
    assert hard(neighbour) == []


@pytest.mark.parametrize("name", ["autotune", "runtime.autotune", "runtime.autotuner.autotune", "runtime.Autotuner"])
def test_autotuner_is_seen_by_each_of_its_names(name: str) -> None:
    module, _, last = f"triton.{name}".rpartition(".")
    source = f"from {module} import {last} as tuned\ntuned([], key=[])"
    assert "tunes-itself" in rules(scan(KERNEL["triton"] + source, "triton"))


def test_every_rule_has_a_test() -> None:
    elsewhere = {"unscanned-source", "unlisted-source", "shadowed-module", "imports-library", "no-kernel"}
    assert set(CASES) | elsewhere == set(RULES)


# -- what a finding says ----------------------------------------------------------------------------------------------


def test_finding_names_place_rule_culprit_and_way_out() -> None:
    (finding,) = scan("import math\n\nimport ctypes\n")
    assert (finding.path, finding.line, finding.column) == ("kernel.py", 3, 0)
    assert finding.severity is Severity.HARD
    assert str(finding) == (
        "kernel.py:3: hard: imports-native-code: imports ctypes; write the kernel in the Solution's language"
    )


@pytest.mark.turn("tools/docs_site/", "tilegym_db/sandbox/scan/")  # loads the tools of the site
def test_the_rules_print_as_a_table() -> None:
    lines = rule_table().splitlines()
    assert len(lines) == len(RULES) + 2
    assert all(line.count("|") >= 5 for line in lines)
    assert rule_table() in reference_pages()["scan.md"]


# -- hiding a name ----------------------------------------------------------------------------------------------------

STREAM = {
    "alias of the module": "import torch as t\nt.cuda.Stream()",
    "alias of a part": "from torch import cuda as c\nc.Stream()",
    "from-import": "from torch.cuda import Stream as S\nS()",
    "dotted import": "import torch.cuda as tc\ntc.Stream()",
    "variable": "import torch\nm = torch\nn = m.cuda\nn.Stream()",
    "chain of variables": "d = c\nc = b\nb = a\nimport torch\na = torch\ndef run(x): d.cuda.Stream()",
    "walrus": "import torch\n(c := torch.cuda).Stream()",
    "walrus kept for later": "import torch\ndef run(x):\n    if (c := torch.cuda): pass\n    c.Stream()",
    "choice": "import torch\nm = torch.cuda if torch else None\nm.Stream()",
    "or": "import torch\nm = None or torch.cuda\nm.Stream()",
    "unpacking": "import torch\nm, n = torch.cuda, 1\nm.Stream()",
    "getattr": "import torch\ngetattr(torch.cuda, 'Stream')()",
    "getattr of a part": "import torch\ngetattr(torch, 'cuda').Stream()",
    "getattr with a named constant": "import torch\nNAME = 'Stream'\ngetattr(torch.cuda, NAME)()",
    "conditional import": "if 1 > 2:\n    import math as t\nelse:\n    import torch as t\nt.cuda.Stream()",
    "import in a function": "def run(x):\n    import torch\n    return torch.cuda.Stream()",
    "global": "import torch\ndef f():\n    global m\n    m = torch.cuda\ndef run(x): m.Stream()",
    "nonlocal": "import torch\ndef f():\n    m = 0\n    def g():\n        nonlocal m\n        m = torch.cuda\n    m.Stream()",
    "decorator": "import torch\n@torch.cuda.stream(None)\ndef run(x): pass",
    "default argument": "import torch\ndef run(x, s=torch.cuda.Stream()): pass",
    "lambda": "import torch\nrun = lambda x: torch.cuda.Stream()",
    "comprehension": "import torch\n[torch.cuda.Stream() for _ in range(2)]",
    "first iterable of a comprehension": "import torch\n[torch for torch in torch.cuda.Stream()]",
    "class body": "import torch\nclass A:\n    s = torch.cuda.Stream()",
    "class body that may leave a name unbound": "import torch\nclass A:\n    if 0: torch = 1\n    s = torch.cuda.Stream()",
    "nested function": "import torch\ndef run(x):\n    def inner():\n        def more(): return torch.cuda.Stream()",
    "f-string": "import torch\nf'{torch.cuda.Stream()}'",
    "f-string format": "import torch\nf'{1:{torch.cuda.Stream()}}'",
    "match subject": "import torch\nmatch torch.cuda.Stream():\n    case _: pass",
    "match guard": "import torch\nmatch 1:\n    case _ if torch.cuda.Stream(): pass",
    "with": "import torch\nwith torch.cuda.stream(None): pass",
    "annotation that calls": "import torch\ndef run(x: torch.cuda.Stream()): pass",
    "field of a class": "import torch\nclass A:\n    s: torch.cuda.Stream",
    "other alphabet": "import torch\ntorch.cuda.\uff33tream()",
}


@pytest.mark.parametrize("text", STREAM.values(), ids=STREAM.keys())
def test_a_stream_is_found_however_it_is_called(text: str) -> None:
    assert "stream-or-graph" in rules(scan(text))


ATTENTION = ("flash", "cudnn", "efficient")


def attention(name: str, overload: str = "") -> str:
    return f"torch.ops.aten._scaled_dot_product_{name}_attention{overload}"


@pytest.mark.parametrize("overload", ["", ".default"])
@pytest.mark.parametrize("name", ATTENTION)
def test_python_code_may_call_the_attention_operators_of_aten(name: str, overload: str) -> None:
    called = f"def run(q, k, v, scale):\n    return {attention(name, overload)}(q, k, v, scale=scale)[0]\n"
    assert scan(f"import torch\n{called}") == ()
    assert scan(f"import torch as t\n{called.replace('torch.', 't.')}") == ()


@pytest.mark.parametrize("overload", ["", ".default"])
@pytest.mark.parametrize(
    "name", ["flash_attention_backward", "cudnn_attention_backward", "flash_attention_for_cpu_backward"]
)
def test_python_code_may_call_their_gradients(name: str, overload: str) -> None:
    called = f"torch.ops.aten._scaled_dot_product_{name}{overload}"
    assert scan(f"import torch\ndef run(grad, q, k, v):\n    return {called}(grad, q, k, v)\n") == ()


FLASH, ATEN = attention("flash"), "torch.ops.aten"
NEAR_THE_OPERATORS = {
    "another overload": f"{FLASH}.quantized(q)",
    "another attention": f"{ATEN}._scaled_dot_product_attention_math(q)",
    "another backward": f"{ATEN}._scaled_dot_product_efficient_attention_backward(q)",
    "the kernel beneath": f"{ATEN}._flash_attention_forward(q)",
    "another private operator": f"{ATEN}._softmax(q, -1, False)",
    "the packet's own parts": f"{FLASH}._qualified_op_name",
    "an implementation given to it": f"{FLASH}.default.py_impl(1)(f)",
    "its redispatch": f"{FLASH}.default.redispatch(1, q)",
    "another library's": "torch.ops.mine._scaled_dot_product_flash_attention(q)",
    "the namespace of bindings": "torch._C._nn._scaled_dot_product_flash_attention(q)",
    "torch's own": "torch._scaled_dot_product_flash_attention(q)",
    "getattr": f"getattr({ATEN}, '_scaled_dot_product_flash_attention')(q)",
    "getattr of the overload": f"getattr({FLASH}, 'default')(q)",
    "ops under a name": "o = torch.ops\no.aten._scaled_dot_product_flash_attention(q)",
    "aten under a name": "a = torch.ops.aten\na._scaled_dot_product_flash_attention(q)",
    "aten imported": "from torch.ops import aten\naten._scaled_dot_product_flash_attention(q)",
    "operator imported": "from torch.ops.aten import _scaled_dot_product_flash_attention as f\nf(q)",
    "torch under a name": "m = torch\nm.ops.aten._scaled_dot_product_flash_attention(q)",
    "torch that may be another": f"if q:\n    torch = mine\n{FLASH}(q)",
    "torch that is an argument": f"def g(torch):\n    m = torch\nimport torch\nm = torch\nm{FLASH[5:]}(q)",
    "walrus": f"(a := {ATEN})._scaled_dot_product_flash_attention(q)",
    "choice": f"({ATEN} if q else {ATEN})._scaled_dot_product_flash_attention(q)",
    "operator under a name": f"f = {FLASH}\nf(q)",
    "operator handed on": f"apply({FLASH}, q)",
    "operator in a list": f"for f in [{FLASH}]: f(q)",
    "operator returned": f"def f(): return {FLASH}",
    "operator as a default": f"def f(x={FLASH}): pass",
    "operator as a decorator": f"@{FLASH}\ndef f(): pass",
    "assigned": f"{FLASH} = f",
    "deleted": f"del {FLASH}.default",
}


@pytest.mark.parametrize("text", NEAR_THE_OPERATORS.values(), ids=NEAR_THE_OPERATORS.keys())
def test_nothing_near_the_attention_operators_is_allowed(text: str) -> None:
    assert rules(scan(f"import torch\n{text}")) & {"private-member", "native-extension", "foreign-assignment"}


@pytest.mark.parametrize("language", ["triton", "tilelang", "cutile"])
def test_a_tile_language_may_not_call_the_attention_operators(language: str) -> None:
    found = rules(scan(f"{KERNEL[language]}import torch\ndef run(q): {FLASH}.default(q)", language))
    assert {"private-member", "torch-compute"} <= found


ESCAPES = {
    "argument": "f(torch)",
    "keyword": "f(m=torch.cuda)",
    "return": "def f(): return torch",
    "default argument": "def f(m=torch): pass",
    "lambda default": "f = lambda m=torch: m",
    "list": "[torch][0].cuda",
    "dict": "{'m': torch}['m']",
    "tuple": "for m in (torch,): pass",
    "attribute": "class A:\n    def f(self): self.m = torch",
    "class body": "class A:\n    m = torch",
    "import in a class body": "class A:\n    import torch.cuda as c",
    "match": "match torch:\n    case m: pass",
    "with": "with torch as m: pass",
    "comprehension": "[m for m in torch]",
    "conditional expression": "f(torch if 1 else 2)",
    "walrus": "f(m := torch)",
    "part of torch": "f(torch.nn.functional)",
    "class of torch as an argument": "f(torch.Tensor)",
    "class of torch in a list": "for c in [torch.Tensor]: pass",
    "class of torch returned": "def f(): return torch.Tensor",
}


@pytest.mark.parametrize("text", ESCAPES.values(), ids=ESCAPES.keys())
def test_a_module_never_becomes_a_value(text: str) -> None:
    assert "module-as-value" in rules(scan(f"import torch\n{text}"))


@pytest.mark.parametrize(
    "text",
    [
        "isinstance(1, torch.Tensor)",
        "isinstance(1, (torch.Tensor, int))",
        "def f(x: torch.Tensor | None, y: tuple[torch.Tensor, int]) -> torch.Tensor: pass",
        "def f(stream: torch.cuda.Stream): pass",
        "from typing import Optional, Union\nT = Union[torch.Tensor, int]",
        "has = torch is not None",
        "has = hasattr(torch, 'float8_e4m3fn')",
    ],
)
def test_types_and_questions_about_modules_are_fine(text: str) -> None:
    assert hard(scan(f"import torch\n{text}")) == []


DISGUISED = {
    "eval": ("dynamic-code", "e = eval\ne('1')"),
    "eval through its module": ("dynamic-code", "import builtins as b\nb.eval('1')"),
    "eval from its module": ("dynamic-code", "from builtins import eval as e"),
    "builtin replaced": ("foreign-assignment", "import builtins\nbuiltins.max = f"),
    "builtins of another module": ("smuggled-module", "import torch\ntorch.builtins.print"),
    "builtins by computed name": ("dynamic-code", "import builtins\ngetattr(builtins, 'ev' + 'al')"),
    "eval handed on": ("dynamic-code", "list(map(eval, ['1']))"),
    "eval in a list": ("dynamic-code", "[eval][0]('1')"),
    "eval as a decorator": ("dynamic-code", "@eval\ndef f(): pass"),
    "eval as a default": ("dynamic-code", "def run(x, f=eval): pass"),
    "eval that may be shadowed": ("dynamic-code", "if 0: eval = None\neval('1')"),
    "eval in other letters": ("dynamic-code", "\uff45val('1')"),
    "annotations evaluated": ("dynamic-code", "from typing import get_type_hints"),
    "class from text": ("dynamic-code", "from dataclasses import make_dataclass as m"),
    "getattr with a sum": ("module-as-value", "import torch\ngetattr(torch, 'cu' + 'da')"),
    "getattr with an f-string": ("module-as-value", "import torch\na = 'da'\ngetattr(torch, f'cu{a}')"),
    "getattr with a name bound twice": ("dynamic-attribute", "n = 'shape'\nn = f()\ngetattr(x, n)"),
    "getattr handed on": ("dynamic-attribute", "import functools\nfunctools.reduce(getattr, ['a', 'b'])"),
    "attrgetter": ("dynamic-attribute", "import operator as o\no.attrgetter('a.b')"),
    "methodcaller": ("dynamic-attribute", "from operator import methodcaller"),
    "setattr": ("dynamic-attribute", "s = setattr\ns(1, 'a', 2)"),
    "update_wrapper": ("dynamic-attribute", "import functools\nfunctools.update_wrapper(f, g, ('equal',))"),
    "wraps with attributes": ("dynamic-attribute", "import functools\n@functools.wraps(f, ('equal',))\ndef g(): pass"),
    "getattr of a dunder": ("dynamic-attribute", "getattr(run, '__globals__')"),
    "dunder at the end of a chain": ("dunder-access", "def f(x): return x.shape.__class__.__base__"),
    "subclasses": ("dunder-access", "().__class__.__base__.__subclasses__()"),
    "builtins by name": ("namespace-access", "__builtins__"),
    "module attribute": ("foreign-assignment", "import torch\nm = torch\nm.equal = f"),
    "from-import": ("foreign-assignment", "from torch import nn as n\nn.functional.silu = f"),
    "class of torch": ("foreign-assignment", "from torch import Tensor as T\nT.equal = f"),
    "class that type() returns": ("question", "def run(x): type(x).equal = f"),
    "class that type() returned": ("question", "def run(x):\n    t = type(x)\n    t.equal = f"),
    "instance of an instance's class": ("question", "import torch\ntype(torch.cuda.current_stream())()"),
    "attribute read by a pattern": ("outside-language", "match run:\n    case object(__globals__=g): pass"),
    "members spread over a module": ("namespace-access", "import enum\nenum.global_enum(int)"),
    "class that claims another module": ("object-hooks", "class A:\n    __module__ = 'torch'"),
    "container changed in place": ("foreign-assignment", "import torch\nt = torch.ops.table\nt += [1]"),
    "private attribute of an object": ("private-member", "def run(x): x._backend = f"),
    "kernel's own attributes": (
        "foreign-assignment",
        "import functools\n@functools.wraps(f)\ndef k(x): pass\nk.fn = 1",
    ),
    "for target": ("foreign-assignment", "import torch\nfor torch.equal in [f]: pass"),
    "with target": ("foreign-assignment", "import torch\nwith f() as torch.equal: pass"),
    "unpacking": ("foreign-assignment", "import torch\ntorch.equal, x = f, 1"),
    "starred": ("foreign-assignment", "import torch\n*torch.equal, x = f, 1"),
    "augmented": ("foreign-assignment", "import torch\ntorch.backends.cuda.matmul.x |= True"),
    "annotated": ("foreign-assignment", "import torch\ntorch.equal: int = 1"),
    "deleted": ("foreign-assignment", "import torch\ndel torch.equal"),
    "comprehension target": ("foreign-assignment", "import torch\n[0 for torch.equal in [f]]"),
    "config": ("foreign-assignment", "import torch\ntorch._dynamo.config.recompile_limit = 512"),
    "item": ("foreign-assignment", "import torch\ntorch.ops.table['a'] = 1"),
    "environment": ("foreign-assignment", "import os\nos.environ['A'] = '1'"),
    "environment deleted": ("foreign-assignment", "from os import environ as e\ndel e['A']"),
    "environment updated": ("foreign-assignment", "import os\nos.environ.update(A='1')"),
    "list of another module": ("foreign-assignment", "import triton\ntriton.knobs.hooks.append(f)"),
    "environment by a computed name": ("environment", "import os\ndef f(n): return os.environ[n]"),
    "environment of a worker": ("environment", "import os\nos.getenv('TRITON_CACHE_DIR')"),
    "environment asked by 'in'": ("environment", "import os\n'HOME' in os.environ"),
    "environment from-import": ("environment", "from os import environ as e\ne['HOME']"),
    "getenv from-import": ("environment", "from os import getenv as g\ng('HOME')"),
    "environment handed on": ("environment", "import os\nprint(dict(os.environ))"),
    "os through an alias": ("os-call", "import os as o\ne = o\ne.kill(1, 9)"),
    "os from-import": ("os-call", "from os import _exit"),
    "module of a module": ("smuggled-module", "from torch import os"),
    "module of the standard library": ("smuggled-module", "import typing\ntyping.sys.modules"),
    "module of an object": ("smuggled-module", "def f(x): return x.y.ctypes"),
    "module by getattr": ("smuggled-module", "import torch\ngetattr(torch, 'inspect')"),
    "private module": ("private-member", "import collections\ncollections._sys.modules"),
    "stdout": ("namespace-access", "import contextlib\ncontextlib.redirect_stdout(None)"),
    "generator's frame": ("frame-access", "def f(g): return g.gi_frame"),
    "code object": ("imports-unknown", "from types import FunctionType"),
    "list of a set": ("unordered", "def f(x): return list({x, 'b'} | {'c'})"),
    "first of a set": ("unordered", "names = set(('a', 'b'))\ndef f(): return next(iter(names))"),
    "comprehension over a set": ("unordered", "def f(x): return [one for one in frozenset(x)]"),
    "popped from a set": ("unordered", "def f(x):\n    left = {'a', x}\n    return left.pop()"),
    "spread set": ("unordered", "def f(x): return (*{'a', x},)"),
    "wraps another function": (
        "dynamic-attribute",
        "import functools, torch\ndef f(x): pass\nfunctools.wraps(f)(torch.nn.functional.silu)",
    ),
    "wraps what a decorator returns": (
        "dynamic-attribute",
        "import functools\nfrom torch.nn.functional import silu\ndef f(x): pass\ndef give(g): return silu\n"
        "@functools.wraps(f)\n@give\ndef h(x): pass",
    ),
    "wraps passed around": (
        "dynamic-attribute",
        "import functools\ndef f(g): return functools.partial(functools.wraps, g)",
    ),
    "passes of a compiler": (
        "compiler-flags",
        "import tilelang\n@tilelang.jit(pass_configs={'tl.disable_safe_memory_legalize': True})\ndef f(): pass",
    ),
    "passes by member": (
        "compiler-flags",
        "import tilelang\nO = {tilelang.PassConfigKey.TL_CONFIG_INDEX_BITWIDTH: 32}\n"
        "@tilelang.jit(pass_configs=O)\ndef f(): pass",
    ),
    "passes changed later": (
        "compiler-flags",
        "import tilelang\nO = {'tl.enable_lower_ldgstg': True}\nO['tl.disable_thread_storage_sync'] = True\n"
        "@tilelang.jit(pass_configs=O)\ndef f(): pass",
    ),
    "passes from elsewhere": (
        "compiler-flags",
        "import tilelang\ndef make(passes): return tilelang.compile(1, pass_configs={**passes})",
    ),
    "file through torch": ("reads-files", "import torch\ntorch.load('x')"),
    "subclass of an alias": ("outside-language", "from torch import Tensor as T\nclass A(T): pass"),
    "parameter": ("outside-language", "import torch\nclass A(torch.nn.Parameter): pass"),
    "made a subclass": ("tensor-subclass", "import torch\ntorch.Tensor._make_subclass(int, 1)"),
    "graph": ("stream-or-graph", "import torch\ng = torch.cuda.CUDAGraph()"),
    "graph context": ("stream-or-graph", "import torch\nwith torch.cuda.graph(1): pass"),
    "stream by number": ("stream-or-graph", "import cuda.tile as ct\nct.launch(2, (1,), f, ())"),
    "side stream of an object": ("stream-or-graph", "def f(x): x.stream.wait_stream(1)"),
    "inline CUDA": ("native-extension", "from torch.utils import cpp_extension as c\nc.load_inline('a')"),
    "library of operators": ("native-extension", "import torch\ntorch.ops.load_library('a.so')"),
    "C module": ("native-extension", "import torch\ntorch._C._cuda_setStream"),
    "dispatch mode": ("private-member", "from torch.utils._python_dispatch import TorchDispatchMode"),
    "function mode": ("dispatch-override", "from torch.overrides import TorchFunctionMode"),
    "operator of torch": ("dispatch-override", "import torch\n@torch.library.custom_op('aten::mm')\ndef f(): pass"),
    "hook of torch functions": ("object-hooks", "class A:\n    @classmethod\n    def __torch_function__(cls): pass"),
    "hook by assignment": ("object-hooks", "class A:\n    __class__ = property(len)"),
    "class of an instance": ("object-hooks", "def f(x): x.__class__ = int"),
    "metaclass": ("outside-language", "class M(type): pass"),
    "metaclass by keyword": ("outside-language", "class M(metaclass=type): pass"),
    "pattern by position": ("outside-language", "match run:\n    case int(x): pass"),
    "field that Python reads": ("outside-language", "class A:\n    __class__: int = 1"),
    "captured name that Python reads": ("outside-language", "match [1]:\n    case [__class__]: pass"),
    "keyword that Python reads": ("outside-language", "f(__globals__=1)"),
    "alias that Python reads": ("outside-language", "import math as __loader__"),
    "named tuple by call": ("outside-language", "from collections import namedtuple\nnamedtuple('T', '__class__')"),
    "named tuple of typing by call": ("outside-language", "import typing\ntyping.NamedTuple('T', [('a', int)])"),
    "enumeration": ("outside-language", "import enum\nclass Mode(enum.Enum):\n    FAST = 1"),
    "abstract class": ("outside-language", "from abc import ABC\nclass A(ABC): pass"),
    "class of an own class": ("outside-language", "class A: pass\nclass B(A): pass"),
    "class in a class": ("outside-language", "class A:\n    class B: pass"),
    "decorated class": ("outside-language", "@f\nclass A: pass"),
    "computed options of a dataclass": (
        "outside-language",
        "import dataclasses as d\nX = {}\n@d.dataclass(**X)\nclass A: pass",
    ),
    "decorated method": ("outside-language", "class A:\n    @f\n    def g(self): pass"),
    "statement in a class": ("outside-language", "class A:\n    for x in (1,): pass"),
    "coroutine": ("outside-language", "async def f(): pass"),
    "storage replaced": ("unchecked-memory", "def run(x, y): x.set_(y)"),
    "storage grown": ("unchecked-memory", "def run(x): x.resize_(9)"),
    "indices without a check": ("unchecked-memory", "import torch\ntorch.sparse_csr_tensor([0], [9], [1.0])"),
    "attribute of the module": ("object-hooks", "def __getattr__(name): pass"),
    "profiler": ("process-state", "import torch\ntorch.profiler.profile()"),
    "tf32 for everyone": ("process-state", "import torch\ntorch.set_float32_matmul_precision('high')"),
    "multiprocessing": ("imports-concurrency", "import torch.multiprocessing as mp"),
    "sleep": ("imports-clock", "from time import sleep"),
    "spin": ("private-member", "import torch\ntorch.cuda._sleep(1)"),
    "finaliser": ("imports-introspection", "import weakref"),
    "encoded text": ("imports-serialisation", "import base64"),
    "driver": ("imports-native-code", "from cuda.bindings import driver"),
    "library": ("imports-native-code", "import tvm"),
    "function of the module": ("keeps-state", "def run(x): run.last = x"),
    "mutable default": ("keeps-state", "def run(x, seen={}): pass"),
    "class that counts": ("keeps-state", "class A:\n    n = []\ndef run(x): A.n.append(x)"),
    "global statement": ("keeps-state", "n = 0\ndef run(x):\n    global n\n    n += 1"),
    "cache on the tensor": ("keeps-state", "def run(x): x.cached = 1"),
    "identity": ("question", "def run(x): return id(x)"),
}


@pytest.mark.parametrize(("rule", "text"), DISGUISED.values(), ids=DISGUISED.keys())
def test_a_disguise_is_seen_through(rule: str, text: str) -> None:
    assert rule in rules(scan(text))


def test_bad_code_in_an_unreachable_place_is_found_at_its_line() -> None:
    found = scan("def run(x):\n    if False:\n        for _ in ():\n            exec('')\n")
    assert [(finding.line, finding.rule) for finding in found] == [(4, "dynamic-code")]


# -- several files ----------------------------------------------------------------------------------------------------


def test_every_source_is_scanned_and_findings_name_their_file() -> None:
    found = scan("from . import part\n", part="import gc\n")
    assert [(finding.path, finding.rule) for finding in found] == [("part.py", "imports-introspection")]


@pytest.mark.parametrize(
    "text",
    [
        "from .part import t\nt.cuda.Stream()",
        "from part import t\nt.cuda.Stream()",
        "from . import part\npart.t.cuda.Stream()",
        "import part as p\np.t.cuda.Stream()",
        "from .part import *\nt.cuda.Stream()",
    ],
)
def test_an_alias_is_followed_through_another_source(text: str) -> None:
    assert "stream-or-graph" in rules(scan(text, part="import torch as t\n"))


def test_sources_may_use_each_other() -> None:
    parts = {"part": "WIDTH = 4\ndef f(x): pass\n"}
    assert scan("from .part import WIDTH, f\nimport part\nfrom part import *\npart.f(WIDTH)\n", **parts) == ()


def test_an_own_source_is_not_a_place_for_state() -> None:
    assert "foreign-assignment" in rules(scan("from . import part\npart.WIDTH = 5", part="WIDTH = 4\n"))


@pytest.mark.parametrize("text", ["from . import hidden", "from .hidden import f", "from .. import f"])
def test_a_file_that_is_not_listed_is_not_imported(text: str) -> None:
    assert "unlisted-source" in rules(scan(text, part=""))


@pytest.mark.parametrize("name", ["gc", "torch", "triton", "numpy", "math", "flash_attn"])
def test_a_source_takes_no_name_of_another_module(name: str) -> None:
    sources = {"kernel.py": b"", f"{name}.py": b""}
    record = solution(paths=tuple(sources), dependencies=["flash-attn>=2"])
    assert rules(scan_sources(record, sources)) == {"shadowed-module"}


def test_loaded_source_is_not_imported_by_its_plain_name() -> None:
    assert "imports-unknown" in rules(scan("def run(x):\n    import part\n", part=""))
    assert scan("def run(x):\n    from . import part\n", part="") == ()


@pytest.mark.parametrize(("path", "refused"), [("a.so", True), ("a.cu", True), ("notes.md", False), ("t.json", False)])
def test_files_that_are_not_python_must_be_inert(path: str, refused: bool) -> None:
    sources = {"kernel.py": b"", path: b"\x00"}
    found = rules(scan_sources(solution(paths=tuple(sources)), sources))
    assert found == ({"unscanned-source"} if refused else set())


# -- what cannot be read ----------------------------------------------------------------------------------------------

UNREADABLE = {
    "no Python": b"def run(x:\n",
    "no UTF-8": b"x = '\xff'\n",
    "another encoding": b"# -*- coding: utf-7 -*-\nx = 1\n",
    "latin-1, which would parse": b"# coding: latin-1\nx = '\xff'\n",
    "null bytes": b"x = 1\x00\n",
    "too large": b"#" * (1 << 20) + b"\n\n",
    "deep parentheses": b"(" * 5000 + b")" * 5000,
    "deep attributes": b"x" + b".a" * 20000,
    "deep sums": b"+".join([b"1"] * 20000),
    "endless meanings": b"import torch as t0\n" + b"".join(b"x = t0.a%d\n" % i for i in range(200)),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("content", UNREADABLE.values(), ids=UNREADABLE.keys())
def test_a_source_that_cannot_be_read_is_refused(content: bytes) -> None:
    found = hard_findings(scan_sources(solution(), {"kernel.py": content}))
    assert {"unparsable-source"} == rules(found)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "text",
    [
        "\n".join(f"a{i} = a{i + 1} or a{i + 1}" for i in range(60)) + "\nimport torch\na60 = torch.cuda",
        "import torch\na = b = torch\na = b.x\nb = a.y\n",
        "\n".join(f"a{i} = a{i + 1}" for i in range(400)) + "\nimport torch\na400 = torch.cuda",
    ],
    ids=["doubling", "circular", "long"],
)
def test_aliases_made_to_confuse_take_no_time(text: str) -> None:
    assert rules(scan(text)) <= {"unparsable-source", "unlisted-member"}


# -- tile languages ---------------------------------------------------------------------------------------------------

TRITON = """
import torch, triton
import triton.language as tl

@triton.jit
def helper(x):
    return x * 2

@triton.jit
def kernel(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    value = helper(tl.load(x + i)).to(tl.float32)
    value = tl.sum(value.exp() @ value) + value.sum()
    tl.store(out + i, value)

def run(x: torch.Tensor, out: torch.Tensor, *, BLOCK=128):
    rows, width = x.shape
    part = torch.empty((rows, 2), dtype=torch.float32, device=x.device)
    torch._check(x.stride(-1) == 1)
    kernel[(triton.cdiv(rows * width, BLOCK),)](x.view(-1), part, out.stride(0), N=max(width, BLOCK) ** 2)
"""

COMPUTES = {
    "function": "torch.softmax(x, -1, out=out)",
    "functional": "torch.nn.functional.silu(x)",
    "alias of functional": "import torch.nn.functional as F\n    F.silu(x)",
    "alias of a function": "mm = torch.mm\n    mm(x, x)",
    "function handed on": "list(map(torch.neg, [x]))",
    "operator of ATen": "torch.ops.aten.mm.out(x, x, out=out)",
    "unbound method": "torch.Tensor.matmul(x, x)",
    "method": "x.matmul(x)",
    "method of a result": "x.view(-1).softmax(-1)",
    "method in place": "out.mul_(2)",
    "compiled": "torch.compile(lambda y: y)(x)",
    "linear algebra": "torch.linalg.norm(x)",
}


def test_a_triton_solution_that_launches_its_kernel_is_clean() -> None:
    assert scan(TRITON, "triton") == ()


@pytest.mark.parametrize("text", COMPUTES.values(), ids=COMPUTES.keys())
def test_computing_with_torch_is_for_python_solutions(text: str) -> None:
    assert "torch-compute" in rules(scan(f"{TRITON}    {text}\n", "triton"))
    assert "torch-compute" not in rules(scan(f"import torch\ndef run(x, out):\n    {text}\n", "python"))


@pytest.mark.parametrize("text", ["x @ x", "out += x", "-x", "2 * out", "out @= x"])
def test_operators_on_tensors_are_for_python_solutions(text: str) -> None:
    assert "tensor-arithmetic" in rules(scan(f"{TRITON}    {text}\n", "triton"))
    assert hard(scan(f"import torch\ndef run(x, out):\n    {text}\n", "python")) == []


def test_torch_has_no_place_in_a_kernel_either() -> None:
    assert "torch-compute" in rules(scan(TRITON.replace("return x * 2", "return torch.exp(x)"), "triton"))


def test_helper_of_kernels_counts_as_one_unless_a_host_calls_it() -> None:
    text = "import cuda.tile as ct\ndef helper(t): return t.sum()\n@ct.kernel\ndef kernel(x): helper(x)\n"
    assert scan(text, "cutile") == ()
    assert "torch-compute" in rules(scan(f"{text}def run(x): helper(x)\n", "cutile"))


def test_a_function_merely_called_jit_is_no_kernel() -> None:
    text = f"{TRITON}\ndef jit(f): return f\n@jit\ndef sneaky(x): return x.softmax(-1)\n"
    assert "torch-compute" in rules(scan(text, "triton"))


def test_the_python_that_builds_a_tilelang_kernel_is_host_code() -> None:
    text = "import tilelang, torch\nimport tilelang.language as T\n@tilelang.jit\ndef build(n):\n    {}\n"
    assert "torch-compute" in rules(scan(text.format("n.matmul(n)"), "tilelang"))
    assert scan(text.format("@T.prim_func\n    def main(a): T.evaluate(a.sum() @ a)"), "tilelang") == ()


@pytest.mark.parametrize("language", ["triton", "tilelang", "cutile"])
def test_a_solution_in_a_tile_language_has_a_kernel(language: str) -> None:
    assert rules(scan("def run(x, out): pass", language)) == {"no-kernel"}
    assert scan(KERNEL[language] + "def run(x, out): pass", language) == ()


DOORS = {
    "compile": ("triton", "triton.compile('kernel.ptx')"),
    "compiled kernel": ("triton", "from triton.compiler import CompiledKernel"),
    "driver": ("triton", "triton.runtime.driver.active.utils.load_binary('k', b'', 0, 0)"),
    "launcher": ("triton", "d = triton.runtime.driver.active\n(d.launcher_cls)(1)"),
    "build of C": ("triton", "from triton.runtime.build import compile_module_from_src"),
    "device library": ("triton", "_kernel[(1,)](1, extern_libs={'a': '/tmp/a.bc'})"),
    "device library as a key": ("triton", "_kernel[(1,)](1, **{'extern_libs': {'a': 'a.bc'}})"),
    "binary of a kernel": ("triton", "_kernel.warmup(1, grid=(1,)).asm['cubin'] = b''"),
    "source of a kernel": ("triton", "_kernel._unsafe_update_src('def f(): pass')"),
    "external function": ("triton", "import triton.language as tl\ntl.extern_elementwise('a', 'b', [])"),
    "CUDA source": ("tilelang", "T.import_source('__device__ int f();')"),
    "source after code generation": ("tilelang", "@tilelang.register_cuda_postproc\ndef f(code, target): return ''"),
    "host function": ("tilelang", "T.call_packed('runtime.ModuleLoadFromFile', 'a.so')"),
    "C library": ("tilelang", "T.call_extern('int32', 'system', 'true')"),
    "C library in disguise": ("tilelang", "T.call_extern('int32', '__libc_system', 'true')"),
    "function that looks like an intrinsic": ("tilelang", "T.call_extern('int32', '__mine', 1)"),
    "call in assembler": (
        "triton",
        "import triton.language as tl\ntl.inline_asm_elementwise('call vprintf, (a, b);', '=r', [])",
    ),
    "memory that outlives a launch": (
        "triton",
        "import triton.language as tl\ntl.inline_asm_elementwise('} .global .u32 seen; {', '=r', [])",
    ),
    "TVM": ("tilelang", "from tilelang import tvm"),
    "foreign binary": ("cutile", "from cuda.tile import compilation"),
}


@pytest.mark.parametrize(("language", "text"), DOORS.values(), ids=DOORS.keys())
def test_toolchains_are_no_door_to_foreign_code(language: str, text: str) -> None:
    assert "native-extension" in rules(scan(f"{KERNEL[language]}{text}\n", language))


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("triton", "triton.set_allocator(lambda size, align, stream: None)"),
        (
            "triton",
            "@triton.autotune(configs=[triton.Config({'N': 2}, num_warps=4)], key=['n'])\n@triton.jit\ndef k(n): pass",
        ),
        ("triton", "def hook(nargs):\n    nargs['desc'].block_shape = [nargs['N'], 1]"),
        ("triton", "from triton.language.extra.cuda import libdevice\n@triton.jit\ndef k(n): libdevice.tanh(n)"),
        ("triton", "_kernel[(1,)](1, launch_pdl=True, num_warps=4)"),
        ("triton", "triton.runtime.driver.active.get_current_device()"),
        ("tilelang", "T.call_extern('uint32', '__match_any_sync', 0xFFFFFFFF, 1)"),
        ("tilelang", "T.__exp(1.0)"),
        ("tilelang", "tilelang.compile(_kernel, target='cuda')"),
        ("cutile", "import torch\nct.launch(torch.cuda.current_stream(), (1,), _kernel, ())"),
    ],
)
def test_what_kernels_really_need_is_clean(language: str, text: str) -> None:
    assert hard(scan(f"{KERNEL[language]}{text}\n", language)) == []


# -- dependencies -----------------------------------------------------------------------------------------------------


def test_declared_library_is_noted_and_an_undeclared_one_refused() -> None:
    sources = {"kernel.py": b"import flash_attn"}
    assert rules(scan_sources(solution(), sources)) == {"imports-unknown"}
    declared = scan_sources(solution(dependencies=["flash-attn >= 2.7"]), sources)
    assert rules(declared) == {"imports-library"}
    assert hard(declared) == []


@pytest.mark.parametrize("name", ["ctypes", "cffi", "threading", "sys", "cuda.bindings"])
def test_declaring_a_refused_module_does_not_help(name: str) -> None:
    sources = {"kernel.py": f"import {name}".encode()}
    assert hard(scan_sources(solution(dependencies=[name.replace(".", "-"), "cuda"]), sources))


def test_a_language_is_imported_by_its_own_solutions_only() -> None:
    assert rules(scan("import triton")) == {"imports-unknown"}
    assert rules(scan("import cuda.tile")) == {"imports-unknown"}


# -- the shipped catalog ----------------------------------------------------------------------------------------------


@pytest.mark.records("name")
@pytest.mark.parametrize("name", sorted(CATALOG.solutions))
def test_nothing_in_the_shipped_solutions_is_refused(name: str) -> None:
    shipped = Catalog((shipped_root(),)).solution(name)
    assert hard(scan_sources(shipped.record, shipped.sources)) == []


# -- misspelt names ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("tl.laod(x)", "triton.language.load"),
        ("tl.aragne(0, 8)", "triton.language.arange"),
        ("tl.maximun(x, x)", "triton.language.maximum"),
        ("triton.next_powr_of_2(8)", "triton.next_power_of_2"),
    ],
)
def test_misspelt_member_names_the_one_that_was_meant(written: str, meant: str) -> None:
    text = f"import triton\nimport triton.language as tl\n\n\n@triton.jit\ndef kernel(x):\n    {written}\n"
    text += "\n\ndef run(x, out):\n    kernel[(1,)](x)\n"
    (finding,) = hard(scan(text, "triton"))
    assert f"did you mean {meant}?" in finding


def test_refused_member_without_a_like_one_has_no_suggestion() -> None:
    (finding,) = hard(scan("import functools\n\n\ndef run(x, out):\n    functools.RLock\n"))
    assert "did you mean" not in finding


def test_a_reference_that_counts_its_calls_is_refused():
    definition = CATALOG.definition("rms_norm")
    counting = "calls = [0]\n\n\ndef counted():\n    calls[0] += 1\n\n\n"
    assert hard_findings(scan_definition(definition)) == ()
    changed = definition.model_copy(update={"reference": definition.reference + "\n\n" + counting})
    assert {finding.rule for finding in hard_findings(scan_definition(changed))} == {"keeps-state"}
