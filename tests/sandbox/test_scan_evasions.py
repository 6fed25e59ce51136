"""Ways past a list of refused names, each refused, beside honest idioms, each left alone."""

from __future__ import annotations

import time

import pytest

from tilegym_db.records import Solution
from tilegym_db.sandbox.scan import hard_findings, scan_sources
from tilegym_db.sandbox.scan.tables import MEMBERS, VALUES, refusal


def refused(text: str, *, language: str = "python", dependencies: tuple[str, ...] = ()) -> list[str]:
    record = Solution.from_dict(
        {
            "name": "mine",
            "definition": "row_scale",
            "author": "tests",
            "spec": {"language": language, "entry_point": "kernel.py::run", "dependencies": list(dependencies)},
            "sources": [{"path": "kernel.py"}],
        },
        "test",
    )
    return [str(finding) for finding in hard_findings(scan_sources(record, {"kernel.py": text.encode()}))]


EVASIONS = {
    # a module reached through a harmless one
    "builtins of enum": "import enum\nenum.bltns.exec('1')",
    "builtins of enum, imported": "from enum import bltns",
    "builtins of enum, renamed": "import enum as e\nb = e\nb.bltns.open('a')",
    "sys of enum": "import enum\nenum.sys.modules",
    "sys of dataclasses": "from dataclasses import sys",
    "builtins of dataclasses": "import dataclasses\ndataclasses.builtins.exec('')",
    "copyreg of copy": "import copy\ncopy.copyreg.add_extension",
    "types of functools": "import functools\nfunctools.GenericAlias",
    "recursive_repr of functools": "import functools\nfunctools.recursive_repr",
    "os of logging": "import logging\nlogging.os.getpid()",
    "io of logging": "import logging\nlogging.io.open('a')",
    "handlers of logging": "import logging\nlogging.handlers",
    "root logger's handlers": "import logging\nlogging.getLogger().handlers[0].stream",
    "root logger's manager": "import logging\nlogging.getLogger('a').manager.loggerDict",
    "sys of warnings": "import warnings\nwarnings.sys",
    "module of catch_warnings": "import warnings\nwarnings.catch_warnings()._module",
    "contextlib's os": "import contextlib\ncontextlib.os.remove('a')",
    "json's codecs": "import json\njson.codecs.open('a')",
    "json's scanner": "import json\njson.decoder.scanner",
    "platform's subprocess": "import platform\nplatform.subprocess.run('a')",
    "re's functools": "import re\nre.functools",
    "re's enum": "import re\nre.enum.bltns",
    "numbers of statistics": "import statistics\nstatistics.random",
    "torch's module, assigned by walrus": "import torch\nif (m := torch): m.serialization.load('a')",
    "torch under a choice": "import torch\nm = torch if 1 else None\nm.hub.load('a', 'b')",
    "torch in a class body": "import torch\nclass A:\n    x = torch.serialization",
    "torch in a comprehension": "import torch\n[torch.storage for _ in range(1)]",
    "torch in a decorator": "import torch\n@torch.jit.script\ndef f(x): return x",
    "torch in a default": "import torch\ndef run(x, f=torch.frombuffer.__self__): pass",
    "torch in a match": "import torch\nmatch torch.functional.torch:\n    case _: pass",
    "torch in an f-string": "import torch\nf'{torch.utils.collect_env.run}'",
    "torch in a lambda": "import torch\nrun = lambda x: torch.utils.benchmark",
    "core's builtins": "import triton.language as tl\ntl.core.builtins",
    "environment of tilelang": "import tilelang\ntilelang.env.os.system('a')",
    "library of tilelang": "import tilelang\ntilelang._LIB",
    "numpy's ctypes": "import numpy\nnumpy.ctypeslib.load_library('a', 'b')",
    # files and text of torch and numpy
    "torch.load": "import torch\ntorch.load('a')",
    "import of cpp_extension": "import torch.utils.cpp_extension",
    "import of hub": "from torch import hub",
    "inductor": "import torch._inductor.codecache",
    "inductor, imported": "from torch._inductor import codecache",
    "classes": "import torch\ntorch.classes.load_library('a')",
    "operator that reads a file": "import torch\ntorch.ops.aten.from_file('a')",
    "function that reads a file": "import torch\ntorch.from_file('a', size=4)",
    "operator of another library": "import torch\ntorch.ops.image.read_file('a')",
    "operator of a new library": "import torch\ntorch.ops.mine.f(1)",
    "storage of a file": "import torch\ntorch.UntypedStorage.from_file('a', False, 4)",
    "script of text": "import torch\ntorch.jit.CompilationUnit('def f(): pass')",
    "trace": "import torch\ntorch.jit.trace(f, 1)",
    "graph of text": "import torch\ntorch.parse_ir('graph')",
    "flags of a C++ compiler": "import torch\ntorch.compile(f, options={'cpp.cxx': ('/tmp/a',)})",
    "array of a file": "import numpy as np\nnp.load('a')",
    "numbers of a file": "from numpy import fromfile",
    "memory of a file": "import numpy as np\nnp.memmap('a')",
    "source of data": "import numpy as np\nnp.DataSource().open('a')",
    "array's file": "import torch\ndef run(x): x.numpy().tofile('a')",
    "array's dump": "def run(x): x.numpy().dump('a')",
    "lib of numpy": "import numpy\nnumpy.lib.npyio.load('a')",
    "lib of numpy, imported": "from numpy.lib import npyio",
    # text that is evaluated
    "single dispatch": "import functools\n@functools.singledispatch\ndef f(x): pass",
    "single dispatch of methods": "from functools import singledispatchmethod as s",
    "type hints": "import typing\ntyping.get_type_hints(f)",
    "type hints of the extension": "from typing_extensions import get_type_hints",
    "forward reference": "import typing\ntyping.ForwardRef('f()')._evaluate({}, {}, frozenset())",
    "annotation that calls": "def f(x: \"__import__('os').getpid()\"): pass",
    "annotation that calls, nested": "from typing import Optional\ndef f(x: Optional['g()']): pass",
    "annotation of a field that calls": "import dataclasses\n@dataclasses.dataclass\nclass A:\n    x: 'g()'",
    "annotation returned that calls": "def f() -> 'g()': pass",
    "annotation with a lambda": "def f(x: 'lambda: 1'): pass",
    "annotation with a dunder": "def f(x: 'f.__globals__'): pass",
    "annotation by a name": "T = 'g()'\ndef f(x: T): pass",
    "annotation by a chain of names": "T = 'g()'\nU = T\ndef f(x: U): pass",
    "annotation by a sum": "def f(x: 'g' + '()'): pass",
    "annotation by a sum of names": "A = 'g'\nT = A + '()'\ndef f(x: T): pass",
    "annotation by an f-string": "def f(x: f'g()'): pass",
    "annotations of the module": "x: int = 1\n__annotations__",
    "class of fields": "import dataclasses\ndataclasses.make_dataclass('A', ['x'])",
    "class in another module": "import collections\ncollections.namedtuple('A', 'x', module='torch')",
    "members in another module": "import enum\nenum.Enum('A', 'x y', module='torch')",
    "keywords unknown": "import enum\nk = {}\nenum.Enum('A', 'x y', **k)",
    "formatter": "import string",
    "format of an attribute": "def run(x): '{0.__class__}'.format(x)",
    "format of an item": "def run(x): '{0[a]}'.format(x)",
    "format of a nested attribute": "def run(x): '{:{0.a}}'.format(x)",
    "format of a variable": "def f(t, x): return t.format(x)",
    "format of a mapping": "'{a.b}'.format_map({'a': 1})",
    "format handed on": "f = '{0.a}'.format",
    "format of the class": "str.format('{0.__globals__}', len)",
    # objects that lead to others
    "mro of a class": "def run(x): type(x).__mro__",
    "mro, called": "def run(x): int.mro()",
    "globals of a method": "import torch\ntorch.Tensor.__init__.__globals__",
    "self of a builtin": "print.__self__",
    "wrapped function": "import functools\n@functools.cache\ndef f(): pass\nf.__wrapped__",
    "object of an error": "import math\ntry: math.a\nexcept AttributeError as e: e.obj",
    "traceback of an error": "def f(e): return e.__traceback__.tb_frame",
    "object of an error, named by a class": "class A: obj = storage = 0\ndef f(e): return e.obj.storage",
    "format by getattr": "getattr('{0.__class__}', 'format')(print)",
    "format by a pattern": "match '{0.a}':\n    case str(format=f): pass",
    "type by its call": "type.__call__(type, 'A', (), {})",
    "interface of the driver": "import triton\ntriton.runtime.driver.active.get_device_interface()",
    "clock of Triton": "import triton\ntriton.testing.do_bench(print)",
    "clock of the device": "from triton.language.extra.cuda import globaltimer",
    "stream of an operator": "from torch.ops.aten import record_stream",
    "parallel modules": "import torch\ntorch.nn.DataParallel(1)",
    "members of a language's tensors": "import triton.language as tl\n@tl.core._tensor_member_fn\ndef f(x): pass",
    "interrupt": "raise KeyboardInterrupt",
    "object hooks": "object.__getattribute__(1, 'real')",
    "getter of a property": "def f(p): return p.fget",
    "reduce over getattr": "import functools\nfunctools.reduce(getattr, ['a'], print)",
    "partial of getattr": "from functools import partial as p\np(getattr, 1)",
    "map of getattr": "list(map(getattr, [1], ['real']))",
    "attrgetter": "import operator\noperator.attrgetter('__globals__')",
    "methodcaller": "from operator import methodcaller as m",
    "call of the operator": "import operator\noperator.call(print)",
    "getattr of a value": "def f(x): return getattr(x, 'gi_frame')",
    "pattern that reads": "match print:\n    case object(obj=m): pass",
    "descriptor's function": "def f(m): return m.__func__",
    "frame of a generator": "def f(g): return g.gi_frame.f_back",
    "attribute that nothing has": "def run(x): x.nothing_has_this",
    "kernel's module": "def f(k): return k.fn.src",
    "star": "from math import *",
    "clock of a testing module": "from torch.testing import _internal",
    "own class that names a frame": "class A:\n    f_back = 1\ndef f(x): return x.f_back",
    "harness": "import tilegym_db",
    # texts that become code, or attributes, elsewhere
    "fields named by text": "import dataclasses\n@dataclasses.dataclass\nclass A:\n    __annotations__ = {'x): g() #': int}",
    "annotations of an instance": "class A:\n    __annotations__ = {'x': 'g()'}",
    "annotations by attribute": "def f(x): pass\nf.__annotations__ = {'x': 'g()'}",
    "signature of an instance": "class A:\n    __signature__ = '(x=g())'",
    "text of a signature": "class A:\n    __text_signature__ = '(x=g())'",
    "wrapped by hand": "class A:\n    __wrapped__ = len",
    "namespace with unknown names": "import types\ntypes.SimpleNamespace(**{'__annotations__': {'x': 'g()'}})",
    "namespace of a mapping": "from types import SimpleNamespace as s\ns({'__annotations__': {'x': 'g()'}})",
    "attributes that wraps sets": "import functools\n@functools.wraps(len, assigned=('a',))\ndef f(): pass",
    "schema of changed annotations": "import torch\nf.__annotations__ = {}\ntorch.library.infer_schema(f, mutates_args=())",
    "operator of Triton with a text": "import torch\n@torch.library.triton_op('a::b', mutates_args={})\n"
    "def f(x: 'g()') -> torch.Tensor: return x",
    # clocks and numbers of the machine
    "clock in assembler": "ASM = 'mov.u64 $0, %globaltimer;'",
    "clock in assembler, in two parts": "ASM = 'mov.u64 $0, %glob' + 'altimer;'",
    "cycles in assembler": "def f(n): return f'mov.u32 {n}, %clock;'",
    "clock by names": "A = '%glob'\nB = 'altimer'\nASM = f'mov.u64 $0, {A}{B};'",
    "clock by a join": "ASM = ''.join(['mov.u32 $0, %', 'clock', ';'])",
    "clock by a repetition": "P = '%' * 1\nASM = 'mov.u32 $0, ' + P + 'clock;'",
    "number of a launch": "ASM = 'mov.u64 $0, %gridid;'",
    "clock of a number": "import uuid\nuuid.uuid1()",
    "secret numbers": "import secrets\nsecrets.token_bytes(4)",
    "time of a log record": "import logging\nclass F(logging.Filter):\n    def filter(self, r): return r.created",
    "process of a log record": "import logging\ndef f(r): return r.process",
    "caller by a logger": "import logging\nlogging.getLogger('a').findCaller()",
    "code of a graph": "import torch\ndef b(gm, i): gm.graph.on_generate_code(len)\ntorch.compile(len, backend=b)",
}  # fmt: skip
QUESTIONS = (
    *(f"def run(x): return x.{name}" for name in (
        "is_leaf", "requires_grad", "grad", "grad_fn", "_version", "is_inference()", "untyped_storage().nbytes()", "is_shared()",
        "is_pinned()", "_base", "_is_view()", "names", "__class__", "__class__.__name__", "__dict__", "retains_grad",
    )),
    *(f"import torch\ndef run(x): return torch.{name}" for name in (
        "is_grad_enabled()", "is_inference_mode_enabled()", "get_default_dtype()", "is_autocast_enabled()", "is_inference(x)",
        "cuda.is_initialized()", "cuda.memory_allocated()", "cuda.max_memory_reserved()", "cuda.memory_stats()",
        "cuda.mem_get_info()", "cuda.current_stream().priority", "cuda.is_current_stream_capturing()", "get_num_threads()",
        "get_float32_matmul_precision()", "backends.cuda.matmul.allow_tf32", "backends.cudnn.deterministic",
        "are_deterministic_algorithms_enabled()", "compiler.is_compiling()", "_dynamo.is_compiling()", "jit.is_scripting()",
        "utils.data.get_worker_info()", "initial_seed()", "get_autocast_gpu_dtype()",
    )),
    *(f"import torch\ndef run(x): return {text}" for text in (
        "hasattr(x, 'grad')", "getattr(x, 'grad', None)", "hasattr(x, n)", "isinstance(x, torch.nn.Parameter)", "id(x)",
        "hash(x)",
        "type(x) is torch.Tensor", "issubclass(f(x), torch.Tensor)", "dir(x)", "repr(x)",
        "callable(x)", "hasattr(torch, 'mps')",
    )),
    "try: x\nexcept NameError: pass",
    "try: x\nexcept MemoryError: pass",
    "try: x.y\nexcept AttributeError: pass",
    "try: pass\nfinally: pass",
    "def f(n): return f(n + 1)",
    "def f(n): return g(n)\ndef g(n): return h(n)\ndef h(n): return f(n)",
    "f = lambda n: f(n - 1)",
    "def f(n):\n    def g(m): return f(m)\n    return g(n)",
    "import sys\n'pytest' in sys.modules",
    "import time\ntime.time()",
)  # fmt: skip
"""Questions whose answers differ between the harness and a model."""


