"""Problems of KernelBench and GPU MODE as data sets: what a problem is called with is observed in the sandbox.

Neither form states shapes: they follow from code. A confined worker runs it (``describing.py``), this process only reads texts.
A problem becomes a Definition with its module or ``ref_kernel`` as the reference, its own code as the baseline, and a
Workload a size. An answer becomes a Solution. A draft of them is compared with the original like any other.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from tilegym_db.errors import RecordError
from tilegym_db.files import read_bytes
from tilegym_db.interchange import importing
from tilegym_db.interchange.adapt import ORIGINAL_TEXT
from tilegym_db.interchange.checks import (
    LINK_OUT,
    Rules,
    check_definition,
    check_solution,
    check_workload,
    leads_out,
    walk,
)
from tilegym_db.interchange.collecting import Collection
from tilegym_db.judging.straight_line import NotPlain, forward_as_function, plain_functions, spelled
from tilegym_db.paths import scratch_folder
from tilegym_db.records.base import Int64, Real, Record, RecordPart
from tilegym_db.records.dtypes import RECORD_DTYPES, Scalar
from tilegym_db.records.workload import ScalarInput

if TYPE_CHECKING:
    from tilegym_db.judging.sandboxed import Confined

KERNELBENCH, GPU_MODE = "kernelbench", "gpu-mode"
RULES = Rules(
    languages=frozenset({"python", "triton", "cuda"}),
    dtypes=None,
    axis_kinds=frozenset({"const", "var", "expr"}),
    derived_axes=True,
    destination_passing_default=False,
)
_PARTS = {KERNELBENCH: ({"Model", "get_inputs", "get_init_inputs"}, "ModelNew"),
          GPU_MODE: ({"ref_kernel", "generate_input"}, "custom_kernel")}  # fmt: skip
_HARMLESS = {"DeterministicContext", "DisableCUDNNTF32", "DisableCuDNNTF32"}
"""Context managers of GPU MODE's ``utils`` that set flags of cuDNN."""
_CLASSES = {"Model", "ModelNew"}
_BUILDS = re.compile(r"load_inline|cpp_extension|tvm_ffi|cutlass")


@dataclass(frozen=True)
class Problem:
    """The text of a problem, where it is from, and the sizes that are given beside it."""

    name: str
    path: str
    file: Path
    text: str
    cases: tuple[Mapping[str, Any], ...] = ()


def import_data_set(path: Path, **options: Any) -> importing.ImportReport:
    """Import a data set of any dialect. Code of problems runs in the sandbox; nothing else of a data set is run.

    Arguments and errors are those of :func:`tilegym_db.interchange.importing.import_data_set`.
    """
    return importing.import_data_set(path, more=PROBLEM_DIALECTS, **options)


# ---- Reading ----------------------------------------------------------------------------------------------


def _is_this(dialect: str, root: Path) -> bool:
    files = [root] if root.is_file() else root.rglob("*.py")
    return any(_is_part(dialect, file) for file in files if file.is_file() and file.suffix == ".py")


def _is_part(dialect: str, file: Path) -> bool:
    """Return True for a file that is a problem or an answer, or would be one if it were Python."""
    wanted, answer = _PARTS[dialect]
    try:
        content = read_bytes(file, "source")
    except RecordError:
        return False
    if not _mentions(content, {answer}) and not _mentions(content, wanted):
        return False
    try:
        names = _names(_source(file))
    except RecordError:
        return True
    return wanted <= names or answer in names


def _mentions(content: bytes, names: set[str]) -> bool:
    return all(name.encode() in content for name in names)


def _names(text: str) -> set[str]:
    """Return the functions that a module defines, and its classes that start with a capital letter."""
    body = ast.parse(text).body
    functions = {node.name for node in body if isinstance(node, ast.FunctionDef)}
    return functions - _CLASSES | {node.name for node in body if isinstance(node, ast.ClassDef)} & _CLASSES


