"""``import``, ``export``, ``list --origin`` and ``compare-foreign`` as a user types them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from foreign_sets import (
    DEFINITION,
    SOLUTION,
    TRACES,
    WORKLOADS,
    Tree,
    definition,
    lines,
    of_workload,
    solution,
    trace,
    workload,
)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    # A foreign Definition that has the name of a shipped one, and a time that none of ours could beat.
    impossible = {**trace(), "definition": "rms_norm"}
    impossible["evaluation"]["performance"] = {"latency_ms": 1e-6, "reference_latency_ms": 1.0, "speedup_factor": 1e6}
    call = {**of_workload(workload()), "definition": "rms_norm"}
    return (
        Tree(tmp_path / "theirs")
        .write(DEFINITION, definition(name="rms_norm", op_type="norm"))
        .write(SOLUTION, {**solution(), "definition": "rms_norm"})
        .write(WORKLOADS, lines(call))
        .write(TRACES, lines(impossible))
    )


def test_import_says_what_came_in_and_what_did_not(
    cli: Callable[..., Any], tree: Tree, home: Path, tmp_path: Path
) -> None:
    tree.write("definitions/scale/broken.json", "{")
    result = cli("data", "import", tree.root)
    assert result.code == 1
    assert "flashinfer-trace:theirs" in result.out
    assert "definitions/scale/broken.json: is not valid JSON" in result.out
    again = cli("data", "import", tree.root, "--json").json()
    assert again["changed"] is False
    assert again["imported"] == {"definition": 1, "solution": 1, "trace": 1, "workload": 1}
    assert [item["file"] for item in again["refused"]] == ["definitions/scale/broken.json"]
    rows = cli("list", "--origin", "theirs", "--json").json()
    assert [(row["origin"], row["definition"], row["traces"]) for row in rows] == [
        ("flashinfer-trace:theirs", "rms_norm", 1)
    ]
    assert cli("data", "export", "flashinfer", tmp_path / "out", "--origin", "theirs").code == 0
    written = Tree(tmp_path / "out").bytes()
    assert written == {path: content for path, content in tree.bytes().items() if "broken" not in path}
    assert cli("data", "import", "flashinfer-trace:theirs", "--remove").code == 0
    assert cli("list", "--origin", "theirs").code == 2


def test_foreign_measurements_are_shown_and_rank_nothing(cli: Callable[..., Any], tree: Tree, home: Path) -> None:
    before = {
        view: cli("sql", f"SELECT count(*) AS n FROM {view}", "--json").json()
        for view in ("best", "traces", "solutions")
    }
    assert cli("data", "import", tree.root).code == 0
    after = {
        view: cli("sql", f"SELECT count(*) AS n FROM {view}", "--json").json()
        for view in ("best", "traces", "solutions")
    }
    assert after == before
    query = "SELECT origin, definition, latency_us, is_foreign FROM imported_traces"
    (row,) = cli("sql", query, "--json").json()
    assert (row["origin"], row["definition"], row["is_foreign"]) == ("flashinfer-trace:theirs", "rms_norm", True)
    assert row["latency_us"] == pytest.approx(1e-3)
    (shipped,) = cli("sql", "SELECT op_type, version FROM definitions WHERE name = 'rms_norm'", "--json").json()
    assert shipped["version"] != ""
    compared = cli("data", "compare", "theirs", "--json").json()
    assert compared["summary"] == {"not judged here": 1}
    assert compared["pairs"][0]["foreign"] is True
    columns = [set(cli("data", "compare", "theirs", *wide).out.split("\n")[0].split()) for wide in ((), ("--wide",))]
    assert "ours" in columns[1] - columns[0]  # nothing was judged here, so the column is empty


def test_export_writes_one_family(cli: Callable[..., Any], home: Path, tmp_path: Path) -> None:
    report = cli(
        "data", "export", "flashinfer", tmp_path / "out", "--op-type", "softmax", "--gpu", "h200", "--json"
    ).json()
    assert report["exported"]["definition"] > 0
    assert {path.name for path in (tmp_path / "out" / "definitions").iterdir()} == {"softmax"}
    assert cli("data", "export", "flashinfer", tmp_path / "out").code == 2
    assert cli("data", "export", "parquet", tmp_path / "other").code == 2
    assert not (tmp_path / "other").exists()


@pytest.mark.turn("tilegym_db/interchange/")  # test_blobs.py draws them daily
def test_export_draws_what_may_not_be_drawn_there(cli: Callable[..., Any], home: Path, tmp_path: Path) -> None:
    def exported(name: str, *options: object) -> dict[str, int]:
        return cli("data", "export", "flashinfer", tmp_path / name, "--op-type", "engram", "--json", *options).json()[
            "exported"
        ]

    none = exported("none", "--blobs", "none")
    assert none["blob"] == 0
    assert not (tmp_path / "none" / "blob").exists()
    some = exported("some", "--blobs", "0.05", "--largest-blob", "0.01")
    assert 0 < some["blob"] == some["workload"] - none["workload"]
    files = list((tmp_path / "some").glob("blob/**/*.safetensors"))
    assert len(files) == some["blob"]
    assert sum(file.stat().st_size for file in files) <= 0.05 * 2**20
    assert cli("data", "import", tmp_path / "some").code == 0


@pytest.mark.parametrize(
    ("options", "cause", "fact"),
    [
        (["--blobs", "some"], "size_invalid", "1048576 or 'none'"),
        (["--blobs", "0"], "size_invalid", "--blobs"),
        (["--blobs", "-1"], "size_invalid", "--blobs"),
        (["--blobs", "nan"], "size_invalid", "--blobs"),
        (["--blobs", "inf"], "size_invalid", "--blobs"),
        (["--blobs", ""], "size_invalid", "--blobs"),
        (["--largest-blob", "none"], "size_invalid", "1048576"),
        (["--largest-blob", "1e9"], "size_invalid", "--largest-blob"),
        (["--blobs", "none", "--largest-blob", "1"], "options_clash", "--blobs none"),
        (["--blobs", "1", "--origin", "theirs"], "option_unfit", "--blobs"),
    ],
)
def test_invalid_limit_of_blobs_is_refused(
    cli: Callable[..., Any], home: Path, tmp_path: Path, options: list[str], cause: str, fact: str
) -> None:
    result = cli("data", "export", "flashinfer", tmp_path / "out", *options)
    assert (result.code, result.cause) == (2, cause)
    assert fact in " ".join(result.err.split())
    assert not (tmp_path / "out").exists()


def test_an_export_without_torch_says_what_blobs_need(
    cli: Callable[..., Any], home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.util

    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "safetensors" else find_spec(name, *rest)
    )
    given = ("data", "export", "flashinfer", tmp_path / "out", "--op-type", "engram")
    result = cli(*given, "--blobs", "1")
    assert result.code == 2
    assert "pip install safetensors" in " ".join(result.err.split())
    result = cli(*given)
    assert result.code == 0
    assert "no blobs: drawing blobs needs safetensors" in result.err
    assert not (tmp_path / "out" / "blob").exists()


def test_an_empty_name_is_refused_and_not_replaced_by_another(cli: Callable[..., Any], tree: Tree, home: Path) -> None:
    result = cli("data", "import", tree.root, "--name", "")
    assert result.code == 2
    assert cli("list", "--origin", "all", "--json").json() == []


def test_comparison_with_nothing_to_compare_says_what_is_missing(
    cli: Callable[..., Any], tree: Tree, home: Path
) -> None:
    for path in (WORKLOADS, TRACES):
        (tree.root / path).unlink()
    cli("data", "import", tree.root)
    for more in ((), ("--run", "--gpu", "cpu")):
        assert "has no workloads, so nothing can be run." in cli("data", "compare", "theirs", *more).err
    tree.write(WORKLOADS, lines({**of_workload(workload()), "definition": "rms_norm"}))
    cli("data", "import", tree.root, "--replace")
    assert "Try: tilegym-db data compare flashinfer-trace:theirs --run" in cli("data", "compare", "theirs").err
    (tree.root / SOLUTION).unlink()
    cli("data", "import", tree.root, "--replace")
    assert "has no solutions of rms_norm" in cli("data", "compare", "theirs", "rms_norm").err


def test_listing_goes_on_past_a_data_set_that_cannot_be_read(
    cli: Callable[..., Any], tree: Tree, home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cli("data", "import", tree.root)
    cli("data", "import", tree.root, "--name", "other")
    (path,) = (home / "imported" / "flashinfer-trace" / "theirs").glob("records-*.jsonl")
    path.write_text("{")
    rows = cli("list", "--origin", "all", "--json").json()
    assert [row["origin"] for row in rows] == ["flashinfer-trace:other"]
    assert [record.message.partition(" left")[0] for record in caplog.records] == ["flashinfer-trace:theirs"]
    assert cli("data", "import", "theirs", "--remove").code == 0


@pytest.mark.parametrize("form", ["flashinfer", "original", "draft"])
def test_folder_that_is_not_empty_is_refused_before_an_export(form, cli, row_scale, tmp_path, monkeypatch):
    from tilegym_db.interchange import flashinfer_export

    def built(*_: object) -> None:
        raise AssertionError("the export was put together")

    monkeypatch.setattr(flashinfer_export, "build_export", built)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("the user's own")
    result = cli("data", "export", form, tmp_path / "taken")
    assert (result.code, "exists and is not empty" in result.err) == (2, True)
    assert [path.name for path in (tmp_path / "taken").iterdir()] == ["file"]


@pytest.mark.parametrize("kind", ["an empty file", "a link to nothing", "a device"])
def test_what_is_no_folder_is_not_called_one_that_is_not_empty(kind, cli, row_scale, tmp_path):
    place = Path("/dev/null") if kind == "a device" else tmp_path / "place"
    if kind == "an empty file":
        place.touch()
    elif kind == "a link to nothing":
        place.symlink_to("nowhere")
    result = cli("data", "export", "flashinfer", place)
    assert (result.code, str(place) in result.err) == (2, True)


def test_empty_working_directory_is_exported_into(cli, row_scale, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    result = cli("data", "export", "flashinfer", ".")
    assert result.code == 0
    assert (tmp_path / "empty" / "tilegym_db" / "export.json").is_file()
    assert 'enter it again: cd "$PWD"' in result.err


def test_empty_folder_is_exported_into_and_a_link_to_one_is_kept(cli, row_scale, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    assert cli("data", "export", "flashinfer", tmp_path / "link").code == 0
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "empty" / "tilegym_db" / "export.json").is_file()
    assert not list(tmp_path.glob(".*"))
