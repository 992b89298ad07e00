"""Why a described run needs its bytes and seconds, and what would change them. Nothing here needs torch."""
