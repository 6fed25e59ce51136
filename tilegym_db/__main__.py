"""``python -m tilegym_db``: the command line."""

from tilegym_db.cli.app import main

if __name__ == "__main__":
    main()
