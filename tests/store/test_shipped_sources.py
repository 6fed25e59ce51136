"""Which sources count as shipped."""

from __future__ import annotations

import pytest

from tilegym_db.catalog import Catalog
from tilegym_db.paths import shipped_root
from tilegym_db.published.snapshot import shipped_keys, source_key


@pytest.mark.parametrize("name", ["rms_norm", "moe_experts"])
def test_kernels_of_the_package_are_and_a_changed_digest_is_not(name):
    catalog = Catalog((shipped_root(),))
    digest = catalog.definition(name).digest
    solutions = catalog.solutions_for(name)
    keys = shipped_keys((name, "no_such_definition"))
    listed = [files for files in solutions if source_key(digest, files.digest) in keys]
    assert len(listed) == len(keys) > 0.75 * len(solutions), "run: python tools/write_checked_records.py"
    assert source_key(digest, "0" * 64) not in keys
    assert source_key("0" * 64, solutions[0].digest) not in keys
