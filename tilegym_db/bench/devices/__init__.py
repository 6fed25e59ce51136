"""Several devices of one host at work: which ones, who measures what, and a supervisor process for each."""

from __future__ import annotations
