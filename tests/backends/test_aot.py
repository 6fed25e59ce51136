from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from raising import raises

from tilegym_db.backends.aot import CompileJob, CompileResult, compile_many
from tilegym_db.catalog import SolutionFiles
from tilegym_db.errors import SolutionError
from tilegym_db.records import TILE_LANGUAGES, Definition, Workload
from tilegym_db.records.hardware import TARGETS

WriteSolution = Callable[..., SolutionFiles]
MakeWorkload = Callable[..., Workload]


def children() -> set[int]:
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
            found.update(map(int, (task / "children").read_text().split()))
    return found


SHAPES: dict[str, dict[str, Any]] = {
    "few": {"M": 3},
    "many": {"M": 61},
    "none": {"M": 0},
    "longer": {"M": 3, "N": 512},
    "padded": {"M": 3, "x": "strided(N + 3, 1)"},
}
# language -> what is found in its kernel, what is put there, and what its compiler says of that
BROKEN = {
    "triton": [("tl.store(", "tl.no_such_operation(", "no attribute 'no_such_operation'")],
    "tilelang": [
        ("T.cast(T.cast(", "T.no_such_operation(T.cast(", "no attribute 'no_such_operation'"),
        (
            'T.cast(x[row, column], "float32")',
            'T.call_extern("float32", "undefined_function")',
            'error: identifier "undefined_function" is undefined',
        ),
    ],
    "cutile": [
        ("index=(row, 0), shape", "index=(row, 0, 0), shape", "Index size 3 does not match the array rank 2"),
    ],
}
in_each_language = pytest.mark.parametrize("language", TILE_LANGUAGES)
"""A compiler takes seconds to load and for each kernel: one language a commit, and every one where a backend has changed."""


@pytest.fixture(scope="module")
def compiled(
    definition: Definition, write_shared_solution: WriteSolution, workload: MakeWorkload, kernels: dict[str, str]
) -> Callable[[str], dict[str, CompileResult]]:
    """Results of one language by target, by shape, and by what is broken: of one process."""

    @functools.cache
    def of(language: str) -> dict[str, CompileResult]:
        plain = write_shared_solution(language)
        padded = write_shared_solution(language, name=f"padded_{language}", layouts={"x": "row_contiguous"})
        jobs = {target: CompileJob(definition, plain, workload(), target) for target in TARGETS}
        jobs |= {name: CompileJob(definition, padded, workload(**shape), "sm_90") for name, shape in SHAPES.items()}
        for number, (find, put, _) in enumerate(BROKEN[language]):
            source = kernels[language].replace(find, put)
            broken = write_shared_solution(language, source, name=f"broken_{language}_{number}")
            jobs[put] = CompileJob(definition, broken, workload(), "sm_90")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")  # of the user's own process; it must not reach the compiler
            return dict(zip(jobs, compile_many(list(jobs.values()), processes=1), strict=True))

    return of


@pytest.mark.slow
@pytest.mark.sweep(len(TILE_LANGUAGES))
@in_each_language
def test_every_target_is_compiled_without_a_gpu(
    language: str, compiled: Callable[[str], dict[str, CompileResult]]
) -> None:
    results = [compiled(language)[target] for target in TARGETS]
    assert [(result.status, result.log) for result in results] == [("compiled", "")] * len(TARGETS)
    assert all(len(result.artifacts) == 1 and result.artifacts[0].bytes > 1000 for result in results)
    assert len({result.artifacts[0].key for result in results}) == len(TARGETS)


@pytest.mark.slow
@pytest.mark.sweep(len(TILE_LANGUAGES))
@in_each_language
def test_number_of_tokens_does_not_recompile_and_row_length_does(
    language: str, compiled: Callable[[str], dict[str, CompileResult]]
) -> None:
    results = [compiled(language)[name] for name in SHAPES]
    assert [result.status for result in results] == ["compiled"] * len(SHAPES), results
    few, many, none, longer, padded = ({artifact.key for artifact in result.artifacts} for result in results)
    assert few == many
    assert none == set()
    assert len(longer - few) == len(padded) == 1


