from __future__ import annotations

import json
import subprocess
import sys

import pytest
from raising import raises

from tilegym_db.cli.commands import COMMANDS, every_command, load_command
from tilegym_db.cli.kit.options import (
    complete_definition,
    complete_gpu,
    complete_language,
    complete_statement,
    parse_axes,
    parse_pairs,
    parse_scalars,
)
from tilegym_db.errors import UsageError
from tilegym_db.resolver.explain import next_step
from tilegym_db.store.asking import INTERNAL_VIEWS, public_views

READERS = ("list", "show", "best", "compare", "explain", "sql", "doctor", "doctor versions", "task status")
NO_RECORDS = ("report", "report weekly", "task prompt", "mcp", "demo")
"""A page, a text and a server: what they print or write is for one kind of reader."""
WRITERS = sorted({*every_command()} - {*READERS, *NO_RECORDS})


@pytest.mark.parametrize("texts", [["M=4,N=8"], ["M=4", "N=8"], [" M = 4 ,N=8"]])
def test_sizes_are_spelled_in_one_way_everywhere(texts):
    assert parse_axes(texts) == {"M": 4, "N": 8}


def test_a_comma_within_brackets_is_part_of_a_value():
    assert parse_pairs("--layout", ["x=strided(N + 8, 1),y=row_contiguous"]) == {
        "x": "strided(N + 8, 1)",
        "y": "row_contiguous",
    }


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ('M="4"', "number_not_whole"),
        ("M=true", "number_not_whole"),
        (f"M={1 << 63}", "number_too_large"),
        ("M=1e3", "number_not_whole"),
        ("M=1_000", "number_not_whole"),
        ("M=\N{ARABIC-INDIC DIGIT FOUR}", "number_not_whole"),
        ("M=", "pair_invalid"),
    ],
)
def test_what_is_no_size_is_refused(text, code):
    with raises(UsageError, code, "--axes"):
        parse_axes([text])


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("eps=nan", "number_not_finite"),
        ("eps=inf", "number_not_finite"),
        ("eps=-inf", "number_not_finite"),
        (f"eps={1 << 70}", "number_too_large"),
    ],
)
def test_a_scalar_that_no_kernel_can_be_given_is_refused(text, code):
    with raises(UsageError, code, "--scalar: eps"):
        parse_scalars([text])


def test_every_view_of_a_store_is_public_or_internal(cli, row_scale):
    made = cli("sql", "SELECT view_name FROM duckdb_views() WHERE NOT internal", "--json").json()
    assert {row["view_name"] for row in made} == {*public_views(), *INTERNAL_VIEWS}
    assert all(view in load_command("sql").help for view in public_views())


def test_values_are_completed(row_scale):
    assert complete_definition("row") == ["row_scale"]
    assert complete_language("t") == ["tilelang", "triton"] or set(complete_language("t")) == {"tilelang", "triton"}
    assert "h200" in complete_gpu("h2")
    assert complete_statement("SELECT * FROM lea") == ["SELECT * FROM leaderboard"]


@pytest.mark.parametrize("name", READERS)
def test_every_reader_has_every_format(name):
    assert {"--json", "--csv", "--parquet", "--arrow", "--output"} <= options_of(name)


@pytest.mark.parametrize("name", WRITERS)
def test_what_is_no_reader_has_json(name):
    assert "--json" in options_of(name)


def options_of(name):
    return {text for item in every_command()[name].params for text in item.opts}


def test_a_result_goes_into_a_file_in_every_format(cli, row_scale, tmp_path):
    import pyarrow.ipc
    import pyarrow.parquet

    assert cli("list", "--json", "-o", tmp_path / "a.json").out == ""
    assert json.loads((tmp_path / "a.json").read_text())[0]["definition"] == "row_scale"
    assert cli("list", "--parquet", "-o", tmp_path / "a.parquet").code == 0
    assert pyarrow.parquet.read_table(tmp_path / "a.parquet")["definition"].to_pylist() == ["row_scale"]
    assert cli("sql", "SELECT 1::TINYINT AS a", "--arrow", "-o", tmp_path / "a.arrow").code == 0
    with pyarrow.ipc.open_stream(tmp_path / "a.arrow") as stream:
        assert str(stream.read_all().schema.field("a").type) == "int8"


@pytest.mark.parametrize("place", ["/dev/full", "/dev/null", "."])
def test_what_is_no_file_is_never_replaced(cli, row_scale, place):
    result = cli("list", "--json", "-o", place)
    assert (result.code, result.cause) == (2, "output_not_file")


def test_texts_of_options_are_read_without_pydantic():
    code = (
        "import sys\nfrom tilegym_db.cli.commands import load_command\n"
        "context = load_command('best').make_context('best', ['rms_norm', '--gpu', 'h200', '--axes', 'M=1', '--axes', 'N=2'])\n"
        "assert 'pydantic' not in sys.modules\n"
        "given = {name: context.params[name] for name in ('name', 'gpu', 'axes', 'limit', 'rank')}\n"
        "assert given == {'name': 'rms_norm', 'gpu': 'h200', 'axes': ['M=1', 'N=2'], 'limit': None, 'rank': False}, given\n"
        "assert load_command('best').make_context('best', ['--limit', '3']).params['limit'] == 3\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_command_prints_wider_than_80_columns(cli, row_scale, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for arguments in (
        ["list"],
        ["list", "--solutions"],
        ["list", "--workloads"],
        ["doctor"],
        ["sql", "FROM definitions"],
    ):
        result = cli(*arguments)
        wide = [line for line in result.out.splitlines() if len(line) > 80]
        assert [line for line in wide if "/" not in line] == [], (
            arguments
        )  # a path is never cut: it is there to be copied
        assert not wide or arguments == ["doctor"]