@pytest.mark.parametrize("text", QUESTIONS)
def test_question_about_being_judged_is_refused(text: str) -> None:
    assert refused(text)


DECLARED = ("numpy", "tilelang", "triton", "tilegym-db")


ADDRESSES = (
    "return seen[x.data_ptr()]",
    "return x.data_ptr() == y.data_ptr()",
    "return x.data_ptr",
    "return x.data_ptr() % (1 << 60)",
    "return x.data_ptr() % n",
    "return 1 if x.data_ptr() else 2",
    "return x.data_ptr() // 16",
    "return 16 % x.data_ptr()",
    "a = x.data_ptr()\n    return a",
    "a = 0\n    a |= x.data_ptr() // 2\n    return a in seen",
    "a = x.data_ptr()\n    return a & -n",
    "a = x.data_ptr()\n    b = a | 0\n    return b > 2",
    "def f(*s): return s\n    return f(x.data_ptr())",
    "return print(x.data_ptr())",
    "return f'{x.data_ptr()}'",
    "return [x.data_ptr()]",
    "return lambda: x.data_ptr()",
    "return [p for p in (x.data_ptr(),)]",
    "a = x.data_ptr()\n    return lambda: a",
)
ALIGNMENTS = (
    "return x.data_ptr() % 16 == 0",
    "return (x.data_ptr() | y.data_ptr()) % N",
    "return any(t.data_ptr() % 16 for t in (x, y))",
    "a = n\n    for t in (x, y):\n        a |= t.data_ptr() // t.element_size()\n    return a & -a",
    "a = x.data_ptr() | y.data_ptr()\n    b = n | a // 2 | 8\n    return min(b & -b, 4)",
    "def widest(*s):\n        b = 0\n        for one in s:\n            b |= one\n        return b & -b\n"
    "    return widest(n, x.data_ptr() // 2)",
)


