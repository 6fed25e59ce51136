"""Who may be served by a pass, by how its worker was confined."""

from __future__ import annotations

import pytest

from tilegym_db.published.checked import why_not_believed

NOT_SHIPPED, ONLY_HERE = "its source is not one that the package ships", "and not others"


@pytest.mark.parametrize(
    ("level", "is_shipped", "origin", "audience", "reason"),
    [
        (3, False, "local", "others", None),
        (2, False, "foreign", "others", None),
        (1, True, "local", "this user", None),
        (1, False, "local", "this user", NOT_SHIPPED),
        (1, False, "local", "others", NOT_SHIPPED),
        (1, True, "local", "others", ONLY_HERE),
        (1, True, "foreign", "this user", ONLY_HERE),
        (1, True, "shipped", "this user", ONLY_HERE),
        (0, True, "local", "this user", "could have reached what judged it"),
    ],
)
def test_a_pass_without_confinement_serves_its_own_user_where_the_package_ships_the_source(
    level, is_shipped, origin, audience, reason
):
    found = why_not_believed(level, is_shipped=is_shipped, origin=origin, audience=audience)
    assert (found is None) if reason is None else (found is not None and found.startswith(f"sandbox level {level}: "))
    assert reason is None or reason in found
