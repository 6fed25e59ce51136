"""Reports: one offline HTML page of the whole database, run comparisons, and a weekly summary in Markdown."""
