"""``tilegym-db doctor``: report what works on this machine, and how to fix the rest; calibrate it; print versions."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tilegym_db.cli.commands import command_group
from tilegym_db.cli.kit.formats import (
    TABLE,
    AsArrow,
    AsCsv,
    AsJson,
    AsParquet,
    Form,
    OutputFile,
    chosen_form,
    with_form,
    write_json,
    write_records,
)
from tilegym_db.cli.kit.output import note, print_json, print_line, print_table, table_width
from tilegym_db.errors import TilegymDBError, broken_package
from tilegym_db.paths import DISABLE_VARIABLE, DISABLED, home, is_disabled

if TYPE_CHECKING:
    from tilegym_db.published.snapshot import RejectedLine
    from tilegym_db.records.roofline import GpuPeaks, Measured
    from tilegym_db.sandbox.confine import Sandbox
    from tilegym_db.store.broken_files import BrokenFiles


app = command_group("Report what works here and how to fix what does not.", runs_alone=True)


# ---- Lines of the report ------------------------------------------------------------------------------

State = Literal["ok", "missing", "problem"]
MARKS: dict[State, str] = {"ok": "ok     ", "missing": "missing", "problem": "PROBLEM"}


@dataclass(frozen=True)
class Check:
    """One line of the report. ``missing`` is something optional that is absent, ``problem`` is something broken."""

    what: str
    state: State
    detail: str
    fix: str = ""


def check_lines(check: Check, width: int | None) -> list[str]:
    """Wrap a check into lines of ``width`` characters. None means one line for the detail and one for the fix."""
    import textwrap

    head = f"{MARKS[check.state]}  {check.what:<11}  "
    given = [(head, check.detail), (" " * len(head) + "fix: ", check.fix)]
    lines = []
    for first, text in given:
        if text and width is None:
            lines.append(first + text)
        elif text and width is not None:
            wrapper = textwrap.TextWrapper(width, initial_indent=first, subsequent_indent=" " * len(head))
            wrapper.break_long_words = wrapper.break_on_hyphens = False
            lines += wrapper.wrap(text)
    return lines


# ---- Files of the home folder -------------------------------------------------------------------------

FILES_NAMED = 3


def check_files() -> Iterator[Check]:
    """Yield the measurement files in the home folder that cannot be read, with the reasons."""
    from tilegym_db.store.broken_files import broken_files

    for found in broken_files(home()):
        yield from files_checks(found)


def check_shared_tables() -> Iterator[Check]:
    """Yield the shared resolver tables: how many are used here, and why the others are not. Nothing without tables."""
    from tilegym_db.published.shared_tables import damage_of, tables_in

    tables = [replace(table, problem=damage_of(table)) for table in tables_in(home())]
    used = [table for table in tables if table.counts]
    if used:
        named = sorted({f"{table.gpu} from {table.address} ({table.standing})" for table in used})
        yield Check("team tables", "ok", f"{len(used)} serve here: {', '.join(named)}")
    for table in tables:
        if not table.counts:
            why, _, fix = table.why_unused.partition(". ")
            yield Check("team tables", "problem" if table.problem else "missing", why, fix)


def files_checks(found: BrokenFiles) -> Iterator[Check]:
    """Yield the problems of the files in one folder."""
    whole = [fault for fault in found.broken if fault.line == 0]
    lines = [fault for fault in found.broken if fault.line != 0]
    if whole:
        which = "is broken and left out" if len(whole) == 1 else "are broken and left out"
        fix = f"repair these files, or move them out of {found.folder}; all other files are still used"
        yield Check(found.what, "problem", f"{len(whole)} of {found.read} {found.what} {which}: {_named(whole)}", fix)
    if lines:
        which = "has lines that are left out" if len(lines) == 1 else "have lines that are left out"
        fix = "repair or delete these lines, and leave the files where they are: their other lines are still used"
        yield Check(found.what, "problem", f"{len(lines)} of {found.read} {found.what} {which}: {_named(lines)}", fix)
    if found.cut_off:
        count = "line was" if len(found.cut_off) == 1 else "lines were"
        detail = f"{len(found.cut_off)} {count} cut off when the writer was killed: {_named(found.cut_off)}"
        fix = "nothing to do: all other lines are used, and the same command repeats what is lost"
        yield Check(found.what, "missing", detail, fix)
    if found.read < found.files:
        left = f"{found.files - found.read} older {found.what} were not read, because that takes too long here"
        yield Check(found.what, "ok", f"{left}; tilegym-db data ingest --rebuild reads them all")


def _named(faults: Sequence[RejectedLine]) -> str:
    parts = [f"{fault.path}: {fault.reason}" if fault.line == 0 else str(fault) for fault in faults[:FILES_NAMED]]
    if len(faults) > FILES_NAMED:
        parts.append(f"and {len(faults) - FILES_NAMED} more")
    return "; ".join(part.rstrip(".") for part in parts)


# ---- Calibrate ----------------------------------------------------------------------------------------

# Operand dtypes of the products that are not named after them. Products in float32 use no tensor cores.
_OPERANDS = {"tf32": "float32", "float32": None}


@app.command("calibrate")
def calibrate_command(
    gpu: Annotated[str, typer.Option(help="auto, or the GPU in this machine (h100, h200, ...).")] = "auto",
    as_json: AsJson = False,
) -> None:
    """Measure the peaks of this GPU, which are the basis of speed-of-light ratios, and store them.

    Takes a few seconds. Existing traces keep their ratios.
    """
    from tilegym_db.measurement.machine import refuse_absent_gpu, select_machine

    refuse_absent_gpu(gpu)
    from tilegym_db.measurement.calibrate import calibrate
    from tilegym_db.store.side_files import save_peaks

    peaks = calibrate(select_machine(gpu))
    path = save_peaks(peaks)
    if as_json:
        print_json(peaks.to_dict())
    else:
        print_peaks(peaks)
    note(f"stored in {path}")


def print_peaks(peaks: GpuPeaks) -> None:
    """Print one row per peak: the measured value, the spread of the rounds, the driver's maximum, and the method."""
    from tilegym_db.records.roofline import product_ceiling

    bus = peaks.memory_ceiling_bytes_per_s / 1e12
    rows: list[tuple[str, Measured, float, float | None]] = [("copy, TB/s", peaks.copy_bytes_per_s, 1e12, bus)]
    if peaks.read_bytes_per_s is not None:
        rows.append(("read, TB/s", peaks.read_bytes_per_s, 1e12, bus))
    for dtype, measured in peaks.flops.items():
        ceiling = product_ceiling(_OPERANDS.get(dtype, dtype), peaks)
        rows.append((f"{dtype} product, TFLOP/s", measured, 1e12, ceiling / 1e12 if ceiling else None))
    rows.append(("launch, us", peaks.launch_us, 1, None))
    rows.append(("no launch, us", peaks.no_launch_us, 1, None))
    typer.echo(f"{peaks.gpu_name} ({peaks.gpu}, {peaks.sm}), driver {peaks.driver}, CUDA {peaks.cuda}")
    print_table(
        least=("at most",),
        prose=("how",),
        columns=("peak", "measured", "spread", "at most", "how"),
        rows=[
            (name, measured.value / unit, f"{measured.spread:.1%}", ceiling, measured.how)
            for name, measured, unit, ceiling in rows
        ],
    )


