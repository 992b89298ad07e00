"""What every room uses: units, errors, element types, progress, files, processes."""
