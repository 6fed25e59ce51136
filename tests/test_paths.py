from __future__ import annotations

from pathlib import Path

import pytest

from tilegym_db.errors import UsageError
from tilegym_db.paths import home


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("", "it is empty"),
        ("  ", "it is empty"),
        ("relative/folder", "it is relative"),
        (".", "it is relative"),
        ("/tmp/a\nb", "it holds a character that cannot be printed"),
        ("/tmp/\x1b[31m", "it holds a character that cannot be printed"),
        ("/tmp/" + "x" * 5000, "File name too long"),
        ("~no-user-of-this-name/x", "Could not determine home directory"),
        ("{}/file", "it is no folder"),
        ("{}/file/below", "Not a directory"),
        ("{}/loop", "Too many levels of symbolic links"),
        ("{}/loop/below", "Too many levels of symbolic links"),
        ("/dev/null", "it is no folder"),
        ("{}/dangling", "is a link to 'nowhere', which does not exist"),
        ("{}/dangling/below", "is a link to 'nowhere', which does not exist"),
    ],
)
def test_a_home_that_cannot_be_one_is_one_clear_error(
    value: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "dangling").symlink_to("nowhere")
    monkeypatch.setenv("TILEGYM_DB_HOME", value.format(tmp_path))
    with pytest.raises(UsageError, match=problem) as raised:
        home()
    assert str(raised.value).startswith("TILEGYM_DB_HOME=")
    assert len(str(raised.value)) < 600
    assert "\n" not in str(raised.value)


def test_a_home_that_is_not_there_yet_is_fine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TILEGYM_DB_HOME", str(tmp_path / "new" / "home"))
    assert home() == tmp_path / "new" / "home"
