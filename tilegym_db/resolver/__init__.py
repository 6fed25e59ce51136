"""The verified kernel for a call: from a published table, by a pure decision, behind the cache of a call site."""

from tilegym_db.published.entries import Candidate, Entry
from tilegym_db.published.table import ResolverTable, load_table
from tilegym_db.records.call import Request
from tilegym_db.resolver.decide import Decision, Evidence, Rejection, decide, not_in_compiled_code
from tilegym_db.resolver.resolve import (
    Resolved,
    call_site,
    decide_request,
    make_request,
    resolve,
    unavailable_languages,
)

__all__ = [
    "Candidate",
    "Decision",
    "Entry",
    "Evidence",
    "Rejection",
    "Request",
    "Resolved",
    "ResolverTable",
    "call_site",
    "decide",
    "decide_request",
    "load_table",
    "make_request",
    "not_in_compiled_code",
    "resolve",
    "unavailable_languages",
]
