"""The export room: a plan in the words of other people's trainers."""
