from __future__ import annotations

import pytest

GOOD = """import triton
import triton.language as tl


@triton.jit
def scale_row(x, weight, factor, out, N: tl.constexpr, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    inside = columns < N
    row = tl.program_id(0).to(tl.int64) * N
    value = tl.load(x + row + columns, mask=inside) * tl.load(weight + columns, mask=inside) * factor
    tl.store(out + row + columns, value, mask=inside)


def run(x, weight, factor, out):
    rows, width = x.shape
    scale_row[(rows,)](x, weight, factor, out, width, triton.next_power_of_2(width))
"""
BROKEN = GOOD.replace("columns < N", "columns < N_MISSPELT")


@pytest.fixture
def add(cli, row_scale, tmp_path):
    def add_source(text: str) -> None:
        path = tmp_path / "row.py"
        path.write_text(text)
        assert cli("add-solution", path, "-d", "row_scale", "-l", "triton", "--name", "mine").code == 0

    return add_source


# Three compilers; test_aot.py compiles with one daily.
@pytest.mark.turn("tilegym_db/cli/compile.py", "tilegym_db/backends/")
def test_a_kernel_compiles_for_gpus_that_are_not_here(cli, add):
    add(GOOD)
    result = cli("compile", "--target", "sm_90a", "--target", "sm_80", "--json")
    assert result.code == 0
    outcomes = result.json()
    assert [(item["target"], item["dtypes"]["T"], item["status"]) for item in outcomes] == [
        (target, dtype, "compiled") for target in ("sm_80", "sm_90") for dtype in ("float32", "bfloat16")
    ]
    assert all(kernel["bytes"] > 0 for item in outcomes for kernel in item["kernels"])
    assert "2/2" in cli("compile", "mine").out


@pytest.mark.turn("tilegym_db/cli/compile.py", "tilegym_db/backends/aot.py")  # compiles
def test_kernel_that_does_not_compile_is_a_finding_with_reason(cli, add):
    add(BROKEN)
    result = cli("compile", "row_scale")
    assert result.code == 1
    assert "0/2" in result.out
    assert "N_MISSPELT" in result.out
    assert "2 of 2 failed" in result.err


def test_what_the_static_scan_refuses_is_never_built(cli, row_scale, add, tmp_path):
    add(GOOD)
    (source,) = row_scale.glob("solutions/*/row_scale/mine/row.py")
    marker = tmp_path / "it-ran"
    source.write_text(f"import pathlib\npathlib.Path({str(marker)!r}).touch()\n{GOOD}")
    result = cli("compile", "mine", "--target", "sm_90", "--json")
    assert result.code == 1
    outcomes = result.json()
    assert [(outcome["status"], outcome["kernels"]) for outcome in outcomes] == [("failed", [])] * 2
    reason = "refused by the static scan: row.py:1: hard: imports-files: imports pathlib"
    assert all(outcome["log"].startswith(reason) for outcome in outcomes)
    assert not marker.exists()
    assert "refused by the static scan" in cli("compile", "mine").out.replace("\n", " ")


def test_a_missing_toolchain_names_the_extra_to_install(cli, add, monkeypatch):
    from tilegym_db.backends import toolchains

    add(GOOD)
    monkeypatch.setattr(toolchains, "_is_installed", lambda package: package != "triton")
    result = cli("compile", "mine")
    assert result.code == 1
    assert "toolchain-missing" in result.out
    assert "pip install 'tilegym-db[triton]'" in result.out


@pytest.mark.parametrize(
    ("arguments", "cause", "fact"),
    [
        (["mien"], "name_unknown", "'mine'"),
        (["--target", "sm_70"], "", "'sm_70'"),
        (["--language", "tritom"], "", "'triton'"),
        (["--language", "cutile"], "nothing_selected", "tilegym-db list --solutions"),
        (["--workload", "stage:nowhere"], "", "mine"),
        (["row_scale_stock"], "nothing_selected", "tilegym-db list --solutions"),
    ],
)
def test_a_selection_of_nothing_is_wrong_usage(arguments, cause, fact, cli, add):
    add(GOOD)
    result = cli("compile", *arguments)
    assert result.code == 2
    assert cause in ("", result.cause)
    assert fact in result.err