def _source(file: Path) -> str:
    """Return the text of a source that every later step can parse and write."""
    content = read_bytes(file, "source")
    try:
        text = content.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(ast.unparse(ast.parse(text)))
    except UnicodeDecodeError as error:
        raise RecordError(f"it is not UTF-8 ({error.reason}). Save it as UTF-8", code="source_invalid") from None
    except RecursionError:
        raise RecordError("its expressions are nested too deeply to be read", code="source_invalid") from None
    except (SyntaxError, ValueError, MemoryError) as error:
        raise RecordError(f"it is no Python source: {one_line(str(error))}", code="source_invalid") from None
    return text


def _read(dialect: str, root: Path) -> Collection:
    """Read every problem and every answer. What cannot become a record is refused with its reason."""
    single = root.is_file()
    found = Collection(dialect, RULES, root.parent if single else root)
    paths, refused = ([(root.name, root)], []) if single else walk(root)
    found.refused += refused
    problems, answers = [], []
    wanted, answer = _PARTS[dialect]
    for path, file in paths:
        if file.name in ("task.yml", "task.py"):
            found.carry(path, file)
        if file.suffix != ".py" or not _is_part(dialect, file):
            continue
        try:
            text = _source(file)
        except RecordError as error:
            found.refuse(path, [("", str(error))])
            continue
        names = _names(text)
        if wanted <= names:
            problems.append((path, file, text))
        if answer in names:
            answers.append((path, text))
        found.carry(path, file)
    known = _described_problems(
        found, dialect, [one for one in (_problem(found, dialect, *at) for at in problems) if one]
    )
    for path, text in answers:
        _add_answer(found, dialect, path, text, known)
    return found


def _problem(found: Collection, dialect: str, path: str, file: Path, text: str) -> Problem | None:
    pure = PurePosixPath(path)
    place = pure.with_suffix("") if dialect == KERNELBENCH or len(pure.parts) == 1 else pure.parent
    name = re.sub(r"[^a-z0-9]+", "_", "_".join(place.parts).lower()).strip("_")
    if dialect == GPU_MODE and len(pure.parts) == 1:
        name = re.sub(r"[^a-z0-9]+", "_", file.resolve().parent.name.lower()).strip("_")
    if not name:
        found.refuse(path, [("", "its path has no letter from a to z and no digit to name it by. Rename it")])
        return None
    if dialect == KERNELBENCH:
        return Problem(name, path, file, text)
    task = file.with_name("task.yml")
    if leads_out(task, found.root):
        found.refuse(path, [("", f"its task.yml is {LINK_OUT}")])
        return None
    try:
        cases = cases_of(read_bytes(task, "task").decode("utf-8", errors="replace"))
    except RecordError as error:
        missing = not task.is_file()
        found.refuse(path, [("", "its sizes are in task.yml, which is not beside it" if missing else str(error))])
        return None
    if not cases:
        found.refuse(path, [("", "its task.yml has no 'tests' or 'benchmarks' with a mapping of sizes a line")])
        return None
    cleaned = without_harness(text)
    problem = Problem(name, path, file, cleaned, tuple(cases))
    reason = why_not_portable(cleaned)
    if reason is not None:
        found.refuse(path, [("", reason)])
        return None
    return problem


_CASE = re.compile(r"\s*-\s*(\{.*\})\s*(#.*)?")
_BARE = re.compile(r"([{,]\s*)([A-Za-z_]\w*)\s*:")


def cases_of(text: str) -> list[dict[str, Any]]:
    """Return the sizes of ``tests`` and ``benchmarks`` of a task.yml. Lines that are no flow mapping are passed by."""
    found, inside = [], False
    for line in text.splitlines():
        if re.match(r"[A-Za-z_]", line):
            inside = line.split(":")[0] in ("tests", "benchmarks")
        case = _CASE.fullmatch(line)
        if inside and case:
            spelled = _BARE.sub(r'\1"\2":', case[1]).replace("'", '"')
            try:
                value = json.loads(re.sub(r"\b(True|False)\b", lambda m: m[0].lower(), spelled))
            except (ValueError, RecursionError):
                continue
            found.append(value)
    return found