# ---- Versions ------------------------------------------------------------------------------------------

PACKAGES = ("duckdb", "torch", "triton", "tilelang", "cuda-tile", "nvidia-cuda-tileiras", "transformers")


@app.command("versions")
def versions_command(
    as_json: AsJson = False,
    as_csv: AsCsv = False,
    as_parquet: AsParquet = False,
    as_arrow: AsArrow = False,
    output: OutputFile = None,
) -> None:
    """Print the version of tilegym-db and of the packages it works with."""
    form = chosen_form(as_json, as_csv, as_parquet, as_arrow, output)
    versions = installed_versions()
    if form.kind == "json":
        write_json(form, versions)
        return
    if not form.is_table:
        write_records(form, [{"package": name, "version": found} for name, found in versions.items()])
        return
    for name, found in versions.items():
        typer.echo(f"{name} {found or 'not installed'}")


def installed_versions() -> dict[str, str | None]:
    """Return the version of each distribution, None if it is not installed. Nothing is imported."""
    import importlib.metadata
    import platform

    import tilegym_db

    versions: dict[str, str | None] = {"tilegym-db": tilegym_db.__version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


@app.callback()
@with_form
def command(
    context: typer.Context,
    form: Form = TABLE,
) -> None:
    """Report what works here and how to fix what does not. Exit status 1 if anything is broken."""
    if context.invoked_subcommand is not None:
        return
    found = [check for checks in CHECKS for check in _results(checks)]
    if not form.is_table:
        write_records(form, [dataclasses.asdict(check) for check in found])
    else:
        for check in found:
            for line in check_lines(check, None if form.wide else table_width()):
                print_line(line)
        broken = sum(check.state == "problem" for check in found)
        note(f"{broken} problem{'' if broken == 1 else 's'}")
    if any(check.state == "problem" for check in found):
        raise typer.Exit(1)


def _results(checks: Callable[[], Iterator[Check]]) -> Iterator[Check]:
    """Yield the results of one group of checks. A package that cannot be imported is a result, and ends only that group."""
    try:
        yield from checks()
    except Exception as error:
        broken = broken_package(error)
        if broken is None:
            raise
        yield Check("packages", "problem", str(broken))  # the message has the fix


def check_python() -> Iterator[Check]:
    """Yield the interpreter and this package."""
    import tilegym_db

    yield Check("python", "ok", f"{sys.version.split()[0]} at {sys.executable}")
    yield Check("tilegym-db", "ok", tilegym_db.__version__)
    if is_disabled():
        yield Check("serving", "missing", f"{DISABLED} everywhere", f"unset {DISABLE_VARIABLE}, and start again")


def check_gpu() -> Iterator[Check]:
    """Yield the GPUs that the driver reports, and PyTorch's ability to use them."""
    import importlib.util

    from tilegym_db.driver import driver_files, driver_gpus

    names = driver_gpus() if driver_files() else ()
    if importlib.util.find_spec("torch") is None:
        yield Check("torch", "missing", "PyTorch is not installed", "pip install 'tilegym-db[torch]'")
        yield Check("gpu", "ok" if names else "missing", ", ".join(names) or "the driver reports no GPU")
        return
    version, cuda = torch_build()
    yield Check("torch", "ok", f"{version} ({f'CUDA {cuda}' if cuda else 'CPU only'})")
    yield gpu_check(names, usable_gpus() if driver_files() else (), cuda)


def torch_build() -> tuple[str, str | None]:
    """Return PyTorch's version and the CUDA version it was built for (None: CPU), without importing it if possible.

    The import takes seconds and is useless without a driver.
    """
    import importlib.util
    import runpy
    from pathlib import Path

    spec = importlib.util.find_spec("torch")
    stated = Path(spec.origin).with_name("version.py") if spec is not None and spec.origin else None
    if stated is not None and stated.is_file():
        found = runpy.run_path(str(stated))
        if "cuda" in found and "__version__" in found:
            return str(found["__version__"]), found["cuda"]
    import torch

    return torch.__version__, torch.version.cuda


def gpu_check(driver: tuple[str, ...], usable: tuple[str, ...], torch_cuda: str | None) -> Check:
    """Compare the GPUs that the driver reports with those that PyTorch can use."""
    if usable:
        return Check("gpu", "ok", ", ".join(usable))
    if not driver:
        detail = "no GPU here; queries, authoring, checks and compilation work without one"
        return Check("gpu", "missing", detail, "run 'tilegym-db bench' on a machine with an NVIDIA GPU")
    if torch_cuda is None:
        fix = "install a CUDA build of PyTorch for this driver (see pytorch.org, 'Get started')"
        return Check("gpu", "problem", f"{', '.join(driver)} is here, but this PyTorch is a CPU build", fix)
    detail = f"{', '.join(driver)} is here, but PyTorch (CUDA {torch_cuda}) cannot use it"
    fix = "update the driver, or install a PyTorch built for its CUDA version; nvidia-smi shows it"
    return Check("gpu", "problem", detail, fix)


def usable_gpus() -> tuple[str, ...]:
    """Return the CUDA devices of PyTorch, with their slugs and targets."""
    import torch

    from tilegym_db.records.hardware import gpu_slug

    if not torch.cuda.is_available():
        return ()
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return tuple(f"{item.name} ({gpu_slug(item.name)}, sm_{item.major}{item.minor})" for item in devices)


def check_toolchains() -> Iterator[Check]:
    """Yield the state of every tile language's compiler."""
    from tilegym_db.backends.toolchains import toolchain_status
    from tilegym_db.records import TILE_LANGUAGES

    for language in TILE_LANGUAGES:
        status = toolchain_status(language)
        if status.available:
            yield Check(language, "ok", f"{status.version} {status.detail}".strip())
        else:
            # Installed but unusable is a problem. Not installed is a choice.
            yield Check(language, "problem" if status.version else "missing", status.detail, status.fix)


def check_fit() -> Iterator[Check]:
    """Yield installed packages with incompatible versions."""
    from tilegym_db.backends.toolchains import installed_versions, misfits, torch_requirements

    for misfit in misfits(installed_versions(), torch_requirements()):
        yield Check("packages", "problem", misfit.detail, misfit.fix)


def check_libraries() -> Iterator[Check]:
    """Yield the libraries for model integration and bulk ingest."""
    import importlib.metadata

    for name, extra in (("transformers", "transformers"), ("pyarrow", "arrow")):
        try:
            yield Check(name, "ok", importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield Check(name, "missing", "not installed", f"pip install 'tilegym-db[{extra}]'")


def check_catalog() -> Iterator[Check]:
    """Yield the state of the catalog and every broken record."""
    from tilegym_db.catalog import Catalog

    catalog = Catalog.default(warns=False)
    where = ", ".join(str(root) for root in catalog.roots)
    try:
        counts = f"{len(catalog.definitions)} definitions, {len(catalog.solutions)} solutions, "
        counts += f"{sum(1 for _ in catalog.all_workloads())} workloads"
    except TilegymDBError as error:
        yield Check("catalog", "problem", str(error), "tilegym-db check lists every finding")
        return
    for broken in catalog.broken():
        yield Check("catalog", "problem", broken.reason, "tilegym-db check lists every finding")
    yield Check("catalog", "ok", f"{counts} in {where}")
    yield Check("new records", "ok", f"are written to {catalog.write_root}")


def check_store() -> Iterator[Check]:
    """Yield the state of the database: it must open, accept writes and answer."""
    from tilegym_db.store.opening import open_store
    from tilegym_db.store.queries.measured import count_traces, measured_gpus

    try:
        with open_store() as store:
            counted, measured = count_traces(store), ", ".join(measured_gpus(store)) or "none"
            yield Check("store", "ok", f"{store.path}: {counted} traces; GPUs with verified ones: {measured}")
    except TilegymDBError as error:
        yield Check("store", "problem", str(error))  # the message has the fix


def check_sandbox() -> Iterator[Check]:
    """Yield the state of the sandbox, and which kernels are verified if workers cannot be confined."""
    import importlib.util

    from tilegym_db.sandbox.confine import MINIMAL_VERSION, landlock_version

    if importlib.util.find_spec("torch") is None:
        return
    if landlock_version() >= MINIMAL_VERSION:
        yield Check(
            "sandbox", "ok", "the kernel has Landlock, so workers can be confined unless a container forbids it"
        )
        return
    from tilegym_db.sandbox.worker import best_level

    yield sandbox_check(best_level("cpu"))


def sandbox_check(found: Sandbox) -> Check:
    """Report the sandbox of a machine without Landlock."""
    from tilegym_db.verification.worker_handle import MIN_SANDBOX_LEVEL

    if found.level >= MIN_SANDBOX_LEVEL:
        return Check("sandbox", "ok", found.description)
    detail = (
        "workers cannot be confined here, so only kernels that the package ships are verified, and only you can use them "
        f"({found.description})"
    )
    fix = "your own kernels need Linux 6.2 or newer with Landlock enabled, and not gVisor"
    return Check("sandbox", "missing", f"{detail}; {'; '.join(found.reasons)}", fix)


def check_peaks() -> Iterator[Check]:
    """Yield the calibration of this GPU; nothing on a machine without one."""
    import importlib.util

    from tilegym_db.measurement.machine import select_machine
    from tilegym_db.store.opening import open_store
    from tilegym_db.store.queries.measured import read_peaks

    if importlib.util.find_spec("torch") is None:
        return
    machine = select_machine("auto")
    if not machine.is_gpu:
        return
    try:
        with open_store(read_only=True) as store:
            known = read_peaks(store, machine.gpu)
            own = read_peaks(store, machine.gpu, gpu_name=machine.gpu_name, driver=machine.driver, own=True)
    except TilegymDBError as error:
        yield Check("peaks", "problem", str(error))
        return
    yield peaks_check(own, known, machine.gpu, machine.driver)


def peaks_check(own: GpuPeaks | None, known: GpuPeaks | None, gpu: str, driver: str) -> Check:
    """Report the calibration of a GPU; without one, the values from elsewhere and how to calibrate.

    ``own`` was measured on this machine with this device and driver, ``known`` under other conditions.
    """
    if own is not None:
        return Check("peaks", "ok", f"{gpu} calibrated {_spelled_peaks(own)}")
    fix = "tilegym-db doctor calibrate (bench does this once, automatically)"
    if known is None:
        return Check("peaks", "missing", f"{gpu} is not calibrated, so traces have no speed of light", fix)
    detail = f"{gpu} is not calibrated with driver {driver}; known: {_spelled_peaks(known)}"
    return Check("peaks", "missing", detail, fix)


def _spelled_peaks(peaks: GpuPeaks) -> str:
    parts = [f"copy {peaks.copy_bytes_per_s.value / 1e12:.3g} TB/s"]
    if "bfloat16" in peaks.flops:
        parts.append(f"bfloat16 product {peaks.flops['bfloat16'].value / 1e12:.3g} TFLOP/s")
    when = f"{peaks.timestamp:%Y-%m-%d}, {peaks.gpu_name}, driver {peaks.driver or 'unknown'}"
    return f"{when}: {', '.join(parts)}, launch {peaks.launch_us.value:.3g} us by {peaks.timer}"


CHECKS: tuple[Callable[[], Iterator[Check]], ...] = (
    check_python,
    check_gpu,
    check_toolchains,
    check_fit,
    check_libraries,
    check_catalog,
    check_store,
    check_files,
    check_shared_tables,
    check_sandbox,
    check_peaks,
)
