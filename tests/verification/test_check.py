"""``tilegym_db.check``: the findings of the command line as a list."""

from __future__ import annotations

import json

import pytest

import tilegym_db
from tilegym_db.catalog import Catalog
from tilegym_db.errors import NotFoundError, UsageError


def test_findings_are_lines_of_text(row_scale):
    (finding,) = tilegym_db.check("row_scale")
    assert finding.startswith("row_scale: self_test: the record has none")
    assert tilegym_db.check(static=True) == []


def test_a_draft_outside_of_the_catalog_is_checked_by_its_path(row_scale, tmp_path):
    path = row_scale / "definitions" / "elementwise" / "row_scale.json"
    draft = tmp_path / "draft.json"
    draft.write_text(json.dumps({**json.loads(path.read_text()), "axes": {}}))
    assert any("undeclared axis" in finding for finding in tilegym_db.check(draft))


def test_another_catalog_can_be_checked(row_scale):
    catalog = Catalog((row_scale,), warns=False)
    assert tilegym_db.check("row_scale_stock", catalog=catalog) == []


def test_an_unknown_name_is_an_error(row_scale):
    with pytest.raises(NotFoundError, match="'row_scale'"):
        tilegym_db.check("row_scal")
    with pytest.raises(UsageError, match="names of records"):
        tilegym_db.check(3)
