"""What a whole run needs, from its spec alone: layers x layout x recompute x step. Nothing here needs torch."""