@pytest.mark.parametrize("body", ADDRESSES)
def test_address_as_a_value_is_refused(body: str) -> None:
    assert any("address-as-value" in finding for finding in refused(f"N = 8\ndef run(x, y, n):\n    {body}\n"))


@pytest.mark.parametrize("body", ALIGNMENTS)
def test_address_that_decides_an_alignment_passes(body: str) -> None:
    assert refused(f"N = 8\ndef run(x, y, n):\n    {body}\n") == []


WORDS_OF_ASSEMBLER = {
    "two parameters": "def f(a, b): return f'mov.u32 $0, {a}{b};'\nf('%c', 'lock')",
    "a part of a name": "def f(a): return f'mov.u32 $0, %c{a};'",
    "a part of an instruction": "def f(a): return f'ca{a} g;'",
    "a sum": "def f(a): return 'cal' + a",
    "a replacement": "A = 'mov.u32 $0, %c.lock;'.replace('.l', 'l')",
    "a format": "A = 'mov.u32 $0, %{}lock;'.format('c')",
    "a character": "A = f'{chr(37)} clock'",
    "an end": "def f(a): return [a, '%clo']",
    "a percent sign": "def f(a): return '%s' % a",
}
"""Words of assembler that are put together from parts, in a source that has assembler."""


@pytest.mark.parametrize("text", WORDS_OF_ASSEMBLER.values(), ids=WORDS_OF_ASSEMBLER.keys())
def test_word_of_assembler_in_parts_is_refused(text: str) -> None:
    kernel = (
        "import triton.language as tl\nimport triton\n@triton.jit\ndef k(x): tl.inline_asm_elementwise('', '=r', [x])\n"
    )
    assert refused(kernel, language="triton") == []
    assert refused(kernel + text, language="triton")


