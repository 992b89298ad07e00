"""One file a target, or a family of them that say the same things."""
