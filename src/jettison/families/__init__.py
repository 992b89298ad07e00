"""Model families as data: `models` has one TOML file a ``model_type``, `blocks` has the tables that several share."""
