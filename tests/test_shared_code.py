"""Code that Solutions share: ``solutions/_lib/<language>/``, part of their sources and digests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from raising import raises

from tilegym_db.backends.load import load_entry, unload_entry
from tilegym_db.catalog import Catalog
from tilegym_db.catalog.writers import add_solution
from tilegym_db.errors import RecordError, SolutionError
from tilegym_db.paths import use_root
from tilegym_db.records import Solution
from tilegym_db.sandbox.scan import hard_findings, scan_sources

KERNEL = "from _lib.python.sizes import N\n\n\ndef run(x, out):\n    out.copy_(x * N)\n"
DEFINITION = {
    "schema_version": 1,
    "name": "triple", "version": "1.0.0", "op_type": "elementwise", "description": "x times three.",
    "axes": {"M": {"type": "var"}},
    "inputs": {"x": {"shape": ["M"], "dtype": "float32"}},
    "outputs": {"out": {"shape": ["M"], "dtype": "float32"}},
    "reference": "# Source: https://example.org/op.py#L1\n\ndef run(x):\n    return x * 3\n",
}  # fmt: skip


def record(**changes: Any) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "name": "triple_python", "definition": "triple", "author": "a", "description": "d",
        "spec": {"language": "python", "destination_passing_style": True},
        "sources": [{"path": "kernel.py"}, {"path": "_lib/python/sizes.py"}],
        **changes,
    }  # fmt: skip


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "shipped"
    for name, text in {
        "definitions/elementwise/triple.json": json.dumps(DEFINITION),
        "solutions/_lib/python/sizes.py": "N = 3\n",
        "solutions/elementwise/triple_python/kernel.py": KERNEL,
        "solutions/elementwise/triple_python/triple_python.json": json.dumps(record()),
    }.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_kernel_imports_shared_code(root: Path) -> None:
    catalog = Catalog((root,))
    solution = catalog.solution("triple_python")
    assert not catalog.broken()
    assert load_entry(solution).__globals__["N"] == 3
    assert solution.folders == (solution.folder, root / "solutions/_lib/python")
    assert hard_findings(scan_sources(solution.record, solution.sources)) == ()


def test_edit_of_shared_code_changes_the_digest(root: Path) -> None:
    before = Catalog((root,)).solution("triple_python")
    (root / "solutions/_lib/python/sizes.py").write_text("N = 4\n")
    assert Catalog((root,)).solution("triple_python").digest != before.digest
    unload_entry(before)
    with raises(SolutionError, "source_changed", "_lib/python/sizes.py"):
        load_entry(before)


def test_undeclared_shared_code_cannot_be_imported(root: Path) -> None:
    path = root / "solutions/elementwise/triple_python/triple_python.json"
    path.write_text(json.dumps(record(sources=[{"path": "kernel.py"}])))
    with raises(SolutionError, "import_failed", "_lib"):
        load_entry(Catalog((root,)).solution("triple_python"))


def test_missing_shared_code_is_named(root: Path) -> None:
    (root / "solutions/_lib/python/sizes.py").unlink()
    (broken,) = Catalog((root,)).broken()
    assert "_lib/python/sizes.py" in broken.reason


def test_link_out_of_the_shared_code_is_refused(root: Path, tmp_path: Path) -> None:
    path = root / "solutions/_lib/python/sizes.py"
    path.unlink()
    (tmp_path / "elsewhere.py").write_text("N = 3\n")
    path.symlink_to(tmp_path / "elsewhere.py")
    (broken,) = Catalog((root,)).broken()
    assert "is a link out of the folder" in broken.reason


def test_added_solution_uses_the_shared_code_of_the_package(root: Path, tmp_path: Path) -> None:
    overlay = tmp_path / "overlay"
    with use_root(root):
        catalog = Catalog((root, overlay))
        sources = dict(catalog.solution("triple_python").sources)
        folder = add_solution(catalog, Solution.from_dict(record(name="mine")), sources, overlay)
        assert sorted(path.name for path in folder.iterdir()) == ["kernel.py", "solution.json"]
        added = Catalog((root, overlay)).solution("mine")
        assert load_entry(added).__globals__["N"] == 3
        edited = sources | {"_lib/python/sizes.py": b"N = 5\n"}
        folder = add_solution(catalog, Solution.from_dict(record(name="other")), edited, overlay)
        assert (folder / "_lib/python/sizes.py").read_text() == "N = 5\n"
        assert load_entry(Catalog((root, overlay)).solution("other")).__globals__["N"] == 5


def test_path_out_of_the_shared_code_is_refused() -> None:
    with raises(RecordError, "source_path_outside"):
        Solution.from_dict(record(sources=[{"path": "kernel.py"}, {"path": "_lib/../x.py"}]))
