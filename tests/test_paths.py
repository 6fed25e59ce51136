from __future__ import annotations

from pathlib import Path

import pytest
from raising import raises

from tilegym_db.errors import UsageError
from tilegym_db.paths import home


@pytest.mark.parametrize(
    ("value", "code"),
    [
        ("", "home_empty"),
        ("  ", "home_empty"),
        ("relative/folder", "home_relative"),
        (".", "home_relative"),
        ("/tmp/a\nb", "home_unprintable"),
        ("/tmp/\x1b[31m", "home_unprintable"),
        ("/tmp/" + "x" * 5000, "home_unreachable"),
        ("~no-user-of-this-name/x", "home_user_unknown"),
        ("{}/file", "home_not_folder"),
        ("{}/file/below", "home_unreachable"),
        ("{}/loop", "home_unreachable"),
        ("{}/loop/below", "home_unreachable"),
        ("/dev/null", "home_not_folder"),
        ("{}/dangling", "home_dangling"),
        ("{}/dangling/below", "home_dangling"),
    ],
)
def test_a_home_that_cannot_be_one_is_one_clear_error(
    value: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "dangling").symlink_to("nowhere")
    monkeypatch.setenv("TILEGYM_DB_HOME", value.format(tmp_path))
    with raises(UsageError, code) as raised:
        home()
    assert str(raised.value).startswith("TILEGYM_DB_HOME=")
    assert len(str(raised.value)) < 600
    assert "\n" not in str(raised.value)


def test_a_home_that_is_not_there_yet_is_fine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TILEGYM_DB_HOME", str(tmp_path / "new" / "home"))
    assert home() == tmp_path / "new" / "home"
