"""Several devices at work: choice of the devices, distribution of the work, and one supervisor process per device."""

from __future__ import annotations
