"""Writes the files of ``tilegym-db new``, where nothing is yet."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def write_new(folder: Path, files: Mapping[str, str]) -> None:
    """Write a folder's files; nothing that exists is touched.

    Raises:
        ConflictError: the folder exists and is not empty.
        StoreError: it cannot be written.
    """
    from tilegym_db.errors import ConflictError
    from tilegym_db.files import write_exclusively, write_folder

    if os.path.lexists(folder) and (not folder.is_dir() or any(folder.iterdir())):
        raise ConflictError(
            f"{folder} exists already, and nothing was written. Choose another folder with --output.",
            code="folder_exists",
        )
    contents = {name: _encoded(text) for name, text in files.items()}
    if not os.path.lexists(folder):
        write_folder(folder, contents)  # whole, or not at all
        return
    for name, content in contents.items():  # an empty folder, which may be the working directory
        write_exclusively(folder / name, content)


def write_new_file(path: Path, text: str) -> None:
    """Write a file that does not exist yet.

    Raises:
        ConflictError: it exists.
        StoreError: it cannot be written.
    """
    from tilegym_db.files import write_exclusively

    write_exclusively(path, _encoded(text))


def _encoded(text: str) -> bytes:
    """UTF-8, whatever the locale.

    Raises:
        UsageError: an argument held bytes that are no UTF-8.
    """
    from tilegym_db.errors import UsageError

    try:
        return text.encode()
    except UnicodeEncodeError as error:
        near = text[max(0, error.start - 20) : error.start]
        raise UsageError(
            f"an argument is not UTF-8, after {near!r}. Write it in UTF-8; nothing was written.", code="text_encoding"
        ) from None
