"""Other people's training loops under a budget, one line each. Their libraries are imported when they are used."""
