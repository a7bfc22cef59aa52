"""What the scheduler means, and the tools that check it.

LAWS is every rule, declared once; a `Law` has an id, a name, a statement, an origin, a kind and a predicate.
"""

from spec.laws import BY_ID, LAWS, Kind, Law, Tier

__all__ = ["BY_ID", "LAWS", "Kind", "Law", "Tier"]
