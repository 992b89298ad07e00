"""Options of a described run, each declared once, and the run that a model and options make."""
