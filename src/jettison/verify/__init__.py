"""Did it hold? A plan, or what a model does by itself, beside the plain model: bits, bytes and seconds."""
