"""The verified kernel for a call: from a published table, by a pure decision, behind the cache of a call site."""
