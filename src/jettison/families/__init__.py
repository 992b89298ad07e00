"""Model families as data: `models` has one TOML file a ``model_type``, `blocks` what several of them share."""
