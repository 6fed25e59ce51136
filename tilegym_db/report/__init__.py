"""What people look at: one page of the whole database that needs no network, and the short form of a week in Markdown."""
