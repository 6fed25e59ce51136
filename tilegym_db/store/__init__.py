"""The store: journals of traces, the DuckDB file ingested from them, its SQL, and the published snapshot.

``journal`` appends one fsynced line per trace; ``ingest`` brings journals into DuckDB; ``connection.open_store`` opens
the file; ``queries`` answers the package's own questions, ``sql`` the user's; ``publish`` writes what the resolver
reads. Nothing is imported here, and DuckDB only once a store is opened, so that importing this costs nothing.
"""