def without_harness(text: str) -> str:
    """Return a text of GPU MODE without the imports and the check of its harness, which are not part of the operator."""
    tree, lines = ast.parse(text), text.split("\n")  # not splitlines(), which also splits at a form feed
    for node in tree.body:
        replaced = _replaced(node)
        if replaced is not None:
            assert node.end_lineno is not None
            lines[node.lineno - 1 : node.end_lineno] = [replaced, *[""] * (node.end_lineno - node.lineno)]
    return "\n".join(lines).rstrip() + "\n"


def _replaced(node: ast.stmt) -> str | None:
    if isinstance(node, ast.ImportFrom) and node.module == "task":
        return "".join(f"{one.asname or one.name} = " for one in node.names) + "object"
    if isinstance(node, ast.ImportFrom) and node.module == "utils":
        flags = [one.name for one in node.names if one.name in _HARMLESS]
        if not all(one.name in _HARMLESS or re.search("match|allclose|allequal", one.name) for one in node.names):
            return None
        return f"from contextlib import {', '.join(f'nullcontext as {one}' for one in flags)}" if flags else ""
    named = getattr(node, "name", None) or next(
        (one.id for one in getattr(node, "targets", ()) if isinstance(one, ast.Name)), None
    )
    return "" if named == "check_implementation" else None


