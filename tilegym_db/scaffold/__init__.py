"""Drafts of Definitions and Solutions, and Workloads from a model's config."""

from tilegym_db.scaffold.definition_draft import draft_definition, is_draft, read_definition_file
from tilegym_db.scaffold.model_config import MappedWorkloads, workloads_from_config
from tilegym_db.scaffold.solution_draft import draft_solution, stock_solution_files

__all__ = [
    "MappedWorkloads",
    "draft_definition",
    "draft_solution",
    "is_draft",
    "read_definition_file",
    "stock_solution_files",
    "workloads_from_config",
]
