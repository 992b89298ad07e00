"""What a user asks of a described run: options, each declared once, and the run that a model and options are."""