def why_not_portable(text: str) -> str | None:
    """Return why a reference of GPU MODE runs only in its harness; None if it does not."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "utils":
            return f"it uses {', '.join(one.name for one in node.names)} of its harness' utils.py"
    for body in tree.body:
        if getattr(body, "name", None) == "generate_input":
            continue
        for node in ast.walk(body):
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and re.fullmatch(r"cuda(:\d+)?", node.value)
            ):
                return f"line {node.lineno} names the device '{node.value}', and a reference runs on that of its inputs"
    return None


class _OnCpu(ast.NodeTransformer):
    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        is_device = isinstance(node.value, str) and re.fullmatch(r"cuda(:\d+)?", node.value)
        return ast.copy_location(ast.Constant("cpu"), node) if is_device else node


def on_cpu(text: str) -> str:
    """Return a text with its data on the CPU, for the observation."""
    return ast.unparse(_OnCpu().visit(ast.parse(text)))


# ---- Observing --------------------------------------------------------------------------------------------


def _described_problems(found: Collection, dialect: str, problems: Sequence[Problem]) -> dict[str, dict[str, Any]]:
    """Add the Definition, baseline and Workloads of each problem, and return the Definitions by path."""
    known: dict[str, dict[str, Any]] = {}
    forms = [
        (dialect, on_cpu(one.text) if dialect == GPU_MODE else one.text, json.dumps(_smallest(one.cases)))
        for one in problems
    ]
    for problem, description in zip(problems, observed(forms), strict=True):
        content = description.model_dump()
        record = description.reason or _definition(dialect, problem, content)
        if isinstance(record, str):
            found.refuse(problem.path, [("", record)])
            continue
        if _add(found, "definition", record, problem.path):
            known[problem.path] = record
            _add(found, "solution", _baseline(problem, record), problem.path)
            for workload in _workloads(problem, record, content):
                _add(found, "workload", workload, problem.path)
    return known


def _smallest(cases: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    def total(case: Mapping[str, Any]) -> int:
        product = 1
        for name, value in case.items():
            product *= value if type(value) is int and name != "seed" and value > 0 else 1
        return product

    return dict(sorted(cases, key=total)[0]) if cases else {}


def observed(forms: Sequence[tuple[str, str, str]]) -> list[Description]:
    """Return what a confined worker observed of each problem, or the reason that it observed nothing."""
    from tilegym_db.catalog.record_files import write_solution
    from tilegym_db.judging.describing import MAX_BYTES, described
    from tilegym_db.judging.sandboxed import Confined
    from tilegym_db.records import Definition, Solution

    definition = Definition.from_dict({
        "name": "description", "op_type": "description", "axes": {}, "inputs": {"which": {"shape": None, "dtype": "int64"}},
        "outputs": {"text": {"shape": [MAX_BYTES], "dtype": "uint8"}}, "version": "1.0.0",
        "reference": "# Source: tilegym-db\ndef run(which):\n    return which\n",
    }, "description")  # fmt: skip
    record = Solution.from_dict({
        "name": "description", "definition": "description", "author": "description", "sources": [{"path": "entry.py"}],
        "spec": {"language": "python", "entry_point": "entry.py::run", "destination_passing_style": False},
    }, "description")  # fmt: skip
    entry = (
        f"from {described.__module__} import {described.__name__}\n\nFORMS = {list(forms)!r}\n\n\n"
        f"def run(which):\n    return {described.__name__}(FORMS, which)\n"
    )
    found: list[Description] = []
    with scratch_folder() as scratch:
        files = write_solution(Path(scratch, "source"), record, {"entry.py": entry.encode()})
        while len(found) < len(forms):
            with Confined(files, definition, "cpu", Path(scratch, f"worker-{len(found)}"), interpret=False) as worker:
                found += _observed_by(worker, range(len(found), len(forms)))
    return found


def _observed_by(worker: Confined, numbers: Iterable[int]) -> list[Description]:
    """Return what one worker observes of problems, up to the first that fails; the next one then needs a fresh worker."""
    from tilegym_db.records.call import Call
    from tilegym_db.records.workload import Case
    from tilegym_db.verification.expected import OracleCase
    from tilegym_db.verification.verifier import Failure

    found: list[Description] = []
    failure = worker.load()
    for number in numbers:
        if failure is None:
            case = Case(Call("description", {}, scalars={"which": number}), seed=0)
            outputs = worker.call(OracleCase(case, {"which": number}, {}, {}))
            if not isinstance(outputs, Failure):
                found.append(read_description(outputs["text"].numpy().tobytes()))
                continue
            failure = outputs
        reason = one_line(": ".join([failure.reason, *failure.log.splitlines()[:1]]))
        return [*found, Description(reason=f"it does not run in the sandbox: {reason}")]
    return found


# ---- Records ----------------------------------------------------------------------------------------------


def _definition(dialect: str, problem: Problem, content: Mapping[str, Any]) -> dict[str, Any] | str:
    """Return the record of a problem, or why it has none."""
    tensors = content["tensors"]
    axes: dict[str, Any] = {name: {"type": "var"} for name in content["axes"]}
    expressions: dict[str, str] = {}
    inputs: dict[str, Any] = {}
    outputs: dict[str, Any] = {}
    generators: dict[str, Any] = {}
    unknown = []
    for one in tensors:
        if one["dtype"] not in RECORD_DTYPES:
            return f"{one['name']} has dtype {one['dtype']}, which is unknown here"
        if one["role"] == "buffer":
            continue
        shape = one["shape"] and [_entry(text, axes, expressions) for text in one["shape"]]
        name = spelled(one["name"])
        (outputs if one["role"] == "output" else inputs)[name] = {"shape": shape, "dtype": one["dtype"]}
        if one["role"] == "input":
            drawn = one["drawn"]
            if drawn is None:
                unknown.append(name)
            elif drawn["kind"] not in ("normal", "made"):
                generators[name] = _generator(drawn)
    if set(inputs) & set(outputs):
        outputs = {f"{name}_returned" if name in inputs else name: spec for name, spec in outputs.items()}
    axes |= {name: {"type": "expr", "expression": text} for text, name in expressions.items()}
    given = [one for one in tensors if one["role"] not in ("output", "buffer")]
    arguments = ", ".join(spelled(one["name"]) for one in given)
    if dialect == KERNELBENCH:
        reference = f"import torch\n\n\n{content['run']}"
        original = f"{problem.text.rstrip()}\n\n\n{_module_call(given, arguments)}"
    else:
        reference = f"{_plain(problem.text)}\n\n\n{_data_call('run', 'ref_kernel', content, arguments)}"
        original = f"{without_generator(problem.text).rstrip()}\n\n\n{_data_call('original', 'ref_kernel', content, arguments)}"
    return {
        "name": problem.name, "op_type": dialect.replace("-", "_"), "axes": axes, "inputs": inputs, "outputs": outputs,
        "reference": reference, ORIGINAL_TEXT: original, "input_generators": generators, "contents_unknown": unknown,
        "tensors": tensors, "packed": content["packed"], "given": _init_inputs(problem.text) if dialect == KERNELBENCH else "",
    }  # fmt: skip


def _plain(text: str) -> str:
    plain = plain_functions(text, {"generate_input", "check_implementation"}, _HARMLESS)
    return plain if re.search(r"^import torch$", plain, re.M) else f"import torch\n\n{plain}"


def _init_inputs(text: str) -> str:
    """Return the expression that a problem's module is made with, over constants of its text."""
    functions = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
    returned = [node.value for node in ast.walk(functions["get_init_inputs"]) if isinstance(node, ast.Return)]
    constants = [ast.unparse(node) for node in ast.parse(text).body if isinstance(node, ast.Assign)]
    return "\n".join([*constants, ast.unparse(returned[0])]) if returned and returned[0] is not None else "[]"


