"""The store: journals of traces, the DuckDB file filled from them, its SQL, and the published snapshot.

``journal`` appends one fsynced line per trace. ``connection`` opens the DuckDB file and ingests journals into it.
``queries`` has the package's SQL, and ``publish`` writes the resolver's input. This module
imports nothing, and DuckDB is imported only when a store is opened.
"""
