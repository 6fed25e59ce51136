"""The package's queries of the store: one named text and one function each, with bound parameters.

Each module covers one subject. The queries use the views of ``views.sql``; ``statements`` has the SQL that creates and fills
the tables.
"""