def _generator(drawn: Mapping[str, Any]) -> dict[str, Any]:
    """Return how an input is drawn. A bound is a number, or arithmetic over axes."""
    bounds = {key: value for key, value in drawn.items() if key != "kind" and value is not None}
    numbers = {key: int(value) for key, value in bounds.items() if isinstance(value, str) and value.isdigit()}
    return {"kind": drawn["kind"], **bounds, **numbers}


def _entry(text: str, axes: Mapping[str, Any], expressions: dict[str, str]) -> str:
    if text in axes or text.isdigit():
        return text
    return expressions.setdefault(text, f"size_{len(expressions)}")


def _module_call(given: Sequence[Mapping[str, Any]], arguments: str) -> str:
    """Return a call of the module as KernelBench makes it, with the weights that are given."""
    passed = ", ".join(spelled(one["name"]) for one in given if one["role"] != "weight")
    weights = {one["name"]: spelled(one["name"]) for one in given if one["role"] == "weight"}
    values = ", ".join(f"{key!r}: {name}" for key, name in weights.items())
    return (
        f"def {ORIGINAL_TEXT}({arguments}):\n    model = Model(*get_init_inputs())\n    weights = {{{values}}}\n"
        "    assert set(weights) == {name for name, _ in model.named_parameters()}\n"
        "    with torch.no_grad():\n        for name, value in weights.items():\n"
        f"            model.get_parameter(name).copy_(value)\n        return model({passed})\n"
    )


def _data_call(name: str, function: str, record: Mapping[str, Any], arguments: str) -> str:
    """Return a function that packs its arguments and empty buffers into GPU MODE's data."""
    tensors = record["tensors"]
    given = [one for one in tensors if one["role"] != "output"]
    first = next(spelled(one["name"]) for one in given if one["role"] == "input")
    lines, packed = [], []
    for one in given:
        argument = spelled(one["name"])
        if one["role"] == "buffer":
            shape = ", ".join(one["shape"]) or "()"
            lines.append(f"    {argument} = torch.empty({shape}, dtype=torch.{one['dtype']}, device={first}.device)")
        packed.append(argument)
    lines = [*_sizes_of(given), *lines] if lines else []
    data = f"({', '.join(packed)},)" if record["packed"] else packed[0]
    return "\n".join([f"def {name}({arguments}):", *lines, f"    return {function}({data})\n"])


