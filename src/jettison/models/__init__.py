"""Makes a module and a batch of what was asked for: a configuration, a factory, the models of record."""
