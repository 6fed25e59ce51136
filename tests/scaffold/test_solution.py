from __future__ import annotations

import dataclasses

import pytest
from shipped_records import CATALOG

from tilegym_db.catalog import Catalog
from tilegym_db.records import LANGUAGES, TILE_LANGUAGES, Solution
from tilegym_db.records.call import Call, scalars_with_axes
from tilegym_db.records.solution import signature_problem
from tilegym_db.sandbox.scan import hard_findings, scan_sources
from tilegym_db.scaffold.solution_draft import draft_solution, stock_solution_files

DEFINITIONS = sorted(CATALOG.definitions)


@pytest.mark.records("name")
@pytest.mark.parametrize("name", DEFINITIONS)
@pytest.mark.parametrize("language", LANGUAGES)
def test_draft_for_any_operator_is_valid_callable_and_scan_clean(name, language):
    definition = Catalog.default().definition(name)
    files = draft_solution(definition, language, "mine", "me")
    record = Solution.from_json(files["solution.json"])
    record.check_against(definition)
    assert record.spec.language == language
    assert f"tilegym-db dev kernel.py -d {name}" in files["kernel.py"]
    assert signature_problem(record, files["kernel.py"], definition) is None
    found = hard_findings(scan_sources(record, {"kernel.py": files["kernel.py"].encode()}))
    assert [str(finding) for finding in found] == []


@pytest.mark.records("name")
@pytest.mark.parametrize("name", DEFINITIONS)
def test_the_stock_code_made_from_a_reference_is_right(name):
    from tilegym_db.records.workload import Case
    from tilegym_db.verification.admission import smallest_axes, trial_scalars
    from tilegym_db.verification.inputs import draw_inputs
    from tilegym_db.verification.oracle import name_outputs, run_reference

    definition = Catalog.default().definition(name)
    record, sources = stock_solution_files(definition, "me")
    record.check_against(definition)
    assert (record.spec.role, record.spec.provides) == ("baseline", "stock")
    axes = smallest_axes(definition)
    assert axes is not None
    dtypes = {key: choices[0] for key, choices in definition.dtypes.items()}
    case = Case(
        Call(definition.name, axes, dtypes, scalars=scalars_with_axes(definition, trial_scalars(definition), axes))
    )
    inputs = draw_inputs(definition, case, "cpu")
    wanted = run_reference(definition, inputs)
    scope: dict[str, object] = {}
    exec(sources["kernel.py"], scope)
    given = {key: value.clone() if hasattr(value, "clone") else value for key, value in inputs.items()}
    found = name_outputs(definition, scope["run"](*given.values()), given, name)  # type: ignore[operator]
    for key, value in wanted.items():
        assert (value.float() - found[key].float()).abs().nan_to_num().max() == 0


DRAFTS = ("rms_norm", "gemm")
"""Of an operator whose draft copies an input, and of one that has no input of the output's shape."""


@pytest.mark.slow
@pytest.mark.sweep(len(TILE_LANGUAGES))
@pytest.mark.parametrize("language", TILE_LANGUAGES)
def test_a_draft_in_a_tile_language_compiles(language, tmp_path):
    from tilegym_db.backends.aot import compile_many
    from tilegym_db.catalog import SolutionFiles
    from tilegym_db.cli.compile import select_jobs

    catalog, jobs = Catalog.default(), []
    for name in DRAFTS:
        folder = tmp_path / name
        folder.mkdir()
        for file, text in draft_solution(catalog.definition(name), language, f"{name}_draft", "me").items():
            (folder / file).write_text(text)
        shipped = select_jobs(catalog, (f"{name}_{language}",), ("sm_90",), None, None)
        jobs.append(dataclasses.replace(shipped[0], solution=SolutionFiles.read(folder)))
    results = compile_many(jobs, processes=1)
    assert [result.status for result in results] == ["compiled"] * len(DRAFTS), results
