"""Data sets of other projects, kept beside the catalog and apart from it: exact bytes by content, and what they hold.

``<home>/imported/objects/<ab>/<sha256>`` holds every file once; ``<home>/imported/<dialect>/<name>/manifest.json`` names
the files of one data set and the file of its parsed records. The manifest is written last and in one step, so that a
data set is there whole or not at all. Nothing here is part of the catalog: no ranking, table or model reads it.
"""

from __future__ import annotations

from tilegym_db.store.imported.keeping import (
    add_data_set,
    check_addable,
    check_name,
    forget_data_set,
    import_lock,
)
from tilegym_db.store.imported.manifests import data_set, data_sets
from tilegym_db.store.imported.objects import (
    DataSet,
    Kind,
    Refusal,
    StoredFile,
    StoredRecord,
    counted,
    object_path,
    paths_of,
)
from tilegym_db.store.imported.synced import (
    sync_imported,
)
from tilegym_db.store.input_files import imported_folder, imported_manifests

__all__ = [
    "DataSet",
    "Kind",
    "Refusal",
    "StoredFile",
    "StoredRecord",
    "add_data_set",
    "check_addable",
    "check_name",
    "counted",
    "data_set",
    "data_sets",
    "forget_data_set",
    "import_lock",
    "imported_folder",
    "imported_manifests",
    "object_path",
    "paths_of",
    "sync_imported",
]
