"""The cost room: what work takes, in seconds, by a hardware file. Measured op times come from `jettison.dryrun`."""
