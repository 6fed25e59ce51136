"""The command line. Commands parse options, call one function and print; :mod:`tilegym_db.cli.commands` lists them."""
