"""Policies to check, and to begin one's own from: see docs/policies.md."""