@pytest.mark.parametrize(
    ("asked", "here", "measured", "waiting", "expected"),
    [
        ("h200", "h200", [], 0, "tilegym-db bench rms_norm --gpu h200 --verify"),
        ("h200", "h200", [], 2, "tilegym-db verify rms_norm"),
        ("h100", "h100-sxm", [], 0, "--gpu h100-sxm --verify"),
        ("h200", "cpu", ["h200"], 0, "has no GPU, so nothing can be measured for h200 here. Kernels measured on h200"),
        ("b200", "cpu", ["h200"], 0, "on a machine with b200: tilegym-db bench rms_norm --gpu b200"),
        ("b200", "h200", [], 0, "This machine has a h200"),
        ("b200", "cpu", [], 0, "tilegym-db compile rms_norm"),
    ],
)
def test_the_next_step_is_possible_on_this_machine(asked, here, measured, waiting, expected):
    step = next_step("rms_norm", asked, here, measured, waiting)
    assert expected in step
    assert ("bench" in step and "on a machine with" not in step) == (here.startswith(asked) and not waiting)


def test_measuring_is_not_proposed_without_pytorch():
    assert "pip install 'tilegym-db[torch]'" in next_step("rms_norm", "cpu", "cpu", can_bench=False)


def test_best_is_narrowed_by_shape_language_and_number(cli, row_scale, journal_traces):
    journal_traces(3.0)
    assert cli("data", "ingest").code == 0
    (row,) = cli("best", "--axes", "M=4", "--language", "python", "--limit", "1", "--json").json()
    assert (row["workload_uuid"] is not None, row["scalars_key"]) == (True, "factor=0.5")
    assert cli("best", "--axes", "M=5").code == 3
    assert "in triton" in cli("best", "--language", "triton").err
    assert cli("best", "--limit", "0").code == 2


def test_reference_of_commands_has_the_help_of_each():
    from docs_site.command_page import reference_text

    text = reference_text()
    assert all(f"\n## {panel}\n" in text for panel in COMMANDS)
    for name in {*every_command(), *(name for panel in COMMANDS.values() for name in panel)}:
        _, _, section = text.partition(f"\n### {name}\n\n```text\n")
        assert section.startswith(f"Usage: tilegym-db {name}")
        assert "--help" in section.partition("\n```\n")[0]


@pytest.mark.parametrize(
    "line",
    [
        ("task", "recommend", ".", "--gpu", "h200", "--prompt-tokens", "0"),
        ("task", "recommend", ".", "--gpu", "h200", "--prompt-tokens", "-5"),
        ("debug", "reproduce", "row_scale_stock", "--gpu", "cpu", "--offset", "-1"),
        ("debug", "reproduce", "row_scale_stock", "--gpu", "cpu", "--offset", "99999999999"),
        ("tune", "row_scale", "--gpu", "cpu", "--budget", "inf"),
        ("tune", "row_scale", "--gpu", "cpu", "--budget", "nan"),
        ("tune", "row_scale", "--gpu", "cpu", "--budget", "0"),
        ("model", "bench", ".", "--gpu", "cpu", "--rounds", "99999999999999999999"),
        ("fit", ".", "--gpu", "cpu", "--rounds", "99999999999999999999"),
        ("task", "auto", ".", "--gpu", "cpu", "--rounds", "99999999999999999999"),
        ("task", "recommend", ".", "--gpu", "h200", "--prompt-tokens", "1048577"),
        ("task", "from-model", ".", "--gpu", "cpu", "--prompt-tokens", "0"),
        ("task", "from-model", ".", "--gpu", "cpu", "--prompt-tokens", "1048577"),
        ("task", "auto", ".", "--gpu", "cpu", "--prompt-tokens", "0"),
        ("task", "auto", ".", "--gpu", "cpu", "--prompt-tokens", "1048577"),
    ],
)
def test_a_number_that_cannot_be_meant_is_refused_by_its_option(cli, row_scale, line):
    result = cli(*line)
    assert result.code == 2
    assert f"Invalid value for '{line[-2]}'" in result.err


@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    ("content", "fact"),
    [
        (b"", "config.json"),
        (b"[]", "model_type"),
        (b'{"model_type": ""}', "model_type"),
        (b"\xff\xfe{", "UTF-16"),
    ],
)
def test_invalid_config_is_refused_before_any_large_import(content, fact, tmp_path):
    file = tmp_path / "config.json"
    file.write_bytes(content)
    program = """
import sys
from tilegym_db.cli.app import app
from tilegym_db.errors import UsageError
for words in (["task", "recommend", sys.argv[1], "--gpu", "h200"], ["fit", sys.argv[1]], ["model", "bench", sys.argv[1]]):
    try:
        app(words)
    except UsageError as error:
        print(error)
print({"torch", "transformers"} & set(sys.modules))
"""
    found = subprocess.run([sys.executable, "-c", program, str(file)], capture_output=True, text=True, check=True)
    assert sum(fact in line for line in found.stdout.splitlines()) == 3
    assert found.stdout.endswith("set()\n")
