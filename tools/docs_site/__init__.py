"""The documentation site: pages of ``docs/``, pages made from the catalog and the package, and Sphinx over both."""
