"""Drafts of Definitions and Solutions, and Workloads from a model's config."""
