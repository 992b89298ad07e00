"""The report room: how results are shown, and the documents that say so. Nothing here needs torch."""