@pytest.mark.parametrize("text", EVASIONS.values(), ids=EVASIONS.keys())
def test_a_way_past_a_list_of_refused_names_is_refused(text: str) -> None:
    assert refused(text, dependencies=DECLARED)


HONEST = {
    "field called path": "import dataclasses\n@dataclasses.dataclass(frozen=True, slots=True)\nclass C:\n    path: str\n"
    "def f(c: C): return c.path",
    "match on values": "def f(n):\n    match n:\n        case 1 | 2: return 3\n        case (a, b): return a",
    "walrus": "def f(n):\n    if (m := n % 2): return m",
    "cached function of numbers": "import functools\n@functools.cache\ndef f(n: int, /, *, k=1) -> int: return n * k",
    "zip and batches": "import itertools, math\ndef f(a, b):\n    for x, y in zip(a, b, strict=True): pass\n"
    "    return list(itertools.batched(a, 2)), math.prod(a)",
    "shape": "def run(x): return x.shape[0] * x.stride(0) + x.numel()",
    "dtype": "import torch\ndef run(x): return x.to(torch.float32).sum(-1, keepdim=True)",
    "functional": "import torch.nn.functional as F\ndef run(x): return F.silu(F.pad(x, (0, 1)))",
    "functional, imported": "from torch.nn.functional import softmax, scaled_dot_product_attention",
    "linear algebra": "import torch\ntorch.linalg.norm(torch.fft.fft(torch.zeros(4)))",
    "special functions": "import torch\ntorch.special.erfinv(torch.zeros(1))",
    "attention backend": "from torch.nn.attention import SDPBackend, sdpa_kernel\nsdpa_kernel([SDPBackend.MATH])",
    "own operator": "import torch\n@torch.library.custom_op('mine::f', mutates_args=())\n"
    "def f(x: torch.Tensor) -> torch.Tensor: pass\ntorch.ops.mine.f(1)",
    "fake of an own operator": "import torch\n@torch.library.custom_op('a::b', mutates_args=())\ndef f(x: int) -> None: pass\n"
    "@f.register_fake\ndef _(x): pass",
    "compiled": "import torch\n"
    "f = torch.compile(len, dynamic=False, fullgraph=True, mode='max-autotune-no-cudagraphs')",
    "device properties": "import torch\ntorch.cuda.get_device_properties(0).multi_processor_count",
    "capability": "import torch\ntorch.cuda.get_device_capability() >= (9, 0)",
    "current stream": "import torch\ntorch.cuda.current_stream().cuda_stream",
    "version": "import torch\ntorch.__version__, torch.version.cuda",
    "limits of a dtype": "import torch\ntorch.finfo(torch.bfloat16).max",
    "gradient mode": "import torch\nwith torch.no_grad(): pass",
    "generator": "def f(n):\n    yield from range(n)",
    "dataclass": "from dataclasses import dataclass, field\n@dataclass(frozen=True)\nclass Tile:\n    rows: int = 1\n"
    "    parts: list = field(default_factory=list)\nTile().rows",
    "frozen dataclass with a method": "from dataclasses import dataclass\n@dataclass(frozen=True, slots=True)\nclass Tile:\n"
    "    rows: int\n    def half(self): return self.rows // 2\nTile(2).half()",
    "pattern on values": "def run(x):\n    match x.dim():\n        case 1 | 2: return x\n        case _: raise ValueError('no')",
    "generator of sizes": "def sizes(n):\n    while n:\n        yield n\n        n //= 2\nmax(sizes(8))",
    "errors of numpy": "import numpy as np\nwith np.errstate(divide='ignore'): np.log(np.zeros(1))",
    "dataclass with a text": "import dataclasses\n@dataclasses.dataclass\nclass Tile:\n    up: 'Tile | None' = None\nTile().up",
    "named tuple by class": "from typing import NamedTuple\nclass Tile(NamedTuple):\n    rows: int\nTile(1).rows",
    "partial": "import functools\nf = functools.partial(max, 1)\nf(2)",
    "cache": "import functools\n@functools.lru_cache(maxsize=None)\ndef f(n): return n\nf.cache_clear()",
    "reduce": "import functools, operator\nfunctools.reduce(operator.mul, (1, 2), 1)",
    "itertools": "import itertools\nlist(itertools.product(range(2), repeat=2))",
    "math": "from math import ceil, inf, log2, prod\nprod([1])",
    "strings": "' a,b '.strip().split(',')[0].upper()",
    "format": "'{:.2f} {name!r}'.format(1.0, name=2)",
    "f-string": "def f(x): return f'{x.shape[0]:>4} {x.dtype}'",
    "warning": "import warnings\nwarnings.warn('slow', stacklevel=2)",
    "types": "from typing import Annotated, Any, Callable, Literal, Optional\n"
    "def f(x: Annotated[Any, 'a (b)'], y: Literal['f()'], z: Optional['Tile']): pass",
    "future annotations": "from __future__ import annotations\nimport torch\n"
    "def f(x: torch.Tensor | None) -> tuple[int, ...]: pass",
    "property": "class A:\n    def __init__(self): self._n = 1\n    @property\n    def n(self): return self._n\nA().n",
    "context manager": "import contextlib\n@contextlib.contextmanager\ndef f():\n    yield\n"
    "with contextlib.nullcontext(): pass",
    "error": "def run(x):\n    if x.dim() != 2:\n        raise ValueError(f'expected two dimensions, got {x.dim()}')",
    "getattr with a default": "import torch\nd = getattr(torch, 'float8_e4m3fn', None)",
    "sorted by item": "import operator\nsorted([(1, 2)], key=operator.itemgetter(1))",
    "numpy": "import numpy as np\nnp.arange(4, dtype=np.float32).reshape(2, 2).tolist()",
}  # fmt: skip


@pytest.mark.parametrize("text", HONEST.values(), ids=HONEST.keys())
def test_an_honest_idiom_passes(text: str) -> None:
    assert refused(text, dependencies=("numpy",)) == []


def test_there_are_enough_of_both() -> None:
    assert len(EVASIONS) >= 60
    assert len(HONEST) >= 40


def test_no_listed_name_is_one_that_a_rule_refuses() -> None:
    assert [
        f"{module}.{name}"
        for module, names in MEMBERS.items()
        for name in names
        if refusal(f"{module}.{name}") or refusal(f"*.{name}")
    ] == []
    assert [name for name in VALUES if refusal(f"*.{name}")] == []


def test_a_source_is_scanned_in_less_than_50_ms() -> None:
    text = "import torch\n" + "\n".join(
        f"def f{i}(x): return torch.exp(x.view(-1)).sum() * x.shape[0]" for i in range(40)
    )
    refused(text)
    times = []
    for _ in range(5):
        before = time.process_time()
        assert refused(text) == []
        times.append(time.process_time() - before)
    assert min(times) < 0.05, times