@pytest.mark.slow
@pytest.mark.sweep(len(TILE_LANGUAGES))
@in_each_language
def test_a_broken_kernel_fails_with_the_message_of_its_compiler(
    language: str, compiled: Callable[[str], dict[str, CompileResult]]
) -> None:
    for _, put, message in BROKEN[language]:
        result = compiled(language)[put]
        assert (result.status, result.artifacts) == ("failed", ())
        assert message in result.log
        assert "aot_worker.py" not in result.log
        assert len(result.log) <= 4000


@pytest.mark.turn("tilegym_db/backends/")  # waits for a job that hangs
@pytest.mark.slow
def test_what_a_job_does_to_its_process_costs_that_job_only(
    definition: Definition, write_solution: WriteSolution, workload: MakeWorkload, kernels: dict[str, str]
) -> None:
    bodies = {
        "hangs": "import time\ndef run(x, factor, out):\n    while True:\n        time.sleep(0.05)\n",
        "crashes": "import os, signal\ndef run(x, factor, out):\n    os.kill(os.getpid(), signal.SIGSEGV)\n",
        "exits": "import sys\ndef run(x, factor, out):\n    sys.exit(3)\n",
        "reads": "import sys\ndef run(x, factor, out):\n    raise ValueError(repr(sys.stdin.read()))\n",
        "talks": kernels["triton"] + "    print('{}', flush=True)\n",
    }
    before = children()
    jobs = [
        CompileJob(definition, write_solution("triton", body, name=name), workload(), "sm_90", timeout_s=20)
        for name, body in bodies.items()
    ]
    jobs[0] = CompileJob(definition, jobs[0].solution, workload(), "sm_90", timeout_s=2)

    results = dict(zip(bodies, compile_many(jobs, processes=1), strict=True))

    assert [result.status for result in results.values()] == ["failed"] * 4 + ["compiled"]
    assert "after 2 s" in results["hangs"].log
    assert re.search(r'hangs/kernel.py", line [34] in run', results["hangs"].log)
    assert "(signal SIGSEGV)" in results["crashes"].log
    assert "SystemExit: 3" in results["exits"].log
    assert "ValueError: ''" in results["reads"].log
    assert children() == before


def refused_launches(kernels: dict[str, str]) -> dict[str, list[tuple[str, str]]]:
    """Language -> sources that CUDA would refuse to launch, and what is said of each."""
    triton, tilelang, cutile = (kernels[language] for language in ("triton", "tilelang", "cutile"))
    greedy = tilelang.replace(
        "for column", "tile = T.alloc_shared((N, 120), 'float32')\n            tile[0, 0] = 1.0\n            for column"
    ).replace("* factor", "* factor + tile[0, 0]")
    tuned = triton.replace(
        "@triton.jit", "@triton.autotune([triton.Config({}, num_warps=n) for n in (1, 2)], key=[])\n@triton.jit"
    ).replace("num_warps=num_warps", "")
    return {
        "triton": [
            (
                triton.replace("[(M,)]", "[lambda meta: (1, 65536)]"),
                "axis 1 of the grid (1, 65536) must be between 1 and 65535",
            ),
            ("def run(x, factor, out): ...\n", "without launching a triton kernel"),
            (tuned, "measures at run time"),
        ],
        "tilelang": [
            (
                tilelang.replace("x.dtype,", "'float16',"),
                "argument 0 is torch.bfloat16 [3, 256], not torch.float16 [?, 256]",
            ),
            (greedy, "asks for 122880 bytes of shared memory a block; sm_89 has 101376"),
        ],
        "cutile": [(cutile.replace("(M, 1, 1)", "(M, 0, 1)"), "axis 1 of the grid (3, 0, 1)")],
    }