def _sizes_of(given: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return lines that read each size in a buffer's shape from an input's shape."""
    shapes = [text for one in given if one["role"] == "buffer" for text in one["shape"]]
    used = {name for text in shapes for name in re.findall(r"[A-Za-z_]\w*", text)}
    found: dict[str, str] = {}
    for one in given:
        if one["role"] == "input":
            for at, text in enumerate(one["shape"]):
                found.setdefault(text, f"    {text} = {spelled(one['name'])}.shape[{at}]")
    return [found[name] for name in sorted(used) if name in found]


def without_generator(text: str) -> str:
    """Return a text of GPU MODE without ``generate_input``, since inputs are drawn here."""
    tree, lines = ast.parse(text), text.split("\n")  # not splitlines(), which also splits at a form feed
    for node in tree.body:
        if getattr(node, "name", None) == "generate_input":
            assert node.end_lineno is not None
            lines[node.lineno - 1 : node.end_lineno] = [""] * (node.end_lineno - node.lineno + 1)
    return re.sub(r"\n{4,}", "\n\n\n", "\n".join(lines))


def _baseline(problem: Problem, record: Mapping[str, Any]) -> dict[str, Any]:
    return _solution(f"{problem.name}_original", record, "python", record["reference"], provides="stock")


def _solution(name: str, record: Mapping[str, Any], language: str, text: str, **more: Any) -> dict[str, Any]:
    return {
        "name": name, "definition": record["name"], "author": "imported",
        "spec": {"language": language, "target_hardware": ["any"], "entry_point": "main.py::run", "dependencies": [],
                 "destination_passing_style": False, **more},
        "sources": [{"path": "main.py", "content": text}],
    }  # fmt: skip


def _workloads(problem: Problem, record: Mapping[str, Any], content: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    axes = content["axes"]
    scalars = {
        one["name"]: {"type": "scalar", "value": one["value"]} for one in content["tensors"] if one["role"] == "scalar"
    }
    inputs = {name: scalars.get(name, {"type": "random"}) for name in record["inputs"]}
    fixed = _smallest(problem.cases)
    sizes: dict[str, dict[str, int]] = {"given": dict(axes)} if not problem.cases else {}
    for case in problem.cases:
        # What is no axis must be as in the observation: the shapes are only known for that.
        others = {
            key: value for key, value in case.items() if key not in axes and key != "seed" and type(value) is not float
        }
        if all(fixed.get(key) == value for key, value in others.items()) and set(axes) <= set(case):
            chosen = {name: case[name] for name in axes}
            sizes.setdefault("-".join(f"{key}{value}" for key, value in chosen.items()) or "given", chosen)
    if content["small"]:
        sizes.setdefault("small", content["small"])
    for name, chosen in sizes.items():
        yield {"definition": record["name"], "uuid": f"{record['name']}-{name}", "axes": chosen, "inputs": inputs}


def _add(found: Collection, kind: Any, record: dict[str, Any], path: str) -> bool:
    checks = {"definition": check_definition, "solution": check_solution, "workload": check_workload}
    problems = checks[kind](record, RULES)
    if problems:
        found.refuse(path, problems)
        return False
    digest = hashlib.sha256(json.dumps(record).encode()).hexdigest()
    first = None if kind == "workload" else found.first_of(kind, record["name"], digest, path)
    if first is not None:  # names are made of paths here, so that two files can have the same one
        found.refuse(path, [("", f"its name '{record['name']}' is that of {first[0]} too. Rename one of them")])
        return False
    findings = []
    if kind == "definition" and record["contents_unknown"]:
        names = ", ".join(record["contents_unknown"])
        findings = [f"the contents of {names} are computed there and drawn from N(0, 1) here: see input_generators"]
    found.add(kind, record, digest, path, (0, found.sources[path].stat().st_size), findings=findings)
    return True


# ---- Answers ----------------------------------------------------------------------------------------------


def _add_answer(found: Collection, dialect: str, path: str, text: str, known: Mapping[str, dict[str, Any]]) -> None:
    """Add a kernel as a Solution of the problem beside it, or refuse it with the reason."""
    record = _problem_of(dialect, path, known)
    if record is None:
        what = (
            "problem of its file's name"
            if dialect == KERNELBENCH
            else "problem (reference.py, task.yml) in a folder above it"
        )
        found.refuse(path, [("", f"no {what} was imported, so nothing says what it is called with")])
        return
    language = "cuda" if _BUILDS.search(text) else "triton" if re.search(r"^\s*import triton", text, re.M) else "python"
    given = [one for one in record["tensors"] if one["role"] not in ("output", "buffer")]
    arguments = [spelled(one["name"]) for one in given]
    try:
        if dialect == GPU_MODE:
            call = _data_call("run", "custom_kernel", record, ", ".join(arguments))
            source = f"{_plain(text)}\n\n\n{call}"
        elif language == "cuda":
            source = text
        else:
            source = forward_as_function(text, "ModelNew", arguments, _values(record["given"]))
    except NotPlain as error:
        found.refuse(path, [("", str(error))])
        return
    pure = PurePosixPath(path)
    name = re.sub(r"[^a-z0-9]+", "_", "_".join(pure.with_suffix("").parts).lower()).strip("_")
    name = name if name != record["name"] else f"{name}_answer"
    _add(found, "solution", _solution(name, record, language, source), path)


def _values(text: str) -> list[ast.expr]:
    """Return the elements of the list that a module is made with; constants are replaced by their values."""
    *constants, last = ast.parse(text).body
    known = {
        one.targets[0].id: one.value
        for one in constants
        if isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Name)
    }
    assert isinstance(last, ast.Expr)
    elements = last.value.elts if isinstance(last.value, ast.List | ast.Tuple) else []
    return [known.get(one.id, one) if isinstance(one, ast.Name) else one for one in elements]


def _problem_of(dialect: str, path: str, known: Mapping[str, dict[str, Any]]) -> dict[str, Any] | None:
    """Return the problem of an answer: that of the nearest folder above it, or for KernelBench that of its file's name."""
    pure = PurePosixPath(path)
    if dialect == GPU_MODE:
        folders = {PurePosixPath(place).parent: record for place, record in known.items()}
        return next((folders[folder] for folder in pure.parents if folder in folders), None)
    fitting = [record for place, record in known.items() if PurePosixPath(place).stem.lower() == pure.stem.lower()]
    return fitting[0] if len(fitting) == 1 else None


PROBLEM_DIALECTS = {
    dialect: SimpleNamespace(DIALECT=dialect, is_this=partial(_is_this, dialect), read=partial(_read, dialect))
    for dialect in (KERNELBENCH, GPU_MODE)
}
"""As :data:`tilegym_db.interchange.importing.DIALECTS`; reading runs the problems in the sandbox."""


# ---- answers of workers -----------------------------------------------------------------------------
# What a confined worker says about a problem. Foreign code ran there, so its answer is read like a foreign file.

MAX_REASON = 300
"""Maximum length of a reason, in characters."""

Text = Annotated[str, Field(min_length=1, max_length=MAX_REASON)]
Size = Annotated[str, Field(pattern=r"^[\w+\-*/() ]+$", max_length=MAX_REASON)]
"""A number, or arithmetic over axes."""


class Drawn(RecordPart):
    """The distribution from which a problem draws an input."""

    kind: Literal["normal", "made", "uniform", "integers"]
    low: Int64 | Real | None = None
    high: Int64 | Real | Size | None = None


class Observed(RecordPart):
    """A tensor or number of a problem. A number has no shape."""

    role: Literal["buffer", "input", "scalar", "weight", "output"]
    name: Annotated[str, Field(pattern=r"^\w[\w.]*$", max_length=MAX_REASON)]
    dtype: Text
    shape: list[Size] | None = None
    drawn: Drawn | None = None
    value: Scalar | None = None

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if (self.role == "scalar") != (self.shape is None) or (self.role == "scalar") != (self.value is not None):
            raise RecordError(f"{self.name}: a number has a value, and a tensor a shape", code="description_invalid")
        if self.value is not None:
            ScalarInput(type="scalar", value=self.value)
        return self


class Description(Record):
    """Observations of a problem, or the reason that there are none."""

    kind: ClassVar[str] = "description"
    reason: str = ""
    tensors: list[Observed] = Field(default_factory=list)
    axes: dict[Text, Int64] = Field(default_factory=dict)
    small: dict[Text, Int64] | None = None
    run: str = ""
    packed: bool = False
    """True if a problem of GPU MODE gets its data as a tuple."""

    @model_validator(mode="after")
    def _has_inputs(self) -> Self:
        if not self.reason and not any(one.role == "input" for one in self.tensors):
            raise RecordError("none of its inputs is a tensor", code="description_invalid")
        return self


def read_description(content: bytes) -> Description:
    """Return the answer of a worker; what is no description becomes a reason."""
    try:
        found = Description.from_json(content, "its answer")
    except RecordError as error:
        return Description(reason=f"it does not run in the sandbox: {one_line(str(error))}")
    return found.model_copy(update={"reason": one_line(found.reason)})


def one_line(text: str) -> str:
    """Return a text of foreign code as one short line."""
    return " ".join(text.split())[:MAX_REASON]
