"""Every language compiles inside the sandbox: what their compilers need is granted."""

from __future__ import annotations

import pytest

from tilegym_db.backends.aot import CompileJob
from tilegym_db.backends.toolchains import toolchain_status
from tilegym_db.catalog import Catalog

COMPILE = """
from tilegym_db.backends.aot_worker import compile_job
from tilegym_db.backends.aot import CompileJob
from tilegym_db.backends.toolchains import prepare_environment
import importlib
job = CompileJob.from_json(request["job"])
language = job.solution.record.spec.language
prepare_environment(language)
result = compile_job(job, importlib.import_module(f"tilegym_db.backends.{language}"))
answer(status=result.status, kernels=len(result.artifacts), log=result.log)
"""
# What Triton does for its launchers, and torch.compile for everything on a CPU.
SHARED_LIBRARY = """
import subprocess
with open("launcher.cpp", "w") as file:
    file.write('extern "C" int three() { return 3; }')
subprocess.run(["g++", "-O1", "-shared", "-fPIC", "launcher.cpp", "-o", "launcher.so"], check=True)
answer(three=ctypes.CDLL("./launcher.so").three())
"""


@pytest.mark.sweep(3)
@pytest.mark.parametrize("language", ["triton", "tilelang", "cutile"])
def test_a_kernel_is_compiled_inside(language, peer, confining_level):
    if not toolchain_status(language).available:
        pytest.skip(toolchain_status(language).detail)
    catalog = Catalog.default()
    solution = next(s for s in catalog.solutions_for("rms_norm") if s.record.spec.language == language)
    job = CompileJob(catalog.definition("rms_norm"), solution, catalog.workloads_for("rms_norm")[0], "sm_90")
    worker = peer(COMPILE, level=confining_level, readable=[solution.folder])
    content = worker.request("compile", timeout_s=120, job=job.to_json()).content
    assert content["status"] == "compiled", content["log"]
    assert content["kernels"] >= 1


def test_a_launcher_is_built_and_loaded_from_the_scratch_folder(peer, confining_level):
    assert peer(SHARED_LIBRARY, level=confining_level).request("call", timeout_s=60).content["three"] == 3