@pytest.mark.slow
@pytest.mark.sweep(len(TILE_LANGUAGES))
@in_each_language
def test_a_launch_that_cuda_would_refuse_fails(
    language: str,
    definition: Definition,
    write_solution: WriteSolution,
    workload: MakeWorkload,
    kernels: dict[str, str],
) -> None:
    refused = refused_launches(kernels)[language]
    solutions = [write_solution(language, source, name=f"refused_{n}") for n, (source, _) in enumerate(refused)]
    jobs = [CompileJob(definition, solution, workload(), "sm_89") for solution in solutions]

    results = compile_many(jobs, processes=1)

    assert {result.status for result in results} == {"failed"}, results
    for result, (_, said) in zip(results, refused, strict=True):
        assert said in result.log


def run_worker(language: str, preparation: str, jobs: list[CompileJob], **environment: str) -> list[CompileResult]:
    """The worker process, after a line of Python that changes what this machine looks like to it."""
    script = f"from tilegym_db.backends import aot_worker\n{preparation}\naot_worker.main({language!r})\n"
    done = subprocess.run(
        [sys.executable, "-c", script],
        input="".join(f"{job.to_json()}\n" for job in jobs),
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    ready, *lines = done.stdout.splitlines()
    assert '"ready": true' in ready
    return [CompileResult.from_json(line) for line in lines]


@pytest.mark.turn("tilegym_db/backends/")  # a worker that loads its compiler
@pytest.mark.slow
def test_target_unknown_to_the_toolchain_is_refused_not_failed(
    definition: Definition, write_solution: WriteSolution, workload: MakeWorkload
) -> None:
    older = (
        "from dataclasses import replace\nfrom tilegym_db.backends.toolchains import TOOLCHAINS\n"
        "TOOLCHAINS['cutile'] = replace(TOOLCHAINS['cutile'], targets={'sm_80': 'sm_70', 'sm_90': 'sm_90'})"
    )
    solution = write_solution("cutile")

    refused, compiled = run_worker(
        "cutile", older, [CompileJob(definition, solution, workload(), target) for target in ("sm_80", "sm_90")]
    )

    assert (refused.status, compiled.status) == ("refused", "compiled")
    assert "sm_70" in refused.log


@pytest.mark.turn("tilegym_db/backends/", "pyproject.toml", "constraints.txt")  # nvcc in a separate process
@pytest.mark.slow
def test_tilelang_compiles_with_python_packages_alone(
    definition: Definition, write_solution: WriteSolution, workload: MakeWorkload, tmp_path: Path
) -> None:
    """Needs nvidia-cuda-nvcc and nvidia-cuda-cccl, which the extra 'tilelang' installs."""
    no_toolkit = (
        "from pathlib import Path\nfrom tilegym_db.backends import toolchains\n"
        "toolchains.DEFAULT_TOOLKIT = Path('/no-toolkit')"
    )
    tools = tmp_path / "bin"
    tools.mkdir()
    for folder in os.environ["PATH"].split(os.pathsep):  # a PATH with everything but nvcc
        for tool in Path(folder).glob("*"):
            if tool.name != "nvcc" and not (tools / tool.name).exists():
                (tools / tool.name).symlink_to(tool)

    (result,) = run_worker(
        "tilelang",
        no_toolkit,
        [CompileJob(definition, write_solution("tilelang"), workload(), "sm_90")],
        PATH=str(tools),
        CUDA_HOME=str(tmp_path / "gone"),
        TILELANG_CACHE_DIR=str(tmp_path / "cache"),
    )

    assert (result.status, result.log) == ("compiled", "")


@pytest.mark.turn("tilegym_db/backends/", "constraints.txt")  # a worker that loads its compiler
@pytest.mark.slow
def test_cutile_compiles_although_an_old_toolkit_is_named(
    definition: Definition,
    write_solution: WriteSolution,
    workload: MakeWorkload,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    library = tmp_path / "cuda-12" / "nvvm" / "lib64" / "libnvvm.so.4"
    library.parent.mkdir(parents=True)
    library.write_bytes(b"not a library")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda-12"))
    monkeypatch.setenv("CUDA_PATH", str(tmp_path / "cuda-12"))

    (result,) = compile_many([CompileJob(definition, write_solution("cutile"), workload(), "sm_90")])

    assert result.status == "compiled", result.log


def test_what_a_solution_does_not_promise_is_unsupported(
    definition: Definition, write_solution: WriteSolution, workload: MakeWorkload
) -> None:
    triton = write_solution("triton", target_hardware=["sm_90"], dtypes={"T": ["float16"]}, constraints=["N <= 256"])
    jobs = [
        CompileJob(definition, write_solution("python"), workload(), "sm_90"),
        CompileJob(definition, triton, workload(dtype="float16"), "sm_80"),
        CompileJob(definition, triton, workload(), "sm_90"),
        CompileJob(definition, triton, workload(N=512, dtype="float16"), "sm_90"),
        CompileJob(definition, triton, workload(dtype="float16", x="strided(N + 1, 1)"), "sm_90"),
    ]

    results = compile_many(jobs)

    assert {result.status for result in results} == {"unsupported"}
    facts = ("python", "sm_80", "T=bfloat16", "N <= 256", "row_contiguous")
    assert [fact for fact, result in zip(facts, results, strict=True) if fact not in result.log] == []


def test_missing_toolchain_is_a_result_with_the_extra_to_install(
    definition: Definition, write_solution: WriteSolution, workload: MakeWorkload, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "cuda.tile" else find_spec(name))

    (result,) = compile_many([CompileJob(definition, write_solution("cutile"), workload(), "sm_90")])

    assert result.status == "toolchain-missing"
    assert "'cuda-tile'" in result.log
    assert "pip install 'tilegym-db[cutile]'" in result.log


@pytest.mark.turn("tilegym_db/backends/")  # a worker that loads PyTorch
@pytest.mark.slow
def test_a_toolchain_that_does_not_import_is_reported_as_such(
    definition: Definition,
    write_solution: WriteSolution,
    workload: MakeWorkload,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    (tmp_path / "site" / "triton").mkdir(parents=True)
    (tmp_path / "site" / "triton" / "__init__.py").write_text("raise OSError('libtriton.so: wrong ELF class')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))

    (result,) = compile_many([CompileJob(definition, write_solution("triton"), workload(), "sm_90")])

    assert result.status == "toolchain-missing"
    assert "Fix: pip install --force-reinstall 'tilegym-db[triton]'" in result.log
    assert "wrong ELF class" in result.log


@pytest.mark.turn("tilegym_db/backends/")  # workers that load PyTorch
@pytest.mark.slow
def test_results_reach_the_main_thread_and_ctrl_c_ends_workers(
    definition: Definition, write_solution: WriteSolution, workload: MakeWorkload
) -> None:
    waits = "import time\ndef run(x, factor, out):\n    time.sleep(60)\n"
    jobs = [
        CompileJob(definition, write_solution("triton", name="quick"), workload(), "sm_90"),
        CompileJob(definition, write_solution("triton", waits, name="waits"), workload(), "sm_90"),
    ]
    before, threads = children(), []

    def interrupt(job: CompileJob, result: CompileResult) -> None:
        threads.append(threading.current_thread())
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compile_many(jobs, interrupt, processes=2)

    assert threads == [threading.main_thread()]
    assert children() == before


def test_queued_source_that_changed_is_not_compiled_as_the_old(
    definition: Definition, write_solution: WriteSolution, workload: MakeWorkload
) -> None:
    job = CompileJob(definition, write_solution("triton"), workload(), "sm_90")
    line = job.to_json()
    write_solution("triton", "def run(x, factor, out): ...\n")

    with raises(SolutionError, "source_changed", str(job.solution.path)):
        CompileJob.from_json(line)
