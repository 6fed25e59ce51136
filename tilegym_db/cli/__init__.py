"""The command line: parse, call once, print. One file a command; :mod:`tilegym_db.cli.app` lists them."""
