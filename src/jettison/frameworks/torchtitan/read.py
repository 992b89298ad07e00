"""A torchtitan run from its TOML."""

from __future__ import annotations

from jettison.frameworks.run_file import Keys


def read(keys: Keys) -> None:
    """What is no table: the model, and the shards that the other axes leave."""
    name, flavor = keys.text("model.name"), keys.text("model.flavor")
    keys.model = f"{name}-{flavor}"
    degree = keys.whole("parallelism.data_parallel_shard_degree", -1)
    shards = keys.share("tp", "pp", "cp") if degree == -1 else degree
    keys.give("dp", shards, "parallelism.data_parallel_shard_degree")
    keys.get("activation_checkpoint.selective_ac_option")
