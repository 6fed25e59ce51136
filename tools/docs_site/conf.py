"""Sphinx' configuration. ``tools/build_site.py`` calls it; nothing here asks a network for anything."""

project = "tilegym-db"
author = "The tilegym-db authors"
copyright = author
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["README.md"]

html_theme = "furo"
html_title = "tilegym-db"
html_static_path: list[str] = []
html_copy_source = False
html_domain_indices = False  # a list of Python modules, which no page links to
html_show_sphinx = False

myst_heading_anchors = 4
myst_number_code_blocks: list[str] = []
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
